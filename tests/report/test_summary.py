"""The summary sentences, the caveats and the results table."""

from collections.abc import Callable
from pathlib import Path

from html_cells import cells
from recorded_runs import spread

from dispfl.report.results import count_wins, read_results
from dispfl.report.sections import results_section
from dispfl.report.summary import summary_block, summary_sentences

Write = Callable[..., Path]


def test_a_row_is_ahead_where_the_interval_excludes_zero_and_level_where_it_does_not(
    write: Write,
) -> None:
    """Six peers: 0.1 better than FedAvg; against Local three are 0.2 better and three 0.1 worse,
    0.05 on average."""
    paths = [
        write("a", [[0.9, 0.8, 0.7, 0.6, 0.5, 0.4]], "dispfl", mb=1, flops=5e8),
        write("b", [[0.8, 0.7, 0.6, 0.5, 0.4, 0.3]], "fedavg", mb=4),
        write("c", [[0.7, 0.6, 0.5, 0.7, 0.6, 0.5]], "local", mb=0),
    ]
    lead, margin, peers, cost = summary_sentences(read_results(paths))
    assert (
        lead == "Dis-PFL is ahead of FedAvg and level with Local: accuracy 0.650 on average over 6"
        " peers; the next, Local, has 0.600."
    )
    assert margin.startswith("Its paired difference to Local is +0.050 [-0.")
    assert margin.endswith(
        ", over 6 pairs of peers (95 % bootstrap interval); with one seed, this says nothing about"
        " other splits and first weights."
    )
    assert (
        peers == "It is best for 3 of 6 peers, and worse for 3 (peer 003, peer 004 and peer 005)."
    )
    assert (
        cost
        == "Its busiest node transfers 1.00 MB per round on the wire, 25 % of FedAvg’s; Local sends"
        " nothing; training takes 0.50 GFLOPs per peer and round (the others: 1.00)."
    )
    results, _, differences = str(results_section(read_results(paths))).partition("</table>")
    html = results
    assert [row[:2] for row in cells(results)] == [
        ["Dis-PFL", "0.650"],
        ["Local", "0.600"],
        ["FedAvg", "0.550"],
    ]
    assert [row[2][:6] for row in cells(differences)] == ["+0.050", "–", "-0.050"]  # to Local
    assert cells(html)[2][2] == "-0.100, behind[-0.100, -0.100]"
    assert cells(html)[1][2].startswith("-0.050, level[-0.")
    assert cells(html)[0][2] == "–"
    assert "Difference to Dis-PFL" in html


def test_the_row_that_validation_data_choose_leads_although_another_has_a_better_test_score(
    write: Write,
) -> None:
    low = {"own": {"density": 0.2}, "record": {"validation": spread([0.7] * 6)}}
    high = {"own": {"density": 0.4}, "record": {"validation": spread([0.6] * 6)}}
    paths = [write("a", [[0.5] * 6], **low), write("b", [[0.8] * 6], **high)]
    results = read_results(paths)
    lead, *_ = summary_sentences(results)
    chosen, lucky = results.labels
    assert lead == (
        f"{chosen} is chosen on validation data (0.700): accuracy 0.500 on average over 6 peers;"
        f" on test data it is behind {lucky}."
    )
    html = str(results_section(results))
    assert [row[1] for row in cells(html)] == ["0.500", "0.800"]
    assert "best on validation data first" in html


def test_seeds_that_disagree_are_level(write: Write) -> None:
    """0.1 better for all peers of one seed, 0.05 worse for all of the other: seeds are resampled
    first."""
    clear = [write(f"d{seed}", [[0.8] * 3], "dispfl", seed) for seed in (0, 1)]
    clear += [write(f"l{seed}", [[0.7] * 3], "local", seed) for seed in (0, 1)]
    lead, margin, *_ = summary_sentences(read_results(clear))
    assert lead.startswith(
        "Dis-PFL is ahead of Local: accuracy 0.800 on average over 3 peers and 2 seeds;"
    )
    assert margin.endswith(
        "is +0.100 [+0.100, +0.100], over 6 pairs of peers in 2 seeds (95 % bootstrap interval)."
    )
    unclear = [
        *clear[:2],
        write("m0", [[0.7] * 3], "dpsgd", 0),
        write("m1", [[0.85] * 3], "dpsgd", 1),
    ]
    assert summary_sentences(read_results(unclear))[0].startswith(
        "Dis-PFL is level with D-PSGD: accuracy 0.800"
    )


