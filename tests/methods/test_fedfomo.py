"""FedFOMO: gains, weights and picks by hand."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf, nan

import pytest
import torch
from rounds import FinishedRound
from torch import Tensor, nn

from dispfl.core.packed import PackedModel
from dispfl.core.samples import PeerData
from dispfl.core.task import Task
from dispfl.core.train import Train, Trainer
from dispfl.data.batches import ResidentSamples
from dispfl.methods.base import Neighbourhood, PeerState, initial_state
from dispfl.methods.fedfomo import FedFOMO, gain, moved
from dispfl.round.context import RunContext

MakeContext = Callable[..., RunContext]
TrainerFor = Callable[..., Trainer]
EIGHT = [f"{k:03d}" for k in range(8)]


def test_a_gain_is_the_loss_saved_for_each_unit_of_distance() -> None:
    assert gain(torch.zeros(2), torch.tensor([3.0, 4.0]), 2.0, 1.0) == pytest.approx(
        0.2
    )  # 1 less, 5 away


def test_a_candidate_that_does_worse_or_is_the_model_itself_gains_nothing() -> None:
    assert gain(torch.zeros(2), torch.tensor([3.0, 4.0]), 1.0, 2.0) == 0.0
    assert gain(torch.ones(2), torch.ones(2), 2.0, 1.0) == 0.0


@pytest.mark.parametrize(
    ("loss", "candidate_loss"), [(1.0, nan), (nan, 1.0), (inf, 1.0), (1.0, inf), (inf, inf)]
)
def test_a_nan_loss_gains_nothing(loss: float, candidate_loss: float) -> None:
    assert gain(torch.zeros(1), torch.ones(1), loss, candidate_loss) == 0.0


def test_gains_of_3_and_1_move_the_model_by_three_quarters_and_a_quarter() -> None:
    theta = torch.tensor([1.0, 0.0])
    candidates = {
        "000": torch.tensor([5.0, 0.0]),
        "001": torch.tensor([1.0, 8.0]),
        "002": torch.tensor([nan, nan]),
    }
    assert moved(theta, candidates, {"000": 3.0, "001": 1.0, "002": 0.0}).tolist() == [
        1 + 0.75 * 4,
        0.25 * 8,
    ]
    assert theta.tolist() == [1.0, 0.0]


def one_weight(value: float) -> tuple[Tensor, Tensor]:
    return torch.tensor([value]), torch.ones(1, dtype=torch.bool)


def bowl(make_context: MakeContext, *targets: float, lr: float = 0.25) -> RunContext:
    """Peers with one weight w and a sample for each target y, with the loss (w - y)^2."""
    samples = ResidentSamples(torch.ones(len(targets), 1), torch.tensor(targets))
    return make_context(
        peers=dict.fromkeys(("000", "001", "002"), PeerData(samples, samples)),
        model=lambda: nn.Linear(1, 1, bias=False),
        train=Train(epochs=1, lr=lr, weight_decay=0, clip_norm=0),
        task=Task(loss=lambda outputs, labels: (outputs.squeeze(1) - labels).square().mean()),
    )


def mixed(trainer: Trainer, theta: float, received: Mapping[str, float]) -> PeerState:
    """What becomes of a peer whose weight is theta and who receives from these weights."""
    models = {name: PackedModel.pack(*one_weight(w)) for name, w in received.items()}
    return FedFOMO().step(trainer, initial_state(*one_weight(theta)), models)


def liking(scores: Mapping[str, float], theta: float) -> PeerState:
    """A peer whose weight is theta and who remembers how much others have helped."""
    memory = {f"preference/{name}": torch.tensor(float(score)) for name, score in scores.items()}
    return replace(initial_state(*one_weight(theta)), memory=memory)


def remembered(state: PeerState) -> dict[str, float]:
    return {key.removeprefix("preference/"): float(score) for key, score in state.memory.items()}


def test_own_update_and_heard_models_are_weighted_together(
    make_context: MakeContext, trainer_for: TrainerFor
) -> None:
    """All targets 0, theta = 4: loss 16. The own update is 4 - 0.25 * 8 = 2: loss 4, 2 away, gain
    6.

    A received 3 has loss 9 and is 1 away: gain 7. A received 5 has loss 25: no gain.
    """
    state = mixed(trainer_for(bowl(make_context, 0.0, 0.0)), 4.0, {"001": 3.0, "002": 5.0})
    assert state.model.values.tolist() == pytest.approx([4 + 6 / 13 * -2 + 7 / 13 * -1])
    assert remembered(state) == pytest.approx({"001": 7 / 13})  # of others only


def test_preferences_add_up_over_the_rounds(
    make_context: MakeContext, trainer_for: TrainerFor
) -> None:
    trainer = trainer_for(bowl(make_context, 0.0, 0.0))
    remembering = liking({"001": 1.0, "002": 2.0}, 4.0)
    state = FedFOMO().step(trainer, remembering, {"001": PackedModel.pack(*one_weight(3.0))})
    assert remembered(state) == pytest.approx({"001": 1 + 7 / 13, "002": 2.0})
    assert remembered(remembering) == {"001": 1.0, "002": 2.0}


def test_a_preference_stays_with_its_peer_when_others_join_or_leave(
    make_context: MakeContext, trainer_for: TrainerFor
) -> None:
    """Somebody called 000a joins between 000 and 002, and 001 is gone."""
    liked = liking({"001": 5.0, "002": 2.0}, 4.0)
    neighbourhood = Neighbourhood(["000", "000a", "002"], ["000a"], ["000a", "002"])
    assert FedFOMO(explore=0.0, models=1).choose(liked, neighbourhood, rng=torch.Generator()) == [
        "002"
    ]
    state = FedFOMO().step(
        trainer_for(bowl(make_context, 0.0, 0.0)),
        liked,
        {"000a": PackedModel.pack(*one_weight(3.0))},
    )
    assert remembered(state) == pytest.approx({"000a": 7 / 13, "001": 5.0, "002": 2.0})


def test_without_neighbours_the_own_update_is_kept(
    make_context: MakeContext, trainer_for: TrainerFor
) -> None:
    assert mixed(
        trainer_for(bowl(make_context, 0.0, 0.0)), 4.0, {}
    ).model.values.tolist() == pytest.approx([2.0])


def test_if_no_model_helps_the_peer_keeps_its_own_update(
    make_context: MakeContext, trainer_for: TrainerFor
) -> None:
    """At a learning rate of 1.5, the step from 4 leads to 4 - 1.5 * 8 = -8, which is worse; and so
    is the received 9."""
    state = mixed(trainer_for(bowl(make_context, 0.0, 0.0, lr=1.5)), 4.0, {"001": 9.0})
    assert state.model.values.tolist() == pytest.approx([-8.0])
    assert remembered(state) == {}


def test_a_received_model_of_nan_is_ignored(
    make_context: MakeContext, trainer_for: TrainerFor
) -> None:
    state = mixed(trainer_for(bowl(make_context, 0.0, 0.0)), 4.0, {"001": nan, "002": inf})
    assert state.model.values.tolist() == pytest.approx([2.0])


def test_candidates_are_evaluated_on_held_back_data_and_trained_on_the_rest(
    make_context: MakeContext, trainer_for: TrainerFor
) -> None:
    """Targets 0 and 8, one of them held back. From 4, learning goes 2 towards the other; candidates
    1 and 7 are 3 away.

    So the candidate on the held-back side gains, and the own update, which went the other way, does
    not.
    """
    state = mixed(trainer_for(bowl(make_context, 0.0, 8.0)), 4.0, {"001": 1.0, "002": 7.0})
    assert remembered(state) in ({"001": 1.0}, {"002": 1.0})
    assert state.model.values.tolist() in ([1.0], [7.0])


def test_a_tenth_is_held_back_the_same_in_every_round(
    make_context: MakeContext, trainer_for: TrainerFor
) -> None:
    context = make_context(method=FedFOMO())
    seen: list[list[float]] = []

    class Watched(ResidentSamples):
        def take(self, rows: Tensor) -> ResidentSamples:
            seen.append(rows.tolist())
            return super().take(rows)

    for t in (0, 1):
        trainer, (inputs, labels) = (
            trainer_for(context, t=t),
            next(context.data.peers["000"].train.batches(20)),
        )
        trainer.data = replace(trainer.data, train=Watched(inputs, labels))
        FedFOMO().step(
            trainer, initial_state(torch.zeros(67), torch.ones(67, dtype=torch.bool)), {}
        )
    validation, learning, validation_later, learning_later = seen
    assert (len(learning), len(validation)) == (18, 2)
    assert sorted(learning + validation) == list(range(20))
    assert (learning_later, validation_later) == (learning, validation)
    assert trainer.report.passes == [(18, [32, 8, 24, 3], None)]


@pytest.mark.parametrize("samples", [1, 2])
def test_a_peer_with_one_or_two_samples_works(
    make_context: MakeContext, trainer_for: TrainerFor, samples: int
) -> None:
    trainer = trainer_for(bowl(make_context, *[0.0] * samples))
    assert mixed(trainer, 4.0, {}).model.values.tolist() == pytest.approx([2.0])
    assert trainer.report.passes == [(1, [1], None)]


def choose(
    method: FedFOMO, preference: list[float] | None, neighbourhood: Neighbourhood, seed: int = 0
) -> list[str]:
    state = liking(dict(zip(neighbourhood.roster, preference or [], strict=False)), 0.0)
    return list(method.choose(state, neighbourhood, rng=torch.Generator().manual_seed(seed)))


def test_half_of_the_choices_are_the_most_preferred_and_half_are_random_neighbours() -> None:
    """Of four models, 005 and 003 helped most, and the topology's neighbours are the others."""
    neighbourhood = Neighbourhood(EIGHT, ["001", "006"], EIGHT[1:], choices=2)
    preference = [0, 0.1, 0, 0.5, 0, 0.9, 0, 0.2]
    assert choose(FedFOMO(), preference, neighbourhood) == ["001", "003", "005", "006"]


