"""A federation on a virtual clock: peers crash and come back, the network loses, doubles, delays and parts.

The nodes, their messages and their average are the real ones; only learning is a stand-in, because here it matters who
hears whom, and when. The same seed gives the same trace.
"""

import asyncio
import functools
import hashlib
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dispfl.core.evolve import prune_and_regrow, prune_rate
from dispfl.core.layout import Layout
from dispfl.core.masks import kept_per_layer
from dispfl.core.packed import PackedMask, PackedModel
from dispfl.core.rng import stream
from dispfl.core.train import Report, Task, Train
from dispfl.methods.base import PeerState
from dispfl.methods.dispfl import DisPFL
from dispfl.peer.answers import HOLD
from dispfl.peer.asks import Asks
from dispfl.peer.context import Context
from dispfl.peer.memory import MemoryNetwork, Passage
from dispfl.peer.node import Node
from dispfl.peer.pace import Pace
from dispfl.peer.shelf import Shelf
from dispfl.peer.terms import terms_of
from dispfl.peer.transport import JSON
from dispfl.peer.virtual_time import run
from dispfl.roster import roster_names
from dispfl.topology import RandomRegular
from dispfl.work import Setting, Step, Work

PEERS, ROUNDS, DEGREE = 16, 20, 4
FLOOR = 20.0
STALL = HOLD + 2.0
"""Seconds without an answer after which an ask is given up; who holds it has answered by then."""
LIMIT = 24 * 3600.0


def net() -> nn.Module:
    return nn.Linear(6, 5)


LAYOUT = Layout.of(net())
METHOD = DisPFL(density=0.5)


@dataclass
class Everyone:
    """The members, who all know each other."""

    names: Sequence[str]
    keeps: Sequence[int]
    joins: dict[str, int] = field(default_factory=dict)
    newcomers: list[str] = field(default_factory=list)

    def roster(self, t: int) -> list[str]:
        return sorted(name for name in self.names if self.joins.get(name, 0) <= t)

    def kept(self, name: str) -> Sequence[int]:
        return self.keeps

    def join(self, t: int) -> None:
        for name in self.newcomers:
            self.joins[name] = t

    def records(self) -> list[JSON]:
        return []

    def merge(self, records: JSON) -> None: ...


class Remembered(RandomRegular):
    """All peers derive the same graphs, so here they are derived once."""

    def heard(self, seed: int, t: int, roster: Sequence[str]) -> dict[str, list[str]]:
        return _graph(self.degree, seed, t, tuple(roster))


@functools.lru_cache(maxsize=4 * ROUNDS)
def _graph(degree: int, seed: int, t: int, roster: tuple[str, ...]) -> dict[str, list[str]]:
    return RandomRegular(degree=degree).heard(seed, t, roster)


class Recording(Shelf):
    """Remembers what was published as which round."""

    def __init__(self, name: str, world: "World") -> None:
        super().__init__()
        self.name, self.world = name, world

    def publish(self, t: int, model: PackedModel, listeners: Iterable[str], gone: Callable[[str], bool]) -> None:
        self.world.published[self.name, t].append(model.unpack())
        super().publish(t, model, listeners, gone)


@dataclass
class Timed(Node):
    """Sees to it that no round is longer than twice its deadline, and that who returns does so where the others are."""

    world: "World"

    async def _round(self, t: int, state: PeerState) -> tuple[int, PeerState]:
        clock, name = asyncio.get_running_loop().time, self.here.name
        began, deadline, others_are_at = clock(), self.asks.pace.deadline, self.world.federation_round(name)
        after, state = await super()._round(t, state)
        deadline = max(deadline, (self.asks.patient_until or 0.0) - began)
        assert clock() - began <= 2 * deadline, (name, t)
        if name in self.world.returning and self.world.stores[name].rounds[-1:] == [t]:
            self.world.returning.remove(name)
            assert others_are_at - t <= 2, (name, t)
        return after, state


