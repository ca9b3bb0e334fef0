"""Real peers in processes that tests can kill, suspend and disconnect.

The processes are forked from a server that has already imported torch, which is much faster.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from dispfl.core.packed import PackedModel, WeightMask
from dispfl.data.datasets import load_dataset
from dispfl.engines import checkpoint, checkpoint_part
from dispfl.experiment import Experiment
from dispfl.files import SITES, write_atomically
from dispfl.methods.base import PeerState
from dispfl.peer.deadlines import Deadlines
from dispfl.peer.local_federation import LOG, collect_results, setup_of_peer
from dispfl.peer.run_site import run_node
from dispfl.peer.site import Site, SiteInfo
from dispfl.peer.state.log import event_logger
from dispfl.peer.state.store import PeerStore, rounds_of
from dispfl.peer.transport.http import Limits
from dispfl.processes import training_processes
from dispfl.robust.attacks import ATTACK_FUNCTIONS, Target
from dispfl.round.context import RunContext
from dispfl.runs.directory import (
    RunDirectory,
    read_config,
    read_metrics,
    read_summary,
    write_split,
)
from dispfl.runs.execute import ExperimentRun
from dispfl.runs.prepare import split_dataset
from dispfl.wire.codec import Codec

LIE = "lie.txt"
PATIENCE = 240.0
"""Seconds after which a wait fails; generous for a loaded machine."""
CLONE_NEWNET = 0x40000000
TINY = [
    "model=mlp",
    "partition.samples_per_peer=40",
    "partition.test_samples_per_peer=20",
    "train.epochs=1",
    "workers=1",
]


def create_sites(
    experiment: Experiment,
    out: Path,
    addresses: Mapping[str, tuple[str, str]],
    relays: Mapping[str, Sequence[str]] | None = None,
    outboxes: Mapping[str, str] | None = None,
) -> list[Site]:
    """Create a site for each peer with its `listen` and `advertise` addresses, its relays and its
    outbox, if it has any; all accept each other."""
    relays = relays or {}
    outboxes = outboxes or {}
    data = load_dataset(experiment.data)
    split = split_dataset(experiment, data)
    with contextlib.closing(RunDirectory.create(out, experiment.to_toml())):
        write_split(out, split, split.label_counts(data.train_labels, len(data.classes)))
    sites = []
    for name in sorted(addresses.keys() | relays.keys() | outboxes.keys()):
        listen, advertise = addresses.get(name, (None, None))
        info = SiteInfo(
            name=name,
            listen=listen,
            advertise=advertise,
            federation="up",
            relays=tuple(relays.get(name, ())),
            outbox=outboxes.get(name),
        )
        sites.append(Site.create(out / SITES / name, info, {}))
    for site in sites:
        for other in sites:
            if other is not site:
                site.members.accept(other.invite())
    return sites


def check_same_as_simulation(out: Path, experiment: Experiment, *, traffic: bool = False) -> None:
    """Check that real sites have ended with the models of the simulation, and sent as much.

    What comes from an outbox is requested by nobody's server, so its `traffic` differs.
    """
    simulation = out.with_name("simulated")
    ExperimentRun.create(experiment, simulation).run()
    collect_results(out)
    simulated, real = read_summary(simulation), read_summary(out)
    assert simulated is not None
    assert real is not None
    for key in ("weights_sha256", "scores", "busiest", "rounds", "failures"):
        assert real[key] == simulated[key], key
    for one, other in zip(read_metrics(out), read_metrics(simulation), strict=True):
        assert one["links"] == other["links"]
        if traffic:
            assert one["traffic"] == other["traffic"]


def write_or_block(
    path: Path, content: bytes | Iterable[bytes | memoryview], *, durable: bool = True
) -> None:
    """Like `write_atomically`, but blocks where a named pipe is in the temporary file's place."""
    temporary = path.with_name(f".{path.name}.partial")
    if temporary.is_fifo():
        temporary.open("wb")  # until somebody reads it
    write_atomically(path, content, durable=durable)


