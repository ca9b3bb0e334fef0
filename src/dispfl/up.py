"""A federation of real processes on this machine: each with its key, its socket and its share of the data.

    out/                     a run directory, as of a simulation
    out/sites/000/ ...       a site for each peer (see peer/site.py), with its log

Fault-free, the models are those of the simulation, bit for bit.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dispfl.config import Experiment, compose
from dispfl.core.layout import Layout
from dispfl.core.train import Report
from dispfl.costs.flops import forward_cost
from dispfl.data.datasets import load
from dispfl.errors import ConfigError, RunError
from dispfl.launch import write_what_changed
from dispfl.methods.base import GossipMethod
from dispfl.methods.registry import METHODS
from dispfl.peer.log import Tell, teller
from dispfl.peer.pace import Pace
from dispfl.peer.pacing import Pacing
from dispfl.peer.running import take_part
from dispfl.peer.share import Share, meaning_of
from dispfl.peer.site import RUN, SITE, Site, Whereabouts
from dispfl.peer.store import PeerStore, report_of, rounds_of
from dispfl.peer.terms import Meaning
from dispfl.roster import roster_names
from dispfl.round import Round
from dispfl.runs.directory import RunDirectory, read_config
from dispfl.runs.records import Record, round_record, summarize
from dispfl.runs.split import read_split, write_split
from dispfl.work import Outcome, Setting, Step

SITES, LOG = "sites", "log.txt"
LOOPBACK = "127.0.0.1"
PACING = Pacing(floor=10.0, first=120.0)
TOGETHER = "together"
"""The word that tells a peer's process that all others are being started at this moment too."""
FAREWELL = 15.0
"""Seconds that a process has to end after it was asked to."""


def set_up(experiment: Experiment, out: Path) -> None:
    """A run directory and a site for each peer; all accept each other."""
    if not isinstance(experiment.method, GossipMethod):
        gossip = ", ".join(name for name, method in METHODS.items() if issubclass(method, GossipMethod))
        raise ConfigError(f"method {experiment.method.name} needs a server, and here is none. Use one of: {gossip}.")
    data = load(experiment.data)
    split = experiment.split(data)
    experiment.setting(data, split).module()
    directory = RunDirectory.create(out, experiment.to_toml())
    with contextlib.closing(directory):
        write_split(out, split, split.label_counts(data.train_labels, len(data.classes)))
        _settle(out, roster_names(experiment.peers))


def go_on(out: Path, asked: Experiment | None = None) -> None:
    """Make a run ready to be gone on with, wherever it stopped: each peer from its own checkpoint.

    Some may be a round ahead of others. They go back to the round of the slowest where they still have it, so that
    everyone hears whom it would have heard without the stop, and the models are the same, bit for bit. What is asked
    for is that very experiment, whose data may lie elsewhere by now.
    """
    experiment = asked or compose(read_config(out))
    if not (out / SITES).exists() and (out / "checkpoints").exists():
        raise RunError(f"{out} was not run by `dispfl up`. Go on with it: dispfl run --resume {out}")
    with contextlib.ExitStack() as held:  # nobody else works on it meanwhile
        directory = held.enter_context(contextlib.closing(RunDirectory.open(out)))
        if read_split(out) is None:  # stopped before it was written
            data = load(experiment.data)
            split = experiment.split(data)
            write_split(out, split, split.label_counts(data.train_labels, len(data.classes)))
        names = roster_names(experiment.peers)
        runs = [out / SITES / name / RUN for name in names]
        stores = [held.enter_context(_opened(run)) for run in runs if (run / "config.toml").exists()]
        done = [last[0] if (last := store.last()) else 0 for store in stores]
        for store in stores:
            store.go_back_to(min(done) if len(done) == len(names) else 0)
        write_what_changed(directory, experiment)
        _settle(out, names)


def _opened(run: Path) -> contextlib.closing[PeerStore]:
    """What a site has written, under the terms that it was written under."""
    return contextlib.closing(PeerStore(run, run.parent.name, read_config(run)["terms"]))


def _settle(out: Path, names: Sequence[str]) -> None:
    """A site for each peer, those that exist included; each listens on a port that is free now, all accept all."""
    sites = []
    for name, port in zip(names, free_ports(len(names)), strict=True):
        folder, listen = out / SITES / name, f"{LOOPBACK}:{port}"
        if (folder / SITE).exists():
            sites.append(Site.open(folder).moved(listen))
            continue
        shutil.rmtree(folder, ignore_errors=True)  # its making was interrupted
        where = Whereabouts(name=name, listen=listen, federation="up")
        sites.append(Site.create(folder, where, {"pace": PACING.model_dump()}))
    for site in sites:
        site.members.accept_all([other.invite() for other in sites if other is not site])


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at this moment."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]


def setting_in(out: Path) -> tuple[Setting, Meaning]:
    """The setting of the run in a directory, with all peers' data, and what these are."""
    experiment = compose(read_config(out))
    saved = read_split(out)
    if saved is None:
        raise RunError(f"{out} has no split; it was not set up by `dispfl up`.")
    data = load(experiment.data)
    return experiment.setting(data, saved[0]), meaning_of(data)


