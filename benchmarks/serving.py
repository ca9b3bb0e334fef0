"""A training step of a ResNet-18 while its process continuously serves models, compared with an
idle process.

The peer is like a real one: an event loop that responds, a thread for the codec, a thread that
trains. The neighbour is another process that requests the peer's ResNet-18 at density 0.5 with a
mask, again and again.

`beside` is the same while another process serves the neighbour: the cost of a busy machine, where
encoding, TLS and the neighbour use cores and memory bandwidth. The rest of the ratio is the cost of
sharing a process: the interpreter lock and the event loop. The limit was set after a first
measurement on two cores (ratio 1.07, beside 1.09): at 1.25 a step has lost a fifth of its speed,
with a neighbour that never pauses; in a round each neighbour sends one request.
"""

import asyncio
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dispfl import DisPFL, Full, Train
from dispfl.core.flat_module import FlatModule
from dispfl.core.samples import PeerData
from dispfl.core.task import Task
from dispfl.core.train import Trainer
from dispfl.data.batches import ImageTransform, ResidentSamples
from dispfl.models.settings import Model
from dispfl.peer.membership.identity import Identity, client_context, server_context
from dispfl.peer.node_context import NodeContext
from dispfl.peer.run_site import CodecExecutor
from dispfl.peer.server import Server
from dispfl.peer.setup.spec import spec_digest
from dispfl.peer.transport.base import JSON, Request
from dispfl.peer.transport.https import HttpsTransport
from dispfl.round.context import RunContext
from dispfl.round.round import initial_states
from dispfl.wire.codec import Codec
from measure import report

LIMIT = 1.25
SAMPLES, BATCH = 64, 32
REPEATS = 4
LOCAL = "127.0.0.1"
DENSITY = 0.5
LARGEST = 100_000_000


@dataclass(frozen=True)
class TwoMembers:
    """A federation of two peers with fixed kept counts."""

    counts: Sequence[int]

    def participants(self, t: int) -> list[str]:
        return ["000", "001"]

    def kept_counts(self, name: str) -> Sequence[int]:
        return self.counts

    def join(self, t: int) -> None: ...

    def records(self) -> list[JSON]:
        return []

    def merge(self, records: JSON) -> object: ...


def transport(folder: Path, name: str, port: int = 0) -> HttpsTransport:
    """The transport of one of the two peers."""
    own, other = (
        Identity.load(folder / name),
        Identity.load(folder / ("001" if name == "000" else "000")),
    )
    return HttpsTransport(
        name,
        (LOCAL, 0),
        client=client_context(own, [other.certificate]),
        server=server_context(own, [other.certificate]),
        identify=lambda leaf, issuers: other.name,
        address=lambda peer: (LOCAL, port),
        max_request=lambda kind: LARGEST,
        max_response=lambda kind: LARGEST,
    )


def the_setting() -> RunContext:
    """A run context with random images."""
    rng = torch.Generator().manual_seed(0)
    pictures = torch.randint(256, (SAMPLES, 32, 32, 3), dtype=torch.uint8, generator=rng)
    transform = ImageTransform((0.5,) * 3, (0.25,) * 3, crop=True, flip=True)
    data = ResidentSamples(pictures, torch.randint(10, (SAMPLES,), generator=rng), None, transform)
    peers = {name: PeerData(data, data) for name in ("000", "001")}
    train = Train(epochs=1, batch_size=BATCH)
    method = DisPFL(density=DENSITY)
    return RunContext(
        lambda: Model(name="resnet18").build(3, 10, 32),
        peers,
        method,
        Full(),
        train,
        Task(),
        seed=0,
        rounds=1,
    )


