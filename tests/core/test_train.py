"""Local training against a loop with torch's own optimizer, and by hand."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from math import nan
from typing import Any

import pytest
import torch
from messages import refused
from torch import Tensor, nn
from torch.nn import functional

from dispfl.core.flat_module import FlatModule
from dispfl.core.layout import Layout
from dispfl.core.metric import Metric, accuracy
from dispfl.core.optimizers import sgd_step
from dispfl.core.report import Passes, Report
from dispfl.core.rng import stream
from dispfl.core.samples import PeerData
from dispfl.core.task import Task
from dispfl.core.train import Train, Trainer, TrainingRun
from dispfl.data.batches import ResidentSamples
from dispfl.errors import ConfigError, NonFiniteError

Points = Callable[[int, int], tuple[Tensor, Tensor]]
Net = Callable[[], nn.Module]
COUNT = Metric(lambda outputs, labels: len(labels), "count", higher_is_better=True)


@pytest.fixture
def make_trainer(points: Points) -> Callable[..., Trainer]:
    """A trainer of peer 001 in round 3 of 10, with 20 training and 10 test points."""

    def make(module: nn.Module, **changes: Any) -> Trainer:
        data = PeerData(
            changes.pop("train", ResidentSamples(*points(20, 0))),
            changes.pop("test", ResidentSamples(*points(10, 1))),
        )
        run = TrainingRun(
            changes.pop("settings", Train(epochs=2, batch_size=8)),
            changes.pop("task", Task()),
            seed=changes.pop("seed", 5),
            rounds=10,
        )
        network = FlatModule(module)
        buffers = network.read_buffers()
        return Trainer(network, data, run, **{"peer": "001", "t": 3, "buffers": buffers, **changes})

    return make


def half_mask(size: int) -> Tensor:
    """Every other position kept."""
    return torch.arange(size) % 2 == 0


def optimizer_loop(
    module: nn.Module, mask: Tensor, data: ResidentSamples, settings: Train, t: int
) -> Tensor:
    """Algorithm 1, lines 9-13, with torch's own SGD and clipping: the reference."""
    parameters = list(module.parameters())
    masks = Layout.of(module).views(mask)
    optimizer = torch.optim.SGD(
        parameters, lr=settings.lr * 0.998**t, weight_decay=settings.weight_decay
    )
    order = stream(5, "batches", "001", t)
    for _ in range(settings.epochs):
        for x, y in data.batches(settings.batch_size, rng=order):
            optimizer.zero_grad()
            functional.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
            for p, m in zip(parameters, masks, strict=True):
                assert p.grad is not None
                p.grad.mul_(m)
            if settings.clip_norm:
                nn.utils.clip_grad_norm_(parameters, settings.clip_norm)
            optimizer.step()
            with torch.no_grad():
                for p, m in zip(parameters, masks, strict=True):
                    p.mul_(m)
    return torch.cat([p.detach().flatten() for p in parameters])


@pytest.mark.parametrize("clip_norm", [0.05, 10.0, 0.0])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_learning_equals_torchs_sgd_on_the_clipped_masked_gradient(
    make_trainer: Callable[..., Trainer], net: Net, clip_norm: float, weight_decay: float
) -> None:
    module = net()
    mask = half_mask(67)
    weights = FlatModule(deepcopy(module)).read() * mask
    nn.utils.vector_to_parameters(weights.clone(), module.parameters())
    settings = Train(epochs=2, batch_size=8, clip_norm=clip_norm, weight_decay=weight_decay)
    trainer = make_trainer(deepcopy(module), settings=settings)
    learned = trainer.learn(weights, mask)
    assert isinstance(trainer.train, ResidentSamples)
    torch.testing.assert_close(
        learned, optimizer_loop(module, mask, trainer.train, settings, t=3), rtol=1e-5, atol=1e-7
    )
    assert not learned.allclose(weights, atol=1e-4)  # something was learned at all