def run_peer(
    out: Path,
    name: str,
    deadlines: Deadlines,
    namespace: str | None,
    limits: Limits | None = None,
    proxy: str | None = None,
) -> None:
    """Run one peer in this process."""
    if proxy is not None:
        os.environ["HTTPS_PROXY"] = proxy
    log = os.open(out / SITES / name / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if namespace is not None:
        with Path("/run/netns", namespace).open() as there:
            if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    for module in (checkpoint, checkpoint_part):
        module.write_atomically = write_or_block  # type: ignore[attr-defined]
    site = Site.open(out / SITES / name)
    asyncio.run(run_node(site, setup_of_peer(out, name), deadlines, event_logger(name), limits))


def run_liar(
    out: Path, name: str, deadlines: Deadlines, namespace: str | None, limits: Limits | None = None
) -> None:
    """Run a Byzantine peer, with the attack that the folder's file LIE names."""
    from dispfl.peer import server

    attack = ATTACK_FUNCTIONS[(out / LIE).read_text()]  # type: ignore[index]
    encode_model = server.encode_model  # type: ignore[attr-defined]

    def encode_attack(
        run: RunContext,
        codec: Codec,
        model: PackedModel,
        mask: WeightMask,
        sender: str,
        receiver: str,
        t: int,
    ) -> bytes:
        seed = run.settings.seed
        target = Target(receiver, model, mask, [], 1, lambda attacker, mask: True, seed, t)
        forged_model = attack(sender, model, target)
        return encode_model(run, codec, forged_model, mask, sender, receiver, t)

    server.encode_model = encode_attack  # type: ignore[assignment, attr-defined]
    run_peer(out, name, deadlines, namespace, limits)


class Peers:
    """The processes of one federation."""

    def __init__(
        self,
        out: Path,
        names: Sequence[str],
        deadlines: Deadlines,
        namespaces: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._limits = limits
        self.out, self.names = out, names
        self.byzantine: Sequence[str] = ()
        self.proxies: dict[str, str] = {}
        """By peer: its HTTPS_PROXY, if it has one."""
        self._pace, self._namespaces = deadlines, namespaces or {}
        self._processes: dict[str, BaseProcess] = {}
        self._server = training_processes()

    def start(self, *names: str) -> None:
        """Start or restart peers."""
        for name in names:
            namespace = self._namespaces.get(name)
            arguments: tuple[Any, ...] = (self.out, name, self._pace, namespace, self._limits)
            target: Callable[..., None] = run_liar
            if name not in self.byzantine:
                target = run_peer
                arguments += (self.proxies.get(name),)
            self._processes[name] = self._server.Process(target=target, args=arguments, daemon=True)
            self._processes[name].start()

    def kill(self, name: str) -> None:
        """Kill a peer with SIGKILL."""
        self._processes[name].kill()
        self._processes[name].join()

    def freeze(self, name: str) -> None:
        """Suspend a process; return once it is stopped."""
        pid = self._pid(name)
        os.kill(pid, signal.SIGSTOP)
        until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZ")

    def thaw(self, name: str) -> None:
        """Continue a suspended process."""
        os.kill(self._pid(name), signal.SIGCONT)

    def until(self, happened: Callable[[], bool], pause: float = 0.02) -> None:
        """Wait for a condition; fail if a peer ends with an error, or if all have ended."""

        def checked() -> bool:
            ended = self.ended()
            for name, code in ended.items():
                assert code in (0, -signal.SIGKILL), (
                    f"{name} ended with {code}: {self.log(name)[-3000:]}"
                )
            is_so = happened()
            assert is_so or len(ended) < len(self._processes), (
                "all peers have ended before the condition was met"
            )
            return is_so

        until(
            checked, lambda: "\n".join(f"{name}: {self.status(name)}" for name in self.names), pause
        )

    def ended(self) -> dict[str, int]:
        """The exit codes of ended processes."""
        codes = {name: process.exitcode for name, process in self._processes.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def stop(self) -> None:
        """Kill all processes."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()

    def status(self, name: str) -> dict[str, Any]:
        """The status file of a peer."""
        try:
            found: dict[str, Any] = json.loads((self._run(name) / "status.json").read_bytes())
        except FileNotFoundError:
            return {"state": "absent", "round": -1, "peers": {}, "updated": 0.0}
        return found

    def rounds(self, name: str) -> dict[int, dict[str, Any]]:
        """The saved rounds of a peer."""
        return rounds_of(self._run(name))

    def newest(self, name: str) -> int:
        """The last saved round; -1 before the first."""
        try:
            lines = (self._run(name) / "metrics.jsonl").read_bytes().split(b"\n")
        except FileNotFoundError:
            return -1
        return (
            int(json.loads(lines[-2])["round"]) if len(lines) > 1 else -1
        )  # the last line may be incomplete

    def checkpoints(self, name: str) -> Path:
        """The folder of a peer's checkpoints."""
        return self._run(name) / "checkpoints"

    def checkpoint(self, name: str) -> int:
        """The last round with a complete checkpoint; -1 before the first."""
        folders = self.checkpoints(name).glob("round-*/complete.json")
        return max((int(complete.parent.name[-6:]) for complete in folders), default=0) - 1

    def state(self, name: str) -> PeerState:
        """The state after its last round."""
        store = PeerStore(self._run(name), name, read_config(self._run(name))["spec"])
        with contextlib.closing(store):
            last = store.last()
        assert last is not None
        return last[1]

    def log(self, name: str) -> str:
        """The log of a peer."""
        return (self.out / SITES / name / LOG).read_text()

    def _run(self, name: str) -> Path:
        return self.out / SITES / name / "run"

    def _pid(self, name: str) -> int:
        pid = self._processes[name].pid
        assert pid is not None
        return pid


def until(
    happened: Callable[[], bool], else_say: Callable[[], str] = lambda: "", pause: float = 0.001
) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, f"the condition was not met\n{else_say()}"
        time.sleep(pause)
