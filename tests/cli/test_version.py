"""`dispfl --version`."""

from importlib.metadata import version

from typer.testing import CliRunner

from dispfl.cli import app


def test_the_version_is_that_of_the_package() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"dispfl {version('dispfl')}\n"
