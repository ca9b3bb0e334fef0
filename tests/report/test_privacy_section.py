"""The report's section on privacy: what was spent and what an audit found, one row for each run."""

import json
from collections.abc import Callable
from pathlib import Path

from html_cells import cells
from messages import refused

from dispfl.errors import RunError
from dispfl.report.page import write_report

Write = Callable[..., Path]
SPENT = {"epsilon": {"mean": 3.5, "std": 0.5, "per_peer": [3.0, 4.0]}}
FOUND = {
    "membership": [{"view": "personal model", "auc": {"value": 0.6123, "low": 0.6, "high": 0.62}}],
    "canaries": {"epsilon": 1.25},
    "labels": [{"distance": 0.55, "baseline": 0.62}, {"distance": 0.41, "baseline": 0.62}],
}


def section(paths: list[Path], out: Path) -> str | None:
    write_report(paths, out)
    _, found, rest = out.read_text().partition('<section id="privacy"')
    return rest.partition("</section>")[0] if found else None


def test_runs_that_are_neither_private_nor_audited_have_no_section(
    write: Write, tmp_path: Path
) -> None:
    assert section([write("a", [[0.5, 0.6]])], tmp_path / "report.html") is None


def test_the_bounds_of_epsilon_stand_side_by_side(write: Write, tmp_path: Path) -> None:
    audited, private = write("a", [[0.5, 0.6]]), write("b", [[0.5, 0.6]], "local", record=SPENT)
    (audited / "audit.json").write_text(json.dumps(FOUND))
    rows = cells(section([audited, private], tmp_path / "report.html") or "")
    assert rows == [
        ["Dis-PFL", "0", "0.612", "–", "0.41 (0.62)", "1.25", "not private"],
        ["Local", "0", *["not audited"] * 4, "4.00"],
    ]
    assert '<a href="#privacy">Privacy</a>' in (tmp_path / "report.html").read_text()


def test_a_damaged_audit_is_refused_in_a_sentence(write: Write, tmp_path: Path) -> None:
    path = write("a", [[0.5, 0.6]])
    (path / "audit.json").write_text('{"membership": 3}')
    with refused(RunError):
        write_report([path], tmp_path / "report.html")
