"""The rules of the contract of methods, each a function that runs a few rounds of tiny peers."""

import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dispfl.core.flat_module import FlatModule
from dispfl.core.metric import Metric
from dispfl.core.packed import PackedModel
from dispfl.core.report import Report
from dispfl.core.rng import stream_seed
from dispfl.core.train import Train
from dispfl.engines.checkpoint import Checkpoints
from dispfl.errors import DispflError, MessageError
from dispfl.federation import Federation
from dispfl.methods.base import SERVER, GossipMethod, Method, PeerState, ServerMethod
from dispfl.registry import TOPOLOGIES
from dispfl.round.context import PeerTask, RunContext, StepResult
from dispfl.round.exchange import (
    check_answer,
    check_norm,
    decode_model,
    encode_model,
    gossip_senders,
    model_norm,
    requested_mask,
    shared_part,
)
from dispfl.round.round import initial_states, peer_step
from dispfl.testing.rounds import (
    FinishedRound,
    PresetEngine,
    all_bits,
    bits,
    labelled_points,
    models_from,
    network_with_buffers,
    round_bits,
    run_all_rounds,
    run_from,
    step_of,
    tiny_context,
    tiny_network,
    uploads_of,
)
from dispfl.topology import Full, RandomRegular, Ring, Topology

Rule = Callable[[Method], None]


class BrokenRuleError(AssertionError):
    """A method breaks the rule that is being checked."""


def require(holds: bool, sentence: str) -> None:
    """Raise a `BrokenRuleError` with this sentence unless the condition holds."""
    if not holds:
        raise BrokenRuleError(sentence)


def check_healthy(context: RunContext, rounds: Sequence[FinishedRound]) -> None:
    """Require that all peers took their steps without failure, and that their reports are complete.

    Weights are finite, training has a loss, and models are evaluated when that is due.
    """
    name = context.method.name
    for t, finished_round in enumerate(rounds):
        has_all_steps = list(finished_round.steps) == context.roster
        require(has_all_steps, f"round {t} of {name} lacks a peer's step.")
        for peer, step in finished_round.steps.items():
            _check_step(name, step, f"of peer {peer} in round {t}", context.evaluates(t))
        for peer, state in finished_round.states.items():
            finite = bool(state.model.values.isfinite().all())
            require(finite, f"weights of {peer} are infinite or nan after round {t}.")


def _check_step(method_name: str, step: StepResult, where: str, evaluated: bool) -> None:
    report = step.report
    require(report.failure is None, f"{method_name}: {report.failure}")
    require(
        (report.train_loss is not None) == bool(report.passes),
        f"the report {where} has a loss without training, or none after it.",
    )
    require(
        (report.score is not None) == evaluated,
        f"the model {where} is evaluated when it is not due, or not when it is.",
    )
    require(step.next_state.upload is None, f"the upload {where} is still there after the round.")


def settings(method: Method) -> None:
    """A method is its settings: read from a config it is the same, with a density for each peer."""
    values = method.model_dump(mode="json", exclude_none=True)
    rebuilt = type(method)(**values)
    require(rebuilt == method, f"{method.name} rebuilt from its settings differs from it.")
    try:
        densities = method.densities(5)
    except DispflError:
        return  # it has densities for another number of peers
    valid = len(densities) == 5 and all(0 < density <= 1 for density in densities)
    require(
        valid, f"densities(5) of {method.name} must be five numbers in (0, 1], got {densities}."
    )


def tensors(method: Method) -> None:
    """What is sent in any round has the tensors that the method declares, and no others."""
    context = tiny_context(method)
    models_from(context, initial_states(context), "000", "001", "002")
    if context.tensors:
        for finished_round in run_all_rounds(context):
            models_from(context, finished_round.states, "000", "001", "002")


