"""A federation of real processes on this machine: each with its key, its socket and its share of the data.

    out/                     a run directory, as of a simulation
    out/sites/000/ ...       a site for each peer (see peer/site.py), with its log

Fault-free, the models are those of the simulation, bit for bit.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dispfl.config import Experiment, compose
from dispfl.core.layout import Layout
from dispfl.core.train import Report
from dispfl.costs.flops import forward_cost
from dispfl.data.datasets import load
from dispfl.errors import ConfigError, RunError
from dispfl.methods.base import GossipMethod
from dispfl.methods.registry import METHODS
from dispfl.peer.log import teller
from dispfl.peer.pace import Pace
from dispfl.peer.running import take_part
from dispfl.peer.share import Share
from dispfl.peer.site import Site, Whereabouts
from dispfl.peer.store import PeerStore, report_of, rounds_of
from dispfl.roster import roster_names
from dispfl.round import Round, Setting, Step
from dispfl.runs.directory import RunDirectory, read_config
from dispfl.runs.records import round_record, summarize
from dispfl.runs.split import read_split, write_split

SITES, LOG = "sites", "log.txt"
LOOPBACK = "127.0.0.1"
PACE = Pace(floor=10.0, first=120.0)
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
        sites = [
            Site.create(out / SITES / name, Whereabouts(name=name, listen=f"{LOOPBACK}:{port}", federation="up"), {})
            for name, port in zip(roster_names(experiment.peers), free_ports(experiment.peers), strict=True)
        ]
        for site in sites:
            for other in sites:
                if other is not site:
                    site.members.accept(other.invite())


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at this moment."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]


def setting_in(out: Path) -> Setting:
    """The setting of the run in a directory, with all peers' data."""
    experiment = compose(read_config(out))
    saved = read_split(out)
    if saved is None:
        raise RunError(f"{out} has no split; it was not set up by `dispfl up`.")
    return experiment.setting(load(experiment.data), saved[0])


def share_in(out: Path, name: str) -> Share:
    """One peer's share of it: its own data, and of the others only their names."""
    setting = setting_in(out)
    roster = setting.roster
    densities = setting.method.densities(len(roster))
    others = tuple(other for other in roster if other != name)
    own = replace(setting, peers={name: setting.peers[name]}, elsewhere=others)
    return Share.of(name, "up", own, densities[roster.index(name)], min(densities))


@dataclass
class Processes:
    """The peers' processes."""

    out: Path
    names: Sequence[str]

    def __post_init__(self) -> None:
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """Start a peer, or start it again; its log goes to its site's folder."""
        with (self.out / SITES / name / LOG).open("ab") as log:
            command = [sys.executable, "-m", "dispfl.up", str(self.out), name]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            self.running[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def ended(self) -> dict[str, int]:
        """The exit codes of those that have ended."""
        return {name: code for name, process in self.running.items() if (code := process.poll()) is not None}

    def stop(self) -> None:
        """Ask all to end, and end those that do not."""
        for process in self.running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.running.values():
            try:
                process.wait(FAREWELL)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def gather_up(out: Path) -> None:
    """Make a run directory like a simulation's of what the sites have written."""
    setting = setting_in(out)
    module = setting.module()
    cost = forward_cost(module, Layout.of(module), next(setting.peers[setting.roster[0]].train.batches(1))[0])
    written = {name: rounds_of(out / SITES / name / "run") for name in setting.roster}
    final = {name: _final_step(out, name) for name in setting.roster}
    directory = RunDirectory.open(out)
    with contextlib.closing(directory):
        records, before = [], min(entry["at"] for rounds in written.values() for entry in rounds.values())
        for t in range(setting.rounds):
            steps, ends = {}, [before]
            for name in setting.roster:
                entry = written[name].get(t)
                report, carried = report_of(entry) if entry else (Report(), ())
                steps[name] = Step(final[name].state, report, carried)
                ends += [entry["at"]] if entry else []
            records.append(round_record(t, Round(steps), cost, max(ends) - before))
            before = max(ends)
            directory.append(records[-1])
        for name, step in final.items():
            directory.checkpoints.add(setting.rounds - 1, name, step)
        directory.checkpoints.complete(setting.rounds - 1)
        models = {name: step.state.model for name, step in final.items()}
        directory.write_summary(summarize(setting, records, models))


def _final_step(out: Path, name: str) -> Step:
    site = Site.open(out / SITES / name)
    store = PeerStore(site.run_folder, name, read_config(site.run_folder)["terms"])
    with contextlib.closing(store):
        last = store.last()
    if last is None:
        raise RunError(f"Peer {name} has finished no round; its log is {site.folder / LOG}.")
    return Step(last[1], Report())


def main(out: str, name: str) -> None:
    """One peer's process."""
    site = Site.open(Path(out) / SITES / name)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(take_part(site, share_in(Path(out), name), PACE, teller(name)))


if __name__ == "__main__":
    main(*sys.argv[1:])
