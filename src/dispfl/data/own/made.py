"""Data that a site's own function returns: Datasets or tensors, as `Federation` takes them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dispfl.core.rng import global_stream
from dispfl.data.batches import DatasetSamples, ResidentSamples, samples_from
from dispfl.data.own.factory import call, describe
from dispfl.data.own.samples import OwnSamples, labels_of
from dispfl.errors import DataError

KEY = "data.factory"
WHOLE_NUMBERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def load_made(
    factory: str, classes: tuple[str, ...] | None, folder: Path, *, site: str = "", seed: int = 0
) -> OwnSamples:
    """Call the site's function and check what it returns."""
    with global_stream(seed, "data", site):  # what it draws with torch is the same the next time
        made = call(KEY, factory, folder, **({"site": site} if site else {}))
    if not isinstance(made, (tuple, list)) or len(made) != 2 or any(isinstance(part, Tensor) for part in made):
        if isinstance(made, (tuple, list)):
            got = f"({', '.join(type(part).__name__ for part in made)})"
        else:
            got = type(made).__name__
        raise DataError(
            f"{KEY} {factory} must return (training data, test data), each a Dataset or a pair (inputs, labels) "
            f"of tensors; it returned {got}."
        )
    train, test = (
        _samples(factory, part, f"{which} data", classes, folder)
        for part, which in zip(made, ("training", "test"), strict=True)
    )
    return OwnSamples("own", train, test, listed=classes)


def _samples(
    factory: str, given: Any, which: str, classes: tuple[str, ...] | None, folder: Path
) -> ResidentSamples | DatasetSamples:
    whose = f"The {which} of {KEY} {factory}"
    samples = samples_from(given, whose)
    try:
        inputs, labels = next(samples.batches(1))
    except Exception as problem:  # a Dataset is the site's own code too
        raise DataError(f"{whose} cannot give a sample: {describe(problem, folder)}") from problem
    if not isinstance(inputs, Tensor) or not isinstance(labels, Tensor):
        got = f"({type(inputs).__name__}, {type(labels).__name__})"
        raise DataError(f"{whose} must be samples of (input, label), both numbers; batched, they are {got}.")
    if labels.ndim != 1 or labels.dtype not in WHOLE_NUMBERS:
        got = f"{labels.dtype} of shape {list(labels.shape[1:])}"
        raise DataError(f"{whose} must have one whole number as the label of a sample, got {got}.")
    if isinstance(samples, ResidentSamples):
        resident = ResidentSamples(_float32(samples.inputs), samples.labels.long())
        labels_of(resident, classes, which)  # at once: of a Dataset only when they are asked for, as it takes long
        return resident
    if _float32(inputs).dtype != inputs.dtype:
        raise DataError(f"{whose} have inputs of type {inputs.dtype}; return them as float32.")
    if labels.dtype != torch.int64:
        raise DataError(f"{whose} have labels of type {labels.dtype}; return them as int(label).")
    return samples


def _float32(inputs: Tensor) -> Tensor:
    """Floats as the networks' own; whole numbers, which may be places in a vocabulary, as they are."""
    return inputs.float() if inputs.is_floating_point() else inputs