def budget(method: Method) -> None:
    """No peer keeps more weights of a layer than before, and kept values fit their masks."""
    context = tiny_context(method, rounds=4)
    layout = context.layout
    states = initial_states(context)
    if isinstance(method, GossipMethod):
        for (peer, state), density in zip(states.items(), method.densities(3), strict=True):
            counts = state.next_mask.kept_per_layer(layout)
            announced = list(method.kept_counts(layout, density))
            require(
                counts == announced,
                f"{method.name}: peer {peer} keeps {counts} weights of the layers at first, but"
                f" kept_counts says {announced}.",
            )

    allowed = {peer: state.model.mask.kept_per_layer(layout) for peer, state in states.items()}
    for t, finished_round in enumerate(run_all_rounds(context)):
        for peer, state in finished_round.states.items():
            _check_budget(context, t, peer, state, allowed[peer])
            allowed[peer] = state.model.mask.kept_per_layer(layout)


def _check_budget(
    context: RunContext, t: int, peer: str, state: PeerState, allowed: Sequence[int]
) -> None:
    """Check a state after round t against the weights of each layer that its peer kept before."""
    method = context.method
    fits = state.model.mask.kept == state.model.values.numel()
    require(fits, f"{method.name}: the values of {peer} do not fit their mask after round {t}.")
    for mask in (state.model.mask, state.next_mask):
        counts = mask.kept_per_layer(context.layout)
        for layer, count, before in zip(context.layout.by_name, counts, allowed, strict=True):
            require(
                count <= before,
                f"{method.name}: {peer} keeps {count} weights of {layer} after round {t},"
                f" {before} before.",
            )
    if not isinstance(method, GossipMethod) or method.density_falls:
        return
    if method.pulls_masked and peer != SERVER:
        require(
            state.next_mask.kept_per_layer(context.layout) == allowed,
            f"{method.name} pulls with masks, so {peer} must keep each layer's count.",
        )


def zeros(method: Method) -> None:
    """Weights outside the mask are zero, and none is -0.0: equal models have equal bytes."""
    for peer, state in run_all_rounds(tiny_context(method))[-1].states.items():
        weights, mask = state.model.unpack()
        outside = bool(weights[~mask].view(torch.int32).any())
        require(not outside, f"{method.name}: {peer} has weights outside its mask.")
        negative = bool(weights[weights == 0].signbit().any())
        require(not negative, f"{method.name}: {peer} has a weight of -0.0; use PackedModel.pack.")


def inputs(method: Method) -> None:
    """A step, a round and the server's aggregation do not modify their inputs."""
    context = tiny_context(method)
    states = run_all_rounds(context)[0].states
    received = models_from(context, states, "000", "001", "002")
    bits_before = all_bits(states)
    copies = {sender: _copy(model) for sender, model in received.items()}
    step_of(context, 1, states, received)
    require(
        all_bits(states) == bits_before,
        f"the step of {method.name} modifies a state; return a new one.",
    )
    for sender, copy in copies.items():
        require(
            _same_model(received[sender], copy),
            f"the step of {method.name} modifies the model received from {sender}.",
        )

    first = initial_states(context)
    bits_before = all_bits(first)
    with closing(PresetEngine(context, 1)) as engine:
        after = run_from(context, first, 0, engine).states
    require(
        all_bits(first) == bits_before,
        f"a round of {method.name} modifies a state of the round before.",
    )
    require(set(after) == set(first), f"a round of {method.name} loses a peer's state or adds one.")


def _copy(model: PackedModel) -> PackedModel:
    return PackedModel.pack(*model.unpack()).with_tensors(**model.tensors)


def _same_model(model: PackedModel, expected: PackedModel) -> bool:
    """Whether two models keep the same weights with the same values, and have the same tensors."""
    if model.tensors.keys() != expected.tensors.keys():
        return False
    for name, tensor in model.tensors.items():
        if not tensor.equal(expected.tensors[name]):
            return False
    same_values = model.values.equal(expected.values)
    return same_values and model.mask.unpack().equal(expected.mask.unpack())


