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


@pytest.mark.parametrize(
    "command", [[], ["run"], ["compare"], ["data"], ["data", "list"], ["peer", "init"]]
)
def test_h_is_help(command: list[str]) -> None:
    short, long = (CliRunner().invoke(app, [*command, option]) for option in ("-h", "--help"))
    assert short.exit_code == 0
    assert short.output == long.output
    assert "Usage: " in short.output


def ask(**environment: str) -> str:
    """Ask the program for completions, as a shell does."""
    program = "import sys; from dispfl.cli import main; sys.argv = ['dispfl']; main()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    return done.stdout


def test_a_shell_completes_commands_and_options() -> None:
    """After `dispfl com<TAB>` and `dispfl compare --jo<TAB>`."""
    environment = {"_DISPFL_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    assert ask(**environment, COMP_WORDS="dispfl com").split() == ["compare"]
    assert ask(**environment | {"COMP_CWORD": "2"}, COMP_WORDS="dispfl compare --jo").split() == [
        "--jobs"
    ]


def test_the_completion_script_exists_and_a_page_says_how_to_install_it() -> None:
    assert "_DISPFL_COMPLETE=complete_bash" in ask(_DISPFL_COMPLETE="source_bash")
    assert "--install-completion" in CliRunner().invoke(app, ["--help"]).output
    page = Path(__file__).parents[2] / "docs" / "commands.md"
    assert "dispfl --install-completion" in page.read_text()
