"""`dispfl up`: what it refuses before anything is made, and how it shows its peers."""

import io
import json
from pathlib import Path

import pytest
from program import Dispfl
from rich.console import Console

from dispfl.cli.up import HEADINGS, table
from dispfl.config import compose
from dispfl.roster import roster_names
from dispfl.up import SITES, Processes, set_up

TINY = ["model=mlp", "topology=full", "rounds=1", "partition.samples=40", "partition.test_samples=20"]
ONE_THREAD = "which is for simulated runs: here every peer is a process of one thread. Use"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["together=4"], f"together is 4, {ONE_THREAD} together=1, or dispfl run."),
        (["threads=2"], f"threads is 2, {ONE_THREAD} threads=1, or dispfl run."),
        (["federation.toml"], f"together is 8, {ONE_THREAD} together=1, or dispfl run."),  # its threads do no harm
        (["--peers", "4", "peers=5"], "peers is 5 and --peers says 4: say it once."),
        (["--peers", "0"], "peers must be at least 1, got 0."),
        (["--peers", "4", "topology=random", "topology.degree=4"], "topology.degree must be below the number of"),
    ],
)
def test_what_real_processes_cannot_heed_is_refused_and_nothing_is_left(
    dispfl: Dispfl, words: list[str], sentence: str
) -> None:
    Path("federation.toml").write_text("threads = 3\ntogether = 8\n")
    said = dispfl("up", *words)
    assert said.code == 1
    assert said.err.startswith(f"dispfl: {sentence}")
    assert not Path("runs").exists()


def test_ray_is_for_simulated_runs(dispfl: Dispfl) -> None:
    pytest.importorskip("ray")
    said = dispfl("up", "engine=ray")
    assert said.code == 1
    assert said.err == f"dispfl: engine is ray, {ONE_THREAD} engine=inprocess, or dispfl run.\n"


def test_a_run_is_not_gone_on_with_under_settings_that_processes_do_not_heed(dispfl: Dispfl) -> None:
    set_up(compose({}, [*TINY, "peers=2", "threads=1"]), Path("run"))
    for word in ("threads=2", "together=4"):
        said = dispfl("up", "--resume", "run", word)
        assert said.code == 1
        assert said.err.startswith(f"dispfl: {word.replace('=', ' is ')}, {ONE_THREAD}")


def shown(width: int, *, sent: int, rounds: int, state: str) -> list[str]:
    """The live table of three peers, of which the last has not started."""
    processes = Processes(Path("up"), roster_names(3))
    for name, other in (("000", "001"), ("001", "000")):
        peers = {other: {"answered": rounds, "missed": 12, "sent_bytes": sent}}
        status = {"round": rounds, "score": 0.5, "state": state, "peers": peers, "refused": {other: {"stale": 3}}}
        folder = Path("up") / SITES / name / "run"
        folder.mkdir(parents=True)
        (folder / "status.json").write_text(
            json.dumps({**status, "sockets": {"sent": sent + sent // 50, "received": sent + sent // 50}})
        )
    written = io.StringIO()
    Console(file=written, width=width).print(table(processes, rounds))
    return written.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 200])
def test_the_live_table_fits_into_80_columns_with_every_peer_on_one_line(width: int) -> None:
    lines = shown(width, sent=123_456_789_000, rounds=500, state="serving others")
    assert len(lines) == 2 + 1 + 3  # headings of two lines, a rule and the peers
    assert {word for line in lines[:2] for word in line.split()} == {word for one in HEADINGS for word in one.split()}
    assert " ".join(lines[3].split()) == "000 500/500 0.500 123457 123457 2.0 500 12 3 serving"
    assert max(map(len, lines)) <= 80


def test_a_peer_that_has_not_started_has_neither_a_score_nor_a_share_of_tls() -> None:
    lines = shown(80, sent=1_500_000, rounds=10, state="learning")
    assert " ".join(lines[-2].split()) == "001 10/10 0.500 1.50 1.50 2.0 10 12 3 learning"
    assert " ".join(lines[-1].split()) == "002 0/10 – 0.00 0.00 – 0 0 0 starting"
