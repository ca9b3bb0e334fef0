"""The summary sentences, the caveats and the results table."""

from collections.abc import Callable
from pathlib import Path

from html_cells import cells

from dispfl.report.results import count_wins, read_results
from dispfl.report.summary import results_section, summary_block, summary_sentences

Write = Callable[..., Path]


def test_a_leader_with_one_seed_its_peers_and_its_costs(write: Write) -> None:
    """Peer 000 is better with Dis-PFL, 001 level, 002 better with FedAvg; 1 MB of FedAvg's 4, 0.5 of its 1 GFLOPs."""
    paths = [
        write("a", [[0.9, 0.8, 0.4]], "dispfl", mb=1, flops=5e8),
        write("b", [[0.3, 0.8, 0.5]], "fedavg", mb=4),
        write("c", [[0.2, 0.2, 0.2]], "local", mb=0),
    ]
    assert summary_sentences(read_results(paths)) == [
        "Dis-PFL has the highest accuracy, 0.700 on average over 3 peers; FedAvg follows with 0.533 (0.167 lower).",
        "Only one seed is compared, so small differences may be due to chance.",
        "It is best for 1 of 3 peers, tied for 1, and behind for 1 (peer 002).",
        "Its busiest node transfers 1.00 MB per round on the wire, 25 % of FedAvg’s; Local sends nothing; training "
        "takes 0.50 GFLOPs per peer and round (the others: 1.00).",
    ]


def test_a_lead_in_every_seed_is_reported_and_one_in_some_is_not_certain(write: Write) -> None:
    clear = [write(f"d{seed}", [[0.8]], "dispfl", seed) for seed in (0, 1)]
    clear += [write(f"l{seed}", [[0.7]], "local", seed) for seed in (0, 1)]
    lead, seeds, *_ = summary_sentences(read_results(clear))
    assert "0.800 on average over 1 peer and 2 seeds" in lead
    assert seeds == "It leads in both seeds."
    unclear = [*clear[:2], write("m0", [[0.9]], "dpsgd", 0), write("m1", [[0.5]], "dpsgd", 1)]
    assert summary_sentences(read_results(unclear))[1] == "It leads in only 1 of 2 seeds, so the order is not certain."


def test_a_tie_has_no_winner(write: Write) -> None:
    lead, peers, costs = summary_sentences(
        read_results([write("a", [[0.6, 0.4]], "dispfl"), write("b", [[0.4, 0.6]], "local", mb=0)])
    )
    assert lead == "Dis-PFL and Local share the highest accuracy, 0.500 on average over 2 peers."
    assert peers == "Of 2 peers, Dis-PFL alone is best for 1 and Local alone is best for 1."
    assert costs == "MB per round through the busiest node: Dis-PFL 1.00, Local 0."


def test_an_unfinished_run_is_a_caveat_and_the_result_is_so_far(write: Write, tmp_path: Path) -> None:
    paths = [write("a", [[0.6], [0.7]], "dispfl", rounds=5), write("b", [[0.4]] * 5, "local")]
    results = read_results(paths)
    assert summary_sentences(results)[0].startswith("So far, Dis-PFL has the highest accuracy, 0.700")
    assert "Dis-PFL is not finished: 2 of 5 rounds (seed 0)." in summary_block(results, tmp_path / "report.html")


def test_runs_with_other_data_have_no_winner(write: Write) -> None:
    paths = [write("a", [[0.6]], "dispfl"), write("b", [[0.4]], "local", data={"name": "cifar10"})]
    sentence = "The runs differ in data.name, so their scores cannot be compared."
    assert summary_sentences(read_results(paths)) == [sentence]


def test_rows_without_a_common_seed_are_not_compared_peer_by_peer(write: Write, tmp_path: Path) -> None:
    results = read_results([write("a", [[0.6]], "dispfl", 0), write("b", [[0.4]], "local", 1)])
    assert count_wins(results) is None
    assert summary_sentences(results)[1] == "No seed is common to all rows, so differences may come from the data."
    caveat = "The rows have different seeds and therefore different data: Dis-PFL 0; Local 1."
    assert caveat in summary_block(results, tmp_path / "report.html")


def test_seeds_that_some_rows_lack_are_omitted_with_a_caveat(write: Write, tmp_path: Path) -> None:
    paths = [write("a", [[0.6]], "dispfl", 0), write("b", [[0.9]], "dispfl", 1), write("c", [[0.7]], "local", 0)]
    results = read_results(paths)
    assert summary_sentences(results)[0].startswith("Local has the highest accuracy, 0.700")
    caveat = "Only seeds that all rows have are shown (0); omitted: Dis-PFL 1."
    assert caveat in summary_block(results, tmp_path / "report.html")


