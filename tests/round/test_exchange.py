"""The simulated network delivers what the codec would, and charges the sizes of the codec's
messages."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rounds import FinishedRound

from dispfl.core.flat_module import FlatModule
from dispfl.core.layout import Layout
from dispfl.core.packed import PackedModel
from dispfl.core.rng import stream
from dispfl.engines.base import deliver_upload, fetch_here, simulated_step
from dispfl.methods.base import SERVER
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.dpsgd import DPSGD
from dispfl.methods.fedavg import FedAvg
from dispfl.registry import METHODS
from dispfl.round.context import PeerTask, RunContext
from dispfl.round.exchange import deliver
from dispfl.round.round import initial_states, peer_step
from dispfl.topology import Ring
from dispfl.wire.codec import Codec, Wire

MakeContext = Callable[..., RunContext]
RunAll = Callable[..., list[FinishedRound]]

UNEQUAL = DisPFL(density=(0.3, 0.6, 1.0))
DENSITIES = {
    "equal densities": DisPFL(density=0.5),
    "unequal densities": UNEQUAL,
    "channels": DisPFL(density=(0.3, 0.6, 1.0), structure="channels"),
}


def weights(rounds: list[FinishedRound]) -> list[bytes]:
    return [
        state.model.unpack()[0].numpy().tobytes()
        for round_ in rounds
        for state in round_.states.values()
    ]


@pytest.mark.parametrize("method", DENSITIES.values(), ids=DENSITIES)
def test_pull_push_and_lossless_coding_give_the_same_models_to_the_bit(
    make_context: MakeContext, run_all: RunAll, method: DisPFL
) -> None:
    ways = [Wire(exchange=e, coding=c) for e in ("pull", "push") for c in ("plain", "zstd")]  # type: ignore[arg-type]
    first, *others = (
        weights(run_all(make_context(peers=6, method=method, topology=Ring(), rounds=4, wire=wire)))
        for wire in ways
    )
    assert all(other == first for other in others)


@pytest.mark.parametrize("method", DENSITIES.values(), ids=DENSITIES)
@pytest.mark.parametrize("exchange", ["pull", "push"])
def test_models_that_are_really_encoded_give_the_same_run(
    make_context: MakeContext, run_all: RunAll, method: DisPFL, exchange: str
) -> None:
    """Every request and model is encoded and decoded; the weights and the charged bytes are the
    simulator's."""
    wire = Wire(exchange=exchange)  # type: ignore[arg-type]
    context = make_context(peers=6, method=method, topology=Ring(), rounds=3, wire=wire)
    states, network = initial_states(context), FlatModule(context.module())
    codec, pull = context.codec, exchange == "pull"
    for t, simulated in enumerate(run_all(context)):
        received = context.settings.topology.online_neighbours(0, t, context.roster)
        bytes_sent: Counter[tuple[str, str]] = Counter()
        steps = {}
        for peer in context.roster:
            arrived: dict[str, PackedModel] = {}
            for sender in received[peer]:
                rng = stream(0, "rounding", sender, peer, t)
                if pull:
                    request = codec.encode_request(states[peer].next_mask)
                    bytes_sent[peer, sender] += len(request)
                    frame = codec.encode_answer(
                        states[sender].model, codec.decode_request(request), rng=rng
                    )
                    arrived[sender] = codec.decode_answer(frame, states[peer].next_mask)
                else:
                    frame = codec.encode_model(states[sender].model, rng=rng)
                    arrived[sender] = codec.decode_model(frame)
                bytes_sent[sender, peer] += len(frame)
            steps[peer] = peer_step(context, network, PeerTask(peer, t), states[peer], arrived)
        states = {peer: step.next_state for peer, step in steps.items()}
        assert weights([FinishedRound({}, steps=steps)]) == weights([simulated])
        assert bytes_sent == simulated.ledger.wire
        assert {p: s.report.overlap for p, s in steps.items()} == {
            p: s.report.overlap for p, s in simulated.steps.items()
        }


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *((name, "int8") for name in sorted(METHODS)),
        *((name, values) for name in ("dispfl", "fedavg") for values in ("float16", "bfloat16")),
    ],
)
def test_every_method_runs_with_narrow_values_and_smaller_messages(
    make_context: MakeContext, run_all: RunAll, name: str, values: str
) -> None:
    method = METHODS[name](name=name)
    if method.private == ("norm",):  # which the tiny network lacks
        method = METHODS[name](name=name, private="head")

    def run(**wire: Any) -> list[FinishedRound]:
        return run_all(make_context(peers=4, method=method, wire=Wire(**wire), rounds=3))

    exact, narrow = run(), run(values=values)
    assert weights(narrow) == weights(run(values=values))  # rounding is reproducible
    assert not any(step.report.failure for step in narrow[-1].steps.values())
    if name != "local":
        assert sum(narrow[-1].ledger.wire.values()) < 0.8 * sum(exact[-1].ledger.wire.values())
        assert weights(narrow) != weights(exact)


def test_twenty_kept_weights_are_80_bytes_in_the_paper_whatever_the_mask(
    make_context: MakeContext,
) -> None:
    context, model = make_context(peers=2), PackedModel.pack(torch.ones(80), torch.arange(80) < 20)
    codec = Codec(Layout(("weight",), (torch.Size([80]),)), [False], Wire())
    assert deliver(context, codec, model, None, "000", "001", 0).paper == 80


def test_a_dense_model_is_sent_without_a_mask(make_context: MakeContext, run_all: RunAll) -> None:
    (only,) = run_all(make_context(peers=2, method=DPSGD(), rounds=1))
    assert only.ledger.wire == {("000", "001"): 28 + 67 * 4, ("001", "000"): 28 + 67 * 4}


def test_layers_that_are_dense_at_every_density_need_no_mask(make_context: MakeContext) -> None:
    """4 x 8, 8, 8 x 3, 3: ERK at 0.6 keeps both biases whole, at 1.0 everything; what both keep
    whole is the biases."""
    context = make_context(peers=2, method=DisPFL(density=(0.6, 1.0)))
    layout = FlatModule(context.module()).layout
    assert context.method.always_dense(layout, {0.6, 1.0}) == [False, True, False, True]
    assert context.codec.request_size() == 28 + (32 + 24) // 8


def test_a_peer_uploads_its_model_to_the_server_and_both_directions_are_charged(
    make_context: MakeContext,
) -> None:
    context = make_context(peers=3, method=FedAvg(cohort=2))
    states, network = initial_states(context), FlatModule(context.module())
    task, codec = PeerTask("001", 0, server=states[SERVER]), context.codec
    fetch = fetch_here(context, codec, task, states)
    step, arrived = deliver_upload(
        context, codec, task, simulated_step(context, codec, network, task, states["001"], fetch)
    )
    assert arrived is not None
    assert step.next_state.upload is arrived.model
    assert [(m.sender, m.receiver, m.paper, m.wire) for m in step.messages] == [
        (SERVER, "001", 268, 296),
        ("001", SERVER, 268, 296),
    ]
