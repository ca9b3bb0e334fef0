"""The page "Methods" has every built-in method, with its settings."""

import re
from pathlib import Path

import pytest

from dispfl.methods.base import GossipMethod, Method, ServerMethod
from dispfl.registry import METHODS
from dispfl.robust.averages import Robust

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"
COMMON = {*GossipMethod.model_fields, *ServerMethod.model_fields, *Robust.model_fields}


def sections() -> dict[str, str]:
    """The text of each section, by its anchor."""
    parts = re.split(r"^### (.+)$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    anchors = [title.lower() for title in parts[::2]]
    return dict(zip(anchors, parts[1::2], strict=True))


def anchors() -> dict[str, str]:
    """The anchor that the overview links each method to."""
    return dict(re.findall(r"\[`([\w-]+)`\]\(#([\w-]+)\)", PAGE.read_text()))


def own_settings(method: type[Method]) -> set[str]:
    """The settings that a method adds to the common ones, or gives another default."""
    settings = set()
    for name, field in method.model_fields.items():
        if name != "name" and (name not in COMMON or (name == "private" and field.default)):
            settings.add(name)
    return settings


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_in_the_overview_and_has_a_section_with_its_settings(name: str) -> None:
    section = sections()[anchors()[name]]
    assert "**Settings:**" in section
    assert "**Sent:**" in section
    missing = [setting for setting in own_settings(METHODS[name]) if f"`{setting}`" not in section]
    assert not missing or "those of Dis-PFL" in section


@pytest.mark.parametrize("name", METHODS)
def test_the_page_says_which_methods_are_not_robust_or_not_private(name: str) -> None:
    text = " ".join(PAGE.read_text().split())
    _, not_robust, not_private = re.split(r"except in|only: not with", text)
    not_robust = not_robust.partition(". ")[0]
    not_private = not_private.partition(", nor ")[0]
    assert (f"`{name}`" in not_robust) == (not issubclass(METHODS[name], Robust))
    is_private = METHODS[name].can_be_private
    assert (f"`{name}`" in not_private) == (not is_private)
