"""Comparison tables in every format."""

import csv
import io
import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from messages import refused
from recorded_runs import a_line, a_recorded_run, scored, spread
from rich.console import Console

from dispfl.errors import ConfigError
from dispfl.report.comparison import Comparison, ComparisonRow, in_percent
from dispfl.report.result_tables import (
    against_sentence,
    comparison_csv,
    comparison_json,
    comparison_table,
    legend,
    write_tables,
)
from dispfl.report.runs import Budget

OUT = Path("out")


def row(
    name: str,
    accuracies: Sequence[float | None],
    mb: float = 0.5,
    flops: float = 2e9,
    failures: int = 0,
    peer_seconds: Sequence[float] = (),
    rounds: int = 2,
    **more: Any,
) -> ComparisonRow:
    """A method of ten peers whose seeds have these accuracies after their last round.

    It is 0.25 in the first round; None: no round was evaluated. `mb` is what the paper counts.
    """
    runs = []
    for seed, accuracy in enumerate(accuracies):
        lines = []
        changes: dict[str, Any] = {"mb": 2 * mb, "flops": flops, "peers": 10}
        if peer_seconds:
            changes["peer_seconds"] = spread([peer_seconds[seed]])
        for t in range(rounds):
            mean = 0.25 if t == 0 else accuracy
            std = 0.1 if t == 0 else 0.2
            values: dict[str, Any] = {"mean": mean, "std": std, "per_peer": []}
            scores = scored(None if accuracy is None else values)
            lines.append(a_line(t, scores, seconds=1.0 + t / 2, **changes))
        lines[0]["failures"] = {f"{k:03d}": "It broke." for k in range(failures)}
        runs.append(a_recorded_run(lines, seed, OUT / name / f"seed-{seed}", **more))
    return ComparisonRow({"method": name}, runs)


def two_methods(**changes: Any) -> Comparison:
    rows = [row("dispfl", [0.8, 0.9]), row("a_b|c", [0.5, 0.7], mb=0, flops=1e9)]
    return Comparison(**{"rows": rows, "targets": (0.25, 0.8), **changes})


def markdown_table(comparison: Comparison) -> str:
    return comparison_table(comparison).markdown()


def latex_table(comparison: Comparison) -> str:
    return comparison_table(comparison).latex()


def test_markdown_is_aligned_and_the_best_is_bold() -> None:
    lines = markdown_table(two_methods(targets=(0.8,))).splitlines()
    assert lines[0].split("|")[1:5] == [
        " method ",
        " accuracy over seeds ",
        " std over peers ",
        " busiest MB/round ",
    ]
    assert lines[1].startswith("| ------ | ------------------: | -------------: |")
    assert (
        "| dispfl |   **0.850 ± 0.071** |          0.200 |             0.50 |             1.00 |"
        in lines[2]
    )
    assert lines[3].startswith(r"| a_b\|c |       0.600 ± 0.141 |")
    assert len({len(line) for line in lines[:4]}) == 1
    assert lines[5] == "- Compared after 2 rounds."


def paired(
    name: str, scores: Sequence[float], method: str = "any", data: str = "any"
) -> ComparisonRow:
    """A method with one seed whose peers have these scores."""
    lines = [a_line(0, scored(spread(scores)))]
    run = a_recorded_run(lines, path=OUT, method=method, data={"name": data})
    return ComparisonRow({"method": name}, [run])


