"""An exported ResNet-18 with masks of channels against a dense one: file size and inference time.

The density is 0.25. Both are written by `save_model`, as `dispfl export` does. Times are those of
onnxruntime with one thread, for batches of 1 and of 32 images.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import torch
from torch import nn

from dispfl import DisPFL
from dispfl.core.flat_module import FlatModule
from dispfl.data.catalogue import describe
from dispfl.export.card import Card
from dispfl.export.formats import save_model
from dispfl.models.settings import Model
from measure import best_times, report

DENSITY = 0.25
SIZE_LIMIT = 0.27
TIME_LIMIT = 0.35
REPEATS = {1: 100, 32: 10}
"""By images in a batch."""


def network(density: float) -> nn.Module:
    """Return a peer's network before round 0."""
    large = FlatModule(Model(name="resnet18").build(3, 10, 32))
    method = DisPFL(structure="channels", density=density)
    layout = method.layout(large.module, lambda: torch.zeros(2, 3, 32, 32))
    model = method.start(large.read(), layout, density, seed=0, peer="000").model
    small = large.for_mask(model.mask)
    small.load(model.flat(), {})
    return small.module


def inference(path: Path, batch: int) -> Callable[[], object]:
    """Return a function that classifies a batch with onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    input_name = session.get_inputs()[0].name
    images = torch.rand(batch, 3, 32, 32, generator=torch.Generator().manual_seed(0)).numpy()
    return lambda: session.run(["probabilities"], {input_name: images})


def main(folder: Path) -> bool:
    """Return whether all limits are held."""
    spec = describe("cifar10")
    card = Card(classes=spec.class_names, shape=spec.shape, mean=spec.mean, std=spec.std)
    dense = folder / "dense.onnx"
    small = folder / "small.onnx"
    dense_size = save_model(network(1.0), card, dense).size
    small_size = save_model(network(DENSITY), card, small).size

    held = report(
        "channel_export",
        small_size / dense_size,
        SIZE_LIMIT,
        model="resnet18",
        density=DENSITY,
        what="file size",
        megabytes=round(small_size / 1e6, 1),
    )
    limits_held = [held]
    for batch, repeats in REPEATS.items():
        sides = (inference(small, batch), inference(dense, batch))
        small_time, dense_time = best_times(*sides, repeats=repeats, clock=time.thread_time)
        held = report(
            "channel_export",
            small_time / dense_time,
            TIME_LIMIT,
            model="resnet18",
            density=DENSITY,
            what="onnxruntime time",
            batch=batch,
            milliseconds=round(1e3 * small_time, 2),
            milliseconds_dense=round(1e3 * dense_time, 2),
        )
        limits_held.append(held)
    return all(limits_held)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        all_held = main(Path(folder))
    sys.exit(not all_held)