def test_weights_outside_the_mask_stay_exactly_zero(
    make_trainer: Callable[..., Trainer], net: Net
) -> None:
    mask = half_mask(67)
    learned = make_trainer(net()).learn(torch.ones(67).where(mask, 0.0), mask)
    assert learned[~mask].view(torch.int32).count_nonzero() == 0
    assert learned[mask].count_nonzero() == 34


def test_the_inputs_of_learning_are_not_modified(
    make_trainer: Callable[..., Trainer], net: Net
) -> None:
    weights, mask = torch.ones(67), torch.ones(67, dtype=torch.bool)
    make_trainer(net()).learn(weights, mask)
    assert weights.equal(torch.ones(67))
    assert mask.all()


def one_step(
    make: Callable[..., Trainer], t: int = 0, slope: float = 1.0, **settings: Any
) -> float:
    """How far one step on the loss `slope * w` moves a single weight from 1."""
    trainer = make(
        nn.Linear(1, 1, bias=False),
        train=ResidentSamples(torch.ones(1, 1), torch.zeros(1)),
        settings=Train(
            **{"epochs": 1, "lr": 0.1, "weight_decay": 0.0, "clip_norm": 0.0, **settings}
        ),
        task=Task(loss=lambda outputs, labels: slope * outputs.sum()),
        t=t,
    )
    return float(trainer.learn(torch.ones(1), torch.ones(1, dtype=torch.bool))) - 1.0


def test_the_learning_rate_decays_by_0_998_a_round(make_trainer: Callable[..., Trainer]) -> None:
    assert one_step(make_trainer, t=0) == pytest.approx(-0.1)
    assert one_step(make_trainer, t=1) == pytest.approx(-0.0998)
    assert one_step(make_trainer, t=500) == pytest.approx(-0.1 * 0.998**500, rel=1e-4)
    assert Train().rate(500, 1000) == pytest.approx(0.1 * 0.998**500)


def test_a_gradient_of_100_is_clipped_to_10_and_with_clip_norm_0_it_is_not(
    make_trainer: Callable[..., Trainer],
) -> None:
    assert one_step(make_trainer, slope=100.0, clip_norm=10.0) == pytest.approx(-1.0)
    assert one_step(make_trainer, slope=100.0, clip_norm=0.0) == pytest.approx(-10.0)
    assert one_step(make_trainer, slope=9.0, clip_norm=10.0) == pytest.approx(-0.9)


def test_weight_decay_is_added_after_clipping(make_trainer: Callable[..., Trainer]) -> None:
    # The gradient 100 is clipped to 1; then 0.5 * w is added: 0.1 * (1 + 0.5).
    assert one_step(make_trainer, slope=100.0, clip_norm=1.0, weight_decay=0.5) == pytest.approx(
        -0.15
    )


