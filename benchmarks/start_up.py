"""`dispfl --help` against `python -c "import typer"`, each a process of its own; ratio of times.

The limit of 3.5: one part for Python and the library that any such command line needs, as much for rich, which draws
the help, and as much for our own commands. What must not happen is an import of torch, which alone would make it 10.
"""

import subprocess
import sys
from pathlib import Path

from measure import best_times, report

LIMIT = 3.5


def main() -> None:
    """Best of several."""
    command = str(Path(sys.executable).parent / "dispfl")
    sides = ([command, "--help"], [sys.executable, "-c", "import typer"])
    ours, typer = best_times(
        *(lambda words=words: subprocess.run(words, check=True, capture_output=True) for words in sides), repeats=15
    )
    report("start_up", ours / typer, LIMIT, milliseconds=round(1e3 * ours))


if __name__ == "__main__":
    main()
