"""idx files: four small ones are written in MNIST's layout, then damaged in every known way."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from messages import refused

from dispfl.data.readers.idx import read_idx
from dispfl.errors import DataError

TRAIN_LABELS, TEST_LABELS = [3, 0, 9], [7, 1]


def idx(values: np.ndarray) -> bytes:
    return (
        struct.pack(f">{1 + values.ndim}I", 0x0800 + values.ndim, *values.shape) + values.tobytes()
    )


def write(folder: Path, name: str, content: bytes, *, packed: bool = True) -> Path:
    path = folder / (f"{name}.gz" if packed else name)
    path.write_bytes(gzip.compress(content, mtime=0) if packed else content)
    return path


def write_all(folder: Path, *, packed: bool = True) -> None:
    for prefix, labels in (("train", TRAIN_LABELS), ("t10k", TEST_LABELS)):
        images = np.stack([np.full((28, 28), 10 * label, dtype=np.uint8) for label in labels])
        write(folder, f"{prefix}-images-idx3-ubyte", idx(images), packed=packed)
        write(
            folder,
            f"{prefix}-labels-idx1-ubyte",
            idx(np.array(labels, dtype=np.uint8)),
            packed=packed,
        )


@pytest.mark.parametrize("packed", [True, False])
def test_images_and_labels_come_back_as_written_packed_or_plain(
    tmp_path: Path, packed: bool
) -> None:
    write_all(tmp_path, packed=packed)
    reading = read_idx(tmp_path, classes=10)
    assert reading.train.inputs.shape == (3, 1, 28, 28)
    assert reading.train.inputs.dtype == torch.uint8
    assert reading.train.inputs[:, 0, 5, 6].tolist() == [30, 0, 90]
    assert reading.train.labels.dtype == torch.int64
    assert reading.train.labels.tolist() == TRAIN_LABELS
    assert reading.test.inputs[:, 0, 27, 27].tolist() == [70, 10]
    assert reading.test.labels.tolist() == TEST_LABELS


def test_first_pixel_of_a_row_follows_the_last_of_the_row_above(tmp_path: Path) -> None:
    write_all(tmp_path)
    pixels = (np.arange(2 * 784) % 251).astype(np.uint8).reshape(2, 28, 28)
    write(tmp_path, "t10k-images-idx3-ubyte", idx(pixels))
    inputs = read_idx(tmp_path, classes=10).test.inputs
    assert inputs[0, 0, 0, 27].item() == 27
    assert inputs[0, 0, 1, 0].item() == 28
    assert inputs[1, 0, 0, 0].item() == 784 % 251


def test_gzip_that_ends_early_is_refused_as_truncated(tmp_path: Path) -> None:
    write_all(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-12])
    with refused(DataError):
        read_idx(tmp_path, classes=10)


def test_text_in_place_of_gzip_is_refused(tmp_path: Path) -> None:
    write_all(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(b"<html>404</html>")
    with refused(DataError):
        read_idx(tmp_path, classes=10)


GOOD = idx(np.zeros((2, 28, 28), dtype=np.uint8))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (GOOD[:-1], "is truncated: 1,567 of 1,568 bytes"),
        (GOOD[:10], "ends in its header"),
        (GOOD + b"\0", "has more than the 1,568 bytes"),
        (b"\0\0\x08\x01" + GOOD[4:], "magic number 0x0801 instead of 0x0803"),
        (idx(np.zeros((2, 30, 28), dtype=np.uint8)), "30x28 pixels instead of 28x28"),
        (idx(np.zeros((3, 28, 28), dtype=np.uint8)), "2 labels for 3 images"),
        (struct.pack(">4I", 0x0803, *[2**32 - 1] * 3), "has impossible sizes"),
    ],
)
def test_damaged_images_are_refused_with_the_reason(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    write_all(tmp_path)
    write(tmp_path, "t10k-images-idx3-ubyte", content)
    with pytest.raises(DataError, match=reason):
        read_idx(tmp_path, classes=10)


def test_label_10_of_ten_classes_is_refused(tmp_path: Path) -> None:
    write_all(tmp_path)
    write(tmp_path, "t10k-labels-idx1-ubyte", idx(np.array([10, 1], dtype=np.uint8)))
    with refused(DataError):
        read_idx(tmp_path, classes=10)


def test_files_without_images_are_refused(tmp_path: Path) -> None:
    write_all(tmp_path)
    write(tmp_path, "train-images-idx3-ubyte", idx(np.zeros((0, 28, 28), dtype=np.uint8)))
    write(tmp_path, "train-labels-idx1-ubyte", idx(np.zeros(0, dtype=np.uint8)))
    with refused(DataError):
        read_idx(tmp_path, classes=10)
