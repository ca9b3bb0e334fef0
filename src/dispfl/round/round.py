"""One gossip round and one server round, top to bottom, as in Algorithm 1.

`gossip_round` and `server_round` are the two kinds of round. `peer_step` is the work of one peer in
it: engines run it for every peer, and a real peer calls it with the models that its neighbours
sent.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dispfl.clock.deadline import DeadlineClock
from dispfl.core.flat_module import FlatModule
from dispfl.core.packed import Mask, PackedModel
from dispfl.core.report import Report
from dispfl.core.rng import seed_globally
from dispfl.core.train import Trainer, step_clock
from dispfl.errors import NonFiniteError, RunError, user_errors
from dispfl.methods.base import (
    SERVER,
    FineTuning,
    GossipMethod,
    PeerState,
    ServerMethod,
    evaluated_state,
)
from dispfl.robust.attacks import BACKDOORS, Triggered, backdoor_success
from dispfl.robust.averages import Robust, requested_uploads
from dispfl.round.context import Engine, PeerTask, RunContext, StepResult
from dispfl.round.exchange import (
    Graph,
    accepted_uploads,
    exchange_graph,
    mixing_weights,
    neighbour_counts,
    round_senders,
    server_cohort,
    shared_part,
    with_private,
    with_private_kept,
)
from dispfl.round.late_models import with_deadline
from dispfl.round.ledger import Ledger


@dataclass(frozen=True)
class Round:
    """A finished round."""

    results: Mapping[str, StepResult]
    """Every peer's result."""
    server: PeerState | None = None
    """The server's next state, where there is a server."""
    uploads: Sequence[str] = field(default=(), kw_only=True)
    """The peers whose uploads the server has aggregated."""

    @property
    def ledger(self) -> Ledger:
        """The bytes sent in this round."""
        return Ledger.of(message for result in self.results.values() for message in result.messages)


OnResult = Callable[[str, StepResult], None]


def initial_states(
    context: RunContext, peers: Collection[str] | None = None
) -> dict[str, PeerState]:
    """Algorithm 1, line 2: the states before round 0, of all peers and the server or of some."""
    first_state = first_states(context)
    states = {}
    for peer in context.densities:
        if peers is None or peer in peers:
            states[peer] = first_state(peer)

    if isinstance(context.method, ServerMethod) and (peers is None or SERVER in peers):
        server = context.method.start_server(context.first_weights, context.layout)
        model = shared_part(context, server.model)
        states[SERVER] = replace(server, model=model, next_mask=model.mask)
    return states


def first_states(context: RunContext) -> Callable[[str], PeerState]:
    """Return a function that gives each peer its state before round 0.

    Threads may call it at the same time, unless every peer draws weights of its own: a network's
    constructor takes them from torch's global generator.
    """
    layout = context.layout
    densities = context.densities
    seed = context.settings.seed
    buffers = FlatModule(context.module()).read_buffers()
    _ = context.first_weights  # before threads ask for them
    _ = context.private_mask

    def first_state(peer: str) -> PeerState:
        weights = context.peer_weights(peer)
        state = context.method.start(weights, layout, densities[peer], seed=seed, peer=peer)
        own_buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        private = _first_private(context, state, weights)
        return replace(state, buffers=own_buffers, private=private)

    return first_state


def _first_private(context: RunContext, state: PeerState, weights: Tensor) -> PackedModel | None:
    """Return the private weights that a peer of a server method starts with."""
    if context.private_mask is None or not isinstance(context.method, ServerMethod):
        return None
    if not state.model.mask.kept:  # it keeps no model between rounds
        return PackedModel.pack(weights, context.private_mask)
    return PackedModel.pack(weights, state.model.mask).restrict(context.private_mask)


def train_round(
    context: RunContext,
    server: PeerState | None,
    t: int,
    engine: Engine,
    finished: Mapping[str, StepResult],
    on_result: OnResult,
    deadline: DeadlineClock | None = None,
) -> Round:
    """Run round t of either kind; `finished` has the results of the steps that are done already.

    With a deadline peers go on without the models that are late by its clock.
    """
    if isinstance(context.method, ServerMethod):
        assert server is not None
        result = server_round(context, context.method, server, t, engine, finished, on_result)
    else:
        assert isinstance(context.method, GossipMethod)
        result = gossip_round(context, context.method, t, engine, finished, on_result, deadline)
    engine.end_round()
    return result


