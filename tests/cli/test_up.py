"""`dispfl up`: refused settings and the live table."""

import io
import json
from pathlib import Path

import pytest
from program import Dispfl
from rich.console import Console

from dispfl.cli.up import HEADINGS, table
from dispfl.config import compose
from dispfl.files import SITES
from dispfl.peer.local_federation import PeerProcesses, create_run
from dispfl.topology import peer_names

TINY = [
    "model=mlp",
    "topology=full",
    "rounds=1",
    "partition.samples_per_peer=40",
    "partition.test_samples_per_peer=20",
]
ONE_THREAD = "which is for simulated runs: `dispfl up` trains each peer on one thread. Use"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vmap_peers=4"], f"vmap_peers is 4, {ONE_THREAD} vmap_peers=1, or dispfl run."),
        (
            ["average_buffers=true"],
            "average_buffers is for simulated runs: messages between real peers contain no",
        ),
        (
            ["deadline=5", "fleet=phones"],
            "deadline is 5, which counts simulated seconds: the peers of `dispfl up` have",
        ),
        (["fleet=phones"], "fleet is phones, which is for the clock of a simulation: the peers of"),
        (
            ["schedule=async", "hours_per_round=0.5"],
            "hours_per_round is 0.5, which is for the clock of a simulation: the peers of",
        ),
        (["workers=2"], f"workers is 2, {ONE_THREAD} workers=1, or dispfl run."),
        (
            ["federation.toml"],
            f"vmap_peers is 8, {ONE_THREAD} vmap_peers=1, or dispfl run.",
        ),  # its threads are ignored
        (["--peers", "4", "peers=5"], "peers=5 contradicts --peers 4; give one of them."),
        (["--peers", "0"], "peers must be in [1, 1000000], got 0."),
        (
            ["--peers", "4", "topology=random", "topology.degree=4"],
            "topology.degree must be below the number of",
        ),
    ],
)
def test_settings_of_a_simulation_are_refused_and_no_folder_is_left(
    dispfl: Dispfl, words: list[str], message: str
) -> None:
    Path("federation.toml").write_text("workers = 3\nvmap_peers = 8\n")
    result = dispfl("up", *words)
    assert result.code == 1
    assert result.err.startswith(f"dispfl: {message}")
    assert not Path("runs").exists()


def test_ray_is_for_simulated_runs(dispfl: Dispfl) -> None:
    pytest.importorskip("ray")
    result = dispfl("up", "engine=ray")
    assert result.code == 1
    assert result.err == f"dispfl: engine is ray, {ONE_THREAD} engine=inprocess, or dispfl run.\n"


def test_settings_of_a_simulation_are_refused_on_resume(dispfl: Dispfl) -> None:
    create_run(compose({}, [*TINY, "peers=2", "workers=1"]), Path("run"))
    for word in ("workers=2", "vmap_peers=4"):
        result = dispfl("up", "--resume", "run", word)
        assert result.code == 1
        assert result.err.startswith(f"dispfl: {word.replace('=', ' is ')}, {ONE_THREAD}")


def shown(width: int, *, sent: int, rounds: int, state: str) -> list[str]:
    """The live table of three peers; the last has not started."""
    processes = PeerProcesses(Path("up"), peer_names(3))
    for name, other in (("000", "001"), ("001", "000")):
        peers = {other: {"answered": rounds, "missed": 12, "sent_bytes": sent}}
        status = {
            "round": rounds,
            "score": 0.5,
            "state": state,
            "peers": peers,
            "refused": {other: {"stale": 3}},
        }
        folder = Path("up") / SITES / name / "run"
        folder.mkdir(parents=True)
        (folder / "status.json").write_text(
            json.dumps(
                {**status, "sockets": {"sent": sent + sent // 50, "received": sent + sent // 50}}
            )
        )
    written = io.StringIO()
    Console(file=written, width=width).print(table(processes, rounds))
    return written.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 200])
def test_the_live_table_fits_into_80_columns_with_every_peer_on_one_line(width: int) -> None:
    lines = shown(width, sent=123_456_789_000, rounds=500, state="serving")
    assert len(lines) == 2 + 1 + 3  # two lines of headings, a rule and the peers
    headings = {word for one in HEADINGS for word in one.split()} - {"score", "MB"} | {
        "accuracy",
        "GB",
    }  # the metric's name, and the unit of the largest
    assert {word for line in lines[:2] for word in line.split()} == headings
    assert " ".join(lines[3].split()) == "000 500/500 0.500 123.5 123.5 2.0 500 12 3 serving"
    assert max(map(len, lines)) <= 80


def test_a_peer_that_has_not_started_has_no_score_and_no_tls_overhead() -> None:
    lines = shown(80, sent=1_500_000, rounds=10, state="training")
    assert " ".join(lines[-2].split()) == "001 10/10 0.500 1.50 1.50 2.0 10 12 3 training"
    assert " ".join(lines[-1].split()) == "002 0/10 – 0.00 0.00 – 0 0 0 starting"
