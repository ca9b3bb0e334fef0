"""Affinities: whom a peer resembles, by the last layer, and how much it takes of each model."""

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import ClassVar

import pytest
import torch
from messages import refused
from torch import Tensor, nn

from dispfl.core.layout import Layout
from dispfl.core.packed import Mask, PackedModel, WeightMask
from dispfl.core.samples import PeerData, Samples
from dispfl.core.task import Task
from dispfl.core.train import Train, Trainer
from dispfl.data.batches import ResidentSamples
from dispfl.errors import ConfigError
from dispfl.federation import Federation
from dispfl.methods.affinity import (
    MAX_REMEMBERED,
    Head,
    affinity_weights,
    mean_head,
    remembered_similarities,
)
from dispfl.methods.dispfl import DisPFL
from dispfl.report.affinities import mean_similarities
from dispfl.report.page import write_report
from dispfl.report.runs import read_run
from dispfl.robust.averages import check_byzantine
from dispfl.robust.rules import robust_average_of
from dispfl.round.context import RunContext
from dispfl.testing.rounds import FinishedRound, labelled_points, simulated_context, tiny_network
from dispfl.topology import RandomRegular, peer_names

MakeContext = Callable[..., RunContext]
RunAll = Callable[[RunContext], list[FinishedRound]]


AFFINITY = {
    "density": 0.8,
    "affinity": "head",
    "affinity_strength": 2.5,
    "affinity_chosen": 0.5,
    "affinity_held_back": 0.0,
}


def head(*changes: float, held: str = "") -> Head:
    """A last layer with these changes; `held` says which weights it holds: "101"."""
    is_held = torch.tensor([flag == "1" for flag in held or "1" * len(changes)])
    return Head(torch.where(is_held, torch.tensor(changes), 0.0), is_held)


def test_the_similarity_is_the_cosine_on_the_weights_that_both_hold() -> None:
    """(3, 4) and (4, 3): 24 / 25; the third weight is held by one of them only."""
    assert head(3, 4, 7).similarity(head(4, 3, 9, held="110"), None) == pytest.approx(24 / 25)


def test_what_all_have_in_common_is_left_out() -> None:
    """All have changed by about (5, 0); the rest, (0, 1) and (1, -1), differs."""
    mean = torch.tensor([5.0, 0.0])
    one = head(5, 1)
    other = head(6, -1)
    similarity = one.similarity(other, None)
    assert similarity is not None
    assert similarity > 0.9
    assert one.similarity(other, mean) == pytest.approx(-1 / 2**0.5)


def test_two_heads_without_any_change_cannot_be_compared() -> None:
    assert head(0, 0).similarity(head(1, 2), None) is None
    assert head(1, 2, held="10").similarity(head(1, 2, held="01"), None) is None
    assert head(1, 2).similarity(head(1e30, 2e30), None) is None


def test_the_mean_head_is_over_holders_and_follows_the_rounds() -> None:
    """(2 + 4) / 2 = 3, and 6 of the one that holds it; nobody holds the third."""
    first = mean_head(None, [head(2, 6, 0, held="110"), head(4, 9, 0, held="100")])
    assert first.tolist() == [3.0, 6.0, 0.0]
    second = mean_head(first, [head(13, 0, 0, held="100")])
    assert second.tolist() == pytest.approx([0.7 * 3 + 0.3 * 13, 6.0, 0.0])


def test_a_model_counts_less_the_less_similar_it_is_than_the_three_most_similar() -> None:
    """The best three have 0.5, 0.4 and 0.3: 0.4 on average. With a strength of 2, one at 0.1 counts
    1 - 2 (0.4 - 0.1) = 0.4, one below -0.1 nothing, and the better ones in full."""
    known = {"a": 0.5, "b": 0.4, "c": 0.3, "d": 0.1, "e": -0.6}
    measured = {"a": 0.6, "d": 0.1, "e": -0.6}
    weights = affinity_weights(measured, known, strength=2.0)
    assert weights == pytest.approx({"a": 1.0, "d": 0.4, "e": 0.0})