def test_other_differing_settings_are_a_caveat(write: Write, tmp_path: Path) -> None:
    paths = [write("a", [[0.6]], "dispfl"), write("b", [[0.4]] * 2, "local")]
    text = summary_block(read_results(paths), tmp_path / "report.html")
    assert "Besides the method, the rows differ in rounds; see Settings." in text


def test_a_seed_that_was_run_twice_is_a_caveat(write: Write, tmp_path: Path) -> None:
    results = read_results([write("a", [[0.6]]), write("b", [[0.4]])])
    caveat = "Dis-PFL has several runs of seed 0; each is counted separately."
    assert caveat in summary_block(results, tmp_path / "report.html")


def test_failed_steps_are_counted_and_the_first_reason_given(write: Write, tmp_path: Path) -> None:
    record = {"failures": {"001": "The loss became nan."}}
    text = summary_block(read_results([write("a", [[0.6, 0.4]] * 3, record=record)]), tmp_path / "report.html")
    caveat = "Dis-PFL: 3 steps of 1 peer failed, and the peers kept their last valid model. First reason: The loss"
    assert caveat in text


def test_an_omitted_run_is_named_relative_to_the_page(write: Write, tmp_path: Path) -> None:
    begun = write("runs/begun", [[0.5]], "local")
    (begun / "metrics.jsonl").unlink()
    results = read_results([begun, write("runs/done", [[0.5]])])
    assert "runs/begun has no finished round yet and is omitted." in summary_block(results, tmp_path / "report.html")


def test_a_page_without_problems_has_no_caveats(write: Write, tmp_path: Path) -> None:
    assert "caveats" not in summary_block(read_results([write("a", [[0.6]])]), tmp_path / "report.html")


def test_one_run_reports_its_extremes_groups_and_cost(write: Write) -> None:
    path = write("a", [[0.5, 0.7, 0.9, 0.9]], own={"density": [0.2, 0.8]})
    assert summary_sentences(read_results([path])) == [
        "After 1 round, Dis-PFL reaches accuracy 0.750 on average over 4 peers.",
        "The worst peer (000) has 0.500, the best (002) 0.900.",
        "By density: 0.600 at 0.2 and 0.900 at 0.8.",
        "The busiest node transfers 1.00 MB per round; training takes 1.00 GFLOPs per peer and round.",
    ]


def test_one_row_of_two_seeds_reports_their_spread(write: Write) -> None:
    """0.5 and 0.7: the mean is 0.6, the sample deviation sqrt(2 x 0.1 squared / 1) = 0.141."""
    lead, *_ = summary_sentences(read_results([write("a", [[0.5]], seed=0), write("b", [[0.7]], seed=1)]))
    assert (
        lead == "After 1 round, Dis-PFL reaches accuracy 0.600 on average over 1 peer and 2 seeds (± 0.141 over seeds)."
    )


def test_the_lowest_error_leads_where_lower_is_better(write: Write) -> None:
    """1.106 against 0.655: Local wins, and peer 001, with the largest error of Dis-PFL, is its worst."""
    errors = {"metric": "mse", "higher_is_better": False}
    paths = [write("a", [[0.5, 1.712]], "dispfl", **errors), write("b", [[0.61, 0.7]], "local", **errors)]
    results = read_results(paths)
    assert [series.label for series in results.series] == ["Local", "Dis-PFL"]
    lead, _, peers, _ = summary_sentences(results)
    assert lead == "Local has the lowest mse, 0.655 on average over 2 peers; Dis-PFL follows with 1.106 (0.451 higher)."
    assert peers == "It is best for 1 of 2 peers, and behind for 1 (peer 000)."
    html = results_section(results)
    assert cells(html)[1][:4] == ["Dis-PFL", "1.106", "0.606", "1.71 to 0.50"]
    assert "Mse (lower is better): mean over the peers" in html
    assert "The worst peer (001) has 1.712, the best (000) 0.500." in summary_sentences(read_results(paths[:1]))


def test_rows_that_were_never_evaluated_have_no_winner(write: Write) -> None:
    paths = [write(name, [[0.6]], name, record={"scores": {}}) for name in ("dispfl", "local")]
    assert summary_sentences(read_results(paths)) == ["No row has scores for all its seeds yet."]


