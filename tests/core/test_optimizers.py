"""Optimizers, schedules and steps of local training, on flat vectors and under masks."""

from collections.abc import Callable
from math import cos, pi
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refused
from torch import Tensor, nn
from torch.nn import functional

from dispfl import Federation, Train
from dispfl.channels.channel_mask import ChannelMask
from dispfl.channels.kept_units import random_units
from dispfl.config import compose
from dispfl.core.layout import Layout
from dispfl.core.optimizers import Moments, as_parameter
from dispfl.core.packed import WeightMask
from dispfl.core.train import Trainer
from dispfl.errors import ConfigError
from dispfl.methods.base import GossipMethod, Method, PeerState, initial_state
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.ditto import Ditto
from dispfl.methods.fedavg import FedAvg
from dispfl.methods.local import Local
from dispfl.methods.subfedavg import SubFedAvg
from dispfl.round.context import RunContext
from dispfl.topology import Full

MakeContext = Callable[..., RunContext]
MakeTrainer = Callable[..., Trainer]
OPTIMIZERS: list[dict[str, Any]] = [
    {"optimizer": "sgd", "momentum": 0.9},
    {"optimizer": "sgd", "momentum": 0.9, "nesterov": True},
    {"optimizer": "adam", "lr": 0.01},
    {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.99)},
]


def of_torch(settings: Train, module: nn.Module) -> torch.optim.Optimizer:
    parameters, s = module.parameters(), settings
    match s.optimizer:
        case "sgd":
            return torch.optim.SGD(
                parameters, s.lr, s.momentum, weight_decay=s.weight_decay, nesterov=s.nesterov
            )
        case "adam":
            return torch.optim.Adam(parameters, s.lr, s.betas, s.eps, s.weight_decay)
        case "adamw":
            return torch.optim.AdamW(parameters, s.lr, s.betas, s.eps, s.weight_decay)


