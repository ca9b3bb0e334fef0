"""Runs the node of a site: real network, real disk, and threads for training and for the codec."""

import asyncio
import contextlib
import random
import secrets
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dispfl.core.allocator import keep_heap
from dispfl.core.packed import PackedModel
from dispfl.core.report import Report
from dispfl.errors import DispflError, RunError
from dispfl.methods.base import PeerState
from dispfl.peer.async_node import AsyncNode
from dispfl.peer.client import Client
from dispfl.peer.deadlines import Deadlines
from dispfl.peer.membership.address import reach_text
from dispfl.peer.membership.sync import SiteMembership
from dispfl.peer.node import Node
from dispfl.peer.node_context import NodeContext
from dispfl.peer.outbox.sealing import can_seal
from dispfl.peer.outbox.state import OutboxState
from dispfl.peer.outbox.writer import OutboxWriter
from dispfl.peer.setup.local_setup import LocalSetup, local_setup
from dispfl.peer.setup.site_config import SiteConfig
from dispfl.peer.setup.site_data import DataWatch
from dispfl.peer.setup.spec_versions import site_versions
from dispfl.peer.site import Site
from dispfl.peer.site_network import SiteNetwork
from dispfl.peer.state.log import EventLog, RecentEvents, event_logger, logging_as_events
from dispfl.peer.state.metrics import node_metrics, reach_metrics, serve_metrics, site_metrics
from dispfl.peer.state.status import FINISHED, FINISHED_ALONE, NodeStatus, ServiceManager
from dispfl.peer.state.store import (
    Company,
    PeerStore,
    PrivateRounds,
    SavingThread,
    isolation_problem,
    rounds_of,
)
from dispfl.peer.transport.guard import RequestGuard
from dispfl.peer.transport.http import Limits
from dispfl.privacy.steps import KEY_BYTES
from dispfl.round.context import PeerTask, RunContext, StepResult
from dispfl.round.round import peer_step
from dispfl.runs.directory import check_learned, read_metrics
from dispfl.view.settings import serving_site

if TYPE_CHECKING:
    from prometheus_client.core import Metric

T = TypeVar("T")
STATUS_INTERVAL = 0.5
"""Seconds between two updates of the status file, and two checks for a request to stop."""


def run_site(
    site: Site, log_json: bool = False, *, alone: bool = True, at_round: int | None = None
) -> None:
    """Run a site to the last round. SIGTERM, Ctrl-C and `Site.request_stop` stop it between two
    batches; it can be resumed.

    Without `alone`, a site without accepted members does not start. It continues `at_round`, if
    the operator says so, instead of the round that the members agree on.
    """
    has_company = site.members.names() or rounds_of(site.run_folder)
    if not alone and not has_company:
        raise RunError(
            f"{site.name} has accepted no other site and would train alone: {_first_step(site)},"
            " or pass --alone."
        )
    log = event_logger(site.name, log_json)
    with logging_as_events(log), contextlib.suppress(asyncio.CancelledError):
        config = site.config()
        setup = local_setup(site)
        service = ServiceManager.of_process()
        deadlines = config.deadlines.start()
        asyncio.run(run_node(site, setup, deadlines, log, config.limits, service, at_round))
        check_learned(site.run_folder)


def _first_step(site: Site) -> str:
    """What the operator of a site without members does, with the command."""
    folder = quote(str(site.folder))
    pending = site.members.pending()
    if not pending:
        return f"exchange invites (dispfl peer accept {folder} INVITE)"
    command = f"dispfl peer confirm {folder} {' '.join(pending)}"
    return f"compare the fingerprints of pending sites by phone ({command})"


