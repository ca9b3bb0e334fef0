"""Picture files as a model wants them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from dispfl.errors import DataError
from dispfl.export.pictures import read_picture


def save(path: Path, mode: str, size: tuple[int, int], *pixels: Any) -> Path:
    picture = Image.new(mode, size)
    picture.putdata(list(pixels))
    picture.save(path)
    return path


def test_grey_pixels_are_divided_by_255_and_lie_row_by_row(tmp_path: Path) -> None:
    path = save(tmp_path / "grey.png", "L", (2, 2), 0, 51, 102, 255)
    picture = read_picture(path, (1, 2, 2))
    assert torch.allclose(picture.pixels, torch.tensor([[[0, 0.2], [0.4, 1]]]))
    assert picture.resized_from is None


def test_colours_become_channels(tmp_path: Path) -> None:
    path = save(tmp_path / "two.png", "RGB", (2, 1), (255, 0, 51), (0, 255, 102))
    assert torch.allclose(read_picture(path, (3, 1, 2)).pixels, torch.tensor([[[1.0, 0]], [[0, 1]], [[0.2, 0.4]]]))


def test_red_is_the_grey_76_of_255(tmp_path: Path) -> None:
    """Luma: 0.299 x 255 = 76.2."""
    path = save(tmp_path / "red.png", "RGB", (1, 1), (255, 0, 0))
    assert read_picture(path, (1, 1, 1)).pixels.item() == pytest.approx(76 / 255)


def test_grey_is_the_same_in_all_three_channels(tmp_path: Path) -> None:
    path = save(tmp_path / "grey.png", "L", (1, 1), 51)
    assert torch.allclose(read_picture(path, (3, 1, 1)).pixels, torch.full((3, 1, 1), 0.2))


def test_another_size_is_averaged_down_and_said_as_width_and_height(tmp_path: Path) -> None:
    """Four columns of 0 and four of 204 make a dark and a light pixel, with a little of each other at the seam."""
    path = save(tmp_path / "wide.png", "L", (8, 1), 0, 0, 0, 0, 204, 204, 204, 204)
    picture = read_picture(path, (1, 1, 2))
    dark, light = picture.pixels[0, 0].tolist()
    assert picture.resized_from == (8, 1)
    assert dark < 0.2 < 0.6 < light
    assert dark + light == pytest.approx(0.8, abs=1 / 255)


def test_a_photograph_is_turned_as_its_camera_says(tmp_path: Path) -> None:
    """Orientation 6: the camera lay on its side, so the left column of the file is the upper row."""
    picture = Image.new("L", (2, 1))
    picture.putdata([0, 255])
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.save(tmp_path / "turned.png", exif=exif)
    assert read_picture(tmp_path / "turned.png", (1, 2, 1)).pixels.flatten().tolist() == [0, 1]


def test_what_is_transparent_is_black(tmp_path: Path) -> None:
    path = save(tmp_path / "clear.png", "RGBA", (2, 1), (255, 255, 255, 0), (255, 255, 255, 255))
    assert read_picture(path, (1, 1, 2)).pixels.flatten().tolist() == [0, 1]


def test_more_than_eight_bits_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "deep.png", "I;16", (1, 1), 40_000)
    with pytest.raises(DataError, match=r"deep.png cannot be read: more than 8 bits a channel; save it with 8\."):
        read_picture(path, (1, 1, 1))


def test_a_missing_file_a_folder_and_a_text_are_sentences(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("hello")
    for path, sentence in (
        (tmp_path / "none.png", f"The picture {tmp_path / 'none.png'} does not exist."),
        (tmp_path, f"{tmp_path} is a folder; give the pictures in it."),
        (
            tmp_path / "text.png",
            f"The picture {tmp_path / 'text.png'} cannot be read: not a picture; PNG and JPEG are.",
        ),
    ):
        with pytest.raises(DataError) as refused:
            read_picture(path, (1, 1, 1))
        assert str(refused.value) == sentence


def test_a_picture_that_was_cut_is_a_sentence(tmp_path: Path) -> None:
    whole = save(tmp_path / "whole.png", "L", (30, 30), *range(30 * 30)).read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"The picture .*cut.png cannot be read: "):
        read_picture(tmp_path / "cut.png", (1, 30, 30))


@pytest.mark.parametrize("allowed", [6, 2])  # above once it is a warning of Pillow's, above twice an error
def test_a_picture_that_is_too_large_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    path = save(tmp_path / "large.png", "L", (3, 3), *range(9))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", allowed)
    with pytest.raises(DataError, match=r"large.png cannot be read: too large; make it smaller first\."):
        read_picture(path, (1, 3, 3))


def test_a_model_of_four_channels_cannot_have_picture_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"The model wants pictures of 4 channels; picture files have 1 or 3."):
        read_picture(tmp_path / "any.png", (4, 1, 1))