@pytest.mark.parametrize("settings", OPTIMIZERS)
def test_dense_training_is_that_of_torchs_optimizer_on_the_module(
    settings: dict[str, Any], make_context: MakeContext, trainer_for: MakeTrainer
) -> None:
    context = make_context(train=Train(epochs=2, batch_size=8, clip_norm=0.5, **settings))
    trainer, reference = trainer_for(context), context.module()
    start = trainer.network.read()
    learned = trainer.learn(start, torch.ones_like(start, dtype=torch.bool))
    optimizer, rng = of_torch(context.settings.train, reference), trainer_for(context).batch_rng
    for _ in range(2):
        for x, y in trainer.train.batches(8, rng=rng):
            optimizer.zero_grad()
            functional.cross_entropy(reference(x), y).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            optimizer.step()
    expected = torch.cat([parameter.detach().flatten() for parameter in reference.parameters()])
    assert not learned.equal(start)
    torch.testing.assert_close(learned, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("settings", OPTIMIZERS)
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_masked_weights_and_their_moments_stay_zero(
    settings: dict[str, Any], noise: float, make_context: MakeContext, trainer_for: MakeTrainer
) -> None:
    trainer = trainer_for(
        make_context(train=Train(epochs=2, batch_size=8, noise_std=noise, **settings))
    )
    start = trainer.network.read()
    mask = torch.arange(start.numel()) % 3 > 0
    learned = trainer.learn(torch.where(mask, start, 0.0), mask, prox=(0.1, start))
    assert not learned[~mask].any()
    assert learned[mask].all()
    moments = trainer.moments["model"]
    for values in moments.values.values():
        assert values.dim() == 0 or len(values) == int(mask.sum())


def test_a_regrown_weight_begins_with_zero_moments_and_a_kept_one_goes_on() -> None:
    """Of four weights, the old mask keeps 0, 1 and 3, the new one 1, 2 and 3."""
    weights, grad = torch.ones(4), torch.tensor([1.0, 2.0, 0.0, 4.0])
    old, new = (
        WeightMask.pack(torch.tensor(flags))
        for flags in ([True, True, False, True], [False, True, True, True])
    )
    flat = as_parameter(weights, grad)
    optimizer = torch.optim.Adam([flat], lr=0.1, betas=(0.5, 0.75))
    optimizer.step()
    kept = Moments.of(optimizer, flat, old, keep=True)
    assert kept is not None
    assert kept.values["exp_avg"].tolist() == [0.5, 1.0, 2.0]
    assert kept.values["exp_avg_sq"].tolist() == [0.25, 1.0, 4.0]
    other_flat = as_parameter(torch.ones(4), torch.zeros(4))
    other = torch.optim.Adam([other_flat], lr=0.1, betas=(0.5, 0.75))
    kept.restore(other, other_flat, new)
    assert other.state[other_flat]["exp_avg"].tolist() == [0.0, 1.0, 0.0, 2.0]
    assert other.state[other_flat]["exp_avg_sq"].tolist() == [0.0, 1.0, 0.0, 4.0]
    assert float(other.state[other_flat]["step"]) == 1.0


def test_moments_follow_the_units_of_a_small_network(make_context: MakeContext) -> None:
    """The moments of what both masks hold are kept; those of other units are zero."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    context = make_context(model=model, method=DisPFL(structure="channels"))
    layout = context.layout
    masks = [random_units(layout, [4], rng=torch.Generator().manual_seed(k)) for k in (0, 1)]  # type: ignore[arg-type]
    old, new = masks
    assert isinstance(old, ChannelMask)
    assert 0 < old.overlap(new) < old.kept
    whole = torch.arange(1.0, layout.size + 1)
    values = whole[old.unpack()]
    flat = as_parameter(torch.zeros(new.kept), torch.zeros(new.kept))
    optimizer = torch.optim.SGD([flat], 0.1, 0.9)
    Moments(old, {"momentum_buffer": values}).restore(optimizer, flat, new)
    expected = torch.where(old.unpack(), whole, 0.0)[new.unpack()]
    assert optimizer.state[flat]["momentum_buffer"].equal(expected)


def test_moments_are_forgotten_after_a_round_unless_they_are_kept(
    make_context: MakeContext, run_all: Callable[..., list[Any]]
) -> None:
    def last_state(**more: Any) -> PeerState:
        train = Train(epochs=1, batch_size=8, optimizer="sgd", momentum=0.9, **more)
        context = make_context(train=train, method=DisPFL(density=0.5))
        state: PeerState = run_all(context)[-1].states["000"]
        return state

    forgotten, kept = last_state(), last_state(keep_moments=True)
    assert not forgotten.moments
    assert kept.moments["model"].mask.bits.equal(kept.model.mask.bits)
    assert len(kept.moments["model"].values["momentum_buffer"]) == kept.model.mask.kept
    assert not forgotten.model.values.equal(kept.model.values)


STOPPED = 1


STOPPED_METHODS = {
    "dispfl": DisPFL(),
    "channels": DisPFL(structure="channels"),
    "ditto": Ditto(cohort=2),
    "fedavg": FedAvg(cohort=2),
    "subfedavg": SubFedAvg(cohort=2),
}
MOMENTUM, ADAM, OWN = OPTIMIZERS[0], OPTIMIZERS[2], {"optimizer": "own"}
STOPPED_CASES = [
    *(("dispfl", settings, True) for settings in [*OPTIMIZERS, OWN]),
    *(("channels", settings, True) for settings in (MOMENTUM, ADAM, OWN)),
    *((name, ADAM, True) for name in ("ditto", "fedavg", "subfedavg")),
    *((name, MOMENTUM, False) for name in STOPPED_METHODS),
]
"""Every optimizer under masks, those with one, two and unknown moments under channels, and every
method with and without moments that are kept."""


@pytest.mark.parametrize(("name", "settings", "keep"), STOPPED_CASES)
def test_a_stopped_run_resumes_to_the_bit_with_every_optimizer(
    name: str, settings: dict[str, Any], keep: bool, points: Callable[..., Any], tmp_path: Path
) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))

    def stop(run: Any) -> None:
        if run.metrics[-1]["round"] == STOPPED:
            raise KeyboardInterrupt

    own = settings["optimizer"] == "own"
    train = Train(epochs=2, batch_size=8, keep_moments=keep, **({} if own else settings))
    peers = [(points(20, k), points(10, 100 + k)) for k in range(3)]
    method = STOPPED_METHODS[name]
    optimizer = rmsprop if own else None
    federation = Federation(
        model, peers, method, Full(), train=train, optimizer=optimizer, workers=1, rounds=4
    )
    whole = federation.run()
    with pytest.raises(KeyboardInterrupt):
        federation.run(out=tmp_path / "run", callbacks=[stop])
    resumed = federation.run(out=tmp_path / "run", resume=True)
    for peer, state in whole.states.items():
        assert resumed.states[peer].model.values.equal(state.model.values)
        assert resumed.states[peer].moments.keys() == state.moments.keys()
        assert bool(state.moments) == (keep and peer != "server")


def rmsprop(weights: Tensor, layout: Layout) -> torch.optim.Optimizer:
    return torch.optim.RMSprop([weights], lr=0.01, momentum=0.5)


def test_an_own_optimizers_learning_rate_follows_the_schedule(
    make_context: MakeContext, trainer_for: MakeTrainer
) -> None:
    made: list[torch.optim.Optimizer] = []

    def own(weights: Tensor, layout: Layout) -> torch.optim.Optimizer:
        assert layout.size == weights.numel()
        made.append(torch.optim.SGD([weights], lr=0.4))
        return made[-1]

    train = Train(epochs=1, schedule="step", lr_step=2, lr_decay=0.5)
    trainer = trainer_for(make_context(train=train, optimizer=own), t=3)
    start = trainer.network.read()
    trainer.learn(start, torch.ones_like(start, dtype=torch.bool))
    assert made[0].param_groups[0]["lr"] == pytest.approx(0.2)


@pytest.mark.parametrize("keep", [False, True])
def test_an_own_optimizers_state_of_another_shape_is_refused_only_where_it_is_to_be_kept(
    make_context: MakeContext, trainer_for: MakeTrainer, keep: bool
) -> None:
    class Histories(torch.optim.SGD):
        """Keeps the last two gradients of every weight."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            (weights,) = self.param_groups[0]["params"]
            self.state[weights]["history"] = torch.zeros(2, len(weights))

    train = Train(epochs=1, keep_moments=keep)
    trainer = trainer_for(
        make_context(train=train, optimizer=lambda weights, layout: Histories([weights], lr=0.1))
    )
    start = trainer.network.read()
    ones = torch.ones_like(start, dtype=torch.bool)
    if keep:
        with refused(ConfigError, key="train.keep_moments"):
            trainer.learn(start, ones)
    else:
        assert not trainer.learn(trainer.learn(start, ones), ones).equal(start)


def test_what_is_no_optimizer_of_the_weights_is_refused(
    make_context: MakeContext, trainer_for: MakeTrainer
) -> None:
    trainer = trainer_for(make_context(optimizer=lambda weights, layout: None))
    start = trainer.network.read()
    ones = torch.ones_like(start, dtype=torch.bool)
    with refused(ConfigError, key="optimizer"):
        trainer.learn(start, ones)
    other = torch.zeros(3, requires_grad=True)
    trainer = trainer_for(make_context(optimizer=lambda weights, layout: torch.optim.SGD([other])))
    with refused(ConfigError, key="optimizer"):
        trainer.learn(start, ones)


def test_schedules_by_hand() -> None:
    def rates(**settings: Any) -> list[float]:
        return [Train(lr=0.8, **settings).rate(t, 8) for t in range(8)]

    assert rates(schedule="constant") == [0.8] * 8
    assert rates(lr_decay=0.5)[:3] == [0.8, 0.4, 0.2]
    assert rates(schedule="step", lr_decay=0.5, lr_step=3) == [
        0.8,
        0.8,
        0.8,
        0.4,
        0.4,
        0.4,
        0.2,
        0.2,
    ]
    cosine = rates(schedule="cosine")
    assert cosine[0] == 0.8
    assert cosine[4] == pytest.approx(0.4)
    assert cosine[7] == pytest.approx(0.4 * (1 + cos(pi * 7 / 8)))
    assert rates(schedule="constant", warmup=3) == pytest.approx([0.2, 0.4, 0.6, *[0.8] * 5])
    assert rates(schedule="cosine", warmup=4)[4:] == pytest.approx(
        [0.4 * (1 + cos(pi * k / 4)) for k in range(4)]
    )


def test_adam_has_a_learning_rate_of_its_own() -> None:
    assert Train(optimizer="adam").lr == Train(optimizer="adamw").lr == 0.001
    assert Train(optimizer="adam", lr=0.1).lr == Train().lr == 0.1
    assert compose({}, ["train.optimizer=adam"]).train == Train(optimizer="adam", batch_size=32)
    assert compose({}, ["train.optimizer=adam", "train.lr=0.1"]).train.lr == 0.1


def test_steps_replace_epochs(make_context: MakeContext, trainer_for: MakeTrainer) -> None:
    """20 samples in batches of 8 are 3 batches; 7 steps pass 20 + 20 + 8 samples. 6 steps are two
    epochs."""

    def learned(**settings: Any) -> tuple[Tensor, int]:
        trainer = trainer_for(make_context(train=Train(batch_size=8, **settings)))
        start = trainer.network.read()
        after = trainer.learn(start, torch.ones_like(start, dtype=torch.bool))
        [(samples, _, _)] = trainer.report.passes
        assert samples == trainer.settings.samples_trained(20)
        return after, samples

    assert learned(steps=6)[0].equal(learned(epochs=2)[0])
    assert learned(steps=7)[1] == 48
    assert learned(steps=1)[1] == 8
    assert not learned(steps=1)[0].equal(learned(epochs=1)[0])


def test_ditto_divides_steps_as_its_epochs_and_subfedavg_counts_its_first_epoch(
    make_context: MakeContext, run_all: Callable[..., list[Any]]
) -> None:
    """Two of five parts of 5 steps are 2, the others 3; SubFedAvg's first epoch has 3 of 5
    steps."""
    train = Train(steps=5, batch_size=8)
    for method, expected in (
        (Ditto(cohort=10), [8 + 8, 8 + 8 + 4]),
        (SubFedAvg(cohort=10), [20, 16]),
    ):
        finished = run_all(make_context(method=method, train=train, rounds=1))[0]
        assert [passes.samples for passes in finished.results["000"].report.passes] == expected


class OwnLoop(GossipMethod):
    """Trains by sign of the gradient, with the trainer's public names alone."""

    communicates = False

    def step(self, trainer: Trainer, state: PeerState, received: Any) -> PeerState:
        weights, mask = state.model.unpack()
        trainer.begin(weights, mask)
        losses = []
        for x, y in trainer.batches():
            losses.append(trainer.backward(x, y))
            trainer.network.weights.sub_(trainer.network.grad.sign(), alpha=0.01)
        return initial_state(trainer.end(torch.stack(losses).mean()), mask)


def test_a_method_with_its_own_loop_is_charged_for_what_it_trains(
    points: Callable[..., Any],
) -> None:
    def run(method: Method) -> Any:
        peers = [(points(20, k), points(10, 100 + k)) for k in range(2)]
        train = Train(epochs=3, batch_size=8)
        return (
            Federation(lambda: nn.Linear(4, 3), peers, method, train=train, rounds=1)
            .run()
            .metrics[0]
        )

    own, local = run(OwnLoop()), run(Local())
    assert own["flops_total"] == local["flops_total"]
    assert own["flops_total"] > 0
    assert own["train_loss"] is not None


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"optimizer": "lion"},
            r"^train\.optimizer must be 'sgd', 'adam' or 'adamw', got 'lion'\.$",
        ),
        (
            {"optimizer": "adam", "momentum": 0.9},
            r"^train\.momentum is 0\.9, which adam does not use; use train\.betas\.$",
        ),
        (
            {"nesterov": True},
            r"^train\.nesterov needs a momentum: give train\.momentum too, for example 0\.9\.$",
        ),
        ({"steps": 0}, r"^train\.steps must be at least 1, got 0\.$"),
        ({"momentum": 1.0}, r"^train\.momentum must be in \[0, 1\), got 1\.0\.$"),
        (
            {"schedule": "linear"},
            r"^train\.schedule must be 'constant', 'exponential', 'cosine' or 'step', got 'linear'",
        ),
        ({"betas": (0.9, 1.5)}, r"^train\.betas.*1\.5"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_a_sentence(
    settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Train(**settings)