def test_too_few_peers_are_not_tested(write: Write) -> None:
    lead, _, _ = summary_sentences(
        read_results([write("a", [[0.6, 0.5]], "dispfl"), write("b", [[0.4, 0.4]], "local")])
    )
    assert (
        lead
        == "Dis-PFL has the best mean, accuracy 0.550 on average over 2 peers; the next, Local, has"
        " 0.400. Too few pairs of peers to test it."
    )


def test_the_page_says_at_how_many_connections_rows_are_compared(
    write: Write, tmp_path: Path
) -> None:
    def with_connections(name: str, method: str, count: int) -> Path:
        return write(
            name,
            [[0.5]],
            method,
            connections=count,
        )

    equal = read_results([with_connections("a", "dispfl", 4), with_connections("b", "fedavg", 4)])
    assert "Compared at equal connections: no node receives more than 4 models in a round." in str(
        results_section(equal)
    )
    assert "connections" not in str(summary_block(equal, tmp_path / "report.html"))
    other = read_results([with_connections("c", "dispfl", 4), with_connections("d", "fedavg", 10)])
    sentence = (
        "Not at equal connections: a node receives at most 4 models with Dis-PFL and 10 models with"
        " FedAvg in a round."
    )
    assert sentence in str(results_section(other))
    assert sentence in str(summary_block(other, tmp_path / "report.html"))


def test_an_unfinished_run_is_a_caveat_and_the_result_is_so_far(
    write: Write, tmp_path: Path
) -> None:
    paths = [write("a", [[0.6], [0.7]], "dispfl", rounds=5), write("b", [[0.4]] * 5, "local")]
    results = read_results(paths)
    assert summary_sentences(results)[0].startswith(
        "So far, Dis-PFL has the best mean, accuracy 0.700"
    )
    assert "Dis-PFL is not finished: 2 of 5 rounds (seed 0)." in str(
        summary_block(results, tmp_path / "report.html")
    )


def test_runs_with_other_data_have_no_winner(write: Write) -> None:
    paths = [write("a", [[0.6]], "dispfl"), write("b", [[0.4]], "local", data={"name": "cifar10"})]
    sentence = "The runs differ in data.name, so only rows with the same data are compared."
    assert summary_sentences(read_results(paths)) == [sentence]


def test_rows_without_a_common_seed_are_not_compared_peer_by_peer(
    write: Write, tmp_path: Path
) -> None:
    results = read_results([write("a", [[0.6]], "dispfl", 0), write("b", [[0.4]], "local", 1)])
    assert count_wins(results) == {}
    assert (
        summary_sentences(results)[1]
        == "No seed is common to all rows, so differences may come from the data."
    )
    caveat = "The rows have different seeds and therefore different data: Dis-PFL 0; Local 1."
    assert caveat in str(summary_block(results, tmp_path / "report.html"))


def test_seeds_that_some_rows_lack_are_omitted_with_a_caveat(write: Write, tmp_path: Path) -> None:
    paths = [
        write("a", [[0.6]], "dispfl", 0),
        write("b", [[0.9]], "dispfl", 1),
        write("c", [[0.7]], "local", 0),
    ]
    results = read_results(paths)
    assert summary_sentences(results)[0].startswith("Local has the best mean, accuracy 0.700")
    caveat = "Only seeds that all rows have are shown (0); omitted: Dis-PFL 1."
    assert caveat in str(summary_block(results, tmp_path / "report.html"))


def test_other_differing_settings_are_a_caveat(write: Write, tmp_path: Path) -> None:
    paths = [write("a", [[0.6]], "dispfl"), write("b", [[0.4]] * 2, "local")]
    text = str(summary_block(read_results(paths), tmp_path / "report.html"))
    assert "Besides the method, the rows differ in rounds; see Settings." in text


def test_a_seed_that_was_run_twice_is_a_caveat(write: Write, tmp_path: Path) -> None:
    results = read_results([write("a", [[0.6]]), write("b", [[0.4]])])
    caveat = "Dis-PFL has several runs of seed 0; each is counted separately."
    assert caveat in str(summary_block(results, tmp_path / "report.html"))


