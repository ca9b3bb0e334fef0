"""Comparisons of handwritten run directories."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from messages import refused
from recorded_runs import a_line, scored, spread

from dispfl.core.metric import Measure
from dispfl.errors import RunError
from dispfl.report.comparison import Comparison, compare, mean_curve
from dispfl.report.plots import plot_comparison
from dispfl.report.result_tables import comparison_table, legend
from dispfl.report.runs import Budget

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write("ditto", 1, [0.5, None, 0.7], mb=2)`: a run of two peers with these accuracies, at 2
    MB a round."""

    def run(
        name: str,
        seed: int,
        means: Sequence[float | None],
        mb: float = 0.0,
        flops: float = 10.0,
        metric: str = "accuracy",
        higher_is_better: bool = True,
        **more: Any,
    ) -> Path:
        path = tmp_path / name / f"seed-{seed}"
        path.mkdir(parents=True)
        (path / "config.toml").write_text(
            f"seed = {seed}\nrounds = {len(means)}\npeers = 2\n[method]\nname = '{name}'\n"
        )
        lines = []
        for t, mean in enumerate(means):
            values = None if mean is None else {"mean": mean, "std": 0.25, "per_peer": [mean] * 2}
            scores = scored(values, metric, higher_is_better)
            costs: dict[str, Any] = {"mb": mb, "flops": flops, "peers": 2}
            failures = {"001": "It broke."} if mean == 0 else {}
            line = a_line(t, scores, metric=metric, failures=failures, **costs)
            lines.append(line | more)
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    return run


def by_name(paths: Sequence[Path], budget: Budget = Budget.ROUNDS) -> Comparison:
    return compare([({"method": path.parent.name}, path) for path in paths], budget)


def best_rows(comparison: Comparison) -> list[str]:
    return [row.label for row in comparison.rows if comparison.is_best(row)]


def test_accuracy_is_the_mean_and_the_sample_standard_deviation_over_seeds(write: Write) -> None:
    """0.5, 0.6, 0.7: mean 0.6, squares 0.01 + 0 + 0.01 divided by n - 1 = 2, so the deviation is
    0.1."""
    (row,) = by_name(
        [write("a", seed, [0.1, last]) for seed, last in enumerate((0.5, 0.6, 0.7))]
    ).rows
    assert row.score == pytest.approx(0.6)
    assert row.score_std == pytest.approx(0.1)
    assert row.peer_std == 0.25


def test_a_lower_is_better_metric_reaches_a_target_from_above_and_its_lowest_row_is_best(
    write: Write,
) -> None:
    errors = {"metric": "mse", "higher_is_better": False}
    paths = [
        write("a", 0, [1.5, 0.9, 0.8, 1.1], **errors),
        write("b", 0, [1.5, 1.4, 0.7, 0.6], **errors),
    ]
    comparison = by_name(paths)
    assert [row.rounds_to(0.9) for row in comparison.rows] == [2, 3]
    assert [row.rounds_to(0.5) for row in comparison.rows] == [None, None]
    assert best_rows(comparison) == ["b"]
    assert comparison.measure == Measure("mse", higher_is_better=False)


def test_one_seed_has_no_deviation_over_seeds(write: Write) -> None:
    (row,) = by_name([write("a", 0, [0.5])]).rows
    assert (row.score, row.score_std) == (0.5, None)


def test_accuracy_is_that_of_the_last_evaluated_round(write: Write) -> None:
    (row,) = by_name([write("a", 0, [None, 0.4, None])]).rows
    assert row.score == 0.4
    assert row.mean_final(lambda point: point.round) == 2
    assert row.rounds == 3


def test_a_run_that_was_never_evaluated_has_no_accuracy(write: Write) -> None:
    (row,) = by_name([write("a", 0, [None])]).rows
    assert (row.score, row.score_std, row.peer_std) == (None, None, None)
    assert best_rows(by_name([row.runs[0].path])) == []


def test_costs_are_means_over_rounds_and_time_is_a_sum(write: Write) -> None:
    (row,) = by_name([write("a", 0, [0.5, 0.5], mb=2), write("a", 1, [0.5, 0.5], mb=4)]).rows
    assert row.wire_mb == 3
    assert row.paper_mb == 1.5
    assert row.mean_final(lambda point: point.seconds) == 3.0


