"""The data contract of a site: what its model was trained on, and in which format.

The format (classes, columns, scaling) belongs to the weights and never changes. The rows are those
that the site uses: new ones wait until the contract is renewed, removed ones are no longer used.
Every row is known by its id (`dispfl.data.rows`), so that no row that was trained on ever becomes a
test row.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from dispfl.data.batches import data_digest
from dispfl.data.labelled import InputFormat, LabelledDataset
from dispfl.data.rows import input_ids
from dispfl.data.split import are_classes
from dispfl.errors import DataError, RunError
from dispfl.files import write_atomically

FILE = "data.safetensors"
"""The contract's file in the site's run directory."""
_VERSION = 1
_NO_IDS = torch.empty(0, dtype=torch.int64)


class Rows(NamedTuple):
    """The ids and labels of training rows or test rows."""

    ids: Tensor
    labels: Tensor
    """int64 (N): classes, or hashes of labels of another kind."""

    @classmethod
    def of(cls, ids: Tensor, labels: Tensor) -> "Rows":
        """Return rows with labels of any kind."""
        if not are_classes(labels):
            labels = input_ids(labels.reshape(len(labels), -1))
        return cls(ids, labels)

    @property
    def records(self) -> NDArray[np.uint64]:
        """A number for each row and its label: a row with another label is another record."""
        odd_factor = np.uint64(0x9E3779B97F4A7C15)
        with np.errstate(over="ignore"):
            ids: NDArray[np.uint64] = self.ids.numpy().view(np.uint64)
            return ids + odd_factor * self.labels.numpy().view(np.uint64)


@dataclass(frozen=True)
class DataChanges:
    """Rows that are new or gone since a contract was made; a row with another label is both."""

    new_training: int = 0
    new_test: int = 0
    removed_training: int = 0
    removed_test: int = 0

    def __bool__(self) -> bool:
        return any(asdict(self).values())

    @property
    def new(self) -> int:
        """All new rows."""
        return self.new_training + self.new_test

    @property
    def removed(self) -> int:
        """All removed rows."""
        return self.removed_training + self.removed_test

    def __str__(self) -> str:
        return (
            f"{self.new} new ({self.new_training} training, {self.new_test} test), {self.removed}"
            f" removed ({self.removed_training} training, {self.removed_test} test)"
        )


@dataclass(frozen=True, eq=False)
class DataContract:
    """The format of a site's inputs, and the rows that it uses."""

    inputs: InputFormat
    digest: str
    """Of all rows and labels, in any order; of a Dataset as in `data_digest`."""
    made: float
    """When the rows were taken in, as a Unix time."""
    counts: tuple[int, int]
    """The number of training rows and of test rows in the data."""
    train: Rows | None
    """The training rows, with those for validation; None for a Dataset, whose rows have no ids."""
    test: Rows | None
    earlier: Tensor = _NO_IDS
    """The ids of rows that were trained on before, and are removed."""

    @classmethod
    def of(cls, data: LabelledDataset, before: "DataContract | None" = None) -> "DataContract":
        """Return the contract with all rows of the data, renewing the one `before`.

        A new test row that the model may have been trained on is left out: with a larger
        `data.test_share`, or another `data.test_path`.
        """
        inputs = InputFormat.of(data)
        counts = (len(data.train_labels), len(data.test_labels))
        if data.row_ids is None:
            digest = data_digest(data.samples())
            return cls(inputs, digest, time.time(), counts, None, None)

        train = Rows.of(data.row_ids.train, data.train_labels)
        test = Rows.of(data.row_ids.test, data.test_labels)
        earlier = _NO_IDS
        if before is not None:
            test = before.without_trained(test)
            trained = before.trained
            earlier = torch.unique(trained[~torch.isin(trained, train.ids)])
        return cls(inputs, _digest(train, test), time.time(), counts, train, test, earlier)

    @property
    def trained(self) -> Tensor:
        """The ids of all rows that may have been trained on."""
        if self.train is None:
            return self.earlier
        return torch.cat([self.train.ids, self.earlier])

    @property
    def left_out(self) -> int:
        """The number of test rows that are not used, because they were trained on before."""
        return 0 if self.test is None else self.counts[1] - len(self.test.ids)

    def without_trained(self, test: Rows) -> Rows:
        """Return the test rows but those that became test rows after they were trained on."""
        if self.test is None:
            return test
        is_new = ~torch.isin(test.ids, self.test.ids)
        is_usable = ~(is_new & torch.isin(test.ids, self.trained))
        return Rows(test.ids[is_usable], test.labels[is_usable])

    def rows_of(self, data: LabelledDataset) -> tuple[Tensor | None, Tensor | None]:
        """Return which training rows and test rows of the data belong to the contract.

        None stands for all of them.
        """
        if self.train is None or self.test is None or data.row_ids is None:
            return None, None
        train = _common(Rows.of(data.row_ids.train, data.train_labels), self.train)
        test = _common(Rows.of(data.row_ids.test, data.test_labels), self.test)
        for rows, name in ((train, "training"), (test, "test")):
            if rows is not None and not len(rows):
                raise DataError(
                    f"All {name} rows that the site has used so far are removed. To use the new"
                    " ones: dispfl peer data SITE --refresh."
                )
        return train, test

    def changes(self, data: "DataContract") -> DataChanges:
        """Return what differs in the data, given as a contract with all of their rows."""
        if self.train is None or self.test is None or data.train is None or data.test is None:
            train, test = (then - now for then, now in zip(self.counts, data.counts, strict=True))
            return DataChanges(max(0, -train), max(0, -test), max(0, train), max(0, test))
        return DataChanges(
            _count_missing(data.train, self.train),
            _count_missing(data.test, self.test),
            _count_missing(self.train, data.train),
            _count_missing(self.test, data.test),
        )

    # the file

    def save(self, folder: Path) -> None:
        """Write the contract into the site's run directory."""
        tensors = {"earlier": self.earlier}
        for name, rows in (("train", self.train), ("test", self.test)):
            if rows is not None:
                tensors[f"{name}/ids"] = rows.ids
                tensors[f"{name}/labels"] = rows.labels
        about = {
            "version": _VERSION,
            "inputs": self.inputs.to_json(),
            "digest": self.digest,
            "made": self.made,
            "counts": self.counts,
        }
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        content = safetensors.torch.save(contiguous, {"contract": json.dumps(about)})
        write_atomically(folder / FILE, content)

    @classmethod
    def load(cls, folder: Path) -> "DataContract | None":
        """Read the contract in a site's run directory; None if there is none."""
        file = folder / FILE
        try:
            with safetensors.safe_open(file, "pt") as opened:
                about = json.loads((opened.metadata() or {})["contract"])
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            if about["version"] != _VERSION:
                raise RunError(f"{file} was written by another version of dispfl.")
            train_count, test_count = about["counts"]
            return cls(
                InputFormat.from_json(about["inputs"]),
                str(about["digest"]),
                float(about["made"]),
                (int(train_count), int(test_count)),
                _rows(tensors, "train"),
                _rows(tensors, "test"),
                tensors["earlier"],
            )
        except FileNotFoundError:
            return None
        except (safetensors.SafetensorError, OSError, ValueError, KeyError, TypeError) as problem:
            raise RunError(
                f"{file}, which has the scaling and the rows that the model was trained with,"
                f" cannot be read: {problem}. Restore it from a backup."
            ) from problem


