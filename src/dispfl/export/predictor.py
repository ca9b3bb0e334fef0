"""The deployed model, with its preprocessing, and predictions for images and tables."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from dispfl.core.inputs import Inputs, forward, sample_count, stacked, tensors_of, with_each
from dispfl.data.readers.folder import UnreadableImageError, decode_image, resize_image
from dispfl.data.readers.table import Texts, read_rows, read_text_rows
from dispfl.data.text import WORDS, tokenize
from dispfl.errors import DataError
from dispfl.export.card import Card
from dispfl.export.predict_process import Prediction

BATCH = 64
"""Inputs in a batch: enough for speed, with little memory."""

MODES = {1: "L", 3: "RGB"}
"""Pillow's names for grey and colour, by the number of channels."""


class DeployedModel(nn.Module):
    """From images or rows of a table to probabilities (N, classes), or to numbers in their unit.

    Images are float32 (N, C, H, W) in [0, 1]; rows are raw (N, columns). Normalization and softmax
    are part of the model, so that no caller has to reimplement them. The logarithm of the
    probabilities gives the logits up to a constant, which no use of logits depends on. A
    segmentation has probabilities for each pixel, (N, classes, H, W); a multi-label task has
    independent ones; a regression has its targets (N, targets).
    """

    mean: Tensor
    std: Tensor
    target_mean: Tensor
    target_std: Tensor

    def __init__(self, network: nn.Module, card: Card) -> None:
        super().__init__()
        self.network = network
        self.names = card.input_names
        self.normalizes = card.tensors is None
        if self.normalizes:
            per_channel = (-1, *[1] * len(card.shape[1:]))
            self.register_buffer("mean", torch.tensor(card.mean).view(per_channel))
            self.register_buffer("std", torch.tensor(card.std).view(per_channel))
        self.task = card.task
        if card.task == "regression":
            self.register_buffer("target_mean", torch.tensor(card.target_mean))
            self.register_buffer("target_std", torch.tensor(card.target_std))
        self.outputs = len(card.classes)
        self.eval()

    def forward(self, *inputs: Tensor) -> Tensor:
        if self.normalizes:
            arguments: Inputs = (inputs[0] - self.mean) / self.std
        elif self.names == ["inputs"]:
            arguments = inputs[0]
        else:
            arguments = dict(zip(self.names, inputs, strict=True))
        logits = forward(self.network, arguments)
        if self.task == "multilabel":
            return logits.sigmoid()
        if self.task == "regression":
            return logits.view(-1, self.outputs) * self.target_std + self.target_mean
        return logits.softmax(1)


