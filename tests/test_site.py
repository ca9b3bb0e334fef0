"""The documentation site: its pages and links, its list of public names, and its pictures."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dispfl

ROOT = Path(__file__).parent.parent


def test_the_site_builds_without_a_warning_and_every_link_and_anchor_in_it_exists(
    tmp_path: Path,
) -> None:
    pytest.importorskip("mkdocs")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Peers that train together" in (tmp_path / "site" / "reference" / "api.html").read_text()
    assert (tmp_path / "site" / "CHANGELOG.html").exists()


def test_every_public_name_is_on_the_page_of_the_python_api() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    missing = [
        name
        for name in dispfl.__all__
        if name != "__version__" and not re.search(rf"\b{name}\b", page)
    ]
    assert missing == []


@pytest.mark.parametrize(
    "notebook", sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem
)
def test_a_notebook_runs_from_top_to_bottom(notebook: Path, tmp_path: Path) -> None:
    """In a process of its own: Jupyter's packages warn about their own deprecations."""
    pytest.importorskip("nbclient")
    code = (
        "import sys, nbformat, nbclient; nbclient.NotebookClient(nbformat.read(sys.argv[1], 4),"
        " timeout=600, kernel_name='python3').execute()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(notebook)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_the_pictures_are_those_that_the_script_draws(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "draw_concepts.py"), str(tmp_path)], check=True
    )
    for drawn in sorted(tmp_path.iterdir()):
        assert drawn.read_text() == (ROOT / "docs" / "images" / drawn.name).read_text(), drawn.name
    assert len(list(tmp_path.iterdir())) == 3
