"""What the list of runs shows of a run: its state, progress, time left, score and curve."""

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Any

from dispfl.errors import DispflError, RunError
from dispfl.files import RUN, SITES, is_locked, is_site, read_regular
from dispfl.report.labels import METHOD_LABELS
from dispfl.report.runs import RecordedRun, read_run
from dispfl.runs.directory import LABELS, SPLIT, read_metrics, read_summary
from dispfl.runs.metrics import main_scores, measure_of
from dispfl.runs.progress_file import PROGRESS, RunProgress, read_progress
from dispfl.view.folders import Signature, signature

FILES = ("config.toml", "metrics.jsonl", "summary.json", "audit.json")
"""The files of a run that its page is made from."""
MAX_DETAIL_CHARS = 400
"""Of the reason why a run has failed."""
STATUS = "status.json"
"""What the node of a site writes into its run directory."""
MAX_FILE_MB = 500
"""A page does not read larger files, which take much memory and time, whoever made them."""
TIMED_ROUNDS = 5
"""The time left follows from so many rounds."""
UNREADABLE = (
    DispflError,
    OSError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What damaged files of a run or a site may cause, such as numbers that are too large."""


class Activity(StrEnum):
    """Whether a run makes rounds, and if not, why."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True)
class RunOverview:
    """A row of the list of runs."""

    activity: Activity
    method: str = ""
    rounds: int = 0
    """Finished rounds."""
    all_rounds: int = 0
    peers: int = 0
    ends_at: float | None = None
    """When its last round will be finished, as a Unix time, if rounds take as long as the last."""
    score: str = ""
    metric: str = ""
    curve: Sequence[float] | None = None
    """The mean score of every evaluated round; None while it was not read yet."""
    detail: str = ""
    """Why it has failed or was stopped."""

    @property
    def seconds_left(self) -> float | None:
        return None if self.ends_at is None else max(0.0, self.ends_at - time.time())


def check_files(path: Path) -> None:
    """Refuse a run directory with files that a page must not read: links, and very large ones."""
    files = [path / name for name in (*FILES, PROGRESS, STATUS, SPLIT)]
    files.append(path.parent.parent / LABELS)
    for file in (path, *files):
        megabytes = 0.0
        with contextlib.suppress(OSError):
            megabytes = file.lstat().st_size / 1e6
        if file.is_symlink():
            raise RunError(f"{file} is a link; pages do not follow it, as it may lead elsewhere.")
        if megabytes > MAX_FILE_MB:
            raise RunError(
                f"{file} has {megabytes:,.0f} MB; pages read files of at most {MAX_FILE_MB} MB."
            )


def read_run_for_page(path: Path) -> RecordedRun:
    """Read a run directory, unless a page must not read its files."""
    check_files(path)
    return read_run(path)


def run_signature(path: Path) -> tuple[Signature | bool, ...]:
    """Return what changes when a run or a site of it makes a round, starts or ends."""
    of_sites = [signature(site / RUN, [STATUS]) for site in site_folders(path)]
    return signature(path, FILES), is_active(path), *of_sites


def is_active(path: Path) -> bool:
    """Whether a process makes rounds of a run: its own, or a peer's of `dispfl up`."""
    if is_locked(path):
        return True
    return any(is_locked(site / RUN) for site in site_folders(path))


def site_folders(path: Path) -> list[Path]:
    """Return the folders of the sites of a run of `dispfl up`, none of which is a link."""
    sites = path / SITES
    try:
        if sites.is_symlink():
            return []
        return sorted(site for site in sites.iterdir() if is_site(site) and not site.is_symlink())
    except OSError:
        return []


def site_status(site: Path) -> dict[str, Any]:
    """Return what the node of a site last wrote; nothing if it cannot be read."""
    try:
        check_files(site / RUN)
        status = json.loads(read_regular(site / RUN / STATUS))
        sum(peer["missed"] for peer in status["peers"].values())
        float(status["score"] or 0)
        int(status["round"])
    except UNREADABLE:
        return {}
    return dict(status)


def activity_of(
    path: Path, summary: Mapping[str, Any] | None, progress: RunProgress | None
) -> Activity:
    """Return the state of a run: by its lock, its summary, and the error that ended it."""
    if is_active(path):
        return Activity.RUNNING
    if summary is not None:
        return Activity.FAILED if summary.get("failed_peers") else Activity.FINISHED
    if progress is not None and progress.error:
        return Activity.FAILED
    return Activity.STOPPED


def quick_overview(path: Path) -> RunOverview:
    """Return the overview without the curve, if the run's summary has all the rest."""
    try:
        check_files(path)
        summary = read_summary(path)
        if summary is None or is_active(path):
            return overview(path)
        rounds = int(summary["rounds"])
        scores = main_scores(summary)
        measure = measure_of([summary])
        return RunOverview(
            activity=activity_of(path, summary, None),
            method=_label(summary["method"]),
            rounds=rounds,
            all_rounds=rounds,
            peers=int(summary["peers"]),
            score=measure.text(scores["mean"] if scores else None),
            metric=measure.name,
            detail=_early_end(summary),
        )
    except UNREADABLE:
        return overview(path)


def overview(path: Path) -> RunOverview:
    """Return the overview of a run; of one that cannot be read, the reason."""
    try:
        return overview_of(read_run_for_page(path))
    except UNREADABLE as problem:
        return unreadable_overview(path, problem)


def unreadable_overview(path: Path, problem: Exception) -> RunOverview:
    """Return the overview of a run whose files cannot be read, with the reason."""
    activity = Activity.RUNNING if is_active(path) else Activity.FAILED
    return RunOverview(activity, curve=(), detail=reason_of(path, problem))


def reason_of(path: Path, problem: Exception) -> str:
    """Return why the files of a run cannot be read, as a sentence."""
    if isinstance(problem, DispflError):
        return str(problem)
    return f"The files of {path} are damaged ({type(problem).__name__})."


def overview_of(run: RecordedRun) -> RunOverview:
    """Return the overview of a run that is read already."""
    progress = read_progress(run.path)
    activity = activity_of(run.path, run.summary, progress)
    curve = [point.score for point in run.points if point.score is not None]
    shown = RunOverview(
        activity=activity,
        method=_label(run.method),
        rounds=len(run.records),
        all_rounds=run.config["rounds"],
        peers=run.config["peers"],
        score=run.measure.text(curve[-1] if curve else None),
        metric=run.measure.name,
        curve=curve,
    )
    if not run.records:
        shown = _with_progress_of_sites(shown, run)
    if activity is Activity.RUNNING and run.records:
        began = time.time()
        if progress is not None and progress.round == len(run.records):
            began = min(began, progress.began)
        return replace(shown, ends_at=_end_of(run.records, run.config["rounds"], began))
    detail = _early_end(run.summary or {})
    if progress is not None and progress.error and run.summary is None:
        detail = progress.error
    return replace(shown, detail=_shortened(detail))


def _shortened(text: str) -> str:
    if len(text) <= MAX_DETAIL_CHARS:
        return text
    return f"{text[:MAX_DETAIL_CHARS]}…"


def _end_of(records: Sequence[Mapping[str, Any]], all_rounds: int, began: float) -> float:
    """Return when the last round will be finished if the present one began at a time."""
    seconds = fmean(float(record["seconds"]) for record in records[-TIMED_ROUNDS:])
    return began + seconds * (all_rounds - len(records))


def _with_progress_of_sites(shown: RunOverview, run: RecordedRun) -> RunOverview:
    """Return the overview of a run of `dispfl up`, whose peers alone know of rounds until its end.

    The progress is that of the slowest peer, the score the mean over the peers.
    """
    statuses = {}
    for site in site_folders(run.path):
        status = site_status(site)
        if status:
            statuses[site] = status
    if not statuses:
        return shown
    slowest = min(statuses, key=lambda site: int(statuses[site]["round"]))
    scores = [status["score"] for status in statuses.values() if status["score"] is not None]
    records = read_metrics(slowest / RUN)
    measure = measure_of(records)
    shown = replace(
        shown,
        rounds=min(int(statuses[slowest]["round"]), shown.all_rounds),
        score=measure.text(fmean(scores) if scores else None),
        metric=measure.name,
    )
    if shown.activity is Activity.RUNNING and records:
        return replace(shown, ends_at=_end_of(records, shown.all_rounds, time.time()))
    return shown


def _label(method: object) -> str:
    name = str(method)
    return METHOD_LABELS.get(name, name)


def _early_end(summary: Mapping[str, Any]) -> str:
    """Say why a run has ended early, or which peers have learned nothing."""
    if "stopped" in summary:
        return str(summary["stopped"])
    failed = summary.get("failed_peers")
    if failed:
        return f"Every step of {len(failed)} of its peers failed."
    return ""
