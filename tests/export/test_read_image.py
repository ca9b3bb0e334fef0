"""Image files as inputs of a model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refused
from PIL import Image

from dispfl.errors import DataError
from dispfl.export.predictor import read_image


def save(path: Path, mode: str, size: tuple[int, int], *pixels: Any) -> Path:
    image = Image.new(mode, size)
    image.putdata(list(pixels))
    image.save(path)
    return path


def test_grey_pixels_are_divided_by_255_and_lie_row_by_row(tmp_path: Path) -> None:
    path = save(tmp_path / "grey.png", "L", (2, 2), 0, 51, 102, 255)
    image = read_image(path, (1, 2, 2))
    assert torch.allclose(image.pixels, torch.tensor([[[0, 0.2], [0.4, 1]]]))
    assert image.resized_from is None


def test_colours_become_channels(tmp_path: Path) -> None:
    path = save(tmp_path / "two.png", "RGB", (2, 1), (255, 0, 51), (0, 255, 102))
    assert torch.allclose(
        read_image(path, (3, 1, 2)).pixels, torch.tensor([[[1.0, 0]], [[0, 1]], [[0.2, 0.4]]])
    )


def test_red_is_the_grey_76_of_255(tmp_path: Path) -> None:
    """Luma: 0.299 x 255 = 76.2."""
    path = save(tmp_path / "red.png", "RGB", (1, 1), (255, 0, 0))
    assert read_image(path, (1, 1, 1)).pixels.item() == pytest.approx(76 / 255)


def test_grey_is_the_same_in_all_three_channels(tmp_path: Path) -> None:
    path = save(tmp_path / "grey.png", "L", (1, 1), 51)
    assert torch.allclose(read_image(path, (3, 1, 1)).pixels, torch.full((3, 1, 1), 0.2))


def test_another_size_is_averaged_down_and_reported_as_width_and_height(tmp_path: Path) -> None:
    """Four columns of 0 and four of 204 make a dark and a light pixel, with a little of each other
    at the seam."""
    path = save(tmp_path / "wide.png", "L", (8, 1), 0, 0, 0, 0, 204, 204, 204, 204)
    image = read_image(path, (1, 1, 2))
    dark, light = image.pixels[0, 0].tolist()
    assert image.resized_from == (8, 1)
    assert dark < 0.2 < 0.6 < light
    assert dark + light == pytest.approx(0.8, abs=1 / 255)


def test_a_photograph_is_rotated_by_its_exif_data(tmp_path: Path) -> None:
    """Orientation 6: the camera lay on its side, so the left column of the file is the upper
    row."""
    image = Image.new("L", (2, 1))
    image.putdata([0, 255])
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.png", exif=exif)
    assert read_image(tmp_path / "turned.png", (1, 2, 1)).pixels.flatten().tolist() == [0, 1]


def test_transparent_areas_are_black(tmp_path: Path) -> None:
    path = save(tmp_path / "clear.png", "RGBA", (2, 1), (255, 255, 255, 0), (255, 255, 255, 255))
    assert read_image(path, (1, 1, 2)).pixels.flatten().tolist() == [0, 1]


def test_more_than_eight_bits_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "deep.png", "I;16", (1, 1), 40_000)
    with refused(DataError):
        read_image(path, (1, 1, 1))


def test_a_missing_file_a_folder_and_a_text_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("hello")
    for path, sentence in (
        (tmp_path / "none.png", f"The image {tmp_path / 'none.png'} does not exist."),
        (tmp_path, f"{tmp_path} is a folder; give the images in it."),
        (
            tmp_path / "text.png",
            f"The image {tmp_path / 'text.png'} cannot be read: not an image; use PNG or JPEG.",
        ),
    ):
        with pytest.raises(DataError) as refused:
            read_image(path, (1, 1, 1))
        assert str(refused.value) == sentence


def test_a_truncated_image_is_refused(tmp_path: Path) -> None:
    content = save(tmp_path / "whole.png", "L", (30, 30), *range(30 * 30)).read_bytes()
    (tmp_path / "cut.png").write_bytes(content[: len(content) // 2])
    with refused(DataError):
        read_image(tmp_path / "cut.png", (1, 30, 30))


@pytest.mark.parametrize(
    "allowed", [6, 2]
)  # above once it is a warning of Pillow's, above twice an error
def test_an_image_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    path = save(tmp_path / "large.png", "L", (3, 3), *range(9))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", allowed)
    with refused(DataError):
        read_image(path, (1, 3, 3))


def test_a_model_of_four_channels_does_not_take_image_files(tmp_path: Path) -> None:
    with refused(DataError):
        read_image(tmp_path / "any.png", (4, 1, 1))
