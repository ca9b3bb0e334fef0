"""The rules of the contract of methods. Each is a function that runs a few rounds of tiny peers, in
a few seconds."""

import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dispfl.core.flat_module import FlatModule
from dispfl.core.masks import kept_per_layer
from dispfl.core.metric import Metric
from dispfl.core.packed import Mask, PackedModel
from dispfl.core.report import Report
from dispfl.core.rng import stream_seed
from dispfl.core.train import Train
from dispfl.engines.checkpoint import Checkpoints
from dispfl.errors import DispflError
from dispfl.federation import Federation
from dispfl.methods.base import SERVER, GossipMethod, Method, ServerMethod
from dispfl.registry import TOPOLOGIES
from dispfl.round.context import PeerTask, RunContext, StepResult
from dispfl.round.exchange import decode_model, encode_model, gossip_senders, requested_mask
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
    """Require that no peer failed, all weights are finite, training is reported, and models are
    evaluated when due."""
    name = context.method.name
    for t, finished_round in enumerate(rounds):
        require(
            list(finished_round.steps) == context.roster,
            f"round {t} of {name} lacks a peer's step.",
        )
        for peer, step in finished_round.steps.items():
            report, where = step.report, f"of peer {peer} in round {t}"
            require(report.failure is None, f"{name}: {report.failure}")
            require(
                (report.train_loss is not None) == bool(report.passes),
                f"the report {where} has a loss without training, or none after it.",
            )
            require(
                (report.score is not None) == context.evaluates(t),
                f"the model {where} is evaluated when it is not due, or not when it is.",
            )
            require(
                step.next_state.upload is None,
                f"the upload {where} is still there after the round.",
            )
        for peer, state in finished_round.states.items():
            finite = bool(state.model.values.isfinite().all())
            require(finite, f"weights of {peer} are infinite or nan after round {t}.")


def settings(method: Method) -> None:
    """A method is its settings: written to a config and read again it is the same, and gives each
    peer a density."""
    values = method.model_dump(mode="json", exclude_none=True)
    require(
        type(method)(**values) == method,
        f"{method.name} rebuilt from its settings differs from it.",
    )
    try:
        changed = method.densities(5)
    except DispflError:
        return  # it has densities for another number of peers
    good = len(changed) == 5 and all(0 < density <= 1 for density in changed)
    require(good, f"densities(5) of {method.name} must be five numbers in (0, 1], got {changed}.")


def budget(method: Method) -> None:
    """No peer keeps more weights of a layer than before, and kept values fit their masks."""
    context = tiny_context(method, rounds=4)
    layout, names = context.layout, list(context.layout.by_name)

    def kept(mask: Mask) -> list[int]:
        return kept_per_layer(mask.unpack(), layout)

    states = initial_states(context)
    if isinstance(method, GossipMethod):
        for (peer, state), density in zip(states.items(), method.densities(3), strict=True):
            announced = list(method.kept_counts(layout, density))
            counts = (
                f"keeps {kept(state.next_mask)} weights of the layers at first, but kept_counts"
                f" says {announced}"
            )
            require(kept(state.next_mask) == announced, f"{method.name}: peer {peer} {counts}.")
    allowed = {peer: kept(state.model.mask) for peer, state in states.items()}
    for t, finished_round in enumerate(run_all_rounds(context)):
        for peer, state in finished_round.states.items():
            fits = state.model.mask.kept == state.model.values.numel()
            require(
                fits, f"{method.name}: the values of {peer} do not fit their mask after round {t}."
            )
            for mask in (state.model.mask, state.next_mask):
                for name, now, before in zip(names, kept(mask), allowed[peer], strict=True):
                    sentence = (
                        f"{method.name}: {peer} keeps {now} weights of {name} after round {t},"
                        f" {before} before."
                    )
                    require(now <= before, sentence)
            if isinstance(method, GossipMethod) and method.pulls_masked and peer != SERVER:
                sentence = (
                    f"{method.name} pulls with masks, so {peer} must keep each layer's count."
                )
                require(kept(state.next_mask) == allowed[peer], sentence)
            allowed[peer] = kept(state.model.mask)


def zeros(method: Method) -> None:
    """Weights outside the mask are exactly zero, and none is -0.0, so that equal models have equal
    bytes."""
    for peer, state in run_all_rounds(tiny_context(method))[-1].states.items():
        weights, mask = state.model.unpack()
        outside = weights[~mask].view(torch.int32).count_nonzero() == 0
        require(bool(outside), f"{method.name}: {peer} has weights outside its mask.")
        negative = bool(weights[weights == 0].signbit().any())
        require(not negative, f"{method.name}: {peer} has a weight of -0.0; use PackedModel.pack.")


