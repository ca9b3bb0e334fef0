"""The natural partition: each peer has the samples of one value of a column, such as one site or
one person."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from dispfl.data.class_counts import Counts
from dispfl.data.datasets import CustomData, Data
from dispfl.data.partition import Partition
from dispfl.data.split import Split
from dispfl.errors import ConfigError, PartitionError

if TYPE_CHECKING:
    from dispfl.data.custom import CustomDataset
    from dispfl.data.datasets import ImageDataset


class ByColumn(Partition):
    """Every peer has the samples of one value of a column, which is no input; peers are in the
    order of the values.

    With fewer peers than values, those with the most training samples are used. `samples_per_peer`
    and `test_samples_per_peer` are upper limits here: a peer has as many samples as there are.
    """

    name: Literal["by_column"] = "by_column"
    column: str | None = None
    """The column of the CSV file or of the data set of `data.hub`; default: `data.group`."""

    def column_of(self, data: Data) -> Data:
        """Return the settings of the data with the column as their group."""
        if not isinstance(data, CustomData) or data.factory:
            raise ConfigError(
                "partition=by_column needs a table with that column: give data.path=FILE.csv or"
                " data.hub.",
                key="partition",
            )
        if self.sizes != "equal":
            raise ConfigError(
                f"partition.sizes is {self.sizes}, but by_column has the sizes of the data;"
                " omit it.",
                key="partition.sizes",
            )
        column = self.column or data.group
        if column is None:
            raise ConfigError(
                "partition.column is missing: name the column whose values are the peers.",
                key="partition.column",
            )
        return data.model_copy(update={"group": column})

    def split_data(
        self, data: "ImageDataset | CustomDataset", peers: int, *, rng: torch.Generator
    ) -> Split:
        if data.groups is None:
            raise PartitionError("partition=by_column needs data that were read with data.group.")
        column = f"column {self.column}" if self.column else "column of data.group"
        draws = np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=rng)))
        train_groups, test_groups = (np.array(groups) for groups in data.groups)
        names, sizes = np.unique(train_groups, return_counts=True)
        if peers > len(names):
            raise PartitionError(
                f"peers is {peers} but the {column} has {len(names)} values in the training data; "
                f"use at most {len(names)}."
            )
        largest = sorted(
            names[np.argsort(-sizes, kind="stable")[:peers]].tolist(), key=_in_order(names.tolist())
        )
        train, test = [], []
        for name in largest:
            tested = np.flatnonzero(test_groups == name)
            if not len(tested):
                raise PartitionError(
                    f"The value {name} of the {column} has no test samples; add some."
                )
            most = None if self.samples_per_peer == "all" else self.samples_per_peer
            train.append(_at_most(np.flatnonzero(train_groups == name), most, draws))
            test.append(_at_most(tested, self.test_samples_per_peer, draws))
        return self.completed(tuple(train), tuple(test), data.train_labels, data.test_labels, draws)

    def class_counts(self, supply: Counts, sizes: Counts, rng: np.random.Generator) -> Counts:
        raise PartitionError(
            "partition=by_column divides data by a column, not by labels; use `split_data`."
        )


def _at_most(rows: Counts, count: int | None, rng: np.random.Generator) -> Tensor:
    chosen = rows if count is None or count >= len(rows) else np.sort(rng.permutation(rows)[:count])
    return torch.from_numpy(chosen.astype(np.int64))


def _in_order(names: Sequence[str]) -> "type[int] | type[str]":
    """Sort values as numbers where all are whole numbers."""
    return int if all(str(name).isdecimal() for name in names) else str