def test_without_preferences_only_neighbours_are_chosen() -> None:
    neighbourhood = Neighbourhood(EIGHT, ["001", "006"], EIGHT[1:], choices=2)
    assert choose(FedFOMO(), None, neighbourhood) == ["001", "006"]


def test_where_the_topology_gives_all_neighbours_half_are_the_preferred_ones() -> None:
    """Of seven neighbours it receives two: 005 helped most, the other one varies."""
    neighbourhood = Neighbourhood(EIGHT, EIGHT[1:], EIGHT[1:])
    preference = [0, 0.1, 0, 0.5, 0, 0.9, 0, 0.2]
    picks = [choose(FedFOMO(models=2), preference, neighbourhood, seed) for seed in range(30)]
    assert all("005" in picked and len(picked) == 2 for picked in picks)
    assert {name for picked in picks for name in picked} == set(EIGHT[1:])


@pytest.mark.parametrize(
    ("explore", "models", "degree", "choices"),
    [(0.5, 10, 4, 2), (0.0, 10, 4, 3), (1.0, 10, 4, 0), (0.5, 2, 4, 1), (0.5, 10, 1, 0)],
)
def test_peers_choose_all_but_the_explored_ones_and_at_least_one_is_a_neighbour(
    explore: float, models: int, degree: int, choices: int
) -> None:
    assert FedFOMO(explore=explore, models=models).choices(degree, t=0, T=1) == choices


