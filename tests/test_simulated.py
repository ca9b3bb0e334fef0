"""The simulated network gives peers what the codec would, and charges what the codec's messages weigh."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from rounds import Played

from dispfl.core.live import LiveModel
from dispfl.core.packed import PackedModel
from dispfl.core.rng import stream
from dispfl.methods.base import SERVER
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.dpsgd import DPSGD
from dispfl.methods.fedavg import FedAvg
from dispfl.methods.registry import METHODS
from dispfl.round import peer_step, start
from dispfl.simulated import heard_here, simulated_step, upload
from dispfl.topology import Ring
from dispfl.wire.codec import Wire
from dispfl.work import Part, Setting, Work

MakeSetting = Callable[..., Setting]
Play = Callable[..., list[Played]]

UNEQUAL = DisPFL(density=[0.3, 0.6, 1.0])


def weights(rounds: list[Played]) -> list[bytes]:
    return [state.model.unpack()[0].numpy().tobytes() for round_ in rounds for state in round_.states.values()]


@pytest.mark.parametrize("method", [DisPFL(density=0.5), UNEQUAL], ids=["equal densities", "unequal densities"])
def test_pull_push_and_lossless_coding_give_the_same_models_to_the_bit(
    make_setting: MakeSetting, play: Play, method: DisPFL
) -> None:
    ways = [Wire(exchange=e, coding=c) for e in ("pull", "push") for c in ("plain", "zstd")]  # type: ignore[arg-type]
    first, *others = (
        weights(play(make_setting(peers=6, method=method, topology=Ring(), rounds=4, wire=wire))) for wire in ways
    )
    assert all(other == first for other in others)


@pytest.mark.parametrize("method", [DisPFL(density=0.5), UNEQUAL], ids=["equal densities", "unequal densities"])
@pytest.mark.parametrize("exchange", ["pull", "push"])
def test_models_that_really_went_through_bytes_give_the_same_run(
    make_setting: MakeSetting, play: Play, method: DisPFL, exchange: str
) -> None:
    """Every request and model is encoded and decoded; the weights and the charged bytes are the simulator's."""
    setting = make_setting(peers=6, method=method, topology=Ring(), rounds=3, wire=Wire(exchange=exchange))  # type: ignore[arg-type]
    states, live = start(setting), LiveModel(setting.module())
    codec, pull = setting.codec(live.layout), exchange == "pull"
    for t, simulated in enumerate(play(setting)):
        heard = setting.topology.heard(0, t, setting.roster)
        bytes_sent: Counter[tuple[str, str]] = Counter()
        steps = {}
        for peer in setting.roster:
            arrived: dict[str, PackedModel] = {}
            for sender in heard[peer]:
                rng = stream(0, "rounding", sender, peer, t)
                if pull:
                    request = codec.encode_request(states[peer].next_mask)
                    bytes_sent[peer, sender] += len(request)
                    frame = codec.encode_answer(states[sender].model, codec.decode_request(request), rng=rng)
                    arrived[sender] = codec.decode_answer(frame, states[peer].next_mask)
                else:
                    frame = codec.encode_model(states[sender].model, rng=rng)
                    arrived[sender] = codec.decode_model(frame)
                bytes_sent[sender, peer] += len(frame)
            steps[peer] = peer_step(setting, live, Work(peer, t, states[peer], arrived))
        states = {peer: step.state for peer, step in steps.items()}
        assert weights([Played({}, steps=steps)]) == weights([simulated])
        assert bytes_sent == simulated.ledger.wire
        assert {p: s.report.overlap for p, s in steps.items()} == {
            p: s.report.overlap for p, s in simulated.steps.items()
        }


@pytest.mark.parametrize("values", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_runs_over_narrow_values_and_its_messages_are_smaller(
    make_setting: MakeSetting, play: Play, name: str, values: str
) -> None:
    def run(**wire: Any) -> list[Played]:
        return play(make_setting(peers=4, method=METHODS[name](name=name), wire=Wire(**wire), rounds=2))

    exact, narrow = run(), run(values=values)
    assert weights(narrow) == weights(run(values=values))  # rounding is reproducible
    assert not any(step.report.failure for step in narrow[-1].steps.values())
    if name != "local":
        assert sum(narrow[0].ledger.wire.values()) < 0.8 * sum(exact[0].ledger.wire.values())
        assert weights(narrow) != weights(exact)


def test_a_dense_model_is_sent_without_a_mask(make_setting: MakeSetting, play: Play) -> None:
    (only,) = play(make_setting(peers=2, method=DPSGD(), rounds=1))
    assert only.ledger.wire == {("000", "001"): 28 + 67 * 4, ("001", "000"): 28 + 67 * 4}


def test_layers_that_every_density_keeps_whole_need_no_mask(make_setting: MakeSetting) -> None:
    """4 x 8, 8, 8 x 3, 3: ERK at 0.6 keeps both biases whole, at 1.0 everything; what both keep whole is the biases."""
    setting = make_setting(peers=2, method=DisPFL(density=[0.6, 1.0]))
    layout = LiveModel(setting.module()).layout
    assert setting.method.always_dense(layout, {0.6, 1.0}) == [False, True, False, True]
    assert setting.codec(layout).request_size() == 28 + (32 + 24) // 8


def test_a_servers_peer_sends_its_update_back_and_both_ways_are_charged(make_setting: MakeSetting) -> None:
    setting = make_setting(peers=3, method=FedAvg(cohort=2))
    states, live = start(setting), LiveModel(setting.module())
    part, codec = Part("001", 0, server=states[SERVER]), setting.codec(live.layout)
    heard = heard_here(setting, codec, part, states)
    step, arrived = upload(setting, codec, part, simulated_step(setting, codec, live, part, states["001"], heard))
    assert arrived is not None
    assert step.state.sent is arrived.model
    assert [(m.sender, m.receiver, m.paper, m.wire) for m in step.carried] == [
        (SERVER, "001", 268, 296),
        ("001", SERVER, 268, 296),
    ]
