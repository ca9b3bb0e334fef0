"""An exported ResNet-18 with masks of channels at density 0.25 against a dense one: file size, and
inference time.

Both are written by `save_model`, as `dispfl export` does. Times are those of onnxruntime with one
thread, for batches of 1 and of 32 images.
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
from dispfl.export.formats import OUTPUT, save_model
from dispfl.models.settings import Model
from measure import best_times, report

DENSITY = 0.25
SIZE_LIMIT, TIME_LIMIT = 0.27, 0.35
BATCHES = {1: 100, 32: 10}
"""Images in a batch, and repeats."""


def network(density: float) -> nn.Module:
    """Return a peer's network before round 0."""
    network, method = (
        FlatModule(Model(name="resnet18").build(3, 10, 32)),
        DisPFL(structure="channels", density=density),
    )
    layout = method.layout(network.module, lambda: torch.zeros(2, 3, 32, 32))
    model = method.start(network.read(), layout, density, seed=0, peer="000").model
    small = network.for_mask(model.mask)
    small.load(model.flat(), {})
    return small.module


def inference(path: Path, batch: int) -> Callable[[], object]:
    """Return a function that classifies a batch with onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    images = torch.rand(batch, 3, 32, 32, generator=torch.Generator().manual_seed(0)).numpy()
    return lambda: session.run([OUTPUT], {given.name: images})


def main() -> bool:
    """Return whether all limits are held."""
    spec = describe("cifar10")
    card = Card(classes=spec.class_names, shape=spec.shape, mean=spec.mean, std=spec.std)
    with tempfile.TemporaryDirectory() as folder:
        dense, small = Path(folder) / "dense.onnx", Path(folder) / "small.onnx"
        whole, part = (
            save_model(network(d), card, path).size for d, path in ((1.0, dense), (DENSITY, small))
        )
        what = {"model": "resnet18", "density": DENSITY}
        held = [
            report(
                "channel_export",
                part / whole,
                SIZE_LIMIT,
                **what,
                what="file size",
                megabytes=round(part / 1e6, 1),
            )
        ]
        for batch, repeats in BATCHES.items():
            sides = inference(small, batch), inference(dense, batch)
            taken, other = best_times(*sides, repeats=repeats, clock=time.thread_time)
            more = {
                "batch": batch,
                "milliseconds": round(1e3 * taken, 2),
                "milliseconds_dense": round(1e3 * other, 2),
            }
            held.append(
                report(
                    "channel_export",
                    taken / other,
                    TIME_LIMIT,
                    **what,
                    what="onnxruntime time",
                    **more,
                )
            )
    return all(held)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(not main())
