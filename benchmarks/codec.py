"""Encoding and decoding a ResNet-18 on one core, against a plain copy of its dense weights.

The copy goes into memory that exists already. The limit is what 1 GB of dense weights a second
comes to, where a copy reaches the speed measured in the same run. The compressed variants have no
limit: their speed and their size are reported.
"""

from typing import Literal

import torch

from dispfl import DisPFL, Wire
from dispfl.core.flat_module import FlatModule
from dispfl.models.settings import Model
from dispfl.wire.codec import HEADER, Codec
from measure import best_times, report

GIGABYTE = 1e9
CODINGS: tuple[Literal["plain", "zstd"], ...] = ("plain", "zstd")
VALUES: tuple[Literal["float32", "float16", "int8"], ...] = ("float32", "float16", "int8")


def measure(density: float, wire: Wire) -> None:
    """A model of one peer, pushed as it is, and requested by another."""
    network = FlatModule(Model(name="resnet18").build(3, 10, 32))
    method = DisPFL(density=density)
    layout = network.layout
    weights = network.read()
    model = method.start(weights, layout, density, seed=0, peer="000").model
    requested = method.start(weights, layout, density, seed=0, peer="001").next_mask

    codec = Codec(layout, method.always_dense(layout, {density}), wire)
    rng = torch.Generator()
    push = codec.encode_model(model, rng=rng)
    request = codec.encode_request(requested)
    answer = codec.encode_answer(model, requested, rng=rng)
    target = torch.zeros_like(weights)
    sides = {
        "push encode": lambda: codec.encode_model(model, rng=rng),
        "push decode": lambda: codec.decode_model(push),
        "pull encode": lambda: codec.encode_answer(model, requested, rng=rng),
        "pull decode": lambda: codec.decode_answer(answer, requested),
    }
    copy_time, *times = best_times(lambda: target.copy_(weights), *sides.values())

    dense_gigabytes = 4 * layout.size / GIGABYTE
    limit = None
    if wire == Wire(values="float32", coding="plain"):
        limit = round(dense_gigabytes / copy_time, 3)
    paper = 4 * model.values.numel()
    message_bytes = {"push": len(push), "pull": len(request) + len(answer)}
    for side, seconds in zip(sides, times, strict=True):
        direction = side.split()[0]
        details: dict[str, object] = {}
        if side == "pull encode":
            details["of_which"] = shares_of_a_pull(request, answer, paper)
        report(
            "codec",
            seconds / copy_time,
            limit,
            what=side,
            density=density,
            values=wire.values,
            coding=wire.coding,
            gb_of_dense_weights_a_second=round(dense_gigabytes / seconds, 2),
            share_of_the_papers_bytes=round(message_bytes[direction] / paper, 3),
            **details,
        )


def shares_of_a_pull(request: bytes, answer: bytes, paper: int) -> dict[str, float]:
    """Return the bytes of each part of a request and its answer, relative to the paper's."""
    mask_bytes, count = HEADER.unpack_from(answer)[-2:]
    part_bytes = {
        "request": len(request),
        "mask": mask_bytes,
        "values": len(answer) - HEADER.size - mask_bytes,
        "plain values": 4 * count,
    }
    return {part: round(size / paper, 3) for part, size in part_bytes.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for coding in CODINGS:
        for values in VALUES:
            measure(0.5, Wire(values=values, coding=coding))
    measure(0.2, Wire(coding="zstd"))
