"""A training step of a ResNet-18 while its process continuously serves models, against an idle one.

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
from dispfl.core.samples import PeerData
from dispfl.core.train import Trainer
from dispfl.models.settings import Model
from dispfl.peer.membership.identity import Identity, client_context, server_context
from dispfl.peer.node_context import NodeContext
from dispfl.peer.run_site import CodecExecutor
from dispfl.peer.server import Server
from dispfl.peer.setup.spec import spec_digest
from dispfl.peer.setup.spec_versions import SpecVersions
from dispfl.peer.transport.base import JSON, Request
from dispfl.peer.transport.guard import RequestGuard
from dispfl.peer.transport.https import HttpsTransport
from dispfl.round.context import RunContext
from dispfl.round.round import initial_states
from dispfl.testing.rounds import simulated_context
from measure import report
from synthetic import images

LIMIT = 1.25
SAMPLES = 64
BATCH = 32
REPEATS = 4
LOCALHOST = "127.0.0.1"
DENSITY = 0.5
MAX_BYTES = 100_000_000
POLL_SECONDS = 0.05
PEER = "000"
NEIGHBOUR = "001"


@dataclass(frozen=True)
class TwoMembers:
    """A federation of two peers whose masks keep these counts."""

    counts: Sequence[int]

    def participants(self, t: int) -> list[str]:
        return [PEER, NEIGHBOUR]

    def kept_counts(self, name: str) -> Sequence[int]:
        return self.counts

    def join(self, t: int) -> None: ...

    def records(self) -> list[JSON]:
        return []

    def roster(self) -> None: ...

    def merge(self, records: JSON) -> None: ...

    def lacks_roster(self, version: int, digest: str, administrators: str) -> bool:
        return False

    def merge_roster(self, text: str) -> bool:
        return False


class UnlimitedGuard(RequestGuard):
    """Answers a neighbour that requests the same model again and again."""

    MAX_REPEATS = sys.maxsize
    MAX_ANSWERS = sys.maxsize
    MAX_REQUESTS = sys.maxsize

    def __init__(self) -> None:
        super().__init__()
        self.max_bytes = sys.maxsize


def transport(folder: Path, name: str, port: int = 0) -> HttpsTransport:
    """Return the transport of one of the two peers; the port is that of the peer that serves."""
    identity = Identity.load(folder / name)
    neighbour = Identity.load(folder / (NEIGHBOUR if name == PEER else PEER))
    return HttpsTransport(
        name,
        (LOCALHOST, 0),
        client=client_context(identity, [neighbour.certificate]),
        server=server_context(identity, [neighbour.certificate]),
        identify=lambda leaf, issuers: neighbour.name,
        address=lambda peer: (LOCALHOST, port),
        max_request=lambda kind: MAX_BYTES,
        max_response=lambda kind: MAX_BYTES,
    )


def resnet_federation() -> RunContext:
    """Return a run of two ResNet-18 peers with random images."""
    samples = images(3, 32, SAMPLES)
    return simulated_context(
        {name: PeerData(samples, samples) for name in (PEER, NEIGHBOUR)},
        model=lambda: Model(name="resnet18").build(3, 10, 32),
        method=DisPFL(density=DENSITY),
        topology=Full(),
        train=Train(epochs=1, batch_size=BATCH),
        rounds=1,
    )


class Peer:
    """A peer that serves its model and can train meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.context = resnet_federation()
        self.network = self.context.network()
        states = initial_states(self.context)
        self.state = states[PEER]
        codec = self.context.codec
        requested = states[NEIGHBOUR].next_mask
        self.request = codec.encode_request(requested)

        members = TwoMembers(requested.kept_per_layer(self.network.layout))
        versions = SpecVersions.single(self.context, {})
        self.ctx = NodeContext(
            PEER, self.context, codec, versions, members, CodecExecutor(), guard=UnlimitedGuard()
        )
        self.ctx.published.publish(0, self.state.model, [NEIGHBOUR], silent=())
        self.transport = transport(folder, PEER)

    def train(self) -> float:
        """Train on this thread; return the seconds per step."""
        torch.set_num_threads(1)
        data = self.context.data.peers[PEER]
        weights, mask = self.state.model.unpack()
        trainer = Trainer(
            self.network, data, self.context.training, PEER, 0, buffers=self.state.buffers
        )
        began = time.perf_counter()
        trainer.learn(weights, mask)
        return (time.perf_counter() - began) / (SAMPLES // BATCH)


@dataclass
class Neighbour:
    """A neighbour in another process, which requests models while it is `enabled`."""

    folder: Path
    port: Any
    enabled: Any
    stopping: Any
    received: Any
    """How many models it has received."""

    def run(self) -> None:
        """Run the process."""
        asyncio.run(self._request_models())

    async def _request_models(self) -> None:
        body = Peer(self.folder).request
        client = transport(self.folder, NEIGHBOUR, self.port.value)
        while not self.stopping.is_set():
            if self.enabled.wait(0.01):
                nonce = str(self.received.value)
                header: dict[str, JSON] = {"spec": spec_digest({}), "round": 0, "nonce": nonce}
                response = await client.request(PEER, Request("model", header, body))
                assert response.header["status"] == "model"
                self.received.value += 1
        await client.close()

    async def warm_up(self) -> None:
        """Wait until it has received a model."""
        self.enabled.set()
        while not self.received.value:
            await asyncio.sleep(POLL_SECONDS)
        self.enabled.clear()


def serve_only(folder: Path, port: Any, stopping: Any) -> None:
    """Run a process that only serves."""

    async def serve() -> None:
        peer = Peer(folder)
        await peer.transport.serve(Server(peer.ctx))
        port.value = peer.transport.port
        while not stopping.is_set():
            await asyncio.sleep(POLL_SECONDS)
        await peer.transport.close()

    asyncio.run(serve())


@dataclass
class StepTimes:
    """The best seconds per training step, and how many models the training process served."""

    idle: float
    beside: float
    """While another process serves."""
    serving: float
    """While the training process serves."""
    models_a_second: float


async def measure(folder: Path, processes: list[Any]) -> StepTimes:
    """Measure training steps; the processes that are started are added to the list."""
    spawn = multiprocessing.get_context("spawn")
    stopping = spawn.Event()

    def neighbour() -> Neighbour:
        return Neighbour(folder, spawn.Value("i"), spawn.Event(), stopping, spawn.Value("i"))

    def start(target: Any, *arguments: Any) -> None:
        process = spawn.Process(target=target, args=arguments)
        processes.append(process)
        process.start()

    of_this_process = neighbour()
    of_another_process = neighbour()
    peer = Peer(folder)
    await peer.transport.serve(Server(peer.ctx))
    of_this_process.port.value = peer.transport.port
    start(serve_only, folder, of_another_process.port, stopping)
    while not of_another_process.port.value:
        await asyncio.sleep(POLL_SECONDS)
    start(of_this_process.run)
    start(of_another_process.run)
    await of_this_process.warm_up()
    await of_another_process.warm_up()

    times = await measure_in_turn(peer, of_this_process, of_another_process)
    stopping.set()
    for process in processes:
        while process.is_alive():
            await asyncio.sleep(POLL_SECONDS)
    await peer.transport.close()
    return times


async def measure_in_turn(
    peer: Peer, of_this_process: Neighbour, of_another_process: Neighbour
) -> StepTimes:
    """Train without load, while another process serves, and while this one does; in turn."""
    loop = asyncio.get_running_loop()
    pool = ThreadPoolExecutor(1)
    idle_times = []
    beside_times = []
    serving_times = []
    serving_seconds = 0.0
    received_before = of_this_process.received.value
    for _ in range(REPEATS):
        idle_times.append(await loop.run_in_executor(pool, peer.train))

        of_another_process.enabled.set()
        beside_times.append(await loop.run_in_executor(pool, peer.train))
        await pause(of_another_process)

        of_this_process.enabled.set()
        began = time.perf_counter()
        serving_times.append(await loop.run_in_executor(pool, peer.train))
        serving_seconds += time.perf_counter() - began
        await pause(of_this_process)
    served = of_this_process.received.value - received_before
    return StepTimes(
        min(idle_times), min(beside_times), min(serving_times), served / serving_seconds
    )


async def pause(neighbour: Neighbour) -> None:
    """Stop the neighbour's requests, and let the last response finish."""
    neighbour.enabled.clear()
    await asyncio.sleep(0.5)


def main() -> None:
    """Measure with two temporary identities."""
    processes: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in (PEER, NEIGHBOUR):
            Identity.make(name).save(Path(folder) / name)
        try:
            times = asyncio.run(measure(Path(folder), processes))
        finally:
            for process in processes:
                process.kill()
    report(
        "serving",
        times.serving / times.idle,
        LIMIT,
        what="a training step of ResNet-18 while its process continuously serves a ResNet-18",
        beside=round(times.beside / times.idle, 3),
        seconds_a_step=round(times.idle, 3),
        models_served_a_second=round(times.models_a_second, 1),
    )


if __name__ == "__main__":
    main()
