"""A model that was read from a file, whatever its format, and what it makes of pictures and of tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from dispfl.data.own.table import read_rows
from dispfl.errors import DataError
from dispfl.export.card import Card
from dispfl.export.deployed import Deployed
from dispfl.export.pictures import read_picture

AT_ONCE = 64
"""Inputs in a batch: enough for speed, little in memory."""


@dataclass
class Prediction:
    """What came of one picture, or of one row of a table; or why nothing came of a file."""

    path: Path
    line: int | None = None
    """Where the row stands in its table; the header is line 1."""
    guesses: list[tuple[str, float]] = field(default_factory=list)
    """All classes with their probabilities, the most probable first."""
    resized_from: tuple[int, int] | None = None
    """The picture's width and height, if these were not what the model wants."""
    problem: str | None = None
    """Why there are no guesses, in a sentence."""


@dataclass(frozen=True)
class Classifier:
    """A model and its card. `run` is from float32 inputs, as `Deployed` takes them, to probabilities."""

    card: Card
    run: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, deployed: Deployed, card: Card) -> "Classifier":
        """A network that is alive in torch."""
        return cls(card, torch.no_grad()(deployed))

    def probabilities(self, inputs: Tensor) -> Tensor:
        """What the model gives, or a sentence if it is not what its card says."""
        try:
            found = self.run(inputs)
        except Exception as problem:  # a graph from elsewhere can fail in any way there is
            reason = str(problem).strip().partition("\n")[0]
            raise DataError(
                f"The model does not take {self.card.input} of {list(self.card.shape)}: {reason}"
            ) from problem
        wanted = [len(inputs), len(self.card.classes)]
        if list(found.shape) != wanted:
            raise DataError(f"The model gives numbers of shape {list(found.shape)}; its card promises {wanted}.")
        if not found.isfinite().all():
            raise DataError("The model gives numbers that are not finite.")
        return found

    def predict(self, paths: Sequence[Path]) -> list[Prediction]:
        """What the model makes of picture files or tables; one that cannot be read does not keep others from it."""
        predictions: list[Prediction] = []
        readable: list[tuple[Prediction, Tensor]] = []
        for path in paths:
            try:
                found = self._read(path)
            except DataError as problem:
                predictions.append(Prediction(path, problem=str(problem)))
                continue
            predictions += [prediction for prediction, _ in found]
            readable += found
        for start in range(0, len(readable), AT_ONCE):
            batch = readable[start : start + AT_ONCE]
            shares = self.probabilities(torch.stack([inputs for _, inputs in batch]))
            for (prediction, _), row in zip(batch, shares, strict=True):
                order = row.argsort(descending=True, stable=True).tolist()
                prediction.guesses = [(self.card.classes[k], float(row[k])) for k in order]
        return predictions

    def _read(self, path: Path) -> list[tuple[Prediction, Tensor]]:
        """What is to be predicted of one file, and from what."""
        if self.card.columns:
            rows = read_rows(path, self.card.columns, self.card.label)
            return [(Prediction(path, line), row) for line, row in zip(rows.lines, rows.inputs, strict=True)]
        picture = read_picture(path, self.card.shape)
        return [(Prediction(path, resized_from=picture.resized_from), picture.pixels)]