class Peer:
    """A peer that serves its model and can train meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.context = the_setting()
        self.network = FlatModule(self.context.module())
        states = initial_states(self.context)
        self.state, mask = states["000"], states["001"].next_mask
        layout, flags = self.network.layout, mask.flags()
        codec = Codec(
            layout, self.context.method.always_dense(layout, {DENSITY}), self.context.settings.wire
        )
        members = TwoMembers([int(flags[where].sum()) for where in layout.slices])
        self.ctx = NodeContext("000", self.context, codec, {}, members, CodecExecutor())
        self.ctx.guard.MAX_REPEATS = sys.maxsize  # the same model is requested again and again
        self.ctx.published.publish(0, self.state.model, ["001"], silent=())
        self.request = codec.encode_request(mask)
        self.transport = transport(folder, "000")

    def steps(self) -> float:
        """Train on this thread; return the seconds per step."""
        torch.set_num_threads(1)
        context, data = self.context, self.context.data.peers["000"]
        weights, mask = self.state.model.unpack()
        buffers = self.state.buffers
        trainer = Trainer(
            self.network,
            data.train,
            data.test,
            context.settings.train,
            Task(),
            0,
            "000",
            0,
            1,
            buffers=buffers,
        )
        began = time.perf_counter()
        trainer.learn(weights, mask)
        return (time.perf_counter() - began) / (SAMPLES // BATCH)


@dataclass
class Neighbour:
    """A neighbour in another process, which requests models while `may` is set."""

    folder: Path
    port: Any
    may: Any
    over: Any
    got: Any

    def run(self) -> None:
        """Run the process."""
        asyncio.run(self._request())

    async def _request(self) -> None:
        body, end = Peer(self.folder).request, transport(self.folder, "001", self.port.value)
        while not self.over.is_set():
            if self.may.wait(0.01):
                header: dict[str, JSON] = {
                    "spec": spec_digest({}),
                    "round": 0,
                    "nonce": str(self.got.value),
                }
                response = await end.request("000", Request("model", header, body))
                assert response.header["status"] == "model"
                self.got.value += 1
        await end.close()


def serve_only(folder: Path, port: Any, over: Any) -> None:
    """Run a process that only serves."""

    async def serving() -> None:
        peer = Peer(folder)
        await peer.transport.serve(Server(peer.ctx))
        port.value = peer.transport.port
        while not over.is_set():
            await asyncio.sleep(0.05)
        await peer.transport.close()

    asyncio.run(serving())


async def measure(folder: Path, processes: list[Any]) -> None:
    """Measure training steps without load, while another process serves, and while this one does;
    in turn."""
    make = multiprocessing.get_context("spawn")
    over, peer = make.Event(), Peer(folder)
    await peer.transport.serve(Server(peer.ctx))
    here, beside = (
        Neighbour(folder, make.Value("i"), make.Event(), over, make.Value("i")) for _ in range(2)
    )
    here.port.value = peer.transport.port
    processes += [make.Process(target=serve_only, args=(folder, beside.port, over))]
    processes[0].initial_states()
    while not beside.port.value:
        await asyncio.sleep(0.05)
    processes += [make.Process(target=neighbour.run) for neighbour in (here, beside)]
    for process in processes[1:]:
        process.initial_states()
    for neighbour in (here, beside):
        neighbour.may.set()
        while not neighbour.got.value:
            await asyncio.sleep(0.05)
        neighbour.may.clear()
    times: dict[str, list[float]] = {"idle": [], "beside": [], "here": []}
    seconds, before = 0.0, here.got.value
    pool = ThreadPoolExecutor(1)
    for _ in range(REPEATS):
        for name, neighbour in (("idle", None), ("beside", beside), ("here", here)):
            if neighbour:
                neighbour.may.set()
            began = time.perf_counter()
            times[name].append(await asyncio.get_running_loop().run_in_executor(pool, peer.steps))
            seconds += (time.perf_counter() - began) if neighbour is here else 0.0
            if neighbour:
                neighbour.may.clear()
            await asyncio.sleep(0.5)  # let the last response finish
    over.set()
    rate = (here.got.value - before) / seconds
    for process in processes:
        while process.is_alive():
            await asyncio.sleep(0.05)
    await peer.transport.close()
    idle, with_other, own = (min(times[name]) for name in ("idle", "beside", "here"))
    report(
        "serving",
        own / idle,
        LIMIT,
        what="a training step of ResNet-18 while its process continuously serves a ResNet-18",
        beside=round(with_other / idle, 3),
        seconds_a_step=round(idle, 3),
        models_served_a_second=round(rate, 1),
    )


def main() -> None:
    """Measure with two temporary identities."""
    processes: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("000", "001"):
            Identity.make(name).save(Path(folder) / name)
        try:
            asyncio.run(measure(Path(folder), processes))
        finally:
            for process in processes:
                process.kill()


if __name__ == "__main__":
    main()