def share_in(out: Path, name: str) -> Share:
    """One peer's share of it: its own data, and of the others only their names."""
    setting, meaning = setting_in(out)
    roster = setting.roster
    densities = setting.method.densities(len(roster))
    others = tuple(other for other in roster if other != name)
    own = replace(setting, peers={name: setting.peers[name]}, elsewhere=others)
    return Share.of(name, "up", own, densities[roster.index(name)], min(densities), meaning)


@dataclass
class Processes:
    """The peers' processes."""

    out: Path
    names: Sequence[str]
    together: bool = False
    """Whether all go on at the same time, so that nobody may take another who is still starting for dead."""

    def __post_init__(self) -> None:
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """Start a peer, or start it again; its log goes to its site's folder. It ends when this process does."""
        self._let_go(name)
        with (self.out / SITES / name / LOG).open("ab") as log:
            command = [sys.executable, "-m", "dispfl.up", str(self.out), name, *([TOGETHER] if self.together else [])]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            self.running[name] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def ended(self) -> dict[str, int]:
        """The exit codes of those that have ended."""
        return {name: code for name, process in self.running.items() if (code := process.poll()) is not None}

    def stop(self) -> None:
        """Ask all to end, and end those that do not."""
        for process in self.running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for name, process in self.running.items():
            try:
                process.wait(FAREWELL)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._let_go(name)

    def _let_go(self, name: str) -> None:
        """Close our end of the pipe that tells a peer's process that we live; one that still runs ends then."""
        if name in self.running and (pipe := self.running[name].stdin) is not None:
            pipe.close()


def gather_up(out: Path) -> None:
    """Make a run directory like a simulation's of what the sites have written."""
    setting, _ = setting_in(out)
    module = setting.module()
    cost = forward_cost(module, Layout.of(module), next(setting.peers[setting.roster[0]].train.batches(1))[0])
    written = {name: rounds_of(out / SITES / name / RUN) for name in setting.roster}
    final = {name: _final_step(out, name) for name in setting.roster}
    directory = RunDirectory.open(out)
    with contextlib.closing(directory):
        directory.truncate_metrics(0)  # what a killed gathering left
        records, before = [], min(entry["at"] for rounds in written.values() for entry in rounds.values())
        for t in range(setting.rounds):
            outcomes, ends = {}, [before]
            for name in setting.roster:
                entry = written[name].get(t)
                report, carried = report_of(entry) if entry else (Report(), ())
                outcomes[name] = Outcome(report, carried)
                ends += [entry["at"]] if entry else []
            records.append(round_record(t, Round(outcomes), cost, max(ends) - before))
            before = max(ends)
            directory.append(records[-1])
        for name, step in final.items():
            directory.checkpoints.add(setting.rounds - 1, name, step)
        directory.checkpoints.complete(setting.rounds - 1)
        models = {name: step.state.model for name, step in final.items()}
        network = network_of(records, [Site.open(out / SITES / name) for name in setting.roster])
        directory.write_summary(summarize(setting, records, models) | {"network": network})


def network_of(records: Sequence[Record], sites: Sequence[Site]) -> Record:
    """How the messages in the ledger compare with what the sockets sent: the rest is TLS, HTTP and greetings."""
    ledger = sum(up for record in records for up, _ in record["traffic"].values())
    found = [site.status() or {} for site in sites]
    sent = sum(status.get(life, {}).get("sent", 0) for status in found for life in ("sockets", "sockets_before"))
    overhead = round(100 * (sent / ledger - 1), 2) if ledger else None
    return {"ledger_mb": ledger / 1e6, "socket_mb": sent / 1e6, "overhead_percent": overhead}


def _final_step(out: Path, name: str) -> Step:
    run = out / SITES / name / RUN
    with _opened(run) as store:
        last = store.last()
    if last is None:
        raise RunError(f"Peer {name} has finished no round; its log is {run.parent / LOG}.")
    return Step(last[1], Report())


class PatientAtFirst(Pace):
    """The pace of a peer that goes on at the same time as all others: the first round waits until they have started."""

    def __init__(self, usual: Pacing) -> None:
        super().__init__(max(usual.first, usual.floor), usual.first, max(usual.first, usual.ceiling), usual.factor)
        self._usual = usual

    def took(self, seconds: float) -> None:
        """A round is through: all are here."""
        super().took(seconds)
        self.floor, self.ceiling = self._usual.floor, self._usual.ceiling


def end_with_the_starter(tell: Tell) -> None:
    """End this process as politely as SIGTERM does once nobody holds the other end of its standard input.

    That is so when the process that started it was killed: it could not say good-bye, but the system closes its files.
    """

    def wait() -> None:
        while os.read(0, 1):  # not sys.stdin, whose lock a thread must not hold when the interpreter ends
            pass
        tell("stopping", {"why": "the process that started this one is gone"})
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(FAREWELL)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main(out: str, name: str, *words: str) -> None:
    """One peer's process."""
    tell = teller(name)
    end_with_the_starter(tell)
    site = Site.open(Path(out) / SITES / name)
    plan = site.plan()
    pace = PatientAtFirst(plan.pace) if TOGETHER in words else plan.pace.begin()
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(take_part(site, share_in(Path(out), name), pace, tell, plan.limits))


if __name__ == "__main__":
    main(*sys.argv[1:])