def test_rows_are_compared_with_dispfl_peer_by_peer() -> None:
    """0.1 lower for each of six peers; 0.2 higher for three and 0.2 lower for three; too few peers
    with scores."""
    rows = [
        paired("Local", [0.4] * 6),
        paired("Dis-PFL", [0.5] * 6, "dispfl"),
        paired("Ditto", [0.7, 0.3] * 3),
        paired("Other data", [0.5] * 6, data="mnist"),
    ]
    comparison = two_methods(rows=rows, targets=())
    heading, _, *lines = (
        line.split("|")[2:6] for line in markdown_table(comparison).splitlines()[:6]
    )
    assert [cell.strip() for cell in heading[2:]] == ["against Dis-PFL", "difference to Dis-PFL"]
    verdicts = [line[2].strip() for line in lines]
    assert verdicts == ["behind", "–", "level", "–"]
    assert lines[0][3].strip() == "-0.100 [-0.100, -0.100]"
    assert (
        "Against Dis-PFL: paired difference over 6 pairs of peers, with its 95 % bootstrap"
        " interval; ahead or behind where that excludes 0, otherwise level." in legend(comparison)
    )
    found = comparison_json(comparison, OUT)
    assert found["rows"][0]["difference"] == {
        "to": "Dis-PFL",
        "mean": pytest.approx(-0.1),
        "low": pytest.approx(-0.1),
        "high": pytest.approx(-0.1),
        "verdict": "behind",
    }
    assert set(found["rows"][1]["difference"].values()) == {None}
    first, *_ = csv.DictReader(io.StringIO(comparison_csv(comparison)))
    assert first["difference_verdict"] == "behind"
    assert float(first["difference_high"]) == pytest.approx(-0.1)


def test_without_dispfl_the_first_row_is_the_reference_and_a_long_label_is_not_in_headings() -> (
    None
):
    rows = [paired("method.density=0.2", [0.4] * 6), paired("method.density=0.5", [0.5] * 6)]
    comparison = two_methods(rows=rows, targets=())
    assert comparison.reference_labels == ["method.density=0.2"]
    assert "against reference" in markdown_table(comparison)
    assert (
        against_sentence(comparison)
        == "Against method.density=0.2 in accuracy: method.density=0.5 ahead, +0.100 [+0.100,"
        " +0.100] (paired difference over 6 pairs of peers, with its 95 % bootstrap interval;"
        " ahead or behind where that excludes 0, otherwise level)."
    )


def test_every_data_set_has_its_own_reference_and_its_own_best_row() -> None:
    """On clothes Dis-PFL is ahead of Local by 0.1, on digits Local of Dis-PFL by 0.2; one row has
    data of its own."""
    clothes, digits = "fashion-mnist", "mnist"
    rows = [
        paired("Local, clothes", [0.4] * 6, data=clothes),
        paired("Dis-PFL, clothes", [0.5] * 6, "dispfl", data=clothes),
        paired("Dis-PFL, digits", [0.7] * 6, "dispfl", data=digits),
        paired("Local, digits", [0.9] * 6, data=digits),
        paired("Local, CIFAR-10", [0.3] * 6, data="cifar10"),
    ]
    comparison = two_methods(rows=rows, targets=())
    lines = [line.split("|")[1:6] for line in markdown_table(comparison).splitlines()[2:7]]
    assert [line[3].strip() for line in lines] == ["behind", "reference", "reference", "ahead", "–"]
    assert [line[1].strip() for line in lines] == [
        "0.400",
        "**0.500**",
        "0.700",
        "**0.900**",
        "0.300",
    ]
    assert any(
        sentence.startswith("Against the reference of the same data: paired difference")
        for sentence in legend(comparison)
    )
    differences = [one["difference"]["to"] for one in comparison_json(comparison, OUT)["rows"]]
    assert differences == ["Dis-PFL, clothes", None, None, "Dis-PFL, digits", None]


def test_an_experiment_may_name_the_row_that_the_others_are_compared_with() -> None:
    rows = [paired("Dis-PFL", [0.5] * 6, "dispfl"), paired("Local", [0.4] * 6, "local")]
    comparison = two_methods(rows=rows, targets=(), against={"method": "local"})
    assert comparison.reference_labels == ["Local"]
    assert comparison.differences["Dis-PFL"].mean == pytest.approx(0.1)