async def run_node(
    site: Site,
    setup: LocalSetup,
    deadlines: Deadlines,
    log: EventLog,
    limits: Limits | None = None,
    service: ServiceManager | None = None,
    at_round: int | None = None,
) -> PeerState:
    """Run a site's node to the last round, resuming from its last checkpoint."""
    stopper = _Stopper(site)
    stopper.handle_signals()
    async with (
        open_node(site, setup, deadlines, log, limits, service) as (node, saving),
        _in_background([stopper.watch_requests()]),
    ):
        try:
            t, state = saving.store.last() or (0, setup.initial_state())
            last_state = await node.run(t, state, at_round)
            await saving.wait_until_saved()
        except asyncio.CancelledError:
            log("stopped", {"round": node.ctx.status.round, "by": stopper.reasons})
            raise
        saving.store.finish(setup.run, last_state)
        log(node.ctx.status.state, {"score": node.ctx.status.score})
        problem = isolation_problem(site.run_folder)
        if problem:
            raise RunError(f"{site.name}: {problem}")
    return last_state


class _Stopper:
    """Stops the current task on SIGINT, SIGTERM, or the request of another process."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._task = asyncio.current_task()
        self.reasons: list[str] = []

    def handle_signals(self) -> None:
        """Stop on signals, which only the main thread receives."""
        if threading.current_thread() is not threading.main_thread():
            return
        loop = asyncio.get_running_loop()
        for stop_signal in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(stop_signal, self._stop, stop_signal.name)

    async def watch_requests(self) -> None:
        """Stop once another process requests it."""
        while not self._site.is_stop_requested():
            await asyncio.sleep(STATUS_INTERVAL)
        self._stop("request")

    def _stop(self, reason: str) -> None:
        self.reasons.append(reason)
        if len(self.reasons) == 1:  # a second one would break off the last save
            assert self._task is not None
            self._task.cancel()


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
    log = RecentEvents(log)
    # What is opened last is closed first.
    async with contextlib.AsyncExitStack() as stack:
        store = PeerStore(
            site.run_folder, site.name, setup.spec, setup.settings, setup.cost(), setup.run.task
        )
        stack.callback(store.close)
        if setup.data is not None:
            setup.data.begin(log)
        site.withdraw_stop_request()  # to an earlier process
        stack.callback(site.withdraw_stop_request)

        membership = SiteMembership(site, setup.run.method, setup.layout, setup.density)
        _announce(site, setup)
        guard = RequestGuard()
        network = SiteNetwork(site, setup, membership, limits or Limits(), guard)
        executor = CodecExecutor()
        ctx = NodeContext(
            site.name,
            setup.run,
            setup.codec(),
            site_versions(site, setup),
            membership,
            executor,
            log,
            guard=guard,
            listening=str(site.info.listen_address or site.info.reach),
            alone_rounds=site.config().alone_rounds,
            instance=secrets.token_hex(8),
            schedule=site.config().schedule.start(),
        )
        _restore_status(ctx.status, site)
        network.log_relays(ctx)
        network.log_outboxes(ctx)
        network.outboxes.save_seen = partial(_save_outbox_state, network.outbox_state)
        writer = OutboxWriter.of_site(site, ctx, network.outbox_state, network.storage_access)

        status_writer = StatusWriter(site, ctx, network, writer, log)
        stack.callback(status_writer.write_last)
        saving = SavingThread(store, ctx.status, log)
        stack.callback(saving.close)
        stack.callback(executor.close)
        training = _training_thread(site, setup, ctx)
        stack.callback(training.close)
        stack.push_async_callback(network.transport.close)
        stack.callback(_save_members, site)

        def use_settings(run: RunContext) -> None:
            training.use(run)
            saving.use(run)
            assert isinstance(run.settings, SiteConfig)
            deadlines.use(run.settings.deadlines)

        ctx.on_changed_settings = use_settings
        if writer is not None:
            stack.push_async_callback(writer.write_last)
        service = service or ServiceManager()
        tasks = [
            network.watch_members(ctx, site.members.file.latest()),
            status_writer.write_regularly(),
            saving.retry(),
            network.watch_clocks(ctx),
            service.watch(ctx.status, lambda: network.transport.is_serving),
        ]
        client = Client(ctx, network.transport, deadlines, random.Random())
        if writer is not None:
            tasks += [writer.run(), writer.learn_keys(client.members.sync)]
        await stack.enter_async_context(_in_background(tasks))

        async def metrics() -> "list[Metric]":
            members = ctx.participants.other_names(ctx.rounds - 1)
            machine_metrics = await site_metrics(site, network.traffic)
            outbox = writer.status() if writer is not None else None
            reach = reach_metrics(network.relay_problems(), outbox)
            return [*node_metrics(ctx.status, members), *reach, *machine_metrics]

        listen = site.config().metrics.listen
        await stack.enter_async_context(serve_metrics(listen, metrics, log))
        await stack.enter_async_context(serving_site(site, log))
        node_class = AsyncNode if setup.run.settings.is_async else Node
        yield node_class(ctx, client, training, saving), saving


def _restore_status(status: NodeStatus, site: Site) -> None:
    """Show in how many of its earlier rounds the site was alone."""
    company = Company.of_rounds(read_metrics(site.run_folder))
    status.trained_rounds = company.trained_rounds
    status.alone_rounds = company.alone_rounds
    status.alone_in_a_row = company.alone_in_a_row
    status.company_until = company.until


def _announce(site: Site, setup: LocalSetup) -> None:
    """Sign this site's record again, so that others follow it also after an old backup."""
    if not setup.run.pulls and can_seal():  # others may have outboxes
        site.make_sealing_key()
    site.announce(setup.density, site.members.own_first_round, again=True)


