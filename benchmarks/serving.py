"""A training step of a ResNet-18 while its process serves models to a neighbour without a break, against one in peace.

The peer is as a real one: an event loop that answers, a thread for messages, a thread that trains. The neighbour is a
process of its own, which asks for the peer's ResNet-18 at density 0.5 with a mask, and asks again as soon as it has it.

`beside` is the same while another process serves the neighbour: the price of a busy machine, on which encoding, TLS and
the neighbour itself take their share of the cores and of the memory's bandwidth. What the ratio has above it is the
price of sharing a process: of the interpreter's lock and of the event loop. The limit was set after a first look on two
cores (ratio 1.07, beside 1.09): at 1.25 a step has lost a fifth of its speed, with a neighbour that never pauses, while
in a round each neighbour asks once.
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
from dispfl.core.live import LiveModel
from dispfl.core.train import Task, Trainer
from dispfl.data.batches import PictureTransform, ResidentSamples
from dispfl.models.registry import Model
from dispfl.peer.answers import Answers
from dispfl.peer.context import Context
from dispfl.peer.https import HttpsTransport
from dispfl.peer.identity import Identity, client_context, server_context
from dispfl.peer.learning import Aside
from dispfl.peer.terms import digest_of
from dispfl.peer.transport import JSON, Ask
from dispfl.round import start
from dispfl.wire.codec import Codec
from dispfl.work import PeerData, Setting
from measure import report

LIMIT = 1.25
SAMPLES, BATCH = 64, 32
REPEATS = 4
LOCAL = "127.0.0.1"
DENSITY = 0.5
LARGEST = 100_000_000


@dataclass(frozen=True)
class Everyone:
    """A federation of two, whose masks keep what they keep."""

    counts: Sequence[int]

    def roster(self, t: int) -> list[str]:
        return ["000", "001"]

    def kept(self, name: str) -> Sequence[int]:
        return self.counts

    def join(self, t: int) -> None: ...

    def records(self) -> list[JSON]:
        return []

    def merge(self, records: JSON) -> object: ...


def transport(folder: Path, name: str, port: int = 0) -> HttpsTransport:
    """The end of one of the two."""
    own, other = Identity.load(folder / name), Identity.load(folder / ("001" if name == "000" else "000"))
    return HttpsTransport(
        name,
        (LOCAL, 0),
        client=client_context(own, [other.certificate]),
        server=server_context(own, [other.certificate]),
        who=lambda leaf, issuers: other.name,
        address=lambda peer: (LOCAL, port),
        max_ask=lambda what: LARGEST,
        max_reply=lambda what: LARGEST,
    )


def the_setting() -> Setting:
    """Random pictures; what they show does not matter here."""
    rng = torch.Generator().manual_seed(0)
    pictures = torch.randint(256, (SAMPLES, 32, 32, 3), dtype=torch.uint8, generator=rng)
    transform = PictureTransform((0.5,) * 3, (0.25,) * 3, crop=True, flip=True)
    data = ResidentSamples(pictures, torch.randint(10, (SAMPLES,), generator=rng), None, transform)
    peers = {name: PeerData(data, data) for name in ("000", "001")}
    train = Train(epochs=1, batch=BATCH)
    method = DisPFL(density=DENSITY)
    return Setting(
        lambda: Model(name="resnet18").build(3, 10, 32), peers, method, Full(), train, Task(), seed=0, rounds=1
    )


class Peer:
    """A peer that answers whoever asks for its model, and may train meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.setting = the_setting()
        self.live = LiveModel(self.setting.module())
        states = start(self.setting)
        self.state, mask = states["000"], states["001"].next_mask
        layout, flags = self.live.layout, mask.flags()
        codec = Codec(layout, self.setting.method.always_dense(layout, {DENSITY}), self.setting.wire)
        members = Everyone([int(flags[where].sum()) for where in layout.slices])
        self.here = Context("000", self.setting, codec, {}, members, Aside())
        self.here.door.REPEATS = sys.maxsize  # here the same model is asked for again and again
        self.here.shelf.publish(0, self.state.model, ["001"], lambda name: False)
        self.question = codec.encode_request(mask)
        self.transport = transport(folder, "000")

    def steps(self) -> float:
        """Train a little, on this thread; seconds a step."""
        torch.set_num_threads(1)
        setting, data = self.setting, self.setting.peers["000"]
        weights, mask = self.state.model.unpack()
        buffers = self.state.buffers
        trainer = Trainer(self.live, data.train, data.test, setting.train, Task(), 0, "000", 0, 1, buffers=buffers)
        began = time.perf_counter()
        trainer.learn(weights, mask)
        return (time.perf_counter() - began) / (SAMPLES // BATCH)


@dataclass
class Asker:
    """A neighbour in a process of its own, which asks while it may, and throws away what it gets."""

    folder: Path
    port: Any
    may: Any
    over: Any
    got: Any

    def run(self) -> None:
        """The process."""
        asyncio.run(self._ask())

    async def _ask(self) -> None:
        question, end = Peer(self.folder).question, transport(self.folder, "001", self.port.value)
        while not self.over.is_set():
            if self.may.wait(0.01):
                head: dict[str, JSON] = {"terms": digest_of({}), "round": 0, "nonce": str(self.got.value)}
                reply = await end.ask("000", Ask("model", head, question))
                assert reply.head["status"] == "model"
                self.got.value += 1
        await end.close()


def serve_only(folder: Path, port: Any, over: Any) -> None:
    """A process that serves, and does nothing else."""

    async def serving() -> None:
        peer = Peer(folder)
        await peer.transport.serve(Answers(peer.here))
        port.value = peer.transport.port
        while not over.is_set():
            await asyncio.sleep(0.05)
        await peer.transport.close()

    asyncio.run(serving())


async def measure(folder: Path, processes: list[Any]) -> None:
    """Training steps in peace, while another process serves, and while this one does; in turn."""
    make = multiprocessing.get_context("spawn")
    over, peer = make.Event(), Peer(folder)
    await peer.transport.serve(Answers(peer.here))
    here, beside = (Asker(folder, make.Value("i"), make.Event(), over, make.Value("i")) for _ in range(2))
    here.port.value = peer.transport.port
    processes += [make.Process(target=serve_only, args=(folder, beside.port, over))]
    processes[0].start()
    while not beside.port.value:
        await asyncio.sleep(0.05)
    processes += [make.Process(target=asker.run) for asker in (here, beside)]
    for process in processes[1:]:
        process.start()
    for asker in (here, beside):
        asker.may.set()
        while not asker.got.value:
            await asyncio.sleep(0.05)
        asker.may.clear()
    times: dict[str, list[float]] = {"peace": [], "beside": [], "here": []}
    seconds, before = 0.0, here.got.value
    pool = ThreadPoolExecutor(1)
    for _ in range(REPEATS):
        for name, asker in (("peace", None), ("beside", beside), ("here", here)):
            if asker:
                asker.may.set()
            began = time.perf_counter()
            times[name].append(await asyncio.get_running_loop().run_in_executor(pool, peer.steps))
            seconds += (time.perf_counter() - began) if asker is here else 0.0
            if asker:
                asker.may.clear()
            await asyncio.sleep(0.5)  # let the last answer end
    over.set()
    rate = (here.got.value - before) / seconds
    for process in processes:
        while process.is_alive():
            await asyncio.sleep(0.05)
    await peer.transport.close()
    peace, with_other, own = (min(times[name]) for name in ("peace", "beside", "here"))
    report(
        "serving",
        own / peace,
        LIMIT,
        what="a training step of ResNet-18 while its process serves a ResNet-18 without a break",
        beside=round(with_other / peace, 3),
        seconds_a_step=round(peace, 3),
        models_served_a_second=round(rate, 1),
    )


def main() -> None:
    """Measure with two identities, and leave nothing behind."""
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
