"""Probes unreachable members in the background, ever less often, until they answer."""

import asyncio
import contextlib
from dataclasses import dataclass

from dispfl.peer.member_sync import MemberSync
from dispfl.peer.node_context import NodeContext

MIN_PAUSE = 1.0
MAX_PAUSE = 30.0
"""Seconds between two probes of a member; doubled each time."""
PROBES_PER_SECOND = 2.0
"""Of all members together; where many are unreachable, each is probed less often."""


@dataclass
class Prober:
    """The probes of one node. No round waits for them."""

    ctx: NodeContext
    members: MemberSync

    def __post_init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def watch(self, name: str) -> "asyncio.Task[None]":
        """Probe a member until it answers, from now on."""
        if name not in self._tasks:
            task = asyncio.get_running_loop().create_task(self._probe(name))
            self._tasks[name] = task
            task.add_done_callback(lambda _: self._tasks.pop(name, None))
        return self._tasks[name]

    async def until_reachable(self, name: str) -> None:
        """Wait until a member answers a probe."""
        peer = self.ctx.status.peers[name]
        while not peer.is_usable:
            await asyncio.shield(self.watch(name))
            if not peer.is_usable:  # it was revoked
                await asyncio.sleep(MAX_PAUSE)

    async def close(self) -> None:
        """Stop probing."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe(self, name: str) -> None:
        peer = self.ctx.status.peers[name]
        pause = MIN_PAUSE
        while not peer.is_usable:
            await self.members.sync([name])
            if peer.is_usable or not self._is_member(name):
                return
            longest = max(MAX_PAUSE, len(self._tasks) / PROBES_PER_SECOND)
            await self._pause(name, min(pause, longest))
            pause = min(2 * pause, longest)

    def _is_member(self, name: str) -> bool:
        return name in self.ctx.participants.other_names(self.ctx.rounds - 1)

    async def _pause(self, name: str, seconds: float) -> None:
        """Sleep until the next probe, or until the member contacts us: then it is up again."""
        await asyncio.sleep(MIN_PAUSE)
        contact = self.ctx.contact_of(name)
        contact.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds - MIN_PAUSE):
                await contact.wait()
