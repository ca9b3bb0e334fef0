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
    sides = ([command, "--help"], [sys.executable, "-c", "import typer"])
    ours, typer = best_times(
        *(
            lambda words=words: subprocess.run(words, check=True, capture_output=True)
            for words in sides
        ),
        repeats=15,
    )
    report("start_up", ours / typer, LIMIT, milliseconds=round(1e3 * ours))


if __name__ == "__main__":
    main()
