"""Costs found without training: by hand, against the paper, and against what a real round then costs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rounds import Played
from torch import Tensor

from dispfl.config import Experiment, compose
from dispfl.core.layout import Layout
from dispfl.core.masks import kept_per_layer
from dispfl.core.train import Train
from dispfl.costs import estimate as module
from dispfl.costs.estimate import Plan, estimate, kept_weights, links, network, wire_costs
from dispfl.costs.flops import forward_cost
from dispfl.data.catalogue import describe
from dispfl.data.datasets import load
from dispfl.methods.base import Method, PeerState, fresh_state
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.ditto import Ditto
from dispfl.methods.dpsgd import DPSGD
from dispfl.methods.fedavg import FedAvg
from dispfl.methods.fedfomo import FedFOMO
from dispfl.methods.local import Local
from dispfl.methods.registry import METHODS
from dispfl.models.registry import Model
from dispfl.runs.records import round_record
from dispfl.topology import RandomRegular, Ring
from dispfl.wire.codec import Wire


def plan(method: Method, **changes: Any) -> Plan:
    """ResNet-18 on CIFAR-10 as in the paper, unless told otherwise."""
    defaults: dict[str, Any] = {
        "model": Model(name="resnet18"),
        "data": describe("cifar10"),
        "method": method,
        "topology": RandomRegular(),
        "peers": 100,
        "samples": 500,
        "train": Train(),
        "wire": Wire(),
    }
    return Plan(**defaults | changes)


def small(method: Method, **changes: Any) -> Plan:
    """The small CNN on 28x28 grey pictures: 105,962 parameters."""
    return plan(method, **{"model": Model(), "data": describe("fashion-mnist"), "peers": 12} | changes)


def test_dense_resnet18_costs_446_96_mb_and_8_33e12() -> None:
    """11,173,962 parameters x 4 bytes x 10 neighbours."""
    costs = estimate(plan(DPSGD()))
    assert costs.parameters == costs.kept == 11_173_962
    assert costs.busiest_mb == costs.mean_mb == pytest.approx(446.95848)
    assert costs.flops_per_peer == pytest.approx(8.331e12, rel=1e-3)


def test_dispfl_at_half_density_costs_223_48_mb_and_7_06e12() -> None:
    costs = estimate(plan(DisPFL(density=0.5)))
    assert costs.busiest_mb == pytest.approx(223.48, abs=0.005)
    assert costs.flops_per_peer == pytest.approx(7.06e12, rel=1e-3)


def test_the_layers_add_up_and_only_large_ones_are_thinned() -> None:
    costs = estimate(plan(DisPFL(density=0.5)))
    by_name = {layer.name: layer for layer in costs.layers}
    assert sum(layer.size for layer in costs.layers) == costs.parameters
    assert by_name["conv1.weight"].kept == by_name["conv1.weight"].size == 64 * 3 * 3 * 3
    assert by_name["conv1.weight"].flops == 2 * 32 * 32 * 64 * 3 * 3 * 3
    assert by_name["stages.3.1.conv2.weight"].kept < 0.4 * by_name["stages.3.1.conv2.weight"].size


def test_a_server_hears_its_cohort_and_a_peer_outside_it_hears_nothing() -> None:
    """5 of 12 peers: the server downloads 5 models of 105,962 x 4 bytes, a peer 5/12 of one on average."""
    costs = estimate(small(FedAvg(cohort=5)))
    assert costs.busiest_mb == pytest.approx(5 * 105_962 * 4 / 1e6)
    assert costs.mean_mb == pytest.approx(5 / 12 * 105_962 * 4 / 1e6)


def test_local_sends_nothing() -> None:
    assert list(links(small(Local()))) == []
    costs, wire = estimate(small(Local())), wire_costs(small(Local()))
    assert (costs.busiest_mb, costs.mean_mb, wire.busiest_up_mb, wire.busiest_down_mb, wire.mean_mb) == (0, 0, 0, 0, 0)


def test_in_a_ring_of_a_half_dense_and_two_dense_peers_the_first_hears_most() -> None:
    """It hears both dense peers; each of these hears a dense one and the half-dense one."""
    costs = estimate(small(DisPFL(density=(0.5, 1.0, 1.0)), peers=3, topology=Ring()))
    half, dense = (group.kept for group in costs.groups)
    assert [(group.density, group.peers) for group in costs.groups] == [(0.5, 1), (1.0, 2)]
    assert costs.busiest_mb == pytest.approx(2 * dense * 4 / 1e6)
    assert costs.mean_mb == pytest.approx((2 * dense + 2 * (half + dense)) / 3 * 4 / 1e6)
    assert costs.kept == pytest.approx((half + 2 * dense) / 3)


def test_the_mask_search_is_one_dense_batch_and_random_regrowth_needs_none() -> None:
    _, forward = network(Model(), (1, 28, 28), 10)
    searching, not_searching = (estimate(small(DisPFL(regrow=regrow))) for regrow in ("gradient", "random"))
    assert searching.flops_per_peer - not_searching.flops_per_peer == 3 * 128 * forward.dense()
    fewer = estimate(small(DisPFL(), samples=50)).flops_per_peer
    assert fewer - estimate(small(DisPFL(regrow="random"), samples=50)).flops_per_peer == 3 * 50 * forward.dense()


def test_the_paper_charges_masked_dpsgd_a_search_and_fedfomo_all_samples() -> None:
    _, forward = network(Model(), (1, 28, 28), 10)
    masked, fomo = small(DPSGD(density=0.5)), small(FedFOMO(validation=0.1))
    search = estimate(masked, as_printed=True).flops_per_peer - estimate(masked).flops_per_peer
    assert search == 3 * 128 * forward.dense()
    assert estimate(fomo).flops_per_peer == pytest.approx(0.9 * estimate(fomo, as_printed=True).flops_per_peer)
    assert estimate(small(DPSGD()), as_printed=True) == estimate(small(DPSGD()))


def test_ditto_has_its_own_epochs() -> None:
    five = estimate(small(Ditto(global_epochs=2, personal_epochs=3), train=Train(epochs=1)))
    assert five.flops_per_peer == estimate(small(Local(), train=Train(epochs=5))).flops_per_peer


@pytest.mark.parametrize("density", [0.07, 0.5, 1.0])
@pytest.mark.parametrize("method", [DisPFL(), DisPFL(layers="uniform"), DPSGD(), Local(), FedFOMO()])
def test_counted_masks_keep_as_much_as_drawn_ones(method: Method, density: float) -> None:
    layout, _ = network(Model(), (1, 28, 28), 10)
    drawn = method.start(torch.zeros(layout.size), layout, density, seed=0, peer="000").next_mask.unpack()
    assert kept_weights(method, layout, density) == tuple(kept_per_layer(drawn, layout))


class EveryOther(Local):
    """Somebody's own method: each peer keeps every other weight."""

    def start(self, weights: Tensor, layout: Layout, density: float, *, seed: int, peer: str) -> PeerState:
        return fresh_state(weights, torch.arange(layout.size) % 2 == 0)