@pytest.mark.parametrize(
    ("models", "neighbours", "count"), [(10, 3, 3), (2, 5, 2), (10, 7, 7), (1, 5, 1)]
)
def test_never_more_than_requested_or_than_there_are_neighbours(
    models: int, neighbours: int, count: int
) -> None:
    neighbourhood = Neighbourhood(EIGHT, EIGHT[1 : 1 + neighbours], EIGHT[1:])
    assert len(choose(FedFOMO(models=models), [0, 1, 1, 1, 1, 1, 1, 1], neighbourhood)) == count


def test_a_preferred_peer_that_is_offline_is_not_chosen() -> None:
    neighbourhood = Neighbourhood(EIGHT, ["001", "002"], ["001", "002", "004"])
    for seed in range(10):
        assert "005" not in choose(FedFOMO(), [0, 0, 0, 0, 0, 9.0, 0, 0], neighbourhood, seed)


def test_no_peer_hears_itself_and_each_has_preferences_for_the_others_only(
    make_context: MakeContext, run_all: Callable[..., list[FinishedRound]]
) -> None:
    rounds = run_all(make_context(peers=5, method=FedFOMO(models=2), rounds=3))
    for round_ in rounds:
        assert all(sender != receiver for sender, receiver in round_.ledger.paper)
        for k, step in enumerate(round_.steps.values()):
            assert sum(receiver == f"{k:03d}" for _, receiver in round_.ledger.paper) == 2
            assert f"{k:03d}" not in remembered(step.next_state)
    assert any(remembered(step.next_state) for step in rounds[-1].steps.values())
