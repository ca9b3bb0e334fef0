"""Eight real sites, one of them 20 times slower, with rounds and without: do all end, and when?

python benchmarks/slowed_site.py

The slow site's process is stopped and continued in turn, so that it runs for 5 % of the time. Each
run goes to its last round. Printed are the rounds per minute that a site has trained, and how long
after the others the slow one has trained its last round.
"""

import contextlib
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dispfl.config import compose
from dispfl.files import RUN, SITES
from dispfl.peer.local_federation import PeerProcesses, create_run
from dispfl.peer.state.store import rounds_of
from dispfl.runs.metrics import Metrics
from dispfl.topology import peer_names

NAMES = peer_names(8)
SLOW = NAMES[-1]
SLOWDOWN = 20
PERIOD = 1.0
"""Seconds from one stop of the slow process to the next."""
LONGEST_RUN = 1200.0
"""Seconds after which a run counts as hanging."""
SETTINGS = [
    f"peers={len(NAMES)}",
    "rounds=400",
    "eval_every=50",
    "topology.degree=3",
    "partition.samples_per_peer=96",
    "partition.test_samples_per_peer=20",
    "train.epochs=2",
]


@contextlib.contextmanager
def slowed(processes: PeerProcesses, name: str) -> Iterator[None]:
    """Let a site's process run for a part of the time only, until it ends."""
    process = processes.running[name]
    pid = processes.pid(name)
    running = PERIOD / SLOWDOWN
    stop = threading.Event()

    def alternate() -> None:
        with contextlib.suppress(ProcessLookupError):
            while process.is_alive() and not stop.is_set():
                os.kill(pid, signal.SIGSTOP)
                stop.wait(PERIOD - running)
                os.kill(pid, signal.SIGCONT)
                stop.wait(running)

    duty = threading.Thread(target=alternate)
    duty.start()
    try:
        yield
    finally:
        stop.set()
        duty.join()


def run_to_the_end(schedule: str, *, is_slowed: bool) -> dict[str, Any]:
    """Run the sites to their last round; return what they took."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        create_run(compose({}, [*SETTINGS, f"schedule={schedule}"]), out)
        processes = PeerProcesses(out, NAMES)
        try:
            for name in NAMES:
                processes.start(name)
            _until(lambda: min(map(len, _lines(out).values())) >= 2)
            began = time.time()
            with slowed(processes, SLOW) if is_slowed else contextlib.nullcontext():
                _until(lambda: len(processes.ended()) == len(NAMES))
        finally:
            processes.stop()
        return _measured(_lines(out), began) | {"exit_codes": sorted(processes.ended().values())}


def _lines(out: Path) -> dict[str, list[Metrics]]:
    """What each site has recorded of the rounds that it has trained."""
    return {name: list(rounds_of(out / SITES / name / RUN).values()) for name in NAMES}


def _until(happened: Any) -> None:
    deadline = time.monotonic() + LONGEST_RUN
    while not happened():
        if time.monotonic() > deadline:
            raise TimeoutError("the sites have not ended")
        time.sleep(0.5)


def _measured(lines: Mapping[str, list[Metrics]], began: float) -> dict[str, Any]:
    rates = {}
    ends = {}
    for name, records in lines.items():
        ends[name] = records[-1]["time"]
        trained = len([record for record in records if record["time"] >= began])
        rates[name] = 60 * trained / (ends[name] - began)
    slow_end = ends.pop(SLOW)
    slow_rate = rates.pop(SLOW)
    return {
        "others_per_minute": round(statistics.fmean(rates.values()), 1),
        "slow_per_minute": round(slow_rate, 1),
        "others_rounds": [len(records) for name, records in lines.items() if name != SLOW],
        "slow_rounds": len(lines[SLOW]),
        "slow_received": statistics.fmean(len(record["received"]) for record in lines[SLOW]),
        "last_rounds": sorted({records[-1]["round"] for records in lines.values()}),
        "others_end_within": round(max(ends.values()) - min(ends.values()), 1),
        "others_seconds": round(max(ends.values()) - began, 1),
        "slow_ends_later": round(slow_end - max(ends.values()), 1),
    }


def main() -> None:
    for schedule in ("sync", "async"):
        for is_slowed in (False, True):
            result = {"benchmark": "slowed_site", "schedule": schedule, "slowed": is_slowed}
            print(json.dumps(result | run_to_the_end(schedule, is_slowed=is_slowed)), flush=True)


if __name__ == "__main__":
    main()
