"""Estimated hours of experiments, and their differences from the paper's."""

import time
from pathlib import Path

import pytest
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from dispfl.config import compose
from dispfl.experiment import Experiment
from dispfl.models.networks import SmallCNN
from dispfl.paper.experiments import Scale, find_experiment
from dispfl.paper.workload import (
    dense_flops,
    differences,
    remaining_hours,
    samples_evaluated,
    samples_trained,
    seconds_per_sample,
)
from dispfl.runs.directory import RunDirectory
from dispfl.runs.grid import GridRun


def samples(*overrides: str) -> float:
    """Count the samples of two rounds of 20 peers with 96 samples, 100 test samples and 5
    epochs."""
    return samples_trained(compose({}, ["peers=20", "rounds=2", "topology.degree=4", *overrides]))


def test_the_samples_of_a_run_agree_with_hand_counts() -> None:
    evals = 2 * 20 * 100 / 3
    assert samples("method=local") == pytest.approx(2 * 20 * 5 * 96 + evals)
    assert samples("method=fedavg", "method.cohort=4") == pytest.approx(2 * 4 * 5 * 96 + evals)
    assert samples("method=fedavg", "method.cohort=40") == samples("method=local")
    assert samples("method=ditto", "method.cohort=4", "method.global_epochs=1") == pytest.approx(
        2 * 4 * 4 * 96 + evals
    )
    assert samples("method=dispfl") == pytest.approx(
        2 * 20 * (5 * 96 + 32) + 2 * evals
    )  # also evaluated after mixing
    assert samples("method=dispfl", "method.regrow=random") == pytest.approx(
        2 * 20 * 5 * 96 + 2 * evals
    )
    assert samples("method=dpsgd-ft") == pytest.approx(
        2 * 20 * 5 * 96 + 20 * 5 * 96 + evals / 2
    )  # once, at the end
    assert samples("method=local", "partition.samples_per_peer=all") == pytest.approx(
        2 * 20 * 5 * 200 + evals
    )  # 4,000 / 20


def test_half_a_run_takes_half_the_hours_and_a_finished_one_takes_none(tmp_path: Path) -> None:
    tiny = ["peers=2", "rounds=4", "topology.degree=1", "train.batch_size=4", "workers=1"]
    cells = {}
    for name in ("local", "dpsgd", "fedavg"):
        experiment = compose({}, [*tiny, f"method={name}"])
        cells[name] = GridRun({"method": name}, experiment, tmp_path / name)
    for name, rounds in (("dpsgd", 2), ("fedavg", 4)):
        directory = RunDirectory.create(tmp_path / name, cells[name].experiment.to_toml())
        for t in range(rounds):
            directory.append({"round": t})
        if rounds == 4:
            directory.write_summary({"rounds": 4})
        directory.close()
    local, half = remaining_hours(cells.values())
    assert (local.method, local.runs, half.method, half.runs) == ("local", 1, "dpsgd", 1)
    assert half.hours == pytest.approx(local.hours / 2)
    assert local.hours > 0


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (
            0.001,
            (0.05 + 15 * 0.001) / 480,
        ),  # a peer's round of 15 batches is quick, and measured whole
        (1.0, (0.05 + 1.0) / 32),  # one batch
    ],
)
def test_fixed_costs_of_a_step_count_as_often_as_in_a_run(
    batch: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that passes 0.05 s between two looks, and `batch` seconds in every batch of 32."""
    now = 0.0

    def pass_batch(module: nn.Module, inputs: object) -> None:
        nonlocal now
        now += batch * isinstance(module, SmallCNN)

    def look() -> float:
        nonlocal now
        now += 0.05
        return now

    monkeypatch.setattr(time, "perf_counter", look)
    hook = register_module_forward_pre_hook(pass_batch)
    try:
        found = seconds_per_sample(compose({}, ["workers=1"]))
    finally:
        hook.remove()
    assert found == pytest.approx(expected)


def test_of_two_runs_with_one_training_the_second_is_only_evaluated(tmp_path: Path) -> None:
    """FedAvg-FT evaluates once: 20 peers x 5 epochs x 96 samples, and 100 test samples each at a
    third."""
    experiments = [
        compose({}, ["peers=20", "rounds=2", f"method={name}"]) for name in ("fedavg", "fedavg-ft")
    ]
    one, other = (
        GridRun({}, experiment, tmp_path / experiment.method.name) for experiment in experiments
    )
    assert samples_evaluated(experiments[1]) == pytest.approx(20 * 5 * 96 + 20 * 100 / 3)
    per_sample = dense_flops([one]) / samples_trained(experiments[0])
    assert dense_flops([one, other]) - dense_flops([one]) == pytest.approx(
        per_sample * samples_evaluated(experiments[1])
    )


def test_differences_from_the_paper_are_listed_in_one_line() -> None:
    def experiments(name: str, scale: Scale, *overrides: str) -> list[Experiment]:
        return [
            run.cell.experiment
            for run in find_experiment(name, scale).runs(Path("out"), overrides=overrides)
        ]

    def line(name: str, scale: Scale, *overrides: str) -> str:
        return differences(experiments(name, scale, *overrides), experiments(name, "paper"))

    assert (
        line("sparsity", "laptop")
        == "Not the paper's experiment: fashion-sample instead of cifar10; cnn instead of"
        " resnet18; "
        "20 instead of 100 peers; 4 instead of 10 neighbours; 20 instead of 500 rounds; "
        "96 instead of 500 samples per peer; 32 instead of 128 samples per batch."
    )
    assert "2 or 4 instead of 2, 10 or 20 classes per peer" in line("main", "laptop")
    assert line("sparsity", "paper") == ""
    assert (
        line("sparsity", "paper", "rounds=5")
        == "Not the paper's experiment: 5 instead of 500 rounds."
    )