def test_failed_steps_are_counted_and_the_first_reason_given(write: Write, tmp_path: Path) -> None:
    record = {"failures": {"001": "The loss became nan."}}
    text = str(
        summary_block(
            read_results([write("a", [[0.6, 0.4]] * 3, record=record)]), tmp_path / "report.html"
        )
    )
    caveat = (
        "Dis-PFL: 3 steps of 1 peer failed, and the peers kept their last valid model. First"
        " reason: The loss"
    )
    assert caveat in text


def test_an_omitted_run_is_named_relative_to_the_page(write: Write, tmp_path: Path) -> None:
    begun = write("runs/begun", [[0.5]], "local")
    (begun / "metrics.jsonl").unlink()
    results = read_results([begun, write("runs/done", [[0.5]])])
    assert "runs/begun has no finished round yet and is omitted." in str(
        summary_block(results, tmp_path / "report.html")
    )


def test_a_page_without_problems_has_no_caveats(write: Write, tmp_path: Path) -> None:
    assert "caveats" not in str(
        summary_block(read_results([write("a", [[0.6]])]), tmp_path / "report.html")
    )


def test_one_run_reports_its_extremes_groups_and_cost(write: Write) -> None:
    path = write("a", [[0.5, 0.7, 0.9, 0.9]], own={"density": [0.2, 0.8]})
    assert summary_sentences(read_results([path])) == [
        "After 1 round, Dis-PFL reaches accuracy 0.750 on average over 4 peers.",
        "The worst peer (000) has 0.500, the best (002) 0.900.",
        "By density: 0.600 at 0.2 and 0.900 at 0.8.",
        (
            "The busiest node transfers 1.00 MB per round; training takes 1.00 GFLOPs per peer and"
            " round."
        ),
    ]


def test_one_row_of_two_seeds_reports_their_spread(write: Write) -> None:
    """0.5 and 0.7: the mean is 0.6, the sample deviation sqrt(2 x 0.1 squared / 1) = 0.141."""
    lead, *_ = summary_sentences(
        read_results([write("a", [[0.5]], seed=0), write("b", [[0.7]], seed=1)])
    )
    assert (
        lead
        == "After 1 round, Dis-PFL reaches accuracy 0.600 on average over 1 peer and 2 seeds (±"
        " 0.141 over seeds)."
    )


def test_the_lowest_error_leads_where_lower_is_better(write: Write) -> None:
    """Errors of six peers: Local's are 0.45 lower, except for one, whose error is the worst of
    Local's."""
    errors = {"metric": "mse", "higher_is_better": False}
    paths = [
        write("a", [[1.1, 1.1, 1.1, 1.1, 1.2, 0.5]], "dispfl", **errors),
        write("b", [[0.6, 0.6, 0.6, 0.6, 0.6, 0.7]], "local", **errors),
    ]
    results = read_results(paths)
    assert [row.label for row in results.rows] == ["Local", "Dis-PFL"]
    lead, _, peers, _ = summary_sentences(results)
    assert (
        lead
        == "Local is ahead of Dis-PFL: mse 0.617 on average over 6 peers; the next, Dis-PFL, has"
        " 1.017."
    )
    assert peers == "It is best for 5 of 6 peers, and worse for 1 (peer 005)."
    html = str(results_section(results))
    assert cells(html)[0][0] == "Local"
    assert cells(html)[0][2].startswith("-0.400, ahead[")
    assert cells(html)[1][3] == "1.20 to 0.50"
    assert "Mse (lower is better): mean over the peers" in html
    assert "The worst peer (004) has 1.200, the best (005) 0.500." in summary_sentences(
        read_results(paths[:1])
    )


def test_rows_that_were_never_evaluated_have_no_winner(write: Write) -> None:
    paths = [write(name, [[0.6]], name, record={"scores": {}}) for name in ("dispfl", "local")]
    assert summary_sentences(read_results(paths)) == ["No row has scores for all its seeds yet."]