def reproducible(method: Method) -> None:
    """The same seed gives the same bits."""
    first_run = run_all_rounds(tiny_context(method))
    second_run = run_all_rounds(tiny_context(method))
    require(
        round_bits(first_run[-1]) == round_bits(second_run[-1]),
        f"{method.name} gives other bits the second time, with the same seed.",
    )


def extension(method: Method) -> None:
    """The first rounds do not depend on how many follow, or `depends_on_rounds` says what does."""
    if method.depends_on_rounds:
        return
    short_run = run_all_rounds(tiny_context(method, rounds=2))
    long_run = run_all_rounds(tiny_context(method, rounds=5))
    require(
        all_bits(short_run[1].states) == all_bits(long_run[1].states),
        f"{method.name} depends on Trainer.T, which its depends_on_rounds must say.",
    )


def named_randomness(method: Method) -> None:
    """Random numbers come from named streams (`peer.stream("purpose")`, `rng`) alone."""
    context = tiny_context(method)
    run_seed = context.settings.seed
    with _unused_generators(method, "start"):
        states = initial_states(context)
    for peer in context.roster:
        senders = [name for name in context.roster if name != peer]
        received = models_from(context, states, peer, *senders)
        network = FlatModule(context.module())
        step_seed = stream_seed(run_seed, "torch", peer, 0)  # set before the step, for dropout
        with _unused_generators(method, "step", step_seed):
            peer_step(context, network, PeerTask(peer, 0), states[peer], received)
    graph = context.topology(0).online_neighbours(run_seed, 0, context.roster)
    with _unused_generators(method, "choose"):
        gossip_senders(context, graph, "000", 0, states["000"])
    if isinstance(method, ServerMethod):
        uploads = uploads_of(context, states)
        with _unused_generators(method, "aggregate"):
            method.aggregate(states[SERVER], uploads, dict.fromkeys(uploads, 20))


def workers(method: Method) -> None:
    """The number of threads, and with it the order of the peers' steps, does not matter."""
    one_worker = run_all_rounds(tiny_context(method, 4), workers=1)
    three_workers = run_all_rounds(tiny_context(method, 4), workers=3)
    require(
        list(map(round_bits, one_worker)) == list(map(round_bits, three_workers)),
        f"{method.name} gives other bits with three workers than with one.",
    )


def message_order(method: Method) -> None:
    """The order in which models are received does not matter."""
    context = tiny_context(method, 4)
    # After a round: before it, all hold the same values, whose sum is the same in any order.
    states = run_all_rounds(context)[0].states
    if isinstance(method, ServerMethod):
        uploads = uploads_of(context, states, t=1)
        samples = {peer: 3 + 2 * k for k, peer in enumerate(context.roster)}
        in_order = method.aggregate(states[SERVER], uploads, samples)
        reversed_order = method.aggregate(states[SERVER], _reversed(uploads), samples)
    else:
        received = models_from(context, states, "000", "001", "002", "003")
        in_order = step_of(context, 1, states, received).next_state
        reversed_order = step_of(context, 1, states, _reversed(received)).next_state
    require(
        bits(in_order) == bits(reversed_order),
        f"{method.name} depends on the order of received models; sort by sender.",
    )


def _reversed(models: Mapping[str, PackedModel]) -> dict[str, PackedModel]:
    return {name: models[name] for name in reversed(list(models))}


def alone(method: Method) -> None:
    """A peer without neighbours, one peer and two peers work."""
    if isinstance(method, GossipMethod):
        context = tiny_context(method)
        step = step_of(context, 0, initial_states(context), {})
        failure = step.report.failure
        require(failure is None, f"{method.name} without neighbours: {failure}")
        finite = bool(step.next_state.model.values.isfinite().all())
        require(finite, f"weights of {method.name} without neighbours are infinite or nan.")
    for peers in (1, 2):
        context = tiny_context(method, peers, topology=Ring())
        check_healthy(context, run_all_rounds(context))


