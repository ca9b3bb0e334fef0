"""The catalogue of data sets: all that is known without their files, without torch or numpy."""

import difflib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dispfl.data.fetch import Download
from dispfl.errors import ConfigError


@dataclass(frozen=True)
class FileLayout:
    """A layout of a data set's files: the usual folder names, and the files or folders in it."""

    folders: tuple[str, ...]
    names: tuple[str, ...]

    def missing(self, folder: Path) -> list[str]:
        """The names that exist neither plain nor gzipped."""
        missing = []
        for name in self.names:
            if not (folder / name).exists() and not (folder / f"{name}.gz").exists():
                missing.append(name)
        return missing


@dataclass(frozen=True)
class DataSpec:
    """Facts about a data set."""

    name: str
    title: str
    shape: tuple[int, int, int]
    """Channels, height, width."""
    classes: int
    train: int
    test: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: bool
    reader: Literal["bundled", "idx", "cifar", "tiny-imagenet"]
    origin: str
    class_names: tuple[str, ...] = ()
    """Empty where the files name them."""
    files: tuple[FileLayout, ...] = ()
    downloads: tuple[Download, ...] = ()

    @property
    def download_size(self) -> int:
        return sum(download.size for download in self.downloads)


_CLOTHES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_CIFAR10 = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
_IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_CIFAR10_BATCHES = (
    "data_batch_1",
    "data_batch_2",
    "data_batch_3",
    "data_batch_4",
    "data_batch_5",
    "test_batch",
)
_ZALANDO = "Zalando SE, 2017; MIT licence"
_KRIZHEVSKY = "Krizhevsky, University of Toronto, 2009; free to use, cite the technical report"


def _idx_downloads(base: str, *files: tuple[int, str]) -> tuple[Download, ...]:
    downloads = []
    for name, (size, sha256) in zip(_IDX, files, strict=True):
        downloads.append(Download(f"{base}/{name}.gz", sha256, size))
    return tuple(downloads)


# Checksums. Fashion-MNIST: all four are verified against the files of Debian's package (the same
# compressed data with another gzip header; with the original header restored, the SHA-256 agree).
# The others are not verified against a download: those of MNIST and CIFAR are recorded in
# TensorFlow Datasets for the same URLs (and the sizes agree with other records of the archives),
# that of Tiny-ImageNet in several public projects. Two official URLs are plain http; the checksums
# protect these downloads.
_FASHION_DOWNLOADS = _idx_downloads(
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    (26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
    (29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
    (4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
    (5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
)
_MNIST_DOWNLOADS = _idx_downloads(
    "https://storage.googleapis.com/cvdf-datasets/mnist",
    (9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    (28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    (1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    (4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
)
_CIFAR10_DOWNLOAD = Download(
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    170_052_171,
)
_CIFAR100_DOWNLOAD = Download(
    "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    168_513_733,
)
_TINY_IMAGENET_DOWNLOAD = Download(
    "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
    248_100_043,
)

_SAMPLE = DataSpec(
    name="fashion-sample",
    title="Fashion-MNIST, the bundled sample",
    shape=(1, 28, 28),
    classes=10,
    train=4_000,
    test=2_000,
    mean=(0.2860,),
    std=(0.3530,),
    flip=False,
    reader="bundled",
    origin=_ZALANDO,
    class_names=_CLOTHES,
)


def _turned(*directions: str) -> DataSpec:
    """The same images, turned, with a class for each kind of clothes in each direction."""
    names = tuple(f"{name}, {direction}" for name in _CLOTHES for direction in directions)
    title = f"{_SAMPLE.title}, turned to {len(directions)} directions"
    return replace(
        _SAMPLE,
        name=f"fashion-turned-{len(names)}",
        title=title,
        classes=len(names),
        class_names=names,
    )


_ALL = (
    _SAMPLE,
    _turned("upright", "upside down"),
    _turned("upright", "turned left", "upside down", "turned right"),
    DataSpec(
        name="fashion-mnist",
        title="Fashion-MNIST",
        shape=(1, 28, 28),
        classes=10,
        train=60_000,
        test=10_000,
        mean=(0.2860,),
        std=(0.3530,),
        flip=False,
        reader="idx",
        origin=_ZALANDO,
        class_names=_CLOTHES,
        files=(FileLayout(("fashion-mnist", "FashionMNIST/raw"), _IDX),),
        downloads=_FASHION_DOWNLOADS,
    ),
    DataSpec(
        name="mnist",
        title="MNIST",
        shape=(1, 28, 28),
        classes=10,
        train=60_000,
        test=10_000,
        mean=(0.1307,),
        std=(0.3081,),
        flip=False,
        reader="idx",
        origin="LeCun, Cortes and Burges, 1998; CC BY-SA 3.0",
        class_names=tuple("0123456789"),
        files=(FileLayout(("mnist", "MNIST/raw"), _IDX),),
        downloads=_MNIST_DOWNLOADS,
    ),
    DataSpec(
        name="cifar10",
        title="CIFAR-10",
        shape=(3, 32, 32),
        classes=10,
        train=50_000,
        test=10_000,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        flip=True,
        reader="cifar",
        origin=_KRIZHEVSKY,
        class_names=_CIFAR10,
        files=(
            FileLayout(
                ("cifar-10-batches-bin",), tuple(f"{name}.bin" for name in _CIFAR10_BATCHES)
            ),
            FileLayout(("cifar-10-batches-py",), _CIFAR10_BATCHES),
        ),
        downloads=(_CIFAR10_DOWNLOAD,),
    ),
    DataSpec(
        name="cifar100",
        title="CIFAR-100",
        shape=(3, 32, 32),
        classes=100,
        train=50_000,
        test=10_000,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        flip=True,
        reader="cifar",
        origin=_KRIZHEVSKY,
        files=(
            FileLayout(("cifar-100-binary",), ("train.bin", "test.bin")),
            # `meta` tells this folder from others: "train" and "test" alone are common names.
            FileLayout(("cifar-100-python",), ("train", "test", "meta")),
        ),
        downloads=(_CIFAR100_DOWNLOAD,),
    ),
    DataSpec(
        name="tiny-imagenet",
        title="Tiny-ImageNet-200",
        shape=(3, 64, 64),
        classes=200,
        train=100_000,
        test=10_000,
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2770, 0.2691, 0.2821),
        flip=True,
        reader="tiny-imagenet",
        origin="Stanford CS231n, 2015; ImageNet's terms: non-commercial research",
        files=(
            FileLayout(("tiny-imagenet-200",), ("train", "val/images", "val/val_annotations.txt")),
        ),
        downloads=(_TINY_IMAGENET_DOWNLOAD,),
    ),
)
DATASETS: dict[str, DataSpec] = {spec.name: spec for spec in _ALL}


def describe(name: str) -> DataSpec:
    """Return the facts about a data set."""
    if name == "custom":
        raise ConfigError(
            "This needs a data set from the catalogue, but the data are custom (data.path or"
            " data.factory)."
        )
    if name not in DATASETS:
        raise ConfigError(f"Unknown data set {name}. {nearest_name(name)}", key="data")
    return DATASETS[name]


def nearest_name(name: str) -> str:
    """A hint for an unknown name: the most similar one, or all names."""
    similar = difflib.get_close_matches(name, DATASETS, n=1, cutoff=0.5)
    if similar:
        return f"Did you mean {similar[0]}?"
    return f"Known data sets: {', '.join(DATASETS)}."