class World:
    """A federation, its network, and what happens to it."""

    def __init__(self, seed: int, fate: Any = None, peers: int = PEERS, rounds: int = ROUNDS) -> None:
        self.rng = random.Random(seed)
        self.names = roster_names(peers)
        torch.manual_seed(0)
        self.weights = torch.cat([p.detach().flatten() for p in net().parameters()])
        self.setting = Setting(
            model=net,
            peers={},
            method=METHOD,
            topology=Remembered(degree=min(DEGREE, peers - 1)),
            train=Train(),
            task=Task(),
            seed=seed,
            rounds=rounds,
            elsewhere=self.names,
        )
        self.start = {name: METHOD.start(self.weights, LAYOUT, 0.5, seed=seed, peer=name) for name in self.names}
        self.members = Everyone(self.names, kept_per_layer(self.start["000"].model.mask.unpack(), LAYOUT))
        self.network = MemoryNetwork(fate or bad_weather, seed=seed, stall=STALL)
        self.stores = {name: Memory(self, name) for name in self.names}
        self.published: dict[tuple[str, int], list[tuple[torch.Tensor, torch.Tensor]]] = {
            (name, t): [] for name in self.names for t in range(rounds)
        }
        self.trace: list[tuple[float, str, str, str]] = []
        self.finished: dict[str, PeerState] = {}
        self.returning: set[str] = set()
        """Who was started again and has not finished a round since, in a network that was whole meanwhile."""

    def node(self, name: str) -> Node:
        def tell(event: str, facts: Any) -> None:
            self.trace.append((asyncio.get_running_loop().time(), name, event, str(facts)))

        here = Context(
            name=name,
            setting=self.setting,
            codec=self.setting.codec(LAYOUT),
            terms=terms_of("test", self.setting, LAYOUT, self.weights, 0.5),
            members=self.members,
            tell=tell,
            shelf=Recording(name, self),
        )
        rng = random.Random(self.rng.getrandbits(64))
        asks = Asks(here, self.network.join(name), Pace(floor=FLOOR, first=120.0), rng)
        return Timed(here, asks, Pretender(self, rng), self.stores[name], self)

    async def live(self, name: str) -> None:
        """A peer's process, from its last checkpoint on."""
        t, state = self.stores[name].last or (0, self.start[name])
        node = self.node(name)
        try:
            self.finished[name] = await node.run(t, state)
        finally:
            await node.asks.transport.close()

    def federation_round(self, without: str) -> float:
        """How many rounds most have finished."""
        return statistics.median((store.last or (0, None))[0] for name, store in self.stores.items() if name != without)


@dataclass
class Memory:
    """A peer's disk, which sees to it that what is written there can be right."""

    world: World
    name: str
    last: tuple[int, PeerState] | None = None
    rounds: list[int] = field(default_factory=list)
    heard: dict[int, list[str]] = field(default_factory=dict)
    missed: dict[int, list[str]] = field(default_factory=dict)

    def save(self, t: int, step: Step, heard: Sequence[str], missed: Sequence[str]) -> None:
        state = step.state
        graph = self.world.setting.topology.heard(self.world.setting.seed, t, self.world.members.roster(t))
        assert sorted([*heard, *missed]) == graph[self.name]
        assert torch.isfinite(state.model.values).all()
        keeps = list(self.world.members.keeps)
        assert kept_per_layer(state.model.mask.unpack(), LAYOUT) == keeps
        assert kept_per_layer(state.next_mask.unpack(), LAYOUT) == keeps
        assert t not in self.heard or self.rounds[-1] < t  # a round is written down once
        self.rounds.append(t)
        self.heard[t], self.missed[t] = list(heard), list(missed)
        self.last = (t + 1, state)