def test_the_two_flops_columns_have_separate_units() -> None:
    """A peer's 2e9 and 1e9 a round are GFLOPs; ten peers' 2e10 too; a thousand times that would be
    TFLOPs."""
    heading, _, first, second = markdown_table(two_methods(targets=())).splitlines()[:4]
    assert "| GFLOPs per peer | GFLOPs all peers | time s |" in heading
    assert "|            2.00 |            20.00 |    2.5 |" in first
    assert "|            1.00 |            10.00 |    2.5 |" in second
    small = markdown_table(
        two_methods(rows=[row("a", [0.5]), row("b", [0.5], flops=6e7), row("c", [0.5], flops=0)])
    )
    assert "MFLOPs per peer" in small  # 0.06 GFLOPs would hide the digits
    large = markdown_table(two_methods(rows=[row("a", [0.5], flops=2e10)])).splitlines()[0]
    assert "GFLOPs per peer" in large
    assert "TFLOPs all peers" in large


def test_rounds_to_a_target_are_means_or_more_than_all_rounds() -> None:
    """0.25 is reached in round 1 by all; 0.8 in round 2 by both seeds of the first, by none of the
    second."""
    heading, _, first, second = markdown_table(two_methods()).splitlines()[:4]
    assert "| rounds to 0.25 | rounds to 0.8 |" in heading
    assert "|              1 |             2 |" in first
    assert "|              1 |            >2 |" in second


def test_latex_uses_booktabs_escapes_names_and_marks_the_best() -> None:
    text = latex_table(two_methods())
    lines = text.splitlines()
    assert r"\begin{tabular}{lrrrrr}" in lines
    for rule in (r"\toprule", r"\midrule", r"\bottomrule"):
        assert lines.count(rule) == 1
    body = lines[lines.index(r"\midrule") + 1 : lines.index(r"\bottomrule")]
    assert body[0].startswith(r"dispfl & \textbf{0.850 $\pm$ 0.071} & 0.50 & 1.00 & 20.00 & 1 \\")
    assert body[1].startswith(r"a\_b\textbar{}c & 0.600 $\pm$ 0.141 & ")
    assert all(line.count("&") == 5 for line in body)
    assert "±" not in "".join(body)
    caption = (
        r"\caption{Accuracy: mean over peers, each on its own test data; mean $\pm$ sample standard"
        r" deviation over 2 seeds.}"
    )
    assert caption in lines
    assert "% Compared after 2 rounds." in lines


def test_latex_escapes_every_special_character() -> None:
    comparison = two_methods(rows=[row(r"\&%$#_{}~^", [0.5])])
    name = r"\textbackslash{}\&\%\$\#\_\{\}\textasciitilde{}\textasciicircum{}"
    assert f"\n{name} & " in latex_table(comparison)


def test_csv_has_plain_numbers_and_empty_cells_where_there_is_none() -> None:
    first, second = csv.DictReader(io.StringIO(comparison_csv(two_methods())))
    assert first["method"] == "dispfl"
    assert float(first["accuracy_mean"]) == pytest.approx(0.85)
    assert float(first["accuracy_std"]) == pytest.approx(0.005**0.5)
    assert (first["seeds"], first["rounds"], first["round"]) == ("2", "2", "2.0")
    assert float(first["flops_all_peers_round"]) == 2e10
    assert float(first["spent_wire_mb"]) == 2.0
    assert (first["rounds_to_0.8"], second["rounds_to_0.8"]) == ("2.0", "")


def test_csv_of_a_sweep_has_a_column_for_each_key() -> None:
    runs = row("a", [0.5]).runs
    text = comparison_csv(
        two_methods(rows=[ComparisonRow({"method.density": "[0.2,0.4]", "train.lr": "0.1"}, runs)])
    )
    (line,) = csv.DictReader(io.StringIO(text))
    assert (line["method.density"], line["train.lr"]) == ("[0.2,0.4]", "0.1")


def test_json_has_every_seeds_values_and_directories_relative_to_the_folder() -> None:
    found = comparison_json(two_methods(), OUT)
    first, second = found["rows"]
    assert first["name"] == {"method": "dispfl"}
    assert [seed["score"] for seed in first["seeds"]] == [0.8, 0.9]
    assert [seed["run"] for seed in first["seeds"]] == ["dispfl/seed-0", "dispfl/seed-1"]
    assert first["rounds_to"] == {"0.25": 1, "0.8": 2}
    assert second["rounds_to"]["0.8"] is None
    assert found["budget"] == {"of": "rounds", "unit": "rounds", "mean": 2, "by_seed": {}}


