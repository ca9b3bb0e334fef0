"""The first sentences: true, and no more than was measured."""

from collections.abc import Callable
from pathlib import Path

from dispfl.analysis.report.results import read_results
from dispfl.analysis.report.sections.summary import summary_section
from dispfl.analysis.report.tally import tally
from dispfl.analysis.report.verdict import verdict

Write = Callable[..., Path]


def test_a_leader_with_one_seed_its_peers_and_its_costs(write: Write) -> None:
    """Peer 000 is better with Dis-PFL, 001 level, 002 better with FedAvg; 1 MB of FedAvg's 4, 0.5 of its 1 GFLOPs."""
    paths = [
        write("a", [[0.9, 0.8, 0.4]], "dispfl", mb=1, flops=5e8),
        write("b", [[0.3, 0.8, 0.5]], "fedavg", mb=4),
        write("c", [[0.2, 0.2, 0.2]], "local", mb=0),
    ]
    assert verdict(read_results(paths)) == [
        "Dis-PFL has the highest accuracy, 0.700 on average over 3 peers; FedAvg follows with 0.533 (0.167 less).",
        "There is one seed to compare, so small differences may be chance.",
        "It is best for 1 of 3 peers, level with another for 1, and behind for 1 (peer 002).",
        "Its busiest node moves 1.00 MB a round on the wire, 25 % of FedAvg’s; Local sends nothing; a peer’s training "
        "takes 0.50 GFLOPs a round (the others: 1.00).",
    ]


def test_a_lead_in_every_seed_is_said_and_one_in_some_is_no_clear_win(write: Write) -> None:
    clear = [write(f"d{seed}", [[0.8]], "dispfl", seed) for seed in (0, 1)]
    clear += [write(f"l{seed}", [[0.7]], "local", seed) for seed in (0, 1)]
    lead, seeds, *_ = verdict(read_results(clear))
    assert "0.800 on average over 1 peer and 2 seeds" in lead
    assert seeds == "It is ahead of all others in both seeds."
    unclear = [*clear[:2], write("m0", [[0.9]], "dpsgd", 0), write("m1", [[0.5]], "dpsgd", 1)]
    assert verdict(read_results(unclear))[1] == "It is ahead of all others in 1 of 2 seeds only: no clear win."


def test_a_tie_has_no_winner(write: Write) -> None:
    lead, peers, costs = verdict(
        read_results([write("a", [[0.6, 0.4]], "dispfl"), write("b", [[0.4, 0.6]], "local", mb=0)])
    )
    assert lead == "Dis-PFL and Local share the highest accuracy, 0.500 on average over 2 peers."
    assert peers == "Of 2 peers, Dis-PFL alone is best for 1 and Local alone is best for 1."
    assert costs == "Megabytes a round through the busiest node: Dis-PFL 1.00, Local nothing."


def test_an_unfinished_run_makes_it_so_far_and_is_cautioned(write: Write, tmp_path: Path) -> None:
    paths = [write("a", [[0.6], [0.7]], "dispfl", rounds=5), write("b", [[0.4]] * 5, "local")]
    results = read_results(paths)
    assert verdict(results)[0].startswith("So far, Dis-PFL has the highest accuracy, 0.700")
    assert "Dis-PFL is not finished: 2 of 5 rounds (seed 0)." in summary_section(results, tmp_path / "report.html")


def test_runs_with_other_data_have_no_winner(write: Write) -> None:
    paths = [write("a", [[0.6]], "dispfl"), write("b", [[0.4]], "local", data={"name": "cifar10"})]
    assert verdict(read_results(paths)) == ["The runs differ in data.name, so their scores do not compare."]


def test_rows_without_a_common_seed_are_not_compared_peer_by_peer(write: Write, tmp_path: Path) -> None:
    results = read_results([write("a", [[0.6]], "dispfl", 0), write("b", [[0.4]], "local", 1)])
    assert tally(results) is None
    assert verdict(results)[1] == "No seed is common to all rows, so differences may come from the data."
    caution = "The rows have different seeds, and so different data: Dis-PFL 0; Local 1."
    assert caution in summary_section(results, tmp_path / "report.html")