def test_without_any_similarity_all_count_the_same() -> None:
    assert affinity_weights({}, {}, strength=3.0) == {}
    noise = {"a": 0.01, "b": -0.01, "c": 0.0, "d": 0.01}
    weights = affinity_weights(noise, noise, strength=2.5)
    assert min(weights.values()) > 0.9


def test_the_head_of_a_packed_model_is_what_was_requested_of_it() -> None:
    weights = torch.tensor([9.0, 9.0, 1.0, 2.0, 3.0])
    model = PackedModel.pack(weights, torch.tensor([True, False, True, False, True]))
    requested = torch.tensor([True, True, False])
    first = torch.tensor([0.5, 0.5, 0.5])
    found = Head.of(model, slice(2, 5), first, requested)
    assert found.change.tolist() == [0.5, 0.0, 0.0]
    assert found.is_held.tolist() == [True, False, False]


def grouped_context(
    method: type[DisPFL] = DisPFL, rounds: int = 8, **settings: object
) -> RunContext:
    """Twelve peers, of which every second one sees other classes than the others."""
    peers = {}
    for k, name in enumerate(peer_names(12)):
        train = _points_of(k % 2, 60, seed=k)
        peers[name] = PeerData(train, _points_of(k % 2, 20, seed=100 + k))
    return simulated_context(
        peers,
        model=tiny_network,
        method=method(**(AFFINITY | settings)),  # type: ignore[arg-type]
        topology=RandomRegular(degree=6),
        train=Train(lr=0.1, epochs=3, batch_size=10),
        rounds=rounds,
    )


def _points_of(group: int, count: int, seed: int) -> ResidentSamples:
    """Points of the classes 0 and 1, or of 1 and 2."""
    points, labels = labelled_points(4 * count, seed)
    rows = (labels >= group) & (labels <= group + 1)
    return ResidentSamples(points[rows][:count], labels[rows][:count])


def within_and_between(similarities: dict[str, dict[str, float]]) -> tuple[float, float]:
    """The mean similarity of peers of one group, and of different ones."""
    within: list[float] = []
    between: list[float] = []
    for peer, of_senders in similarities.items():
        for sender, similarity in of_senders.items():
            is_same = int(peer) % 2 == int(sender) % 2
            (within if is_same else between).append(similarity)
    return fmean(within), fmean(between)


@pytest.mark.parametrize("robust", ["none", "clip"])
def test_peers_find_those_with_the_same_classes_count_them_more_and_choose_them(
    run_all: RunAll, robust: str
) -> None:
    context = grouped_context(robust=robust)
    rounds = run_all(context)
    reports = {peer: step.report for peer, step in rounds[-1].steps.items()}
    similarities = {peer: report.similarities or {} for peer, report in reports.items()}
    affinities = {peer: report.affinities or {} for peer, report in reports.items()}
    within, between = within_and_between(similarities)
    assert within > between + 0.5
    within, between = within_and_between(affinities)
    assert within > between + 0.3
    links = [(sender, peer) for sender, peer in rounds[-1].ledger.paper]
    same_group = [link for link in links if int(link[0]) % 2 == int(link[1]) % 2]
    assert len(same_group) > 0.6 * len(links)  # by chance 5 of 11


def test_channels_are_compared_by_their_last_layer_too(run_all: RunAll) -> None:
    rounds = run_all(grouped_context(structure="channels"))
    similarities = {}
    for peer, step in rounds[-1].steps.items():
        similarities[peer] = step.report.similarities or {}
    within, between = within_and_between(similarities)
    assert within > between + 0.3


class KeepsMixed(DisPFL):
    """Keeps what every peer has mixed in every round."""

    mixed: ClassVar[dict[tuple[str, int], Tensor]] = {}

    def mix(self, trainer: Trainer, models: Mapping[str, PackedModel], m_k: Mask) -> Tensor:
        average = super().mix(trainer, models, m_k)
        self.mixed[trainer.peer, trainer.t] = average.clone()
        return average


