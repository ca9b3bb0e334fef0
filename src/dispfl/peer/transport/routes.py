"""The ways to one member: its address, and its relays."""

import asyncio
from collections.abc import Iterable

from dispfl.peer.membership.address import Address, RelayAddress

Route = Address | RelayAddress
AVOID_SECONDS = 300.0
"""How long a way that has failed is tried after the others."""


class Routes:
    """Which way to one member to try first."""

    def __init__(self) -> None:
        self.current: Route | None = None
        """The way of the last connection."""
        self._failed: dict[Route, float] = {}

    def ordered(self, address: Address | None, relays: Iterable[RelayAddress]) -> list[Route]:
        """The direct way first, then the relays; those that failed lately last."""
        routes: list[Route] = [] if address is None else [address]
        routes += relays
        now = asyncio.get_running_loop().time()

        def last_failure(route: Route) -> float:
            failed = self._failed.get(route)
            return failed if failed is not None and now - failed < AVOID_SECONDS else 0.0

        return sorted(routes, key=last_failure)

    def note_failure(self, route: Route | None) -> None:
        """Try another way first from now on."""
        if route is not None:
            self._failed[route] = asyncio.get_running_loop().time()

    def note_success(self, route: Route) -> None:
        """Note that a connection was made this way."""
        self.current = route
        self._failed.pop(route, None)


def route_text(route: Route | None) -> str | None:
    """`direct`, or `wss://relay.example.org:443`; None if it is not known."""
    if route is None:
        return None
    return f"wss://{route.address}" if isinstance(route, RelayAddress) else "direct"