def topologies(method: Method) -> None:
    """Every topology works, and only its links carry messages."""
    if isinstance(method, ServerMethod):
        return
    for name in ("ring", "full", "random", "grid", "exponential"):
        topology: Topology = RandomRegular(degree=2) if name == "random" else TOPOLOGIES[name]()
        context = tiny_context(method, 5, topology=topology)
        rounds = run_all_rounds(context)
        check_healthy(context, rounds)
        for t, finished_round in enumerate(rounds):
            _check_links(context, t, finished_round)


def _check_links(context: RunContext, t: int, finished_round: FinishedRound) -> None:
    """Check that only neighbours of round t exchanged messages."""
    method = context.method
    topology = context.settings.topology
    neighbours = topology.online_neighbours(0, t, context.roster)
    responses = set()
    requests = set()
    for peer in context.roster:
        reachable = neighbours.get(peer, [])
        if context.choices(t) and peer in neighbours:
            reachable = [name for name in neighbours if name != peer]
        for sender in reachable:
            responses.add((sender, peer))
            requests.add((peer, sender))

    received = set(finished_round.ledger.paper)
    require(
        received <= responses,
        f"{method.name} receives from peers that {topology.name} does not connect.",
    )
    require(
        set(finished_round.ledger.wire) <= responses | requests,
        f"{method.name} sends to peers outside of {topology.name}.",
    )
    senders = Counter(receiver for _, receiver in received)
    for peer in context.roster:
        require(
            senders[peer] <= len(neighbours[peer]),
            f"{method.name} receives from {senders[peer]} peers, more than {topology.name} has"
            " neighbours.",
        )


def offline(method: Method) -> None:
    """Rounds with offline peers work; these take part in no exchange and influence nobody."""
    for offline_prob in (0.5, 0.9):
        for behaviour in ("train", "skip"):
            topology = Full(offline_prob=offline_prob, offline=behaviour)
            context = tiny_context(method, 4, topology=topology, rounds=3)
            rounds = run_all_rounds(context)
            check_healthy(context, rounds)
            for t, finished_round in enumerate(rounds):
                charged = set(chain.from_iterable(finished_round.ledger.wire))
                online = topology.online(0, t, context.roster)
                require(
                    charged <= online | {SERVER},
                    f"{method.name} exchanges messages with an offline peer in round {t}.",
                )
    for count in (0, 1):
        _check_few_online(method, count)
    _check_offline_model_is_unused(method)


def _check_offline_model_is_unused(method: Method) -> None:
    """Check that another model of an offline peer gives all others the same states."""
    context = tiny_context(method, 6, topology=Full(offline_prob=0.5), rounds=20)
    online = context.settings.topology.online(0, 0, context.roster)
    absent = min(set(context.roster) - online)
    states = initial_states(context)
    model = states[absent].model
    changed_model = replace(model, values=model.values + 1)
    changed_states = {**states, absent: replace(states[absent], model=changed_model)}
    with closing(PresetEngine(context, 1)) as engine:
        expected = run_from(context, states, 0, engine).states
        actual = run_from(context, changed_states, 0, engine).states
    server = set(states) - set(context.roster)
    for name in online | server:
        require(
            bits(actual[name]) == bits(expected[name]),
            f"{method.name}: the model of an offline peer changes that of {name}.",
        )


def wire(method: Method) -> None:
    """The wire does not change models, and a step needs no more of them than is requested."""
    context = tiny_context(method)
    for t, finished_round in enumerate(run_all_rounds(context)):
        states = finished_round.states
        received = models_from(context, states, "000", "001", "002")
        if isinstance(method, ServerMethod):
            received |= uploads_of(context, states, t)
        for sender, model in received.items():
            _check_message(context, t, sender, model)
            if isinstance(method, GossipMethod):
                _check_acceptable(context, t, sender, model, states["000"])
        mask = requested_mask(context, states["000"])
        if mask is not None:
            pulled = {}
            for sender, model in received.items():
                message = encode_model(context, context.codec, model, mask, sender, "000", t)
                pulled[sender] = decode_model(context.codec, message, mask)
            with_all = step_of(context, t, states, received).next_state
            with_pulled = step_of(context, t, states, pulled).next_state
            require(
                bits(with_all) == bits(with_pulled),
                f"{method.name} has pulls_masked set, but its step uses weights outside its next"
                " mask.",
            )


