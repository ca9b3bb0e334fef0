"""A missing optional package is named in one sentence, together with the command that installs
it."""

import logging
import os
import tomllib
from pathlib import Path

import pytest
from messages import refused

from dispfl import extras
from dispfl.errors import ConfigError
from dispfl.extras import EXTRAS, can_draw, require, require_posix

PYPROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    monkeypatch.setattr(extras, "_warned", set())


@pytest.mark.usefixtures("nothing_installed")
def test_a_missing_package_is_named_with_its_install_command() -> None:
    with pytest.raises(ConfigError) as refused:
        require("ray", "engine=ray")
    assert (
        str(refused.value)
        == "engine=ray needs ray, which is not installed: pip install 'dispfl[ray]'."
    )


def test_only_the_packages_that_a_feature_needs_are_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "onnx" else object())
    require("export", "Reading a .onnx file", "onnxruntime")
    with refused(ConfigError):
        require("export", "A .onnx file")


@pytest.mark.usefixtures("nothing_installed")
def test_skipped_figures_are_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="dispfl"):
        assert not can_draw()
        assert not can_draw()
    assert caplog.messages == [
        "Figures are skipped. A figure needs matplotlib, which is not installed: pip install"
        " 'dispfl[report]'."
    ]


def test_windows_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "name", "nt")
    with pytest.raises(ConfigError) as refused:
        require_posix()
    assert str(refused.value).startswith(
        "dispfl runs on Linux and macOS; Windows is not supported."
    )


def test_the_extras_are_those_of_pyproject() -> None:
    declared = PYPROJECT["project"]["optional-dependencies"]
    for extra, packages in EXTRAS.items():
        names = {
            name.partition(">")[0].removesuffix("-skinny").replace("-", "_")
            for name in declared[extra]
        }
        assert names == set(packages)
    assert declared["all"] == [f"dispfl[{','.join(EXTRAS)}]"]
    assert "dispfl[all]" in declared["dev"]
