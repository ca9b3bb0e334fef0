"""A model that was read from a file, whatever its format, and what it makes of pictures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from dispfl.errors import DataError
from dispfl.export.card import Card
from dispfl.export.deployed import Deployed
from dispfl.export.pictures import read_picture

AT_ONCE = 64
"""Pictures in a batch: enough for speed, little in memory."""


@dataclass
class Prediction:
    """What came of one picture file."""

    picture: Path
    guesses: list[tuple[str, float]] = field(default_factory=list)
    """All classes with their probabilities, the most probable first."""
    resized_from: tuple[int, int] | None = None
    """The picture's width and height, if these were not what the model wants."""
    problem: str | None = None
    """Why there are no guesses, in a sentence."""


@dataclass(frozen=True)
class Classifier:
    """A model and its card. `run` is from float32 pictures (N, C, H, W) in [0, 1] to probabilities (N, classes)."""

    card: Card
    run: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, deployed: Deployed, card: Card) -> "Classifier":
        """A network that is alive in torch."""
        return cls(card, torch.no_grad()(deployed))

    def probabilities(self, pictures: Tensor) -> Tensor:
        """What the model gives, or a sentence if it is not what its card says."""
        try:
            found = self.run(pictures)
        except Exception as problem:  # a graph from elsewhere can fail in any way there is
            reason = str(problem).strip().partition("\n")[0]
            raise DataError(f"The model does not take pictures of {list(self.card.shape)}: {reason}") from problem
        wanted = [len(pictures), len(self.card.classes)]
        if list(found.shape) != wanted:
            raise DataError(f"The model gives numbers of shape {list(found.shape)}; its card promises {wanted}.")
        if not found.isfinite().all():
            raise DataError("The model gives numbers that are not finite.")
        return found

    def predict(self, paths: Sequence[Path]) -> list[Prediction]:
        """What the model makes of picture files; one that cannot be read does not keep the others from it."""
        predictions = [Prediction(path) for path in paths]
        readable, pixels = [], []
        for prediction in predictions:
            try:
                picture = read_picture(prediction.picture, self.card.shape)
            except DataError as problem:
                prediction.problem = str(problem)
                continue
            prediction.resized_from = picture.resized_from
            readable.append(prediction)
            pixels.append(picture.pixels)
        batches = [torch.stack(pixels[start : start + AT_ONCE]) for start in range(0, len(pixels), AT_ONCE)]
        rows = [row for batch in batches for row in self.probabilities(batch)]
        for prediction, row in zip(readable, rows, strict=True):
            order = row.argsort(descending=True, stable=True).tolist()
            prediction.guesses = [(self.card.classes[k], float(row[k])) for k in order]
        return predictions
