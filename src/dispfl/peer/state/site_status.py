"""The status of a site: its members, its roster, and what its node last wrote."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dispfl.peer.membership.address import reach_text
from dispfl.peer.membership.member_list import Fork, Member, State
from dispfl.peer.membership.roster import Roster
from dispfl.peer.state.status import FINISHED, FINISHED_ALONE

if TYPE_CHECKING:
    from dispfl.peer.site import Site


@dataclass(frozen=True)
class MemberStatus:
    """Another site, as this one knows it."""

    name: str
    state: State
    """`pending`, `accepted` or `revoked`."""
    by: Literal["hand", "roster"]
    """Who decided the state: this site's operator, or the administrators who signed the roster."""
    address: str | None
    """Its address, its relays and its outbox."""
    fingerprint: str
    density: float | None
    """The share of weights that it keeps; None before its first record."""
    first_round: int
    """The first round that it takes part in."""
    serial: int
    """The number of its newest record."""

    @classmethod
    def of(cls, member: Member) -> "MemberStatus":
        """Describe an entry of the member list."""
        return cls(
            member.name,
            member.state,
            member.by,
            reach_text(member.address, member.relays, member.outbox) or None,
            member.fingerprint,
            member.density,
            member.first_round,
            member.serial,
        )


@dataclass(frozen=True)
class RosterStatus:
    """The roster that a site has accepted."""

    version: int
    digest: str
    fingerprint: str
    """The fingerprint of its administrators."""
    signed_by: list[str]
    members: int
    """The number of sites on it."""
    forks: list[Fork]
    """Other rosters of the same administrators that are refused: with the same version, or too far
    ahead."""

    @classmethod
    def of(cls, roster: Roster, forks: Iterable[Fork]) -> "RosterStatus":
        """Describe a roster."""
        return cls(
            roster.version,
            roster.digest,
            roster.fingerprint,
            sorted(roster.signatures),
            len(roster.invites),
            list(forks),
        )


@dataclass(frozen=True)
class SiteStatus:
    """A site, its members, and the status that its node last wrote."""

    name: str
    federation: str
    listen: str | None
    address: str
    """Where other sites reach it."""
    fingerprint: str
    members: list[MemberStatus]
    roster: RosterStatus | None
    spec_version: int
    """The newest version of the federation's spec that this site has."""
    proposals: list[str]
    """Proposed changes of the spec, and who has not signed them yet."""
    problems: list[str]
    """A sentence for each entry of the members file that cannot be used."""
    running: bool
    known: list[dict[str, Any]]
    """Members that only other sites have accepted: name, address and fingerprint."""
    node: dict[str, Any] | None
    """The node's own report, as in `run/status.json`; None if it never ran."""

    @classmethod
    def of(cls, site: "Site") -> "SiteStatus":
        """Return a site's members and what its node last reported."""
        member_list = site.members.file.current()
        roster = None
        if member_list.roster is not None:
            roster = RosterStatus.of(member_list.roster, member_list.forks)
        node = site.status()
        return cls(
            name=site.name,
            federation=site.info.federation,
            listen=site.info.listen,
            address=site.info.reach,
            fingerprint=site.identity.fingerprint,
            members=[MemberStatus.of(member) for member in site.members.all()],
            roster=roster,
            spec_version=site.spec_changes.current().version,
            proposals=site.spec_changes.describe_proposals(),
            problems=site.members.file.problems,
            running=site.is_running(),
            known=(node or {}).get("known") or [],
            node=node,
        )

    @property
    def state(self) -> str:
        """What the node does: `starting`, `fetching`, `waiting` for the others, `training`,
        `serving`, `finished`, `finished alone`, `stopped`; `not started`, or `not running` after a
        crash."""
        if self.node is None:
            return "starting" if self.running else "not started"
        state = str(self.node.get("state", "state unknown"))
        if not self.running and state not in (FINISHED, FINISHED_ALONE, "stopped"):
            return "not running"  # it was killed before it could write another state
        return state

    @property
    def round(self) -> int:
        """The node's current round."""
        return int((self.node or {}).get("round", 0))

    @property
    def score(self) -> float | None:
        """The main metric of the site's model on its own test data, when last evaluated."""
        score: float | None = (self.node or {}).get("score")
        return score
