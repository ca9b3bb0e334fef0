"""Draw the bundled sample of Fashion-MNIST: 400 training and 200 test images of each class.

    python scripts/bundle_sample.py /usr/share/datasets/fashion-mnist

An image's place in the draw is the hash of its split and number, so the sample depends on no
library's random generator: anyone with the four files of Fashion-MNIST gets the same one.
"""

import argparse
import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dispfl.data.readers import ReadSplit
from dispfl.data.readers.idx import BUNDLED, read_idx

PER_CLASS = {"train": 400, "test": 200}
SEED = 0


def draw(split: str, labels: NDArray[np.int64], per_class: int) -> NDArray[np.int64]:
    """Return the numbers of the drawn images, in the order of the original files."""

    def place(number: int) -> bytes:
        name = f"fashion-sample/{SEED}/{split}/{number}"
        return hashlib.blake2b(name.encode(), digest_size=16).digest()

    chosen: list[int] = []
    for label in np.unique(labels):
        candidates = np.flatnonzero(labels == label).tolist()
        chosen += sorted(candidates, key=place)[:per_class]
    return np.array(sorted(chosen))


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the bundled sample of Fashion-MNIST.")
    parser.add_argument("folder", type=Path, help="the folder with the four files of Fashion-MNIST")
    reading = read_idx(parser.parse_args().folder, classes=10)
    arrays: dict[str, NDArray[np.uint8]] = {}
    splits: dict[str, ReadSplit] = {"train": reading.train, "test": reading.test}
    for split, (inputs, labels) in splits.items():
        numbers = draw(split, labels.numpy(), PER_CLASS[split])
        arrays[f"{split}_inputs"] = inputs.numpy()[numbers, 0]
        arrays[f"{split}_labels"] = labels.numpy()[numbers].astype(np.uint8)
    np.savez_compressed(BUNDLED, allow_pickle=False, **arrays)
    print(f"{BUNDLED}: {BUNDLED.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
