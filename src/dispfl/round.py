"""THE file: one gossip round and one server round, top to bottom, as in Algorithm 1.

`gossip_round` and `server_round` say what happens in a round; `peer_step` is the one piece of work in them, which
engines map over peers and which a real peer calls with the messages from its sockets.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import nn

from dispfl.core.layout import Layout
from dispfl.core.live import LiveModel
from dispfl.core.masks import hamming
from dispfl.core.packed import PackedMask, PackedModel
from dispfl.core.rng import global_stream, stream, stream_seed
from dispfl.core.train import Report, Samples, Task, Train, Trainer
from dispfl.costs.ledger import Carried, Ledger
from dispfl.errors import NonFiniteError
from dispfl.methods.base import SERVER, Around, GossipMethod, Method, PeerState, ServerMethod, Tuning, fresh_state
from dispfl.topology import Topology
from dispfl.wire.codec import Codec, Wire


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
    """Their data, by name."""
    method: Method
    topology: Topology
    train: Train
    task: Task
    seed: int
    rounds: int
    eval_every: int = 1
    device: str = "cpu"
    wire: Wire = field(default_factory=Wire)
    elsewhere: Sequence[str] = ()
    """Peers of the federation whose data are not here, but on machines of their own."""

    @property
    def roster(self) -> list[str]:
        """All peers' names, in the order of sums."""
        return sorted({*self.peers, *self.elsewhere})

    @property
    def pulls(self) -> bool:
        """Whether peers ask for models with their own masks."""
        return self.wire.exchange == "pull" and isinstance(self.method, GossipMethod) and self.method.restricts

    def codec(self, layout: Layout) -> Codec:
        """How models travel."""
        densities = set(self.method.densities(len(self.roster)))
        return Codec(layout, self.method.always_dense(layout, densities), self.wire)

    def module(self) -> nn.Module:
        """The module with the weights that all peers start from."""
        with global_stream(self.seed, "model"):
            return self.model()

    def scores(self, t: int) -> bool:
        """Whether round t ends with everyone's model being scored; the last always does."""
        tuning = self.method.tuning
        due = (t + 1) % self.eval_every == 0 and (tuning is None or (t + 1) % tuning.every == 0)
        return due or t + 1 == self.rounds


@dataclass(frozen=True)
class Work:
    """One peer's part of a round, ready to be done anywhere."""

    peer: str
    t: int
    state: PeerState
    heard: Mapping[str, PackedModel]
    """What its senders publish, by sender; from the server, in a server round."""
    idle: bool = False
    """The peer does nothing this round, except that its model may be judged."""
    scoring: bool = True
    """Whether its model is judged at the end."""
    tuning: Tuning | None = None
    """How its model is fine-tuned before it is judged."""


@dataclass(frozen=True)
class Step:
    """What came of it."""

    state: PeerState
    report: Report
    carried: Sequence[Carried] = ()
    """The messages that were sent for it."""


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
    """What each peer did."""
    server: PeerState | None = None
    """The server's next state, where there is a server."""
    judged: Mapping[str, PeerState] | None = None
    """What each peer was judged on, where that is not its own state."""

    @property
    def ledger(self) -> Ledger:
        """What it took."""
        return Ledger.of(message for step in self.steps.values() for message in step.carried)

    @property
    def states(self) -> dict[str, PeerState]:
        """Everyone's next state."""
        states = {peer: step.state for peer, step in self.steps.items()}
        return states if self.server is None else {**states, SERVER: self.server}


OnStep = Callable[[str, Step], None]


def start(setting: Setting) -> dict[str, PeerState]:
    """Algorithm 1, line 2: everyone's state before round 0."""
    module = LiveModel(setting.module())
    weights, buffers = module.read(), module.read_buffers()
    densities = setting.method.densities(len(setting.peers))
    states = {}
    for peer, density in zip(setting.roster, densities, strict=True):
        state = setting.method.start(weights, module.layout, density, seed=setting.seed, peer=peer)
        states[peer] = replace(state, buffers={name: buffer.clone() for name, buffer in buffers.items()})
    if isinstance(setting.method, ServerMethod):
        states[SERVER] = fresh_state(weights, torch.ones(module.layout.size, dtype=torch.bool))
    return states


def play_round(
    setting: Setting,
    states: Mapping[str, PeerState],
    t: int,
    engine: Engine,
    finished: Mapping[str, Step] | None = None,
    on_step: OnStep = lambda peer, step: None,
) -> Round:
    """Round t, whichever kind it is; `finished` holds the steps of this round that are done already."""
    done = dict(finished or {})
    if isinstance(setting.method, ServerMethod):
        result = server_round(setting, setting.method, states, t, engine, done, on_step)
    else:
        assert isinstance(setting.method, GossipMethod)
        result = gossip_round(setting, setting.method, states, t, engine, done, on_step)
    return judge_shared(setting, result, t, engine) if setting.method.shares and setting.scores(t) else result


def gossip_round(
    setting: Setting,
    method: GossipMethod,
    states: Mapping[str, PeerState],
    t: int,
    engine: Engine,
    finished: Mapping[str, Step],
    on_step: OnStep,
) -> Round:
    """Algorithm 1, lines 5-16, for all peers."""
    topology, roster, seed = setting.topology, setting.roster, setting.seed

    # Line 6: each online peer publishes, and hears its neighbours of this round, or whom it prefers.
    heard = topology.heard(seed, t, roster) if method.hears else {peer: [] for peer in roster}
    published = {peer: method.publish(states[peer]) for peer in heard}
    works = []
    for peer in roster:
        state, messages = states[peer], {}
        if heard.get(peer):
            around = Around(roster, heard[peer], topology.reachable(heard, peer))
            chosen = method.choose(state, around, rng=stream(seed, "choose", peer, t))
            messages = {sender: published[sender] for sender in chosen}
        idle = peer not in heard and topology.offline == "skip"
        works.append(Work(peer, t, state, messages, idle, setting.scores(t) and not method.shares))

    # Lines 7-15: each peer takes its step.
    steps = _steps(engine, works, finished, on_step)
    return Round({peer: steps[peer] for peer in roster})