def test_a_method_of_ones_own_is_asked_for_its_first_mask() -> None:
    assert estimate(small(EveryOther())).kept == 105_962 / 2


SMALL_RUN: dict[str, Any] = {
    "peers": 6,
    "rounds": 1,
    "topology": {"name": "random", "degree": 2},
    "partition": {"samples": 24},
    "train": {"epochs": 2, "batch": 16},
}


@pytest.mark.parametrize(
    "words",
    [
        *([f"method={name}"] for name in METHODS if name not in ("subfedavg", "dispfl")),
        ["method=subfedavg", "method.min_accuracy=1"],  # prunes nothing in its first round
        ["method.density=0.3"],
        ["method.density=[0.2,0.5,1.0]"],
        ["method.density=0.3", "wire.exchange=push"],
        ["method.density=0.3", "wire.coding=zstd"],
        ["method=dpsgd", "method.density=0.5", "wire.values=int8"],
        ["method.density=0.3", "method.regrow=random", "topology=ring", "topology.drop=0.3", "seed=3"],
    ],
    ids=" ".join,
)
def test_what_was_estimated_is_what_a_real_first_round_costs(
    words: list[str], play: Callable[..., list[Played]]
) -> None:
    """Every mask is drawn here, so both currencies agree to the byte."""
    experiment = compose(SMALL_RUN, words)
    record = _first_round(experiment, play)
    asked = small(
        experiment.method,
        data=describe("fashion-sample"),
        topology=experiment.topology,
        peers=6,
        samples=24,
        train=experiment.train,
        wire=experiment.wire,
        seed=experiment.seed,
    )
    costs, wire = estimate(asked), wire_costs(asked)
    assert costs.busiest_mb == record["busiest"]["paper_mb"]
    assert costs.flops_per_peer == pytest.approx(record["flops_per_peer"], rel=1e-12)
    assert wire.busiest_up_mb == record["busiest"]["wire_up_mb"]
    assert wire.busiest_down_mb == record["busiest"]["wire_down_mb"]
    assert wire.peers_drawn == 6


def _first_round(experiment: Experiment, play: Callable[..., list[Played]]) -> dict[str, Any]:
    pictures = load(experiment.data)
    setting = experiment.setting(pictures, experiment.split(pictures))
    model = setting.module()
    sample = next(setting.peers["000"].train.batches(1))[0]
    return round_record(0, play(setting)[0], forward_cost(model, Layout.of(model), sample), 0.0)


@pytest.mark.parametrize("method", [DisPFL(density=0.3), DisPFL(density=(0.2, 0.6, 1.0)), DPSGD(density=0.4), FedAvg()])
def test_two_masks_a_density_stand_for_all_the_others(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = wire_costs(small(method))
    monkeypatch.setattr(module, "DRAW_EVERYONE", 0)
    sampled = wire_costs(small(method))
    assert exact.peers_drawn == 12
    assert sampled.peers_drawn == 2 * len(set(method.densities(12)))
    assert sampled.mean_mb == pytest.approx(exact.mean_mb, rel=0.01)
    assert sampled.busiest_down_mb == pytest.approx(exact.busiest_down_mb, rel=0.01)
    assert sampled.busiest_up_mb == pytest.approx(exact.busiest_up_mb, rel=0.01)


def test_pulling_costs_less_than_pushing_and_pushing_more_than_the_papers_values() -> None:
    pulled, pushed = (wire_costs(small(DisPFL(density=0.2), wire=Wire(exchange=how))) for how in ("pull", "push"))
    paper = estimate(small(DisPFL(density=0.2)))
    assert pulled.mean_mb < paper.mean_mb < pushed.mean_mb


def test_a_server_sends_and_hears_dense_models_with_short_headers() -> None:
    """10 models each way; a message is at most 100 bytes longer than its values."""
    wire = wire_costs(small(FedAvg()))
    models = 10 * 105_962 * 4 / 1e6
    assert models < wire.busiest_down_mb < models + 10 * 100 / 1e6
    assert wire.busiest_up_mb == wire.busiest_down_mb
