"""The same work in dispfl, Flower, fluke and in PFLlib's manner, as ratios to dispfl.

The side `fast` is dispfl with `--fast`.

    python benchmarks/others/run.py          all sides, about an hour on two idle cores
    python benchmarks/others/run.py --peers 4 --samples 100 --rounds 1 --sides ours,pfllib

Measured are the seconds a round and the peak memory. Every side runs in a process of its own, one
after another and in turn, with all processors; Flower and fluke in environments of their own, which
the script makes in build/others. A side that cannot be installed, or fails, is skipped with its
reason. The first round warms up. Of the others the best counts: wall time, and processor time of
all its processes. Memory is the sum of their resident memory, in which pages that processes share
count several times. Ratios are per optimizer step, because fluke's gossip trains fewer peers; all
others take equal steps, which is checked.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from work import Work

FOLDER = Path(__file__).parent
ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "build/others"
TIMEOUT = 1800
"""Seconds after which a side is ended."""
TICKS = os.sysconf("SC_CLK_TCK")
PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")
COLUMNS = (
    "method",
    "batch",
    "side",
    "steps",
    "s/round",
    "processor s",
    "MB",
    "time",
    "processor",
    "memory",
)


@dataclass(frozen=True)
class Side:
    """A script, and the packages of its own environment; without any it runs in ours."""

    script: str
    methods: tuple[str, ...]
    packages: tuple[str, ...] = ()


MODELS = ("five-layers", "cnn", "resnet18")
SIDES = {
    "ours": Side("ours.py", ("fedavg", "ditto", "gossip")),
    "fast": Side("ours.py", ("fedavg", "ditto", "gossip")),
    "pfllib": Side("pfllib_manner.py", ("fedavg", "ditto")),
    "fluke": Side("fluke_side.py", ("fedavg", "ditto", "gossip"), ("fluke-fl",)),
    "flower": Side("flower.py", ("fedavg", "ditto"), ("flwr[simulation]",)),
}


@dataclass(frozen=True)
class Measurement:
    """The best of a side's rounds."""

    seconds: float
    """Wall time of an optimizer step."""
    processor: float
    """Processor time of an optimizer step, of all processes."""
    memory: float
    """MB of all processes, at their peak."""
    steps: int
    """Optimizer steps of a round."""

    def best(self, earlier: "Measurement | None") -> "Measurement":
        """Return the better numbers of two runs."""
        if earlier is None:
            return self
        return Measurement(
            seconds=min(self.seconds, earlier.seconds),
            processor=min(self.processor, earlier.processor),
            memory=min(self.memory, earlier.memory),
            steps=self.steps,
        )


@dataclass(frozen=True)
class RoundEnd:
    """What a side has used from its start to the end of a round."""

    clock: float
    processor: float
    steps: int


class SideFailedError(Exception):
    """Why a side is skipped, in a sentence."""


def environment(name: str, packages: tuple[str, ...]) -> Path:
    """Return the Python of a side's environment, which is made if it does not exist yet."""
    if not packages:
        return Path(sys.executable)
    folder = ENVIRONMENTS / name
    python = folder / "bin/python"
    installed = folder / "installed"
    if not installed.exists():
        print(f"Installing {name} into {folder} ...", file=sys.stderr)
        run_command([sys.executable, "-m", "venv", str(folder)])
        run_command([str(python), "-m", "pip", "install", "--quiet", torch_version(), *packages])
        installed.touch()
    return python


def torch_version() -> str:
    """Return the requirement of the torch that dispfl is tested with."""
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in constraints if line.startswith("torch=="))


def run_command(command: list[str]) -> None:
    """Run a command that installs a side."""
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise SideFailedError(f"cannot be installed: {last_line(process.stderr)}")


def last_line(text: str) -> str:
    """Return the last line of what a process has printed."""
    lines = text.strip().splitlines() or ["no message"]
    return lines[-1]