def test_a_budget_is_in_the_legend_the_json_and_a_column() -> None:
    comparison = two_methods(
        budget=Budget.BYTES, rows=[limited(row("a", [0.8, 0.9]), Budget.BYTES, 2.0, 3.0)]
    )
    assert (
        legend(comparison)[0]
        == "Compared at equal bytes: 2.50 MB on the wire of the busiest node, mean over seeds."
    )
    assert comparison_json(comparison, OUT)["budget"] == {
        "of": "bytes", "unit": "MB", "mean": 2.5, "by_seed": {"0": 2.0, "1": 3.0},
    }  # fmt: skip
    assert "| at round |" in markdown_table(comparison)
    flops = two_methods(budget=Budget.FLOPS, rows=[limited(row("a", [0.8]), Budget.FLOPS, 3.5e12)])
    assert legend(flops)[0] == "Compared at equal FLOPs: 3.50 TFLOPs of training by all peers."
    two = two_methods(
        budget=Budget.BYTES,
        rows=[
            limited(row("a", [0.8]), Budget.BYTES, 2.0),
            limited(row("b", [0.8]), Budget.BYTES, 3.0),
        ],
    )
    assert (
        legend(two)[0]
        == "Compared at equal bytes: the smallest total of the rows with the same data."
    )
    assert [
        seed["limit"] for one in comparison_json(two, OUT)["rows"] for seed in one["seeds"]
    ] == [2.0, 3.0]


def limited(row: ComparisonRow, budget: Budget, *limits: float) -> ComparisonRow:
    """Return the row with a budget for each seed."""
    runs = [run.within(budget, limit) for run, limit in zip(row.runs, limits, strict=True)]
    return replace(row, runs=runs)


def test_runs_of_different_lengths_are_compared_after_their_last_round() -> None:
    rows = [row("a", [0.5]), row("b", [0.5], rounds=3)]
    assert legend(two_methods(rows=rows))[0] == "Compared after each run's last round."


def test_one_seed_has_no_plus_minus_and_unknown_accuracy_is_a_dash_that_is_explained() -> None:
    comparison = two_methods(rows=[row("a", [0.5]), row("b", [None])], targets=())
    lines = markdown_table(comparison).splitlines()
    assert "±" not in "".join(lines)
    assert lines[2].startswith("| a      | **0.500** |")
    assert lines[3].startswith("| b      |         – |              – |")
    assert legend(comparison)[1] == "–: no evaluated round within the budget."


def test_failed_steps_are_listed_below_the_table() -> None:
    sound, broken = row("sound", [0.5]), row("broken", [0.5, 0.5], failures=3)
    assert legend(two_methods(rows=[sound, broken]))[-1].endswith(
        "keeps its last valid state: broken 6."
    )
    assert "failed" not in " ".join(legend(two_methods(rows=[sound])))


def shown(comparison: Comparison, width: int) -> tuple[list[str], list[str]]:
    console = Console(file=io.StringIO(), width=width)
    table, omitted = comparison_table(comparison).on_console(console)
    with console.capture() as captured:
        console.print(table)
    return captured.get().splitlines(), omitted


@pytest.mark.parametrize("width", [50, 60, 80])
def test_a_terminal_shows_whole_columns_that_fit_and_names_the_others(width: int) -> None:
    lines, omitted = shown(two_methods(targets=(0.6, 0.7, 0.8)), width)
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    assert any("0.850 ± 0.071" in line for line in lines)
    assert omitted[:1] == ["std over peers"]


def test_a_wide_terminal_shows_everything() -> None:
    lines, omitted = shown(two_methods(), 200)
    assert omitted == []
    assert any("std over" in line for line in lines)


def test_a_name_in_brackets_is_printed_as_it_is() -> None:
    lines, _ = shown(two_methods(rows=[row("[bold]x[/bold]", [0.5])]), 120)
    assert any("[bold]x[/bold]" in line for line in lines)