def test_a_model_that_counts_less_is_averaged_so(run_all: RunAll) -> None:
    """(w_k + sum_j a_j w_j) / (m_k + sum_j a_j m_j), from the reported a_j."""
    context = grouped_context(KeepsMixed, rounds=4)
    rounds = run_all(context)
    before = rounds[2].states
    affinities = rounds[3].steps["003"].report.affinities
    assert affinities is not None
    assert min(affinities.values()) < 0.9
    total = torch.zeros(67)
    divisor = torch.zeros(67)
    for name, share in {**affinities, "003": 1.0}.items():
        weights, mask = before[name].model.unpack()
        total += share * weights
        divisor += share * mask
    average = torch.where(divisor > 0, total / divisor, 0.0)
    expected = torch.where(before["003"].next_mask.unpack(), average, 0.0)
    torch.testing.assert_close(KeepsMixed.mixed["003", 3], expected)


class OneOrThree(DisPFL):
    """Averages to 1 if some models count less than others, and to 3 if all count the same."""

    def mix(self, trainer: Trainer, models: Mapping[str, PackedModel], m_k: Mask) -> Tensor:
        is_plain = set((trainer.report.affinities or {}).values()) == {1.0}
        return torch.tensor([3.0 if is_plain else 1.0])


@pytest.mark.parametrize(
    ("target", "weight", "affinities"),
    [(0.0, 1.0, {"001": 0.5, "002": 1.0}), (4.0, 3.0, {"001": 1.0, "002": 1.0})],
)
def test_a_peer_decides_by_held_back_data_whether_similar_models_count_more(
    make_context: MakeContext,
    trainer_for: Callable[..., Trainer],
    target: float,
    weight: float,
    affinities: dict[str, float],
) -> None:
    """With the loss (w - y)^2, 1 is nearer to 0 and 3 is nearer to 4: 1 instead of 9."""
    samples = ResidentSamples(torch.ones(20, 1), torch.full((20,), target))
    context = make_context(
        peers={"000": PeerData(samples, samples)},
        model=lambda: nn.Linear(1, 1, bias=False),
        task=Task(loss=lambda outputs, labels: (outputs.squeeze(1) - labels).square().mean()),
    )
    trainer = trainer_for(context)
    trainer.report.affinities = {"001": 0.5, "002": 1.0}
    everything = WeightMask.pack(torch.ones(1, dtype=torch.bool))
    average = OneOrThree(affinity="head").better_mix(trainer, {}, everything)
    assert average.tolist() == [weight]
    assert trainer.report.affinities == affinities
    assert trainer.report.affinity == fmean(affinities.values())
    assert len(trainer.train) == 18
    assert [passes.samples for passes in trainer.report.scored] == [2, 2]


def test_a_step_trains_on_what_is_not_held_back(run_all: RunAll) -> None:
    """A tenth of 60 samples; before any model was received there is nothing to decide."""
    rounds = run_all(grouped_context(rounds=6, affinity_held_back=0.1))
    reports = [finished.steps["003"].report for finished in rounds]
    assert {report.passes[0].samples for report in reports} == {3 * 54}
    assert not reports[0].scored
    assert [passes.samples for passes in reports[-1].scored] == [6, 6]
    context = grouped_context(affinity_held_back=0.1)
    received = len(reports[-1].affinities or {})
    held_back = context.method.held_back(60), context.method.scored_samples(60, received)
    assert held_back == (6, 12)


def test_only_the_most_similar_peers_are_remembered(run_all: RunAll) -> None:
    rounds = run_all(grouped_context(rounds=6))
    for step in rounds[-1].steps.values():
        known = remembered_similarities(step.next_state)
        assert 4 <= len(known) <= min(11, MAX_REMEMBERED)


def test_without_affinities_nothing_is_remembered_or_reported(
    make_context: MakeContext, run_all: RunAll
) -> None:
    [*_, last] = run_all(make_context(peers=4, method=DisPFL(), rounds=2))
    for step in last.steps.values():
        assert step.next_state.memory == {}
        assert step.report.affinities is None
        assert step.report.similarities is None