def inputs(method: Method) -> None:
    """A step, a round and the server's aggregation do not modify their inputs."""
    context = tiny_context(method)
    states = run_all_rounds(context)[0].states
    received = models_from(method, states, "000", "001", "002")
    before = all_bits(states)
    sent = {
        sender: (model.values.clone(), model.mask.unpack()) for sender, model in received.items()
    }
    step_of(context, 1, states, received)
    require(
        all_bits(states) == before, f"the step of {method.name} modifies a state; return a new one."
    )
    for sender, (values, mask) in sent.items():
        same = received[sender].values.equal(values) and received[sender].mask.unpack().equal(mask)
        require(same, f"the step of {method.name} modifies the model received from {sender}.")

    first = initial_states(context)
    before = all_bits(first)
    with closing(PresetEngine(context, 1)) as engine:
        after = run_from(context, first, 0, engine).states
    require(
        all_bits(first) == before, f"a round of {method.name} modifies a state of the round before."
    )
    require(
        set(after) == set(before), f"a round of {method.name} loses a peer's state or adds one."
    )


def reproducible(method: Method) -> None:
    """The same seed gives the same bits."""
    one, again = (round_bits(run_all_rounds(tiny_context(method))[-1]) for _ in range(2))
    require(one == again, f"{method.name} gives other bits the second time, with the same seed.")


def extension(method: Method) -> None:
    """The first rounds do not depend on how many follow, or `depends_on_rounds` says what does."""
    if method.depends_on_rounds:
        return
    short, long = (
        all_bits(run_all_rounds(tiny_context(method, rounds=rounds))[1].states) for rounds in (2, 5)
    )
    require(
        short == long, f"{method.name} depends on Trainer.T, which its depends_on_rounds must say."
    )


def named_randomness(method: Method) -> None:
    """Random numbers come from named streams (`peer.stream("purpose")`, `rng`), never from a global
    generator."""
    context = tiny_context(method)
    with _unused_generators(method, "start"):
        states = initial_states(context)
    for peer in context.roster:
        task = PeerTask(peer, 0)
        seed = stream_seed(
            context.settings.seed, "torch", peer, 0
        )  # the step is seeded with it, for dropout
        received = models_from(
            method, states, peer, *(name for name in context.roster if name != peer)
        )
        network = FlatModule(context.module())
        with _unused_generators(method, "step", seed):
            peer_step(context, network, task, states[peer], received)
    with _unused_generators(method, "choose"):
        graph = context.settings.topology.online_neighbours(
            context.settings.seed, 0, context.roster
        )
        gossip_senders(context, graph, "000", 0, states["000"])
    if isinstance(method, ServerMethod):
        uploads = uploads_of(context, method, states)
        with _unused_generators(method, "aggregate"):
            method.aggregate(states[SERVER], uploads, dict.fromkeys(uploads, 20))


def workers(method: Method) -> None:
    """The number of threads, and with it the order of the peers' steps, does not matter."""
    one, three = (
        [
            round_bits(finished_round)
            for finished_round in run_all_rounds(tiny_context(method, 4), count)
        ]
        for count in (1, 3)
    )
    require(one == three, f"{method.name} gives other bits with three workers than with one.")


def message_order(method: Method) -> None:
    """The order in which models are received does not matter."""
    context = tiny_context(method, 4)
    # After a round: before it, all hold the same values, whose sum is the same in any order.
    states = run_all_rounds(context)[0].states
    if isinstance(method, ServerMethod):
        uploads = list(uploads_of(context, method, states, t=1).items())
        samples = {peer: 3 + 2 * k for k, peer in enumerate(context.roster)}
        one, other = (
            bits(method.aggregate(states[SERVER], dict(o), samples))
            for o in (uploads, uploads[::-1])
        )
    else:
        received = list(models_from(method, states, "000", "001", "002", "003").items())
        one, other = (
            bits(step_of(context, 1, states, dict(o)).next_state)
            for o in (received, received[::-1])
        )
    require(one == other, f"{method.name} depends on the order of received models; sort by sender.")


