"""Costs found without training: by hand, against the paper, and against what a real round then
costs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rounds import FinishedRound
from torch import Tensor

from dispfl.channels.channel_mask import ChannelMask
from dispfl.config import compose
from dispfl.core.layout import Layout
from dispfl.core.masks import kept_per_layer
from dispfl.core.train import Train
from dispfl.costs import estimate as module
from dispfl.costs.estimate import CostInputs, estimate, links, network, wire_costs
from dispfl.costs.flops import forward_cost
from dispfl.data.catalogue import describe
from dispfl.data.datasets import load_dataset
from dispfl.experiment import Experiment
from dispfl.methods.apfl import APFL
from dispfl.methods.base import Method, PeerState, initial_state
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.ditto import Ditto
from dispfl.methods.dpsgd import DPSGD
from dispfl.methods.fedavg import FedAvg
from dispfl.methods.fedfomo import FedFOMO
from dispfl.methods.local import Local
from dispfl.models.settings import Model
from dispfl.registry import METHODS
from dispfl.round.context import RunContext
from dispfl.round.round import initial_states
from dispfl.runs.metrics import round_metrics
from dispfl.runs.prepare import experiment_context, split_dataset
from dispfl.topology import RandomRegular, Ring
from dispfl.wire.codec import Wire


def plan(method: Method, **changes: Any) -> CostInputs:
    """ResNet-18 on CIFAR-10 as in the paper by default."""
    defaults: dict[str, Any] = {
        "model": Model(name="resnet18"),
        "data": describe("cifar10"),
        "method": method,
        "topology": RandomRegular(degree=10),
        "peers": 100,
        "samples": 500,
        "train": Train(batch_size=128),
        "wire": Wire(),
    }
    return CostInputs(**defaults | changes)


def small(method: Method, **changes: Any) -> CostInputs:
    """The small CNN on 28x28 grey images: 105,962 parameters."""
    return plan(
        method, **{"model": Model(), "data": describe("fashion-mnist"), "peers": 12} | changes
    )


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


def test_the_server_hears_its_cohort_and_other_peers_hear_nothing() -> None:
    """5 of 12 peers: the server downloads 5 models of 105,962 x 4 bytes, a peer 5/12 of one on
    average."""
    costs = estimate(small(FedAvg(cohort=5)))
    assert costs.busiest_mb == pytest.approx(5 * 105_962 * 4 / 1e6)
    assert costs.mean_mb == pytest.approx(5 / 12 * 105_962 * 4 / 1e6)


def test_local_sends_nothing() -> None:
    assert list(links(small(Local()).context)) == []
    costs, wire = estimate(small(Local())), wire_costs(small(Local()))
    assert (
        costs.busiest_mb,
        costs.mean_mb,
        wire.busiest_up_mb,
        wire.busiest_down_mb,
        wire.mean_mb,
    ) == (0, 0, 0, 0, 0)


def test_in_a_ring_of_a_half_dense_and_two_dense_peers_the_first_hears_most() -> None:
    """It receives from both dense peers; each of these receives from a dense one and the half-dense
    one."""
    costs = estimate(small(DisPFL(density=(0.5, 1.0, 1.0)), peers=3, topology=Ring()))
    half, dense = (group.kept for group in costs.groups)
    assert [(group.density, group.peers) for group in costs.groups] == [(0.5, 1), (1.0, 2)]
    assert costs.busiest_mb == pytest.approx(2 * dense * 4 / 1e6)
    assert costs.mean_mb == pytest.approx((2 * dense + 2 * (half + dense)) / 3 * 4 / 1e6)
    assert costs.kept == pytest.approx((half + 2 * dense) / 3)


def test_the_mask_search_is_one_dense_batch_and_random_regrowth_needs_none() -> None:
    _, forward = network(Model(), (1, 28, 28), 10)
    searching, not_searching = (
        estimate(small(DisPFL(regrow=regrow))) for regrow in ("gradient", "random")
    )
    assert searching.flops_per_peer - not_searching.flops_per_peer == 3 * 128 * forward.dense()
    fewer = estimate(small(DisPFL(), samples=50)).flops_per_peer
    assert (
        fewer - estimate(small(DisPFL(regrow="random"), samples=50)).flops_per_peer
        == 3 * 50 * forward.dense()
    )


def test_the_paper_charges_masked_dpsgd_a_search_and_fedfomo_all_samples() -> None:
    _, forward = network(Model(), (1, 28, 28), 10)
    masked, fomo = small(DPSGD(density=0.5)), small(FedFOMO(validation=0.1))
    search = estimate(masked, as_printed=True).flops_per_peer - estimate(masked).flops_per_peer
    assert search == 3 * 128 * forward.dense()
    assert estimate(fomo).flops_per_peer == pytest.approx(
        0.9 * estimate(fomo, as_printed=True).flops_per_peer
    )
    assert estimate(small(DPSGD()), as_printed=True) == estimate(small(DPSGD()))


def test_apfl_passes_every_sample_through_two_models() -> None:
    flops = [estimate(small(method)).flops_per_peer for method in (APFL(), FedAvg())]
    assert flops[0] == 2 * flops[1]


def test_ditto_has_its_own_epochs() -> None:
    five = estimate(small(Ditto(global_epochs=2, personal_epochs=3), train=Train(epochs=1)))
    assert five.flops_per_peer == estimate(small(Local(), train=Train(epochs=5))).flops_per_peer


@pytest.mark.parametrize("density", [0.07, 0.5, 1.0])
@pytest.mark.parametrize(
    "method", [DisPFL(), DisPFL(layers="uniform"), DPSGD(), Local(), FedFOMO()]
)
def test_kept_counts_are_those_of_drawn_masks(method: Method, density: float) -> None:
    layout, _ = network(Model(), (1, 28, 28), 10)
    drawn = method.start(
        torch.zeros(layout.size), layout, density, seed=0, peer="000"
    ).next_mask.unpack()
    assert method.kept_counts(layout, density) == tuple(kept_per_layer(drawn, layout))


class EveryOther(Local):
    """A custom method: each peer keeps every other weight, and requests these from its
    neighbours."""

    communicates = True
    pulls_masked = True

    def start(
        self, weights: Tensor, layout: Layout, density: float, *, seed: int, peer: str
    ) -> PeerState:
        return initial_state(weights, torch.arange(layout.size) % 2 == 0)


def test_a_custom_methods_first_mask_is_counted() -> None:
    assert estimate(small(EveryOther())).kept == 105_962 / 2


@pytest.mark.parametrize("exchange", ["pull", "push"])
def test_a_sparse_start_without_densities_is_charged_with_the_bytes_of_its_encoded_messages(
    make_context: Callable[..., RunContext],
    run_all: Callable[..., list[FinishedRound]],
    exchange: str,
) -> None:
    """34 of 67 weights are kept, some in every layer: masks are sent, as 67 bits or as the 34
    requested ones."""
    context = make_context(peers=3, method=EveryOther(), rounds=1, wire=Wire(exchange=exchange))  # type: ignore[arg-type]
    state, rng = initial_states(context)["000"], torch.Generator()
    codec = context.codec
    if exchange == "pull":
        request = len(codec.encode_request(state.next_mask))
        model = len(codec.encode_answer(state.model, state.next_mask, rng=rng))
        assert (request, model) == (28 + 9, 28 + 5 + 34 * 4)
    else:
        request, model = 0, len(codec.encode_model(state.model, rng=rng))
        assert model == 28 + 9 + 34 * 4
    (round_,) = run_all(context)
    roster = context.roster
    pairs = [(sender, receiver) for sender in roster for receiver in roster if sender != receiver]
    assert round_.ledger.wire == dict.fromkeys(pairs, request + model)
    assert round_.ledger.paper == dict.fromkeys(pairs, 34 * 4)


SMALL_RUN: dict[str, Any] = {
    "peers": 6,
    "rounds": 1,
    "topology": {"name": "random", "degree": 2},
    "partition": {"samples_per_peer": 24},
    "train": {"epochs": 2, "batch_size": 16},
}


NOT_IN_THE_FIRST_ROUND = ("dispfl", "subfedavg", "fedala", "ssfl", "fedfomo")
"""Methods whose first round with default settings is not what `costs` estimates, or is below."""


@pytest.mark.parametrize(
    "overrides",
    [
        *([f"method={name}"] for name in METHODS if name not in NOT_IN_THE_FIRST_ROUND),
        ["method=ssfl", "method.density=1"],  # without a mask to find
        ["method=fedfomo", "method.explore=1"],  # without peers that choose each other
        ["method.affinity=head", "method.density=0.3"],
        ["method=fedala", "method.cohort=6", "rounds=3"],  # from its third round on
        ["method=fedrep", "train.steps=3"],
        ["method=ditto", "train.steps=3"],
        ["method=fedper", "method.private=conv*"],
        ["method=subfedavg", "method.min_accuracy=1"],  # prunes nothing in its first round
        ["method.density=0.3"],
        ["method.density=[0.2,0.5,1.0]"],
        ["method.density=0.3", "method.structure=channels"],
        [
            "method.density=[0.2,0.5,1.0]",
            "method.structure=channels",
            "method.layers=erk",
            "wire.coding=zstd",
        ],
        ["method.density=0.3", "method.structure=channels", "wire.exchange=push"],
        ["method.density=0.3", "wire.exchange=push"],
        ["method.density=0.3", "wire.coding=zstd"],
        ["method.density=0.3", "method.private=head"],
        ["method=ditto", "method.private=head", "wire.values=int8"],
        ["method=dpsgd", "method.density=0.5", "wire.values=int8"],
        [
            "method.density=0.3",
            "method.regrow=random",
            "topology=ring",
            "topology.offline_prob=0.3",
            "seed=3",
        ],
    ],
    ids=" ".join,
)
def test_the_estimate_is_what_a_real_round_costs(
    overrides: list[str], run_all: Callable[..., list[FinishedRound]]
) -> None:
    """Every mask is drawn here, so both counts agree to the byte."""
    experiment = compose(SMALL_RUN, overrides)
    record = _last_round(experiment, run_all)
    inputs = small(
        experiment.method,
        data=describe("fashion-sample"),
        topology=experiment.topology,
        peers=6,
        samples=24,
        train=experiment.train,
        wire=experiment.wire,
        seed=experiment.seed,
    )
    costs, wire = estimate(inputs), wire_costs(inputs)
    assert costs.busiest_mb == record["busiest"]["paper_mb"]
    assert costs.flops_per_peer == pytest.approx(record["flops_per_peer"], rel=1e-12)
    assert wire.busiest_up_mb == record["busiest"]["wire_up_mb"]
    assert wire.busiest_down_mb == record["busiest"]["wire_down_mb"]
    assert wire.peers_drawn == 6


def _last_round(
    experiment: Experiment, run_all: Callable[..., list[FinishedRound]]
) -> dict[str, Any]:
    images = load_dataset(experiment.data)
    context = experiment_context(experiment, images, split_dataset(experiment, images))
    model = context.module()
    sample = next(context.data.peers["000"].train.batches(1))[0]
    return round_metrics(
        0, run_all(context)[-1], context.task, forward_cost(model, Layout.of(model), sample), 0.0
    )


@pytest.mark.parametrize(
    "method",
    [DisPFL(density=0.3), DisPFL(density=(0.2, 0.6, 1.0)), DPSGD(density=0.4), FedAvg(cohort=10)],
)
def test_two_masks_per_density_represent_all_the_others(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = wire_costs(small(method))
    monkeypatch.setattr(module, "MAX_DRAWN_WEIGHTS", 0)
    sampled = wire_costs(small(method))
    assert exact.peers_drawn == 12
    assert sampled.peers_drawn == 2 * len(set(method.densities(12)))
    assert sampled.mean_mb == pytest.approx(exact.mean_mb, rel=0.01)
    assert sampled.busiest_down_mb == pytest.approx(exact.busiest_down_mb, rel=0.01)
    assert sampled.busiest_up_mb == pytest.approx(exact.busiest_up_mb, rel=0.01)


def test_pulling_costs_less_than_pushing_and_pushing_more_than_the_papers_values() -> None:
    pulled, pushed = (
        wire_costs(small(DisPFL(density=0.2), wire=Wire(exchange=how))) for how in ("pull", "push")
    )
    paper = estimate(small(DisPFL(density=0.2)))
    assert pulled.mean_mb < paper.mean_mb < pushed.mean_mb


def test_a_server_sends_and_receives_dense_models_with_short_headers() -> None:
    """10 models each way; a message is at most 100 bytes longer than its values."""
    wire = wire_costs(small(FedAvg(cohort=10)))
    models = 10 * 105_962 * 4 / 1e6
    assert models < wire.busiest_down_mb < models + 10 * 100 / 1e6
    assert wire.busiest_up_mb == wire.busiest_down_mb


def test_with_channels_flops_are_those_of_the_small_network() -> None:
    """The network that a peer really builds is run once and counted, densely."""
    inputs = small(DisPFL(structure="channels", density=0.3))
    costs = estimate(inputs)
    mask = initial_states(inputs.context, {"000"})["000"].next_mask
    assert isinstance(mask, ChannelMask)
    network = mask.small_network(inputs.context.module())
    counted = forward_cost(network, Layout.of(network), torch.zeros(1, 1, 28, 28))
    assert [layer.small_shape for layer in costs.layers] == list(mask.small.shapes)
    assert sum(layer.flops for layer in costs.layers) == counted.dense()
    assert costs.flops_per_peer == 3 * 5 * 500 * counted.dense()  # no mask search
    assert costs.kept == mask.kept < 0.3 * 105_962


def test_with_single_weights_and_with_several_densities_there_is_no_small_shape() -> None:
    assert estimate(small(DisPFL())).layers[0].small_shape is None
    assert (
        estimate(small(DisPFL(structure="channels", density=(0.2, 1.0)))).layers[0].small_shape
        is None
    )


def test_layers_whose_units_may_not_be_left_out_are_named() -> None:
    kept = estimate(small(DisPFL(structure="channels", keep=("conv1", "conv2"))))
    assert kept.dense_layers == ("conv1", "norm1", "conv2", "norm2")
    assert estimate(small(DisPFL(structure="channels"))).dense_layers == ()
    assert estimate(small(DisPFL())).dense_layers == ()
