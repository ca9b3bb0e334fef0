"""`dispfl --help` against `python -c "import typer"`, each a process of its own; ratio of times.

The limit of 2: half for Python and the library that any such command line needs, half for our own
commands and for drawing the help. It is not held: rich, which draws the help, takes as long to
import as all the rest.
"""

import subprocess
import sys
from pathlib import Path

from measure import best_times, report

LIMIT = 2.0


def main() -> None:
    """Best of several."""
    command = str(Path(sys.executable).parent / "dispfl")

    def show_help() -> None:
        subprocess.run([command, "--help"], check=True, capture_output=True)

    def import_typer() -> None:
        subprocess.run([sys.executable, "-c", "import typer"], check=True, capture_output=True)

    help_time, import_time = best_times(show_help, import_typer, repeats=15)
    report("start_up", help_time / import_time, LIMIT, milliseconds=round(1e3 * help_time))


if __name__ == "__main__":
    main()