@dataclass(frozen=True)
class Predictor:
    """A model and its card. `run` maps inputs to outputs, as `DeployedModel` does."""

    card: Card
    run: Callable[..., Tensor]
    trust: bool = False
    """Whether a tokenizer that the card names may be loaded."""

    @classmethod
    def of(cls, deployed: DeployedModel, card: Card) -> "Predictor":
        """A predictor that runs a torch module."""
        return cls(card, torch.no_grad()(deployed))

    def outputs(self, inputs: Inputs) -> Tensor:
        """Run the model; a result that contradicts its card is refused."""
        try:
            outputs = self.run(*tensors_of(inputs))
        except Exception as problem:  # a graph from an untrusted file can raise anything
            reason = str(problem).strip().partition("\n")[0]
            raise DataError(
                f"The model does not accept {self.card.input} of {list(self.card.shape)}: {reason}"
            ) from problem
        shape = list(outputs.shape)
        expected = [sample_count(inputs), len(self.card.classes)]
        if self.card.task == "segmentation":
            expected += self.card.shape[1:]
        if shape != expected:
            raise DataError(
                f"The model returns shape {shape}; according to its card it is {expected}."
            )
        if not outputs.isfinite().all():
            raise DataError("The model returns numbers that are not finite.")
        return outputs

    def predict(
        self,
        paths: Sequence[Path],
        progress: Callable[[], None] = lambda: None,
        masks: Path | None = None,
    ) -> list[Prediction]:
        """Predict for image files or the rows of tables, in this process.

        A segmentation writes the class of each pixel into the folder `masks`, if there is one. A
        file that cannot be read does not affect the others. `progress` is called after every file
        and every batch. A graph from an untrusted file may never return: `predict_files` runs it in
        another process.
        """
        predictions: list[Prediction] = []
        readable: list[tuple[Prediction, Inputs]] = []
        for path in paths:
            try:
                inputs_of_file = self._read(path)
            except DataError as problem:
                predictions.append(Prediction(path, problem=str(problem)))
                continue
            progress()
            predictions += [prediction for prediction, _ in inputs_of_file]
            readable += inputs_of_file

        for start in range(0, len(readable), BATCH):
            batch = readable[start : start + BATCH]
            outputs = self.outputs(stacked([inputs for _, inputs in batch]))
            for (prediction, _), output in zip(batch, outputs, strict=True):
                self._fill(prediction, output, masks)
            progress()
        return predictions

    def _fill(self, prediction: Prediction, output: Tensor, masks: Path | None) -> None:
        """Set the guesses of one sample: of classes the most probable first, others in order."""
        classes = self.card.classes
        if self.card.task == "segmentation":
            pixels = output.argmax(0).to(torch.uint8)
            if masks is not None:
                write_mask(masks / f"{prediction.path.stem}.png", pixels, prediction.resized_from)
            output = torch.bincount(pixels.flatten(), minlength=len(classes)) / pixels.numel()
        order = list(range(len(classes)))
        if self.card.task == "classification":
            order = output.argsort(descending=True, stable=True).tolist()
        prediction.guesses = [(classes[k], float(output[k])) for k in order]

    def _read(self, path: Path) -> list[tuple[Prediction, Inputs]]:
        """The inputs in one file, each with its prediction, still empty."""
        if self.card.input == "arrays":
            raise DataError(
                f"{path} cannot be used: the model's inputs are arrays, not images or tables; run"
                " the model with your own code."
            )
        if self.card.text is not None:
            tokens, lines = read_text_rows(path, self._texts(self.card.text))
            rows_of_texts = []
            for row, line in enumerate(lines):
                sample = with_each(tokens, lambda tensor, row=row: tensor[row])  # type: ignore[misc]
                rows_of_texts.append((Prediction(path, line), sample))
            return rows_of_texts
        if self.card.columns:
            rows = read_rows(path, self.card.columns, self.card.label_columns)
            predictions = [Prediction(path, line) for line in rows.lines]
            return list(zip(predictions, rows.inputs, strict=True))
        image = read_image(path, self.card.shape)
        return [(Prediction(path, resized_from=image.resized_from), image.pixels)]

    def _texts(self, column: str) -> Texts:
        """Return how texts become the model's inputs."""
        tokenizer = self.card.tokenizer or WORDS
        if tokenizer != WORDS and not self.trust:
            raise DataError(
                f"The model's tokenizer is {tokenizer!r}, which would be loaded from this machine"
                " or from Hugging Face's hub. If you trust the model's origin, add --trust (in"
                " Python, trust=True)."
            )
        length = self.card.shape[0]
        return Texts(column, lambda texts: tokenize(texts, tokenizer, length))


@dataclass(frozen=True)
class ImageInput:
    """An image as input of a model."""

    pixels: Tensor
    """float32 (C, H, W) in [0, 1]"""
    resized_from: tuple[int, int] | None
    """The original width and height, if they differ from the model's input."""


def read_image(path: Path, shape: Sequence[int]) -> ImageInput:
    """Read an image that Pillow supports, converted and resized to (channels, height, width)."""
    channels, height, width = shape
    if channels not in MODES:
        raise DataError(f"The model needs images of {channels} channels; image files have 1 or 3.")
    image = _open_image(path, MODES[channels])
    resized_from = None if image.size == (width, height) else image.size
    resized = np.asarray(resize_image(image, width, height), np.float32)
    pixels = resized.reshape(height, width, channels).transpose(2, 0, 1) / 255
    return ImageInput(torch.from_numpy(np.ascontiguousarray(pixels)), resized_from)


def _open_image(path: Path, mode: str) -> Image.Image:
    if not path.exists():
        raise DataError(f"The image {path} does not exist.")
    if path.is_dir():
        raise DataError(f"{path} is a folder; give the images in it.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            return decode_image(path, mode)
    except UnreadableImageError as problem:
        fix = f"; {problem.fix}" if problem.fix else ""
        raise DataError(f"The image {path} cannot be read: {problem}{fix}.") from None


def write_mask(path: Path, pixels: Tensor, size: tuple[int, int] | None) -> None:
    """Write the class of each pixel as a grey PNG, resized to (width, height) of the image."""
    mask = Image.fromarray(pixels.numpy())
    if size is not None:
        mask = mask.resize(size, Image.Resampling.NEAREST)
    path.parent.mkdir(parents=True, exist_ok=True)
    mask.save(path, "PNG")
