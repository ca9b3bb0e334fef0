"""Federations of other tasks than the classification of images, from Python to the run directory,
`show` and a report.

Tiny networks and data; what is tested is that each metric has its name, direction and value
everywhere.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from typer.testing import CliRunner

from dispfl import DisPFL, Federation, Local, Metric, RandomRegular, Run, Train
from dispfl.cli import app
from dispfl.errors import ConfigError
from dispfl.report.comparison import compare
from dispfl.report.result_tables import comparison_csv, comparison_table, legend
from dispfl.report.results import read_results
from dispfl.report.summary import summary_sentences

PEERS = 6
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class TaskCase:
    """A task: its network, its data, its loss and its metrics."""

    model: Callable[[], nn.Module]
    data: Callable[[Tensor, torch.Generator], Pair]
    """Inputs and labels from random numbers (samples, 4, 3)."""
    loss: Callable[[Tensor, Tensor], Tensor]
    metric: list[str | Metric]
    higher_is_better: bool
    chance: float
    """The main metric of a model that has learned nothing."""


class LastStep(nn.Module):
    """A GRU over four steps of three numbers, and a linear layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        last: Tensor = self.out(self.gru(x)[0][:, -1])
        return last


class TokenTransformer(nn.Module):
    """One transformer layer over four tokens, with an output for every token: (batch, classes,
    tokens)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 8), nn.Linear(8, 5)
        self.layer = nn.TransformerEncoderLayer(
            8, nhead=2, dim_feedforward=16, dropout=0.0, batch_first=True
        )

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.out(self.layer(self.embed(tokens.long())))
        return outputs.transpose(1, 2)


def worst_error(outputs: Tensor, labels: Tensor) -> float:
    return float((outputs - labels).abs().max())


CASES = {
    "regression": TaskCase(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1)),
        data=lambda x, rng: (x, 3 * x[:, 0, :2].sum(1, keepdim=True)),
        loss=functional.mse_loss,
        metric=["rmse", Metric(worst_error, higher_is_better=False, format=".2f"), "mae"],
        higher_is_better=False,
        chance=3 * 2**0.5,  # the deviation of three times the sum of two standard normal numbers
    ),
    "multi-label": TaskCase(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)),
        data=lambda x, rng: (x, (x[:, 0] > 0).float()),
        loss=functional.binary_cross_entropy_with_logits,
        metric=["multilabel_f1", "multilabel_accuracy"],
        higher_is_better=True,
        chance=0.5,
    ),
    "GRU": TaskCase(
        model=LastStep,
        data=lambda x, rng: (x, (x[:, -1, 0] > 0).long()),
        loss=functional.cross_entropy,
        metric=["accuracy", "macro_f1", "balanced_accuracy"],
        higher_is_better=True,
        chance=0.5,
    ),
    "transformer": TaskCase(
        model=TokenTransformer,
        data=lambda x, rng: (
            (tokens := torch.randint(5, (len(x), 4), generator=rng)).float(),
            tokens,
        ),
        loss=functional.cross_entropy,
        metric=["accuracy"],
        higher_is_better=True,
        chance=0.2,
    ),
}


def run(case: TaskCase, method: DisPFL | Local, out: Path) -> Run:
    peers = []
    for peer in range(PEERS):
        rng = torch.Generator().manual_seed(peer)
        x, y = case.data(torch.randn(60, 4, 3, generator=rng), rng)
        peers.append(((x[:40], y[:40]), (x[40:], y[40:])))
    train = Train(epochs=6, batch_size=10, lr=0.05)
    topology = RandomRegular(degree=2)
    federation = Federation(
        case.model,
        peers,
        method,
        topology,
        loss=case.loss,
        metric=case.metric,
        train=train,
        rounds=3,
    )
    return federation.run(out=out)


@pytest.fixture(scope="module", params=CASES)
def task(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TaskCase, Path, Run]:
    """A finished federation with Dis-PFL, and the folder that also has one without
    communication."""
    folder = tmp_path_factory.mktemp("runs")
    case = CASES[request.param]
    run(case, Local(), folder / "local")
    return case, folder, run(case, DisPFL(density=0.8), folder / "dispfl")


def names(case: TaskCase) -> list[str]:
    return [metric.name if isinstance(metric, Metric) else metric for metric in case.metric]


def test_python_has_every_metric_and_the_models_learn(task: tuple[TaskCase, Path, Run]) -> None:
    case, _, result = task
    assert list(result.scores) == names(case)
    main = result.scores[names(case)[0]]
    assert len(main) == PEERS
    mean = sum(main) / PEERS
    assert mean > case.chance if case.higher_is_better else mean < case.chance
    if "accuracy" in result.scores:
        assert result.accuracy == main
    else:
        with pytest.raises(
            ConfigError, match=f"This run has no accuracy; it has {', '.join(names(case))}: use run"
        ):
            _ = result.accuracy


def test_the_run_directory_has_the_metrics_with_their_directions_and_the_test_loss(
    task: tuple[TaskCase, Path, Run],
) -> None:
    case, folder, result = task
    line = json.loads((folder / "dispfl/metrics.jsonl").read_text().splitlines()[-1])
    summary = json.loads((folder / "dispfl/summary.json").read_text())
    for record in (line, summary):
        assert record["metric"] == names(case)[0]
        assert {
            name: found["per_peer"] for name, found in record["scores"].items()
        } == result.scores
        assert record["scores"][record["metric"]]["higher_is_better"] == case.higher_is_better
        assert record["test_loss"]["mean"] > 0
    assert "accuracy" not in line
    if names(case)[0] == "rmse":  # without weights the mean squared error is the loss
        mse = [value**2 for value in result.scores["rmse"]]
        assert line["test_loss"]["per_peer"] == pytest.approx(mse, rel=1e-5)


def test_show_tables_and_the_report_say_the_metrics_name_and_who_is_better(
    task: tuple[TaskCase, Path, Run],
) -> None:
    case, folder, _ = task
    main = names(case)[0]
    shown = CliRunner().invoke(app, ["show", str(folder)], env={"COLUMNS": "140"}).stdout
    assert main in shown.splitlines()[1]
    assert f"Against Dis-PFL in {main}: Local " in shown
    comparison = compare([({"method": path.name}, path) for path in sorted(folder.iterdir())])
    assert f" {main} " in comparison_table(comparison).markdown().splitlines()[0]
    assert f"{main}_mean," in comparison_csv(comparison)
    assert (
        any("lower is better" in sentence for sentence in legend(comparison))
        != case.higher_is_better
    )
    first, *_ = read_results([folder]).rows
    best = (max if case.higher_is_better else min)(row.score or 0.0 for row in comparison.rows)
    assert first.score == best
    text = " ".join(summary_sentences(read_results([folder])))
    assert main in text
    if main != "accuracy":
        assert "accuracy" not in (shown + text).replace("multilabel_accuracy", "")