def server_round(
    setting: Setting,
    method: ServerMethod,
    states: Mapping[str, PeerState],
    t: int,
    engine: Engine,
    finished: Mapping[str, Step],
    on_step: OnStep,
) -> Round:
    """A round with a server: it picks a cohort, broadcasts, the cohort takes its step, the server aggregates."""
    roster, server = setting.roster, states[SERVER]
    states = {peer: replace(states[peer], sent=None) for peer in roster}  # a checkpoint still has the last round's

    # The server picks a cohort of those who are online, and broadcasts.
    cohort = method.pick(setting.seed, t, sorted(setting.topology.online(setting.seed, t, roster)))
    works = []
    for peer in roster:
        messages = {SERVER: method.broadcast(server, states[peer])} if peer in cohort else {}
        works.append(Work(peer, t, states[peer], messages, not messages, setting.scores(t) and not method.shares))

    # The cohort takes its step; the others wait.
    steps = _steps(engine, works, finished, on_step)

    # The server aggregates what the cohort sends back.
    sent = {peer: upload for peer in cohort if (upload := steps[peer].state.sent) is not None}
    if sent:
        server = method.aggregate(server, sent, {peer: len(setting.peers[peer].train) for peer in sent})
    waiting = {peer: replace(steps[peer], state=replace(steps[peer].state, sent=None)) for peer in roster}
    return Round(waiting, server)


def _steps(engine: Engine, works: Iterable[Work], finished: Mapping[str, Step], on_step: OnStep) -> dict[str, Step]:
    """Everyone's step: those that are finished already, and those that the engine does now."""
    steps = dict(finished)
    for peer, step in engine.steps(work for work in works if work.peer not in finished):
        steps[peer] = step
        on_step(peer, step)
    return steps


def judge_shared(setting: Setting, result: Round, t: int, engine: Engine) -> Round:
    """Judge every peer on the model that all share, fine-tuned on its own data first where the method says so."""
    method = setting.method
    shared = method.shared(result.states)
    works = []
    for peer, step in result.steps.items():
        model = method.judged(step.state, shared)
        state = replace(step.state, model=model, next_mask=model.mask)
        works.append(Work(peer, t, state, {}, idle=True, tuning=method.tuning))
    steps, judged = dict(result.steps), {}
    for peer, judgement in engine.steps(works):
        judged[peer] = judgement.state
        report, found = steps[peer].report, judgement.report
        report = replace(report, score=found.score, failure=report.failure or found.failure)
        steps[peer] = replace(steps[peer], report=report)
    in_order = {peer: judged[peer] for peer in result.steps}  # engines finish in any order
    return replace(result, steps=steps, judged=in_order)


def peer_step(setting: Setting, live: LiveModel, work: Work, pulse: Callable[[], None] = lambda: None) -> Step:
    """One peer's round: from its state and what it heard to its next state, and a report.

    A step whose numbers stop being finite is given up: the peer keeps its last good state and says so.
    """
    method, data = setting.method, setting.peers[work.peer]
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
        roster=setting.roster,
        scoring=work.scoring,
        buffers=work.state.buffers,
        pulse=pulse,
    )
    torch.manual_seed(stream_seed(setting.seed, "torch", work.peer, work.t))  # for dropout, which knows no generator
    state = work.state
    try:
        if work.tuning:
            state = _tuned(trainer, state, work.tuning)
        elif not work.idle and isinstance(method, ServerMethod):
            state = method.step(trainer, state, work.heard[SERVER])
        elif not work.idle and isinstance(method, GossipMethod):
            trainer.report.overlap = _overlap(state.next_mask, work.heard)
            state = method.step(trainer, state, work.heard)
    except NonFiniteError as problem:
        trainer.report.failure = str(problem)
        trainer.buffers = work.state.buffers
    _judge(trainer, state)
    return Step(state, trainer.report)


def _overlap(mask: PackedMask, heard: Mapping[str, PackedModel]) -> float | None:
    """How much of what a peer keeps its neighbours hold too; of no interest where it keeps everything."""
    if not heard or mask.kept in (0, mask.size):
        return None
    return sum(mask.overlap(model.mask) for model in heard.values()) / (len(heard) * mask.kept)


def _tuned(trainer: Trainer, state: PeerState, tuning: Tuning) -> PeerState:
    weights, mask = state.model.unpack()
    lr = trainer.settings.lr if tuning.rate == "initial" else None
    model = PackedModel.pack(trainer.learn(weights, mask, tuning.epochs, lr=lr), mask)
    return replace(state, model=model, buffers=trainer.buffers)


def _judge(trainer: Trainer, state: PeerState) -> None:
    """Fill in the report: how good the model is, and how much of its mask will change."""
    if trainer.scoring:
        trainer.report.score = trainer.score(state.model.unpack()[0])
    if state.next_mask is not state.model.mask and state.model.mask.kept:
        changed = hamming(state.model.mask.unpack(), state.next_mask.unpack())
        trainer.report.mask_change = changed / (2 * state.model.mask.kept)
