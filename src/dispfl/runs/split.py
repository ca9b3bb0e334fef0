"""The split of a run: which samples each peer has, and what labels they bear."""

from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor

from dispfl.data.partition import Split
from dispfl.errors import RunError
from dispfl.roster import roster_names
from dispfl.runs.files import write_atomically

FILE = "split.safetensors"


def write_split(path: Path, split: Split, label_counts: Tensor) -> None:
    """Save a split: `train/000`, `test/000`, ... and `label_counts` (peers, classes)."""
    tensors = {"label_counts": label_counts}
    for name, train, test in zip(roster_names(len(split.train)), split.train, split.test, strict=True):
        tensors |= {f"train/{name}": train, f"test/{name}": test}
    write_atomically(path / FILE, safetensors.torch.save(tensors))


def read_split(path: Path) -> tuple[Split, Tensor] | None:
    """A saved split and its label counts; None if there is none."""
    try:
        tensors = safetensors.torch.load_file(path / FILE)
        names = roster_names(len(tensors["label_counts"]))
        parts = [tuple(tensors[f"{part}/{name}"] for name in names) for part in ("train", "test")]
        return Split(parts[0], parts[1]), tensors["label_counts"]
    except FileNotFoundError:
        return None
    except (safetensors.SafetensorError, KeyError, OSError) as problem:
        raise RunError(f"{path / FILE} is damaged ({problem}). Delete it; going on makes it anew.") from problem
