"""Tables and figures beside the paper's numbers, from rows whose numbers are written by hand."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w
from PIL import Image

from dispfl import paper
from dispfl.analysis.beside_paper import Sheet, as_json, legend, misprints, sheets
from dispfl.analysis.comparison import Point, Row, SeedRun
from dispfl.analysis.paper_columns import Entry, Place
from dispfl.analysis.paper_figures import draw_curves, draw_drop, draw_groups, draw_sparsity, group_accuracies

TABLES = {table.label: table for table in paper.tables()}
MAIN, SPARSITY, HETEROGENEOUS = (TABLES[name] for name in ("centralized-main-table", "tab:spa", "extended-table"))
ROUNDS, TOPOLOGIES = TABLES["CIFAR10-convergence"], TABLES["tab:de-cifar100"]


def a_row(*courses: Sequence[float], mb: float = 0.85, flops: float = 5e8, path: Path = Path("run")) -> Row:
    """A seed for each course of accuracies; the last counts."""
    runs = []
    for seed, course in enumerate(courses):
        points = [
            Point(t, accuracy, 0.1, mb * t, mb * t, 20 * flops * t, float(t))
            for t, accuracy in enumerate(course, start=1)
        ]
        runs.append(SeedRun(seed, path, points, flops, points[-1]))
    return Row({"method": "any"}, runs)


def entry(printed: paper.Row, row: Row, **more: object) -> Entry:
    names = {key: str(getattr(printed, key)) for key in ("data", "partition", "model", "method", "density")}
    names |= {"topology": printed.topology or "–", "drop": "0"}
    return Entry(replace(Place(names, printed), **more), row)  # type: ignore[arg-type]


def printed_rows(table: paper.Table, **wanted: object) -> list[paper.Row]:
    return [row for row in table.rows if all(getattr(row, key) == value for key, value in wanted.items())]


def lines(sheet: Sheet) -> list[str]:
    return [" ".join(line) for line in sheet.lines]


def test_each_number_stands_twice_in_the_papers_units() -> None:
    """CIFAR-10 of Table 1, where ours are 61 % and 86 % for Local, 88.25 % and 95 % for Dis-PFL."""
    ours = {"local": (0.61, 0.86), "dispfl": (0.8825, 0.95)}
    entries = [
        entry(row, a_row([0.1, ours[method][row.partition == "pathological"]], mb=0.85 * (method == "dispfl")))
        for method in ours
        for row in printed_rows(MAIN, data="cifar10", method=method)
    ]
    [sheet] = sheets(entries, MAIN)
    assert sheet.title == "Table 1, the paper's resnet18 on cifar10"
    assert sheet.headings == [
        ("", "method"),
        ("Dir %", "paper"),
        ("", "ours"),
        ("Path %", "paper"),
        ("", "ours"),
        ("MB", "paper"),
        ("", "ours"),
        ("1e12", "paper"),
        ("1e6", "ours"),
    ]
    assert lines(sheet) == [
        "local 61.55 61.0 86.48 86.0 – – 8.3 500.0",
        "dispfl 85.70 88.2 91.05 95.0 223.4 0.85 7.0 500.0",
    ]
    assert sheet.best == {(1, 1), (1, 2), (1, 3), (1, 4)}  # Dis-PFL has the highest accuracies, there and here
    assert sheet.notes == []  # two lines have no order to speak of


def test_a_row_or_a_partition_that_is_not_there_leaves_its_cells_empty() -> None:
    """A density that the paper did not try, and Local on one partition alone."""
    [local] = printed_rows(MAIN, data="cifar10", method="local", partition="pathological")
    known = entry(local, a_row([0.9]))
    names = {**known.place.names, "partition": "dirichlet", "density": "0.3"}
    [sheet] = sheets([known, Entry(Place(names), known.row)], MAIN)
    assert lines(sheet) == ["local 1.0 86.48 90.0 – – – 0.85 8.3 500.0", "local 0.3 – – – 90.0 – 0.85 – 500.0"]


def test_flops_as_large_as_the_papers_are_counted_in_its_unit() -> None:
    [row] = printed_rows(SPARSITY, density=0.5)
    [sheet] = sheets([entry(row, a_row([0.85], mb=223.48, flops=7.06e12))], SPARSITY)
    assert sheet.headings[-2:] == [("1e12", "paper"), ("1e12", "ours")]
    assert lines(sheet) == ["dispfl 85.70 85.0 223.4 223.5 7.0 7.06"]


def test_several_seeds_have_a_mean_and_a_standard_deviation() -> None:
    """Of 80 % and 84 %: 82 %, and sqrt(2 x 2 ** 2 / 1) = 2.8."""
    [row] = printed_rows(SPARSITY, density=0.5)
    [sheet] = sheets([entry(row, a_row([0.80], [0.84]))], SPARSITY)
    assert sheet.lines[0][2] == "82.0±2.8"


def test_the_order_is_compared_where_numbers_cannot_be() -> None:
    """The paper's order of densities by accuracy is 0.2, 0.4, 0.8, 0.6, 0.5; ours is the same, then the reverse."""
    order = [0.2, 0.4, 0.8, 0.6, 0.5]
    for accuracies, rank in (([0.1, 0.2, 0.3, 0.4, 0.5], "1.00"), ([0.5, 0.4, 0.3, 0.2, 0.1], "-1.00")):
        found = dict(zip(order, accuracies, strict=True))
        [sheet] = sheets([entry(row, a_row([found[float(str(row.density))]])) for row in SPARSITY.rows], SPARSITY)
        assert sheet.notes == [f"Rank correlation of our accuracies with the paper's: dirichlet {rank}."]
        assert sheet.headings[1] == ("den-", "sity")


