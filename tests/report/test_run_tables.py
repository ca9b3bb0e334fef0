"""Result tables of runs, within 80 columns."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dispfl.report.run_tables import overview, print_results
from dispfl.report.runs import load_run
from dispfl.runs.directory import RunDirectory


def scores(
    metric: str = "accuracy", higher_is_better: bool = True, **spread: Any
) -> dict[str, Any]:
    return {metric: {"higher_is_better": higher_is_better, "format": ".3f", **spread}}


def a_run(path: Path, structure: str = "weights", **changes: Any) -> Path:
    """A finished run's directory, with this summary."""
    summary: dict[str, Any] = {
        "method": "dispfl",
        "rounds": 20,
        "metric": "accuracy",
        "scores": scores(mean=0.4567, std=0.0456, per_peer=[0.411, 0.5023]),
        "busiest": {"paper_mb_per_round": 1.234, "wire_mb_per_round": 1.345},
        "flops_per_peer_round": 0.456e9,
        "seconds": 12.34,
    } | changes
    directory = RunDirectory.create(
        path, {"rounds": 20, "method": {"name": summary["method"], "structure": structure}}
    )
    directory.write_summary(summary)
    directory.close()
    return path


def printed(*paths: Path, width: int = 80) -> list[str]:
    text = StringIO()
    print_results(paths, Console(file=text, width=width))
    return text.getvalue().splitlines()


def table_of(lines: list[str]) -> list[str]:
    """The lines of the table alone: all before the legend that have something on them."""
    end = next(n for n, line in enumerate(lines) if "FLOPs are counted" in line)
    return [line for line in lines[:end] if line.strip()]


def test_every_number_is_rounded_and_in_its_column(tmp_path: Path) -> None:
    table = [line.split() for line in table_of(printed(a_run(tmp_path / "run")))]
    assert " ".join(table[0]) == "accuracy worst, busiest on wire GFLOPs/ time"
    assert " ".join(table[1]) == "method rounds over peers best peer MB/round MB/round peer s"
    assert " ".join(table[3]) == "Dis-PFL 20 0.457 ± 0.046 0.41, 0.50 1.23 1.34 0.46 12.3"


def test_a_peer_without_a_score_is_neither_worst_nor_best(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", scores=scores(mean=0.5, std=0.1, per_peer=[None, 0.4, 0.6]))
    assert "0.40, 0.60" in table_of(printed(run))[-1]


def test_the_table_says_the_metrics_name_and_its_best_peer_is_the_one_with_the_lowest_error(
    tmp_path: Path,
) -> None:
    errors = scores("rmse", higher_is_better=False, mean=0.5, std=0.1, per_peer=[0.4, 0.6])
    lines = printed(a_run(tmp_path / "run", metric="rmse", scores=errors))
    assert table_of(lines)[0].split()[0] == "rmse"
    assert "0.60, 0.40" in table_of(lines)[-1]
    assert any(line.startswith("rmse: mean ± std over peers on own test data.") for line in lines)
    assert "accuracy" not in " ".join(lines)


def test_a_wide_table_has_the_other_metrics_and_the_test_loss(tmp_path: Path) -> None:
    both = scores(mean=0.5, std=0.1, per_peer=[0.4, 0.6]) | scores(
        "f1", mean=0.3, std=0.2, per_peer=[0.1, 0.5]
    )
    run = a_run(
        tmp_path / "run",
        scores=both,
        test_loss={"mean": 1.25, "std": 0.0, "per_peer": [1.25, 1.25]},
    )
    heading, _, _, row = table_of(printed(run, width=120))
    assert " ".join(heading.split()) == "accuracy f1 worst, test busiest on wire GFLOPs/ time"
    assert " ".join(row.split()).startswith(
        "Dis-PFL 20 0.500 ± 0.100 0.300 ± 0.200 0.40, 0.60 1.250 1.23"
    )
    assert "f1" not in " ".join(table_of(printed(run)))


def test_large_and_small_numbers_have_units_of_their_own(tmp_path: Path) -> None:
    small = {"paper_mb_per_round": 0.00012, "wire_mb_per_round": 0.00034, "connections": 1}
    run = a_run(tmp_path / "run", flops_per_peer_round=8.3e12, seconds=98_765.4, busiest=small)
    _, heading, _, row = table_of(printed(run))
    assert heading.split()[-4:] == ["kB/round", "kB/round", "peer", "s"]
    assert row.split()[-4:] == ["0.12", "0.34", "8.30", "98765"]


def test_the_legend_and_the_directory_follow_the_table(tmp_path: Path) -> None:
    path = a_run(tmp_path / "run")
    legend, where = printed(path)[-2:]
    assert "mean ± " in legend
    assert where == f"Run directory: {path}"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rounds": 500, "flops_per_peer_round": 8.3e12, "seconds": 98_765.4},
        {"busiest": {"paper_mb_per_round": 446.9, "wire_mb_per_round": 460.87}},
        {"busiest": {"paper_mb_per_round": 22_346.9, "wire_mb_per_round": 23_460.87}},
        {"scores": scores(mean=1.0, std=0.5, per_peer=[0.0, 1.0])},
    ],
)
def test_demos_and_the_papers_numbers_fit_eighty_columns(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    runs = [
        a_run(tmp_path / method, method=method, **changes)
        for method in ("dispfl", "local", "subfedavg")
    ]
    lines = table_of(printed(*runs))
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)


