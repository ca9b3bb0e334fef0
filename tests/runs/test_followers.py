"""FedAvg and FedAvg-FT are one training that is evaluated twice, with the results of two trainings,
bit for bit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dispfl.methods.dpsgd import DPSGD
from dispfl.methods.fedavg import FedAvg
from dispfl.methods.finetuned import DPSGDFT, FedAvgFT
from dispfl.methods.local import Local
from dispfl.runs.directory import final_states, read_metrics, read_summary
from dispfl.runs.execute import run_experiment
from dispfl.runs.grid import GridCallbacks, GridRun, RunState, methods_grid, run_missing
from dispfl.runs.loop import RunObserver
from dispfl.testing.rounds import all_bits

ARGUMENTS = [
    "fedavg-ft",
    "fedavg",
    "dpsgd",
    "dpsgd-ft",
    "peers=4",
    "rounds=5",
    "topology.degree=2",
    "partition.samples_per_peer=12",
    "partition.test_samples_per_peer=10",
    "train.epochs=1",
    "method.cohort=2",
    "method.tune_every=2",
    "method.tune_epochs=1",
    "workers=1",
]
UNEQUAL = ("seconds", "peer_seconds", "seconds_per_peer_round", "peak_rss_mb")
"""What two equal runs differ in."""


def result(path: Path) -> dict[str, Any]:
    """Everything that a run has found."""
    records = [
        {key: value for key, value in one.items() if key not in UNEQUAL}
        for one in read_metrics(path)
    ]
    summary = {
        key: value for key, value in (read_summary(path) or {}).items() if key not in UNEQUAL
    }
    files = {name: (path / name).read_bytes() for name in ("config.toml", "split.safetensors")}
    return {"records": records, "summary": summary, "states": all_bits(final_states(path)), **files}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each method finds in a training of its own."""
    out = tmp_path_factory.mktemp("alone")
    for cell in methods_grid(ARGUMENTS, {}, 1, out):
        run_experiment(cell.experiment, cell.path)
    return {name: result(out / name / "seed-0") for name in ARGUMENTS[:4]}


class Watch(GridCallbacks):
    """Records which runs are trained and finished; stops after some rounds, if asked to."""

    def __init__(self, rounds: int | None = None) -> None:
        self.trained: list[str] = []
        self.finished: list[str] = []
        self._rounds = rounds
        super().__init__(run=self._train, end=lambda run: self.finished.append(run.row["method"]))

    def _train(self, run: GridRun) -> RunObserver:
        self.trained.append(run.row["method"])
        return RunObserver(round=self._after)

    def _after(self, record: Any) -> None:
        if self._rounds is not None:
            self._rounds -= 1
            if self._rounds == 0:
                raise KeyboardInterrupt


def results(cells: list[GridRun]) -> dict[str, dict[str, Any]]:
    return {cell.row["method"]: result(cell.path) for cell in cells}


def test_four_methods_are_two_trainings_with_the_results_of_four(
    tmp_path: Path, alone: dict[str, dict[str, Any]]
) -> None:
    cells, watch = methods_grid(ARGUMENTS, {}, 1, tmp_path), Watch()
    run_missing(cells, watch)
    assert watch.trained == ["fedavg-ft", "dpsgd"]
    assert watch.finished == ["fedavg-ft", "fedavg", "dpsgd", "dpsgd-ft"]
    assert results(cells) == alone
    assert cells[1].finished_rounds == 5
    checkpoints = [
        sorted(folder.name for folder in (cell.path / "checkpoints").iterdir()) for cell in cells
    ]
    assert checkpoints == [["round-000004", "round-000005"]] * 4
    shutil.rmtree(cells[0].path / "checkpoints")  # files are shared, not lost
    assert all_bits(final_states(cells[1].path)) == alone["fedavg"]["states"]
    evaluated = [record["round"] for record in read_metrics(cells[0].path) if record["scores"]]
    assert evaluated == [1, 3, 4]  # every second round, and the last
    assert [len(read_metrics(cell.path)) for cell in cells] == [5] * 4


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_an_interrupted_training_is_resumed_for_both(
    tmp_path: Path, alone: dict[str, dict[str, Any]], rounds: int
) -> None:
    cells = methods_grid(ARGUMENTS, {}, 1, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_missing(cells, Watch(rounds))
    assert [cell.state for cell in cells] == [*[RunState.INTERRUPTED] * 2, *[RunState.MISSING] * 2]
    again = methods_grid(
        [ARGUMENTS[1], ARGUMENTS[0], *ARGUMENTS[2:]], {}, 1, tmp_path
    )  # in another order
    watch = Watch()
    run_missing(again, watch)
    assert watch.trained == ["fedavg-ft", "dpsgd"]  # the one with the checkpoints
    assert results(cells) == alone


def test_a_stop_after_the_last_round_and_before_the_summaries_loses_nothing(
    tmp_path: Path, alone: dict[str, dict[str, Any]]
) -> None:
    cells = methods_grid([*ARGUMENTS[:2], *ARGUMENTS[4:]], {}, 1, tmp_path)
    run_missing(cells)
    for cell in cells:
        (cell.path / "summary.json").unlink()
    shutil.rmtree(cells[1].path / "checkpoints")
    watch = Watch()
    run_missing(cells, watch)
    assert watch.trained == ["fedavg-ft"]
    assert results(cells) == {name: alone[name] for name in ARGUMENTS[:2]}


def test_after_the_training_is_done_the_other_method_trains_alone(
    tmp_path: Path, alone: dict[str, dict[str, Any]]
) -> None:
    cells, watch = methods_grid([*ARGUMENTS[:2], *ARGUMENTS[4:]], {}, 1, tmp_path), Watch()
    run_missing(cells[1:])
    run_missing(cells, watch)
    assert watch.trained == ["fedavg-ft"]
    assert results(cells) == {name: alone[name] for name in ARGUMENTS[:2]}


def test_a_methods_training_is_that_of_the_method_without_fine_tuning() -> None:
    assert FedAvgFT(cohort=3, tune_epochs=2).training_method == FedAvg(cohort=3)
    assert DPSGDFT(density=0.2).training_method == DPSGD(density=0.2)
    assert Local().training_method == Local()
    cells = methods_grid(
        ["fedavg", "fedavg-ft", "fedavg-ft@method.tune_epochs=1", "fedavg@train.lr=0.2"],
        {},
        1,
        Path(),
    )
    trainings = [cell.training for cell in cells]
    assert len({*trainings[:3]}) == 1
    assert trainings[3] != trainings[0]
    assert json.loads(trainings[1])["method"]["name"] == "fedavg"
