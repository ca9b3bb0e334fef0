"""Answers requests to a member from its outbox: the same responses as the member's own server.

A model is there or not yet ("wait"), or no longer ("stale"). What a site that sleeps has stored is
there, too; more will not be there before it wakes up ("asleep"). A sync is answered from the member
list that the owner has stored. What a storage may do wrong is refused by name and counted; the
newest good head that was seen stays in force, and a bad object is read again at the next request.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from dispfl.errors import DispflError, MessageError
from dispfl.peer.membership.identity import der
from dispfl.peer.membership.records import MemberRecord
from dispfl.peer.membership.roster import MAX_ROSTER_BYTES, Roster
from dispfl.peer.membership.spec_change import FIRST_VERSION, SpecChange
from dispfl.peer.membership.spec_changes import SpecChanges
from dispfl.peer.membership.sync import Offer, SyncMessage
from dispfl.peer.outbox.head import (
    HEAD,
    MAX_HEAD_BYTES,
    HeadContent,
    SignedHead,
    StoredModel,
    StoredRef,
)
from dispfl.peer.outbox.sealing import SealingKey, encrypted_size
from dispfl.peer.outbox.storage import (
    MissingError,
    Storage,
    StorageAccess,
    StorageError,
    open_storage,
)
from dispfl.peer.setup.spec import fixed_entries, spec_difference
from dispfl.peer.state.log import shortened
from dispfl.peer.transport.base import JSON, Refused, Request, Response, Unreachable
from dispfl.wire.refusals import Refusal, RefusalCounter, refuse

MAX_SYNC_BYTES = 2 * MAX_ROSTER_BYTES
"""The largest stored member list."""


class OutboxMembership(Protocol):
    """What a reader asks the member list."""

    def outbox(self, name: str) -> str | None:
        """Where the outbox of an accepted member is read; None if it has none."""
        ...

    def identify(self, certificate: bytes, issuers: list[bytes]) -> str | None:
        """The name of the member with this certificate; refuse a revoked one."""
        ...

    def merge(self, records: JSON) -> Any:
        """Take a newer record of a member."""
        ...


@dataclass(frozen=True)
class _Problem:
    """Why the newest head of a member is not used."""

    text: str = ""
    """Empty if it is used."""
    refusal: str | None = None
    """Its name; None if it is usual."""


@dataclass
class _Member:
    """What was read of one member's outbox."""

    place: str
    storage: Storage
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    head: HeadContent | None = None
    tag: str | None = None
    """The tag of the head that was read last, good or bad."""
    next_look: float = 0.0
    """When to look for a newer head, by the event loop's clock."""
    fault: _Problem = _Problem()
    """What is wrong with the head of this tag."""
    problem: _Problem = _Problem()
    """Its fault, or why a newer one cannot be read."""
    lacks_model: bool = False
    """Whether this head had no model for the last request: from an owner that sleeps there will be
    none before it wakes up."""
    object_refusal: str | None = None
    """Why the object that was read last was refused; None if it was not."""
    sync: tuple[StoredRef, dict[str, Any], Offer] | None = None
    """The stored member list that was read last."""