def evaluate_round(context: RunContext, trained: Round, t: int, engine: Engine) -> Round:
    """Evaluate the global model after round t where that is due.

    A peer's own model is evaluated in its step.
    """
    if context.method.evaluates_global and context.evaluates(t):
        return evaluate_global(context, trained, t, engine)
    return trained


def gossip_round(
    context: RunContext,
    method: GossipMethod,
    t: int,
    engine: Engine,
    finished: Mapping[str, StepResult],
    on_result: OnResult,
    deadline: DeadlineClock | None = None,
) -> Round:
    """Algorithm 1, lines 5-16, for all peers."""
    # Line 6: each online peer receives from its neighbours of this round, or whom it prefers.
    graph = exchange_graph(context, t)
    senders: Graph = graph
    if method.chooses:
        senders = round_senders(context, t, graph, engine.choices(t, graph))
    exchanges = None
    if deadline is not None:
        exchanges = deadline.exchange(engine.message_sizes(deadline.asked(senders)))
    requested = neighbour_counts(context, t, graph)
    weights = mixing_weights(context, t, graph)
    evaluate = context.evaluates(t) and not method.evaluates_global
    tasks = []
    for peer in context.roster:
        honest = peer not in context.byzantine
        task = PeerTask(peer, t, mixing_weights=weights.get(peer), evaluate=evaluate and honest)
        if peer in graph:
            others = [sender for sender in senders[peer] if sender not in graph[peer]]
            task = replace(task, senders=senders[peer], requested=requested[peer] + len(others))
            if exchanges is not None:
                task = with_deadline(task, senders[peer], exchanges[peer])
        else:
            skips = context.settings.topology.offline == "skip"
            task = replace(task, requested=requested[peer], idle=skips)
        tasks.append(task)

    # Lines 7-15: each peer takes its step.
    results = _run_tasks(engine, tasks, finished, on_result)
    return Round({peer: results[peer] for peer in context.roster})


def server_round(
    context: RunContext,
    method: ServerMethod,
    server: PeerState,
    t: int,
    engine: Engine,
    finished: Mapping[str, StepResult],
    on_result: OnResult,
) -> Round:
    """A round with a server: select a cohort, broadcast, step, aggregate."""
    # The server selects a cohort of the peers that are online, and broadcasts to it.
    cohort = server_cohort(context, method, t)
    evaluate = context.evaluates(t) and not method.evaluates_global
    tasks = []
    for peer in context.roster:
        sender = server if peer in cohort else None
        honest = peer not in context.byzantine
        tasks.append(
            PeerTask(peer, t, server=sender, idle=sender is None, evaluate=evaluate and honest)
        )

    # The cohort takes its step; the other peers are idle.
    results = _run_tasks(engine, tasks, finished, on_result)

    # The server aggregates what the cohort uploads.
    uploads = {}
    for peer in cohort:
        upload = results[peer].upload
        if upload is not None:
            uploads[peer] = upload
    accepted = accepted_uploads(context, t, server, uploads)
    if accepted:
        samples = {peer: len(data.train) for peer, data in context.data.peers.items()}
        server = method.aggregate(server, accepted, samples)
    if isinstance(method, Robust):
        for peer in cohort:
            method.report_protection(results[peer].report, requested_uploads(method), len(accepted))
    without_uploads = {peer: replace(results[peer], upload=None) for peer in context.roster}
    return Round(without_uploads, server, uploads=sorted(accepted))


def _run_tasks(
    engine: Engine,
    tasks: Iterable[PeerTask],
    finished: Mapping[str, StepResult],
    on_result: OnResult,
) -> dict[str, StepResult]:
    """Return the result of every task: the finished ones, and those that the engine runs."""
    results = dict(finished)
    unfinished = [task for task in tasks if task.peer not in finished]
    for peer, result in engine.run_tasks(unfinished):
        results[peer] = result
        on_result(peer, result)
    return results


def evaluate_global(context: RunContext, result: Round, t: int, engine: Engine) -> Round:
    """Evaluate the global model on every peer's data, fine-tuned first if the method does so."""
    model = global_model(context, engine.states, result.server)
    tuning = context.method.fine_tuning
    tasks = []
    for peer in context.honest_peers:
        tasks.append(PeerTask(peer, t, global_model=model, idle=True, fine_tuning=tuning))
    results = dict(result.results)
    for peer, evaluation in engine.run_tasks(tasks):
        report = results[peer].report.with_evaluation(evaluation.report)
        results[peer] = replace(results[peer], report=report)
    return replace(result, results=results)