def test_a_federations_flops_are_those_of_the_peers_that_trained(write: Write) -> None:
    """A server method trains a cohort of one: 10 a round; an older run of two peers at 10 each:
    20."""
    cohort, everyone = by_name(
        [write("cohort", 0, [0.5], flops_total=10.0), write("all", 0, [0.5])]
    ).rows
    assert (cohort.flops_total, everyone.flops_total) == (10, 20)
    assert (cohort.flops_per_peer, everyone.flops_per_peer) == (10, 10)


def test_failed_steps_are_counted_over_all_rounds(write: Write) -> None:
    (row,) = by_name([write("a", 0, [0.0, 0.5, 0.0])]).rows
    assert [(number, peer) for number, peer, _ in row.runs[0].failures] == [(1, "001"), (3, "001")]
    assert row.failures == 2


def test_rounds_to_a_target_count_from_one_and_skip_rounds_without_evaluation(write: Write) -> None:
    (row,) = by_name([write("a", 0, [0.3, None, 0.6]), write("a", 1, [0.3, 0.6, 0.5])]).rows
    assert [run.rounds_to(0.6) for run in row.runs] == [3, 2]
    assert row.rounds_to(0.6) == 2.5
    assert row.rounds_to(0.3) == 1


def test_an_accuracy_equal_to_the_target_reaches_it(write: Write) -> None:
    (row,) = by_name([write("a", 0, [0.1, 0.7])]).rows
    assert (row.rounds_to(0.7), row.rounds_to(0.71)) == (2, None)


def test_a_target_that_one_seed_misses_is_not_reached(write: Write) -> None:
    (row,) = by_name([write("a", 0, [0.9]), write("a", 1, [0.5])]).rows
    assert row.rounds_to(0.6) is None


def test_equal_bytes_are_the_smallest_total_of_those_that_send(write: Write) -> None:
    """Cheap sends 3 x 1 MB. Expensive, at 1.5 MB a round, has had 3 MB after its second; local
    sends nothing."""
    paths = [
        write("cheap", 0, [0.1, 0.2, 0.3], mb=1),
        write("expensive", 0, [0.4, 0.5, 0.6], mb=1.5),
        write("local", 0, [0.7, 0.8, 0.9]),
    ]
    comparison = by_name(paths, Budget.BYTES)
    assert comparison.limits == {0: 3.0}
    assert [row.score for row in comparison.rows] == [0.3, 0.5, 0.9]
    assert [row.mean_final(lambda point: point.wire_mb) for row in comparison.rows] == [3, 3, 0]


def test_equal_flops_are_those_of_the_whole_federation(write: Write) -> None:
    """Three rounds at 2 x 10 make 60; at 30 a round that is two rounds."""
    paths = [
        write("cheap", 0, [0.1, 0.2, 0.3]),
        write("expensive", 0, [0.4, 0.5, 0.6], flops_total=30.0),
    ]
    comparison = by_name(paths, Budget.FLOPS)
    assert comparison.limit == 60
    assert [row.score for row in comparison.rows] == [0.3, 0.5]


def test_equal_seconds_are_those_that_a_peer_computes(write: Write) -> None:
    """Three rounds in which one of two peers computes 2 s and the other rests: 3 s. At 1.5 s that
    is two rounds."""
    one, both = spread([2.0, None]), spread([1.5, 1.5])
    paths = [
        write("cheap", 0, [0.1, 0.2, 0.3], peer_seconds=one),
        write("expensive", 0, [0.4, 0.5, 0.6], peer_seconds=both),
    ]
    comparison = by_name(paths, Budget.SECONDS)
    assert comparison.limit == 3
    assert [row.score for row in comparison.rows] == [0.3, 0.5]
    assert legend(comparison)[0] == "Compared at equal computing: 3.000 s of a peer."


