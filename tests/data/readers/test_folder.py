"""A folder of images for each class: small real PNG and JPEG files."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dispfl.data.custom import load_custom
from dispfl.data.datasets import CustomData
from dispfl.data.labelled import ImageDataset
from dispfl.errors import ConfigError, DataError

COLOURS = {"cat": "red", "dog": "lime"}


def draw(
    folder: Path, colour: str, count: int, suffix: str = "png", size: tuple[int, int] = (10, 12)
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for k in range(count):
        image = Image.new("RGB", size, colour)
        with (folder / f"{k}.{suffix}").open("wb") as file:
            image.save(file, suffix.replace("jpg", "jpeg"))
            file.write(str(k).encode())  # equal pixels in different files


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    for name, colour in COLOURS.items():
        draw(tmp_path / "pets" / name, colour, 20)
    return tmp_path / "pets"


def loaded(path: Path, **settings: Any) -> ImageDataset:
    dataset = load_custom(CustomData(path=str(path), **settings))
    assert isinstance(dataset, ImageDataset)
    return dataset


def refusal(path: Path, **settings: Any) -> str:
    with pytest.raises((DataError, ConfigError)) as caught:
        loaded(path, **settings)
    return str(caught.value).replace(str(path), "FOLDER")


def test_each_sub_folder_is_a_class_and_images_are_resized_to_a_square(pets: Path) -> None:
    dataset = loaded(pets, size=16)
    assert dataset.classes == ("cat", "dog")
    assert dataset.shape == (3, 16, 16)
    assert len(dataset.train_labels) + len(dataset.test_labels) == 40
    for inputs, label in zip(dataset.train_inputs, dataset.train_labels.tolist(), strict=True):
        assert inputs.amax((1, 2)).tolist() == ([255, 0, 0] if label == 0 else [0, 255, 0])


def test_images_are_32_by_32_in_colour_by_default_and_grey_if_set(pets: Path) -> None:
    assert loaded(pets).shape == (3, 32, 32)
    grey = loaded(pets, colour=False)
    assert grey.shape == (1, 32, 32)
    assert grey.train_inputs[0].unique().tolist() == [76]  # red's share of brightness: 0.299 * 255


def test_listed_classes_give_the_order_and_one_may_have_no_folder(pets: Path) -> None:
    dataset = loaded(pets, classes=["horse", "dog", "cat"])
    assert sorted(set(dataset.train_labels.tolist())) == [1, 2]
    assert refusal(pets, classes=["cat", "horse"]) == (
        "FOLDER has the label dog, which data.classes does not list: cat, horse."
    )


def test_an_empty_sub_folder_is_a_class_too(pets: Path) -> None:
    (pets / "horse").mkdir()
    assert loaded(pets).classes == ("cat", "dog", "horse")


def test_hidden_files_and_folders_are_ignored(pets: Path, caplog: pytest.LogCaptureFixture) -> None:
    (pets / "cat" / ".DS_Store").write_bytes(b"x")
    (pets / ".cache").mkdir()
    draw(pets / "cat" / ".thumbnails", "red", 3)
    (pets / "README.txt").write_text("not in a sub-folder")
    dataset = loaded(pets)
    assert dataset.classes == ("cat", "dog")
    assert len(dataset.train_labels) + len(dataset.test_labels) == 40
    assert not caplog.messages


def test_images_in_nested_folders_belong_to_the_class_above(pets: Path) -> None:
    draw(pets / "cat" / "2024" / "may", "red", 5, "jpg")
    dataset = loaded(pets)
    assert (dataset.train_labels == 0).sum() + (dataset.test_labels == 0).sum() == 25


def test_unreadable_files_are_skipped_with_a_warning(
    pets: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (pets / "cat" / "notes.txt").write_text("meow")
    content = (pets / "dog" / "0.png").read_bytes()
    (pets / "dog" / "cut.png").write_bytes(content[: len(content) // 2])
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(pets / "dog" / "xray.png")
    with caplog.at_level(logging.WARNING, "dispfl.data"):
        dataset = loaded(pets)
    assert len(dataset.train_labels) + len(dataset.test_labels) == 40
    [warning] = caplog.messages
    assert warning.startswith(f"3 of 43 files in {pets} cannot be read and are skipped: ")
    assert "cat/notes.txt (not an image)" in warning
    assert "dog/cut.png (" in warning
    assert "dog/xray.png (more than 8 bits per channel)" in warning


def test_an_image_is_rotated_by_its_exif_data_and_transparency_is_black(tmp_path: Path) -> None:
    """The camera lay on its side: what it saved as the left half is the upper half."""
    half = Image.new("RGB", (16, 16), "black")
    half.paste("white", (0, 0, 8, 16))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees clockwise
    for part in ("train", "test"):
        (tmp_path / part / "turned").mkdir(parents=True)
        half.save(tmp_path / part / "turned" / "0.png", exif=exif)
        (tmp_path / part / "clear").mkdir()
        Image.new("RGBA", (16, 16), (255, 255, 255, 0)).save(tmp_path / part / "clear" / "0.png")
    test_path = str(tmp_path / "test")
    dataset = loaded(tmp_path / "train", test_path=test_path, size=16, colour=False)
    clear, turned = dataset.train_inputs[:, 0]
    assert clear.unique().tolist() == [0]
    assert turned[:8].unique().tolist() == [255]
    assert turned[8:].unique().tolist() == [0]


def test_progress_ends_with_all_files(pets: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_custom(
        CustomData(path=str(pets)), progress=lambda done, total: calls.append((done, total))
    )
    assert calls[-1] == (40, 40)


def test_test_images_may_be_in_a_separate_folder(pets: Path, tmp_path: Path) -> None:
    draw(tmp_path / "later" / "dog", "lime", 3)
    dataset = loaded(pets, test_path=str(tmp_path / "later"))
    assert (len(dataset.train_labels), dataset.test_labels.tolist()) == (40, [1, 1, 1])


def test_invalid_folders_are_refused_with_one_sentence(tmp_path: Path) -> None:
    assert refusal(tmp_path) == (
        "FOLDER has no sub-folders; put the images of each class into a sub-folder named after it."
    )
    for name in ("train", "test"):
        draw(tmp_path / "parts" / name / "cat", "red", 1)
        (tmp_path / "none" / name).mkdir(parents=True)
    assert refusal(tmp_path / "parts") == (
        "FOLDER has the folders test and train: name them as data.path and data.test_path."
    )
    (tmp_path / "bare" / "cat").mkdir(parents=True)
    assert refusal(tmp_path / "bare") == "FOLDER has no images in its sub-folders."
    (tmp_path / "bare" / "cat" / "notes.txt").write_text("meow")
    assert refusal(tmp_path / "bare") == (
        "None of the 1 files in FOLDER is a readable image; use PNG or JPEG."
    )


def test_the_label_of_an_image_is_its_folder(pets: Path) -> None:
    assert refusal(pets, label="name") == (
        "data.label does not apply: FOLDER is a folder, whose sub-folders are the labels. Omit it."
    )
