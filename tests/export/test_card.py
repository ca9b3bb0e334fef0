"""The card of a model, and which cards are refused."""

import json
from typing import Any

import pytest
from messages import refused

from dispfl.errors import ConfigError
from dispfl.export.card import Card
from dispfl.models.settings import Model


def a_card(**changes: Any) -> Card:
    fields = {"classes": ("boot", "größe"), "shape": (1, 28, 28), "mean": (0.25,), "std": (0.5,)}
    return Card(**fields | changes)


def test_strings_are_stored_as_they_are_and_the_rest_as_json() -> None:
    strings = a_card(method="dispfl", seed=7, model=Model(name="vgg11")).to_strings()
    assert strings == {
        "classes": '["boot", "größe"]',
        "shape": "[1, 28, 28]",
        "mean": "[0.25]",
        "std": "[0.5]",
        "task": "classification",
        "model": '{"name": "vgg11", "init": "torch"}',
        "method": "dispfl",
        "seed": "7",
    }


def test_a_card_is_read_back_from_its_strings_and_unknown_keys_are_ignored() -> None:
    card = a_card(
        model=Model(), data="mnist", peer="003", score=0.1 + 0.2, rounds=5, structure="channels"
    )
    assert Card.from_strings({**card.to_strings(), "quantized_by": "somebody else"}) == card


def test_a_peer_called_003_stays_a_string() -> None:
    assert Card.from_strings(a_card(peer="003").to_strings()).peer == "003"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mean": (0.1, 0.2)}, "mean must have a number for each of 1 channels, got 2."),
        (
            {"shape": (3, 28, 28), "mean": (0, 0, 0)},
            "std must have a number for each of 3 channels, got 1.",
        ),
        (
            {"shape": (1, 20, 30), "model": Model()},
            "The built-in networks need square images, got shape [1, 20, 30].",
        ),
        ({"classes": ("boot\x1b[2J",)}, r"classes must be printable, got 'boot\x1b[2J'."),
        ({"std": (0.0,)}, "std: Input should be greater than 0, got 0.0."),
        ({"shape": (1, 28)}, "shape must be [channels, height, width], got [1, 28]."),
        (
            {"columns": ("age", "bmi")},
            "shape must be [2], the number of different columns, got [1, 28, 28].",
        ),
        (
            {"columns": ("age", "age"), "shape": (2,)},
            "shape must be [1], the number of different columns, got [2].",
        ),
        (
            {"columns": ("age", "bmi"), "shape": (2,)},
            "mean must have a number for each of 2 columns, got 1.",
        ),
        (
            {"structure": "layers"},
            "structure: Input should be 'weights' or 'channels', got 'layers'.",
        ),
        (
            {"shape": (1, 9999, 1)},
            "shape must be at most 4096 in each dimension, got [1, 9999, 1].",
        ),
    ],
)
def test_an_invalid_card_is_refused_with_one_sentence(
    changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        a_card(**changes)
    assert str(refused.value) == sentence


def test_a_custom_network_may_have_images_that_are_not_square() -> None:
    assert a_card(shape=(1, 20, 30)).shape == (1, 20, 30)


@pytest.mark.parametrize("text", ["[0.5", "[" * 100_000, ""])
def test_broken_json_is_refused(text: str) -> None:
    with refused(ConfigError, key="std"):
        Card.from_strings({**a_card().to_strings(), "std": text})


def test_metadata_without_classes_is_not_a_card() -> None:
    with refused(ConfigError):
        Card.from_strings({"format": "pt"})


def test_a_network_on_the_meta_device_has_the_names_and_shapes_of_the_real_one() -> None:
    network = a_card(model=Model()).network()
    real = Model().build(1, 2, 28).state_dict()
    assert {name: tensor.shape for name, tensor in network.state_dict().items()} == {
        name: tensor.shape for name, tensor in real.items()
    }
    assert {tensor.device.type for tensor in network.state_dict().values()} == {"meta"}


def test_the_strings_of_a_card_are_strings() -> None:
    assert all(isinstance(value, str) for value in a_card(score=0.5, seed=0).to_strings().values())
    assert json.loads(a_card(score=0.5).to_strings()["score"]) == 0.5