def test_runs_of_one_method_are_identified_by_their_directories(tmp_path: Path) -> None:
    runs = [
        a_run(tmp_path / name)
        for name in ("dispfl-fashion-sample", "dispfl-fashion-sample-2", "[red]dense")
    ]
    wide = [line.split() for line in table_of(printed(*runs, width=120))]
    assert [row[-1] for row in wide[1:2] + wide[3:]] == ["run", *(path.name for path in runs)]
    assert "0.41, 0.50" in " ".join(wide[3])
    narrow = table_of(printed(*runs))
    assert max(map(len, narrow)) <= 80
    assert not any("…" in line for line in narrow)
    right = [line[65:].strip() for line in narrow]
    assert "".join(right).endswith("".join(path.name for path in runs)), narrow


def test_a_narrow_terminal_keeps_names_and_scores_and_says_which_columns_it_has_no_room_for(
    tmp_path: Path,
) -> None:
    loss = {"mean": 1.25, "std": 0.0, "per_peer": [1.25, 1.25]}
    lines = printed(
        *(a_run(tmp_path / name, test_loss=loss) for name in ("first-seed", "second-seed")),
        width=60,
    )
    table = [" ".join(line.split()) for line in table_of(lines)]
    assert table[1] == "method rounds over peers MB/round MB/round run"
    assert table[3:] == [
        f"Dis-PFL 20 0.457 ± 0.046 1.23 1.34 {name}" for name in ("first-seed", "second-seed")
    ]
    [omitted] = [line for line in lines if line.startswith("Omitted")]
    assert (
        omitted.removesuffix(" `dispfl show --json` has all values.")
        == "Omitted for lack of space: test loss; worst, best peer; time s; GFLOPs/peer."
    )


def test_one_run_and_runs_named_after_their_methods_show_no_directory(tmp_path: Path) -> None:
    one, other = a_run(tmp_path / "a"), a_run(tmp_path / "b" / "local", method="local")
    for runs in ([one], [other, a_run(tmp_path / "b" / "dispfl")]):
        assert table_of(printed(*runs, width=120))[1].split()[-1] == "s"


def test_a_long_path_is_neither_cut_nor_wrapped(tmp_path: Path) -> None:
    path = a_run(tmp_path / ("long" * 40))
    assert printed(path)[-1] == f"Run directory: {path}"


def test_square_brackets_in_a_path_are_not_markup(tmp_path: Path) -> None:
    path = a_run(tmp_path / "[red]x" / "[" / "y]")
    assert printed(path)[-1] == f"Run directory: {path}"


