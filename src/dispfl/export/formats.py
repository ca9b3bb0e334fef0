"""The formats by the ending of a file's name: how a model is written, checked and read again."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from dispfl.errors import ConfigError, DataError, DispflError
from dispfl.export import as_onnx, as_pt2, as_safetensors
from dispfl.export.card import Card
from dispfl.export.classifier import Classifier
from dispfl.export.deployed import Deployed
from dispfl.runs.files import write_atomically

TOLERANCE = 1e-4
"""How far a probability may be from torch's; other kernels sum in another order."""


class Format(NamedTuple):
    """How one kind of file is written and read, and which packages of an extra each takes."""

    encode: Callable[[Deployed, Card], bytes]
    decode: Callable[[bytes], Classifier]
    to_write: tuple[str, ...] = ()
    to_read: tuple[str, ...] = ()
    extra: str = ""
    safe: bool = True
    """Whether a file from anywhere may be read."""


FORMATS = {
    ".safetensors": Format(as_safetensors.encode, as_safetensors.decode),
    ".onnx": Format(
        as_onnx.encode,
        as_onnx.decode,
        to_write=("onnx", "onnxscript", "onnxruntime"),
        to_read=("onnxruntime",),
        extra="onnx",
    ),
    ".pt2": Format(as_pt2.encode, as_pt2.decode, safe=False),
}


class Saved(NamedTuple):
    """A file that was written."""

    size: int
    """Its bytes."""
    difference: float
    """The largest difference between its probabilities and torch's, on random inputs."""


def check_writable(path: Path) -> Format:
    """The format that a path's ending names; refused if there is none, or if a package for it is missing."""
    chosen = _format(path)
    _check_installed(path, chosen.to_write, chosen.extra)
    return chosen


def save(network: nn.Module, card: Card, path: Path) -> Saved:
    """Write a network, on the CPU, as one file, after reading it back and comparing it with torch."""
    encode, decode, *_ = check_writable(path)
    deployed = Deployed(network, card)
    content = encode(deployed, card)
    difference = largest_difference(decode(content), Classifier.of(deployed, card))
    if not difference <= TOLERANCE:
        raise DataError(f"{path} was not written: its probabilities would differ from torch's by {difference:.2g}.")
    write_atomically(path, content)
    return Saved(len(content), difference)


def largest_difference(one: Classifier, other: Classifier) -> float:
    """Of the probabilities of two models, on one random input and on three at once."""
    card, rng = other.card, torch.Generator().manual_seed(0)
    if card.columns:  # rows as they may occur: their columns can be of any size
        three = torch.randn(3, *card.shape, generator=rng) * torch.tensor(card.std) + torch.tensor(card.mean)
    else:
        three = torch.rand(3, *card.shape, generator=rng)
    batches = (three[:1], three)
    return max(float((one.probabilities(x) - other.probabilities(x)).abs().max()) for x in batches)


def load(path: Path, *, trust: bool = False) -> Classifier:
    """Read a model that `save` wrote. A .pt2 can hide code that runs when it is read: only with `trust`."""
    chosen = _format(path)
    _check_installed(path, chosen.to_read, chosen.extra)
    if not chosen.safe and not trust:
        raise DataError(
            f"{path} was not opened: loading a {path.suffix} runs whatever code is hidden in it. If you trust where it "
            "comes from, add --trust (in Python, trust=True); .safetensors and .onnx need no trust."
        )
    try:
        return chosen.decode(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"The model {path} does not exist; `dispfl export` writes one.") from None
    except DispflError as problem:
        raise DataError(f"{path} is not a model that dispfl can run. {problem}") from problem
    except Exception as problem:  # a damaged file can fail in any way there is
        reason = str(problem).strip().partition("\n")[0]
        raise DataError(f"{path} is not a model, or is damaged ({reason}).") from problem


def _format(path: Path) -> Format:
    if path.suffix.lower() not in FORMATS:
        *others, last = FORMATS
        raise ConfigError(f"{path} must end in {', '.join(others)} or {last}.")
    return FORMATS[path.suffix.lower()]


def _check_installed(path: Path, packages: tuple[str, ...], extra: str) -> None:
    for package in packages:
        if find_spec(package) is None:
            raise ConfigError(
                f"{path.suffix} files need {package}, which is not installed: pip install 'dispfl[{extra}]'."
            )
