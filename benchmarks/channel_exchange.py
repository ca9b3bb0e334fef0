"""ResNet-18 with masks of channels at density 0.5: bytes of the busiest node, average of 11 models.

Bytes: a round of 100 peers with 10 neighbours each and independent masks, against the paper's count
(4 bytes x kept weights x neighbours), which is of the largest download; the largest upload is
printed beside. Requests, masks and headers are included. All 100 masks are drawn, because the
overlap of two varies: a network has few units. Plain messages are counted for all links; with zstd,
those of the node that plain messages make the busiest are encoded, with weights as they are before
round 0.

Average: processor time on one thread against that of copying the values of all 11 models once, into
memory that exists already. The copy reads and writes as many bytes as the models have; the average
reads no more than that and writes an eleventh of it, so the ratio for bytes that are read or
written is printed beside.
"""

import sys
import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from dispfl import DisPFL, RandomRegular, Train, Wire
from dispfl.core.allocator import keep_heap
from dispfl.costs.estimate import CostInputs
from dispfl.data.catalogue import describe
from dispfl.methods.base import PeerState
from dispfl.models.settings import Model
from dispfl.round.context import RunContext
from dispfl.round.exchange import deliver, exchange_costs, exchange_graph, request_size
from dispfl.round.ledger import BYTES_PER_VALUE, Ledger, MessageCost
from dispfl.round.round import initial_states
from measure import best_times, report

PEERS = 100
NEIGHBOURS = 10
DENSITY = 0.5
PLAIN_LIMIT = 0.52
ZSTD_LIMIT = 0.45
AVERAGE_LIMIT = 2.0


def measure_bytes(context: RunContext, states: Mapping[str, PeerState]) -> bool:
    """Plain messages of all links, then compressed ones of the busiest node.

    Return whether the limits are held.
    """
    paper = BYTES_PER_VALUE * states["000"].model.values.numel() * NEIGHBOURS
    workload = {"peers": PEERS, "neighbours": NEIGHBOURS, "paper_mb": round(paper / 1e6, 1)}

    plain_ledger = Ledger.of(round_messages(context, states))
    plain = plain_ledger.busiest()
    mean = sum(plain_ledger.wire.values()) / PEERS
    plain_held = report(
        "channel_bytes",
        plain.down / paper,
        PLAIN_LIMIT,
        coding="plain",
        mean=round(mean / paper, 3),
        up=round(plain.up / paper, 3),
        **workload,
    )

    compressed = replace(context.changed(wire=Wire(coding="zstd")), known_layout=context.layout)
    zstd = Ledger.of(round_messages(compressed, states, plain.peer)).busiest()
    zstd_held = report(
        "channel_bytes",
        zstd.down / paper,
        ZSTD_LIMIT,
        coding="zstd",
        up=round(zstd.up / paper, 3),
        **workload,
    )
    return bool(plain_held and zstd_held)


def round_messages(
    context: RunContext, states: Mapping[str, PeerState], node: str | None = None
) -> list[MessageCost]:
    """Return the costs of all messages of round 0, or of those that one node sends or receives."""
    codec = context.codec
    messages: list[MessageCost] = []
    for receiver, senders in exchange_graph(context, 0).items():
        mask = states[receiver].next_mask
        request = request_size(codec, mask)
        for sender in senders:
            if node in (None, sender, receiver):
                model = states[sender].model
                answer = deliver(context, codec, model, mask, sender, receiver, 0)
                messages += exchange_costs(receiver, sender, request, answer.paper, answer.wire)
    return messages


def measure_average(context: RunContext, states: Mapping[str, PeerState]) -> bool:
    """As many models as a peer averages. Return whether the limit is held."""
    models = [states[peer].model for peer in context.roster[: NEIGHBOURS + 1]]
    mask = states["000"].next_mask
    targets = [torch.empty_like(model.values) for model in models]

    def average() -> object:
        return mask.average(models, lambda: context.first_weights)

    def copy() -> None:
        for target, model in zip(targets, models, strict=True):
            target.copy_(model.values)

    average_time, copy_time = best_times(average, copy, repeats=15, clock=time.thread_time)
    read_or_written = (len(models) + 1) / (2 * len(models))
    ratio = average_time / copy_time
    held = report(
        "channel_average",
        ratio,
        AVERAGE_LIMIT,
        density=DENSITY,
        ratio_for_bytes_read_or_written=round(ratio / read_or_written, 3),
        milliseconds=round(1e3 * average_time, 1),
        copy_milliseconds=round(1e3 * copy_time, 1),
    )
    return bool(held)


def main() -> bool:
    """Return whether all limits are held."""
    context = CostInputs(
        model=Model(name="resnet18"),
        data=describe("cifar10"),
        method=DisPFL(structure="channels", density=DENSITY),
        topology=RandomRegular(degree=NEIGHBOURS),
        peers=PEERS,
        samples=500,
        train=Train(),
        wire=Wire(),
    ).context
    states = initial_states(context)
    average_held = measure_average(context, states)
    bytes_held = measure_bytes(context, states)
    return average_held and bytes_held


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep_heap()  # as engines do
    sys.exit(not main())