def test_failed_steps_are_noted(tmp_path: Path) -> None:
    lines = printed(a_run(tmp_path / "run", failures=3))
    assert lines[-1] == "3 steps failed; see metrics.jsonl for the peers and reasons."
    assert not any("steps failed" in line for line in printed(a_run(tmp_path / "good", failures=0)))


def test_the_overview_of_a_finished_run_is_its_summary_even_if_its_metrics_are_gone(
    tmp_path: Path,
) -> None:
    assert overview(load_run(a_run(tmp_path / "run")))["rounds"] == 20


def test_the_overview_of_an_unfinished_run_averages_its_rounds(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", {"rounds": 5, "method": {"name": "local"}})
    for t, mb in enumerate((1.0, 3.0)):
        measured: dict[str, Any] = {"metric": "accuracy"}
        measured["scores"] = {} if t else scores(mean=0.5, std=0.0, per_peer=[0.5])
        measured["test_loss"] = None if t else {"mean": 1.5, "std": 0.0, "per_peer": [1.5]}
        busiest = {"paper_mb": mb, "wire_mb": 2 * mb, "connections": 4 - t}
        costs = {"flops_per_peer": mb, "flops_total": 2 * mb, "seconds": mb}
        measured |= {"busiest": busiest, "failures": {"000": "It broke."} if t else {}, **costs}
        directory.append({"round": t, **measured})
    directory.close()
    assert overview(load_run(tmp_path / "run")) == {
        "method": "local",
        "rounds": 2,
        "unfinished": f"2 of 5 rounds; resume with: dispfl run --resume {tmp_path / 'run'}",
        "metric": "accuracy",
        "scores": scores(mean=0.5, std=0.0, per_peer=[0.5]),
        "test_loss": {"mean": 1.5, "std": 0.0, "per_peer": [1.5]},
        "busiest": {"paper_mb_per_round": 2.0, "wire_mb_per_round": 4.0, "connections": 4},
        "train_score": None,
        "validation": None,
        "global_test": None,
        "logged": None,
        "flops_per_peer_round": 2.0,
        "flops_total_round": 4.0,
        "failures": 1,
        "seconds": 4.0,
        "seconds_per_peer_round": None,
    }


def test_groups_show_their_accuracy_and_seconds_side_by_side(tmp_path: Path) -> None:
    groups = [
        {"density": 0.2, "peers": 3, "mean": 0.51, "std": 0.1, "seconds": 0.25},
        {"density": 1.0, "peers": 2, "mean": 0.625, "std": 0.1},
    ]
    assert printed(a_run(tmp_path / "run", groups=groups))[-2:] == [
        "  density 0.2: accuracy 0.510, 0.250 s per peer and round, 3 peers",
        "  density 1: accuracy 0.625, 2 peers",
    ]


def test_a_row_of_channels_is_labelled_and_its_flops_are_saved(tmp_path: Path) -> None:
    """Without the directories, which the labels replace; within 80 columns without the worst and
    best peer."""
    runs = [
        a_run(tmp_path / "a" / "seed-0"),
        a_run(tmp_path / "b" / "seed-0", structure="channels"),
    ]
    lines = printed(*runs)
    assert [line.rstrip() for line in lines if line.startswith("Dis-PFL ")][
        1
    ] == "Dis-PFL (channels)      20  0.457 ± 0.046      1.23      1.34     0.46  12.3"
    assert not any("seed-0" in line for line in lines[: lines.index("")] + lines[1:8])
    assert "FLOPs of Dis-PFL (channels) are saved" in "".join(lines)
    assert "those of the others are counted" in "".join(lines)


def test_scores_on_other_data_follow_the_table(tmp_path: Path) -> None:
    score = {"mean": 0.7123, "std": 0.05, "per_peer": [0.66, 0.76]}
    run = a_run(
        tmp_path / "run",
        validation=score,
        global_test=None,
        unseen_peers={"peers": 4, "steps": 20, "score": score, "failures": []},
    )
    assert (
        "  accuracy on validation data 0.712 ± 0.050; of 4 unseen peers after 20 steps 0.712 ±"
        " 0.050" in printed(run)
    )