@pytest.mark.parametrize(
    "settings", [{"robust": "trim"}, {"robust": "nnm"}, {"first_weights": "own"}]
)
def test_what_does_not_work_with_affinities_is_refused(settings: dict[str, str]) -> None:
    with refused(ConfigError, key="method.affinity"):
        DisPFL(affinity="head", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("private", ["head", "2.bias"])
def test_a_last_layer_that_is_not_sent_cannot_be_compared(private: str) -> None:
    method = DisPFL(affinity="head", private=private)
    with refused(ConfigError, key="method.affinity"):
        method.private_parameters(Layout.of(tiny_network()))
    assert any(DisPFL(affinity="head", private="0.*").private_parameters(Layout.of(tiny_network())))


def test_clip_takes_a_share_of_the_differences_and_nobody_gains_influence() -> None:
    """Four senders at 1, b = 1, so nothing is clipped: 0 + (0.5 + 1 + 1 + 1) / 5 holders."""
    ones = torch.ones(3, dtype=torch.bool)
    own = PackedModel.pack(torch.zeros(3), ones)
    senders = [PackedModel.pack(torch.ones(3), ones)] * 4
    mask = own.mask
    plain, _ = robust_average_of([own, *senders], 0, mask, "clip", 1)
    shares = [1.0, 0.5, 1.0, 1.0, 1.0]
    shared, _ = robust_average_of([own, *senders], 0, mask, "clip", 1, shares=shares)
    assert plain.tolist() == pytest.approx([4 / 5] * 3)
    assert shared.tolist() == pytest.approx([3.5 / 5] * 3)


def test_the_report_maps_whom_peers_resemble(tmp_path: Path) -> None:
    context = grouped_context(rounds=8)
    peers = {}
    for name, data in context.data.peers.items():
        peers[name] = (_tensors(data.train), _tensors(data.test))
    federation = Federation(
        tiny_network,
        peers,
        DisPFL(**AFFINITY),  # type: ignore[arg-type]
        topology=RandomRegular(degree=4),
        train=Train(lr=0.1, epochs=3, batch_size=10),
        rounds=8,
    )
    federation.run(out=tmp_path / "run")
    similarities = mean_similarities(read_run(tmp_path / "run"))
    within, between = within_and_between(similarities)
    assert within > between + 0.3

    write_report([tmp_path / "run"], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Whom peers resemble" in page
    assert "peer 003 resembles " in page


def _tensors(samples: Samples) -> tuple[Tensor, Tensor]:
    return next(samples.batches(1000))  # type: ignore[return-value]


def test_more_and_more_neighbours_are_chosen_up_to_a_share_of_them() -> None:
    method = DisPFL(affinity="head", affinity_chosen=0.5)
    chosen = [method.choices(5, t, 100) for t in (0, 20, 40, 50, 60, 80, 99)]
    assert chosen == [0, 0, 1, 1, 1, 2, 2]
    assert [method.choices(neighbours, 10, 10) for neighbours in (1, 2, 3, 10)] == [0, 1, 1, 5]
    assert DisPFL(affinity="head", affinity_chosen=0.5, horizon=10).choices(10, 10, 100) == 5
    assert DisPFL(affinity="head").choices(10, 99, 100) == 6
    assert DisPFL(affinity="head", affinity_chosen=0).choices(10, 99, 100) == 0
    assert DisPFL().choices(10, 99, 100) == 0  # the paper's method


def test_a_rule_withstands_less_than_half_of_the_neighbours_that_are_not_chosen() -> None:
    """Of ten neighbours five are random, in rounds in which nobody chooses each other: two."""
    topology = RandomRegular(degree=10)
    check_byzantine(DisPFL(robust="clip", byzantine=4), topology, 20)
    choosing = DisPFL(robust="clip", byzantine=2, affinity="head", affinity_chosen=0.5)
    check_byzantine(choosing, topology, 20)
    with refused(ConfigError, key="method.byzantine"):
        check_byzantine(choosing.model_copy(update={"byzantine": 3}), topology, 20)