def _rows(tensors: Mapping[str, Tensor], name: str) -> Rows | None:
    if f"{name}/ids" not in tensors:
        return None
    return Rows(tensors[f"{name}/ids"], tensors[f"{name}/labels"])


def _digest(train: Rows, test: Rows) -> str:
    digest = hashlib.sha256()
    for rows in (train, test):
        digest.update(len(rows.ids).to_bytes(8, "little"))
        digest.update(np.sort(rows.records).tobytes())
    return digest.hexdigest()


def _common(rows: Rows, contract: Rows) -> Tensor | None:
    """Return which rows a contract has, each as often as it has it; None if it has all."""
    records = rows.records
    values, counts = np.unique(contract.records, return_counts=True)
    places = np.searchsorted(values, records).clip(max=len(values) - 1)
    allowed = np.where(values[places] == records, counts[places], 0)
    used = _occurrence(records) < allowed
    if used.all():
        return None
    return torch.from_numpy(np.flatnonzero(used))


def _occurrence(records: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return how many equal records stand before each."""
    order = np.argsort(records, kind="stable")
    ordered = records[order]
    starts = np.searchsorted(ordered, ordered)
    occurrence = np.empty(len(records), np.int64)
    occurrence[order] = np.arange(len(records)) - starts
    return occurrence


def _count_missing(rows: Rows, contract: Rows) -> int:
    """Return how many rows a contract does not have."""
    common = _common(rows, contract)
    return 0 if common is None else len(rows.ids) - len(common)
