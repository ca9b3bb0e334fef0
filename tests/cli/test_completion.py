"""Completion, as shells ask for it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dispfl.cli.completion import bash_words

PROGRAM = "import sys; sys.argv[0] = 'dispfl'; from dispfl.cli import main; main()"
BREAKS = " @=:"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with the program first in the path."""
    home = tmp_path_factory.mktemp("home")
    program = home / "dispfl"
    program.write_text(f'#!/bin/sh\nexec "$PYTHON" -c "{PROGRAM}"\n')
    program.chmod(0o755)
    path = f"{home}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHON": sys.executable, "HOME": str(home)}


@pytest.fixture(scope="module")
def bash_script(environment: dict[str, str]) -> str:
    """What `--install-completion` installs."""
    return run(["dispfl"], environment | {"_DISPFL_COMPLETE": "source_bash"})


def run(command: list[str], environment: dict[str, str], folder: Path | None = None) -> str:
    ended = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def divided(line: str) -> list[str]:
    """A command line as bash divides it: at `=`, `@` and `:` too, which are words of their own."""
    words = [""]
    for letter in line:
        if letter == " ":
            words.append("")
        elif letter in BREAKS:
            words += [letter, ""]
        else:
            words[-1] += letter
    ended = words[-1] == "" and line[-1] != " "
    words = [word for word in words[:-1] if word] + words[-1:]
    return words[:-1] if ended else words


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash on this machine")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("dispfl run topology.offline", ["topology.offline_prob=", "topology.offline="]),
        ("dispfl run topology=fu", ["full"]),
        ("dispfl run topology.offline=", ["train", "skip"]),
        ("dispfl run train.momen", ["train.momentum=0", "train.momentum="]),
        ("dispfl sweep topology=ring,fu", ["ring,full"]),
        ("dispfl compare disp", ["dispfl"]),
        ("dispfl compare dispfl@method.struct", ["method.structure=weights"]),
        ("dispfl compare dispfl@method.structure=ch", ["channels"]),
        ("dispfl reproduce sparsi", ["sparsity"]),
        ("dispfl explain subfe", ["subfedavg"]),
        ("dispfl report runs/fi", ["runs/five", "runs/five/dispfl/seed-0"]),
        ("dispfl run mi", ["mine.toml"]),
    ],
)
def test_bash_completes(
    line: str, words: list[str], bash_script: str, environment: dict[str, str], tmp_path: Path
) -> None:
    for file in ("runs/five/dispfl/seed-0/config.toml", "runs/empty/notes.txt", "mine.toml"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    line_words = divided(line)
    quoted = " ".join(f"'{word}'" for word in line_words)
    script = (
        f"{bash_script}\n"
        f"COMP_WORDS=({quoted}); COMP_CWORD={len(line_words) - 1}\n"
        "_dispfl_completion dispfl\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    inserted = run(["bash", "--norc", "-c", script], environment, tmp_path).split()
    assert [word for word in inserted if word in words] == words
    assert "runs/empty" not in inserted


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_complete_whole_words(shell: str, environment: dict[str, str]) -> None:
    line = "dispfl compare dispfl@method.structure=ch"
    variables = {
        "_DISPFL_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    assert "dispfl@method.structure=channels" in run(["dispfl"], environment | variables)


def test_words_that_bash_divides_are_joined() -> None:
    divided_line = {"COMP_WORDS": "dispfl\nrun\nmethod\n=\ndis", "COMP_CWORD": "4"}
    line = bash_words(divided_line)
    assert (line.words, line.position, line.kept) == (["dispfl", "run", "method=dis"], 2, "method=")
    after_break = {"COMP_WORDS": "dispfl\nrun\nmethod\n=", "COMP_CWORD": "3"}
    assert bash_words(after_break).kept == "method="
    new_word = {"COMP_WORDS": "dispfl\nrun\n", "COMP_CWORD": "2"}
    assert bash_words(new_word).words == ["dispfl", "run", ""]


def test_completion_does_not_import_torch(environment: dict[str, str]) -> None:
    code = (
        "import sys\n"
        "from dispfl.cli import main\n"
        "sys.argv[0] = 'dispfl'\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "print(sorted({'torch', 'numpy'} & sys.modules.keys()))\n"
    )
    words = {"COMP_WORDS": "dispfl run method=", "COMP_CWORD": "2"}
    variables = {"_DISPFL_COMPLETE": "complete_bash", **words}
    printed = run([sys.executable, "-c", code], environment | variables)
    assert printed.splitlines()[-1] == "[]"
    assert "subfedavg" in printed