def _training_thread(site: Site, setup: LocalSetup, ctx: NodeContext) -> "TrainingThread":
    """Start the thread that trains; with privacy, show what is spent already."""
    run = setup.run
    watch = DataWatch(setup.data, ctx.log) if setup.data else None
    if not run.settings.privacy.enabled:
        return TrainingThread(run, setup.threads, watch=watch)

    private_rounds = PrivateRounds(site.run_folder)
    with contextlib.suppress(RunError):  # a file that cannot be read is reported by every round
        epsilon, is_exhausted = private_rounds.spent(run.privacy_plan(site.name))
        ctx.status.epsilon = epsilon
        ctx.status.privacy_exhausted = is_exhausted
    # A key of this process alone: with one from the disk, a site that is set back to a backup, or
    # a copy of the site, would add the same noise to other gradients.
    secret_key = secrets.token_bytes(KEY_BYTES)
    run = replace(run, secret_key=secret_key, known_layout=run.layout)
    return TrainingThread(run, setup.threads, private_rounds, watch)


def _save_members(site: Site) -> None:
    """Save what members have announced; what cannot be saved comes again with the next sync."""
    with contextlib.suppress(DispflError):
        site.members.file.save()


def _save_outbox_state(state: OutboxState) -> None:
    """Save which heads of members' outboxes were seen; if the disk is full, with a later head."""
    with contextlib.suppress(DispflError):
        state.save()


