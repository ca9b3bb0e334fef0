"""Tiny-ImageNet's layout, two classes of a few JPEGs each."""

import os
from pathlib import Path

import pytest
from messages import refused
from PIL import Image

from dispfl.data.readers.tiny_imagenet import read_tiny_imagenet
from dispfl.errors import DataError

CAT, FROG = "n02124075", "n01641577"
RED, GREEN, GREY = (200, 0, 0), (0, 200, 0), (90, 90, 90)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DISPFL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "decoded"


def save(
    path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (64, 64), mode: str = "RGB"
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).convert(mode).save(path, "JPEG", quality=95)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Red cats and green frogs, two each to train on (a frog is grey), one each to test on."""
    root = tmp_path / "tiny-imagenet-200"
    for wnid, colour in ((CAT, RED), (FROG, GREEN)):
        save(root / "train" / wnid / "images" / f"{wnid}_0.JPEG", colour)
        save(root / "train" / wnid / "images" / f"{wnid}_1.JPEG", colour)
    save(root / "train" / FROG / "images" / f"{FROG}_1.JPEG", GREY, mode="L")
    save(root / "val" / "images" / "val_0.JPEG", RED)
    save(root / "val" / "images" / "val_1.JPEG", GREEN)
    (root / "val" / "val_annotations.txt").write_text(
        f"val_0.JPEG\t{CAT}\t0\t0\t63\t63\nval_1.JPEG\t{FROG}\t0\t0\t63\t63\n"
    )
    (root / "wnids.txt").write_text(f"{CAT}\n{FROG}\n")
    (root / "words.txt").write_text(
        f"{FROG}\tbullfrog, Rana catesbeiana\n{CAT}\tEgyptian cat\nn1\tunused\n"
    )
    return root


def test_classes_are_numbered_by_id_and_images_keep_their_colours(folder: Path) -> None:
    reading = read_tiny_imagenet(folder)
    assert reading.classes == ("bullfrog", "Egyptian cat")
    assert reading.train.labels.tolist() == [0, 0, 1, 1]
    assert reading.test.labels.tolist() == [1, 0]
    assert reading.train.inputs.shape == (4, 3, 64, 64)
    red, green, blue = reading.train.inputs[2, :, 30, 30].tolist()
    assert (red > 190, green < 10, blue < 10) == (True, True, True)
    assert reading.test.inputs[1, 1, 5, 5].item() > 190


def test_grey_jpeg_becomes_three_equal_channels(folder: Path) -> None:
    assert read_tiny_imagenet(folder).train.inputs[1, :, 8, 8].tolist() == [90, 90, 90]


def test_without_wnids_the_classes_are_the_train_folders_in_the_same_order(folder: Path) -> None:
    (folder / "wnids.txt").unlink()
    (folder / "words.txt").unlink()
    reading = read_tiny_imagenet(folder)
    assert reading.classes == (FROG, CAT)
    assert reading.train.labels.tolist() == [0, 0, 1, 1]


def test_second_read_decodes_nothing_and_returns_the_same(folder: Path, cache: Path) -> None:
    calls: list[tuple[int, int]] = []
    first = read_tiny_imagenet(folder, lambda done, total: calls.append((done, total)))
    assert calls == [(6, 6)]
    cached = list(cache.iterdir())
    assert len(cached) == 1
    second = read_tiny_imagenet(folder, lambda done, total: calls.append((done, total)))
    assert calls == [(6, 6)]
    assert second.train.inputs.equal(first.train.inputs)
    assert second.train.labels.equal(first.train.labels)
    assert second.test.inputs.equal(first.test.inputs)
    assert second.classes == first.classes


def test_changed_image_is_decoded_again_and_the_old_copy_deleted(folder: Path, cache: Path) -> None:
    read_tiny_imagenet(folder)
    before = list(cache.iterdir())
    save(folder / "val" / "images" / "val_0.JPEG", (0, 0, 250))
    os.utime(folder / "val" / "images" / "val_0.JPEG", (1, 1))
    assert read_tiny_imagenet(folder).test.inputs[0, 2, 0, 0].item() > 240
    after = list(cache.iterdir())
    assert len(after) == 1
    assert after != before


def test_broken_copy_in_the_cache_is_decoded_again(folder: Path, cache: Path) -> None:
    read_tiny_imagenet(folder)
    (cached,) = cache.iterdir()
    cached.write_bytes(cached.read_bytes()[:-1])
    assert read_tiny_imagenet(folder).train.labels.tolist() == [0, 0, 1, 1]
    assert len(cached.read_bytes()) > 6 * 3 * 64 * 64


def test_unwritable_cache_gives_a_warning_and_the_data(folder: Path, cache: Path) -> None:
    cache.parent.write_text("a file where the cache folder should be")
    with pytest.warns(UserWarning, match="Cannot write the decoded images.*DISPFL_CACHE"):
        reading = read_tiny_imagenet(folder)
    assert reading.test.labels.tolist() == [1, 0]


def test_corrupt_jpeg_is_named_and_nothing_is_cached(folder: Path, cache: Path) -> None:
    path = folder / "train" / CAT / "images" / f"{CAT}_1.JPEG"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match=rf"{CAT}_1.JPEG cannot be decoded as a JPEG"):
        read_tiny_imagenet(folder)
    assert not cache.exists()


def test_png_under_a_jpeg_name_is_refused(folder: Path) -> None:
    Image.new("RGB", (64, 64)).save(folder / "val" / "images" / "val_1.JPEG", "PNG")
    with refused(DataError):
        read_tiny_imagenet(folder)


def test_image_of_another_size_is_refused(folder: Path) -> None:
    save(folder / "train" / CAT / "images" / f"{CAT}_0.JPEG", RED, size=(65, 64))
    with refused(DataError):
        read_tiny_imagenet(folder)


def test_listed_class_without_a_folder_is_refused(folder: Path) -> None:
    (folder / "wnids.txt").write_text(f"{CAT}\n{FROG}\nn99999999\n")
    with refused(DataError):
        read_tiny_imagenet(folder)


@pytest.mark.parametrize(
    ("annotations", "reason"),
    [
        ("val_0.JPEG\tn99999999\t0\n", "names the class 'n99999999' in line 1"),
        (f"val_0.JPEG\t{CAT}\nval_9.JPEG\t{CAT}\n", "val_9.JPEG is missing"),
        (f"../../x.JPEG\t{CAT}\n", "names no image of its folder in line 1"),
        ("val_0.JPEG\n", "names the class '' in line 1"),
        ("", "names no images"),
    ],
)
def test_bad_annotations_are_refused_with_the_line(
    folder: Path, annotations: str, reason: str
) -> None:
    (folder / "val" / "val_annotations.txt").write_text(annotations)
    with pytest.raises(DataError, match=reason):
        read_tiny_imagenet(folder)


def test_class_without_images_is_refused(folder: Path) -> None:
    for path in (folder / "train" / CAT / "images").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=rf"{CAT}/images contains no .JPEG files"):
        read_tiny_imagenet(folder)


def test_images_of_every_block_are_in_order(folder: Path) -> None:
    for number in range(2, 300):
        save(folder / "train" / CAT / "images" / f"{CAT}_{number:03}.JPEG", (number % 256,) * 3)
    inputs = read_tiny_imagenet(
        folder
    ).train.inputs  # the two frogs, then the cats in the order of their names
    assert inputs.shape[0] == 2 + 300
    cats = inputs[2:, 0, 0, 0].tolist()
    names = sorted(["_0.", "_1.", *(f"_{number:03}." for number in range(2, 300))])
    for name, red in zip(names, cats, strict=True):
        number = int(name.strip("_."))
        assert abs(red - (200 if number < 2 else number % 256)) <= 1