def test_where_the_paper_prints_the_mean_over_nodes_ours_is_that_mean() -> None:
    rows = printed_rows(HETEROGENEOUS, model="vgg11", method="dpsgd", density=0.2)
    [sheet] = sheets([entry(row, a_row([0.7], mb=9.0), mean_mb=1.25) for row in rows], HETEROGENEOUS)
    assert lines(sheet) == ["dpsgd 66.00 70.0 59.60 70.0 73.8 1.25 5.7 500.0"]
    assert "that a node receives on average" in legend(HETEROGENEOUS)[1]


def test_rounds_to_a_target_stand_beside_the_papers_rounds_to_its_own() -> None:
    """Ours reach 75 % in round 2 and 3 of two seeds, 80 % in rounds 3 and 3, 90 % in one seed alone."""
    [row] = printed_rows(ROUNDS, method="dispfl", partition="dirichlet")
    ours = a_row([0.7, 0.75, 0.8], [0.7, 0.7, 0.95])
    [sheet] = sheets([entry(row, ours, targets=(0.75, 0.8, 0.9))], ROUNDS)
    assert sheet.title == "Table 5, the paper's resnet18 on cifar10, dirichlet"
    assert sheet.headings[1:] == [
        ("to 60 %", "paper"), ("to 75 %", "ours"), ("to 70 %", "paper"), ("to 80 %", "ours"),
        ("to 80 %", "paper"), ("to 90 %", "ours"),
    ]  # fmt: skip
    assert lines(sheet) == ["dispfl 59 2.5 144 3 301 >3"]
    assert "rounds until" in legend(ROUNDS)[0]


def test_a_target_that_the_paper_never_reached_is_more_than_its_rounds() -> None:
    [row] = printed_rows(ROUNDS, method="fedavg", partition="pathological")
    [sheet] = sheets([entry(row, a_row([0.6]), targets=(0.5, 0.8, 0.85))], ROUNDS)
    assert lines(sheet) == ["fedavg 388 1 >500 >1 >500 >1"]