def global_model(
    context: RunContext, states: Mapping[str, PeerState], server: PeerState | None
) -> PackedModel:
    """Return the global model of a method that has one: the server's, or the peers' consensus."""
    if server is not None:
        return context.method.global_model({SERVER: server})
    if context.byzantine:
        states = {peer: states[peer] for peer in context.honest_peers}
    return context.method.global_model(states)


def task_state(context: RunContext, task: PeerTask, states: Mapping[str, PeerState]) -> PeerState:
    """Return the state that a task begins with: the peer's, maybe with the global model."""
    state = states[task.peer]
    if task.global_model is None:
        return state
    return evaluated_state(context.method, state, task.global_model, context.private_mask)


def peer_step(
    context: RunContext,
    network: FlatModule,
    task: PeerTask,
    state: PeerState,
    received: Mapping[str, PackedModel],
    before_batch: Callable[[], None] = lambda: None,
    make_trainer: Callable[..., Trainer] = Trainer,
) -> StepResult:
    """One peer's round: from its state and the received models to its next state and a report.

    A step whose numbers stop being finite is abandoned: the peer keeps its last good state, and the
    report says why.
    """
    began = step_clock(network)
    trainer = make_trainer(
        network=network.for_mask(state.next_mask),
        data=context.data.peers[task.peer],
        run=context.training_of(task.peer),
        peer=task.peer,
        t=task.t,
        passed=task.passed,
        requested=task.requested,
        mixing_weights=task.mixing_weights,
        evaluate=task.evaluate,
        buffers=state.buffers,
        moments=dict(state.moments),
        private=context.private_steps(task, _private_steps(context, task, state)),
        before_batch=before_batch,
    )
    trainer.report.computed = list(trainer.network.layout.sizes)
    # Dropout takes no generator, so torch's global one is seeded.
    seed_globally(context.settings.seed, "torch", task.peer, task.t)
    with user_errors(f"Peer {task.peer}, round {task.t}"):
        after = _step(context, trainer, task, state, received)
        trainer.report.seconds += step_clock(network) - began
        trainer.network = network.for_mask(after.model.mask)
        if task.evaluate:
            with trainer.observing():
                _evaluate(context, trainer, after.model)
        if trainer.report.mask_change is None:
            trainer.report.mask_change = _mask_change(after)
    trainer.step_is_over = True
    return StepResult(trainer.report, state=after)


def rests(context: RunContext, task: PeerTask) -> bool:
    """Whether a peer only keeps its state in this round, and `resting_result` is its result."""
    evaluates = task.evaluate or task.global_model is not None
    works = not task.idle or evaluates or task.fine_tuning is not None
    return not works and not context.settings.privacy.enabled


def resting_result(state: PeerState) -> StepResult:
    """Return what `peer_step` gives for a peer that only keeps its state, at no cost."""
    return StepResult(Report(mask_change=_mask_change(state)), state=state)


def _step(
    context: RunContext,
    trainer: Trainer,
    task: PeerTask,
    state: PeerState,
    received: Mapping[str, PackedModel],
) -> PeerState:
    """Return the peer's next state, or its last good one if numbers stop being finite."""
    after = state
    try:
        if _exhausted(context, trainer, task):
            trainer.private = None  # it keeps its model, serves it, and no longer trains
        elif task.fine_tuning:
            after = _fine_tuned(trainer, state, task.fine_tuning)
        elif not task.idle:
            after = _method_step(context, trainer, state, received)
            _check_tensors(context, trainer, after)
        if trainer.settings.keep_moments and after is not state:
            after = replace(after, moments=trainer.moments)
    except NonFiniteError as problem:
        after = state
        trainer.report.failure = str(problem)
        trainer.buffers = state.buffers

    trainer.charge_own_loop((after.upload or after.model).mask)
    if context.settings.privacy.enabled:
        after = _charged(context, trainer, task, state, after)
    return with_private_kept(context, state, after)


def _method_step(
    context: RunContext,
    trainer: Trainer,
    state: PeerState,
    received: Mapping[str, PackedModel],
) -> PeerState:
    method = context.method
    if isinstance(method, ServerMethod):
        after = method.step(trainer, state, with_private(state, received[SERVER]))
    else:
        assert isinstance(method, GossipMethod)
        trainer.report.overlap = _overlap(context, state.next_mask, received)
        after = method.step(trainer, state, received)
    if not isinstance(after, PeerState):  # a user's method, without type checks
        raise RunError(
            f"Peer {trainer.peer}, round {trainer.t}: {type(method).__name__}.step must return a"
            f" PeerState, got {type(after).__name__}."
        )
    return after


