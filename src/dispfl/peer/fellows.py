"""The members of a federation as a node needs them: the site's list, and what its model makes of their densities."""

from collections.abc import Collection, Sequence
from functools import lru_cache

from dispfl.core.layout import Layout
from dispfl.costs.estimate import kept_weights
from dispfl.methods.base import Method
from dispfl.peer.site import Site
from dispfl.peer.transport import JSON, Refused


class Fellows:
    """`dispfl.peer.context.Members` for a site."""

    def __init__(self, site: Site, method: Method, layout: Layout, density: float) -> None:
        self._site = site
        self._density = density
        self._kept = lru_cache(maxsize=64)(lambda density: kept_weights(method, layout, density))

    def roster(self, t: int) -> list[str]:
        """Everyone who takes part in round t, ourselves included, sorted."""
        return self._site.members.roster(t)

    def kept(self, name: str) -> Sequence[int] | None:
        """How many weights a member's masks keep in each layer; None if it has announced no density yet."""
        member = self._site.members.get(name)
        return None if member is None or member.density is None else self._kept(member.density)

    def join(self, t: int) -> None:
        """Announce that we take part from round t on."""
        self._site.members.announce(self._site.identity, self._site.where.address, self._density, t)

    def records(self) -> list[JSON]:
        """What members say of themselves, signed."""
        return self._site.members.records()

    def merge(self, records: JSON) -> Collection[str]:
        """Take in what others know. A record is an offence of whoever passes it on if it cannot have believed it."""
        return self._site.members.merge(records).forged

    def who(self, certificate: bytes, issuers: Sequence[bytes]) -> str | None:
        """The member that shows this certificate; None for a stranger."""
        member = self._site.members.recognise(certificate, issuers)
        if member is not None and member.state == "revoked":
            raise Refused("revoked", f"{member.name} was revoked by {self._site.name}.")
        return member.name if member else None

    def address(self, name: str) -> tuple[str, int]:
        """Where a member listens."""
        member = self._site.members.get(name)
        if member is None or member.state != "accepted":
            raise Refused("not-a-member", f"{name} is not on {self._site.name}'s list.")
        return member.address