def alone(method: Method) -> None:
    """A peer without neighbours, one peer and two peers work."""
    if isinstance(method, GossipMethod):
        context = tiny_context(method)
        step = step_of(context, 0, initial_states(context), {})
        require(
            step.report.failure is None, f"{method.name} without neighbours: {step.report.failure}"
        )
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
        links: Topology = RandomRegular(degree=2) if name == "random" else TOPOLOGIES[name]()
        context = tiny_context(method, 5, topology=links)
        rounds = run_all_rounds(context)
        check_healthy(context, rounds)
        for t, finished_round in enumerate(rounds):
            received = links.online_neighbours(0, t, context.roster)
            allowed = {
                (sender, peer)
                for peer in context.roster
                for sender in links.reachable(received, peer)
            }
            requests = {(peer, sender) for sender, peer in allowed}
            paper, wire = set(finished_round.ledger.paper), set(finished_round.ledger.wire)
            require(
                paper <= allowed, f"{method.name} receives from peers that {name} does not connect."
            )
            require(wire <= allowed | requests, f"{method.name} sends to peers outside of {name}.")
            for peer in context.roster:
                count = sum(receiver == peer for _, receiver in paper)
                sentence = (
                    f"{method.name} receives from {count} peers, more than {name} has neighbours."
                )
                require(count <= len(received[peer]), sentence)


def offline(method: Method) -> None:
    """Rounds with offline peers work; these are neither received nor charged, and do not influence
    the others."""
    for offline_prob in (0.5, 0.9):
        for does in ("train", "skip"):
            context = tiny_context(
                method, 4, topology=Full(offline_prob=offline_prob, offline=does), rounds=3
            )
            rounds = run_all_rounds(context)
            check_healthy(context, rounds)
            for t, finished_round in enumerate(rounds):
                online = context.settings.topology.online(0, t, context.roster)
                charged = {
                    name for link in finished_round.ledger.wire for name in link
                } <= online | {SERVER}
                require(
                    charged, f"{method.name} exchanges messages with an offline peer in round {t}."
                )
    for count in (0, 1):
        _check_few_online(method, count)
    context = tiny_context(method, 6, topology=Full(offline_prob=0.5), rounds=20)
    online = context.settings.topology.online(0, 0, context.roster)
    absent = min(set(context.roster) - online)
    states = initial_states(context)
    model = states[absent].model
    changed = {
        **states,
        absent: replace(states[absent], model=PackedModel(model.values + 1, model.mask)),
    }
    with closing(PresetEngine(context, 1)) as engine:
        one, other = (run_from(context, given, 0, engine).states for given in (states, changed))
    for name in online | (set(states) - set(context.roster)):
        same = bits(one[name]) == bits(other[name])
        require(same, f"{method.name}: the model of an offline peer changes that of {name}.")


def wire(method: Method) -> None:
    """Models are not changed by the wire; if `pulls_masked`, the weights under the next mask give
    the same step."""
    context = tiny_context(method)
    codec = context.codec
    for t, finished_round in enumerate(run_all_rounds(context)):
        states = finished_round.states
        received = models_from(method, states, "000", "001", "002")
        if isinstance(method, ServerMethod):
            received |= uploads_of(context, method, states, t)
        for sender, model in received.items():
            message = encode_model(context, codec, model, None, sender, "000", t)
            arrived = decode_model(codec, message, None)
            same = arrived.values.equal(model.values) and arrived.mask.unpack().equal(
                model.mask.unpack()
            )
            require(
                same, f"{method.name}: the model of {sender} changes on the wire; see always_dense."
            )
            size = len(message) == codec.model_size(model)
            require(
                size, f"{method.name}: the message of {sender} has another length than is charged."
            )
        mask = requested_mask(context, states["000"])
        if mask is not None:
            pulled = {
                sender: decode_model(
                    codec, encode_model(context, codec, model, mask, sender, "000", t), mask
                )
                for sender, model in received.items()
            }
            one, other = (
                bits(step_of(context, t, states, models).next_state)
                for models in (received, pulled)
            )
            sentence = (
                f"{method.name} has pulls_masked set, but its step uses weights outside its next"
                " mask."
            )
            require(one == other, sentence)


