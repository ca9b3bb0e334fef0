"""The README's Python example runs as it stands; its pictures, links and commands exist, and so do
the commands of docs/commands.md."""

import re
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.main import get_command

from dispfl.cli import app
from dispfl.config import compose
from dispfl.runs.grid import methods_grid

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS_PAGE = (ROOT / "docs" / "commands.md").read_text()


def test_the_python_example_runs_and_prints_a_number_for_each_of_its_eight_peers() -> None:
    [code] = re.findall(r"```python\n(.*?)```", README, re.S)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)  # our own text
    assert len(names["run"].accuracy) == 8
    assert min(names["run"].accuracy) > 1 / 3  # three classes: better than guessing


def test_the_readme_is_a_landing_page() -> None:
    assert 500 <= len(README.split()) <= 700


def test_the_commands_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\w+)", README, re.M)
    assert targets == ["demo", "test"]
    for target in targets:
        assert f"\n{target}:" in makefile


def test_the_pictures_are_svg_files_for_light_and_dark_and_for_wide_and_narrow_screens() -> None:
    files = re.findall(r'(?:srcset|src)="(.*?)"', README)
    assert len(files) == 4
    for file in files:
        assert ElementTree.parse(ROOT / file).getroot().tag.endswith("svg")


def test_every_link_of_the_readme_leads_to_a_file() -> None:
    links = re.findall(r"\]\((?!https:)([^)#]+)", README)
    assert len(links) > 25
    assert [link for link in links if not (ROOT / link).exists()] == []


# Placeholders of the pages, such as a folder of data, are words in capitals; they need not exist.
COMMANDS = re.findall(r"^dispfl (.*?)(?: +#.*)?$", README + COMMANDS_PAGE, re.M)
TABLE = re.findall(r"`dispfl (peer .*?|export .*?)`", COMMANDS_PAGE)


def test_the_page_of_commands_is_the_one_that_is_read_here() -> None:
    assert len(COMMANDS) > 25
    assert len(TABLE) >= 10


@pytest.mark.parametrize("line", [*COMMANDS, *TABLE])
def test_every_command_of_the_pages_exists_with_its_options_and_settings(line: str) -> None:
    words = shlex.split(line)
    command: Any = get_command(app)
    while words and hasattr(command, "commands"):
        assert words[0] in command.commands
        command = command.commands[words.pop(0)]
    if not words:
        return
    known = {name for parameter in command.params for name in parameter.opts}
    options = [word for word in words if re.match(r"--?[a-z]", word)]
    assert set(options) <= known
    if line.startswith("compare"):
        assert methods_grid(shlex.split(line.partition(" --")[0])[1:], {}, 1, Path("out"))
        return
    if not line.startswith("sweep"):
        compose({}, [word for word in words if re.match(r"[a-z_.]+=", word)])
