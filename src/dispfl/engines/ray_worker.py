"""Some of a federation's peers in one of Ray's processes: their data, their states and their steps.

driver    says who takes a step, and hears what is told of it
worker    asks other workers for the models that its peers hear, as messages of the codec, while it trains
"""

import platform
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError

from dispfl.core.heap import keep_heap
from dispfl.core.live import LiveModel
from dispfl.core.packed import PackedMask
from dispfl.engines.states import States
from dispfl.errors import ConfigError
from dispfl.methods.base import SERVER, GossipMethod, PeerState
from dispfl.round import senders_of, state_for
from dispfl.runs.checkpoint import Checkpoints
from dispfl.simulated import Arrived, carry, decode, encode, heard_here, simulated_step, upload
from dispfl.work import Outcome, Part, PeerData, Setting

STEPS_AT_ONCE = 2
"""One peer trains while the next one's messages are fetched."""
LOST = RayActorError, NodeDiedError, OutOfMemoryError, ObjectLostError
"""How Ray says that a worker is gone, or what it had answered."""


@dataclass(frozen=True)
class Told:
    """What a worker tells of a finished step."""

    outcome: Outcome
    message: bytes | None
    """What the peer sends to the server; it is not in the outcome, because only messages travel."""
    seconds: float


@ray.remote(concurrency_groups={"step": STEPS_AT_ONCE, "answer": 1})  # type: ignore[call-overload]
class Worker:
    """Trains its peers one after another, on one thread, and answers other workers meanwhile."""

    def __init__(self, name: str, setting: Setting, folder: Path) -> None:
        keep_heap()
        self._folder = folder
        self._setting = setting
        self._live = LiveModel(setting.module(), setting.device, setting.precision)
        self._codec = setting.codec(self._live.layout)
        self._states = States(setting, Checkpoints(folder, name))
        self._rounds = 0
        self._parts: Mapping[str, Part] = {}
        self._others: Mapping[int, Any] = {}
        self._places: Mapping[str, int] = {}
        self._training, self._writing, self._stop = threading.Lock(), threading.Lock(), threading.Event()

    def adopt(self, data: Mapping[str, PeerData], rounds: int) -> None:
        """Take over these peers, as they are after so many rounds."""
        if not self._folder.is_dir():
            raise ConfigError(  # no `DamagedError`: nothing is wrong with the checkpoint
                f"The machine {platform.node()} does not see {self._folder}. On a cluster the run directory (--out) "
                "must be on a file system that all machines share."
            )
        self._setting = replace(self._setting, peers={**self._setting.peers, **data})
        self._states.recall(rounds, data)
        self._rounds = rounds

    def give_away(self, peers: Collection[str]) -> None:
        """These peers are another worker's from now on."""
        left = {peer: data for peer, data in self._setting.peers.items() if peer not in peers}
        self._setting = replace(self._setting, peers=left)
        self._states.forget(peers)

    def under_way(self, t: int) -> dict[str, Outcome]:
        """Take up the steps of round t that were finished before a stop."""
        return self._states.under_way(t, self._setting.peers)

    def meet(self, others: Mapping[int, Any], places: Mapping[str, int]) -> None:
        """Who the other workers are, and where everyone is."""
        self._others, self._places = others, places

    def prepare(self, parts: Sequence[Part]) -> list[str]:
        """These are the parts of the round, in one message, because they have much in common; whose are on the disk."""
        self._parts = {part.peer: part for part in parts}
        self._stop.clear()
        return list(self.under_way(self._rounds))

    def turn(self, rounds: int) -> None:
        """So many rounds are over, which a worker that was put in a lost one's place may know already."""
        if self._rounds < rounds:
            self._states.turn()
            self._rounds = rounds

    def flush(self, t: int) -> None:
        """Write down the finished steps of round t that are not on the disk yet."""
        with self._writing:
            self._states.flush(t)

    def fetch(self, peer: str, judged: bool) -> PeerState:
        """A peer's state, or what it was judged on."""
        return (self._states.judged if judged else self._states.now)[peer]

    def has_judged(self) -> list[str]:
        """Whom of its peers it has judged on a shared model."""
        return list(self._states.judged)

    @ray.method(concurrency_group="step")
    def step(self, peer: str) -> Told | None:
        """A peer's part of the round; None if a worker that it had to ask is gone."""
        setting, part, now = self._setting, self._parts[peer], self._states.now
        state = state_for(setting, part, now)
        asked = state.next_mask if setting.pulls else None
        here = heard_here(setting, self._codec, part, now)
        try:
            from_elsewhere = self._ask_others(part, state, asked)
        except LOST:
            return None

        def hear(sender: str, asked: PackedMask | None) -> Arrived:
            return from_elsewhere[sender] if sender in from_elsewhere else here(sender, asked)

        with self._training:
            torch.set_num_threads(1)
            began = time.perf_counter()
            step = simulated_step(setting, self._codec, self._live, part, state, hear, self._pulse)
            seconds = time.perf_counter() - began
        step, arrived = upload(setting, self._codec, part, step)
        with self._writing:
            outcome = self._states.finish(part, step)
        if arrived is None:
            return Told(outcome, None, seconds)
        message = arrived.message or encode(setting, self._codec, arrived.model, None, peer, SERVER, part.t)
        return Told(replace(outcome, sent=None), message, seconds)

    @ray.method(concurrency_group="answer")
    def answer(self, t: int, receiver: str, senders: Sequence[str], request: bytes | None) -> list[tuple[bytes, int]]:
        """The messages of this worker's peers to another's, each with its price in the paper's currency."""
        torch.set_num_threads(1)
        setting, codec = self._setting, self._codec
        assert isinstance(setting.method, GossipMethod)
        asked = None if request is None else codec.decode_request(request)
        answers = []
        for sender in senders:
            model = setting.method.publish(self._states.now[sender])
            sent = carry(setting, codec, model, asked, sender, receiver, t)
            message = sent.message or encode(setting, codec, model, asked, sender, receiver, t)
            answers.append((message, sent.paper))
        return answers

    @ray.method(concurrency_group="answer")
    def stop(self) -> None:
        """End what is being trained, between two batches."""
        self._stop.set()

    def _ask_others(self, part: Part, state: PeerState, asked: PackedMask | None) -> dict[str, Arrived]:
        """The messages of those senders that are elsewhere."""
        by_worker: dict[int, list[str]] = {}
        for sender in senders_of(self._setting, part, state):
            if sender != SERVER and sender not in self._states.now:
                by_worker.setdefault(self._places[sender], []).append(sender)
        if not by_worker:
            return {}
        request = None if asked is None else self._codec.encode_request(asked)
        pending = [
            self._others[worker].answer.remote(part.t, part.peer, senders, request)
            for worker, senders in by_worker.items()
        ]
        arrived = {}
        for senders, answers in zip(by_worker.values(), ray.get(pending), strict=True):
            for sender, (message, paper) in zip(senders, answers, strict=True):
                arrived[sender] = Arrived(decode(self._codec, message, asked), paper, len(message))
        return arrived

    def _pulse(self) -> None:
        if self._stop.is_set():
            raise InterruptedError("stopped between two batches")
