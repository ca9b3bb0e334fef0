"""Distances of senders in the report, from handwritten runs and from a real one."""

import re
from pathlib import Path

from tests.report.conftest import write_run

from dispfl.config import compose
from dispfl.report.page import write_report
from dispfl.report.results import read_results
from dispfl.report.senders import senders_of
from dispfl.robust.attacks import Attack
from dispfl.topology import peer_names


def text_of(page: Path) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page.read_text()))


def test_honest_and_byzantine_senders_by_hand(tmp_path: Path) -> None:
    """Two rounds: 000 is received twice in each at distance 1 and far once; the Byzantine peer once
    at 4, then at 6 by two."""
    attacker = next(iter(Attack.of("noise", 0.3, peer_names(3), 0).byzantine))  # type: ignore[union-attr]
    other = next(name for name in peer_names(3) if name != attacker)
    honest = {"received": 2, "far": 1, "distance": 1.0}
    run = write_run(
        tmp_path / "run", [[0.5] * 3] * 2, attack="noise", byzantine=0.3, own={"robust": "clip"}
    )
    lines = (run / "metrics.jsonl").read_text().splitlines()
    for k, attack_model in enumerate(
        ({"received": 1, "far": 1, "distance": 4.0}, {"received": 2, "far": 2, "distance": 6.0})
    ):
        lines[k] = lines[k][
            :-1
        ] + f', "senders": {{"{other}": {honest}, "{attacker}": {attack_model}}}}}'.replace(
            "'", '"'
        )
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    write_report([run], tmp_path / "page.html")
    found = text_of(tmp_path / "page.html")
    assert "honest 1 1 50%" in found
    assert "Byzantine 1 5.33 100%" in found  # (4 + 2 * 6) / 3
    assert f"Far {attacker} Byzantine 3 5.33 100% {other} 4 1 50%" in found


def test_a_run_without_a_rule_has_no_distances_of_senders(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [[0.5] * 3])
    write_report([run], tmp_path / "page.html")
    assert "Distances of senders" not in (tmp_path / "page.html").read_text()


def test_a_real_run_records_how_often_senders_were_far(tmp_path: Path) -> None:
    """Five peers receive from four each. With one Byzantine peer assumed, the two farthest of four
    are beyond the third largest distance in every round but the first, when all models are the
    same.
    """
    overrides = ["peers=5", "topology=full", "method.robust=clip", "method.byzantine=1", "rounds=2"]
    run = compose({}, overrides).run(tmp_path / "run")
    first, second = (record["senders"] for record in run.metrics)
    same = {"received": 4, "far": 0, "distance": 0.0}
    assert first == dict.fromkeys(peer_names(5), same)
    assert sum(seen["far"] for seen in second.values()) == 5 * 2
    assert all(seen["received"] == 4 and seen["distance"] > 0 for seen in second.values())
    (read,) = read_results([tmp_path / "run"]).runs
    assert [sender.received for sender in senders_of(read)] == [8] * 5
