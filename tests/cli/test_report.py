"""`dispfl report`, on real runs of tiny peers."""

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import typer
from torch import Tensor, nn
from typer.testing import CliRunner

from dispfl import DisPFL, Federation, Ring, Train
from dispfl.cli.run import report
from dispfl.errors import RunError
from dispfl.methods.base import Method
from dispfl.methods.fedavg import FedAvg
from dispfl.methods.local import Local
from dispfl.report.wording import format_seconds
from dispfl.runs.directory import RunDirectory, read_summary

app = typer.Typer()
app.command()(report)
Points = Callable[[int, int], tuple[Tensor, Tensor]]


@pytest.fixture
def run(
    tmp_path: Path, points: Points, net: Callable[[], nn.Module]
) -> Callable[[Method, int], Path]:
    """`run(method, seed)`: a finished run of four peers and two rounds, where `compare` would put
    it."""

    def make(method: Method, seed: int) -> Path:
        path = tmp_path / "out" / method.name / f"seed-{seed}"
        data = [(points(20, k), points(10, 1000 + k)) for k in range(4)]
        federation = Federation(
            net,
            data,
            method,
            Ring(),
            train=Train(epochs=1, batch_size=8),
            seed=seed,
            workers=1,
            rounds=2,
        )
        federation.run(out=path)
        return path

    return make


def test_a_folder_of_runs_becomes_one_page_with_the_numbers_of_the_summaries(
    run: Callable[[Method, int], Path], tmp_path: Path
) -> None:
    paths = [run(method, 0) for method in (DisPFL(), Local(), FedAvg(cohort=2))]
    out = tmp_path / "page.html"
    result = CliRunner().invoke(app, [str(tmp_path / "out"), "-o", str(out)])
    assert result.exit_code == 0, result.exception
    assert result.stdout == f"Written: {out}\n"
    html = out.read_text()
    for path, label in zip(paths, ("Dis-PFL", "Local", "FedAvg"), strict=True):
        summary = read_summary(path)
        assert summary is not None
        (row,) = [
            row
            for row in re.findall(r'<tr[^>]*role="row">.*?</tr>', html, re.S)
            if f">{label}</span>" in row
        ]
        cells = [re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
        accuracy, busiest = summary["scores"]["accuracy"], summary["busiest"]
        assert cells[0] == f"{accuracy['mean']:.3f}"
        assert cells[2] == f"{min(accuracy['per_peer']):.2f} to {max(accuracy['per_peer']):.2f}"
        megabytes = [busiest["paper_mb_per_round"], busiest["wire_mb_per_round"]]
        assert cells[3] == f"{summary['test_loss']['mean']:.3f}"
        assert cells[4:6] == [f"{1e3 * value:.2f}" for value in megabytes]  # in kB
        assert float(cells[6]) == pytest.approx(summary["flops_per_peer_round"] / 1e3, rel=0.05)
        assert cells[7:] == [
            format_seconds(summary["seconds_per_peer_round"]),
            str(summary["rounds"]),
            f"{summary['seconds']:.1f}",
        ]


def test_the_default_name_is_report_html(
    run: Callable[[Method, int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run(Local(), 0)
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, [str(path)]).exit_code == 0
    assert (tmp_path / "report.html").exists()


def test_an_unfinished_run_is_reported_with_its_rounds_so_far(
    run: Callable[[Method, int], Path], tmp_path: Path
) -> None:
    path = run(DisPFL(), 0)
    (path / "summary.json").unlink()
    with closing(RunDirectory.open(path)) as directory:
        directory.truncate_metrics(1)
    assert CliRunner().invoke(app, [str(path), "-o", str(tmp_path / "page.html")]).exit_code == 0
    assert (
        "Dis-PFL is not finished: 1 of 2 rounds (seed 0)." in (tmp_path / "page.html").read_text()
    )


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("", "neither is nor contains a run directory"),
        ("nowhere", "does not exist; name a run directory"),
    ],
)
def test_a_path_without_runs_is_rejected_and_writes_no_page(
    tmp_path: Path, name: str, sentence: str
) -> None:
    result = CliRunner().invoke(app, [str(tmp_path / name), "-o", str(tmp_path / "page.html")])
    assert isinstance(result.exception, RunError)
    assert sentence in str(result.exception)
    assert not (tmp_path / "page.html").exists()


def test_a_page_that_cannot_be_written_is_an_error(
    run: Callable[[Method, int], Path], tmp_path: Path
) -> None:
    result = CliRunner().invoke(
        app, [str(run(Local(), 0)), "-o", str(tmp_path / "no" / "page.html")]
    )
    assert isinstance(result.exception, RunError)
    assert "page.html could not be written" in str(result.exception)


def test_the_help_text_has_an_example() -> None:
    assert "Example: dispfl report" in CliRunner().invoke(app, ["--help"]).stdout
