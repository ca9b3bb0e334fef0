"""Densities that fit devices: `method.density=fit`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refused
from torch import nn

from dispfl.core.device_classes import Fit, FittedDensities
from dispfl.core.flat_module import FlatModule
from dispfl.costs.capacity import fit_densities, saved_for_backward
from dispfl.errors import ConfigError
from dispfl.experiment import Experiment
from dispfl.federation import Federation
from dispfl.peer.setup.site_config import SiteConfig
from dispfl.report.runs import read_run
from dispfl.runs.prepare import prepare

CHANNELS: Any = {"name": "dispfl", "structure": "channels", "density": "fit"}
SLOW = {"speed": 1e9, "up": 1, "down": 1}
SMALL: dict[str, Any] = {
    "peers": 4,
    "rounds": 1,
    "topology": {"name": "random", "degree": 2},
    "partition": {"name": "iid", "samples_per_peer": 20},
    "train": {"epochs": 1},
}


def fitted(**settings: Any) -> FittedDensities:
    _, _, context = prepare(Experiment(**{**SMALL, "method": CHANNELS, **settings}))
    return fit_densities(context)


def test_a_linear_network_gets_the_density_that_hand_computation_gives() -> None:
    """A layer of 100 x 50 weights without bias: one epoch of 20 samples in one batch are 3 x 2 x
    5,000 x 20 = 600,000 operations, 0.6 s at 1 MFLOP/s, whatever the density of single weights. A
    model of density d has 5,000 d values of 4 bytes and 625 bytes of mask."""

    def data() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(20, 100), torch.randint(50, (20,))

    federation = Federation(
        lambda: nn.Linear(100, 50, bias=False),
        [(data(), data()) for _ in range(3)],
        method={"name": "dispfl", "density": "fit", "regrow": "random"},
        topology="ring",
        train={"epochs": 1, "batch_size": 20},
        wire={"exchange": "push"},
        classes={"slow": {"speed": 1e6, "up": 0.08, "down": 8}},  # 10 kB/s up
        fit={"round_time": 3.0, "floor": 0.1, "step": 0.1},
    )
    peer = fit_densities(federation._context).peers["000"]
    # Two neighbours, 2.4 s for transfers: at most 12,000 bytes each. A density of 0.5 takes 10,000
    # bytes of values, the mask and a header; 0.6 takes 12,000 bytes of values alone.
    assert peer.density == 0.5
    assert peer.seconds == pytest.approx(0.6 + 2 * (10_000 + 625) / 10_000, abs=0.03)
    assert set(federation._context.densities.values()) == {0.5}


def test_weak_devices_train_small_networks_and_strong_ones_large_networks() -> None:
    """The median device has density 0.5, because no time is given."""
    classes = {
        "weak": {"share": 0.25, "speed": 1e9, "up": 2, "down": 2},
        "common": {"share": 0.5, "speed": 4e9, "up": 6, "down": 6},
        "strong": {"share": 0.25, "speed": 1e11, "up": 100, "down": 100},
    }
    result = fitted(classes=classes)
    assert list(result.densities.values()) == [0.15, 0.5, 0.5, 1.0]
    assert all(peer.seconds <= result.round_time for peer in result.peers.values())


def test_a_device_that_is_too_slow_for_the_floor_gets_the_floor() -> None:
    result = fitted(classes={"slow": SLOW}, fit={"round_time": 0.001, "floor": 0.3})
    assert set(result.densities.values()) == {0.3}
    assert result.peers["000"].seconds > 0.001


def test_a_small_memory_limits_the_density() -> None:
    """With channels; the dense network that single weights are computed in does not shrink."""
    small_memory = {"slow": {**SLOW, "memory": 1.0}}
    limited = fitted(classes=small_memory, fit={"round_time": 1e6})
    unlimited = fitted(classes={"slow": SLOW}, fit={"round_time": 1e6})
    assert 0.1 < limited.densities["000"] < 1.0
    assert unlimited.densities["000"] == 1.0
    with refused(ConfigError, key="fit.floor"):
        fitted(classes=small_memory, method={"name": "dispfl", "density": "fit"})
    with refused(ConfigError, key="fit.floor"):
        fitted(classes={"slow": {**SLOW, "memory": 0.01}})


def test_what_backward_keeps_of_a_linear_layer_is_its_input() -> None:
    """Two samples of 10 numbers of 4 bytes, and the 2 x 5 outputs of the ReLU."""
    network = FlatModule(nn.Sequential(nn.Linear(10, 5), nn.ReLU()))
    inputs = torch.randn(2, 10)
    assert saved_for_backward(network, inputs) == 4 * (2 * 10 + 2 * 5)


def test_the_densities_are_steps_from_the_floor_to_one() -> None:
    assert Fit(floor=0.25, step=0.25).densities == [0.25, 0.5, 0.75, 1.0]
    assert Fit(floor=0.3, step=0.5).densities == [0.3, 0.8, 1.0]


def test_a_run_trains_and_reports_them_and_a_repeated_one_has_the_same(tmp_path: Path) -> None:
    experiment = Experiment(**SMALL, method=CHANNELS, fleet="phones")
    run = experiment.run(tmp_path / "run", progress=False)
    densities = read_run(tmp_path / "run").densities
    assert densities is not None
    assert sorted(densities.values()) == [0.15, 0.5, 0.5, 1.0]
    kept = {peer: state.model.mask.kept for peer, state in run.states.items()}
    assert sorted(kept, key=kept.__getitem__) == sorted(densities, key=densities.__getitem__)
    again = experiment.run(progress=False)
    assert again.summary["weights_sha256"] == run.summary["weights_sha256"]
    assert experiment.run(tmp_path / "run", resume=True, progress=False).summary == run.summary


def test_without_devices_nothing_can_be_fitted() -> None:
    with refused(ConfigError, key="method.density"):
        prepare(Experiment(**SMALL, method=CHANNELS))
    with refused(ConfigError, key="method.density"):
        SiteConfig(method=CHANNELS)