def test_misprints_among_the_shown_rows_are_named() -> None:
    rows = printed_rows(TOPOLOGIES, method="dispfl")
    found = misprints([entry(row, a_row([0.5])) for row in rows], TOPOLOGIES)
    assert len(found) == 1
    assert found[0].startswith("Misprint in Table 8: Dis-PFL on a ring has no FLOPs printed.")
    others = printed_rows(TOPOLOGIES, method="dpsgd")
    assert misprints([entry(row, a_row([0.5])) for row in others], TOPOLOGIES) == []
    [sheet] = sheets([entry(row, a_row([0.5])) for row in rows], TOPOLOGIES)
    assert [line[:2] for line in sheet.lines] == [["dispfl", "ring"], ["dispfl", "full"]]
    assert sheet.headings[1] == ("topo-", "logy")


def test_markdown_is_a_table_with_the_best_in_bold() -> None:
    sheet = Sheet("T", [("", "method"), ("den-", "sity"), ("Dir %", "paper")], [["a", "0.2", "5"]], frozenset({(0, 2)}))
    assert sheet.markdown().splitlines() == [
        "### T",
        "",
        "| method | density | Dir % paper |",
        "| ------ | ------: | ----------: |",
        "| a      | 0.2     | **5**       |",
        "",
    ]


def test_json_has_plain_units() -> None:
    [row] = printed_rows(ROUNDS, method="fedfomo", partition="dirichlet")
    found = json.loads(json.dumps(as_json(entry(row, a_row([0.6], [0.7]), targets=(0.65,)))))
    assert found["paper"]["rounds_to"] == {"0.6": 204, "0.7": None, "0.8": None}
    assert found["ours"]["accuracy"] == pytest.approx(0.65)
    assert found["ours"]["rounds_to"] == {"0.65": None}
    assert (found["ours"]["rounds"], len(found["ours"]["runs"])) == (1, 2)
    [main] = printed_rows(MAIN, data="cifar10", method="dispfl", partition="dirichlet")
    theirs = as_json(entry(main, a_row([0.6])))["paper"]
    assert theirs["accuracy"] == pytest.approx(0.857)
    assert theirs["flops"] == pytest.approx(7e12)


@pytest.fixture
def run_with_groups(tmp_path: Path) -> Path:
    """A finished run of two groups of peers."""
    (tmp_path / "config.toml").write_text(tomli_w.dumps({"model": {"name": "cnn"}, "data": {"name": "fashion-sample"}}))
    groups = [{"density": 0.2, "mean": 0.7}, {"density": 1.0, "mean": 0.9}]
    (tmp_path / "summary.json").write_text(json.dumps({"groups": groups}))
    return tmp_path


def test_the_accuracy_of_each_group_is_read_from_the_summaries(run_with_groups: Path) -> None:
    [row] = printed_rows(HETEROGENEOUS, model="resnet18", partition="dirichlet", density=(0.2, 0.4, 0.6, 0.8, 1.0))
    ours = entry(row, a_row([0.8], [0.8], path=run_with_groups))
    assert group_accuracies([ours]) == {("dirichlet", "cnn"): {0.2: 0.7, 1.0: 0.9}}


@pytest.mark.parametrize("draw", [draw_curves, draw_drop, draw_groups, draw_sparsity])
def test_a_figure_is_a_picture_and_its_small_print_takes_room(
    draw: Callable[[Sequence[Entry], str, Path], None], run_with_groups: Path
) -> None:
    rows = SPARSITY.rows
    entries = [entry(row, a_row([0.5, 0.8], [0.6, 0.9], path=run_with_groups)) for row in rows]
    entries.append(
        replace(entries[-1], place=replace(entries[-1].place, names={**entries[-1].place.names, "drop": "–"}))
    )
    plain, cautious = run_with_groups / "plain.png", run_with_groups / "cautious.png"
    draw(entries, "", plain)
    draw(entries, "Not the paper's experiment. " * 3, cautious)
    with Image.open(plain) as one, Image.open(cautious) as other:
        assert one.size == other.size
        assert one.width >= 600
        assert one.tobytes() != other.tobytes()
