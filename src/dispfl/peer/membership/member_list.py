"""The members of a federation as an immutable value, seen from one site.

The rules for updating an entry are here, independent of files, locks and clocks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from cryptography import x509

from dispfl.peer.membership.address import Address, RelayAddress
from dispfl.peer.membership.identity import der, descends_from, fingerprint, key_digest
from dispfl.peer.membership.invite import Invite, InviteError
from dispfl.peer.membership.records import MemberRecord
from dispfl.peer.membership.roster import MAX_VERSION_STEP, Roster
from dispfl.wire.refusals import Refusal, refuse

ROTATION_INTERVAL = 3600.0
"""Seconds after a member's rotation in which another one is refused."""
MAX_RETIRED = 256
"""Former keys that are remembered of a member."""
MAX_FORKS = 8
"""Refused rosters of the accepted administrators that are remembered."""

State = Literal["pending", "accepted", "revoked"]


@dataclass(frozen=True)
class Member:
    """Another site that this site was asked to accept."""

    name: str
    address: Address | None
    """None if it is reached by relays or its outbox alone, or if it is not valid any more: the
    member's next record has another."""
    certificate: x509.Certificate
    """The pinned certificate."""
    state: State = "accepted"
    """Pending: its fingerprint was not compared yet, so it is not a member."""
    record: MemberRecord | None = None
    """Its latest signed record; None if none was received yet."""
    by: Literal["hand", "roster"] = "hand"
    """Who decided the state: this site's operator, or the administrators who signed the roster."""
    retired: tuple[str, ...] = ()
    """Digests of its former keys, newest first. They stay refused."""
    rotated: float = 0.0
    """When it last replaced its key, as Unix time."""
    replaces: str = ""
    """While it is pending: the digest of the key that is retired once this one is confirmed."""
    relays: tuple[RelayAddress, ...] = ()
    """The relays by which it is reached."""
    outbox: str | None = None
    """Where it stores its models for members that cannot reach it."""

    @classmethod
    def invited(
        cls,
        invite: Invite,
        state: State = "accepted",
        by: Literal["hand", "roster"] = "hand",
    ) -> "Member":
        """A new member, as its invite describes it."""
        member = cls(invite.name, invite.address, invite.certificate, state, by=by)
        return member.at(invite)

    def at(self, place: "Invite | MemberRecord") -> "Member":
        """The member at the address, relays and outbox of a newer invite or record."""
        return replace(self, address=place.address, relays=place.relays, outbox=place.outbox)

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the pinned certificate."""
        return fingerprint(der(self.certificate))

    @property
    def density(self) -> float | None:
        """Its announced density."""
        return self.record.density if self.record else None

    @property
    def first_round(self) -> int:
        """The first round it takes part in."""
        return self.record.first_round if self.record else 0

    @property
    def serial(self) -> int:
        """Serial number of its latest record."""
        return self.record.serial if self.record else 0

    def follows(self, certificate: x509.Certificate) -> bool:
        """Whether a certificate is the pinned one, issued by it, or a former one."""
        is_former = key_digest(certificate) in self.retired
        return is_former or descends_from([certificate], self.certificate)

    def with_key(self, chain: Sequence[x509.Certificate]) -> "Member":
        """Pin the first certificate of a chain, and retire the former keys."""
        former_keys = [key_digest(certificate) for certificate in chain[1:]]
        return replace(self, certificate=chain[0])._retiring(*former_keys, self._last_key)

    def proposed(self, certificate: x509.Certificate) -> "Member":
        """The site with another certificate, pending until its fingerprint is confirmed."""
        return replace(self, certificate=certificate, state="pending", replaces=self._last_key)

    def confirmed(self) -> "Member":
        """A pending site as a member."""
        return replace(self, state="accepted", replaces="")._retiring(self.replaces)

    @property
    def _last_key(self) -> str:
        """The last key that was accepted; a pending one never was."""
        return self.replaces if self.state == "pending" else key_digest(self.certificate)

    def _retiring(self, *keys: str) -> "Member":
        current_key = key_digest(self.certificate)
        retired: list[str] = []
        for key in (*keys, *self.retired):
            if key and key != current_key and key not in retired:
                retired.append(key)
        return replace(self, retired=tuple(retired[:MAX_RETIRED]))

    def after_rotation(self, chain: Sequence[x509.Certificate], now: float) -> "Member":
        """Pin a successor of the pinned certificate, once in `ROTATION_INTERVAL` seconds."""
        if chain[0] == self.certificate:
            return self
        if key_digest(chain[0]) in self.retired:
            refuse(Refusal.CERTIFICATE, f"{self.name} presents a key that it had replaced before.")
        if 0 <= now - self.rotated < ROTATION_INTERVAL:
            minutes = (now - self.rotated) / 60
            refuse(
                Refusal.ROTATION,
                f"{self.name} replaced its key {minutes:.0f} minutes ago; one rotation an hour is"
                " accepted.",
            )
        return replace(self.with_key(chain), rotated=now)


@dataclass(frozen=True)
class Fork:
    """A roster that the accepted administrators have signed, and that does not succeed ours."""

    version: int
    """That of our roster, or one that is too far ahead of it."""
    digest: str


@dataclass(frozen=True)
class MemberList:
    """Own record, the other members, and the roster that this site has accepted."""

    own: MemberRecord | None = None
    members: Mapping[str, Member] = field(default_factory=dict)
    roster: Roster | None = None
    forks: tuple[Fork, ...] = ()
    unreadable: tuple[bytes, ...] = ()
    """Lines of the members file that this version cannot read. They are kept."""
    unlogged: tuple[str, ...] = ()
    """Entries of the last change, which the audit log may still lack."""

    def with_member(self, member: Member) -> "MemberList":
        """Add or replace a member."""
        return replace(self, members={**self.members, member.name: member})

    def with_invite(self, invite: Invite, *, confirmed: bool) -> "MemberList":
        """Accept a site by its invite; it is pending until its fingerprint is confirmed."""
        current = self.members.get(invite.name)
        if current is None:
            state: State = "accepted" if confirmed else "pending"
            return self.with_member(Member.invited(invite, state))

        if key_digest(invite.certificate) in current.retired:
            advice = "Ask it for a new invite."
            if current.state == "accepted":
                advice = "Nothing needs to be done."
            raise InviteError(
                f"{invite.name} has replaced its key since this invite was created. {advice}"
            )
        is_same_site = current.follows(invite.certificate)
        if current.state == "accepted":
            if not is_same_site:
                raise InviteError(
                    f"{invite.name} is already accepted with another certificate"
                    f" ({current.fingerprint[:16]}...). If it has a new key, revoke the old one"
                    f" first: dispfl peer revoke DIR {invite.name}"
                )
            confirmed = True  # the accepted key has signed the new one

        if confirmed:
            member = replace(current.with_key([invite.certificate]), state="accepted", replaces="")
        else:
            member = current.proposed(invite.certificate)
        record = current.record if is_same_site else None
        return self.with_member(replace(member.at(invite), record=record, by="hand"))

    def with_certificate(
        self, name: str, chain: Sequence[x509.Certificate], now: float
    ) -> "MemberList":
        """Pin an accepted member's new certificate if its chain descends from the pinned one."""
        member = self.members.get(name)
        if member is None or member.state != "accepted":
            return self
        if not descends_from(chain, member.certificate):
            return self
        rotated = member.after_rotation(chain, now)
        return self if rotated is member else self.with_member(rotated)

    def with_record(
        self, record: MemberRecord, name: str, federation: str, now: float
    ) -> "MemberList":
        """Apply a verified record as the site `name`; refuse it if another key has signed it."""
        if record.federation != federation:
            refuse(
                Refusal.FEDERATION,
                f"The record of {record.name} belongs to the federation {record.federation}, not"
                f" {federation}.",
            )
        if record.name == name:
            if self.own and not descends_from(self.own.chain, record.chain[0]):
                refuse(Refusal.CERTIFICATE, f"Another site uses the name of this site, {name}.")
            return self
        member = self.members.get(record.name)
        if member is None or member.state != "accepted" or not record.replaces(member.record):
            return self
        if not descends_from(record.chain, member.certificate):
            refuse(
                Refusal.CERTIFICATE,
                f"The record of {record.name} does not have the accepted certificate.",
            )
        rotated = member.after_rotation(record.chain, now)
        return self.with_member(replace(rotated.at(record), record=record))

    def with_roster(self, roster: Roster, name: str) -> "MemberList":
        """Apply a verified roster as the site `name`: accept its members, revoke removed ones."""
        invites = roster.members()
        members = dict(self.members)
        for member in self.members.values():
            is_by_roster = member.by == "roster" and member.state == "accepted"
            if is_by_roster and member.name not in invites:
                members[member.name] = replace(member, state="revoked")
        for invite in invites.values():
            if invite.name != name:
                members[invite.name] = _listed(members.get(invite.name), invite)
        return replace(self, members=members, roster=roster, forks=())

    def lacks_roster(self, version: int, digest: str, administrators: str) -> bool:
        """Whether a roster of the accepted administrators is newer than ours, or contradicts it."""
        current = self.roster
        if current is None or administrators != current.fingerprint:
            return False
        if any(fork.digest == digest for fork in self.forks):
            return False
        if version != current.version:
            return version > current.version
        return digest != current.digest

    def with_newer_roster(
        self, roster: Roster, name: str, *, any_step: bool = False
    ) -> "MemberList":
        """Apply a verified roster of the accepted administrators if it is newer.

        Of two rosters with one version, the first stays in force. One that is too far ahead is
        refused as well, unless `any_step`: nothing could succeed the largest version.
        """
        current = self.roster
        if current is None or roster.fingerprint != current.fingerprint:
            return self
        steps = roster.version - current.version
        if 0 < steps <= MAX_VERSION_STEP or (any_step and steps > 0):
            return self.with_roster(roster, name)
        if not self.lacks_roster(roster.version, roster.digest, roster.fingerprint):
            return self
        fork = Fork(roster.version, roster.digest)
        return replace(self, forks=(*self.forks, fork)[-MAX_FORKS:])

    def is_fork(self, roster: Roster) -> bool:
        """Whether a roster was refused because it does not succeed ours."""
        return any(fork.digest == roster.digest for fork in self.forks)


def _listed(member: Member | None, invite: Invite) -> Member:
    """The entry of a member that the roster lists."""
    if member is None:
        return Member.invited(invite, by="roster")
    if member.state == "revoked" and member.by == "hand":  # the operator refuses it, with any key
        return member
    if not member.follows(invite.certificate):  # the administrators have replaced the site
        member = replace(member.with_key([invite.certificate]), replaces="")
        return replace(member.at(invite), state="accepted", record=None, by="roster")
    has_rotated_since = key_digest(invite.certificate) in member.retired
    if not has_rotated_since:
        member = member.with_key([invite.certificate])
    member = replace(member.confirmed(), by="roster")
    is_reachable = member.address is not None or member.relays or member.outbox
    return member if is_reachable else member.at(invite)


Edit = Callable[[MemberList], MemberList]
"""A change of the list."""