def test_seeds_that_some_rows_lack_are_left_out_with_a_caution(write: Write, tmp_path: Path) -> None:
    paths = [write("a", [[0.6]], "dispfl", 0), write("b", [[0.9]], "dispfl", 1), write("c", [[0.7]], "local", 0)]
    results = read_results(paths)
    assert verdict(results)[0].startswith("Local has the highest accuracy, 0.700")
    caution = "Only what every row has is shown, seed 0; left out: Dis-PFL 1."
    assert caution in summary_section(results, tmp_path / "report.html")


def test_other_settings_beside_the_method_are_cautioned(write: Write, tmp_path: Path) -> None:
    paths = [write("a", [[0.6]], "dispfl"), write("b", [[0.4]] * 2, "local")]
    said = summary_section(read_results(paths), tmp_path / "report.html")
    assert "Beside the method, the rows differ in rounds; see the setting." in said


def test_a_seed_that_was_run_twice_is_cautioned(write: Write, tmp_path: Path) -> None:
    results = read_results([write("a", [[0.6]]), write("b", [[0.4]])])
    assert "Dis-PFL has several runs of seed 0; each counts as one." in summary_section(results, tmp_path / "r.html")


def test_failed_steps_are_counted_and_the_first_reason_given(write: Write, tmp_path: Path) -> None:
    record = {"failures": {"001": "The loss became nan."}}
    said = summary_section(read_results([write("a", [[0.6, 0.4]] * 3, record=record)]), tmp_path / "report.html")
    assert "Dis-PFL: 3 steps of 1 peer failed, and the peers kept their last good model. The first: The loss" in said


def test_a_row_that_was_left_out_is_named_as_seen_from_the_page(write: Write, tmp_path: Path) -> None:
    begun = write("runs/begun", [[0.5]], "local")
    (begun / "metrics.jsonl").unlink()
    results = read_results([begun, write("runs/done", [[0.5]])])
    assert "runs/begun has no finished round yet and is left out." in summary_section(results, tmp_path / "report.html")


def test_a_quiet_page_has_no_cautions(write: Write, tmp_path: Path) -> None:
    assert "cautions" not in summary_section(read_results([write("a", [[0.6]])]), tmp_path / "report.html")


def test_one_run_tells_its_extremes_its_groups_and_its_cost(write: Write) -> None:
    path = write("a", [[0.5, 0.7, 0.9, 0.9]], own={"density": [0.2, 0.8]})
    assert verdict(read_results([path])) == [
        "After 1 round, Dis-PFL has accuracy 0.750 on average over 4 peers.",
        "The worst peer (000) has 0.500, the best (002) 0.900.",
        "By density: 0.600 at 0.2 and 0.900 at 0.8.",
        "The busiest node moves 1.00 MB a round; a peer’s training takes 1.00 GFLOPs a round.",
    ]


def test_one_row_of_two_seeds_tells_the_spread_between_them(write: Write) -> None:
    """0.5 and 0.7: the mean is 0.6, the sample deviation sqrt(2 x 0.1 squared / 1) = 0.141."""
    lead, *_ = verdict(read_results([write("a", [[0.5]], seed=0), write("b", [[0.7]], seed=1)]))
    assert (
        lead == "After 1 round, Dis-PFL has accuracy 0.600 on average over 1 peer and 2 seeds (± 0.141 between seeds)."
    )


def test_a_metric_of_ones_own_is_highest_and_never_best(write: Write) -> None:
    paths = [write("a", [[0.6]], "dispfl", metric="mse"), write("b", [[0.4]], "local", metric="mse")]
    said = " ".join(verdict(read_results(paths)))
    assert "Dis-PFL has the highest mse" in said
    assert "best" not in said


def test_a_peer_without_a_score_somewhere_is_not_counted(write: Write) -> None:
    found = tally(read_results([write("a", [[0.6, 0.9]], "dispfl"), write("b", [[0.4, None]], "local")]))
    assert found is not None
    assert (found.peers, found.alone) == (1, {"Dis-PFL": 1, "Local": 0})


def test_rows_that_were_never_scored_have_no_winner(write: Write) -> None:
    paths = [write(name, [[0.6]], name, record={"accuracy": None}) for name in ("dispfl", "local")]
    assert verdict(read_results(paths)) == ["No row has a score of all its seeds yet, so nobody is ahead."]
