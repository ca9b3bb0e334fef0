"""The changes of a federation's spec that a site knows: those in force, and proposals.

A site accepts a change once everyone who decides about it has signed (`Signatories`). It stays in
force then, whoever joins or leaves later. Sites pass on what they know in membership sync.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from dispfl.errors import ConfigError, RunError
from dispfl.files import read_regular, write_atomically
from dispfl.peer.membership.audit_log import Change, operator
from dispfl.peer.membership.encoding import canonical
from dispfl.peer.membership.identity import Identity
from dispfl.peer.membership.list_file import file_lock
from dispfl.peer.membership.members import MembersFile
from dispfl.peer.membership.spec_change import (
    FIRST_VERSION,
    MAX_CHANGE_BYTES,
    Signatories,
    SpecChange,
    SpecChangeError,
)
from dispfl.peer.transport.base import JSON
from dispfl.wire.refusals import Refusal, refuse

MAX_PROPOSALS = 8
"""Proposals that a site keeps; of each signer only the newest that nobody else has signed."""
MAX_PAGE_BYTES = 2 * MAX_CHANGE_BYTES
"""Size of the changes in one sync message."""
_FORMAT = "dispfl spec changes"
_FORMAT_VERSION = 1


@dataclass(frozen=True)
class SpecChanges:
    """The changes that a site knows, as an immutable value."""

    in_force: tuple[SpecChange, ...] = ()
    """By version, from version 2 on."""
    proposed: tuple[SpecChange, ...] = ()
    """Changes that lack signatures."""

    @property
    def version(self) -> int:
        """The newest version of the spec that is complete, from whichever round on."""
        return FIRST_VERSION + len(self.in_force)

    @property
    def _last_digest(self) -> str:
        return self.in_force[-1].digest if self.in_force else ""

    @cached_property
    def state(self) -> str:
        """A digest of all changes, and of who has signed the proposals."""
        entries = [change.digest for change in self.in_force]
        for proposal in self.proposed:
            signers = sorted([*proposal.administrators, *proposal.members])
            entries.append(f"{proposal.digest} {','.join(signers)}")
        return hashlib.sha256("\n".join(sorted(entries)).encode()).hexdigest()

    def documents(self, after: int) -> list[JSON]:
        """Return the changes that lead to versions above `after`, as many as fit in a message."""
        documents: list[JSON] = []
        size = 0
        for change in (*self.in_force, *self.proposed):
            if change.version <= after:
                continue
            document = change.to_json()
            size += len(canonical(document))
            if documents and size > MAX_PAGE_BYTES:
                break
            documents.append(document)
        return documents

    def with_change(self, change: SpecChange, signatories: Signatories) -> "SpecChanges":
        """Add a change, or signatures of one; raise `SpecChangeError` if it contradicts ours."""
        change = change.with_valid_signatures(signatories)
        if change.version <= self.version:
            accepted = self.in_force[change.version - FIRST_VERSION - 1]
            if accepted.digest != change.digest and not signatories.missing(change):
                raise SpecChangeError(
                    f"Version {change.version} of the spec of {change.federation} was signed with"
                    f" two contents: this site has {accepted.digest[:16]}, the other is"
                    f" {change.digest[:16]}. The federation must agree on one of them."
                )
            return self
        if change.version != self.version + 1 or change.follows != self._last_digest:
            return self  # it follows a change that this site does not know yet
        if not change.administrators and not change.members:
            return self

        proposals = {proposal.digest: proposal for proposal in self.proposed}
        if change.digest in proposals:
            change = proposals[change.digest].with_signatures_of(change)
        proposals[change.digest] = change
        return replace(self, proposed=_bounded(proposals.values())).settled(signatories)

    def settled(self, signatories: Signatories) -> "SpecChanges":
        """Put a proposal in force that everyone has signed who decides about it."""
        for proposal in self.proposed:
            is_next = proposal.follows == self._last_digest
            if is_next and not signatories.missing(proposal):
                return SpecChanges((*self.in_force, proposal))
        return self

    def confirmed_by(self, name: str) -> list[SpecChange]:
        """The proposals that a member has signed."""
        return [proposal for proposal in self.proposed if name in proposal.members]

    def without(self, digest: str) -> "SpecChanges":
        """Return the changes without a proposal."""
        return replace(
            self, proposed=tuple(change for change in self.proposed if change.digest != digest)
        )


def _bounded(proposals: Iterable[SpecChange]) -> tuple[SpecChange, ...]:
    """Keep the newest proposal of each only signer, and not more than `MAX_PROPOSALS`."""
    bounded: dict[str, SpecChange] = {}
    for proposal in sorted(proposals, key=lambda change: (change.time, change.digest)):
        signers = [*proposal.administrators, *proposal.members]
        key = signers[0] if len(signers) == 1 else proposal.digest
        bounded[key] = proposal
    by_signatures = sorted(
        bounded.values(), key=lambda change: -len(change.members) - len(change.administrators)
    )
    return tuple(by_signatures[:MAX_PROPOSALS])


class SpecChangesFile:
    """A site's file of changes, which its node and its operator's commands use."""

    def __init__(
        self, path: Path, identity: Identity, federation: str, members: MembersFile
    ) -> None:
        self.path = path
        self._identity = identity
        self._federation = federation
        self._members = members
        self._lock = threading.Lock()
        self._stamp: tuple[int, ...] = ()
        self._changes = SpecChanges()

    def signatories(self) -> Signatories:
        """Who decides about changes, by the present members."""
        certificates = {self._identity.name: self._identity.chain}
        for member in self._members.accepted():
            certificates[member.name] = (member.certificate,)
        return Signatories(certificates, self._members.file.latest().roster)

    def current(self) -> SpecChanges:
        """The changes, as this process or another has last written them."""
        with self._lock:
            stamp = self._stamp_now()
            if stamp != self._stamp:
                self._changes = self._read()
                self._stamp = stamp
            return self._changes

    def merge(self, documents: Sequence[JSON]) -> None:
        """Add changes and signatures received from another member.

        Raises `MessageError` for what is no change of the spec, or contradicts one in force.
        """
        try:
            changes = [SpecChange.from_json(document) for document in documents]
            self._check_federation(changes)
        except (ValueError, SpecChangeError) as problem:
            refuse(Refusal.MALFORMED, f"A change of the spec is invalid: {str(problem)[:200]}")
        signatories = self.signatories()

        def edit(current: SpecChanges) -> SpecChanges:
            for change in changes:
                current = current.with_change(change, signatories)
            return current.settled(signatories)

        try:
            self._update(edit, "")
        except SpecChangeError as problem:
            refuse(Refusal.SPEC_MISMATCH, str(problem))

    def add(self, change: SpecChange) -> SpecChanges:
        """Add a change from a file, or with the operator's signature."""
        self._check_federation([change])
        signatories = self.signatories()
        current = self.current()
        if change.version > current.version and change.follows != current._last_digest:
            raise SpecChangeError(
                f"The change leads to version {change.version} of the spec, and this site has"
                f" version {current.version}: confirm the changes before it first."
            )
        if not signatories.valid(change):
            raise SpecChangeError(
                f"The change of the spec ({change.summary}) has no valid signature of"
                f" {self._deciders(signatories)}."
            )
        return self._update(lambda latest: latest.with_change(change, signatories), operator())

    def describe_proposals(self) -> list[str]:
        """Describe the proposals, each with those who have not signed it yet."""
        signatories = self.signatories()
        return [
            f"{proposal.summary}; not yet signed by {signatories.missing(proposal)}"
            for proposal in self.current().proposed
        ]

    def confirm(self, change: SpecChange) -> SpecChanges:
        """Sign a change for this site's operator, and add it."""
        return self.add(change.signed_by_site(self._identity))

    def withdraw(self, change: SpecChange) -> SpecChanges:
        """Forget a proposal, with this site's signature."""
        return self._update(lambda latest: latest.without(change.digest), operator())

    def next_change(self, settings: dict[str, JSON], from_round: int, time: int) -> SpecChange:
        """Return the unsigned change that would follow the last one."""
        current = self.current()
        return SpecChange(
            self._federation,
            current.version + 1,
            from_round,
            settings,
            current._last_digest,
            time,
        )

    def _check_federation(self, changes: Iterable[SpecChange]) -> None:
        for change in changes:
            if change.federation != self._federation:
                raise SpecChangeError(
                    f"The change is of the federation {change.federation}, this site of"
                    f" {self._federation}."
                )

    def _deciders(self, signatories: Signatories) -> str:
        if signatories.roster is not None:
            return f"the administrators {', '.join(signatories.roster.admins)}"
        return f"the members {', '.join(sorted(signatories.members))}"

    def _update(self, edit: Callable[[SpecChanges], SpecChanges], by: str) -> SpecChanges:
        """Apply an edit to the newest content, and write what it changes."""
        with file_lock(self.path.parent / ".spec.lock"):
            before = self.current()
            after = edit(before)
            if after.state == before.state:
                return before
            content = {
                "format": _FORMAT,
                "version": _FORMAT_VERSION,
                "in_force": [change.to_json() for change in after.in_force],
                "proposed": [change.to_json() for change in after.proposed],
            }
            write_atomically(self.path, json.dumps(content, indent=1).encode() + b"\n")
            notes = list(_audit(before, after))
            if notes:
                self._members.file.update(lambda members: members, by, notes)
            return self.current()

    def _stamp_now(self) -> tuple[int, ...]:
        try:
            status = self.path.stat()
        except OSError:
            return ()
        return (status.st_ino, status.st_mtime_ns, status.st_size)

    def _read(self) -> SpecChanges:
        try:
            content = json.loads(read_regular(self.path))
            if content["format"] != _FORMAT or content["version"] != _FORMAT_VERSION:
                raise ValueError("it has another format or version")
            in_force = tuple(map(SpecChange.from_json, content["in_force"]))
            proposed = tuple(map(SpecChange.from_json, content["proposed"]))
        except FileNotFoundError:
            return SpecChanges()
        except (OSError, ValueError, KeyError, TypeError, ConfigError) as problem:
            raise RunError(
                f"{self.path} cannot be read: {str(problem)[:200]}. Restore it, or delete it: other"
                " sites send its changes again."
            ) from None
        return SpecChanges(in_force, proposed)


def _audit(before: SpecChanges, after: SpecChanges) -> Iterable[Change]:
    """What the audit log says of a change of the changes."""
    for change in after.in_force[len(before.in_force) :]:
        signers = ",".join(sorted([*change.administrators, *change.members]))
        yield Change(
            "spec changed", "", change.digest, {"change": change.summary, "signed_by": signers}
        )
    proposals_before = {proposal.digest: proposal for proposal in before.proposed}
    for proposal in after.proposed:
        previous = proposals_before.get(proposal.digest)
        signers_before = previous.members.keys() if previous else set()
        for name in sorted(proposal.members.keys() - signers_before):
            yield Change("spec confirmed", name, proposal.digest, {"change": proposal.summary})
