"""Private parameters: never sent, trained by each peer for itself, and part of what is evaluated.

The tiny network has the layers 0.weight (32), 0.bias (8), 2.weight (24) and 2.bias (3): with a
private head, 40 of its 67 weights are sent.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from messages import refused
from rounds import FinishedRound

from dispfl.config import compose
from dispfl.core.packed import PackedModel
from dispfl.core.train import Train, Trainer
from dispfl.errors import ConfigError
from dispfl.methods.base import SERVER, Method
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.ditto import Ditto
from dispfl.methods.dpsgd import DPSGD
from dispfl.methods.fedavg import FedAvg
from dispfl.methods.fedfomo import FedFOMO, gain, moved
from dispfl.methods.finetuned import DPSGDFT, FedAvgFT
from dispfl.methods.local import Local
from dispfl.methods.subfedavg import SubFedAvg
from dispfl.round.context import PeerTask, RunContext
from dispfl.round.exchange import (
    accepted_models,
    encode_model,
    published_model,
    requested_mask,
    sent_model,
)
from dispfl.round.round import global_model, initial_states, task_state
from dispfl.testing.check_method import check_rule
from dispfl.testing.rounds import models_from, step_of
from dispfl.testing.rules import RULES, Rule
from dispfl.topology import Full
from dispfl.wire.codec import Wire

MakeContext = Callable[..., RunContext]
RunAll = Callable[..., list[FinishedRound]]
SHARED = 40
HEADER = 28
HEAD = torch.arange(67) >= SHARED


@pytest.mark.parametrize(
    ("private", "names"),
    [
        ("head", ["2.weight", "2.bias"]),
        (["0.bias", "2.*"], ["0.bias", "2.weight", "2.bias"]),
        ("*", ["0.weight", "0.bias", "2.weight", "2.bias"]),
        ((), []),
    ],
)
def test_a_pattern_or_several_name_the_private_parameters(
    make_context: MakeContext, private: Any, names: list[str]
) -> None:
    context = make_context(method=DisPFL(private=private))
    flags = context.method.private_parameters(context.layout)
    matching = [name for name, flag in zip(context.layout.names, flags, strict=True) if flag]
    assert matching == names


def test_the_command_line_takes_one_pattern_and_several() -> None:
    assert compose({}, ["method.private=head"]).method.private == ("head",)
    assert compose({}, ["method.private=head,norm"]).method.private == ("head", "norm")


def test_patterns_that_name_nothing_and_private_channels_are_refused(
    make_context: MakeContext,
) -> None:
    with refused(ConfigError, key="method.private"):
        make_context(method=DisPFL(private="classifier.*")).check()
    with refused(ConfigError, key="method.private"):
        make_context(method=DisPFL(private="head", structure="channels")).check()
    with refused(ConfigError, key="method.private"):
        DisPFL(private=[3])  # type: ignore[arg-type]


# what is sent


@pytest.mark.parametrize(
    ("method", "wire", "length"),
    [
        (DPSGD(private="head"), Wire(), HEADER + 4 * SHARED),
        (DPSGD(private="head"), Wire(values="int8"), HEADER + 4 * 2 + SHARED),
        (FedFOMO(private=("0.*", "2.bias")), Wire(), HEADER + 4 * 24),
        (DPSGD(private="*"), Wire(), HEADER),
    ],
)
def test_a_dense_model_has_the_bytes_of_its_shared_weights(
    make_context: MakeContext, method: Method, wire: Wire, length: int
) -> None:
    context = make_context(method=method, wire=wire)
    states = initial_states(context)
    model = published_model(context, states["000"])
    message = encode_model(context, context.codec, model, None, "000", "001", 0)
    assert len(message) == length
    assert context.codec.model_size(model) == length


def test_a_request_and_an_answer_have_no_bits_for_private_weights(
    make_context: MakeContext,
) -> None:
    """Uniform density 0.5 leaves 16 + 4 of the 40 shared weights: a request has 5 bytes of mask,
    an answer 20 bits, and its values are those on the intersection."""
    context = make_context(method=DisPFL(private="head", layers="uniform"))
    states = initial_states(context)
    mask = requested_mask(context, states["001"])
    assert mask is not None
    assert mask.kept_per_layer(context.layout) == [16, 4, 0, 0]
    assert context.announced["000"] == (16, 4, 0, 0)
    assert len(context.codec.encode_request(mask)) == HEADER + 5

    model = published_model(context, states["000"])
    message = encode_model(context, context.codec, model, mask, "000", "001", 0)
    assert len(message) == HEADER + 3 + 4 * model.mask.overlap(mask)


@pytest.mark.parametrize(
    "wire",
    [
        Wire(),
        Wire(exchange="push"),
        Wire(values="int8", coding="zstd"),
        Wire(exchange="push", values="float16", coding="zstd"),
    ],
    ids=str,
)
def test_no_message_depends_on_private_weights_or_their_masks(
    make_context: MakeContext, run_all: RunAll, wire: Wire
) -> None:
    context = make_context(method=DisPFL(private="head"), wire=wire)
    states = run_all(context)[-1].states

    def messages(peer_state: Any) -> list[bytes]:
        request = requested_mask(context, states["001"])
        model = published_model(context, peer_state)
        found = [encode_model(context, context.codec, model, request, "000", "001", 0)]
        own_request = requested_mask(context, peer_state)
        if own_request is not None:
            found.append(context.codec.encode_request(own_request))
        return found

    state = states["000"]
    weights, mask = state.model.unpack()
    next_mask = state.next_mask.unpack()
    for flags in (mask, next_mask):
        flags[HEAD] = flags[HEAD].flip(0)
    weights[HEAD] = 1000.0
    model = PackedModel.pack(weights, mask)
    other = replace(state, model=model, next_mask=PackedModel.pack(weights, next_mask).mask)
    assert not other.next_mask.bits.equal(state.next_mask.bits)
    assert messages(state) == messages(other)


@pytest.mark.parametrize("method", [FedAvg(cohort=3), Ditto(cohort=3), SubFedAvg(cohort=3)])
def test_neither_the_server_nor_an_upload_has_private_weights(
    make_context: MakeContext, run_all: RunAll, method: Method
) -> None:
    context = make_context(method=method.model_copy(update={"private": ("head",)}))
    first = initial_states(context)
    last = run_all(context)[-1].states
    for states in (first, last):
        assert not states[SERVER].model.mask.unpack()[HEAD].any()
        task = PeerTask("000", 0, server=states[SERVER])
        assert not sent_model(context, task, SERVER, states).mask.unpack()[HEAD].any()
        private = states["000"].private
        assert private is not None
        assert private.mask.unpack()[HEAD].any()
        assert not private.mask.unpack()[~HEAD].any()
    assert not last["000"].private.values.equal(first["000"].private.values)  # type: ignore[union-attr]
    ledger = run_all(context)[0].ledger
    assert ledger.paper["server", "000"] == 4 * SHARED
    assert ledger.paper["000", "server"] == 4 * SHARED


# what is trained and evaluated


def test_dpsgd_averages_the_shared_weights_and_keeps_its_own_head(
    make_context: MakeContext, run_all: RunAll, trainer_for: Callable[..., Trainer]
) -> None:
    context = make_context(method=DPSGD(private="head"))
    first, second = run_all(context)
    weights = {peer: state.model.unpack()[0] for peer, state in first.states.items()}
    mean = (weights["000"] + weights["001"] + weights["002"]) / 3
    mixed = torch.where(HEAD, weights["000"], mean)
    learned = trainer_for(context, "000", 1).learn(mixed, torch.ones(67, dtype=torch.bool))
    assert second.states["000"].model.unpack()[0].equal(learned)
    assert not weights["000"][HEAD].equal(weights["001"][HEAD])


@pytest.mark.parametrize("method", [DPSGD(private="head"), DPSGDFT(private="head", tune_epochs=1)])
def test_dpsgd_is_evaluated_with_the_consensus_and_its_own_head(
    make_context: MakeContext,
    run_all: RunAll,
    trainer_for: Callable[..., Trainer],
    method: Method,
) -> None:
    context = make_context(method=method)
    last = run_all(context)[-1]
    weights = {peer: state.model.unpack()[0] for peer, state in last.states.items()}
    consensus = (weights["000"] + weights["001"] + weights["002"]) / 3
    assert last.evaluated is not None
    for peer, state in last.evaluated.items():
        expected = torch.where(HEAD, weights[peer], consensus)
        if method.fine_tuning:
            dense = torch.ones(67, dtype=torch.bool)
            expected = trainer_for(context, peer, 1).learn(expected, dense, 1, lr=0.1)
        assert state.model.unpack()[0].equal(expected)


@pytest.mark.parametrize(
    "method", [FedAvg(cohort=2, private="head"), FedAvgFT(cohort=2, private="head", tune_epochs=1)]
)
def test_fedavg_trains_and_evaluates_the_global_body_with_each_peers_head(
    make_context: MakeContext,
    run_all: RunAll,
    trainer_for: Callable[..., Trainer],
    method: FedAvg,
) -> None:
    context = make_context(method=method, rounds=2)
    dense = torch.ones(67, dtype=torch.bool)
    body = context.first_weights
    heads = dict.fromkeys(context.roster, context.first_weights)
    for t, finished_round in enumerate(run_all(context)):
        cohort = context.method.pick(0, t, context.roster)  # type: ignore[attr-defined]
        learned = {}
        for peer in cohort:
            start = torch.where(HEAD, heads[peer], body)
            learned[peer] = trainer_for(context, peer, t).learn(start, dense)
            heads[peer] = learned[peer]
        body = torch.zeros(67)
        for peer in cohort:
            body.add_(learned[peer], alpha=0.5)
        assert finished_round.server is not None
        assert finished_round.server.model.values.equal(body[~HEAD])

    assert finished_round.evaluated is not None
    for peer, state in finished_round.evaluated.items():
        expected = torch.where(HEAD, heads[peer], body)
        if method.fine_tuning:
            expected = trainer_for(context, peer, 1).learn(expected, dense, 1, lr=0.1)
        assert state.model.unpack()[0].equal(expected)


def test_subfedavg_is_evaluated_under_its_own_mask_with_its_own_head(
    make_context: MakeContext, run_all: RunAll
) -> None:
    method = SubFedAvg(cohort=3, private="head", prune=0.3, min_accuracy=0, min_change=0)
    context = make_context(method=method, train=Train(epochs=2, batch_size=8))
    last = run_all(context)[-1]
    assert last.evaluated is not None
    own_weights, own_mask = last.states["000"].model.unpack()
    assert last.server is not None
    server_weights, _ = last.server.model.unpack()
    weights, mask = last.evaluated["000"].model.unpack()
    assert mask.equal(own_mask)
    assert not own_mask.all()
    assert weights.equal(torch.where(HEAD, own_weights, torch.where(own_mask, server_weights, 0)))


def test_fedfomo_weighs_received_bodies_with_its_own_trained_head(
    make_context: MakeContext, run_all: RunAll, trainer_for: Callable[..., Trainer]
) -> None:
    method = FedFOMO(private="head", models=2, validation=0.5)
    context = make_context(method=method)
    first, second = run_all(context)
    theta, mask = first.states["000"].model.unpack()
    trainer = trainer_for(context, "000", 1)
    validation = trainer.hold_back(method.held_back(len(trainer.train)))
    loss = trainer.loss(theta, validation)
    update = trainer.learn(theta, mask)
    candidates = {"000": update}
    for peer in ("001", "002"):
        body = first.states[peer].model.unpack()[0]
        candidates[peer] = torch.where(HEAD, update, body)
    gains = {}
    for peer, weights in candidates.items():
        gains[peer] = gain(theta, weights, loss, trainer.loss(weights, validation))
    assert gains["001"] or gains["002"]
    expected = moved(theta, candidates, gains)
    assert second.states["000"].model.unpack()[0].equal(expected)


@pytest.mark.parametrize("rule", ["clip", "trim", "nnm"])
def test_a_robust_average_keeps_private_weights_to_the_bit(
    make_context: MakeContext, run_all: RunAll, trainer_for: Callable[..., Trainer], rule: Any
) -> None:
    method = DisPFL(private="head", robust=rule, byzantine=1)
    context = make_context(peers=5, method=method, rounds=1)
    states = run_all(context)[0].states
    received = models_from(context, states, "000", "001", "002", "003", "004")
    state = states["000"]
    models = {**received, "000": state.model}
    mixed = method.mix(trainer_for(context), models, state.next_mask)
    weights, mask = state.model.unpack()
    stays = HEAD & mask & state.next_mask.unpack()
    assert mixed[stays].equal(weights[stays])
    assert not mixed[HEAD & ~mask].any()  # regrown: nobody else sends it
    assert not mixed[~HEAD & mask].equal(weights[~HEAD & mask])


def test_an_attack_can_not_claim_private_weights(
    make_context: MakeContext, run_all: RunAll
) -> None:
    """Holding everything is refused where it exceeds what was announced; of a dense model it is
    what an honest peer holds."""
    for method, accepted in ((DPSGD(private="head"), True), (DisPFL(private="head"), False)):
        context = make_context(
            peers=4,
            method=method,
            wire=Wire(exchange="push"),
            attack="false-density",
            byzantine=0.25,
        )
        [attacker] = context.byzantine
        states = initial_states(context)
        target = "000" if attacker != "000" else "001"
        received = models_from(context, states, target, attacker)
        task = PeerTask(target, 0, requested=1)
        models = accepted_models(context, task, states[target], received)
        assert bool(models) == accepted
        for model in models.values():
            assert not model.mask.unpack()[HEAD].any()


def test_the_overlap_is_that_of_shared_weights(make_context: MakeContext, run_all: RunAll) -> None:
    context = make_context(method=DisPFL(private="head", first_masks="common"))
    assert run_all(context)[0].steps["000"].report.overlap == 1
    dense = make_context(method=DisPFL(private="head", density=1))
    assert run_all(dense)[0].steps["000"].report.overlap is None


# the limits


@pytest.mark.parametrize(
    "method",
    [
        DPSGD(private="*"),
        DisPFL(private="*", density=1),
        DisPFL(private="*", density=1, robust="clip"),
        FedAvg(private="*", cohort=4),
    ],
    ids=lambda method: f"{method.name} {getattr(method, 'robust', '')}",
)
def test_with_everything_private_each_peer_trains_alone(
    make_context: MakeContext, run_all: RunAll, method: Method
) -> None:
    alone = run_all(make_context(peers=4, method=Local(), topology=Full()))[-1].states
    context = make_context(peers=4, method=method, topology=Full())
    last = run_all(context)[-1]
    assert not any(last.ledger.paper.values())
    for peer in context.roster:
        states = last.evaluated or last.states
        assert states[peer].model.values.equal(alone[peer].model.values)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize(
    "method",
    [DisPFL(private="head"), SubFedAvg(private="head", cohort=2, prune=0.3, min_accuracy=0)],
    ids=lambda method: method.name,
)
def test_methods_with_private_parameters_keep_the_contract(method: Method, rule: Rule) -> None:
    check_rule(rule, method)


def test_a_step_needs_nothing_but_what_is_sent(make_context: MakeContext, run_all: RunAll) -> None:
    context = make_context(method=FedAvg(private="head", cohort=3))
    states = run_all(context)[0].states
    step = step_of(context, 1, states, models_from(context, states, "000"))
    assert step.next_state.upload is not None
    assert not step.next_state.upload.mask.unpack()[HEAD].any()
    evaluated = global_model(context, states, states[SERVER])
    task = PeerTask("000", 0, global_model=evaluated)
    assert task_state(context, task, states).model.mask.kept == 67
