"""Mistakes in a user's topology or method, from the command line: a sentence, and no traceback."""

from pathlib import Path

import pytest
from program import Dispfl

TINY = ["peers=3", "rounds=1", "topology=full", "partition.samples_per_peer=8", "model=mlp"]
MODULE = """
from typing import Literal

from dispfl.methods.dpsgd import DPSGD
from dispfl.topology import Topology


class Silent(Topology):
    name: Literal["silent"] = "silent"

    def neighbours(self, seed, t, roster):
        return None


class Raising(Topology):
    name: Literal["raising"] = "raising"

    def neighbours(self, seed, t, roster):
        return {}[roster[0]]


class ChoosesNone(DPSGD):
    name: Literal["none"] = "none"

    def choose(self, state, neighbourhood, *, rng):
        return None


class ChoosesStranger(DPSGD):
    name: Literal["stranger"] = "stranger"

    def choose(self, state, neighbourhood, *, rng):
        return ["bob"]


class PublishesNothing(DPSGD):
    name: Literal["nothing"] = "nothing"

    def publish(self, state):
        return None


class Divides(DPSGD):
    name: Literal["divides"] = "divides"

    def publish(self, state):
        return 1 / 0


class Starts(DPSGD):
    name: Literal["starts"] = "starts"

    def start(self, weights, layout, density, *, seed, peer):
        raise ValueError("no weights\\nfor me")
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of one's own in the working directory."""
    (tmp_path / "own_parts.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", ["run", "costs"])
@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        (
            "topology=own_parts:Silent",
            "topology silent must return a dict from each peer to a list of its neighbours, got"
            " None.",
        ),
        (
            "topology=own_parts:Raising",
            "topology raising, round 0: Raising.neighbours (own_parts.py, line 19) raised"
            " KeyError: '000'.",
        ),
        (
            "method=own_parts:ChoosesNone",
            "method none must choose a list of peers, got None for peer 000 in round 0.",
        ),
        (
            "method=own_parts:ChoosesStranger",
            "method stranger chooses 'bob' for peer 000 in round 0, which is not a peer.",
        ),
        (
            "method=own_parts:PublishesNothing",
            "PublishesNothing.publish must return a PackedModel, got NoneType.",
        ),
        (
            "method=own_parts:Divides",
            "In code of your own: Divides.publish (own_parts.py, line 47) raised"
            " ZeroDivisionError: division by zero.",
        ),
        (
            "method=own_parts:Starts",
            "In code of your own: Starts.start (own_parts.py, line 54) raised ValueError: no"
            " weights for me.",
        ),
    ],
)
def test_a_mistake_is_one_sentence(
    dispfl: Dispfl, command: str, setting: str, sentence: str
) -> None:
    result = dispfl(command, *TINY, setting)
    assert result.code == 1
    assert result.err == f"dispfl: {sentence}\n"