@dataclass
class Pretender:
    """Learns nothing, but takes its time, mixes and evolves as Dis-PFL does, and checks what it was given."""

    world: World
    rng: random.Random

    async def step(self, work: Work) -> Step:
        self._check(work)
        await asyncio.sleep(self.rng.uniform(0.5, 3.0))
        m_k = work.state.next_mask.unpack()
        w = METHOD.mix({**work.heard, work.peer: work.state.model}, m_k)
        noise = stream(self.world.setting.seed, "pretend", work.peer, work.t)
        w = torch.where(m_k, 0.9 * w + 0.01 * torch.randn(w.shape, generator=noise), 0.0)
        growth = torch.rand(w.shape, generator=noise)
        next_mask = prune_and_regrow(w, m_k, growth, prune_rate(work.t, self.world.setting.rounds, 0.5), LAYOUT)
        return Step(PeerState(PackedModel.pack(w, m_k), PackedMask.pack(next_mask)), Report())

    def _check(self, work: Work) -> None:
        """What was heard is what its sender published as this very round, under our mask."""
        asked = work.state.next_mask.unpack()
        for sender, model in work.heard.items():
            candidates = self.world.published[sender, work.t]
            assert any(same(model, published, asked) for published in candidates), (work.peer, sender, work.t)


def same(heard: PackedModel, published: tuple[torch.Tensor, torch.Tensor], asked: torch.Tensor) -> bool:
    weights, mask = published
    restricted = PackedModel.pack(weights, mask & asked)
    return heard.values.equal(restricted.values) and heard.mask.bits.equal(restricted.mask.bits)


def good_weather(passage: Passage, rng: random.Random) -> Sequence[float]:
    """Delays only."""
    return [rng.uniform(0.01, 0.2)]


def bad_weather(passage: Passage, rng: random.Random) -> Sequence[float]:
    """One message in twenty is lost, one in twenty comes twice, a few are late enough to be overtaken by others."""
    chance = rng.random()
    if chance < 0.05:
        return []
    delay = rng.uniform(3.0, 8.0) if chance < 0.08 else rng.uniform(0.01, 0.5)
    return [delay, rng.uniform(0.01, 4.0)] if chance > 0.95 else [delay]


async def trouble(world: World, living: dict[str, "asyncio.Task[None]"]) -> None:
    """Crashes, restarts and partitions, for the first minutes."""
    for _ in range(6):
        await asyncio.sleep(world.rng.uniform(2.0, 15.0))
        if world.rng.random() < 0.3:
            half = set(world.rng.sample(world.names, len(world.names) // 2))
            world.network.partition(half, set(world.names) - half)
            world.returning.clear()
            await asyncio.sleep(world.rng.uniform(5.0, 60.0))
            world.network.heal()
            continue
        victim = world.rng.choice(world.names)
        if living[victim].done():
            continue
        living[victim].cancel()
        await asyncio.wait([living[victim]])
        await asyncio.sleep(world.rng.uniform(0.0, 60.0))
        living[victim] = asyncio.create_task(world.live(victim))
        world.returning.add(victim)


async def whole_run(world: World, troubled: bool = True) -> None:
    living = {name: asyncio.create_task(world.live(name)) for name in world.names}
    if troubled:
        await trouble(world, living)
    await asyncio.gather(*living.values())


def simulate(seed: int, troubled: bool = True, **more: Any) -> World:
    world = World(seed, **more)
    run(whole_run(world, troubled), LIMIT)
    return world


def check(seed: int) -> str:
    """A whole run in bad weather, in which everything holds that `Memory`, `Timed` and `Pretender` watch over.

    Returns a digest of its trace.
    """
    world = simulate(seed)
    assert set(world.finished) == set(world.names), seed
    assert all(store.last is not None and store.last[0] == ROUNDS for store in world.stores.values()), seed
    assert len(world.trace) > PEERS * ROUNDS / 2, seed
    return hashlib.blake2b(repr(world.trace).encode()).hexdigest()


def told_of(world: World, teller: str, peer: str) -> list[str]:
    """What one's log says of another."""
    return [event for _, name, event, facts in world.trace if name == teller and f"'peer': '{peer}'" in facts]