def test_a_run_that_has_not_measured_its_seconds_is_not_taken_for_a_free_one(write: Write) -> None:
    paths = [
        write("measured", 0, [0.1, 0.2], peer_seconds=spread([2.0, 2.0])),
        write("older", 0, [0.4, 0.5]),
    ]
    with refused(RunError):
        by_name(paths, Budget.SECONDS)


def test_scores_on_validation_data_have_a_column(write: Write) -> None:
    comparison = by_name([write("a", 0, [0.1, 0.2], validation=spread([0.25, 0.25]))])
    assert comparison.rows[0].extra("validation") == 0.25
    heading, _, row = comparison_table(comparison).markdown().splitlines()[:3]
    columns = dict(
        zip(map(str.strip, heading.split("|")), map(str.strip, row.split("|")), strict=True)
    )
    assert columns["validation accuracy"] == "0.250"


def test_of_the_variants_of_a_method_the_best_on_validation_data_is_chosen(write: Write) -> None:
    """The second is better on test data by luck; the first is better on validation data."""
    chosen = write("a", 0, [0.4, 0.5], validation=spread([0.6, 0.6]))
    lucky = write("b", 0, [0.5, 0.7], validation=spread([0.5, 0.5]))
    (lucky / "config.toml").write_bytes((chosen / "config.toml").read_bytes())
    comparison = compare([({"method.density": "0.2"}, chosen), ({"method.density": "0.4"}, lucky)])
    assert best_rows(comparison) == ["method.density=0.2"]
    sentence = "which chooses method.density=0.2, 0.500 on test data."
    assert any(sentence in line for line in legend(comparison)), legend(comparison)


@pytest.mark.parametrize(
    ("first", "second", "comparable"),
    [
        ("data_sha256 = 'a'", "data_sha256 = 'a'", True),
        ("data_sha256 = 'a'", "data_sha256 = 'b'", False),
        (
            "data_sha256 = 'a'",
            "data_sha256 = 'b'\nbyzantine = 0.2",
            True,
        ),  # Byzantine peers' data may be poisoned; they have no score
        ("unseen_peers = 0", "unseen_peers = 4", False),  # those that remain have other samples
    ],
)
def test_peers_are_compared_one_by_one_only_where_they_have_the_same_data(
    write: Write, first: str, second: str, comparable: bool
) -> None:
    paths = [write(name, seed, [0.5]) for name in ("a", "b") for seed in (0, 1)]
    for path, more in zip(paths, (first, first, first, second), strict=True):
        config = path / "config.toml"
        config.write_text(f"{more}\n{config.read_text()}")
    rows = by_name(paths).rows
    assert rows[1].has_data_of(rows[0]) is comparable


def test_the_last_evaluated_round_within_the_budget_counts(write: Write) -> None:
    paths = [
        write("cheap", 0, [0.1, 0.2, 0.3], mb=1),
        write("expensive", 0, [0.4, None, 0.6], mb=1.5),
    ]
    assert by_name(paths, Budget.BYTES).rows[1].score == 0.4


def test_each_seed_has_its_own_budget_so_that_the_cheapest_row_keeps_all_rounds(
    write: Write,
) -> None:
    paths = [
        write("a", 0, [0.1, 0.2], mb=1),
        write("a", 1, [0.3, 0.4], mb=2),
        write("b", 1, [0.5, 0.6], mb=3),
    ]
    comparison = by_name(paths, Budget.BYTES)
    assert comparison.limits == {0: 2.0, 1: 4.0}
    assert comparison.limit == 3
    assert [run.final and run.final.round for row in comparison.rows for run in row.runs] == [
        2,
        2,
        1,
    ]


def test_each_data_set_has_its_own_budget(write: Write) -> None:
    """The cheapest row of the second data set, with half the rounds, does not shorten those of the
    first."""
    paths = [
        write("a", 0, [0.1, 0.2], mb=1),
        write("b", 0, [0.3, 0.4], mb=2),
        write("c", 0, [0.5], mb=1),
    ]
    other = paths[2] / "config.toml"
    other.write_text(f'metric = ["other"]\n{other.read_text()}')
    comparison = by_name(paths, Budget.BYTES)
    assert [run.limit for row in comparison.rows for run in row.runs] == [2, 2, 1]
    assert [row.score for row in comparison.rows] == [0.2, 0.3, 0.5]
    assert (comparison.limits, comparison.limit) == ({}, None)


