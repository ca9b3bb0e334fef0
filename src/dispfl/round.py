"""THE file: one gossip round, top to bottom, as in Algorithm 1.

`gossip_round` says what happens in a round; `peer_step` is the one piece of work in it, which engines map over peers
and which a real peer calls with the messages from its sockets.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from dispfl.core.live import LiveModel
from dispfl.core.masks import hamming
from dispfl.core.packed import PackedModel
from dispfl.core.rng import global_stream, stream, stream_seed
from dispfl.core.train import Report, Samples, Task, Train, Trainer
from dispfl.costs.ledger import Ledger
from dispfl.errors import NonFiniteError
from dispfl.methods.base import GossipMethod, PeerState
from dispfl.topology import Topology


@dataclass(frozen=True)
class PeerData:
    """What a peer owns: data to learn from and data to be judged on."""

    train: Samples
    test: Samples


@dataclass(frozen=True)
class Setting:
    """Everything that stays as it is through a run."""

    model: Callable[[], nn.Module]
    peers: Mapping[str, PeerData]
    """By name; the sorted names are the roster."""
    method: GossipMethod
    topology: Topology
    train: Train
    task: Task
    seed: int
    rounds: int
    eval_every: int = 1
    device: str = "cpu"

    @property
    def roster(self) -> list[str]:
        """The peers' names in the order of sums."""
        return sorted(self.peers)

    def module(self) -> nn.Module:
        """The module with the weights that all peers start from."""
        with global_stream(self.seed, "model"):
            return self.model()

    def scores(self, t: int) -> bool:
        """Whether round t ends with everyone's model being scored; the last always does."""
        return (t + 1) % self.eval_every == 0 or t + 1 == self.rounds


@dataclass(frozen=True)
class Work:
    """One peer's part of a round, ready to be done anywhere."""

    peer: str
    t: int
    state: PeerState
    heard: Mapping[str, PackedModel]
    idle: bool = False
    """An offline peer that does nothing this round."""


@dataclass(frozen=True)
class Step:
    """What came of it."""

    state: PeerState
    report: Report


class Engine(Protocol):
    """Does the peers' work, in any order, anywhere."""

    def steps(self, works: Iterable[Work]) -> Iterator[tuple[str, Step]]:
        """Each piece of work's outcome, as it is done, with the peer's name."""
        ...

    def close(self) -> None:
        """Give back threads, processes and memory."""
        ...


@dataclass(frozen=True)
class Round:
    """A finished round."""

    steps: Mapping[str, Step]
    ledger: Ledger


def start(setting: Setting) -> dict[str, PeerState]:
    """Algorithm 1, line 2: every peer's state before round 0."""
    module = LiveModel(setting.module())
    weights, buffers = module.read(), module.read_buffers()
    densities = setting.method.densities(len(setting.peers))
    states = {}
    for peer, density in zip(setting.roster, densities, strict=True):
        state = setting.method.start(weights, module.layout, density, rng=stream(setting.seed, "mask", peer))
        states[peer] = replace(state, buffers={name: buffer.clone() for name, buffer in buffers.items()})
    return states


def gossip_round(
    setting: Setting,
    states: Mapping[str, PeerState],
    t: int,
    engine: Engine,
    finished: Mapping[str, Step] | None = None,
    on_step: Callable[[str, Step], None] = lambda peer, step: None,
) -> Round:
    """Algorithm 1, lines 5-16, for all peers; `finished` holds the steps of this round that are done already."""
    method, topology, roster = setting.method, setting.topology, setting.roster

    # Line 6: each online peer publishes, and hears its neighbours of this round.
    heard = topology.heard(setting.seed, t, roster)
    published = {peer: method.publish(states[peer]) for peer in heard} if method.hears else {}
    ledger = Ledger()
    works = []
    for peer in roster:
        messages = {sender: published[sender] for sender in heard.get(peer, []) if sender in published}
        for sender, model in messages.items():
            ledger.carry(sender, peer, model)
        idle = peer not in heard and topology.offline == "skip"
        works.append(Work(peer, t, states[peer], messages, idle))

    # Lines 7-15: each peer takes its step.
    steps = dict(finished or {})
    for peer, step in engine.steps(work for work in works if work.peer not in steps):
        steps[peer] = step
        on_step(peer, step)
    return Round({peer: steps[peer] for peer in roster}, ledger)


def peer_step(setting: Setting, live: LiveModel, work: Work, pulse: Callable[[], None] = lambda: None) -> Step:
    """One peer's round: from its state and what it heard to its next state, and a report.

    A step whose numbers stop being finite is given up: the peer keeps its last good state and says so.
    """
    data = setting.peers[work.peer]
    trainer = Trainer(
        live=live,
        train=data.train,
        test=data.test,
        settings=setting.train,
        task=setting.task,
        seed=setting.seed,
        peer=work.peer,
        t=work.t,
        T=setting.rounds,
        scoring=setting.scores(work.t),
        buffers=work.state.buffers,
        pulse=pulse,
    )
    torch.manual_seed(stream_seed(setting.seed, "torch", work.peer, work.t))  # for dropout, which knows no generator
    state = work.state
    if not work.idle:
        try:
            state = setting.method.step(trainer, work.state, work.heard)
        except NonFiniteError as problem:
            trainer.report.failure = str(problem)
            trainer.buffers = work.state.buffers
    _judge(trainer, state)
    return Step(state, trainer.report)


def _judge(trainer: Trainer, state: PeerState) -> None:
    """Fill in the report: how good the model is, and how much of its mask will change."""
    weights, mask = state.model.unpack()
    if trainer.scoring:
        trainer.report.score = trainer.score(weights)
    if state.next_mask is not state.model.mask:
        trainer.report.mask_change = hamming(mask, state.next_mask.unpack()) / (2 * state.model.mask.kept)
