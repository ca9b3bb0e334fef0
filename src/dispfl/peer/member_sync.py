"""The client half of membership sync: compares specs and rounds, and fetches records and rosters.

The messages are in `membership/sync.py`; the server half is in `server.py`.
"""

import asyncio
import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dispfl.errors import MessageError, RunError
from dispfl.peer.deadlines import Deadlines
from dispfl.peer.membership.sync import (
    SyncMessage,
    check_part,
    check_progress,
    request_changes,
    request_roster,
)
from dispfl.peer.node_context import NodeContext
from dispfl.peer.transport.base import Refused, Request, Transport, Unreachable
from dispfl.wire.refusals import Refusal

MAX_GREETED = 32
"""Members that a starting node greets at most."""


@dataclass(frozen=True)
class WaitReason:
    """Why a node waits."""

    topic: str
    """What kind of reason it is."""
    text: str


@dataclass
class MemberSync:
    """Syncs with other members."""

    ctx: NodeContext
    transport: Transport
    deadlines: Deadlines
    rng: random.Random

    def __post_init__(self) -> None:
        self._was_listed = False
        """Whether the roster has listed this site."""

    def members_to_greet(self, t: int) -> list[str]:
        """Choose the members that a node greets when it starts: neighbours, and some others."""
        participants = self.ctx.participants
        neighbours = participants.neighbours(t)[:MAX_GREETED]
        last_round = self.ctx.rounds - 1  # also those that have joined meanwhile
        strangers = sorted(set(participants.other_names(last_round)) - set(neighbours))
        count = min(len(strangers), MAX_GREETED - len(neighbours))
        return neighbours + self.rng.sample(strangers, count)

    # the federation's round

    def names(self) -> list[str]:
        """All accepted members with our spec, also those that join later."""
        last_round = self.ctx.rounds - 1
        peers = self.ctx.status.peers
        names = self.ctx.participants.other_names(last_round)
        return [name for name in names if name not in peers or not peers[name].spec_mismatch]

    def reported_rounds(self, names: Sequence[str]) -> list[int]:
        """The rounds that these members have reported; -1 where a member has reported none."""
        peers = self.ctx.status.peers
        return [peers[name].round if name in peers else -1 for name in names]

    async def ask_rounds(self, t: int) -> list[str]:
        """Ask members for their rounds, some at a time, until it is clear whether t is over.

        Returns those that answered.
        """
        peers = self.ctx.status.peers
        remaining = self._in_asking_order(t)
        answering: list[str] = []
        while remaining:
            asked_names = remaining[:MAX_GREETED]
            remaining = remaining[MAX_GREETED:]
            replies_before = {name: peers[name].replies for name in asked_names}
            await self.sync(asked_names)
            answering += [
                name for name in asked_names if peers[name].replies > replies_before[name]
            ]
            if self.agreed_round(t) is not None:
                break
        return answering

    def _in_asking_order(self, t: int) -> list[str]:
        """All members: first those that a starting node greets, then the others."""
        greeted = self.members_to_greet(t)
        last_round = self.ctx.rounds - 1
        strangers = sorted(set(self.ctx.participants.other_names(last_round)) - set(greeted))
        return greeted + self.rng.sample(strangers, len(strangers))

    def agreed_round(self, t: int) -> int | None:
        """The round of the federation, as far as it is known (`agreed_round`)."""
        return agreed_round(t, self.reported_rounds(self.names()))

    def disagreement(self, t: int) -> WaitReason | None:
        """Say that too few members report a later round to follow them; None if none does."""
        reported = self.reported_rounds(self.names())
        beyond = [claim for claim in reported if claim > t + 1]
        if not beyond or agreed_round(t, reported) not in (None, t):
            return None
        verb = "reports" if len(beyond) == 1 else "report"
        text = (
            f"{len(beyond)} of {len(reported)} members {verb} round {min(beyond)} or later; more"
            f" than half must agree, or start with --round {min(beyond)}"
        )
        return WaitReason("disagreement", text)

    def revocations(self) -> WaitReason | None:
        """Say which members have revoked us, by what they say; None if none has."""
        texts = {}
        for name, peer in sorted(self.ctx.status.peers.items()):
            if peer.revocation:
                texts[name] = peer.revocation
        if not texts:
            return None
        names = ", ".join(texts)
        last_text = list(texts.values())[-1]
        text = f"refused by {names}: {last_text} Ask the administrators or these sites."
        return WaitReason("revoked", text)

    def stop_if_removed(self) -> None:
        """Stop once a signed roster that listed this site does not list it any more."""
        roster = self.ctx.membership.roster()
        if roster is None:
            return
        is_listed = self.ctx.name in roster.members()
        if self._was_listed and not is_listed:
            signers = ", ".join(sorted(roster.signatures))
            raise RunError(
                f"Version {roster.version} of the roster, signed by {signers}, does not list"
                f" {self.ctx.name} any more: this site is no longer a member of the federation."
            )
        self._was_listed = is_listed

    def stop_if_all_mismatch(self, t: int) -> None:
        """Stop if all members have another spec, or, after the startup period, all reachable ones.

        One matching peer is enough to continue, so that no other member can stop this peer.
        """
        peers = self.ctx.status.peers
        other_names = self.ctx.participants.other_names(t)
        contacted = [peers[name] for name in other_names if name in peers]
        mismatches = [peer.spec_mismatch for peer in contacted if peer.spec_mismatch]
        if not mismatches or any(peer.was_seen for peer in contacted):
            return
        is_started_up = self.deadlines.is_started_up(asyncio.get_running_loop().time())
        if len(mismatches) == len(other_names) or is_started_up:
            raise RunError(f"No reachable peer accepts our settings. {mismatches[0]}")

    # sync

    async def sync(self, names: Sequence[str]) -> None:
        """Greet these peers, comparing federation specs, and fetch the records that we lack.

        They are fetched from one peer after the other: what one has sent, the next need not send
        again.
        """
        greetings: dict[str, SyncMessage] = {}
        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(self._greet(name, greetings))

        clock = asyncio.get_running_loop().time
        end = clock() + self.deadlines.min  # what is left is fetched at the next sync
        for name in self.rng.sample(sorted(greetings), len(greetings)):
            with self.problems_logged(name):
                async with asyncio.timeout(max(0.0, end - clock())):
                    await self._fetch_roster(name, greetings[name])
                    await self._fetch_records(name, greetings[name])
                    await self._fetch_changes(name, greetings[name])

    async def _greet(self, name: str, greetings: dict[str, SyncMessage]) -> None:
        with self.problems_logged(name):
            async with asyncio.timeout(self.deadlines.probe_timeout):
                offer = await self.ctx.offer()
                greetings[name] = await self._request(name, offer.greeting())

    async def _fetch_records(self, name: str, greeting: SyncMessage) -> None:
        """Fetch the records that we lack, in pages."""
        offer = await self.ctx.offer()
        if greeting.state in (None, offer.state):
            return
        after: str | None = ""
        while after is not None:
            offer = await self.ctx.offer()
            page = await self._request(name, offer.request_after(after))
            check_progress(page, after)
            after = page.next

    async def _fetch_roster(self, name: str, greeting: SyncMessage) -> None:
        """Fetch a roster that is newer than ours, or contradicts it, in parts."""
        if greeting.roster is None or not self.ctx.membership.lacks_roster(*greeting.roster):
            return
        parts: list[str] = []
        size = 1
        while sum(map(len, parts)) < size:
            response = await self._request(name, request_roster(parts))
            check_part(response, parts)
            parts.append(response.part)
            size = response.size
        await self.ctx.compute(lambda: self.ctx.membership.merge_roster("".join(parts)))

    async def _fetch_changes(self, name: str, greeting: SyncMessage) -> None:
        """Fetch the changes of the spec, and their signatures, that we lack.

        Of the signatures that this peer lacks, it learns when it greets us.
        """
        versions = self.ctx.versions
        changes = versions.changes()
        if greeting.spec in (None, changes.state):
            return
        response = await self._request(name, request_changes(changes.version))
        await self.ctx.compute(lambda: versions.merge(response.changes))

    async def _request(self, name: str, body: bytes) -> SyncMessage:
        """Send one sync request, and merge the records in the response."""
        request = Request("sync", self.ctx.sync_header(), body)
        response = await self.transport.request(name, request)
        self.ctx.note_response(name, response.header)
        return await self.ctx.read_sync(name, response.body)

    @contextlib.contextmanager
    def problems_logged(self, name: str) -> Iterator[None]:
        """Log why a sync with a peer failed, and continue."""
        ctx = self.ctx
        try:
            yield
        except Refused as refused:
            ctx.status.peers[name].refusals += 1
            if refused.reason == Refusal.REVOKED:
                ctx.note_revocation(name, refused.message)
            if refused.reason == Refusal.SPEC_MISMATCH:
                ctx.note_spec_mismatch(name, refused.message)
            else:
                ctx.peer_log.problem(name, "refused", refused.message, refused.reason)
        except TimeoutError:
            self.log_waiting(name, "no response in time")
        except Unreachable as problem:
            self.log_waiting(name, problem.detail)
        except MessageError as problem:
            ctx.guard.count(name, problem.refusal)
            ctx.peer_log.event(name, "sync failed", detail=str(problem))
        except Exception as problem:  # a problem with one peer must not end the node
            self.mark_failed(name, problem)

    def log_waiting(self, name: str, detail: str) -> None:
        """Log that a peer which never responded is waited for: it may still be starting."""
        peer = self.ctx.status.peers[name]
        if not peer.was_seen and not peer.unreachable:
            self.ctx.peer_log.problem(name, "waiting", detail)

    def mark_failed(self, name: str, problem: Exception) -> None:
        """Continue without a peer after an unexpected error, for example about its address."""
        self.ctx.status.peers[name].mark_unreachable()
        self.ctx.peer_log.problem(name, "failed", f"{type(problem).__name__}: {problem}")


def agreed_round(t: int, reported: Sequence[int]) -> int | None:
    """Return the round that more than half of all members have reached, or t if it is not beyond.

    `reported` has an entry for each member, -1 for those that have not reported any. A few members
    may lie, and may be the only ones that answer. So members that have not answered count, too: the
    result is None while it depends on them.
    """
    furthest_served = t + 1  # peers keep their models for two rounds
    beyond = [claim for claim in reported if claim > furthest_served]
    silent = [claim for claim in reported if claim < 0]
    if 2 * len(beyond) > len(reported):
        return sorted(reported, reverse=True)[len(reported) // 2]
    if not beyond or 2 * (len(beyond) + len(silent)) <= len(reported):
        return t
    return None