class OutboxReader:
    """Reads the outboxes of other members."""

    def __init__(
        self,
        name: str,
        membership: OutboxMembership,
        key: SealingKey | None,
        access: StorageAccess,
        max_model: int,
        seen: dict[str, int],
        refused: RefusalCounter,
    ) -> None:
        self.name = name
        self.log: Callable[[str, str | None, str], None] = lambda peer, reason, detail: None
        """Logs when a member's heads or objects begin to be refused, and, without a reason, when
        that of heads ends."""
        self.save_seen: Callable[[], None] = lambda: None
        """Saves the serials of heads; the doctor, beside whom a node may run, does not."""
        self._membership = membership
        self._key = key
        self._access = access
        self._interval = access.limits.outbox_interval
        self._max_model = encrypted_size(max_model)
        self._seen = seen
        self._refused = refused
        self._members: dict[str, _Member] = {}
        self._rng = random.Random()

    def place(self, peer: str) -> str | None:
        """Where the outbox of a member is; None if it has none."""
        return self._membership.outbox(peer)

    def problem(self, peer: str) -> str | None:
        """Why an older head of a member is used instead of the newest; None if it is not."""
        member = self._members.get(peer)
        if member is None or member.head is None or member.problem.refusal is None:
            return None
        return shortened(member.problem.text)

    def forget(self, peer: str) -> None:
        """Forget what was read of a revoked member."""
        self._members.pop(peer, None)

    async def request(self, peer: str, request: Request) -> Response:
        """Answer a request from the member's outbox; raise `Refused` or `Unreachable`."""
        member = self._open(peer)
        wanted = None
        if request.kind == "model" and "newer_than" not in request.header:
            wanted = request.header.get("round")
        content = await self._content(peer, member, wanted)
        request.on_alive()
        if request.kind == "sync":
            return await self._answer_sync(peer, member, content, request)
        if request.kind == "model" and "spare_place" not in request.header:
            return await self._answer_model(peer, member, content, request)
        # An outbox does not know who chooses its owner, or which of its places are free.
        return Response({"status": "declined", **_about(member, content)})

    def _open(self, peer: str) -> _Member:
        place = self.place(peer)
        if place is None:
            raise Unreachable(peer, "has no outbox")
        if self._key is None:
            detail = (
                'has an outbox, which needs wire.exchange = "push" and cryptography 47 or later'
            )
            raise Unreachable(peer, detail)
        member = self._members.get(peer)
        if member is None or member.place != place:
            try:
                member = _Member(place, open_storage(place, self._access))
            except DispflError as problem:
                raise Unreachable(peer, str(problem).rstrip(".")) from None
            self._members[peer] = member
        return member

    # the head

    async def _content(self, peer: str, member: _Member, wanted: JSON) -> HeadContent:
        """Return the newest good head, after another look if it is time for one.

        For a model that is not there yet it waits until then.
        """
        clock = asyncio.get_running_loop().time
        if member.head is not None and isinstance(wanted, int) and not _has(member.head, wanted):
            await asyncio.sleep(max(0.0, member.next_look - clock()))
        async with member.lock:
            if clock() >= member.next_look:
                interval = self._interval * (0.5 + self._rng.random())
                had_head = member.head is not None
                problem = await self._look(peer, member)
                if had_head and problem.refusal != member.problem.refusal:
                    self.log(peer, problem.refusal, problem.text)
                member.problem = problem
                member.next_look = clock() + interval
        if member.head is None:
            raise Unreachable(peer, member.problem.text)
        return member.head

    async def _look(self, peer: str, member: _Member) -> _Problem:
        """Read the head, unless it is unchanged; keep the last good one if it is bad."""
        try:
            stored = await member.storage.read(HEAD, MAX_HEAD_BYTES, member.tag)
        except MissingError as problem:
            if member.head is None:
                return _Problem(f"has stored nothing in its outbox yet ({problem})")
            self._refused.add(peer, Refusal.MISSING_OBJECT)
            return _Problem(f"the head of its outbox is gone: {problem}", Refusal.MISSING_OBJECT)
        except StorageError as problem:
            self._refused.add(peer, Refusal.DAMAGED_OBJECT)
            return _Problem(f"its outbox cannot be read: {problem}", Refusal.DAMAGED_OBJECT)
        if stored is None:
            return member.fault
        try:
            content = await asyncio.to_thread(self._verify, peer, stored.content)
        except (MessageError, Refused) as problem:
            reason = problem.refusal if isinstance(problem, MessageError) else problem.reason
            self._refused.add(peer, reason)
            fault = _Problem(str(problem).rstrip("."), reason)
            if reason != Refusal.NOT_A_RECIPIENT:  # that may end without another head
                member.tag = stored.tag
                member.fault = fault
            return fault
        if content.serial > self._seen.get(peer, 0):
            self._seen[peer] = content.serial
            self.save_seen()  # before the head is used: a killed process refuses older ones, too
        member.head = content
        member.tag = stored.tag
        member.fault = _Problem()
        member.lacks_model = False
        return member.fault

    def _verify(self, peer: str, raw: bytes) -> HeadContent:
        """Check whose head it is, decrypt it, and refuse one from before; on a thread."""
        signed = SignedHead(raw)
        record = signed.record
        if self._owner(record) != peer:
            refuse(
                Refusal.WRONG_CERTIFICATE,
                f"The outbox of {peer} has a head of {record.name} with the certificate"
                f" {record.fingerprint[:16]}..., which is not the accepted one.",
            )
        self._membership.merge([record.to_json()])
        assert self._key is not None
        content = signed.open(self._key)
        newest = self._seen.get(peer, 0)
        if content.serial < newest:
            refuse(
                Refusal.REPLAYED,
                f"The head of {peer}'s outbox has serial {content.serial}, after one with"
                f" {newest}: the storage shows an old one.",
            )
        return content

    def _owner(self, record: MemberRecord) -> str | None:
        certificates = [der(certificate) for certificate in record.chain]
        return self._membership.identify(certificates[0], certificates[1:])

    # objects

    async def _read(self, peer: str, member: _Member, ref: StoredRef, limit: int) -> bytes | None:
        """Return the content of an object; None if it is not there yet, or is not as signed."""
        try:
            if ref.size > limit:
                refuse(
                    Refusal.TOO_LONG, f"An object of {ref.size} bytes; at most {limit} are allowed."
                )
            stored = await member.storage.read(ref.name, ref.size)
            assert stored is not None
            return await asyncio.to_thread(ref.open, stored.content)
        except MessageError as problem:
            self._refuse(peer, member, problem.refusal, str(problem))
        except MissingError as problem:
            detail = f"The object is not there: {problem}."
            self._refuse(peer, member, Refusal.MISSING_OBJECT, detail)
        except StorageError as problem:
            detail = f"The object cannot be read: {problem}."
            self._refuse(peer, member, Refusal.DAMAGED_OBJECT, detail)
        member.next_look = 0.0  # the owner may have replaced it meanwhile
        return None

    async def _answer_model(
        self, peer: str, member: _Member, content: HeadContent, request: Request
    ) -> Response:
        t = request.header.get("round")
        current_round = content.about["current_round"]
        assert isinstance(current_round, int)
        is_past = isinstance(t, int) and t < current_round
        is_joining = isinstance(t, int) and t <= current_round and content.joining
        model = _model(content, t)
        if "newer_than" in request.header:
            is_past = False
            is_joining = False
            model = _newest(content, request.header["newer_than"])
        member.lacks_model = model is None and not is_past
        about = _about(member, content)
        if model is None:
            if is_joining:
                raise Refused(Refusal.JOINING, f"{peer} has just joined and has no model yet.")
            status = "asleep" if "asleep_for" in about else "wait"
            return Response({"status": "stale" if is_past else status, **about})
        if model.spec != request.header.get("spec"):
            message = f"{peer} and {self.name} have different federation specs in round {t}."
            raise Refused(Refusal.SPEC_MISMATCH, message)
        request.on_transfer()
        frame = await self._read(peer, member, model.object, self._max_model)
        if frame is None:
            await asyncio.sleep(self._interval * self._rng.random())
            return Response({"status": "wait", **about})
        member.object_refusal = None
        nonce = request.header.get("nonce")
        header: dict[str, JSON] = {
            "status": "model",
            "round": model.round,
            "nonce": nonce,
            "values": model.values,
        }
        return Response({**about, **header}, frame)

    async def _answer_sync(
        self, peer: str, member: _Member, content: HeadContent, request: Request
    ) -> Response:
        """Compare specs, as the member's server would, and answer from its stored list."""
        if member.sync is None or member.sync[0] != content.sync:
            text = await self._read(peer, member, content.sync, MAX_SYNC_BYTES)
            if text is None:
                raise Unreachable(peer, "its stored member list is not as signed, or not there")
            try:
                fields, offer = await asyncio.to_thread(_read_offer, text)
            except (ValueError, KeyError, TypeError, DispflError, RecursionError) as problem:
                detail = f"The stored member list of {peer} cannot be read: {str(problem)[:200]}"
                self._refuse(peer, member, Refusal.MALFORMED, detail)
                raise Refused(Refusal.MALFORMED, detail) from None
            member.sync = (content.sync, fields, offer)
            member.object_refusal = None
        _, fields, offer = member.sync
        difference = self._spec_difference(peer, request, fields)
        if difference:
            message = f"{self.name} cannot take part with {peer}: {difference}"
            raise Refused(Refusal.SPEC_MISMATCH, message)
        body = offer.answer(SyncMessage.read(request.body))
        about = _about(member, content)
        header = {"spec": fields["spec"], "spec_version": fields["spec_version"], **about}
        return Response(header, body)

    def _spec_difference(self, peer: str, request: Request, fields: dict[str, Any]) -> str | None:
        """Describe how the owner's spec differs from that of our request; None if both fit."""
        own_spec = _texts(request.header["spec"])
        spec = _texts(fields["spec"])
        if fields["spec_version"] != request.header.get("spec_version", FIRST_VERSION):
            own_spec = fixed_entries(own_spec)
            spec = fixed_entries(spec)
        return spec_difference(own_spec, spec, f"at {self.name}", f"at {peer}")

    def _refuse(self, peer: str, member: _Member, reason: str, message: str) -> None:
        """Count it, and log it once. The member is not banned: its storage may be to blame."""
        self._refused.add(peer, reason)
        if reason != member.object_refusal:
            self.log(peer, reason, message)
        member.object_refusal = reason


