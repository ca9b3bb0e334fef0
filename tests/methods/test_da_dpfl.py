"""DA-DPFL: the PQ index, the rounds of pruning and the vote by hand, and a run that prunes."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from messages import refused
from rounds import FinishedRound

from dispfl.core.layout import Layout
from dispfl.core.packed import PackedModel
from dispfl.errors import ConfigError, MessageError
from dispfl.methods.base import PeerState, initial_state
from dispfl.methods.da_dpfl import DADPFL, pq_index, pruning_rounds
from dispfl.methods.dispfl import DisPFL
from dispfl.round.context import RunContext
from dispfl.round.exchange import check_request


def test_the_pq_index_by_hand() -> None:
    """p = 1/2, q = 1: (mean sqrt|w|)^2 / mean |w|."""
    assert pq_index(torch.ones(4), 0.5, 1) == 0
    assert pq_index(torch.tensor([4.0, 0.0, 0.0, 0.0]), 0.5, 1) == pytest.approx(0.75)
    assert pq_index(torch.tensor([9.0, 1.0]), 0.5, 1) == pytest.approx(1 - 4 / 5)
    assert pq_index(torch.zeros(3), 0.5, 1) == 0


def test_a_layer_keeps_what_its_index_says_and_vectors_are_kept_whole() -> None:
    """Of (4, 0, 0, 0), I = 3/4 and m = ceil(4 (1 - I)) = 1; of (9, 1), I = 1/5 and m = 2."""
    layout = Layout(("a", "b", "c"), ((2, 2), (1, 2), (2,)))
    weights = torch.tensor([0.0, 4.0, 0.0, 0.0, 9.0, 1.0, 0.0, 0.0])
    kept = DADPFL().pruned(weights, torch.ones(8, dtype=torch.bool), layout)
    assert kept.tolist() == [False, True, False, False, True, True, True, True]
    more = DADPFL(eta=1.0).pruned(weights, torch.ones(8, dtype=torch.bool), layout)
    assert more[4:6].tolist() == [True, False]  # m = ceil(2 (1 + 1)^-2 4/5) = 1


def test_at_most_nine_tenths_of_a_layer_are_cut() -> None:
    weights = torch.zeros(100)
    weights[7] = 1.0
    kept = DADPFL().pruned(weights, torch.ones(100, dtype=torch.bool), Layout(("a",), ((10, 10),)))
    assert int(kept.sum()) == 10
    assert kept[7]


def test_the_intervals_between_prunings_shrink_by_the_pace() -> None:
    assert pruning_rounds(10, 1.3) == [10, 18, 24, 29, 33, 36, 38, 40, 42]


def voted(own: bool | None, *neighbours: bool) -> int | None:
    def settled(vote: bool) -> torch.Tensor:
        return torch.tensor(int(vote), dtype=torch.uint8)

    model = PackedModel.pack(torch.zeros(1), torch.ones(1, dtype=torch.bool))
    memory = {} if own is None else {"settled": settled(own)}
    state = PeerState(model, model.mask, memory=memory)
    received = {str(k): model.with_tensors(settled=settled(v)) for k, v in enumerate(neighbours)}
    return DADPFL().first_pruning(7, state, received)


def test_half_of_the_neighbourhood_decides_when_pruning_begins() -> None:
    assert voted(True, False) == 6
    assert voted(False, True, True) == 6
    assert voted(None, True, False) is None
    assert voted(False) is None
    assert voted(True) == 6


def test_a_model_has_settled_when_it_moves_little_beside_its_first_move() -> None:
    first = initial_state(torch.zeros(2), torch.ones(2, dtype=torch.bool))
    trainer: Any = SimpleNamespace(
        first_weights=lambda: torch.zeros(2),
        network=SimpleNamespace(layout=Layout(("a", "b"), ((1, 1), (1, 1)))),
    )

    def measured(memory: Mapping[str, Any], *weights: float) -> dict[str, torch.Tensor]:
        state = PeerState(first.model, first.next_mask, memory=memory)
        return DADPFL(threshold=0.1).measured(trainer, state, torch.tensor(weights))

    start = measured({}, 3.0, -1.0)
    assert float(start["change"]) == float(start["first_change"]) == 4.0
    moving = measured(start, 4.0, -1.0)  # |5 - 4| / 4 > 0.1
    assert int(moving["settled"]) == 0
    settled = measured(moving, 4.0, -1.25)
    assert (float(settled["change"]), int(settled["settled"])) == (5.25, 1)


def densities(rounds: list[FinishedRound]) -> list[float]:
    masks = [finished_round.states["000"].next_mask for finished_round in rounds]
    return [mask.kept / mask.size for mask in masks]


def test_a_run_prunes_until_the_target_and_without_a_settled_model_it_is_dis_pfl(
    make_context: Callable[..., RunContext], run_all: Callable[..., list[FinishedRound]]
) -> None:
    never = run_all(make_context(method=DADPFL(threshold=0), rounds=6))
    ours = run_all(make_context(method=DisPFL(alpha_0=0.3), rounds=6))
    for peer, state in ours[-1].states.items():
        assert never[-1].states[peer].model.values.equal(state.model.values)

    early = DADPFL(density=0.9, threshold=10, target_density=0.8)
    falling = densities(run_all(make_context(method=early, rounds=8)))
    assert falling == sorted(falling, reverse=True)
    assert falling[0] > 0.8
    stopped = [density for density in falling if density <= 0.8]
    assert len(stopped) > 1
    assert len(set(stopped)) == 1


def test_real_peers_may_request_fewer_weights_than_they_announced_but_not_more() -> None:
    layout = Layout(("a",), ((2, 2),))
    model = PackedModel.pack(torch.zeros(4), torch.tensor([True, True, False, False]))
    check_request(model.mask, [3], "bob", layout, density_falls=True)
    for announced, falls in (([1], True), ([3], False)):
        with pytest.raises(MessageError):
            check_request(model.mask, announced, "bob", layout, density_falls=falls)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with refused(ConfigError, key="method.structure"):
        DADPFL(structure="channels")
    with refused(ConfigError, key="method.p"):
        DADPFL(p=0.5, q=0.5)
