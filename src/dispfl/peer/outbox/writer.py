"""Keeps a site's own outbox up to date: its models, its member list, and the head.

Objects are stored first, then the head that names them; then objects that no head names any more
are deleted. A node does not wait for it: what cannot be stored now is stored later.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dispfl.core.packed import PackedModel
from dispfl.errors import DispflError
from dispfl.peer.membership.identity import Identity
from dispfl.peer.node_context import NodeContext
from dispfl.peer.outbox.head import HEAD, HeadContent, StoredModel, StoredRef, write_head
from dispfl.peer.outbox.reader import stored_offer
from dispfl.peer.outbox.sealing import require_sealing
from dispfl.peer.outbox.state import OutboxState
from dispfl.peer.outbox.storage import Storage, StorageAccess, open_storage
from dispfl.round.exchange import encode_model

if TYPE_CHECKING:
    from dispfl.peer.site import Site

KEEP_ROUNDS = 8
"""Rounds whose models stay in an outbox; older ones are deleted."""
WATCH_SECONDS = 0.5
"""How often changes of the member list are looked for; a new model is stored at once."""
FIRST_PAUSE = 1.0
MAX_PAUSE = 30.0
"""Most seconds before a failed access, or a question for a key, is repeated."""
LAST_SECONDS = 10.0
"""For the last head of a node that ends."""


class OutboxWriter:
    """Writes one site's outbox."""

    def __init__(
        self,
        place: str,
        storage: Storage,
        identity: Identity,
        ctx: NodeContext,
        state: OutboxState,
        site: "Site",
    ) -> None:
        self.place = place
        self.problem: str | None = "nothing is stored yet"
        """Why the outbox is not up to date; None if it is."""
        self._storage = storage
        self._identity = identity
        self._ctx = ctx
        self._state = state
        self._site = site
        self._stored: dict[int, PackedModel] = {}
        """The models that this process has stored, by round."""
        self._sync: StoredRef | None = None
        self._sync_source: tuple[object, object] = (None, None)
        """What was stored for syncs: the version of the spec, and the member list."""
        self._facts: object = None
        """What the last head says."""

    @classmethod
    def of_site(
        cls,
        site: "Site",
        ctx: NodeContext,
        state: OutboxState,
        access: StorageAccess,
    ) -> "OutboxWriter | None":
        """The writer of a site; None if it has no outbox."""
        place = site.info.outbox
        if place is None:
            return None
        require_sealing()
        storage = open_storage(place, access)
        return cls(place, storage, site.identity, ctx, state, site)

    def status(self) -> dict[str, Any]:
        """Where the outbox is, how far it is, and what is wrong with it."""
        return {"place": self.place, "rounds": sorted(self._state.models), "problem": self.problem}

    async def run(self) -> None:
        """Store what changes, for ever."""
        pause = WATCH_SECONDS
        while True:
            try:
                await self.update()
                self._note(None)
                pause = WATCH_SECONDS
            except Exception as problem:  # a problem with the outbox must not end the node
                text = str(problem).rstrip(".") or type(problem).__name__
                self._note(text if isinstance(problem, DispflError) else repr(problem))
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE)
            await self._ctx.published.wait_for_change(WATCH_SECONDS)

    async def learn_keys(self, sync: Callable[[Sequence[str]], Awaitable[None]]) -> None:
        """Ask members for their records whose sealing keys we lack, for ever.

        A member that is no recipient cannot read this outbox, and may have no other way to tell us.
        """
        pause = FIRST_PAUSE
        while True:
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE)
            with contextlib.suppress(DispflError):  # a member list that cannot be read now
                names = self._site.members.names()
                await sync(sorted(set(names) - self._recipients().keys()))

    async def write_last(self) -> None:
        """Store what the node has ended with, if the storage answers."""
        with contextlib.suppress(Exception):  # what ended the node counts more
            async with asyncio.timeout(LAST_SECONDS):
                await self.update()

    async def update(self) -> None:
        """Store new models and a changed member list, then the head."""
        published_models = self._ctx.published.models()
        self._drop_reopened_models(published_models)
        for t, model in published_models.items():
            if self._stored.get(t) is not model:
                await self._store_model(t, model)
        self._drop_old_models()
        await self._store_sync()
        await self._store_head()
        await self._delete_garbage()

    async def _store_model(self, t: int, model: PackedModel) -> None:
        ctx = self._ctx

        def seal() -> tuple[StoredRef, bytes]:
            # One message for all receivers, so no receiver names the stream of roundings.
            frame = encode_model(ctx.run, ctx.codec, model, None, ctx.name, "", t)
            return StoredRef.seal(frame)

        ref, ciphertext = await ctx.compute(seal)
        await self._put(ref, ciphertext)
        before = self._state.models.get(t)
        if before is not None:
            self._state.garbage.append(before.object.name)
        self._state.garbage.remove(ref.name)
        spec = ctx.versions.at(t).digest
        self._state.models[t] = StoredModel(t, spec, model.values.numel(), ref)
        self._stored[t] = model

    def _drop_reopened_models(self, published_models: Mapping[int, PackedModel]) -> None:
        """Drop models of rounds after the published ones: a site that was reopened has gone back
        before them, or one that was killed had not saved them."""
        newest = max(published_models, default=None)
        for t in sorted(self._state.models):
            if newest is not None and t > newest:
                self._state.garbage.append(self._state.models.pop(t).object.name)

    def _drop_old_models(self) -> None:
        for t in sorted(self._state.models)[:-KEEP_ROUNDS]:
            self._state.garbage.append(self._state.models.pop(t).object.name)
        for t in self._stored.keys() - self._state.models.keys():
            del self._stored[t]

    async def _store_sync(self) -> None:
        """Store the spec and the member list, if they have changed."""
        ctx = self._ctx
        latest = ctx.versions.latest
        offer = await ctx.offer()
        last_version, last_offer = self._sync_source
        if latest is last_version and offer is last_offer:
            return

        def seal() -> tuple[StoredRef, bytes]:
            return StoredRef.seal(stored_offer(dict(latest.spec), latest.number, offer))

        ref, ciphertext = await ctx.compute(seal)
        await self._put(ref, ciphertext)
        if self._sync is not None:
            self._state.garbage.append(self._sync.name)
        self._sync = ref  # it stays among the garbage of the state: the next process stores another
        self._sync_source = (latest, offer)

    async def _store_head(self) -> None:
        """Sign and store a head, if what it says has changed."""
        ctx = self._ctx
        record = self._site.members.file.latest().own
        recipients = self._recipients()
        models = tuple(self._state.models[t] for t in sorted(self._state.models))
        about = ctx.about_us()
        about.pop("asleep_for", None)  # it changes all the time: the head says when that ends
        wakes_at = ctx.schedule.wakes_at()
        assert record is not None
        assert self._sync is not None
        facts = (record.digest, recipients, models, self._sync, about, wakes_at, ctx.joining)
        if facts == self._facts:
            return
        serial = self._state.next_serial()
        self._state.save()
        content = HeadContent(serial, about, wakes_at, ctx.joining, self._sync, models)
        head = await ctx.compute(
            lambda: write_head(self._identity, record, recipients.values(), content)
        )
        await self._storage.write(HEAD, head)
        self._facts = facts
        for t in self._stored:
            for receiver in ctx.published.mark_stored(t):
                ctx.status.peers[receiver].sent_bytes += self._state.models[t].object.size

    def _recipients(self) -> Mapping[str, str]:
        """The sealing keys of the accepted members, by name."""
        keys = {}
        for member in self._site.members.accepted():
            if member.record is not None and member.record.sealing_key is not None:
                keys[member.name] = member.record.sealing_key
        return keys

    async def _put(self, ref: StoredRef, ciphertext: bytes) -> None:
        """Store an object, noted as garbage until a head names it."""
        self._state.garbage.append(ref.name)
        self._state.save()
        await self._storage.write(ref.name, ciphertext)

    async def _delete_garbage(self) -> None:
        current = self._sync.name if self._sync else ""
        for name in list(self._state.garbage):
            if name != current:
                await self._storage.delete(name)
                self._state.garbage.remove(name)

    def _note(self, problem: str | None) -> None:
        """Log when the outbox begins to fail, and when it works again."""
        if problem == self.problem:
            return
        self.problem = problem
        fields: dict[str, object] = {"outbox": self.place}
        if problem is not None:
            fields["detail"] = problem
        self._ctx.log("outbox" if problem is None else "outbox not stored", fields)
