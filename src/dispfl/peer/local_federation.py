"""`dispfl up`: a federation of real processes on this machine, each with its own key and data.

    out/                     a run directory, as of a simulation
    out/sites/000/ ...       a site for each peer (site.py), with its log

Without faults, the models are those of the simulation, bit for bit.
"""

import asyncio
import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from dispfl.config import compose
from dispfl.core.device_classes import FIT
from dispfl.core.layout import Layout
from dispfl.core.report import Report
from dispfl.costs.flops import forward_cost
from dispfl.data.datasets import load_dataset
from dispfl.errors import ConfigError, RunError
from dispfl.experiment import Experiment
from dispfl.files import RUN, SITE, SITES
from dispfl.methods.base import GossipMethod
from dispfl.peer.deadlines import Deadlines, DeadlineSettings
from dispfl.peer.run_site import run_node
from dispfl.peer.setup.local_setup import LocalSetup, data_schema
from dispfl.peer.setup.spec import DataSchema
from dispfl.peer.site import Site, SiteInfo
from dispfl.peer.state.log import EventLog, event_logger, logging_as_events
from dispfl.peer.state.store import PeerStore, report_of, rounds_of
from dispfl.processes import training_processes
from dispfl.registry import METHODS
from dispfl.round.context import RunContext, RunData, StepResult
from dispfl.round.round import Round
from dispfl.runs.directory import RunDirectory, read_config, read_split, trusted_config
from dispfl.runs.execute import save_split, update_config
from dispfl.runs.metrics import Metrics, round_metrics, summarize
from dispfl.runs.prepare import experiment_context, prepare, split_dataset
from dispfl.runs.saved import saved_context

LOG = "log.txt"
LOOPBACK = "127.0.0.1"
START_SECONDS = 10.0
"""Seconds in which a core starts a process: several times what it takes on an idle machine."""
SHUTDOWN_GRACE = 15.0
"""Seconds that a process has to end after SIGTERM."""


def create_run(experiment: Experiment, out: Path) -> None:
    """Create a run directory and a site for each peer; all sites accept each other."""
    if not isinstance(experiment.method, GossipMethod):
        names = [name for name, method in METHODS.items() if issubclass(method, GossipMethod)]
        raise ConfigError(
            f"method {experiment.method.name} needs a server, which `dispfl up` does not have. Use"
            f" one of: {', '.join(names)}.",
            key="method",
        )
    if experiment.unseen_peers:
        raise ConfigError(
            "unseen_peers is only for simulations: use `dispfl run`, or omit it.",
            key="unseen_peers",
        )
    if experiment.attack != "none":
        raise ConfigError(
            f"attack is {experiment.attack}, which only a simulation has; omit it, or use dispfl"
            " run.",
            key="attack",
        )
    _refuse_a_clock(experiment)
    data, split, context = prepare(experiment)
    experiment = experiment.named(split.names)
    directory = RunDirectory.create(out, experiment.to_toml())
    with contextlib.closing(directory):
        save_split(out, data, split, context)
        _create_sites(out, experiment.roster)


def _refuse_a_clock(experiment: Experiment) -> None:
    """Refuse settings of a simulation's clock: real peers take the time that they take."""
    fits_densities = getattr(experiment.method, "density", None) == FIT
    for key in ("fleet", "hours_per_round"):
        value = getattr(experiment, key)
        if value is None or (key == "fleet" and fits_densities):
            continue
        raise ConfigError(
            f"{key} is {value}, which is for the clock of a simulation: the peers of `dispfl up`"
            " take the time that they take. Omit it, or use dispfl run.",
            key=key,
        )


def prepare_resume(out: Path, requested: Experiment | None = None) -> None:
    """Prepare a stopped run to be resumed, each peer from its own checkpoint.

    Peers that are a round ahead return to the round of the slowest if they still have its
    checkpoint, so that all receive from the same neighbours as without the stop, and the models are
    the same, bit for bit. Peers that wait for nobody go on where they are. `requested` is the same
    experiment, possibly with another data folder.
    """
    experiment = requested or compose(trusted_config(out))
    if not (out / SITES).exists() and (out / "checkpoints").exists():
        raise RunError(
            f"{out} was not run by `dispfl up`. Resume it with: dispfl run --resume {out}"
        )
    with contextlib.ExitStack() as locks:
        directory = locks.enter_context(contextlib.closing(RunDirectory.open(out)))
        if read_split(out) is None:  # stopped before the split was written
            data = load_dataset(experiment.data, task=experiment.task)
            split = split_dataset(experiment, data)
            save_split(out, data, split, experiment_context(experiment, data, split))
        names = experiment.roster
        stores = []
        for name in names:
            run = out / SITES / name / RUN
            if (run / "config.toml").exists():
                stores.append(locks.enter_context(_open_store(run)))
        if not experiment.is_async:
            slowest = min(map(_finished_rounds, stores)) if len(stores) == len(names) else 0
            for store in stores:
                store.rewind_to(slowest)
        update_config(directory, experiment)
        _create_sites(out, names)