def test_a_row_whose_data_are_not_known_is_compared_with_nobody_if_they_may_be_those_of_several(
    write: Write,
) -> None:
    """With Byzantine peers the data may be poisoned, so their digest is not compared; here rows
    with two digests are there."""
    paths = [write(name, 0, [0.5], flops=1.0) for name in ("a", "b", "byzantine", "b2")]
    for path, digest in zip(paths, ("aa", "bb", None, "bb"), strict=True):
        more = (
            'byzantine = 0.2\ndata_sha256 = "cc"' if digest is None else f'data_sha256 = "{digest}"'
        )
        (path / "config.toml").write_text(f"{more}\n{(path / 'config.toml').read_text()}")
    comparison = by_name(paths)
    assert {label: row.label for label, row in comparison.references.items()} == {
        "a": "a", "b": "b", "byzantine": "byzantine", "b2": "b",
    }  # fmt: skip


def test_a_row_whose_first_evaluated_round_exceeds_the_budget_has_no_accuracy(write: Write) -> None:
    paths = [write("cheap", 0, [0.1], mb=1), write("expensive", 0, [0.9], mb=5)]
    comparison = by_name(paths, Budget.BYTES)
    assert comparison.rows[1].score is None
    assert comparison.rows[1].mean_final(lambda point: point.seconds) is None
    assert best_rows(comparison) == ["cheap"]


def test_costs_that_differ_in_the_last_bit_are_equal(write: Write) -> None:
    """0.1 + 0.1 + 0.1 is a little more than 0.3."""
    paths = [write("three", 0, [0.1, 0.2, 0.3], mb=0.1), write("one", 0, [0.5], mb=0.3)]
    assert by_name(paths, Budget.BYTES).rows[0].score == 0.3


def test_without_traffic_there_is_no_limit_of_bytes(write: Write) -> None:
    comparison = by_name([write("local", 0, [0.1, 0.2])], Budget.BYTES)
    assert (comparison.limit, comparison.rows[0].score) == (None, 0.2)


def test_rows_that_print_the_same_accuracy_are_both_the_best(write: Write) -> None:
    paths = [write("a", 0, [0.80001]), write("b", 0, [0.8]), write("c", 0, [0.79])]
    assert best_rows(by_name(paths)) == ["a", "b"]


def test_a_row_of_a_sweep_is_labelled_by_its_keys(write: Write) -> None:
    path = write("a", 0, [0.5])
    (row,) = compare([({"method.density": "0.2", "method": "dispfl"}, path)]).rows
    assert row.label == "method.density=0.2, dispfl"
    assert (
        replace(row, name={"method": "dispfl", "topology": "ring", "variant": "–"}).label
        == "dispfl, topology=ring"
    )


def test_a_run_without_a_finished_round_is_refused(write: Write) -> None:
    path = write("a", 0, [])
    with refused(RunError):
        by_name([path])
    with refused(RunError):
        by_name([])


def test_a_curve_is_the_mean_over_seeds_of_the_rounds_that_all_evaluated(write: Write) -> None:
    (row,) = by_name(
        [write("a", 0, [0.2, None, 0.5, 0.9], mb=1), write("a", 1, [0.4, 0.5, 0.5], mb=3)]
    ).rows
    curve = mean_curve(row, Budget.ROUNDS)
    assert curve.x == [1, 3]
    assert curve.mean == pytest.approx([0.3, 0.5])
    assert curve.std == pytest.approx([0.02**0.5, 0])  # 2 x 0.1 squared, divided by 2 - 1
    assert mean_curve(row, Budget.BYTES).x == [2, 6]


def test_the_plot_is_a_png_with_more_rows_than_colours(write: Write, tmp_path: Path) -> None:
    paths = [
        write(f"method-{number}", seed, [0.2, 0.5], mb=1)
        for number in range(11)
        for seed in range(2)
    ]
    plot_comparison(by_name(paths, Budget.BYTES), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