def _about(member: _Member, content: HeadContent) -> dict[str, JSON]:
    """What a response says of the owner.

    That it sleeps only matters to a reader that needs more than what is stored.
    """
    about = dict(content.about)
    seconds = content.asleep_for(time.time())
    if seconds > 0 and member.lacks_model:
        about["asleep_for"] = round(seconds, 1)
    return about


def _has(content: HeadContent, t: int) -> bool:
    """Whether a head answers a request for round t: with the model, or that it is over."""
    current_round = content.about["current_round"]
    assert isinstance(current_round, int)
    return _model(content, t) is not None or t < current_round


def _model(content: HeadContent, t: JSON) -> StoredModel | None:
    for model in content.models:
        if model.round == t:
            return model
    return None


def _newest(content: HeadContent, newer_than: JSON) -> StoredModel | None:
    """Return the newest model, if it is newer than that of a round."""
    newest = max(content.models, key=lambda model: model.round, default=None)
    if newest is None or not isinstance(newer_than, int) or newest.round <= newer_than:
        return None
    return newest


def _texts(spec: Any) -> dict[str, str]:
    return {str(name): str(value) for name, value in dict(spec).items()}


def stored_offer(spec: dict[str, JSON], spec_version: int, offer: Offer) -> bytes:
    """Return what an owner stores for the syncs of its readers."""
    fields = {
        "spec": spec,
        "spec_version": spec_version,
        "records": list(offer.records),
        "roster": offer.roster.text if offer.roster else None,
        "in_force": [change.to_json() for change in offer.changes.in_force],
        "proposed": [change.to_json() for change in offer.changes.proposed],
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def _read_offer(text: bytes) -> tuple[dict[str, Any], Offer]:
    """Read what `stored_offer` has written; its records are verified when they are merged."""
    fields = json.loads(text)
    _texts(fields["spec"])
    if not isinstance(fields["spec_version"], int):
        raise ValueError("its spec has no version.")
    roster = Roster.read(str(fields["roster"])) if fields["roster"] is not None else None
    in_force = tuple(map(SpecChange.from_json, fields["in_force"]))
    proposed = tuple(map(SpecChange.from_json, fields["proposed"]))
    changes = SpecChanges(in_force, proposed)
    return fields, Offer(list(fields["records"]), roster, None, changes)