def _open_store(run: Path) -> contextlib.closing[PeerStore]:
    """Open a site's store with the spec that it was written with."""
    return contextlib.closing(PeerStore(run, run.parent.name, read_config(run)["spec"]))


def _finished_rounds(store: PeerStore) -> int:
    last = store.last()
    return last[0] if last else 0


def deadlines_for(peers: int, cores: int) -> DeadlineSettings:
    """Return the deadlines of so many processes that start at the same time."""
    return DeadlineSettings(min=10.0, startup=max(120.0, START_SECONDS * peers / cores))


def _create_sites(out: Path, names: Sequence[str]) -> None:
    """Create or reopen a site for each peer, each on a free port; all accept each other."""
    deadlines = deadlines_for(len(names), os.cpu_count() or 1)
    sites = []
    for name, port in zip(names, free_ports(len(names)), strict=True):
        folder = out / SITES / name
        listen = f"{LOOPBACK}:{port}"
        if (folder / SITE).exists():
            sites.append(Site.open(folder).moved(listen))
            continue
        shutil.rmtree(folder, ignore_errors=True)  # its creation was interrupted
        info = SiteInfo(name=name, listen=listen, federation="up")
        sites.append(Site.create(folder, info, {"deadlines": deadlines.model_dump()}))
    for site in sites:
        invites = [member.invite() for member in sites if member is not site]
        site.members.accept_all(invites)


def free_ports(count: int) -> list[int]:
    """Ports that are free at this moment."""
    ports = []
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            bound_socket = stack.enter_context(socket.socket())
            bound_socket.bind((LOOPBACK, 0))
            ports.append(bound_socket.getsockname()[1])
    return ports


def run_context(out: Path) -> tuple[RunContext, DataSchema]:
    """The context of the run in a directory, with the data of all peers, and the data's schema."""
    experiment = compose(trusted_config(out))
    if read_split(out) is None:
        raise RunError(f"{out} has no split; it was not created by `dispfl up`.")
    data, context = saved_context(out, experiment)
    return context, data_schema(data, experiment.data)


def setup_of_peer(out: Path, name: str) -> LocalSetup:
    """The setup of one peer, with its own data and the names of the others."""
    context, schema = run_context(out)
    names = context.roster
    densities = context.densities
    remote_peers = tuple(peer for peer in names if peer != name)
    data = RunData({name: context.data.peers[name]}, remote_peers=remote_peers)
    context = replace(context, data=data)
    return LocalSetup.of(
        name,
        "up",
        context,
        densities[name],
        min(densities.values()),
        schema,
        settings=read_config(out),
    )


@dataclass
class PeerProcesses:
    """The processes of the peers."""

    out: Path
    names: Sequence[str]
    simultaneous: bool = False
    """Whether all peers resume at the same time, so that each waits for the others to start."""

    def __post_init__(self) -> None:
        self.running: dict[str, BaseProcess] = {}
        self._context = training_processes()

    def start(self, name: str) -> None:
        """Start or restart a peer, which logs to its site's folder and ends with this process."""
        self.run(name, main, self.out, name, self.simultaneous)

    def run(self, name: str, function: Callable[..., None], *arguments: object) -> None:
        """Call a function in a new process of a peer."""
        self.running[name] = self._context.Process(target=function, args=arguments, daemon=True)
        self.running[name].start()

    def pid(self, name: str) -> int:
        """The process id of a peer that was started."""
        pid = self.running[name].pid
        assert pid is not None
        return pid

    def ended(self) -> dict[str, int]:
        """The exit codes of ended processes."""
        exit_codes = {}
        for name, process in self.running.items():
            if process.exitcode is not None:
                exit_codes[name] = process.exitcode
        return exit_codes

    def stop(self) -> None:
        """Terminate all processes, and kill those that do not end in time."""
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            process.join(SHUTDOWN_GRACE)
            process.kill()
            process.join()


