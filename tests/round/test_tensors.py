"""Named tensors beside a model: declared, checked, sent unchanged, charged and saved.

The methods are a user's own (tests/shared/own_methods.py). The tiny network has 67 weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refused
from own_methods import Diverging, Forgotten, ForgottenUpload, Prototypes, PushSum, Scaffold
from own_methods import Undeclared as UndeclaredTensor
from rounds import FinishedRound

from dispfl import Layout, PackedModel, PeerState, Privacy, TensorSpec, Trainer
from dispfl.core.report import Report
from dispfl.engines.checkpoint import Checkpoints
from dispfl.errors import ConfigError, RunError
from dispfl.methods.base import SERVER, Method
from dispfl.methods.dpsgd import DPSGD
from dispfl.round.context import PeerTask, RunContext, StepResult
from dispfl.round.exchange import accepted_models, accepted_uploads
from dispfl.round.round import initial_states
from dispfl.testing.check_method import ContractError, check_method, check_rule
from dispfl.testing.rounds import bits, models_from, uploads_of
from dispfl.testing.rules import RULES, Rule
from dispfl.topology import Ring
from dispfl.wire.codec import Wire

MakeContext = Callable[..., RunContext]
RunAll = Callable[..., list[FinishedRound]]
HEADER = 28


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize(
    "method",
    [PushSum(), PushSum(private="head"), Scaffold(cohort=2), Prototypes()],
    ids=lambda method: f"{method.name} {''.join(method.private)}",
)
def test_methods_with_tensors_keep_the_contract(method: Method, rule: Rule) -> None:
    check_rule(rule, method)


def test_push_sum_by_hand(
    make_context: MakeContext, run_all: RunAll, trainer_for: Callable[..., Trainer]
) -> None:
    """Three peers, all connected: x and o are means over all, and the trained model is x / o. The
    weights 1, 1.25 and 1.5 become 1.25 everywhere, and their sum stays the same."""
    context = make_context(method=PushSum())
    first, _ = run_all(context)
    start = {peer: state.model for peer, state in initial_states(context).items()}
    x = (start["000"].values + start["001"].values + start["002"].values) / 3
    push_sums = [float(start[peer].tensors["push_sum"]) for peer in context.roster]
    assert push_sums == [1.0, 1.25, 1.5]
    dense = torch.ones(67, dtype=torch.bool)
    learned = trainer_for(context, "001").learn(x / 1.25, dense)
    state = first.states["001"]
    assert float(state.model.tensors["push_sum"]) == 1.25
    torch.testing.assert_close(state.model.values, 1.25 * learned)


def test_scaffold_by_hand(make_context: MakeContext, run_all: RunAll) -> None:
    """Control variates are zero at first, so c_k' = (x - y) / (steps lr), and the server adds their
    sum over 5 peers. 20 samples in batches of 8 are 3 steps."""
    context = make_context(method=Scaffold(cohort=2))
    first, _ = run_all(context)
    cohort = [peer for peer in context.roster if "control" in first.states[peer].memory]
    x = context.first_weights
    expected = torch.zeros(67)
    for peer in cohort:
        y = first.states[peer].model.values
        control = (x - y) / (3 * 0.1)
        torch.testing.assert_close(first.states[peer].memory["control"], control)
        expected += control / 5
    assert first.server is not None
    torch.testing.assert_close(first.server.model.tensors["control"], expected)
    assert expected.any()


@pytest.mark.parametrize(
    ("method", "values", "beside"),
    [
        (PushSum(), 67, 4),
        (PushSum(private="head"), 40, 4),
        (Scaffold(cohort=3), 67, 4 * 67),
        (Prototypes(), 67, 4 * 9 + 8 * 3),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_tensors_are_charged_with_their_bytes(
    make_context: MakeContext, run_all: RunAll, method: Method, values: int, beside: int
) -> None:
    context = make_context(method=method)
    ledger = run_all(context)[0].ledger
    assert set(ledger.paper.values()) == {4 * values + beside}
    assert set(ledger.wire.values()) == {HEADER + 4 * values + beside}


@pytest.mark.parametrize("values", ["float16", "int8"])
@pytest.mark.parametrize("coding", ["plain", "zstd"])
def test_tensors_are_never_rounded(make_context: MakeContext, values: Any, coding: Any) -> None:
    context = make_context(method=Prototypes(), wire=Wire(values=values, coding=coding))
    third = {"prototypes": torch.full((3, 3), 1 / 3), "counts": torch.tensor([2**40 + 1, 0, -1])}
    model = initial_states(context)["000"].model.with_tensors(**third)
    codec = context.codec
    message = codec.encode_model(model, rng=torch.Generator())
    arrived = codec.decode_model(message)
    assert not arrived.values.equal(model.values)
    for name, tensor in third.items():
        assert arrived.tensors[name].equal(tensor)
        assert arrived.tensors[name].dtype == tensor.dtype
    if coding == "plain":
        assert len(message) == codec.model_size(model)


def test_a_tensor_is_copied_when_it_is_added() -> None:
    model = PackedModel.pack(torch.ones(2), torch.ones(2, dtype=torch.bool))
    buffer = torch.zeros(4, requires_grad=True)
    sent = model.with_tensors(control=buffer[::2], push_sum=0.5)
    with torch.no_grad():
        buffer += 1
    assert sent.tensors["control"].tolist() == [0, 0]
    assert not sent.tensors["control"].requires_grad
    assert sent.tensors["push_sum"].dtype == torch.float32
    assert not model.tensors


def test_states_keep_their_tensors_in_a_checkpoint(
    make_context: MakeContext, tmp_path: Path
) -> None:
    model = PackedModel.pack(torch.ones(9), torch.arange(9) < 4)
    same = {"scores": torch.arange(6, dtype=torch.int16).view(2, 3), "push_sum": torch.tensor(0.5)}
    state = PeerState(
        model.with_tensors(**same),
        model.mask,
        memory={"scores": same["scores"]},
        upload=model.with_tensors(**same),
        private=model,
    )
    checkpoints = Checkpoints(tmp_path)
    checkpoints.add(0, "000", StepResult(Report(), state=state))
    checkpoints.complete(0)
    loaded = Checkpoints(tmp_path).load(1)["000"].next_state
    assert bits(loaded) == bits(state)
    assert loaded.model.tensors["scores"].equal(same["scores"])
    assert loaded.model.tensors["scores"].dtype == torch.int16


# what is refused


class WrongShape(PushSum):
    def publish(self, state: PeerState) -> PackedModel:
        return state.model.with_tensors(push_sum=torch.ones(1))


class WrongType(PushSum):
    def publish(self, state: PeerState) -> PackedModel:
        return state.model.with_tensors(push_sum=1)


class Infinite(PushSum):
    def publish(self, state: PeerState) -> PackedModel:
        return state.model.with_tensors(push_sum=torch.inf)


class ForgottenBroadcast(Scaffold):
    def broadcast(self, server: PeerState, state: PeerState) -> PackedModel:
        return replace(server.model, tensors={})


@pytest.mark.parametrize(
    "method",
    [
        UndeclaredTensor(),
        Forgotten(),
        WrongShape(),
        WrongType(),
        ForgottenUpload(),
        ForgottenBroadcast(),
    ],
    ids=lambda method: method.name,
)
def test_a_model_with_other_tensors_than_declared_is_one_sentence(
    make_context: MakeContext, run_all: RunAll, method: Method
) -> None:
    with refused(RunError):
        run_all(make_context(method=method))
    with pytest.raises(ContractError, match=r"^tensors: "):
        check_method(method)


def test_a_tensor_that_is_not_finite_from_the_start_is_one_sentence(
    make_context: MakeContext, run_all: RunAll
) -> None:
    class InfiniteStart(PushSum):
        def start(self, *args: Any, **kwargs: Any) -> PeerState:
            state = super().start(*args, **kwargs)
            return replace(state, model=state.model.with_tensors(push_sum=torch.inf))

    with refused(RunError):
        run_all(make_context(method=InfiniteStart()))


def test_a_peer_whose_tensor_becomes_infinite_keeps_its_last_good_state(
    make_context: MakeContext, run_all: RunAll
) -> None:
    first, second, third = run_all(make_context(method=Diverging(), rounds=3))
    failure = second.steps["001"].report.failure
    assert failure is not None
    assert failure.startswith("Peer 001, round 1: the tensor push_sum became infinite or nan")
    assert bits(second.states["001"]) == bits(first.states["001"])
    assert third.steps["001"].report.failure is None


def test_declarations_are_checked(make_context: MakeContext) -> None:
    with refused(ConfigError):
        TensorSpec((3,), dtype="float64")  # type: ignore[arg-type]
    with refused(ConfigError):
        TensorSpec((3, -1))
    assert TensorSpec(5).shape == (5,)  # type: ignore[arg-type]

    class Shapes(PushSum):
        def tensors(self, layout: Layout) -> Mapping[str, TensorSpec]:
            return {"push_sum": (3, 4)}  # type: ignore[dict-item]

    with refused(ConfigError, key="method"):
        make_context(method=Shapes()).check()


def test_with_privacy_a_method_says_how_its_tensors_are_computed(
    make_context: MakeContext,
) -> None:
    class Accounted(Scaffold):
        can_be_private = True

    privacy = Privacy(epsilon=8, delta=1e-5)
    with refused(ConfigError, key="method"):
        make_context(method=Prototypes(), privacy=privacy).check()
    make_context(method=Accounted(), privacy=privacy).check()
    make_context(method=DPSGD(), privacy=privacy).check()


def test_a_method_that_sends_what_real_peers_refuse_breaks_the_contract() -> None:
    class SendsMore(PushSum):
        def kept_counts(self, layout: Layout, density: float) -> tuple[int, ...]:
            return (31, *layout.sizes[1:])

        def always_dense(self, layout: Layout, densities: Any) -> list[bool]:
            return [False] * len(layout.sizes)

    class SendsNothingYet(PushSum):
        def publish(self, state: PeerState) -> PackedModel:
            return replace(state.model, values=0 * state.model.values)

    wire = next(rule for rule in RULES if rule.__name__ == "wire")
    for method, reason in ((SendsMore(), "holds more weights"), (SendsNothingYet(), "all zero")):
        with pytest.raises(ContractError, match=rf"^wire: .* real peers would refuse .*{reason}"):
            check_rule(wire, method)


# simulated attacks


def test_byzantine_peers_forge_weights_and_send_their_honest_tensors(
    make_context: MakeContext, run_all: RunAll
) -> None:
    changes: dict[str, Any] = {"peers": 4, "attack": "noise", "byzantine": 0.25}
    context = make_context(method=PushSum(), **changes)
    [attacker] = context.byzantine
    target = "000" if attacker != "000" else "001"
    states = initial_states(context)
    received = models_from(context, states, target, attacker)
    task = PeerTask(target, 0, requested=1)
    accepted = accepted_models(context, task, states[target], received)
    assert accepted[attacker].tensors == received[attacker].tensors
    assert not accepted[attacker].values.equal(received[attacker].values)

    context = make_context(method=Scaffold(cohort=4), **changes)
    states = initial_states(context)
    uploads = uploads_of(context, states)
    kept = accepted_uploads(context, 0, states[SERVER], uploads)
    assert kept[attacker].tensors == uploads[attacker].tensors
    run_all(make_context(method=Scaffold(cohort=4), rounds=1, **changes))


def test_a_ring_of_peers_that_pull_gets_the_same_models_as_one_that_pushes(
    make_context: MakeContext, run_all: RunAll
) -> None:
    class Masked(PushSum):
        pulls_masked = True

    results = []
    for exchange in ("pull", "push"):
        wire = Wire(exchange=exchange, coding="zstd")  # type: ignore[arg-type]
        context = make_context(peers=4, method=Masked(), wire=wire, topology=Ring())
        results.append({peer: bits(state) for peer, state in run_all(context)[-1].states.items()})
    assert results[0] == results[1]