def test_the_table_has_scores_costs_rounds_and_seconds_best_first(write: Write) -> None:
    """Two peers at 0.4 and 0.8: mean 0.6, deviation 0.2; two rounds of 1.5 s."""
    results = read_results(
        [write("a", [[0.1, 0.1]] * 2, "local", mb=0), write("b", [[0.4, 0.8]] * 2, mb=3, flops=5e8)]
    )
    assert cells(str(results_section(results))) == [
        ["Dis-PFL", "0.600", "–", "0.40 to 0.80", "1.50", "3.00", "0.50", "–", "2", "3.0"],
        [
            "Local",
            "0.100",
            "-0.500, untested",
            "0.10 to 0.10",
            "0.00",
            "0.00",
            "1.00",
            "–",
            "2",
            "3.0",
        ],
    ]


def test_the_spread_of_several_seeds_is_that_over_seeds(write: Write) -> None:
    """0.5 and 0.7: sample deviation 0.141."""
    results = read_results([write("a", [[0.4, 0.6]], seed=0), write("b", [[0.6, 0.8]], seed=1)])
    html = str(results_section(results))
    assert cells(html)[0][1:3] == ["0.600 ± 0.141", "0.40 to 0.80"]
    assert "Accuracy ± std over seeds" in html


def test_a_mean_over_one_seed_has_no_deviation_not_even_beside_rows_of_several_seeds(
    write: Write,
) -> None:
    """Rows with other data keep all their seeds: Dis-PFL two, Local one, whose peers' deviation is
    0.1."""
    runs = [write("a", [[0.4, 0.6]], seed=0), write("b", [[0.6, 0.8]], seed=1)]
    html = str(
        results_section(
            read_results([*runs, write("c", [[0.4, 0.6]], "local", data={"name": "cifar10"})])
        )
    )
    assert [row[1] for row in cells(html)] == ["0.600 ± 0.141", "0.500"]
    assert "±" not in str(results_section(read_results(runs[:1])))


def test_other_metrics_and_the_test_loss_have_columns_of_their_own(write: Write) -> None:
    f1 = {"higher_is_better": True, "format": ".3f", "mean": 0.25, "std": 0.0, "per_peer": [0.25]}
    both = {"accuracy": {**f1, "mean": 0.5, "per_peer": [0.5]}, "macro_f1": f1}
    path = write(
        "a",
        [[0.5]],
        record={"scores": both, "test_loss": {"mean": 1.5, "std": 0.0, "per_peer": [1.5]}},
    )
    html = str(results_section(read_results([path])))
    assert cells(html)[0][1:5] == ["0.500", "0.50 to 0.50", "0.250", "1.500"]
    assert "Macro_f1" in html
    assert "Test loss" in html


def test_an_unfinished_row_shows_its_rounds_out_of_the_total(write: Write) -> None:
    assert (
        cells(str(results_section(read_results([write("a", [[0.5]] * 2, rounds=9)]))))[0][7]
        == "2 of 9"
    )


def test_no_row_is_marked_best_if_rows_are_not_comparable(write: Write) -> None:
    same = [write("a", [[0.5]]), write("b", [[0.4]], "local")]
    assert str(results_section(read_results(same))).count('class="best"') == 1
    other = [write("c", [[0.5]]), write("d", [[0.4]], "local", data={"name": "cifar10"})]
    assert 'class="best"' not in str(results_section(read_results(other)))


def test_the_table_has_seconds_per_peer_and_its_legend_says_whose_flops_are_saved(
    write: Write,
) -> None:
    times = {"mean": 0.25, "std": 0.0, "per_peer": [0.25]}
    channels = write("a", [[0.6]], own={"structure": "channels"}, record={"peer_seconds": times})
    results = read_results([channels, write("b", [[0.5]], own={"structure": "weights"})])
    html = str(results_section(results))
    assert [(row[0], row[7]) for row in cells(html)] == [
        ("Dis-PFL (channels)", "0.250"),
        ("Dis-PFL", "–"),
    ]
    assert "FLOPs of Dis-PFL (channels) are saved" in html


def test_groups_of_one_run_are_reported_with_their_seconds(write: Write) -> None:
    times = {"mean": 1.0, "std": 0.0, "per_peer": [0.5, 2.0]}
    path = write("a", [[0.5, 0.9]], own={"density": [0.2, 0.8]}, record={"peer_seconds": times})
    sentence = "By density: 0.500 at 0.2 (0.500 s per round) and 0.900 at 0.8 (2.000 s per round)."
    assert sentence in summary_sentences(read_results([path]))
