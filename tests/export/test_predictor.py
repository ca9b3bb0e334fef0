"""Predictions for image files, by a network whose outputs can be computed by hand."""

from pathlib import Path

import pytest
import torch
from messages import refused
from PIL import Image
from torch import Tensor, nn

from dispfl.errors import DataError
from dispfl.export.card import Card
from dispfl.export.predictor import BATCH, DeployedModel, Predictor

CARD = Card(classes=("left", "middle", "right"), shape=(1, 1, 3), mean=(0.0,), std=(1.0,))
BRIGHTEST = Predictor.of(DeployedModel(nn.Flatten(), CARD), CARD)
"""The brighter a pixel, the more probable its class."""


def image(path: Path, *pixels: int) -> Path:
    row = Image.new("L", (len(pixels), 1))
    row.putdata(pixels)
    row.save(path)
    return path


def test_classes_are_sorted_by_probability(tmp_path: Path) -> None:
    """Softmax of (0, 0.2, 1): 1, 1.2214 and 2.7183 over 4.9397."""
    [found] = BRIGHTEST.predict([image(tmp_path / "a.png", 0, 51, 255)])
    assert [name for name, _ in found.guesses] == ["right", "middle", "left"]
    assert [share for _, share in found.guesses] == pytest.approx(
        [0.5503, 0.2473, 0.2024], abs=1e-4
    )
    assert (found.resized_from, found.problem) == (None, None)


def test_equally_probable_classes_are_in_the_cards_order(tmp_path: Path) -> None:
    [found] = BRIGHTEST.predict([image(tmp_path / "a.png", 7, 7, 7)])
    assert [name for name, _ in found.guesses] == ["left", "middle", "right"]


def test_an_unreadable_image_does_not_affect_the_others(tmp_path: Path) -> None:
    paths = [
        image(tmp_path / "a.png", 255, 0, 0),
        tmp_path / "none.png",
        image(tmp_path / "b.png", 0, 0, 0, 0, 255, 255),
    ]
    found = BRIGHTEST.predict(paths)
    assert [prediction.path for prediction in found] == paths
    assert [prediction.guesses[0][0] if prediction.guesses else None for prediction in found] == [
        "left",
        None,
        "right",
    ]
    assert found[1].problem == f"The image {paths[1]} does not exist."
    assert [prediction.resized_from for prediction in found] == [None, None, (6, 1)]


def test_more_images_than_fit_a_batch_keep_their_order(tmp_path: Path) -> None:
    batches: list[int] = []

    def counting(images: Tensor) -> Tensor:
        batches.append(len(images))
        return images.flatten(1)

    first, second = image(tmp_path / "a.png", 255, 0, 0), image(tmp_path / "b.png", 0, 255, 0)
    found = Predictor(CARD, counting).predict([first] * BATCH + [second])
    assert batches == [BATCH, 1]
    assert [prediction.guesses[0][0] for prediction in found] == ["left"] * BATCH + ["middle"]


def test_no_images_give_no_predictions() -> None:
    assert BRIGHTEST.predict([]) == []


def test_a_model_with_more_outputs_than_classes_is_refused() -> None:
    two = CARD.model_copy(update={"classes": ("left", "right")})
    with refused(DataError):
        Predictor.of(DeployedModel(nn.Flatten(), two), two).outputs(torch.zeros(4, 1, 1, 3))


def test_a_model_that_does_not_accept_its_declared_input_is_refused() -> None:
    with refused(DataError):
        Predictor.of(
            DeployedModel(nn.Sequential(nn.Flatten(), nn.Linear(5, 3)), CARD), CARD
        ).outputs(torch.zeros(4, 1, 1, 3))
