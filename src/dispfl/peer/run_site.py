"""Runs the node of a site: real network, real disk, and threads for training and for the codec."""

import asyncio
import contextlib
import random
import secrets
import signal
import ssl
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from shlex import quote
from typing import Any, TypeVar

import torch

from dispfl.core.allocator import keep_heap
from dispfl.core.flat_module import FlatModule
from dispfl.core.packed import PackedModel
from dispfl.core.report import Report
from dispfl.errors import DispflError, RunError
from dispfl.methods.base import PeerState
from dispfl.peer.client import Client
from dispfl.peer.deadlines import Deadlines
from dispfl.peer.membership import sync
from dispfl.peer.membership.audit_log import changes, limited
from dispfl.peer.membership.identity import client_context, pin, server_context
from dispfl.peer.membership.member_list import MemberList
from dispfl.peer.membership.sync import SiteMembership
from dispfl.peer.node import Node
from dispfl.peer.node_context import NodeContext
from dispfl.peer.setup.local_setup import LocalSetup, local_setup
from dispfl.peer.site import Site
from dispfl.peer.state.log import EventLog, event_logger, logging_as_events
from dispfl.peer.state.status import ServiceManager
from dispfl.peer.state.store import PeerStore, PrivateRounds, SavingThread, rounds_of, unheard
from dispfl.peer.transport.base import Limits
from dispfl.peer.transport.guard import RequestGuard
from dispfl.peer.transport.https import HttpsTransport
from dispfl.privacy.steps import KEY_BYTES
from dispfl.round.context import PeerTask, RunContext, StepResult
from dispfl.round.round import peer_step
from dispfl.wire.codec import HEADER

T = TypeVar("T")


class TrainingThread:
    """Takes training steps on a thread, with `threads` torch threads; one makes results
    reproducible."""

    def __init__(
        self, context: RunContext, threads: int = 1, private: PrivateRounds | None = None
    ) -> None:
        keep_heap()
        self._context, self._private = context, private
        self._network = FlatModule(context.module(), context.device, context.precision)
        self._pool = ThreadPoolExecutor(
            1, "training", initializer=torch.set_num_threads, initargs=(threads,)
        )
        self._stopped = threading.Event()

    async def step(
        self, task: PeerTask, state: PeerState, received: Mapping[str, PackedModel]
    ) -> StepResult:
        """Take a step without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, self._step, task, state, received
        )

    def _step(
        self, task: PeerTask, state: PeerState, received: Mapping[str, PackedModel]
    ) -> StepResult:
        if self._private is not None:
            try:
                history = self._private.begin(self._context.privacy_plan(task.peer), state)
            except (
                RunError
            ) as problem:  # a full disk, say: what is spent must be written down first
                failure = f"Peer {task.peer}, round {task.t}: it does not train. {problem}"
                return StepResult(Report(failure=failure), state=state)
            task = replace(task, private=history)
        return peer_step(self._context, self._network, task, state, received, self._check_stop)

    def close(self) -> None:
        """Stop after the current batch."""
        self._stopped.set()
        self._pool.shutdown()

    def _check_stop(self) -> None:
        if self._stopped.is_set():
            raise InterruptedError("stopped between two batches")


class CodecExecutor:
    """Encodes, decodes and verifies messages on a thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(
            1, "messages", initializer=torch.set_num_threads, initargs=(1,)
        )

    async def __call__(self, work: Callable[[], T]) -> Any:
        """Return the result of the work."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Stop the thread."""
        self._pool.shutdown()


STATUS_INTERVAL = 0.5
"""Seconds between two checks of the members file and two updates of the status file."""
BODY_MARGIN = 4096
"""Bytes that a body may exceed the largest message by, so that the codec reports what is wrong with
it."""


def run_site(site: Site, log_json: bool = False, *, alone: bool = True) -> None:
    """Run a site to the last round. SIGTERM and Ctrl-C stop it between two batches; it can be
    resumed.

    Without `alone`, a site without accepted members does not start.
    """
    if not (alone or site.members.names() or rounds_of(site.run_folder)):
        raise RunError(
            f"{site.name} has accepted no other site and would train alone: exchange invites "
            f"(dispfl peer accept {quote(str(site.folder))} INVITE), or pass --alone."
        )
    log = event_logger(site.name, log_json)
    with logging_as_events(log), contextlib.suppress(asyncio.CancelledError):
        config, setup = site.config(), local_setup(site)
        asyncio.run(
            run_node(
                site,
                setup,
                config.deadlines.start(),
                log,
                config.limits,
                ServiceManager.of_process(),
            )
        )