def test_the_table_has_scores_costs_rounds_and_seconds_best_first(write: Write) -> None:
    """Two peers at 0.4 and 0.8: mean 0.6, deviation 0.2; two rounds of 1.5 s."""
    results = read_results([write("a", [[0.1, 0.1]] * 2, "local", mb=0), write("b", [[0.4, 0.8]] * 2, mb=3, flops=5e8)])
    assert cells(results_section(results)) == [
        ["Dis-PFL", "0.600", "0.200", "0.40 to 0.80", "1.50", "3.00", "0.50", "–", "2", "3.0"],
        ["Local", "0.100", "0.000", "0.10 to 0.10", "0.00", "0.00", "1.00", "–", "2", "3.0"],
    ]


def test_the_spread_of_several_seeds_is_that_over_seeds(write: Write) -> None:
    """0.5 and 0.7: sample deviation 0.141."""
    results = read_results([write("a", [[0.4, 0.6]], seed=0), write("b", [[0.6, 0.8]], seed=1)])
    html = results_section(results)
    assert cells(html)[0][1:4] == ["0.600 ± 0.141", "0.100", "0.40 to 0.80"]
    assert "Accuracy ± std over seeds" in html


def test_a_mean_over_one_seed_has_no_deviation_not_even_beside_rows_of_several_seeds(write: Write) -> None:
    """Rows with other data keep all their seeds: Dis-PFL two, Local one, whose peers' deviation is 0.1."""
    runs = [write("a", [[0.4, 0.6]], seed=0), write("b", [[0.6, 0.8]], seed=1)]
    html = results_section(read_results([*runs, write("c", [[0.4, 0.6]], "local", data={"name": "cifar10"})]))
    assert [row[1] for row in cells(html)] == ["0.600 ± 0.141", "0.500"]
    assert "±" not in results_section(read_results(runs[:1]))


def test_other_metrics_and_the_test_loss_have_columns_of_their_own(write: Write) -> None:
    f1 = {"higher_is_better": True, "format": ".3f", "mean": 0.25, "std": 0.0, "per_peer": [0.25]}
    both = {"accuracy": {**f1, "mean": 0.5, "per_peer": [0.5]}, "macro_f1": f1}
    path = write("a", [[0.5]], record={"scores": both, "test_loss": {"mean": 1.5, "std": 0.0, "per_peer": [1.5]}})
    html = results_section(read_results([path]))
    assert cells(html)[0][1:6] == ["0.500", "0.000", "0.50 to 0.50", "0.250", "1.500"]
    assert "Macro_f1" in html
    assert "Test loss" in html


def test_an_unfinished_row_shows_its_rounds_out_of_the_total(write: Write) -> None:
    assert cells(results_section(read_results([write("a", [[0.5]] * 2, rounds=9)])))[0][8] == "2 of 9"


def test_no_row_is_marked_best_if_rows_are_not_comparable(write: Write) -> None:
    same = [write("a", [[0.5]]), write("b", [[0.4]], "local")]
    assert results_section(read_results(same)).count('class="best"') == 1
    other = [write("c", [[0.5]]), write("d", [[0.4]], "local", data={"name": "cifar10"})]
    assert 'class="best"' not in results_section(read_results(other))


def test_the_table_has_seconds_per_peer_and_its_legend_says_whose_flops_are_saved(write: Write) -> None:
    times = {"mean": 0.25, "std": 0.0, "per_peer": [0.25]}
    channels = write("a", [[0.6]], own={"structure": "channels"}, record={"peer_seconds": times})
    results = read_results([channels, write("b", [[0.5]], own={"structure": "weights"})])
    html = results_section(results)
    assert [(row[0], row[7]) for row in cells(html)] == [("Dis-PFL (channels)", "0.250"), ("Dis-PFL", "–")]
    assert "FLOPs of Dis-PFL (channels) are saved" in html


def test_groups_of_one_run_are_reported_with_their_seconds(write: Write) -> None:
    times = {"mean": 1.0, "std": 0.0, "per_peer": [0.5, 2.0]}
    path = write("a", [[0.5, 0.9]], own={"density": [0.2, 0.8]}, record={"peer_seconds": times})
    sentence = "By density: 0.500 at 0.2 (0.500 s per round) and 0.900 at 0.8 (2.000 s per round)."
    assert sentence in summary_sentences(read_results([path]))