def stat_fields(process: int) -> list[str] | None:
    """Return what /proc says of a process, from its state on; None if it has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def process_tree(root: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        process = int(folder.name)
        fields = stat_fields(process)
        if fields is not None:
            parent = int(fields[1])
            children.setdefault(parent, []).append(process)
    waiting = [root]
    while waiting:
        process = waiting.pop()
        yield process
        waiting += children.get(process, [])


def resource_usage(root: int) -> tuple[float, float]:
    """Return the processor seconds and the resident MB of a process and its descendants."""
    seconds = 0.0
    megabytes = 0.0
    for process in process_tree(root):
        fields = stat_fields(process)
        if fields is not None:
            seconds += (int(fields[11]) + int(fields[12])) / TICKS
            megabytes += int(fields[21]) * PAGE_SIZE / 1e6
    return seconds, megabytes


def run_side(name: str, work: Work) -> Measurement:
    """Run a side once; return its best round after the first."""
    side = SIDES[name]
    python = environment(name, side.packages)
    variables = {
        "PYTHONPATH": "" if side.packages else str(ROOT / "src"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_worker_niceness": "0",  # by default Ray's processes yield to all others
    }
    command = [str(python), str(FOLDER / side.script)]
    work = replace(work, fast=name == "fast")
    variables = {**os.environ, **variables, **work.variable()}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=variables
        ) as process,
    ):
        round_ends, peak = watch_rounds(process, work.rounds)
        errors.seek(0)
        problem = last_line(errors.read())
    if len(round_ends) < work.rounds:
        raise SideFailedError(f"failed: {problem}")
    return best_round(round_ends, peak)


def best_round(round_ends: Sequence[RoundEnd], peak: float) -> Measurement:
    """Return the shortest wall time and processor time of a step after the first round."""
    seconds = []
    processor = []
    for before, after in pairwise(round_ends):
        steps = after.steps - before.steps
        seconds.append((after.clock - before.clock) / steps)
        processor.append((after.processor - before.processor) / steps)
    return Measurement(min(seconds), min(processor), peak, steps)


def watch_rounds(process: "subprocess.Popen[str]", rounds: int) -> tuple[list[RoundEnd], float]:
    """Return the ends of the rounds, and the largest memory of all processes in MB.

    What the side does after its last round does not matter: all its processes are ended.
    """
    round_ends: list[RoundEnd] = []
    peak = 0.0
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        began = time.monotonic()
        while not ended.wait(0.1):
            _, megabytes = resource_usage(process.pid)
            peak = max(peak, megabytes)
            if time.monotonic() - began > TIMEOUT:
                end_all(process.pid)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"steps"'):
                clock = time.perf_counter()
                processor, _ = resource_usage(process.pid)
                round_ends.append(RoundEnd(clock, processor, json.loads(line)["steps"]))
                if len(round_ends) == rounds:
                    break
    finally:
        ended.set()
        watcher.join()
        end_all(process.pid)
    return round_ends, peak


def end_all(root: int) -> None:
    """End a process that this script has started, and its descendants."""
    for process in list(process_tree(root)):
        try:
            os.kill(process, 9)
        except ProcessLookupError:
            continue


def compare(work: Work, sides: Sequence[str], repeats: int) -> list[str]:
    """Run the sides in turn; print each result as JSON, and return the rows of a table."""
    measurements: dict[str, Measurement] = {}
    remaining = [name for name in sides if work.method in SIDES[name].methods]
    for _ in range(repeats):
        for name in list(remaining):
            try:
                measurement = run_side(name, work)
            except SideFailedError as reason:
                print(f"{name} is skipped: it {reason}", file=sys.stderr)
                remaining.remove(name)
            else:
                measurements[name] = measurement.best(measurements.get(name))

    rows = []
    for name, measurement in measurements.items():
        may_differ = (name, work.method) == ("fluke", "gossip")
        if measurement.steps != work.steps and not may_differ:
            raise SystemExit(
                f"{name} took {measurement.steps} optimizer steps in a round instead of"
                f" {work.steps}."
            )
        print_result(name, measurement, work)
        rows.append(table_row(name, measurements, work))
    return rows


def print_result(name: str, measurement: Measurement, work: Work) -> None:
    """Print a side's result as JSON."""
    result = {
        "benchmark": "others",
        "side": name,
        "method": work.method,
        "batch": work.batch,
        "model": work.model,
        "seconds": round(measurement.steps * measurement.seconds, 3),
        "processor": round(measurement.steps * measurement.processor, 3),
        "memory": round(measurement.memory, 3),
        "steps": measurement.steps,
    }
    print(json.dumps(result), flush=True)


def table_row(name: str, measurements: Mapping[str, Measurement], work: Work) -> str:
    """Return a side's result as a row, with the ratios to ours, or to itself without ours."""
    measurement = measurements[name]
    reference = measurements.get("ours", measurement)
    cells = (
        work.method,
        str(work.batch),
        name,
        str(measurement.steps),
        f"{measurement.steps * measurement.seconds:.2f}",
        f"{measurement.steps * measurement.processor:.2f}",
        f"{measurement.memory:.0f}",
        f"{measurement.seconds / reference.seconds:.2f}",
        f"{measurement.processor / reference.processor:.2f}",
        f"{measurement.memory / reference.memory:.2f}",
    )
    return as_row(cells)


def as_row(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--methods", default="fedavg,ditto,gossip")
    parser.add_argument("--model", default=MODELS[0], choices=MODELS)
    parser.add_argument("--batches", default="32,128")
    parser.add_argument("--peers", type=int, default=20)
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    first = Work(
        method="fedavg",
        model=options.model,
        peers=options.peers,
        samples=options.samples,
        batch=32,
        epochs=options.epochs,
        rounds=options.rounds + 1,
    )

    table = [as_row(COLUMNS), as_row(["---"] * len(COLUMNS))]
    for method in options.methods.split(","):
        for batch in options.batches.split(","):
            work = replace(first, method=method, batch=int(batch))
            table += compare(work, options.sides.split(","), options.repeats)
    print("", *table, sep="\n")


if __name__ == "__main__":
    main()