async def run_node(
    site: Site,
    setup: LocalSetup,
    deadlines: Deadlines,
    log: EventLog,
    limits: Limits | None = None,
    service: ServiceManager | None = None,
) -> PeerState:
    """Run a site's node to the last round, resuming from its last checkpoint."""
    loop, me, signals = asyncio.get_running_loop(), asyncio.current_task(), list[str]()
    assert me is not None

    def stop(which: signal.Signals) -> None:
        signals.append(which.name)
        if len(signals) == 1:  # a second one would break off the last save
            me.cancel()

    for which in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(which, stop, which)
    async with open_node(site, setup, deadlines, log, limits, service) as (node, saving):
        try:
            final = await node.run(*(saving.store.last() or (0, setup.initial_state())))
            await saving.wait_until_saved()
        except asyncio.CancelledError:
            log("stopped", {"round": node.ctx.status.round, "by": signals})
            raise
        saving.store.finish(setup.run, final)
        log("finished", {"score": node.ctx.status.score})
        if problem := unheard(site.run_folder):
            raise RunError(f"{site.name}: {problem}")
    return final


@contextlib.asynccontextmanager
async def open_node(
    site: Site,
    setup: LocalSetup,
    deadlines: Deadlines,
    log: EventLog,
    limits: Limits | None = None,
    service: ServiceManager | None = None,
) -> AsyncIterator[tuple[Node, SavingThread]]:
    """Open a site's node and its store; both are closed at the end."""
    opened = PeerStore(
        site.run_folder, site.name, setup.spec, setup.settings, setup.cost(), setup.run.task
    )
    with contextlib.closing(opened) as store:
        run, private = setup.run, None
        if run.privacy.enabled:
            # A key of this process alone: with one from the disk, a site that is set back to a
            # backup, or a copy of the site, would add the same noise to other gradients.
            run = replace(run, secret_key=secrets.token_bytes(KEY_BYTES), known_layout=run.layout)
            private = PrivateRounds(site.run_folder)
        training, executor = TrainingThread(run, setup.threads, private), CodecExecutor()
        membership = SiteMembership(site, setup.run.method, setup.layout, setup.density)
        first_round = site.members.own_first_round
        site.members.announce(
            site.identity, site.info.address, setup.density, first_round, again=True
        )
        guard = RequestGuard()
        network = SiteNetwork(site, setup, membership, limits or Limits(), guard)
        ctx = NodeContext(
            site.name,
            setup.run,
            setup.codec(),
            setup.spec,
            membership,
            executor,
            log,
            guard=guard,
            listening=str(site.info.listen_address),
        )
        if private is not None:
            with contextlib.suppress(
                RunError
            ):  # a file that cannot be read is reported by every round
                ctx.status.epsilon, ctx.status.privacy_exhausted = private.spent(
                    run.privacy_plan(site.name)
                )
        client = Client(ctx, network.transport, deadlines, random.Random())
        saving, status_thread = (
            SavingThread(store, ctx.status, log),
            ThreadPoolExecutor(1, "status"),
        )
        background = [
            asyncio.create_task(_watch_site(site, ctx, network, site.members.file.latest())),
            asyncio.create_task(_write_status(site, ctx, network, status_thread)),
            asyncio.create_task(saving.retry()),
            asyncio.create_task(
                (service or ServiceManager()).watch(
                    ctx.status, lambda: network.transport.is_serving
                )
            ),
        ]
        try:
            yield Node(ctx, client, training, saving), saving
        finally:
            for task in background:
                task.cancel()
            await asyncio.wait(background)
            with contextlib.suppress(
                DispflError
            ):  # what members have announced comes again with the next sync
                site.members.file.save()
            await network.transport.close()
            training.close()
            executor.close()
            saving.close()
            status_thread.shutdown()
            if ctx.status.state != "finished":
                ctx.status.state = "stopped"
            try:
                site.write_status(current_status(site, ctx, network))
            except (
                DispflError,
                OSError,
            ) as problem:  # not raised: it would hide the exception that ended the node
                log("problem", {"detail": str(problem)})


