"""The catalogue, the search for files, and loading, on small files in the real layouts."""

import gzip
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from messages import refused
from PIL import Image

from dispfl.data import datasets
from dispfl.data.datasets import DATASETS, Data, describe, load_dataset, locate
from dispfl.data.labelled import ImageDataset
from dispfl.data.readers.idx import read_bundled
from dispfl.errors import ConfigError, DataError

FOUR = tuple(
    f"{part}-ubyte"
    for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
)


@pytest.fixture(autouse=True)
def _nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No data set is found unless a test puts it somewhere."""
    monkeypatch.delenv("DISPFL_DATA", raising=False)
    monkeypatch.setenv("DISPFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets, "SYSTEM_FOLDER", tmp_path / "system")


def write_idx(folder: Path, value: int = 7) -> Path:
    """Two training images and two test images, all pixels `value`, labels 0 and 9."""
    folder.mkdir(parents=True)
    for name in FOUR:
        shape = (2, 28, 28) if "images" in name else (2,)
        values = (
            np.full(shape, value, dtype=np.uint8)
            if "images" in name
            else np.array([0, 9], dtype=np.uint8)
        )
        header = struct.pack(f">{1 + len(shape)}I", 0x0800 + len(shape), *shape)
        (folder / f"{name}.gz").write_bytes(gzip.compress(header + values.tobytes()))
    return folder


def write_cifar10(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        (folder / f"{name}.bin").write_bytes(b"\x03" + bytes(3072))
    return folder


def load_images(settings: Data) -> ImageDataset:
    images = load_dataset(settings)
    assert isinstance(images, ImageDataset)
    return images


def test_the_bundled_sample_has_400_training_and_200_test_images_of_each_class() -> None:
    images = load_images(Data())
    assert images.name == "fashion-sample"
    assert images.train_inputs.shape == (4000, 1, 28, 28)
    assert images.train_labels.bincount().tolist() == [400] * 10
    assert images.test_labels.bincount().tolist() == [200] * 10
    assert images.train_inputs.dtype == images.test_inputs.dtype == torch.uint8
    assert images.train_labels.dtype == torch.int64
    assert images.classes[9] == "Ankle boot"
    # All of Fashion-MNIST has mean 0.2860; that of 4,000 images is close.
    assert (images.train_inputs.float() / 255).mean().item() == pytest.approx(0.286, abs=0.01)


def test_no_image_of_the_sample_is_in_it_twice() -> None:
    images = load_images(Data())
    pixels = torch.cat([images.train_inputs, images.test_inputs])
    assert len({image.tobytes() for image in pixels.numpy()}) == 6000


@pytest.mark.parametrize("directions", [2, 4])
def test_the_turned_sample_has_a_class_for_each_direction(directions: int) -> None:
    """Of the images of a class every second or fourth is turned by a half or a quarter: left, over,
    right."""
    plain = load_images(Data())
    turned = load_images(Data(name=f"fashion-turned-{10 * directions}"))
    assert turned.train_labels.bincount().tolist() == [400 // directions] * (10 * directions)
    assert turned.test_labels.bincount().tolist() == [200 // directions] * (10 * directions)
    assert (turned.train_labels // directions).equal(plain.train_labels)
    for direction in range(directions):
        these = turned.train_labels % directions == direction
        back = turned.train_inputs[these].rot90(-direction * 4 // directions, (2, 3))
        assert back.equal(plain.train_inputs[these])
    assert turned.classes[-1].startswith("Ankle boot, ")
    assert len(turned.classes) == 10 * directions


def test_damaged_bundled_sample_asks_for_a_new_installation(tmp_path: Path) -> None:
    (tmp_path / "sample.npz").write_bytes(b"PK\x03\x04 cut off")
    with refused(DataError):
        read_bundled(10, tmp_path / "sample.npz")


@pytest.mark.parametrize("name", DATASETS)
def test_every_description_is_complete_without_files(name: str) -> None:
    spec = describe(name)
    assert spec.name == name
    assert len(spec.mean) == len(spec.std) == spec.shape[0]
    assert not spec.class_names or len(spec.class_names) == spec.classes
    assert spec.flip == (spec.shape[0] == 3)
    assert all(len(bytes.fromhex(download.sha256)) == 32 for download in spec.downloads)
    assert (spec.reader == "bundled") == (not spec.downloads) == (not spec.files)


def test_describing_and_listing_does_not_import_torch() -> None:
    code = (
        "import sys; from dispfl.data.datasets import describe; describe('cifar10');"
        " sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_mistyped_name_is_refused_with_the_nearest_one() -> None:
    with refused(ConfigError, key="data"):
        describe("cifar-10")
    with refused(ConfigError, key="data.name"):
        Data(name="minst")
    with refused(ConfigError, key="data"):
        describe("zzz")


def test_fashion_mnist_loads_with_its_names_and_constants(tmp_path: Path) -> None:
    write_idx(tmp_path / "data" / "fashion-mnist", value=51)
    images = load_images(Data(name="fashion-mnist", dir=str(tmp_path / "data")))
    assert set(images.train_inputs.flatten().tolist()) == {51}
    assert images.test_labels.tolist() == [0, 9]
    assert images.classes[0] == "T-shirt/top"
    assert (images.mean, images.std, images.flip) == ((0.286,), (0.353,), False)


def test_cifar10_loads_with_its_names(tmp_path: Path) -> None:
    folder = write_cifar10(tmp_path / "cifar-10-batches-bin")
    images = load_images(Data(name="cifar10", dir=str(folder)))
    assert images.train_inputs.shape == (5, 3, 32, 32)
    assert images.classes[3] == "cat"
    assert images.flip


def test_tiny_imagenet_loads_from_its_folder_and_reports_progress(tmp_path: Path) -> None:
    root = tmp_path / "tiny-imagenet-200"
    for folder in (root / "train" / "n1" / "images", root / "val" / "images"):
        folder.mkdir(parents=True)
        Image.new("RGB", (64, 64)).save(folder / "a.JPEG", "JPEG")
    (root / "val" / "val_annotations.txt").write_text("a.JPEG\tn1\n")
    calls: list[tuple[int, int]] = []
    images = load_dataset(
        Data(name="tiny-imagenet", dir=str(tmp_path)),
        lambda done, total: calls.append((done, total)),
    )
    assert images.classes == ("n1",)
    assert calls == [(2, 2)]


@pytest.mark.parametrize("folder", ["", "fashion-mnist", "FashionMNIST/raw"])
def test_folder_is_found_as_itself_under_its_name_and_where_torchvision_puts_it(
    tmp_path: Path, folder: str
) -> None:
    written = write_idx(tmp_path / "data" / folder)
    assert locate("fashion-mnist", tmp_path / "data") == written


def test_places_are_searched_in_order_and_a_given_folder_is_the_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISPFL_DATA", str(tmp_path / "env"))
    system = write_idx(tmp_path / "system" / "fashion-mnist")
    assert locate("fashion-mnist") == system
    cached = write_idx(tmp_path / "cache" / "fashion-mnist")
    assert locate("fashion-mnist") == cached
    named = write_idx(tmp_path / "env" / "fashion-mnist")
    assert locate("fashion-mnist") == named
    (tmp_path / "given").mkdir()
    with refused(DataError):
        locate("fashion-mnist", tmp_path / "given")
    given = write_idx(tmp_path / "given" / "fashion-mnist")
    assert locate("fashion-mnist", tmp_path / "given") == given


def test_fashion_mnist_is_not_taken_for_mnist(tmp_path: Path) -> None:
    folder = write_idx(tmp_path / "fashion-mnist")
    assert locate("fashion-mnist", folder) == folder
    with refused(DataError):
        locate("mnist", folder)


def test_binary_version_of_cifar_is_preferred_to_the_python_version(tmp_path: Path) -> None:
    python = tmp_path / "cifar-10-batches-py"
    python.mkdir()
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        (python / name).write_bytes(b".")
    assert locate("cifar10", tmp_path) == python
    assert (
        locate("cifar10", write_cifar10(tmp_path / "cifar-10-batches-bin").parent).name
        == "cifar-10-batches-bin"
    )


def test_missing_files_are_named_with_the_places_and_the_fix(tmp_path: Path) -> None:
    with pytest.raises(DataError) as missing:
        locate("cifar100")
    sentence = str(missing.value)
    assert "looked for train.bin test.bin, or train test meta in" in sentence
    assert f"{tmp_path / 'cache'}, {tmp_path / 'system'}" in sentence
    assert (
        "Run `dispfl data get cifar100`, or name the folder that has them with --data-dir (in"
        " Python, Data(dir=...)) or DISPFL_DATA." in sentence
    )


def test_one_missing_file_of_six_is_named(tmp_path: Path) -> None:
    folder = write_cifar10(tmp_path / "cifar-10-batches-bin")
    (folder / "data_batch_3.bin").unlink()
    with refused(DataError):
        load_dataset(Data(name="cifar10", dir=str(tmp_path)))


def test_file_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    folder = write_cifar10(tmp_path / "cifar-10-batches-bin")
    (folder / "test_batch.bin").unlink()
    (folder / "test_batch.bin").mkdir()
    with refused(DataError):
        load_dataset(Data(name="cifar10", dir=str(folder)))
