"""Methods on several data sets as one table."""

import csv
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from messages import refused

from dispfl.errors import ConfigError
from dispfl.report.comparison import Comparison
from dispfl.report.data_tables import compare_by_data, data_csv, data_table
from dispfl.report.runs import read_runs

Write = Callable[..., Path]
MNIST = {"data": {"name": "mnist"}}
CIFAR = {"data": {"name": "cifar10"}, "model": {"name": "resnet18"}}


@pytest.fixture
def paths(write: Write) -> list[Path]:
    """Two methods on two data sets, with two seeds on the first; and one on the second alone."""
    paths = []
    for seed in (0, 1):
        better = [0.6 + 0.1 * seed] * 6
        paths.append(write(f"a/dispfl/seed-{seed}", [better], "dispfl", seed, **MNIST))
        paths.append(write(f"a/local/seed-{seed}", [[0.5] * 6], "local", seed, mb=0, **MNIST))
    for method, score in (("dispfl", 0.3), ("local", 0.4), ("fedavg", 0.2)):
        paths.append(write(f"b/{method}/seed-0", [[score] * 6], method, **CIFAR))
    return paths


def compared(paths: list[Path], against: str | None = None) -> dict[str, Comparison]:
    return compare_by_data(read_runs(paths), against=against)


def test_each_data_set_is_a_column_with_its_best_method_in_bold(paths: list[Path]) -> None:
    """The first has 0.6 and 0.7 with two seeds: 0.65, with a sample deviation of 0.071."""
    table = data_table(compared(paths))
    cells = [[cell.strip() for cell in line.split("|")] for line in table.markdown().splitlines()]
    assert cells[0][1:-1] == ["method", "mnist", "cifar10"]
    assert [line[1:-1] for line in cells[2:5]] == [
        ["Dis-PFL", "**0.650 ± 0.071**", "0.300"],
        ["Local", "0.500 ± 0.000", "**0.400**"],
        ["FedAvg", "–", "0.200"],
    ]


def test_several_columns_of_a_data_set_have_one_heading(paths: list[Path]) -> None:
    lines = data_table(compared(paths, "local"), ["score", "against"]).latex().splitlines()
    assert lines[lines.index(r"\toprule") + 1 : lines.index(r"\midrule")] == [
        r"method & \multicolumn{2}{c}{mnist} & \multicolumn{2}{c}{cifar10} \\",
        r"\cmidrule(lr){2-3} \cmidrule(lr){4-5}",
        r" & accuracy & against Local & accuracy & against Local \\",
    ]
    assert r"FedAvg & \textendash{} & \textendash{} & 0.200 & behind \\" in lines


def test_a_file_for_programs_has_a_line_for_each_method_and_data_set(paths: list[Path]) -> None:
    lines = list(csv.DictReader(io.StringIO(data_csv(compared(paths)))))
    assert [(line["data"], line["method"], line["accuracy_mean"]) for line in lines][:2] == [
        ("mnist", "Dis-PFL", "0.6499999999999999"),
        ("mnist", "Local", "0.5"),
    ]
    assert len(lines) == 5


def test_a_reference_that_no_data_set_has_is_refused(paths: list[Path]) -> None:
    with refused(ConfigError, key="--against"):
        compared(paths, "ditto")


def test_partitions_of_one_data_set_are_told_apart(write: Write) -> None:
    paths = [write("a", [[0.5]]), write("b", [[0.5]], partition={"name": "iid"})]
    assert list(compared(paths)) == ["dirichlet", "iid"]