def test_only_the_masked_gradient_is_clipped(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer(
        nn.Linear(2, 1, bias=False),
        train=ResidentSamples(torch.tensor([[3.0, 400.0]]), torch.zeros(1)),
        settings=Train(epochs=1, lr=0.1, weight_decay=0, clip_norm=10),
        task=Task(loss=lambda outputs, labels: outputs.sum()),
        t=0,
    )
    # The gradient is (3, 400); under the mask (3, 0), whose norm is below 10.
    learned = trainer.learn(torch.tensor([1.0, 0.0]), torch.tensor([True, False]))
    assert learned.tolist() == pytest.approx([0.7, 0.0])


def test_the_reported_loss_is_the_mean_over_steps(make_trainer: Callable[..., Trainer]) -> None:
    # w goes 1, 0.9, 0.8: the losses before each of the three steps.
    trainer = make_trainer(
        nn.Linear(1, 1, bias=False),
        train=ResidentSamples(torch.ones(1, 1), torch.zeros(1)),
        settings=Train(epochs=3, lr=0.1, weight_decay=0, clip_norm=0),
        task=Task(loss=lambda outputs, labels: outputs.sum()),
        t=0,
    )
    trainer.learn(torch.ones(1), torch.ones(1, dtype=torch.bool))
    assert trainer.report.train_loss == pytest.approx(0.9)


def test_a_nan_loss_names_peer_and_round(make_trainer: Callable[..., Trainer], net: Net) -> None:
    trainer = make_trainer(net(), task=Task(loss=lambda outputs, labels: outputs.sum() * nan))
    with refused(NonFiniteError):
        trainer.learn(torch.ones(67), torch.ones(67, dtype=torch.bool))
    assert trainer.report.train_loss is None


def test_a_nan_gradient_in_the_mask_search_names_peer_and_round(
    make_trainer: Callable[..., Trainer], net: Net
) -> None:
    trainer = make_trainer(net(), task=Task(loss=lambda outputs, labels: outputs.sum() * nan))
    with refused(NonFiniteError):
        trainer.gradient(torch.ones(67))


def test_the_gradient_is_dense_and_that_of_one_batch(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer(
        nn.Linear(2, 1, bias=False),
        train=ResidentSamples(torch.tensor([[3.0, 4.0]]), torch.zeros(1)),
        task=Task(loss=lambda outputs, labels: outputs.sum()),
    )
    assert trainer.gradient(torch.tensor([1.0, 0.0])).tolist() == [3.0, 4.0]


def test_learning_moves_the_peers_buffers_and_the_mask_search_does_not(
    make_trainer: Callable[..., Trainer],
) -> None:
    trainer = make_trainer(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)))
    weights = trainer.network.read()
    trainer.learn(weights, torch.ones(weights.numel(), dtype=torch.bool))
    assert trainer.buffers["0.num_batches_tracked"] == 6  # 2 epochs of 3 batches
    trainer.gradient(weights)
    assert trainer.buffers["0.num_batches_tracked"] == 6


def test_frozen_parameters_are_unchanged_by_training(make_trainer: Callable[..., Trainer]) -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    before = deepcopy(frozen.state_dict())
    trainer = make_trainer(nn.Sequential(frozen, nn.Linear(4, 3)))
    learned = trainer.learn(trainer.network.read(), torch.ones(15, dtype=torch.bool))
    assert learned.numel() == 4 * 3 + 3
    assert all(before[name].equal(tensor) for name, tensor in frozen.state_dict().items())


def test_a_score_is_computed_over_all_test_samples_for_any_number_of_batches(
    make_trainer: Callable[..., Trainer],
) -> None:
    test = ResidentSamples(torch.zeros(1203, 4), torch.zeros(1203))
    trainer = make_trainer(nn.Linear(4, 3), test=test, task=Task(metrics=(COUNT,)))
    assert trainer.score(trainer.network.read()) == 1203


def test_the_mixed_model_is_evaluated_only_in_rounds_with_evaluation(
    make_trainer: Callable[..., Trainer],
) -> None:
    for evaluate in (True, False):
        trainer = make_trainer(nn.Linear(4, 3), evaluate=evaluate)
        trainer.observe_mixed(trainer.network.read())
        assert (trainer.report.mixed is not None) == evaluate


def test_accuracy_is_the_share_of_largest_outputs_that_are_the_label() -> None:
    outputs = torch.tensor([[1.0, 2.0], [2.0, 1.0], [0.0, 3.0], [5.0, 0.0]])
    assert accuracy(outputs, torch.tensor([1, 0, 1, 1])) == 0.75


def test_an_exception_before_a_batch_stops_learning(make_trainer: Callable[..., Trainer]) -> None:
    beats = []

    def before_batch() -> None:
        beats.append(1)
        if len(beats) == 2:
            raise InterruptedError

    trainer = make_trainer(nn.Linear(4, 3), before_batch=before_batch)
    with pytest.raises(InterruptedError):
        trainer.learn(trainer.network.read(), torch.ones(15, dtype=torch.bool))
    assert len(beats) == 2


ONE = torch.ones(1, dtype=torch.bool)


def sloped(make: Callable[..., Trainer], samples: int = 1, **settings: Any) -> Trainer:
    """One weight w, the loss w on every batch of one sample, and a learning rate of 0.1 in
    round 0."""
    return make(
        nn.Linear(1, 1, bias=False),
        train=ResidentSamples(torch.ones(samples, 1), torch.zeros(samples)),
        settings=Train(
            **{
                "epochs": 1,
                "batch_size": 1,
                "lr": 0.1,
                "weight_decay": 0.0,
                "clip_norm": 0.0,
                **settings,
            }
        ),
        task=Task(loss=lambda outputs, labels: outputs.sum()),
        t=0,
    )