def collect_results(out: Path) -> None:
    """Collect the results of all sites in the run directory, as a simulation writes them."""
    context, _ = run_context(out)
    names = context.roster
    last_round = context.settings.rounds - 1
    saved_rounds = {name: rounds_of(out / SITES / name / RUN) for name in names}
    last_steps = {name: _final_step(out, name) for name in names}
    sites = [Site.open(out / SITES / name) for name in names]
    directory = RunDirectory.open(out)
    with contextlib.closing(directory):
        directory.truncate_metrics(0)  # left by a killed process
        records = _collect_metrics(context, saved_rounds)
        for record in records:
            directory.append(record)
        for name, step in last_steps.items():
            directory.checkpoints.add(last_round, name, step)
        directory.checkpoints.complete(last_round)

        states = {name: step.next_state for name, step in last_steps.items()}
        summary = summarize(context, records, states)
        summary["network"] = network_overhead(records, sites)
        directory.write_summary(summary)


def _collect_metrics(
    context: RunContext, saved_rounds: Mapping[str, Mapping[int, Metrics]]
) -> list[Metrics]:
    """Return the metrics of all rounds, from those that each peer has saved."""
    module = context.module()
    sample = next(context.data.peers[context.roster[0]].train.batches(1))[0]
    cost = forward_cost(module, Layout.of(module), sample)

    times = [entry["time"] for rounds in saved_rounds.values() for entry in rounds.values()]
    round_start = min(times)
    records = []
    for t in range(context.settings.rounds):
        online = context.settings.topology.online(context.settings.seed, t, context.roster)
        results = {}
        round_end = round_start
        for name in context.roster:
            entry = saved_rounds[name].get(t)
            if entry is None:  # it skipped the round
                results[name] = StepResult(Report())
                continue
            report, messages = report_of(entry)
            if name in online:
                roster = set(context.roster)  # others may have joined meanwhile
                report.received = sorted(roster.intersection(entry["received"]))
                report.missed = sorted(roster.intersection(entry["missed"]))
            results[name] = StepResult(report, messages)
            round_end = max(round_end, entry["time"])
        duration = round_end - round_start
        records.append(round_metrics(t, Round(results), context.task, cost, duration))
        round_start = round_end
    return records


def network_overhead(records: Sequence[Metrics], sites: Sequence[Site]) -> Metrics:
    """Compare the messages in the ledger with the bytes on the sockets.

    The difference is TLS, HTTP and membership sync.
    """
    message_bytes = 0
    for record in records:
        message_bytes += sum(sent for sent, _ in record["traffic"].values())
    socket_bytes = 0
    for site in sites:
        status = site.status() or {}
        for key in ("sockets", "sockets_previous"):
            socket_bytes += status.get(key, {}).get("sent", 0)
    overhead = None
    if message_bytes:
        overhead = round(100 * (socket_bytes / message_bytes - 1), 2)
    return {
        "ledger_mb": message_bytes / 1e6,
        "socket_mb": socket_bytes / 1e6,
        "overhead_percent": overhead,
    }


def _final_step(out: Path, name: str) -> StepResult:
    run = out / SITES / name / RUN
    with _open_store(run) as store:
        last = store.last()
    if last is None:
        raise RunError(f"Peer {name} has finished no round; its log is {run.parent / LOG}.")
    return StepResult(Report(), state=last[1])


class StartupDeadlines(Deadlines):
    """Deadlines of a peer that resumes together with all others, and waits for them to start."""

    def __init__(self, usual: DeadlineSettings) -> None:
        super().__init__(
            max(usual.startup, usual.min),
            usual.startup,
            max(usual.startup, usual.max),
            usual.factor,
        )
        self._usual = usual

    def record_round(self, waited: float, step: float) -> None:
        """Record a round, and use the usual limits from now on: all peers have started."""
        super().record_round(waited, step)
        self.min = self._usual.min
        self.max = self._usual.max


def exit_with_parent(log: EventLog) -> None:
    """Stop this process with SIGTERM when its parent process ends, however that ends."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        if parent is None:
            return
        parent.join()
        log("stopping", {"detail": "the parent process has ended"})
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(SHUTDOWN_GRACE)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main(out: Path, name: str, simultaneous: bool) -> None:
    """One peer's process. The one that starts it has checked whose code the run's config names."""
    os.setsid()  # Ctrl-C is for the parent
    with (out / SITES / name / LOG).open("ab") as file:
        for standard in (1, 2):
            os.dup2(file.fileno(), standard)
    torch.set_num_threads(1)
    log = event_logger(name)
    exit_with_parent(log)
    trusted_config(out, trust=True)
    site = Site.open(out / SITES / name)
    config = site.config()
    with logging_as_events(log), contextlib.suppress(asyncio.CancelledError):
        setup = setup_of_peer(out, name)
        deadlines = config.deadlines.start()
        if simultaneous and not setup.run.settings.is_async:
            deadlines = StartupDeadlines(config.deadlines)
        asyncio.run(run_node(site, setup, deadlines, log, config.limits))
