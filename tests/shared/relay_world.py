"""Sites with real keys, and relays on loopback between them: honest ones, and one that lies."""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from dispfl.peer.membership.address import Address, RelayAddress
from dispfl.peer.membership.identity import Identity, client_context, der, server_context
from dispfl.peer.run_relay import RelaySettings
from dispfl.peer.transport.base import Handler
from dispfl.peer.transport.http import Limits
from dispfl.peer.transport.https import HttpsTransport
from dispfl.peer.transport.relay_client import RelayClient
from dispfl.peer.transport.relay_server import Relay, RelayLimits

LOCAL = "127.0.0.1"
QUICK = Limits(backoff=0.01, shutdown_grace=0.1)
MAX_BODY = 50_000_000


class Lie(StrEnum):
    """What a hostile relay does with bytes of a called site."""

    SWAP = "connects a caller with another site"
    FLIP = "changes a bit"
    DROP = "leaves bytes out"
    REPLAY = "sends bytes twice"
    STALL = "passes nothing on"


class HostileRelay(Relay):
    """A relay that records what it sees, and lies about what it passes on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seen = bytearray()
        self.lie: Lie | None = None
        self.lie_after = 0
        """Bytes that it passes on honestly before."""
        self.lies = 0
        self.instead = ""
        """Fingerprint of the site with which callers are connected instead."""

    async def _called(self, fingerprint: str) -> Any:
        if self.lie == Lie.SWAP:
            self.lies += 1
            fingerprint = self.instead
        return await super()._called(fingerprint)

    async def _deliver(self, content: bytes, end: Any) -> None:
        self.seen += content
        if self.lie is None or len(self.seen) < self.lie_after:
            await super()._deliver(content, end)
            return
        self.lies += 1
        if self.lie == Lie.STALL:
            return
        if self.lie == Lie.FLIP:
            content = content[:-1] + bytes([content[-1] ^ 1])
        elif self.lie == Lie.DROP:
            content = content[: len(content) // 2]
        elif self.lie == Lie.REPLAY:
            content += content
        await super()._deliver(content, end)


@dataclass
class RelayWorld:
    """Sites that accept each other, and that have no address but relays."""

    folder: Path
    identities: dict[str, Identity]
    relays: list[RelayAddress]
    """The relays of every site, in the order in which they are tried."""
    addresses: dict[str, tuple[str, int]]
    """Addresses of sites that have one."""

    @classmethod
    def of(cls, folder: Path, *names: str) -> "RelayWorld":
        """Make sites with these names."""
        return cls(folder, {name: Identity.make(name) for name in names}, [], {})

    def admitted(self) -> dict[str, str]:
        """The sites' names by their fingerprints."""
        return {identity.fingerprint: name for name, identity in self.identities.items()}

    @contextlib.asynccontextmanager
    async def relay(
        self,
        kind: type[Relay] = Relay,
        *,
        port: int = 0,
        admitted: Mapping[str, str] | None = None,
        limits: RelayLimits | None = None,
    ) -> AsyncIterator[Any]:
        """Run a relay with a certificate of its own, which all sites use."""
        settings = RelaySettings("127.0.0.1:1", [], identity=self.folder / "relay")
        fingerprint = settings.address().fingerprint
        members = self.admitted() if admitted is None else admitted
        relay = kind(Address(LOCAL, 1), settings.certificate(), members, limits or RelayLimits())
        await relay.open(Address(LOCAL, port))
        relay.name = Address(LOCAL, relay.port)
        address = RelayAddress(LOCAL, relay.port, fingerprint)
        if address not in self.relays:
            self.relays.append(address)
        try:
            yield relay
        finally:
            await relay.close()

    @contextlib.asynccontextmanager
    async def site(
        self,
        name: str,
        handler: Handler | None = None,
        *,
        limits: Limits = QUICK,
        own: Sequence[RelayAddress] | None = None,
        listen: tuple[str, int] | None = None,
        **changes: Any,
    ) -> AsyncIterator[HttpsTransport]:
        """The transport of a site; with a handler it waits for calls at its relays."""
        identity = self.identities[name]
        others = [other for other in self.identities.values() if other is not identity]
        names = {der(other.certificate): other.name for other in others}
        pinned = [other.certificate for other in others]
        relays = RelayClient(
            identity,
            limits,
            relays_of=lambda peer: tuple(self.relays),
            fingerprint_of=lambda peer: self.identities[peer].fingerprint,
            own=self.relays if own is None else own,
            **changes,
        )
        transport = HttpsTransport(
            name,
            listen,
            client=client_context(identity, pinned),
            server=server_context(identity, pinned),
            identify=lambda leaf, issuers: names.get(leaf),
            address=self.addresses.get,
            max_request=lambda kind: MAX_BODY,
            max_response=lambda kind: MAX_BODY,
            limits=limits,
            relays=relays,
        )
        if handler is not None:
            await transport.serve(handler)
        try:
            yield transport
        finally:
            await transport.close()
