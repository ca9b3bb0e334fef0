"""The members of a federation as an immutable value, seen from one site.

The rules for updating an entry are here, independent of files, locks and clocks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from cryptography import x509

from dispfl.peer.membership.address import Address
from dispfl.peer.membership.identity import der, descends_from, fingerprint, key_digest
from dispfl.peer.membership.invite import Invite, InviteError
from dispfl.peer.membership.records import MemberRecord
from dispfl.peer.membership.roster import Roster
from dispfl.wire.refusals import Refusal, refuse

ROTATION_INTERVAL = 3600.0
"""Seconds after a member's rotation in which another one is refused."""
MAX_RETIRED = 256
"""Former keys that are remembered of a member."""
MAX_FORKS = 8
"""Rosters with the same version that are remembered."""

State = Literal["pending", "accepted", "revoked"]


@dataclass(frozen=True)
class Member:
    """Another site that this site was asked to accept."""

    name: str
    address: Address | None
    """None if the address in the members file is not valid any more; the member's next record has
    another."""
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
        """Whether a certificate is the pinned one, a former one of this member, or issued by the
        pinned one."""
        return key_digest(certificate) in self.retired or descends_from(
            [certificate], self.certificate
        )

    def with_key(self, chain: Sequence[x509.Certificate]) -> "Member":
        """Pin another certificate; the keys of the old one and of those that issued the new one are
        retired."""
        return replace(self, certificate=chain[0])._retiring(
            *map(key_digest, chain[1:]), self._last_key
        )

    def proposed(self, certificate: x509.Certificate) -> "Member":
        """A site that is not accepted, with another certificate, until its fingerprint is
        confirmed."""
        return replace(self, certificate=certificate, state="pending", replaces=self._last_key)

    def confirmed(self) -> "Member":
        """A pending site as a member."""
        return replace(self, state="accepted", replaces="")._retiring(self.replaces)

    @property
    def _last_key(self) -> str:
        """The last key that was accepted; a pending one never was."""
        return self.replaces if self.state == "pending" else key_digest(self.certificate)

    def _retiring(self, *keys: str) -> "Member":
        former = dict.fromkeys(key for key in (*keys, *self.retired) if key)
        former.pop(key_digest(self.certificate), None)
        return replace(self, retired=tuple(former)[:MAX_RETIRED])

    def after_rotation(self, chain: Sequence[x509.Certificate], now: float) -> "Member":
        """Pin a certificate that descends from the pinned one, at most once in `ROTATION_INTERVAL`
        seconds."""
        if chain[0] == self.certificate:
            return self
        if key_digest(chain[0]) in self.retired:
            refuse(Refusal.CERTIFICATE, f"{self.name} presents a key that it had replaced before.")
        if 0 <= now - self.rotated < ROTATION_INTERVAL:
            refuse(
                Refusal.ROTATION,
                f"{self.name} replaced its key {(now - self.rotated) / 60:.0f} minutes ago; one"
                " rotation an hour is accepted.",
            )
        return replace(self.with_key(chain), rotated=now)


@dataclass(frozen=True)
class MemberList:
    """Own record, the other members, and the roster that this site has accepted."""

    own: MemberRecord | None = None
    members: Mapping[str, Member] = field(default_factory=dict)
    roster: Roster | None = None
    forks: tuple[str, ...] = ()
    """Digests of other rosters with the same version, signed by the same administrators."""
    unreadable: tuple[bytes, ...] = ()
    """Lines of the members file that this version cannot read. They are kept."""

    def with_member(self, member: Member) -> "MemberList":
        """Add or replace a member."""
        return replace(self, members={**self.members, member.name: member})

    def with_invite(self, invite: Invite, *, confirmed: bool) -> "MemberList":
        """Accept a site by its invite; the state stays pending until its fingerprint is
        confirmed."""
        old = self.members.get(invite.name)
        if old is None:
            new = Member(invite.name, invite.address, invite.certificate)
            return self.with_member(new if confirmed else replace(new, state="pending"))
        if key_digest(invite.certificate) in old.retired:
            raise InviteError(
                f"{invite.name} has replaced its key since this invite was created. "
                + (
                    "Nothing needs to be done."
                    if old.state == "accepted"
                    else "Ask it for a new invite."
                )
            )
        is_same = old.follows(invite.certificate)
        if old.state == "accepted":
            if not is_same:
                raise InviteError(
                    f"{invite.name} is already accepted with another certificate"
                    f" ({old.fingerprint[:16]}...). If it has a new key, revoke the old one first:"
                    f" dispfl peer revoke DIR {invite.name}"
                )
            confirmed = True  # the accepted key has signed the new one
        if confirmed:
            member = replace(old.with_key([invite.certificate]), state="accepted", replaces="")
        else:
            member = old.proposed(invite.certificate)
        record = old.record if is_same else None
        return self.with_member(replace(member, address=invite.address, record=record, by="hand"))

    def with_certificate(
        self, name: str, chain: Sequence[x509.Certificate], now: float
    ) -> "MemberList":
        """Pin an accepted member's new certificate if its chain descends from the pinned one."""
        member = self.members.get(name)
        if (
            member is None
            or member.state != "accepted"
            or not descends_from(chain, member.certificate)
        ):
            return self
        after = member.after_rotation(chain, now)
        return self if after is member else self.with_member(after)

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
        after = member.after_rotation(record.chain, now)
        return self.with_member(replace(after, address=record.address, record=record))

    def with_roster(self, roster: Roster, name: str) -> "MemberList":
        """Apply a verified roster as the site `name`: accept everyone on it, and revoke those that
        it has lost."""
        listed = roster.members()
        members = {
            member.name: (
                replace(member, state="revoked")
                if member.by == "roster"
                and member.state == "accepted"
                and member.name not in listed
                else member
            )
            for member in self.members.values()
        }
        for invite in listed.values():
            if invite.name != name:
                members[invite.name] = _listed(members.get(invite.name), invite)
        return replace(self, members=members, roster=roster, forks=())

    def lacks_roster(self, version: int, digest: str, administrators: str) -> bool:
        """Whether a roster of the accepted administrators is newer than the accepted one, or
        contradicts it."""
        old = self.roster
        if old is None or administrators != old.fingerprint or version < old.version:
            return False
        return version > old.version or (digest != old.digest and digest not in self.forks)

    def with_newer_roster(self, roster: Roster, name: str) -> "MemberList":
        """Apply a verified roster of the accepted administrators if it is newer; of two with one
        version, the first."""
        if self.roster is None or not self.lacks_roster(
            roster.version, roster.digest, roster.fingerprint
        ):
            return self
        if roster.version > self.roster.version:
            return self.with_roster(roster, name)
        return replace(self, forks=(*self.forks, roster.digest)[-MAX_FORKS:])


def _listed(old: Member | None, invite: Invite) -> Member:
    """The entry of a member that the roster lists."""
    if old is None:
        return Member(invite.name, invite.address, invite.certificate, by="roster")
    if (
        old.state == "revoked" and old.by == "hand"
    ):  # this site's operator does not want it, whatever its key is
        return old
    if not old.follows(invite.certificate):  # the administrators have replaced the site
        new = replace(old.with_key([invite.certificate]), replaces="")
        return replace(new, address=invite.address, state="accepted", record=None, by="roster")
    rotated_since = key_digest(invite.certificate) in old.retired
    current = old if rotated_since else old.with_key([invite.certificate])
    return replace(current.confirmed(), address=current.address or invite.address, by="roster")


Edit = Callable[[MemberList], MemberList]
"""A change of the list."""
