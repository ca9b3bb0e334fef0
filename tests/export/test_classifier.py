"""Predictions for picture files, by a network whose answers can be worked out by hand."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from dispfl.errors import DataError
from dispfl.export.card import Card
from dispfl.export.classifier import AT_ONCE, Classifier
from dispfl.export.deployed import Deployed

CARD = Card(classes=("left", "middle", "right"), shape=(1, 1, 3), mean=(0.0,), std=(1.0,))
BRIGHTEST = Classifier.of(Deployed(nn.Flatten(), CARD), CARD)
"""The more light at a place, the more probable its class."""


def picture(path: Path, *pixels: int) -> Path:
    row = Image.new("L", (len(pixels), 1))
    row.putdata(pixels)
    row.save(path)
    return path


def test_classes_come_with_the_most_probable_first(tmp_path: Path) -> None:
    """Softmax of (0, 0.2, 1): 1, 1.2214 and 2.7183 over 4.9397."""
    [found] = BRIGHTEST.predict([picture(tmp_path / "a.png", 0, 51, 255)])
    assert [name for name, _ in found.guesses] == ["right", "middle", "left"]
    assert [share for _, share in found.guesses] == pytest.approx([0.5503, 0.2473, 0.2024], abs=1e-4)
    assert (found.resized_from, found.problem) == (None, None)


def test_equal_classes_stand_in_the_cards_order(tmp_path: Path) -> None:
    [found] = BRIGHTEST.predict([picture(tmp_path / "a.png", 7, 7, 7)])
    assert [name for name, _ in found.guesses] == ["left", "middle", "right"]


def test_a_bad_picture_between_two_good_ones_leaves_them_alone(tmp_path: Path) -> None:
    paths = [
        picture(tmp_path / "a.png", 255, 0, 0),
        tmp_path / "none.png",
        picture(tmp_path / "b.png", 0, 0, 0, 0, 255, 255),
    ]
    found = BRIGHTEST.predict(paths)
    assert [one.path for one in found] == paths
    assert [one.guesses[0][0] if one.guesses else None for one in found] == ["left", None, "right"]
    assert found[1].problem == f"The picture {paths[1]} does not exist."
    assert [one.resized_from for one in found] == [None, None, (6, 1)]


def test_more_pictures_than_fit_a_batch_keep_their_order(tmp_path: Path) -> None:
    batches: list[int] = []

    def counting(pictures: Tensor) -> Tensor:
        batches.append(len(pictures))
        return pictures.flatten(1)

    first, second = picture(tmp_path / "a.png", 255, 0, 0), picture(tmp_path / "b.png", 0, 255, 0)
    found = Classifier(CARD, counting).predict([first] * AT_ONCE + [second])
    assert batches == [AT_ONCE, 1]
    assert [one.guesses[0][0] for one in found] == ["left"] * AT_ONCE + ["middle"]


def test_no_picture_at_all_is_no_prediction() -> None:
    assert BRIGHTEST.predict([]) == []


def test_a_model_with_more_outputs_than_classes_is_refused() -> None:
    two = CARD.model_copy(update={"classes": ("left", "right")})
    with pytest.raises(DataError, match=r"gives numbers of shape \[4, 3\]; its card promises \[4, 2\]\."):
        Classifier.of(Deployed(nn.Flatten(), two), two).probabilities(torch.zeros(4, 1, 1, 3))


def test_a_model_that_cannot_take_its_own_pictures_is_refused() -> None:
    with pytest.raises(DataError, match=r"The model does not take pictures of \[1, 1, 3\]: "):
        Classifier.of(Deployed(nn.Sequential(nn.Flatten(), nn.Linear(5, 3)), CARD), CARD).probabilities(
            torch.zeros(4, 1, 1, 3)
        )
