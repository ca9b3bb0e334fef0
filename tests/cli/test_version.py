"""`dispfl --version`, `-h` everywhere, and shell completion."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dispfl.cli import app


def test_the_version_is_that_of_the_package() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"dispfl {version('dispfl')}\n"


@pytest.mark.parametrize("command", [[], ["run"], ["compare"], ["data"], ["data", "list"], ["peer", "init"]])
def test_h_is_help(command: list[str]) -> None:
    short, long = (CliRunner().invoke(app, [*command, option]) for option in ("-h", "--help"))
    assert short.exit_code == 0
    assert short.output == long.output
    assert "Usage: " in short.output


def test_a_shell_completes_commands_and_options() -> None:
    """As bash asks, after `dispfl com<TAB>` and `dispfl compare --jo<TAB>`."""

    def completed(words: str) -> list[str]:
        number = str(len(words.split()) - 1)
        asked = {"_DISPFL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": number}
        program = "import sys; from dispfl.cli import main; sys.argv = ['dispfl']; main()"
        done = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, **asked}, capture_output=True, text=True
        )
        return done.stdout.split()

    assert completed("dispfl com") == ["compare"]
    assert completed("dispfl compare --jo") == ["--jobs"]


def test_the_completion_script_is_shown_and_readme_says_how_to_install_it() -> None:
    shown = CliRunner().invoke(app, ["--show-completion", "bash"])
    assert "_DISPFL_COMPLETE=complete_bash" in shown.output
    assert "dispfl --install-completion" in (Path(__file__).parents[2] / "README.md").read_text()
