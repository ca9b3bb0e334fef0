"""The worked example in the documentation runs as it stands."""

import re
from pathlib import Path
from typing import Any

import pytest

from dispfl.config import compose
from dispfl.methods.registry import METHODS

PAGE = (Path(__file__).parent.parent / "docs" / "add-a-method.md").read_text()


def test_the_added_method_runs_and_can_be_named_in_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "pulled", METHODS["local"])  # undone after the test
    code = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    names: dict[str, Any] = {}
    exec(compile("\n".join(code), "add-a-method.md", "exec"), names)  # our own text
    assert names["run"].summary["method"] == "pulled"
    assert names["run"].summary["accuracy"]["mean"] > 0.5
    assert compose({}, ["method=pulled", "method.strength=0.1"]).method == names["Pulled"](strength=0.1)


def test_the_method_takes_at_most_sixty_lines() -> None:
    method = re.findall(r"```python\n(.*?)```", PAGE, re.S)[0]
    assert len(method.splitlines()) <= 60
