"""`dispfl bound` on the command line, and the warning about noise."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import typer
from messages import refused
from program import Dispfl
from typer.testing import CliRunner

from dispfl import DisPFL, Federation, Train
from dispfl.cli.bound import bound
from dispfl.engines.checkpoint import Checkpoints
from dispfl.errors import ConfigError, RunError

KEYS = ["epsilon_step", "epsilon", "delta", "bound", "probability", "conditions_hold", "vacuous"]
USEFUL = "--samples 50000 --batch 50 --steps 1000 --noise 1 --diameter 4 --union-density 0.9"
NO_GUARANTEE = "train.noise_std alone is no privacy guarantee"
TINY = (
    "peers=3 rounds=2 topology.degree=2 partition.samples_per_peer=9"
    " partition.test_samples_per_peer=4 train.batch_size=4 train.epochs=1"
)

app = typer.Typer()
app.command()(bound)


@dataclass(frozen=True)
class CommandResult:
    stdout: str
    stderr: str
    exception: BaseException | None = None


def run(arguments: str, *more: str | Path) -> CommandResult:
    result = CliRunner().invoke(app, [*arguments.split(), *map(str, more)])
    return CommandResult(result.stdout, result.stderr, result.exception)


def test_json_has_seven_numbers_and_nothing_else() -> None:
    result = run(USEFUL, "--json")
    found = json.loads(result.stdout)
    assert list(found) == KEYS
    assert found["bound"] == pytest.approx(9 * found["epsilon"])
    assert found["bound"] == pytest.approx(0.382749, rel=1e-5)
    assert (found["conditions_hold"], found["vacuous"]) == (True, False)
    assert result.stderr == ""


def test_the_text_output_has_a_table_and_the_premises() -> None:
    result = run(USEFUL).stdout
    assert [
        line.split()[-1]
        for line in result.splitlines()
        if line.startswith(("bound", "probability"))
    ] == [
        "0.382749",
        "0.99939",
    ]
    assert (
        "N = 50000, batch = 50, T = 1000, sigma = 1, D_g = 4, union density = 0.9, delta = 1e-10"
        in result
    )
    assert "do not hold" not in result
    assert "vacuous" not in result


def test_with_json_notes_go_to_stderr() -> None:
    result = run(f"{USEFUL} --noise 0.001", "--json")
    found = json.loads(result.stdout)
    assert (found["delta"], found["probability"], found["conditions_hold"], found["vacuous"]) == (
        None,
        None,
        False,
        True,
    )
    sentences = result.stderr.splitlines()
    assert [sentence.split(":")[0] for sentence in sentences] == [
        "The theorem's conditions do not hold",
        "The bound is vacuous",
    ]
    assert run(f"{USEFUL} --noise 0.001").stdout.splitlines()[-2:] == sentences


def test_numbers_too_large_for_floating_point_are_null() -> None:
    found = json.loads(run(f"{USEFUL} --noise 1e-200", "--json").stdout)
    assert [found[key] for key in KEYS[:5]] == [None] * 5
    assert found["vacuous"]


def test_steps_accept_scientific_notation() -> None:
    found = json.loads(run(f"{USEFUL} --steps 1e6", "--json").stdout)
    assert found["delta"] == pytest.approx(
        1e-4, rel=0.1
    )  # a million steps that fail with probability 1e-10


def test_the_corrected_bound_is_labelled_and_larger() -> None:
    printed, corrected = (
        json.loads(run(USEFUL, "--json", *more).stdout) for more in ([], ["--corrected"])
    )
    assert corrected["bound"] > 2 * printed["bound"]
    assert "Theorem 1, corrected" in run(USEFUL, "--corrected").stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            USEFUL.replace("--diameter 4", ""),
            (
                "--diameter is missing: no run records it; give --diameter DG, the largest distance"
                " between the gradients of two samples."
            ),
        ),
        (
            "--samples 100",
            "--batch is missing: give it a value, or a run that has one (--run DIR).",
        ),
        (
            f"{USEFUL} --union-density 9",
            "--union-density must be in [0, 1], got 9. For 9% of the weights write 0.09.",
        ),
        (f"{USEFUL} --steps 2.5", "--steps must be a whole number of at least 1, got 2.5."),
    ],
)
def test_invalid_input_is_one_sentence(arguments: str, sentence: str) -> None:
    problem = run(arguments).exception
    assert isinstance(problem, ConfigError)
    assert str(problem) == sentence


def test_a_figure_is_drawn_and_its_path_printed(tmp_path: Path) -> None:
    result = run(USEFUL, "--json", "--plot", tmp_path / "bound.pdf")
    assert (tmp_path / "bound.pdf").read_bytes().startswith(b"%PDF")
    assert result.stderr == f"Figure: {tmp_path / 'bound.pdf'}\n"
    assert list(json.loads(result.stdout)) == KEYS


def test_a_run_determines_union_density_samples_batch_steps_and_noise(
    tmp_path: Path, dispfl: Dispfl
) -> None:
    """9 samples in batches of 4, the last of 5: 2 batches, 2 rounds, 4 steps."""
    path = tmp_path / "run"
    started = dispfl("run", *TINY.split(), "train.noise_std=0.5", "workers=1", "--out", path)
    assert started.err.count(NO_GUARANTEE) == 1
    masks = [
        step.next_state.model.mask.unpack()
        for step in Checkpoints(path / "checkpoints").load(2).values()
    ]
    beta = float(torch.stack(masks).any(0).double().mean())
    assert 0.5 < beta < 1
    result = run("--diameter 3 --run", path, "--json")
    by_hand = run(
        f"--samples 9 --batch 4 --steps 4 --noise 0.5 --diameter 3 --union-density {beta!r} --json"
    )
    assert json.loads(result.stdout) == json.loads(by_hand.stdout)
    assert (
        "T = 8, sigma = 0.25" in run("--diameter 3 --steps 8 --noise 0.25 --run", path).stdout
    )  # options override the run


def test_noise_is_required_for_a_run_without_noise_and_the_diameter_always(
    tmp_path: Path, dispfl: Dispfl
) -> None:
    path = tmp_path / "run"
    assert (
        NO_GUARANTEE
        not in dispfl("run", *TINY.split(), "method=local", "workers=1", "--out", path).err
    )
    problem = run("--run", path).exception
    assert str(problem).startswith(
        "--noise is missing: the run was trained without noise (train.noise_std = 0)"
    )
    problem = run("--noise 1 --run", path).exception
    assert str(problem).startswith("--diameter is missing: no run records it; give --diameter DG")
    result = run("--noise 1 --diameter 3 --run", path).stdout
    assert "The theorem is about Dis-PFL; the number of steps of local may differ" in result
    assert "union density = 1," in result
    with refused(RunError):
        raise run("--run", tmp_path).exception or AssertionError


def test_a_run_made_in_python_determines_them_too(
    tmp_path: Path,
    net: Callable[[], torch.nn.Module],
    points: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """20 samples in batches of 8 are 3 batches; 2 rounds of 1 epoch are 6 steps."""
    data = [(points(20, which), points(10, 10 + which)) for which in range(2)]
    train = Train(epochs=1, batch_size=8, noise_std=0.5)
    Federation(net, data, DisPFL(density=0.3), train=train, workers=1, rounds=2).run(
        out=tmp_path / "run"
    )
    result = run("--diameter 3 --run", tmp_path / "run").stdout
    assert "N = 20, batch = 8, T = 6, sigma = 0.5, D_g = 3, union density = 0." in result


def test_compare_warns_about_noise_once_and_not_if_all_runs_are_finished(
    tmp_path: Path, dispfl: Dispfl
) -> None:
    arguments = f"compare local dispfl {TINY} rounds=1 train.noise_std=0.1 workers=1 --out"
    assert dispfl(*arguments.split(), tmp_path / "grid").err.count(NO_GUARANTEE) == 1
    assert NO_GUARANTEE not in dispfl(*arguments.split(), tmp_path / "grid").err
