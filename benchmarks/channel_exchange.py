"""ResNet-18 with masks of channels at density 0.5: the bytes of the busiest node, and the average
of 11 models.

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
from dispfl.channels.channel_mask import ChannelMask
from dispfl.core.allocator import keep_heap
from dispfl.costs.estimate import CostInputs
from dispfl.data.catalogue import describe
from dispfl.methods.base import PeerState
from dispfl.models.settings import Model
from dispfl.round.context import RunContext
from dispfl.round.exchange import deliver, exchange_costs, exchange_graph, request_size
from dispfl.round.ledger import BYTES_PER_VALUE, Ledger
from dispfl.round.round import initial_states
from measure import best_times, report

PEERS, NEIGHBOURS, DENSITY = 100, 10, 0.5
PLAIN_LIMIT, ZSTD_LIMIT = 0.52, 0.45
AVERAGE_LIMIT = 2.0


def measure_bytes(context: RunContext, states: Mapping[str, PeerState]) -> bool:
    """Plain messages of all links, then compressed ones of the busiest node. Return whether the
    limits are held."""
    paper = BYTES_PER_VALUE * states["000"].model.values.numel() * NEIGHBOURS
    plain = ledger(context, states)
    busiest, mean = plain.busiest(), sum(plain.wire.values()) / PEERS
    compressed = replace(context, wire=Wire(coding="zstd"), known_layout=context.layout)
    links = ledger(compressed, states, busiest.peer).busiest()
    more = {"peers": PEERS, "neighbours": NEIGHBOURS, "paper_mb": round(paper / 1e6, 1)}
    held = (
        report(
            "channel_bytes",
            busiest.down / paper,
            PLAIN_LIMIT,
            coding="plain",
            mean=round(mean / paper, 3),
            up=round(busiest.up / paper, 3),
            **more,
        ),
        report(
            "channel_bytes",
            links.down / paper,
            ZSTD_LIMIT,
            coding="zstd",
            up=round(links.up / paper, 3),
            **more,
        ),
    )
    return all(held)


def ledger(context: RunContext, states: Mapping[str, PeerState], node: str | None = None) -> Ledger:
    """Return the bytes of round 0, of all links or of one node's."""
    messages = []
    for receiver, senders in exchange_graph(context, 0).items():
        mask = states[receiver].next_mask
        for sender in senders:
            if node in (None, sender, receiver):
                sent = deliver(
                    context, context.codec, states[sender].model, mask, sender, receiver, 0
                )
                request = request_size(context.codec, mask)
                messages += exchange_costs(receiver, sender, request, sent.paper, sent.wire)
    if node is None:
        return Ledger.of(messages)
    return Ledger.of(message for message in messages if node in (message.sender, message.receiver))


def measure_average(context: RunContext, states: Mapping[str, PeerState]) -> bool:
    """As many models as a peer averages. Return whether the limit is held."""
    models = [states[peer].model for peer in context.roster[: NEIGHBOURS + 1]]
    mask = states["000"].next_mask
    assert isinstance(mask, ChannelMask)
    there = [torch.empty_like(model.values) for model in models]

    def copy() -> None:
        for target, model in zip(there, models, strict=True):
            target.copy_(model.values)

    taken, copied = best_times(
        lambda: mask.average(models, lambda: context.first_weights),
        copy,
        repeats=15,
        clock=time.thread_time,
    )
    read_or_written = (len(models) + 1) / (2 * len(models))
    more = {
        "ratio_for_bytes_read_or_written": round(taken / copied / read_or_written, 3),
        "milliseconds": round(1e3 * taken, 1),
        "copy_milliseconds": round(1e3 * copied, 1),
    }
    return bool(report("channel_average", taken / copied, AVERAGE_LIMIT, density=DENSITY, **more))


def main() -> bool:
    """Return whether all limits are held."""
    method, topology = (
        DisPFL(structure="channels", density=DENSITY),
        RandomRegular(degree=NEIGHBOURS),
    )
    inputs = CostInputs(
        Model(name="resnet18"), describe("cifar10"), method, topology, PEERS, 500, Train(), Wire()
    )
    states = initial_states(inputs.context)
    held = measure_average(inputs.context, states), measure_bytes(inputs.context, states)
    return all(held)


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep_heap()  # as engines do
    sys.exit(not main())
