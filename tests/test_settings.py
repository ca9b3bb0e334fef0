"""Settings refuse invalid values, in sentences that name the key, the range and the value."""

import pickle
from typing import Any, ClassVar, Literal

import pytest
from messages import refused
from pydantic import Field, ValidationError, create_model, field_validator

from dispfl.errors import ConfigError, DispflError
from dispfl.settings import Settings, check_known, did_you_mean


class Oven(Settings):
    table: ClassVar[str] = "oven"
    heat: float = Field(default=0.5, gt=0, le=1)
    trays: int = Field(default=2, ge=1)
    mode: Literal["fan", "grill"] = "fan"
    door: Literal["closed"] = "closed"
    light: bool = False
    label: str = ""
    dish: str = "bread"
    timer: float | None = None

    @field_validator("dish")
    @classmethod
    def _on_the_menu(cls, dish: str) -> str:
        return check_known(dish, ["bread", "cake"])


def refusal(**values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Oven(**values)
    return str(caught.value)


@pytest.mark.parametrize(
    ("limits", "value", "phrase"),
    [
        ({"gt": 0}, 0, "above 0"),
        ({"ge": 1}, 0, "at least 1"),
        ({"lt": 5}, 5, "below 5"),
        ({"le": 4}, 5, "at most 4"),
        ({"gt": 0, "lt": 5}, 5, "in (0, 5)"),
        ({"gt": 0, "le": 1}, 0, "in (0, 1]"),
        ({"ge": 0, "lt": 5}, 5, "in [0, 5)"),
        ({"ge": 0, "le": 1}, 2, "in [0, 1]"),
        ({"ge": -2.5, "le": 0.5}, 2, "in [-2.5, 0.5]"),
    ],
)
def test_every_combination_of_limits_has_its_phrase(
    limits: dict[str, Any], value: int, phrase: str
) -> None:
    knob: Any = create_model("Knob", __base__=Settings, turn=(float, Field(**limits)))
    with pytest.raises(ConfigError) as caught:
        knob(turn=value)
    assert str(caught.value) == f"turn must be {phrase}, got {value}."


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"heat": 20}, "oven.heat must be in (0, 1], got 20."),
        ({"heat": "hot"}, "oven.heat must be a number in (0, 1], got 'hot'."),
        ({"heat": float("nan")}, "oven.heat must be a finite number in (0, 1], got nan."),
        ({"trays": 0}, "oven.trays must be at least 1, got 0."),
        ({"trays": 1.5}, "oven.trays must be a whole number of at least 1, got 1.5."),
        ({"trays": "two"}, "oven.trays must be a whole number of at least 1, got 'two'."),
        ({"trays": True}, "oven.trays must be a number, got true."),
        ({"timer": False}, "oven.timer must be a number, got false."),
        ({"light": "maybe"}, "oven.light must be true or false, got 'maybe'."),
        ({"label": 3}, "oven.label must be text, got 3."),
        ({"mode": "steam"}, "oven.mode must be 'fan' or 'grill', got 'steam'."),
        ({"door": "open"}, "oven.door must be 'closed', got 'open'."),
        ({"dish": "braed"}, "oven.dish 'braed' does not exist. Did you mean bread?"),
        ({"trais": 3}, "Unknown key oven.trais. Did you mean oven.trays?"),
    ],
)
def test_a_bad_value_is_one_sentence(values: dict[str, Any], sentence: str) -> None:
    assert refusal(**values) == sentence


def test_every_bad_value_gets_its_sentence_in_the_order_of_the_fields() -> None:
    assert (
        refusal(trays=0, heat=2)
        == "oven.heat must be in (0, 1], got 2. oven.trays must be at least 1, got 0."
    )


@pytest.mark.parametrize("values", [{"heat": 2}, {"dish": "soup"}, {"trais": 3}])
def test_a_refusal_names_the_key_as_it_was_typed(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Oven(**values)
    assert caught.value.key == f"oven.{next(iter(values))}"


def test_of_several_bad_values_the_first_one_is_the_key() -> None:
    with pytest.raises(ConfigError) as caught:
        Oven(trays=0, heat=2)
    assert caught.value.key == "oven.heat"


def test_a_refusal_keeps_its_key_between_processes() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("oven.heat is too high.", key="oven.heat")))
    assert (str(error), error.key) == ("oven.heat is too high.", "oven.heat")


def test_three_choices_are_listed_with_commas_and_or() -> None:
    class Knob(Settings):
        turn: Literal["left", "right", "off"]

    knob: Any = Knob
    with refused(ConfigError, key="turn"):
        knob(turn="up")


def test_a_value_without_a_default_is_called_missing() -> None:
    knob: Any = create_model("Knob", __base__=Settings, turn=(float, ...))
    with refused(ConfigError, key="turn"):
        knob()


def test_a_bad_default_is_refused_too() -> None:
    knob: Any = create_model("Knob", __base__=Settings, turn=(float, Field(default=7, le=1)))
    with refused(ConfigError, key="turn"):
        knob()


def test_settings_do_not_change_after_they_are_made() -> None:
    oven = Oven(trays=3)
    with pytest.raises(ValidationError, match="frozen"):
        oven.trays = 4
    assert oven.trays == 3


def test_a_refusal_is_both_a_dispfl_error_and_a_value_error() -> None:
    assert issubclass(ConfigError, DispflError)
    assert issubclass(ConfigError, ValueError)


def test_a_name_far_from_all_gets_the_sorted_list() -> None:
    assert did_you_mean("xyz", ["grill", "fan"]) == "Known: fan, grill."
    assert did_you_mean("gril", ["grill", "fan"]) == "Did you mean grill?"


def test_a_key_is_compared_with_those_of_its_table_alone() -> None:
    known = ["rounds", "train.lr", "train.noise_std", "train.momentum", "method.foot"]
    assert did_you_mean("train.foo", known) == "Known: train.lr, train.momentum, train.noise_std."
    assert did_you_mean("train.mometum", known) == "Did you mean train.momentum?"
    assert did_you_mean("train.noise", known) == "Did you mean train.noise_std?"
    assert did_you_mean("trian.lr", known) == "Did you mean train.lr?"
    assert did_you_mean("lr", known) == "Known: rounds."
    assert did_you_mean("train.learning_rate", known) == "Did you mean train.lr?"
    assert (
        did_you_mean("method.sparsity", ["method.density"])
        == "Did you mean method.density, which is 1 - sparsity?"
    )
    assert did_you_mean("DisPFL", ["dispfl", "local"]) == "Did you mean dispfl?"


def test_nearest_returns_a_known_name_and_reads_an_iterator_once() -> None:
    assert check_known("fan", iter(["grill", "fan"])) == "fan"
    with pytest.raises(ValueError, match=r"^'fann' does not exist\. Did you mean fan\?$"):
        check_known("fann", iter(["grill", "fan"]))
