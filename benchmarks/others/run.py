"""The same work in dispfl, Flower, fluke and in PFLlib's manner: seconds a round and peak memory,
as ratios to ours.

    python benchmarks/others/run.py                                  all sides, about an hour on two idle cores
    python benchmarks/others/run.py --peers 4 --samples 100 --rounds 1 --sides ours,pfllib

Every side runs in a process of its own, one after another and in turn, with all processors; Flower
and fluke in environments of their own, which the script makes in build/others. A side that cannot
be installed, or fails, is skipped with its reason. The first round warms up. Of the others the best
counts: wall time, and processor time of all its processes. Memory is the sum of their resident
memory, in which pages that processes share count several times. Ratios are per optimizer step,
because fluke's gossip trains fewer peers; all others take equal steps, which is checked.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from pathlib import Path

from work import Work

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "build/others"
TIMEOUT = 1800
"""Seconds after which a side is ended."""
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Side:
    """A script, and the packages of its own environment; without any it runs in ours."""

    script: str
    methods: tuple[str, ...]
    packages: tuple[str, ...] = ()


SIDES = {
    "ours": Side("ours.py", ("fedavg", "ditto", "gossip")),
    "pfllib": Side("pfllib_manner.py", ("fedavg", "ditto")),
    "fluke": Side("fluke_side.py", ("fedavg", "ditto", "gossip"), ("fluke-fl",)),
    "flower": Side("flower.py", ("fedavg", "ditto"), ("flwr[simulation]",)),
}


@dataclass(frozen=True)
class Measured:
    """The best of a side's rounds."""

    seconds: float
    """Wall time of an optimizer step."""
    processor: float
    """Processor time of an optimizer step, of all processes."""
    memory: float
    """MB of all processes, at their peak."""
    steps: int
    """Optimizer steps of a round."""

    def best(self, other: "Measured | None") -> "Measured":
        """Return the better numbers of two runs."""
        if other is None:
            return self
        processor, memory = min(self.processor, other.processor), min(self.memory, other.memory)
        return Measured(min(self.seconds, other.seconds), processor, memory, self.steps)


class SideFailedError(Exception):
    """Why a side is skipped, in a sentence."""


def environment(name: str, packages: tuple[str, ...]) -> Path:
    """Return the Python of a side's environment, which is made if it does not exist yet."""
    if not packages:
        return Path(sys.executable)
    torch = next(
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("torch==")
    )
    python = ENVIRONMENTS / name / "bin/python"
    done = ENVIRONMENTS / name / "installed"
    if not done.exists():
        print(f"Installing {name} into {ENVIRONMENTS / name} ...", file=sys.stderr)
        for command in (
            [sys.executable, "-m", "venv", str(ENVIRONMENTS / name)],
            [str(python), "-m", "pip", "install", "--quiet", torch, *packages],
        ):
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                raise SideFailedError(
                    f"cannot be installed: {(made.stderr.strip().splitlines() or ['?'])[-1]}"
                )
        done.touch()
    return python


def processes(root: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended
        children.setdefault(parent, []).append(int(folder.name))
    waiting = [root]
    while waiting:
        yield (process := waiting.pop())
        waiting += children.get(process, [])


def used(root: int) -> tuple[float, float]:
    """Return the processor seconds and the resident MB of a process and its descendants."""
    seconds = megabytes = 0.0
    for process in processes(root):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        seconds += (int(fields[11]) + int(fields[12])) / TICKS
        megabytes += int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return seconds, megabytes


def run_side(name: str, work: Work) -> Measured:
    """Run a side once; return its best round after the first."""
    python = environment(name, SIDES[name].packages)
    variables = {
        "PYTHONPATH": str(ROOT / "src") if python == Path(sys.executable) else "",
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_worker_niceness": "0",  # by default Ray's processes yield to all others
    }
    command = [str(python), str(HERE / SIDES[name].script)]
    settings = {**os.environ, **variables, **work.variable()}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=settings
        ) as process,
    ):
        marks, peak = watched_rounds(process, work.rounds)
        errors.seek(0)
        complaint = (errors.read().strip().splitlines() or ["no message"])[-1]
    if len(marks) < work.rounds:
        raise SideFailedError(f"failed: {complaint}")
    rounds = [
        [after - before for before, after in zip(*two, strict=True)] for two in pairwise(marks)
    ]
    seconds, processor = (min(one[k] / one[2] for one in rounds) for k in (0, 1))
    return Measured(seconds, processor, peak, int(rounds[-1][2]))


