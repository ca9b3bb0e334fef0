"""The section on privacy: what each run has spent, and what its audit has found."""

import json
from typing import Any

from dispfl.errors import RunError
from dispfl.report.markup import Markup, format_number, html_table, remark, section
from dispfl.report.results import ReportResults
from dispfl.report.runs import ReportRun
from dispfl.runs.metrics import last

NOTE = (
    "AUC: how well members of the training data are told from others by attacking the personal"
    " model, and what a neighbour received of it; 0.5 is a blind guess. Epsilon is at least what"
    " canaries have shown, with 95 % confidence, and at most what was accounted. Distance: of class"
    " histograms guessed from masks at best, and in brackets without masks; 0 is exact."
)


def privacy_section(results: ReportResults) -> Markup | None:
    """Return a row for each run that is private or was audited; None if there is none."""
    rows = []
    for series in results.series:
        for run in series.runs:
            audit, spent = _read_audit(run), last(run.records, "epsilon")
            if audit or spent:
                rows.append([series.label, str(run.seed), *_cells(audit), _accounted(spent)])
    if not rows:
        return None
    headings = [
        ("Row", ""),
        ("Seed", "number"),
        ("AUC, model", "number"),
        ("AUC, received", "number"),
    ]
    headings += [
        ("Distance, masks", "number"),
        ("Epsilon at least", "number"),
        ("Epsilon at most", "number"),
    ]
    return section(
        "privacy",
        "Privacy",
        html_table("Privacy of the runs", headings, rows, "plain"),
        remark(NOTE),
    )


def _cells(audit: dict[str, Any] | None) -> list[str]:
    if audit is None:
        return ["not audited"] * 4
    attacked = {one["view"]: one["auc"]["value"] for one in audit["membership"]}
    model, received = (
        attacked.get(view) for view in ("personal model", "what a neighbour received")
    )
    guesses = sorted(audit["labels"], key=lambda one: float(one["distance"]))
    masks = [f"{one['distance']:.2f} ({one['baseline']:.2f})" for one in guesses[:1]]
    canaries = audit["canaries"]
    return [
        format_number(model, 3),
        format_number(received, 3),
        *(masks or [format_number(None, 2)]),
        format_number(canaries and canaries["epsilon"], 2),
    ]


def _accounted(spent: dict[str, Any] | None) -> str:
    return (
        f"{max(one for one in spent['per_peer'] if one is not None):.2f}"
        if spent
        else "not private"
    )


def _read_audit(run: ReportRun) -> dict[str, Any] | None:
    file = run.path / "audit.json"
    try:
        found: dict[str, Any] = json.loads(file.read_text())
        _cells(found)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise RunError(
            f"{file} cannot be read: {problem}. Repeat: dispfl audit {run.path}"
        ) from problem
    return found
