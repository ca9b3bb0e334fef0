"""Real processes with real certificates, to be killed, frozen and cut off.

They are forked from a server that has imported everything already: eight interpreters that import torch would take
longer than most stories here.
"""

import asyncio
import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from dispfl.config import Experiment
from dispfl.data.datasets import load
from dispfl.methods.base import PeerState
from dispfl.peer.log import teller
from dispfl.peer.pace import Pace
from dispfl.peer.running import take_part
from dispfl.peer.site import Site, Whereabouts
from dispfl.peer.store import ROUNDS, PeerStore, rounds_of
from dispfl.runs.directory import RunDirectory, read_config
from dispfl.runs.split import write_split
from dispfl.up import LOG, SITES, share_in

PATIENCE = 240.0
"""Seconds after which something that does not happen has failed; a busy machine takes its time."""
CLONE_NEWNET = 0x40000000
TINY = ["model=mlp", "partition.samples=40", "partition.test_samples=20", "train.epochs=1", "threads=1"]


def settle(experiment: Experiment, out: Path, whereabouts: Mapping[str, tuple[str, str]]) -> None:
    """A site for each peer, where it listens and where it is reached; all accept each other."""
    data = load(experiment.data)
    split = experiment.split(data)
    with contextlib.closing(RunDirectory.create(out, experiment.to_toml())):
        write_split(out, split, split.label_counts(data.train_labels, len(data.classes)))
    sites = [
        Site.create(out / SITES / name, Whereabouts(name=name, listen=listen, advertise=advertise, federation="up"), {})
        for name, (listen, advertise) in whereabouts.items()
    ]
    for site in sites:
        for other in sites:
            if other is not site:
                site.members.accept(other.invite())


def live(out: Path, name: str, pace: Pace, namespace: str | None) -> None:
    """One peer's process."""
    log = os.open(out / SITES / name / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if namespace is not None:
        with Path("/run/netns", namespace).open() as there:
            if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    site = Site.open(out / SITES / name)
    asyncio.run(take_part(site, share_in(out, name), pace, teller(name)))


class Peers:
    """The peers of one federation."""

    def __init__(
        self, out: Path, names: Sequence[str], pace: Pace, namespaces: Mapping[str, str] | None = None
    ) -> None:
        self.out, self.names = out, names
        self._pace, self._namespaces = pace, namespaces or {}
        self._processes: dict[str, ForkServerProcess] = {}
        self._server = multiprocessing.get_context("forkserver")
        self._server.set_forkserver_preload(["pytest", "dispfl.up", "dispfl.models.registry"])

    def start(self, *names: str) -> None:
        """Start peers, or start them again."""
        for name in names:
            arguments = (self.out, name, self._pace, self._namespaces.get(name))
            self._processes[name] = self._server.Process(target=live, args=arguments, daemon=True)
            self._processes[name].start()

    def kill(self, name: str) -> None:
        """With no chance to say good-bye."""
        self._processes[name].kill()
        self._processes[name].join()

    def freeze(self, name: str) -> None:
        """Stop a process where it stands; returns once it does."""
        pid = self._pid(name)
        os.kill(pid, signal.SIGSTOP)
        until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZ")

    def thaw(self, name: str) -> None:
        """Let it go on."""
        os.kill(self._pid(name), signal.SIGCONT)

    def until(self, happened: Callable[[], bool], pause: float = 0.02) -> None:
        """Wait for something, unless a peer ends in an error meanwhile, or all have ended."""

        def all_well() -> bool:
            ended = self.ended()
            for name, code in ended.items():
                assert code in (0, -signal.SIGKILL), f"{name} ended with {code}: {self.log(name)[-3000:]}"
            is_so = happened()
            assert is_so or len(ended) < len(self._processes), "all have ended, and it did not happen"
            return is_so

        until(all_well, lambda: "\n".join(f"{name}: {self.status(name)}" for name in self.names), pause)

    def ended(self) -> dict[str, int]:
        """The exit codes of those that have ended."""
        codes = {name: process.exitcode for name, process in self._processes.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def stop(self) -> None:
        """End whoever still runs."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()

    def status(self, name: str) -> dict[str, Any]:
        """What a peer last said of itself."""
        try:
            found: dict[str, Any] = json.loads((self._run(name) / "status.json").read_bytes())
        except FileNotFoundError:
            return {"state": "absent", "round": -1, "peers": {}, "updated": 0.0}
        return found

    def rounds(self, name: str) -> dict[int, dict[str, Any]]:
        """What it wrote down of its rounds."""
        return rounds_of(self._run(name))

    def newest(self, name: str) -> int:
        """The last round that it wrote down; -1 before the first."""
        try:
            lines = (self._run(name) / ROUNDS).read_bytes().split(b"\n")
        except FileNotFoundError:
            return -1
        return int(json.loads(lines[-2])["round"]) if len(lines) > 1 else -1  # the last one is not written yet

    def checkpoint(self, name: str) -> int:
        """The last round that counts, because its checkpoint is complete; -1 before the first."""
        folders = (self._run(name) / "checkpoints").glob("round-*/complete.json")
        return max((int(complete.parent.name[-6:]) for complete in folders), default=0) - 1

    def state(self, name: str) -> PeerState:
        """Its state after its last round."""
        store = PeerStore(self._run(name), name, read_config(self._run(name))["terms"])
        with contextlib.closing(store):
            last = store.last()
        assert last is not None
        return last[1]

    def log(self, name: str) -> str:
        """What it told."""
        return (self.out / SITES / name / LOG).read_text()

    def _run(self, name: str) -> Path:
        return self.out / SITES / name / "run"

    def _pid(self, name: str) -> int:
        pid = self._processes[name].pid
        assert pid is not None
        return pid


def until(happened: Callable[[], bool], else_say: Callable[[], str] = lambda: "", pause: float = 0.001) -> None:
    """Wait for something that must happen."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, f"it did not happen\n{else_say()}"
        time.sleep(pause)
