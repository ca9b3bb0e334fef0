"""The README's Python example runs as it stands, and its commands exist."""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from dispfl.cli import app
from dispfl.config import compose
from dispfl.runs.grid import methods_grid

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_python_example_runs_and_prints_a_number_for_each_of_its_eight_peers() -> None:
    [code] = re.findall(r"```python\n(.*?)```", README, re.S)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)  # our own text
    assert len(names["run"].accuracy) == 8
    assert min(names["run"].accuracy) > 1 / 3  # three classes: better than guessing


COMMANDS = re.findall(r"^dispfl (\w+)(.*?)(?:#.*)?$", README, re.M)


@pytest.mark.parametrize(("command", "arguments"), COMMANDS)
def test_every_command_in_the_readme_exists(command: str, arguments: str) -> None:
    assert command in get_command(app).commands  # type: ignore[attr-defined]
    if command == "compare":
        assert methods_grid(arguments.partition("--")[0].split(), {}, 1, Path("out"))
        return
    settings = [argument for argument in arguments.split() if "=" in argument]
    compose({}, settings)
