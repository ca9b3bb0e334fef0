"""`dispfl --help` against `python -c "import typer"`, each a process of its own; ratio of times.

The limit of 2: half for Python and the library that any such command line needs, half for our own
commands and for drawing the help. It is not held: rich, which draws the help, takes as long to
import as all the rest.

Then a whole `dispfl run` of one tiny round against `python -c "import torch"`. The limit of 2.2 is
for all that is not torch: settings, data, a round, matplotlib for the learning curve, the report.
"""

import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import best_times, report

LIMIT = 2.0
RUN_LIMIT = 2.2
TINY = (
    "peers=2",
    "rounds=1",
    "topology=ring",
    "partition.samples_per_peer=8",
    "partition.test_samples_per_peer=4",
    "train.epochs=1",
    "workers=1",
)


def main() -> None:
    """Best of several."""
    command = str(Path(sys.executable).parent / "dispfl")

    def show_help() -> None:
        subprocess.run([command, "--help"], check=True, capture_output=True)

    def import_typer() -> None:
        subprocess.run([sys.executable, "-c", "import typer"], check=True, capture_output=True)

    help_time, import_time = best_times(show_help, import_typer, repeats=15)
    report("start_up", help_time / import_time, LIMIT, milliseconds=round(1e3 * help_time))
    with tempfile.TemporaryDirectory() as folder:
        measure_run(command, Path(folder))


def measure_run(command: str, folder: Path) -> None:
    """A run of one round, with everything that it writes."""
    numbers = itertools.count()

    def run() -> None:
        out = str(folder / str(next(numbers)))
        subprocess.run([command, "run", *TINY, "--out", out], check=True, capture_output=True)

    def import_torch() -> None:
        subprocess.run([sys.executable, "-c", "import torch"], check=True, capture_output=True)

    run_time, import_time = best_times(run, import_torch, repeats=7)
    report(
        "start_up", run_time / import_time, RUN_LIMIT, run=True, milliseconds=round(1e3 * run_time)
    )


if __name__ == "__main__":
    main()