def test_all_four_files_are_written(tmp_path: Path) -> None:
    comparison = two_methods()
    assert [path.name for path in write_tables(comparison, tmp_path)] == [
        "comparison.md", "comparison.tex", "comparison.csv", "comparison.json",
    ]  # fmt: skip
    assert (tmp_path / "comparison.md").read_text() == markdown_table(comparison)
    assert json.loads((tmp_path / "comparison.json").read_text())["targets"] == [0.25, 0.8]


def test_seconds_per_peer_and_the_kind_of_flops_are_in_every_format() -> None:
    weights = row("Dis-PFL", [0.5, 0.5])
    channels = row("Dis-PFL (channels)", [0.5, 0.5], peer_seconds=(0.2, 0.4), structure="channels")
    comparison = two_methods(rows=[weights, channels], targets=())
    heading, _, first, second = markdown_table(comparison).splitlines()[:4]
    assert "| s per peer and round |" in heading
    assert "|                    – |" in first
    assert "|                0.300 |" in second
    assert any(
        "FLOPs of Dis-PFL (channels) are saved" in sentence for sentence in legend(comparison)
    )
    plain, small = csv.DictReader(io.StringIO(comparison_csv(comparison)))
    assert (plain["flops"], plain["seconds_per_peer_round"]) == ("counted", "")
    assert small["flops"] == "saved"
    assert float(small["seconds_per_peer_round"]) == pytest.approx(0.3)
    rows = comparison_json(comparison, OUT)["rows"]
    assert [one["flops"]["kind"] for one in rows] == ["counted", "saved"]
    assert rows[1]["seconds_per_peer_round"] == pytest.approx(0.3)
    assert "and round" not in markdown_table(two_methods())


HOSTILE = '[9cm] *\\end{table}\\input{/etc/passwd} $x$ ^^M %&#_~|"`<--> {\n\n} \x1b[31m'


def test_latex_is_a_page_whatever_labels_say(tmp_path: Path) -> None:
    """Compiled as authors do; a bracket or a star after the end of a line would be its argument."""
    latex = shutil.which("pdflatex")
    if latex is None:
        pytest.skip("there is no LaTeX on this machine")
    rows = [row("dispfl", [0.5, 0.7]), row(HOSTILE, [0.4, 0.5])]
    comparison = replace(two_methods(rows=rows), against={"method": "dispfl"})
    table = comparison_table(comparison).latex()
    chosen = comparison_table(comparison, ["score", "flops", "flops-all", "difference"]).latex()
    page = tmp_path / "page.tex"
    page.write_text(
        r"\documentclass{article}\usepackage{booktabs}\begin{document}"
        f"\n{table}\n{chosen}\n"
        r"\end{document}"
    )
    command = [latex, "-halt-on-error", "-interaction=nonstopmode", page.name]
    compiled = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stdout[-2000:]
    assert (tmp_path / "page.pdf").stat().st_size > 1000


def test_columns_are_chosen_by_name_in_the_given_order() -> None:
    table = comparison_table(two_methods(), ["wire", "score", "rounds-to-0.8"])
    assert [column.title for column in table.columns] == [
        "method",
        "on wire MB/round",
        "accuracy over seeds",
        "rounds to 0.8",
    ]
    notes = " ".join(table.notes)
    assert "Busiest, on wire" in notes
    assert "FLOPs" not in notes
    with refused(ConfigError, key="--columns"):
        comparison_table(two_methods(), ["score", "bites"])


def test_scores_in_percent_are_those_of_a_paper() -> None:
    rows = [paired("a", [0.5] * 6, "dispfl"), paired("b", [0.4] * 6, "local")]
    comparison = in_percent(two_methods(rows=rows, targets=()))
    markdown = comparison_table(comparison, ["score", "difference"]).markdown()
    assert "| accuracy (%) |" in markdown.splitlines()[0]
    assert "50.0" in markdown
    assert "-10.0 [-10.0, -10.0]" in markdown
    assert "accuracy_mean" in comparison_csv(comparison)  # files for programs keep fractions
    errors = [row("a", [3.5])]
    with refused(ConfigError, key="--percent"):
        in_percent(two_methods(rows=errors))