def watched_rounds(
    process: "subprocess.Popen[str]", rounds: int
) -> tuple[list[tuple[float, float, int]], float]:
    """Return the time, processor time and steps at the end of each round, and the largest memory of
    all processes.

    What the side does after its last round does not matter: all its processes are ended.
    """
    marks: list[tuple[float, float, int]] = []
    peak, ended = [0.0], threading.Event()

    def watch() -> None:
        began = time.monotonic()
        while not ended.wait(0.1):
            peak[0] = max(peak[0], used(process.pid)[1])
            if time.monotonic() - began > TIMEOUT:
                end_all(process.pid)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"steps"'):
                marks.append((time.perf_counter(), used(process.pid)[0], json.loads(line)["steps"]))
                if len(marks) == rounds:
                    break
    finally:
        ended.set()
        watcher.join()
        end_all(process.pid)
    return marks, peak[0]


def end_all(root: int) -> None:
    """End a process and its descendants, which are ours."""
    for process in list(processes(root)):
        try:
            os.kill(process, 9)
        except ProcessLookupError:
            continue


def compare(work: Work, sides: list[str], repeats: int) -> list[str]:
    """Run the sides in turn; print each result as JSON, and return the lines of a table."""
    found: dict[str, Measured] = {}
    taking_part = [name for name in sides if work.method in SIDES[name].methods]
    for _ in range(repeats):
        for name in list(taking_part):
            try:
                found[name] = run_side(name, work).best(found.get(name))
            except SideFailedError as reason:
                print(f"{name} is skipped: it {reason}", file=sys.stderr)
                taking_part.remove(name)
    ours, lines = found.get("ours"), []
    for name, one in found.items():
        if one.steps != work.steps and (name, work.method) != ("fluke", "gossip"):
            raise SystemExit(
                f"{name} took {one.steps} optimizer steps in a round instead of {work.steps}."
            )
        result = {
            "benchmark": "others",
            "side": name,
            "method": work.method,
            "batch": work.batch,
            "model": work.model,
        }
        seconds, processor = (one.steps * each for each in (one.seconds, one.processor))
        measured = {
            "seconds": seconds,
            "processor": processor,
            "memory": one.memory,
            "steps": one.steps,
        }
        print(
            json.dumps(result | {key: round(value, 3) for key, value in measured.items()}),
            flush=True,
        )
        cells = [
            work.method,
            str(work.batch),
            name,
            str(one.steps),
            f"{seconds:.2f}",
            f"{processor:.2f}",
        ]
        pairs = zip(astuple(one)[:3], astuple(ours or one)[:3], strict=True)
        lines.append(
            " | ".join(
                [*cells, f"{one.memory:.0f}", *(f"{theirs / own:.2f}" for theirs, own in pairs)]
            )
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--methods", default="fedavg,ditto,gossip")
    parser.add_argument("--model", default="five-layers", choices=["five-layers", "cnn"])
    parser.add_argument("--batches", default="32,128")
    for name, default in (
        ("peers", 20),
        ("samples", 500),
        ("epochs", 2),
        ("rounds", 3),
        ("repeats", 2),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    first = Work(
        "fedavg", given.model, given.peers, given.samples, 32, given.epochs, given.rounds + 1
    )
    table = []
    for method in given.methods.split(","):
        for batch in map(int, given.batches.split(",")):
            work = replace(first, method=method, batch=batch)
            table += compare(work, given.sides.split(","), given.repeats)
    head = "method | batch | side | steps | s/round | processor s | MB | time | processor | memory"
    print("", f"| {head} |", "|" + " --- |" * 10, *(f"| {line} |" for line in table), sep="\n")


if __name__ == "__main__":
    main()