def checkpoint(method: Method) -> None:
    """States are saved exactly, and a run resumed from one, between rounds or in a round, has the
    same bits."""
    context = tiny_context(method)
    with (
        tempfile.TemporaryDirectory(prefix="dispfl-") as name,
        closing(PresetEngine(context, 1)) as engine,
    ):
        folder = Path(name)
        first, second = run_all_rounds(context)
        server = {} if first.server is None else {SERVER: StepResult(Report(), state=first.server)}
        loaded = _saved(folder / "states", 0, {**first.steps, **server})
        states = {peer: step.next_state for peer, step in loaded.items()}
        require(
            all_bits(states) == all_bits(first.states),
            f"a state of {method.name} changes in a checkpoint.",
        )
        for peer in context.roster:
            same = loaded[peer].report == first.steps[peer].report
            require(same, f"a report of {method.name} changes in a checkpoint.")
        resumed = run_from(context, states, 1, engine)
        require(
            round_bits(resumed) == round_bits(second),
            f"{method.name} continues differently from a checkpoint.",
        )

        written = Checkpoints(folder / "whole")
        with closing(PresetEngine(context, 1, written)) as writer:
            whole = run_from(context, first.states, 1, writer)
            writer.flush(1)
        done = written.load(2)
        require(set(done) == set(context.roster), "A finished step is not in the checkpoint.")
        for count in range(1, len(context.roster) + 1):
            finished = _saved(folder / str(count), 1, dict(list(done.items())[:count]))
            again: dict[str, StepResult] = {}
            resumed = run_from(context, first.states, 1, engine, finished, again.__setitem__)
            same = round_bits(resumed) == round_bits(whole) and resumed.ledger == whole.ledger
            require(same, f"{method.name} continues differently after {count} steps of a round.")
            require(set(again) == set(done) - set(finished), "A finished step is taken again.")


def evaluation(method: Method) -> None:
    """A peer's final model, its buffers included, has the metric that the run reports for it."""
    peers = [(labelled_points(20, which), labelled_points(10, 1000 + which)) for which in range(3)]
    train, metric = Train(epochs=2, batch_size=8), Metric(confidence, higher_is_better=True)
    for model in (tiny_network, network_with_buffers):
        federation = Federation(
            model, peers, method, Full(), rounds=3, train=train, metric=metric, workers=1
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The model has buffers")
            run = federation.run()
        for k, (_, (x, labels)) in enumerate(peers):
            with torch.no_grad():
                found, reported = confidence(run.model(k)(x), labels), run.scores["confidence"][k]
            sentence = (
                f"{method.name} reports {reported:.6f} for peer {k}, whose final model has"
                f" {found:.6f}."
            )
            require(abs(found - reported) < 1e-6, sentence)


def confidence(outputs: Tensor, labels: Tensor) -> float:
    """Return the mean probability of the right class: it differs between models even where the
    accuracy is equal."""
    return float(outputs.softmax(1).gather(1, labels[:, None]).mean())


RULES: tuple[Rule, ...] = (
    settings,
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
    """Require that a part of a method draws from no global generator; `seed` is what torch's is
    seeded with."""
    before, numpy_before, python_before = (
        torch.get_rng_state(),
        np.random.get_state(),
        random.getstate(),
    )
    yield
    expected = before if seed is None else torch.Generator().manual_seed(seed).get_state()
    for library, unused in (
        ("torch", torch.get_rng_state().equal(expected)),
        ("numpy", repr(np.random.get_state()) == repr(numpy_before)),
        ("Python", random.getstate() == python_before),
    ):
        require(
            unused,
            f"{part} of {method.name} draws from {library}'s global generator; use peer.stream or"
            " rng.",
        )


def _check_few_online(method: Method, count: int) -> None:
    """Check a round with one peer online, or none."""
    context = tiny_context(method, topology=Full(offline_prob=0.7, offline="skip"), rounds=50)
    t = next(
        t for t in range(50) if len(context.settings.topology.online(0, t, context.roster)) == count
    )
    states = initial_states(context)
    with closing(PresetEngine(context, 1)) as engine:
        finished_round = run_from(context, states, t, engine)
    for step in finished_round.steps.values():
        require(step.report.failure is None, f"{method.name}: {step.report.failure}")
    if isinstance(method, ServerMethod):
        (online,) = context.settings.topology.online(0, t, context.roster) or {""}
        links = {(SERVER, online), (online, SERVER)} if count else set()
        good = set(finished_round.ledger.wire) == links
        require(
            good, f"{method.name} must exchange with the only peer online, and with nobody else."
        )
        same = count == 1 or bits(finished_round.states[SERVER]) == bits(states[SERVER])
        require(same, f"the server of {method.name} changes in a round without peers.")
    else:
        require(
            not finished_round.ledger.wire,
            f"{method.name} sends a message although {count} peers are online.",
        )


def _saved(folder: Path, t: int, steps: Mapping[str, StepResult]) -> dict[str, StepResult]:
    """Save the steps of round t and return them as loaded from the disk."""
    checkpoints = Checkpoints(folder)
    for peer, step in steps.items():
        checkpoints.add(t, peer, step)
    checkpoints.complete(t)
    return Checkpoints(folder).load(t + 1)