def _check_message(context: RunContext, t: int, sender: str, model: PackedModel) -> None:
    """Check that a whole model arrives as it was sent, in as many bytes as are charged for it."""
    codec = context.codec
    message = encode_model(context, codec, model, None, sender, "000", t)
    require(
        _same_model(decode_model(codec, message, None), model),
        f"{context.method.name}: the model of {sender} changes on the wire; see always_dense.",
    )
    require(
        len(message) == codec.model_size(model),
        f"{context.method.name}: the message of {sender} has another length than is charged.",
    )


def _check_acceptable(
    context: RunContext, t: int, sender: str, model: PackedModel, receiver: PeerState
) -> None:
    """Check that a real peer would accept a model: as many weights as announced, and as large."""
    own_norm = model_norm(shared_part(context, receiver.model))
    try:
        check_answer(model.mask, context.announced[sender], sender, context.layout)
        check_norm(model, own_norm, sender)
    except MessageError as problem:
        raise BrokenRuleError(
            f"{context.method.name}: real peers would refuse the model of round {t + 1}: {problem}"
            " See kept_counts and publish."
        ) from problem


def checkpoint(method: Method) -> None:
    """A resumed run has the same bits, after a round or in the middle of one."""
    context = tiny_context(method)
    first, second = run_all_rounds(context)
    with (
        tempfile.TemporaryDirectory(prefix="dispfl-") as folder,
        closing(PresetEngine(context, 1)) as engine,
    ):
        _check_resumed_after_round(context, engine, first, second, Path(folder))
        _check_resumed_in_round(context, engine, first, Path(folder))


def _check_resumed_after_round(
    context: RunContext,
    engine: PresetEngine,
    first: FinishedRound,
    second: FinishedRound,
    folder: Path,
) -> None:
    """Check that states and reports are saved exactly, and continue to the same second round."""
    name = context.method.name
    steps = dict(first.steps)
    if first.server is not None:
        steps[SERVER] = StepResult(Report(), state=first.server)
    loaded = _save_and_load(folder / "states", 0, steps)
    states = {peer: step.next_state for peer, step in loaded.items()}
    require(
        all_bits(states) == all_bits(first.states), f"a state of {name} changes in a checkpoint."
    )
    for peer in context.roster:
        same_report = loaded[peer].report == first.steps[peer].report
        require(same_report, f"a report of {name} changes in a checkpoint.")
    resumed = run_from(context, states, 1, engine)
    require(
        round_bits(resumed) == round_bits(second),
        f"{name} continues differently from a checkpoint.",
    )


def _check_resumed_in_round(
    context: RunContext, engine: PresetEngine, first: FinishedRound, folder: Path
) -> None:
    """Check that the second round is the same with any number of its steps done before."""
    checkpoints = Checkpoints(folder / "uninterrupted")
    with closing(PresetEngine(context, 1, checkpoints)) as writer:
        uninterrupted = run_from(context, first.states, 1, writer)
        writer.flush(1)
    steps = checkpoints.load(2)
    require(set(steps) == set(context.roster), "A finished step is not in the checkpoint.")

    for count in range(1, len(context.roster) + 1):
        done_before = dict(islice(steps.items(), count))
        finished = _save_and_load(folder / str(count), 1, done_before)
        repeated: dict[str, StepResult] = {}
        resumed = run_from(context, first.states, 1, engine, finished, repeated.__setitem__)
        require(
            round_bits(resumed) == round_bits(uninterrupted)
            and resumed.ledger == uninterrupted.ledger,
            f"{context.method.name} continues differently after {count} steps of a round.",
        )
        require(set(repeated) == set(steps) - set(finished), "A finished step is taken again.")


