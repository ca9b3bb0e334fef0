"""Rounds per minute of eight real sites, one of them 20 times slower, with rounds and without.

python benchmarks/slowed_site.py

The slow site's process is stopped and continued in turn, so that it runs for 5 % of the time.
"""

import json
import os
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path

from dispfl.config import compose
from dispfl.files import RUN, SITES
from dispfl.peer.local_federation import PeerProcesses, create_run
from dispfl.peer.state.store import rounds_of
from dispfl.topology import peer_names

SITES_COUNT = 8
SECONDS = 90.0
"""How long rounds are counted."""
SLOWDOWN = 20
PERIOD = 1.0
"""Seconds from one stop of the slow process to the next."""
SETTINGS = [
    f"peers={SITES_COUNT}",
    "rounds=100000",
    "eval_every=50",
    "topology.degree=3",
    "partition.samples_per_peer=96",
    "partition.test_samples_per_peer=20",
    "train.epochs=2",
]


def slow_down(pid: int, stop: threading.Event) -> None:
    """Let a process run for a part of the time only."""
    running = PERIOD / SLOWDOWN
    while not stop.is_set():
        os.kill(pid, signal.SIGSTOP)
        stop.wait(PERIOD - running)
        os.kill(pid, signal.SIGCONT)
        stop.wait(running)


def rounds_per_minute(schedule: str, *, slowed: bool) -> list[float]:
    """Return the rounds per minute of each site; the slow one is the last."""
    names = peer_names(SITES_COUNT)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        create_run(compose({}, [*SETTINGS, f"schedule={schedule}"]), out)
        processes = PeerProcesses(out, names)
        stop = threading.Event()
        duty = threading.Thread(target=lambda: None)
        try:
            for name in names:
                processes.start(name)
            _wait_for_first_rounds(out, names)
            if slowed:
                duty = threading.Thread(target=slow_down, args=(processes.pid(names[-1]), stop))
            duty.start()
            before = _counts(out, names)
            began = time.monotonic()
            time.sleep(SECONDS)
            after = _counts(out, names)
            minutes = (time.monotonic() - began) / 60
        finally:
            stop.set()
            if duty.ident is not None:
                duty.join()
            processes.stop()
    return [round((after[name] - before[name]) / minutes, 1) for name in names]


def _wait_for_first_rounds(out: Path, names: list[str]) -> None:
    deadline = time.monotonic() + 240
    while min(_counts(out, names).values()) < 2:
        if time.monotonic() > deadline:
            raise TimeoutError("the sites have not finished their first rounds")
        time.sleep(1.0)


def _counts(out: Path, names: list[str]) -> dict[str, int]:
    return {name: len(rounds_of(out / SITES / name / RUN)) for name in names}


def main() -> None:
    for schedule in ("sync", "async"):
        for slowed in (False, True):
            rates = rounds_per_minute(schedule, slowed=slowed)
            result = {
                "benchmark": "slowed_site",
                "schedule": schedule,
                "slowed": slowed,
                "others_per_minute": round(statistics.fmean(rates[:-1]), 1),
                "last_per_minute": rates[-1],
                "all": rates,
            }
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
