"""THE file: one gossip round and one server round, top to bottom, as in Algorithm 1.

`gossip_round` and `server_round` say what happens in a round; `peer_step` is the one piece of work in them, which
engines map over peers and which a real peer calls with the messages from its sockets.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dispfl.core.live import LiveModel
from dispfl.core.masks import hamming
from dispfl.core.packed import PackedMask, PackedModel
from dispfl.core.rng import stream, stream_seed
from dispfl.core.train import Trainer
from dispfl.costs.ledger import Ledger
from dispfl.errors import NonFiniteError
from dispfl.methods.base import SERVER, Around, GossipMethod, PeerState, ServerMethod, Tuning, fresh_state
from dispfl.work import Engine, Outcome, Part, Setting, Step, Work


@dataclass(frozen=True)
class Round:
    """A finished round."""

    outcomes: Mapping[str, Outcome]
    """What each peer did."""
    server: PeerState | None = None
    """The server's next state, where there is a server."""

    @property
    def ledger(self) -> Ledger:
        """What it took."""
        return Ledger.of(message for outcome in self.outcomes.values() for message in outcome.carried)


OnOutcome = Callable[[str, Outcome], None]


def start(setting: Setting, peers: Collection[str] | None = None) -> dict[str, PeerState]:
    """Algorithm 1, line 2: everyone's state before round 0, the server's too; or only some peers'."""
    module = LiveModel(setting.module())
    weights, buffers = module.read(), module.read_buffers()
    densities = setting.method.densities(len(setting.roster))
    states = {}
    for peer, density in zip(setting.roster, densities, strict=True):
        if peers is None or peer in peers:
            state = setting.method.start(weights, module.layout, density, seed=setting.seed, peer=peer)
            states[peer] = replace(state, buffers={name: buffer.clone() for name, buffer in buffers.items()})
    if isinstance(setting.method, ServerMethod) and (peers is None or SERVER in peers):
        states[SERVER] = fresh_state(weights, torch.ones(module.layout.size, dtype=torch.bool))
    return states


def play_round(
    setting: Setting,
    server: PeerState | None,
    t: int,
    engine: Engine,
    finished: Mapping[str, Outcome] | None = None,
    on_outcome: OnOutcome = lambda peer, outcome: None,
) -> Round:
    """Round t, whichever kind it is; `finished` holds what is done already of it."""
    done = dict(finished or {})
    if isinstance(setting.method, ServerMethod):
        assert server is not None
        result = server_round(setting, setting.method, server, t, engine, done, on_outcome)
    else:
        assert isinstance(setting.method, GossipMethod)
        result = gossip_round(setting, setting.method, t, engine, done, on_outcome)
    engine.turn()
    return judge_shared(setting, result, t, engine) if setting.method.shares and setting.scores(t) else result


def gossip_round(
    setting: Setting,
    method: GossipMethod,
    t: int,
    engine: Engine,
    finished: Mapping[str, Outcome],
    on_outcome: OnOutcome,
) -> Round:
    """Algorithm 1, lines 5-16, for all peers."""
    topology, roster, seed = setting.topology, setting.roster, setting.seed

    # Line 6: each online peer may hear its neighbours of this round.
    heard = topology.heard(seed, t, roster) if method.hears else {peer: [] for peer in roster}
    parts = []
    for peer in roster:
        idle = peer not in heard and topology.offline == "skip"
        parts.append(Part(peer, t, heard, idle=idle, scoring=setting.scores(t) and not method.shares))

    # Lines 7-15: each peer takes its step.
    outcomes = _outcomes(engine, parts, finished, on_outcome)
    return Round({peer: outcomes[peer] for peer in roster})


def server_round(
    setting: Setting,
    method: ServerMethod,
    server: PeerState,
    t: int,
    engine: Engine,
    finished: Mapping[str, Outcome],
    on_outcome: OnOutcome,
) -> Round:
    """A round with a server: it picks a cohort, broadcasts, the cohort takes its step, the server aggregates."""
    roster = setting.roster

    # The server picks a cohort of those who are online, and broadcasts.
    cohort = method.pick(setting.seed, t, sorted(setting.topology.online(setting.seed, t, roster)))
    parts = []
    for peer in roster:
        caller = server if peer in cohort else None
        scoring = setting.scores(t) and not method.shares
        parts.append(Part(peer, t, server=caller, idle=caller is None, scoring=scoring))

    # The cohort takes its step; the others wait.
    outcomes = _outcomes(engine, parts, finished, on_outcome)

    # The server aggregates what the cohort sends back.
    sent = {peer: upload for peer in cohort if (upload := outcomes[peer].sent) is not None}
    if sent:
        server = method.aggregate(server, sent, {peer: len(setting.peers[peer].train) for peer in sent})
    return Round({peer: replace(outcomes[peer], sent=None) for peer in roster}, server)


def _outcomes(
    engine: Engine, parts: Iterable[Part], finished: Mapping[str, Outcome], on_outcome: OnOutcome
) -> dict[str, Outcome]:
    """What came of everyone's part: of those that are finished already, and of those that the engine does now."""
    outcomes = dict(finished)
    for peer, outcome in engine.steps([part for part in parts if part.peer not in finished]):
        outcomes[peer] = outcome
        on_outcome(peer, outcome)
    return outcomes


def judge_shared(setting: Setting, result: Round, t: int, engine: Engine) -> Round:
    """Judge every peer on the model that all share, fine-tuned on its own data first where the method says so."""
    method = setting.method
    shared = method.shared(engine.states if result.server is None else {SERVER: result.server})
    parts = [Part(peer, t, shared=shared, idle=True, tuning=method.tuning) for peer in setting.roster]
    outcomes = dict(result.outcomes)
    for peer, judgement in engine.steps(parts):
        report, found = outcomes[peer].report, judgement.report
        report = replace(report, score=found.score, failure=report.failure or found.failure)
        outcomes[peer] = replace(outcomes[peer], report=report)
    return replace(result, outcomes=outcomes)


def senders_of(setting: Setting, part: Part, state: PeerState) -> Sequence[str]:
    """Whom a peer hears: the server that calls it, its neighbours, or whom its method prefers of those around."""
    if part.server is not None:
        return [SERVER]
    if not part.heard.get(part.peer) or not isinstance(setting.method, GossipMethod):
        return []
    reachable = setting.topology.reachable(part.heard, part.peer)
    around = Around(setting.roster, part.heard[part.peer], reachable)
    return setting.method.choose(state, around, rng=stream(setting.seed, "choose", part.peer, part.t))


def state_for(setting: Setting, part: Part, states: Mapping[str, PeerState]) -> PeerState:
    """What a peer's part begins with: its own state, or the same with the model that all share."""
    state = states[part.peer]
    if part.shared is None:
        return state
    model = setting.method.judged(state, part.shared)
    return replace(state, model=model, next_mask=model.mask)


def peer_step(
    setting: Setting,
    live: LiveModel,
    work: Work,
    pulse: Callable[[], None] = lambda: None,
    make_trainer: Callable[..., Trainer] = Trainer,
) -> Step:
    """One peer's round: from its state and what it heard to its next state, and a report.

    A step whose numbers stop being finite is given up: the peer keeps its last good state and says so.
    """
    method, data = setting.method, setting.peers[work.peer]
    trainer = make_trainer(
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