def evaluation(method: Method) -> None:
    """A peer's final model, its buffers included, has the metric that the run reports for it."""
    peers = [(labelled_points(20, k), labelled_points(10, 1000 + k)) for k in range(3)]
    for model in (tiny_network, network_with_buffers):
        federation = Federation(
            model,
            peers,
            method,
            Full(),
            rounds=3,
            train=Train(epochs=2, batch_size=8),
            metric=Metric(confidence, higher_is_better=True),
            workers=1,
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The model has buffers")
            run = federation.run()
        for k, (_, (x, labels)) in enumerate(peers):
            with torch.no_grad():
                measured = confidence(run.model(k)(x), labels)
            reported = run.scores["confidence"][k]
            require(
                abs(measured - reported) < 1e-6,
                f"{method.name} reports {reported:.6f} for peer {k}, whose final model has"
                f" {measured:.6f}.",
            )


def confidence(outputs: Tensor, labels: Tensor) -> float:
    """Return the mean probability of the right class.

    Unlike the accuracy, it differs between any two models.
    """
    return float(outputs.softmax(1).gather(1, labels[:, None]).mean())


RULES: tuple[Rule, ...] = (
    settings,
    tensors,
    named_randomness,
    budget,
    alone,
    zeros,
    inputs,
    reproducible,
    workers,
    message_order,
    topologies,
    offline,
    wire,
    checkpoint,
    evaluation,
    extension,
)
"""All rules, in the order in which they are checked."""


@contextmanager
def _unused_generators(method: Method, part: str, seed: int | None = None) -> Iterator[None]:
    """Require that a part of a method draws from no global generator.

    `seed` is what torch's generator is seeded with meanwhile.
    """
    torch_state = torch.get_rng_state()
    if seed is not None:
        torch_state = torch.Generator().manual_seed(seed).get_state()
    numpy_state = repr(np.random.get_state())
    python_state = random.getstate()
    yield
    unused = {
        "torch": torch.get_rng_state().equal(torch_state),
        "numpy": repr(np.random.get_state()) == numpy_state,
        "Python": random.getstate() == python_state,
    }
    for library, is_unused in unused.items():
        require(
            is_unused,
            f"{part} of {method.name} draws from {library}'s global generator; use peer.stream or"
            " rng.",
        )


def _check_few_online(method: Method, count: int) -> None:
    """Check a round with one peer online, or none."""
    topology = Full(offline_prob=0.7, offline="skip")
    context = tiny_context(method, topology=topology, rounds=50)
    t = 0
    while len(topology.online(0, t, context.roster)) != count:
        t += 1
    states = initial_states(context)
    with closing(PresetEngine(context, 1)) as engine:
        finished_round = run_from(context, states, t, engine)
    for step in finished_round.steps.values():
        require(step.report.failure is None, f"{method.name}: {step.report.failure}")

    used_links = set(finished_round.ledger.wire)
    if not isinstance(method, ServerMethod):
        sentence = f"{method.name} sends a message although {count} peers are online."
        require(not used_links, sentence)
        return
    expected_links = set()
    for peer in topology.online(0, t, context.roster):
        expected_links |= {(SERVER, peer), (peer, SERVER)}
    require(
        used_links == expected_links,
        f"{method.name} must exchange with the only peer online, and with nobody else.",
    )
    if count == 0:
        unchanged = bits(finished_round.states[SERVER]) == bits(states[SERVER])
        require(unchanged, f"the server of {method.name} changes in a round without peers.")


def _save_and_load(folder: Path, t: int, steps: Mapping[str, StepResult]) -> dict[str, StepResult]:
    """Save the steps of round t and return them as loaded from the disk."""
    checkpoints = Checkpoints(folder)
    for peer, step in steps.items():
        checkpoints.add(t, peer, step)
    checkpoints.complete(t)
    return Checkpoints(folder).load(t + 1)