@contextlib.asynccontextmanager
async def _in_background(coroutines: Iterable[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run coroutines as tasks, and cancel them at the end."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class TrainingThread:
    """Takes training steps on a thread, with `threads` torch threads; one makes results
    reproducible."""

    def __init__(
        self,
        context: RunContext,
        threads: int = 1,
        private_rounds: PrivateRounds | None = None,
        watch: DataWatch | None = None,
    ) -> None:
        keep_heap()
        self._context = context
        self._private_rounds = private_rounds
        self._watch = watch
        self._network = context.network()
        self._pool = ThreadPoolExecutor(
            1, "training", initializer=torch.set_num_threads, initargs=(threads,)
        )
        self._stopped = threading.Event()

    def use(self, run: RunContext) -> None:
        """Take later steps with the settings of this context."""
        layout = self._context.layout
        self._context = replace(self._context, settings=run.settings, known_layout=layout)

    async def step(
        self, task: PeerTask, state: PeerState, received: Mapping[str, PackedModel]
    ) -> StepResult:
        """Take a step without blocking the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._step, task, state, received)

    def _step(
        self, task: PeerTask, state: PeerState, received: Mapping[str, PackedModel]
    ) -> StepResult:
        self._take_in_new_data(task.peer)
        if self._private_rounds is not None:
            try:
                plan = self._context.privacy_plan(task.peer)
                history = self._private_rounds.begin(plan, state)
            except RunError as problem:  # a full disk, say: what is spent must be saved first
                failure = f"Peer {task.peer}, round {task.t}: it does not train. {problem}"
                return StepResult(Report(failure=failure), state=state)
            task = replace(task, private=history)
        return peer_step(self._context, self._network, task, state, received, self._check_stop)

    def _take_in_new_data(self, peer: str) -> None:
        """Replace the site's data if its operator has asked for that since the last round."""
        new_data = self._watch.new_data() if self._watch else None
        if new_data is not None:
            context = self._context
            data = context.data.with_peers({peer: new_data})
            self._context = replace(context, data=data, known_layout=context.layout)

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


class StatusWriter:
    """Writes the status file that `dispfl peer status` reads."""

    def __init__(
        self,
        site: Site,
        ctx: NodeContext,
        network: SiteNetwork,
        outbox: OutboxWriter | None,
        log: RecentEvents,
    ) -> None:
        self._site = site
        self._ctx = ctx
        self._network = network
        self._outbox = outbox
        self._recent = log
        self._previous_traffic = _total_traffic(site)
        self._pool = ThreadPoolExecutor(1, "status")

    async def write_regularly(self) -> None:
        """Update the file, on a thread; also while the members cannot be saved."""
        loop = asyncio.get_running_loop()
        last_problem = ""
        while True:
            problem = ""
            try:
                status = self._current()
                await loop.run_in_executor(self._pool, self._site.write_status, status)
            except (DispflError, OSError) as error:
                problem = str(error)
            if problem and problem != last_problem:
                self._ctx.log("problem", {"detail": problem})
            last_problem = problem
            await asyncio.sleep(STATUS_INTERVAL)

    def write_last(self) -> None:
        """Write that the node has ended."""
        self._pool.shutdown()
        if self._ctx.status.state not in (FINISHED, FINISHED_ALONE):
            self._ctx.status.state = "stopped"
        try:
            self._site.write_status(self._current())
        except (DispflError, OSError) as problem:
            # Not raised: it would hide the exception that ended the node.
            self._ctx.log("problem", {"detail": str(problem)})

    def _current(self) -> dict[str, Any]:
        status = self._ctx.status.as_json()
        unix_time = time.time()
        loop_start = unix_time - asyncio.get_running_loop().time()
        for name, peer in status["peers"].items():
            peer["route"] = self._network.transport.route(name)
            peer["outbox_problem"] = self._network.outboxes.problem(name)
            for key in ("last_seen", "last_request", "asleep_until"):
                if peer[key] is not None:
                    peer[key] += loop_start
        status["relays"] = self._network.relay_problems()
        if self._outbox is not None:
            status["outbox"] = self._outbox.status()
        status["sockets"] = self._network.traffic
        status["sockets_previous"] = self._previous_traffic
        status["updated"] = unix_time
        status["log"] = self._recent.lines
        status["known"] = [
            {
                "name": record.name,
                "address": reach_text(record.address, record.relays, record.outbox),
                "fingerprint": record.fingerprint,
            }
            for record in self._site.members.known()
        ]
        return status


def _total_traffic(site: Site) -> dict[str, int]:
    """The socket traffic of earlier runs of the node, as far as the status file has it."""
    totals = {"sent": 0, "received": 0}
    try:
        status = site.status() or {}
        for direction in totals:
            last = int(status["sockets"][direction])
            earlier = int(status["sockets_previous"][direction])
            totals[direction] = last + earlier
    except (RunError, KeyError, TypeError, ValueError):
        return {"sent": 0, "received": 0}
    return totals