def test_a_proximal_term_of_a_half_adds_half_the_distance_to_the_gradient(
    make_trainer: Callable[..., Trainer],
) -> None:
    learned = sloped(make_trainer).learn(torch.tensor([5.0]), ONE, prox=(0.5, torch.tensor([1.0])))
    assert learned.tolist() == pytest.approx([5 - 0.1 * (1 + 0.5 * 4)])


def test_the_proximal_term_comes_after_clipping_and_beside_weight_decay(
    make_trainer: Callable[..., Trainer],
) -> None:
    trainer = sloped(make_trainer, clip_norm=0.25, weight_decay=0.2)
    learned = trainer.learn(torch.tensor([5.0]), ONE, prox=(0.5, torch.tensor([1.0])))
    assert learned.tolist() == pytest.approx([5 - 0.1 * (0.25 + 0.2 * 5 + 0.5 * 4)])


def test_a_correction_is_added_to_every_gradient_after_clipping(
    make_trainer: Callable[..., Trainer],
) -> None:
    correction = torch.tensor([2.0])
    trainer = sloped(make_trainer, samples=3, clip_norm=0.25)
    learned = trainer.learn(torch.tensor([5.0]), ONE, correction=correction)
    assert learned.tolist() == pytest.approx([5 - 3 * 0.1 * (0.25 + 2)])
    with_momentum = sloped(make_trainer, samples=2, momentum=0.5)
    learned = with_momentum.learn(torch.tensor([5.0]), ONE, correction=correction)
    assert learned.tolist() == pytest.approx([5 - 0.1 * (1 + 2) - 0.1 * 1.5 * (1 + 2)])
    assert correction.tolist() == [2.0]


def test_masked_weights_are_not_corrected(make_trainer: Callable[..., Trainer], net: Net) -> None:
    mask = torch.arange(67) % 2 == 0
    for settings in (Train(epochs=1), Train(epochs=1, noise_std=0.1), Train(optimizer="adam")):
        trainer = make_trainer(net(), settings=settings)
        learned = trainer.learn(torch.where(mask, 1.0, 0.0), mask, correction=torch.ones(67))
        assert not learned[~mask].any()
        assert learned[mask].all()


def test_a_proximal_term_of_0_equals_none_bit_for_bit_and_keeps_the_anchor(
    make_trainer: Callable[..., Trainer], net: Net
) -> None:
    weights, mask, anchor = torch.ones(67), torch.ones(67, dtype=torch.bool), torch.full((67,), 3.0)
    module = net()
    plain, pulled = (
        make_trainer(deepcopy(module)).learn(weights, mask, prox=prox)
        for prox in (None, (0.0, anchor))
    )
    assert pulled.equal(plain)
    assert anchor.equal(torch.full((67,), 3.0))


def test_an_sgd_step_by_hand() -> None:
    weights, grad = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([3.0, 4.0, 100.0])
    bits = torch.tensor([-1, -1, 0], dtype=torch.int32)  # the third is not kept
    sgd_step(weights, grad, bits, 0.1, 0.0, 1.0, (0.5, torch.tensor([0.0, 4.0, 0.0])))
    # The gradient (3, 4) is clipped to (0.6, 0.8); the pull adds 0.5 * (1, -2).
    assert weights.tolist() == pytest.approx([1 - 0.1 * (0.6 + 0.5), 2 - 0.1 * (0.8 - 1.0), 0.0])


def test_a_given_learning_rate_replaces_the_rounds_own(
    make_trainer: Callable[..., Trainer],
) -> None:
    assert sloped(make_trainer).learn(torch.ones(1), ONE, lr=0.5).tolist() == pytest.approx([0.5])
    assert sloped(make_trainer).learn(torch.ones(1), ONE).tolist() == pytest.approx([0.9])


