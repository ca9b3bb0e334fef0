"""NPZ files: images and floats of any shape, and never a pickle."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dispfl.data.custom import load_custom
from dispfl.data.datasets import CustomData
from dispfl.data.labelled import CustomDataset, ImageDataset
from dispfl.errors import ConfigError, DataError

Y = np.array([0, 1, 2, 0, 1, 2])


def save(folder: Path, name: str = "site.npz", **arrays: Any) -> Path:
    path = folder / name
    np.savez(path, **arrays)
    return path


def refusal(path: Path, **settings: Any) -> str:
    with pytest.raises((DataError, ConfigError)) as caught:
        load_custom(CustomData(path=str(path), **settings))
    return str(caught.value).replace(str(path), "FILE")


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), (6, 2, 5, 7)])
def test_floats_of_any_shape_become_float32(tmp_path: Path, shape: tuple[int, ...]) -> None:
    numbers = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    data = load_custom(CustomData(path=str(save(tmp_path, x=numbers, y=Y)), test_share=0.5))
    assert isinstance(data, CustomDataset)
    assert data.shape == shape[1:]
    assert data.classes == ("0", "1", "2")
    assert next(data.train.batches(1))[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("shape", "channels"), [((6, 8, 8), 1), ((6, 8, 8, 1), 1), ((6, 8, 8, 3), 3)]
)
def test_bytes_are_images_with_their_channels_last(
    tmp_path: Path, shape: tuple[int, ...], channels: int
) -> None:
    pixels = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    path = save(tmp_path, x_train=pixels, y_train=Y, x_test=pixels[:3], y_test=Y[:3])
    data = load_custom(CustomData(path=str(path)))
    assert isinstance(data, ImageDataset)
    assert data.shape == (channels, 8, 8)
    assert (
        data.train_inputs[5, channels - 1, 7, 6]
        == pixels.reshape(6, 8, 8, channels)[5, 7, 6, channels - 1]
    )


def test_pixels_are_scaled_to_minus_one_to_one_and_black_is_minus_one(tmp_path: Path) -> None:
    pixels = np.zeros((6, 8, 8), np.uint8)
    pixels[:, 0, 0] = 255
    path = save(tmp_path, x_train=pixels, y_train=Y, x_test=pixels, y_test=Y)
    _, test = load_custom(CustomData(path=str(path))).samples()
    batch, _ = next(test.batches(1))
    assert batch[0, 0, 0, :2].tolist() == [1, -1]


def test_standardized_images_have_mean_0_and_deviation_1_in_each_channel(tmp_path: Path) -> None:
    """Half of the reds are 0 and half 255: mean 0.5, deviation 0.5. The greens are all 51, which
    cannot be scaled."""
    pixels = np.zeros((6, 8, 8, 2), np.uint8)
    pixels[:, :4, :, 0] = 255
    pixels[..., 1] = 51
    path = save(tmp_path, x_train=pixels, y_train=Y, x_test=pixels, y_test=Y)
    data = load_custom(CustomData(path=str(path), standardize=True))
    assert isinstance(data, ImageDataset)
    assert data.mean == pytest.approx((0.5, 0.5))
    assert data.std == pytest.approx((0.5, 0.5))


def test_labels_may_be_strings_or_booleans(tmp_path: Path) -> None:
    x = np.arange(80, dtype=np.float32).reshape(20, 4)
    texts = load_custom(CustomData(path=str(save(tmp_path, x=x, y=np.array(["b", "a"] * 10)))))
    assert texts.classes == ("a", "b")
    truths = load_custom(
        CustomData(
            path=str(save(tmp_path, x=x, y=np.array([True, False] * 10))), classes=("no", "yes")
        )
    )
    assert truths.classes == ("no", "yes")
    assert sorted(set(truths.train_labels.tolist())) == [0, 1]


def test_a_file_with_training_and_test_data_is_not_split_again(tmp_path: Path) -> None:
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    path = save(tmp_path, x_train=x[:4], y_train=Y[:4], x_test=x[4:], y_test=Y[4:])
    data = load_custom(CustomData(path=str(path)))
    assert (len(data.train_labels), data.test_labels.tolist()) == (4, [1, 2])
    assert (
        refusal(path, test_share=0.5)
        == "data.test_share does not apply: FILE contains test data. Omit it."
    )
    assert refusal(path, test_path=str(path)) == "FILE contains test data; omit data.test_path."
    single = save(tmp_path, "whole.npz", x=x, y=Y)
    assert refusal(single, test_path=str(path)).endswith(
        "site.npz must contain test data alone: x and y."
    )


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        (
            {"images": np.ones(3), "y": Y},
            (
                "FILE must contain x and y, or x_train, y_train, x_test, y_test; it contains"
                " images, y."
            ),
        ),
        ({"x": np.ones((5, 2)), "y": Y}, "FILE has 5 samples in x but 6 labels in y."),
        ({"x": np.ones((0, 2)), "y": Y[:0]}, "x in FILE is empty."),
        (
            {"x": np.ones(6), "y": Y},
            "x in FILE has shape [6]; it must have one row for each sample, (N, ...).",
        ),
        (
            {"x": np.ones((6, 4), np.uint8), "y": Y},
            (
                "x in FILE has shape [6, 4]; uint8 means images, (N, H, W) or (N, H, W, C). Save"
                " other numbers as float32."
            ),
        ),
        (
            {"x": np.ones((6, 4), np.int64), "y": Y},
            "x in FILE must be uint8 images or floats, got int64; use .astype('float32').",
        ),
        (
            {"x": np.where(np.eye(6)[:, :4] * [[0], [0], [1], [0], [0], [0]], np.nan, 1), "y": Y},
            "x in FILE has a value that is nan, infinite or too large in sample 2.",
        ),
        (
            {"x": np.ones((6, 2)), "y": Y[:, None]},
            "y in FILE has shape [6, 1]; it must have one label for each sample, (N,).",
        ),
        (
            {"x": np.ones((6, 2)), "y": Y * 1.0},
            "y in FILE must be integers or strings, got float64; use .astype('int64').",
        ),
    ],
)
def test_invalid_arrays_are_refused_with_one_sentence(
    tmp_path: Path, arrays: dict[str, Any], sentence: str
) -> None:
    assert refusal(save(tmp_path, **arrays)) == sentence


def test_training_images_with_float_test_data_are_refused(tmp_path: Path) -> None:
    path = save(
        tmp_path, x_train=np.ones((6, 8, 8), np.uint8), y_train=Y, x_test=np.ones((6, 8)), y_test=Y
    )
    assert (
        refusal(path)
        == "The test data in FILE are inputs of shape [8], but the training data are images of"
        " shape [8, 8, 1]."
    )


def test_python_objects_are_never_unpickled(tmp_path: Path) -> None:
    path = save(tmp_path, x=np.array([{}, {}], dtype=object), y=Y[:2])
    assert refusal(path) == "FILE contains Python objects, which can hide code; save plain numbers."


def test_damaged_files_and_single_arrays_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "site.npz"
    path.write_bytes(b"PK\x03\x04 and nothing more")
    assert refusal(path).startswith("FILE is damaged: ")
    buffer = io.BytesIO()
    np.save(buffer, np.ones(3))
    path.write_bytes(buffer.getvalue())
    assert refusal(path) == "FILE contains one unnamed array; save x and y with numpy.savez."
    path.write_bytes(b"")
    assert refusal(path).startswith("FILE is damaged: ")


def test_standardizing_is_for_columns(tmp_path: Path) -> None:
    x = np.ones((6, 4, 3))
    path = save(tmp_path, x_train=x, y_train=Y, x_test=x, y_test=Y)
    assert (
        refusal(path, standardize=True)
        == "data.standardize applies to columns and images, but FILE has samples of shape [4, 3]."
    )
    assert (
        refusal(path, label="y") == "data.label does not apply: FILE has its labels in y. Omit it."
    )
