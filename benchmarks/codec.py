"""Encoding and decoding a ResNet-18 on one core, against a plain copy of its dense weights into
memory that exists already; ratios of time.

The limit is what 1 GB of dense weights a second comes to, where a copy reaches the speed measured
in the same run. The compressed variants have no limit: their speed and their size are reported.
"""

from itertools import product

import torch

from dispfl import DisPFL, Wire
from dispfl.core.flat_module import FlatModule
from dispfl.models.settings import Model
from dispfl.wire.codec import HEADER, Codec
from measure import best_times, report

GIGABYTE = 1e9


def measure(density: float, values: str, coding: str) -> None:
    """A model of one peer, pushed whole, and asked for by another."""
    network = FlatModule(Model(name="resnet18").build(3, 10, 32))
    method, layout, weights = DisPFL(density=density), network.layout, network.read()
    sender, receiver = (
        method.start(weights, layout, density, seed=0, peer=peer) for peer in ("000", "001")
    )
    codec = Codec(
        layout, method.always_dense(layout, {density}), Wire(values=values, coding=coding)
    )  # type: ignore[arg-type]
    rng = torch.Generator()
    asked = receiver.next_mask
    whole, answer = (
        codec.encode_model(sender.model, rng=rng),
        codec.encode_answer(sender.model, asked, rng=rng),
    )
    request, there = codec.encode_request(asked), torch.zeros_like(weights)
    copy, *times = best_times(
        lambda: there.copy_(weights),
        lambda: codec.encode_model(sender.model, rng=rng),
        lambda: codec.decode_model(whole),
        lambda: codec.encode_answer(sender.model, asked, rng=rng),
        lambda: codec.decode_answer(answer, asked),
    )
    dense = 4 * layout.size
    limit = round(dense / GIGABYTE / copy, 3) if (values, coding) == ("float32", "plain") else None
    mask_bytes, count = HEADER.unpack_from(answer)[-2:]
    paper = 4 * sender.model.values.numel()
    parts = {
        "request": len(request),
        "mask": mask_bytes,
        "values": len(answer) - HEADER.size - mask_bytes,
    }
    evaluates_global = {part: round(size / paper, 3) for part, size in parts.items()} | {
        "plain values": round(4 * count / paper, 3)
    }
    share = {"push": len(whole), "pull": len(request) + len(answer)}
    for what, taken in zip(
        ("push encode", "push decode", "pull encode", "pull decode"), times, strict=True
    ):
        size = share[what.split()[0]] / paper
        report(
            "codec",
            taken / copy,
            limit,
            what=what,
            density=density,
            values=values,
            coding=coding,
            gb_of_dense_weights_a_second=round(dense / GIGABYTE / taken, 2),
            share_of_the_papers_bytes=round(size, 3),
            **({"of_which": evaluates_global} if what == "pull encode" else {}),
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    for coding, values in product(("plain", "zstd"), ("float32", "float16", "int8")):
        measure(0.5, values, coding)
    measure(0.2, "float32", "zstd")