def test_given_epochs_and_samples_replace_the_settings(
    make_trainer: Callable[..., Trainer],
) -> None:
    trainer = sloped(make_trainer, samples=4)
    assert trainer.learn(torch.ones(1), ONE).tolist() == pytest.approx([1 - 4 * 0.1])
    assert trainer.learn(torch.ones(1), ONE, 3).tolist() == pytest.approx([1 - 12 * 0.1])
    some = trainer.train.take(torch.tensor([0, 2]))
    assert trainer.learn(torch.ones(1), ONE, 3, samples=some).tolist() == pytest.approx(
        [1 - 6 * 0.1]
    )
    assert trainer.report.passes == [(4, [1], None), (12, [1], None), (6, [1], None)]


def test_two_trainings_of_a_round_see_their_batches_in_different_orders(
    make_trainer: Callable[..., Trainer],
) -> None:
    seen: list[float] = []

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        seen.append(float(labels))
        return outputs.sum() * 0

    train = ResidentSamples(torch.ones(20, 1), torch.arange(20.0))
    settings = Train(epochs=1, batch_size=1)
    trainer = make_trainer(
        nn.Linear(1, 1, bias=False), train=train, settings=settings, task=Task(loss=loss)
    )
    for _ in range(2):
        trainer.learn(torch.ones(1), ONE)
    assert sorted(seen[:20]) == sorted(seen[20:]) == list(range(20))
    assert seen[:20] != seen[20:]


def test_the_mask_search_passes_one_batch_through_a_dense_model(
    make_trainer: Callable[..., Trainer], net: Net
) -> None:
    trainer, mask = make_trainer(net()), half_mask(67)
    learned = trainer.learn(torch.ones(67).where(mask, 0.0), mask)
    trainer.gradient(learned)
    assert trainer.report.passes == [(40, [16, 4, 12, 2], None), (8, [32, 8, 24, 3], None)]


def test_a_report_restored_from_json_is_equal() -> None:
    assert Report(passes=[[20, [1, 2], None]]) == Report(  # type: ignore[list-item]
        passes=[Passes(20, [1, 2])]
    )


def test_a_score_or_a_loss_on_other_samples_changes_nothing(
    make_trainer: Callable[..., Trainer],
) -> None:
    task = Task(
        loss=lambda outputs, labels: (outputs.squeeze(1) - labels).square().mean(),
        metrics=(COUNT,),
    )
    samples = ResidentSamples(torch.ones(2, 1), torch.tensor([1.0, 5.0]))
    trainer = make_trainer(nn.Linear(1, 1, bias=False), test=samples, task=task)
    assert trainer.score(torch.tensor([2.0])) == 2
    assert trainer.score(torch.tensor([2.0]), samples.take(torch.tensor([0]))) == 1
    assert trainer.loss(torch.tensor([2.0]), samples) == (1 + 9) / 2
    assert trainer.network.read().tolist() == [2.0]
    assert [passes.samples for passes in trainer.report.scored] == [2, 1, 2]
    assert replace(trainer.report, scored=[]) == Report()


def test_a_lasting_stream_is_the_same_in_every_round_and_differs_between_peers(
    make_trainer: Callable[..., Trainer],
) -> None:
    def drawn(purpose: str, **who: Any) -> list[int]:
        rng = make_trainer(nn.Linear(4, 3), **who).peer_stream(purpose)
        return torch.randperm(20, generator=rng).tolist()

    first = drawn("validation", t=0)
    assert drawn("validation", t=7) == first
    assert drawn("validation", t=0, peer="002") != first
    assert drawn("something else", t=0) != first


@pytest.mark.parametrize(
    "wrong", [{"lr": 0}, {"epochs": 0}, {"batch_size": 0}, {"lr_decay": 1.1}, {"clip_norm": -1}]
)
def test_invalid_settings_are_refused_by_name(wrong: dict[str, Any]) -> None:
    [(name, value)] = wrong.items()
    with pytest.raises(ConfigError, match=rf"train\.{name} must be .*, got {value}"):
        Train(**wrong)