class SiteNetwork:
    """The transport and its TLS contexts, which trust new members while it runs."""

    def __init__(
        self,
        site: Site,
        setup: LocalSetup,
        membership: SiteMembership,
        limits: Limits,
        guard: RequestGuard,
    ) -> None:
        pinned = site.members.pinned()
        self.contexts: tuple[ssl.SSLContext, ssl.SSLContext] = (
            client_context(site.identity, pinned),
            server_context(site.identity, pinned),
        )
        mask, values = setup.layout.size // 8, 4 * (setup.layout.size + len(setup.layout.sizes))
        requests = {"sync": sync.MAX_BODY_BYTES, "model": HEADER.size + mask + BODY_MARGIN}
        responses = {
            "sync": sync.MAX_BODY_BYTES,
            "model": HEADER.size + mask + values + BODY_MARGIN,
        }
        self.transport = HttpsTransport(
            site.name,
            site.info.listen_address,
            client=self.contexts[0],
            server=self.contexts[1],
            identify=membership.identify,
            address=membership.address,
            max_request=lambda kind: requests.get(kind, 0),
            max_response=lambda kind: responses.get(kind, 0),
            limits=limits,
            guard=guard,
            may_connect=site.info.may_connect,
        )
        self.previous = previous_traffic(site)
        self._generation = site.members.generation
        self._pinned = set(pinned)

    async def follow_members(self, site: Site) -> None:
        """Trust certificates that were accepted since the last call, and no longer those that were
        not kept."""
        generation = site.members.generation
        if generation == self._generation:
            return
        pinned = set(site.members.pinned())
        if self._pinned - pinned:  # certificates cannot be removed from a context
            server = await asyncio.to_thread(server_context, site.identity, pinned)
            self.contexts = (self.contexts[0], server)
            self.transport.use_server_context(server)
        for certificate in pinned - self._pinned:
            for context in self.contexts:
                pin(context, certificate)
        self._generation, self._pinned = generation, pinned  # last: what fails is tried again

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes sent and received on the sockets, including TLS and HTTP."""
        counters = self.transport.counters.traffic.values()
        return {
            "sent": sum(counter.sent for counter in counters),
            "received": sum(counter.received for counter in counters),
        }


async def _watch_site(
    site: Site, ctx: NodeContext, network: SiteNetwork, members: MemberList
) -> None:
    """Apply changes of the members by other processes and by members, save and log them."""
    counted, last_problem = Counter[str](), ""
    for problem in site.members.file.problems:
        ctx.log("problem", {"detail": f"{site.members.path}: {problem}"})
    while True:
        try:
            members, before = site.members.file.current(), members
            try:
                await network.follow_members(site)
            finally:  # also if that fails: it needs some space on the disk
                for change in limited(changes(before, members), counted):
                    if change.event == "revoked":
                        await network.transport.disconnect(change.member)
                    ctx.log(change.event, {"peer": change.member or None} | dict(change.detail))
            await ctx.compute(site.members.file.save)
            last_problem = ""
        except (DispflError, OSError) as problem:
            if last_problem != str(problem):
                last_problem = str(problem)
                ctx.log("problem", {"detail": last_problem})
        await asyncio.sleep(STATUS_INTERVAL)


async def _write_status(
    site: Site, ctx: NodeContext, network: SiteNetwork, thread: ThreadPoolExecutor
) -> None:
    """Update the status file, on a thread; also while the members cannot be saved."""
    last_problem = ""
    while True:
        problem = ""
        try:
            status = current_status(site, ctx, network)
            await asyncio.get_running_loop().run_in_executor(thread, site.write_status, status)
        except (DispflError, OSError) as error:
            problem = str(error)
        if problem and problem != last_problem:
            ctx.log("problem", {"detail": problem})
        last_problem = problem
        await asyncio.sleep(STATUS_INTERVAL)


def current_status(site: Site, ctx: NodeContext, network: SiteNetwork) -> dict[str, Any]:
    """The status that `dispfl peer status` reads."""
    found = ctx.status.as_json()
    epoch = (
        time.time() - asyncio.get_running_loop().time()
    )  # the loop's clock does not start in 1970
    for peer in found["peers"].values():
        for when in ("last_seen", "last_request"):
            peer[when] = None if peer[when] is None else peer[when] + epoch
    found["sockets"], found["sockets_previous"] = network.traffic, network.previous
    found["updated"] = time.time()
    found["known"] = [
        {"name": record.name, "address": str(record.address), "fingerprint": record.fingerprint}
        for record in site.members.known()
    ]
    return found


def previous_traffic(site: Site) -> dict[str, int]:
    """The socket traffic of earlier runs of the node, as far as the status file has it."""
    try:
        found = site.status() or {}
        counted = (found["sockets"], found["sockets_previous"])
        return {way: sum(int(each[way]) for each in counted) for way in ("sent", "received")}
    except (RunError, KeyError, TypeError, ValueError):
        return {"sent": 0, "received": 0}