def _check_tensors(context: RunContext, trainer: Trainer, after: PeerState) -> None:
    """Abandon the step if a tensor that the peer would send next is not finite."""
    if not context.tensors:
        return
    model = after.upload
    if isinstance(context.method, GossipMethod):
        model = context.method.publish(after)
    if model is not None:
        for name, tensor in model.tensors.items():
            trainer.check_finite(tensor, f"tensor {name}")


PRIVATE_STEPS = "privacy.steps"


def _private_steps(context: RunContext, task: PeerTask, state: PeerState) -> int:
    """Return the private steps that a peer has taken at its present sampling rate and noise."""
    if task.private is not None:
        return context.privacy_plan(task.peer).steps_in(task.private)
    return int(state.memory.get(PRIVATE_STEPS, 0))


def _exhausted(context: RunContext, trainer: Trainer, task: PeerTask) -> bool:
    """Whether a peer's budget does not last for another round; the report says so."""
    private = trainer.private
    if private is None or private.remaining is None:
        return False
    plan = context.privacy_plan(trainer.peer, task.private)
    if private.remaining >= plan.steps_per_round:
        return False
    assert plan.max_steps is not None
    spent = plan.spent(plan.max_steps - private.remaining)
    epsilon = context.settings.privacy.epsilon
    trainer.report.exhausted = True
    trainer.report.failure = (
        f"Peer {trainer.peer}, round {trainer.t}: its privacy budget, epsilon"
        f" {epsilon:g}, does not last for another round ({spent:.3g} are spent). It"
        " no longer trains, and goes on sending its model."
    )
    return True


def _charged(
    context: RunContext, trainer: Trainer, task: PeerTask, before: PeerState, after: PeerState
) -> PeerState:
    """Return the state with the private steps of this round counted.

    Those of an abandoned step count too.
    """
    steps = _private_steps(context, task, before)
    if trainer.private is not None:
        steps += trainer.private.taken
    trainer.private = None  # what follows evaluates, and publishes nothing
    trainer.report.epsilon = context.privacy_plan(trainer.peer, task.private).spent(steps)
    return replace(after, memory={**after.memory, PRIVATE_STEPS: torch.tensor(steps)})


def _overlap(context: RunContext, mask: Mask, received: Mapping[str, PackedModel]) -> float | None:
    """Return the mean share of our kept weights that a neighbour holds too.

    Private weights do not count. None for a dense model.
    """
    shareable = mask.size
    if context.shared_mask is not None:
        mask = mask & context.shared_mask
        shareable = context.shared_mask.kept
    if not received or mask.kept in (0, shareable):
        return None
    shared = sum(mask.overlap(model.mask) for model in received.values())
    return shared / (len(received) * mask.kept)


def _fine_tuned(trainer: Trainer, state: PeerState, tuning: FineTuning) -> PeerState:
    mask = state.model.mask
    trainer.moments = {}
    lr = trainer.settings.lr if tuning.rate == "initial" else None
    learned = trainer.learn(state.model.flat(), mask, tuning.epochs, steps=tuning.steps, lr=lr)
    return replace(state, model=PackedModel.under(learned, mask), buffers=trainer.buffers)


def _evaluate(context: RunContext, trainer: Trainer, model: PackedModel) -> None:
    """Add to the report how good a model is."""
    weights = model.flat()
    report = trainer.report
    if context.settings.eval_train:
        report.train_score = trainer.score(weights, trainer.train)
    trainer.observe(weights)
    if trainer.validation is not None:
        report.validation = trainer.score(weights, trainer.validation)
    if context.data.global_test is not None:
        report.global_test = trainer.score(weights, context.data.global_test)
    if context.attack is not None and context.attack.name in BACKDOORS:
        report.backdoor = trainer.score(weights, Triggered(trainer.test), backdoor_success)


def _mask_change(state: PeerState) -> float | None:
    """Return the share of kept weights that the next mask replaces; None where it is the same."""
    mask = state.model.mask
    next_mask = state.next_mask
    if next_mask is mask or not mask.kept:
        return None
    changed = mask.kept + next_mask.kept - 2 * mask.overlap(next_mask)
    return changed / (2 * mask.kept)
