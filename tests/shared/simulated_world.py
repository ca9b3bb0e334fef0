"""A federation on a virtual clock: peers crash and restart, the network loses, duplicates and
delays messages.

Nodes, messages and averages are real; only training is replaced by noise. The same seed gives the
same trace.
"""

import asyncio
import hashlib
import random
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dispfl.channels.channel_mask import ChannelMask
from dispfl.core.layout import Layout
from dispfl.core.packed import PackedModel, WeightMask
from dispfl.core.report import Report
from dispfl.core.rng import stream, stream_seed
from dispfl.core.sparsity import prune_and_regrow, prune_rate
from dispfl.core.staleness import MAX_AGE, Mode
from dispfl.methods.base import Neighbourhood, PeerState
from dispfl.methods.dispfl import DisPFL
from dispfl.peer.async_node import AsyncNode
from dispfl.peer.client import Client
from dispfl.peer.deadlines import Deadlines
from dispfl.peer.model_fetch import RoundResponses
from dispfl.peer.node import Node
from dispfl.peer.node_context import NodeContext, PublishedModels
from dispfl.peer.schedule import Schedule, ScheduleSettings
from dispfl.peer.setup.site_config import SiteConfig
from dispfl.peer.setup.spec import federation_spec
from dispfl.peer.setup.spec_versions import SpecVersions
from dispfl.peer.transport.base import JSON, Request, Response
from dispfl.round.context import PeerTask, RunContext, RunData, StepResult
from dispfl.testing.memory_transport import Delivery, MemoryNetwork
from dispfl.testing.virtual_time import run
from dispfl.topology import RandomRegular, peer_names

PEERS, ROUNDS, DEGREE = 16, 20, 4
MIN_DEADLINE = 20.0
LONGEST_STEP = 3.0
"""Seconds."""
TIMEOUT = 12.0
"""Seconds without a response after which a request fails; longer than requests are held."""
LIMIT = 24 * 3600.0
PATIENCE = 1200.0
"""Seconds without a round after which peers that wait for others are stopped."""


def net() -> nn.Module:
    return nn.Linear(6, 5)


LAYOUT = Layout.of(net())
METHOD = DisPFL(density=0.5)


class Pairing(DisPFL):
    """A method whose peers choose two others in place of neighbours; most choose each other."""

    def choices(self, neighbours: int, t: int, T: int) -> int:
        return 2

    def choose(
        self, state: PeerState, neighbourhood: Neighbourhood, *, rng: torch.Generator
    ) -> list[str]:
        [own_name] = set(neighbourhood.roster) - set(neighbourhood.reachable)

        def order(name: str) -> int:
            return stream_seed(0, "pair", *sorted([own_name, name]))

        others = set(neighbourhood.reachable) - set(neighbourhood.neighbours)
        return sorted([*neighbourhood.neighbours, *sorted(others, key=order)[:2]])


@dataclass
class AllMembers:
    """All peers, which have accepted each other, and the first round of those that join later."""

    names: Sequence[str]
    """Sorted."""
    keeps: Sequence[int]
    announced: dict[str, Sequence[int]] = field(default_factory=dict)
    """Of those that announce other counts: the weights that they claim to keep in each layer."""
    joins: dict[str, int] = field(default_factory=dict)
    is_fixed: bool = True
    """Whether nobody has joined or left during the run."""

    def participants(self, t: int) -> list[str]:
        return [name for name in self.names if self.joins.get(name, 0) <= t]


@dataclass
class View:
    """The membership of one of these peers."""

    all: AllMembers
    name: str

    def participants(self, t: int) -> list[str]:
        names = self.all.participants(t)
        return names if self.name in names else sorted([self.name, *names])

    def kept_counts(self, name: str) -> Sequence[int]:
        return self.all.announced.get(name, self.all.keeps)

    def join(self, t: int) -> None:
        self.all.is_fixed &= t == 0
        self.all.joins[self.name] = t

    def records(self) -> list[JSON]:
        return []

    def merge(self, records: JSON) -> None: ...

    def roster(self) -> None: ...

    def lacks_roster(self, version: int, digest: str, administrators: str) -> bool:
        return False

    def merge_roster(self, text: str) -> bool:
        return False


class RecordedModels(PublishedModels):
    """Records the published models by round."""

    def __init__(self, name: str, world: "World") -> None:
        super().__init__()
        self.name, self.world = name, world

    def publish(
        self,
        t: int,
        model: PackedModel,
        receivers: Iterable[str],
        silent: Collection[str],
        chosen: Iterable[str] = (),
        finished: float = 0.0,
    ) -> None:
        self.world.published[self.name, t].append(model)
        super().publish(t, model, receivers, silent, chosen, finished)


@dataclass
class CheckedNode(Node):
    """Checks that no round exceeds twice its deadline, and that a restarted peer is within two
    rounds of the others.

    A peer that is ahead of most others, or in the startup period, waits longer.
    """

    world: "World"
    last_wait: float = -1.0
    """When it last began to wait for the federation, which it may do for any time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        wait = self.waiting.wait

        async def noted(t: int, state: PeerState) -> tuple[int, RoundResponses]:
            self.last_wait = asyncio.get_running_loop().time()
            return await wait(t, state)

        self.waiting.wait = noted  # type: ignore[method-assign]

    async def _round(self, t: int, state: PeerState) -> tuple[int, PeerState]:
        clock, name = asyncio.get_running_loop().time, self.ctx.name
        began, deadline, median_round = (
            clock(),
            self.client.deadlines.deadline,
            self.world.federation_round(name),
        )
        after, state = await super()._round(t, state)
        deadline = max(deadline, self.client.deadlines.startup_until + MIN_DEADLINE - began)
        deadline = max(deadline, self.client.deadlines.patience) if median_round < t else deadline
        has_waited = self.last_wait >= began
        assert has_waited or clock() - began <= 2 * deadline, (name, t)
        if name in self.world.returning and self.world.stores[name].rounds[-1:] == [t]:
            self.world.returning.remove(name)
            assert median_round - t <= 2, (name, t)
        return after, state


@dataclass
class CheckedAsyncNode(AsyncNode):
    """Checks that nobody waits: a step takes as long as its training, after the first look; and
    that a peer skips steps only if more than half of the others have begun the later one."""

    world: "World"

    async def _round(self, t: int, state: PeerState) -> tuple[int, PeerState]:
        clock, name = asyncio.get_running_loop().time, self.ctx.name
        began = clock()
        longest = LONGEST_STEP * self.world.slowness.get(name, 1.0)
        if self.ctx.joining:
            longest += self.client.deadlines.probe_timeout
        after, state = await super()._round(t, state)
        assert after > t
        assert clock() - began <= longest, (name, t)
        return after, state

    def _federations_step(self, t: int) -> int:
        name, begun = self.ctx.name, self.world.begun
        number = super()._federations_step(t)
        if number > t:
            others = [other for other in self.world.names if other != name]
            claims = [begun.get(other, self.world.claims.get(other, -1)) for other in others]
            assert 2 * len([claim for claim in claims if claim >= number]) > len(claims), (name, t)
        begun[name] = max(begun.get(name, -1), number)
        return number


class World:
    """A federation and its network."""

    def __init__(
        self,
        seed: int,
        delivery_model: Any = None,
        peers: int = PEERS,
        rounds: int = ROUNDS,
        method: DisPFL = METHOD,
        model: Callable[[], nn.Module] = net,
        input_shape: Sequence[int] = (6,),
        mode: Mode = "sync",
    ) -> None:
        self.rng = random.Random(seed)
        self.names = peer_names(peers)
        self.context = RunContext(
            settings=SiteConfig(
                seed=seed,
                rounds=rounds,
                method=method,
                topology=RandomRegular(degree=DEGREE),
                schedule=ScheduleSettings(mode=mode),
            ),
            data=RunData(remote_peers=self.names),
            model=model,
            input_shape=input_shape,
        )
        layout, self.weights = self.context.layout, self.context.first_weights
        self.start = {
            name: method.start(self.weights, layout, 0.5, seed=seed, peer=name)
            for name in self.names
        }
        self.members = AllMembers(self.names, self.start["000"].model.mask.kept_per_layer(layout))
        self.network = MemoryNetwork(delivery_model or unreliable, seed=seed, timeout=TIMEOUT)
        self.stores = {name: MemoryStore(self, name) for name in self.names}
        self.published: dict[tuple[str, int], list[PackedModel]] = {
            (name, t): [] for name in self.names for t in range(rounds + 1)
        }
        self.newest: dict[tuple[str, str], int] = {}
        """Without rounds: the round of the newest model that a peer has averaged of another."""
        self.slowness: dict[str, float] = {}
        """By peer: how many times as long as those of others its steps take."""
        self.begun: dict[str, int] = {}
        """Without rounds: the last step that each peer has begun."""
        self.claims: dict[str, int] = {}
        """The steps that liars claim to have begun."""
        self.trace: list[tuple[float, str, str, str]] = []
        self.finished: dict[str, PeerState] = {}
        self.left_behind: set[str] = set()
        """Peers that wait for others which have finished."""
        self.schedules: dict[str, Schedule] = {}
        """Of peers that sleep outside of their hours."""
        self.alone_rounds = 0
        """Consecutive rounds that peers may train alone."""
        self.returning: set[str] = set()
        """Restarted peers that have not finished a round since; cleared by a partition."""

    def node(self, name: str) -> Node:
        def log(event: str, facts: Any) -> None:
            self.trace.append((asyncio.get_running_loop().time(), name, event, str(facts)))

        spec = federation_spec("test", self.context, self.context.layout, self.weights, 0.5)
        ctx = NodeContext(
            name=name,
            run=self.context,
            codec=self.context.codec,
            versions=SpecVersions.single(self.context, spec),
            membership=View(self.members, name),
            log=log,
            published=RecordedModels(name, self),
            alone_rounds=self.alone_rounds,
            schedule=self.schedules.get(name, Schedule()),
        )
        rng = random.Random(self.rng.getrandbits(64))
        client = Client(
            ctx, self.network.join(name), Deadlines(min=MIN_DEADLINE, startup=120.0), rng
        )
        checked = CheckedAsyncNode if self.context.settings.is_async else CheckedNode
        return checked(ctx, client, FakeTraining(self, rng), self.stores[name], self)

    async def live(self, name: str) -> None:
        """Run a peer from its last checkpoint."""
        for pair in [pair for pair in self.newest if pair[0] == name]:
            del self.newest[pair]  # a restarted process does not know what it had
        t, state = self.stores[name].last or (0, self.start[name])
        node = self.node(name)
        try:
            self.finished[name] = await node.run(t, state)
        finally:
            await node.client.transport.close()

    def is_slow(self, peer: str, sender: str) -> bool:
        """Whether a peer has found another one to be slow."""
        return any(
            (name, event) == (peer, "slow") and f"'peer': '{sender}'" in facts
            for _, name, event, facts in self.trace
        )

    def federation_round(self, without: str) -> float:
        """The median number of finished rounds."""
        return statistics.median(
            (store.last or (0, None))[0] for name, store in self.stores.items() if name != without
        )


@dataclass
class MemoryStore:
    """A store in memory that checks what is saved."""

    world: World
    name: str
    last: tuple[int, PeerState] | None = None
    rounds: list[int] = field(default_factory=list)
    received: dict[int, list[str]] = field(default_factory=dict)
    missed: dict[int, list[str]] = field(default_factory=dict)

    async def save(
        self, t: int, step: StepResult, received: Sequence[str], missed: Sequence[str]
    ) -> None:
        state, context, layout = step.next_state, self.world.context, self.world.context.layout
        is_async = context.settings.is_async
        degree = context.settings.topology.connections(len(self.world.names))
        assert is_async or len(received) <= degree
        if self.world.members.is_fixed and not context.choices(t) and not is_async:
            senders, _ = context.settings.topology.row(
                context.settings.seed, t, self.world.members.participants(t), self.name
            )
            if missed == senders and received:  # others stand in for the neighbours
                assert not set(received) & set(senders)
            elif not set(senders) <= set(missed):
                assert sorted([*received, *missed]) == senders
        assert torch.isfinite(state.model.values).all()
        keeps = list(self.world.members.keeps)
        assert state.model.mask.kept_per_layer(layout) == keeps
        assert state.next_mask.kept_per_layer(layout) == keeps
        assert t not in self.received or self.rounds[-1] < t  # a round is saved once
        self.rounds.append(t)
        self.received[t], self.missed[t] = list(received), list(missed)
        self.last = (t + 1, state)


@dataclass
class FakeTraining:
    """Mixes and evolves as Dis-PFL does, with noise instead of training, and checks the received
    models."""

    world: World
    rng: random.Random

    async def step(
        self, task: PeerTask, state: PeerState, received: Mapping[str, PackedModel]
    ) -> StepResult:
        self._check(task, state, received)
        slowness = self.world.slowness.get(task.peer, 1.0)
        await asyncio.sleep(slowness * self.rng.uniform(0.5, LONGEST_STEP))
        context, m_k = self.world.context, state.next_mask
        models = {**received, task.peer: state.model}
        noise = stream(context.settings.seed, "pretend", task.peer, task.t)
        average = m_k.average(
            [models[name] for name in sorted(models)], lambda: context.first_weights
        )
        if isinstance(m_k, ChannelMask):
            w = average
            return StepResult(
                Report(), state=PeerState(PackedModel.under(trained(w, noise), m_k), m_k)
            )
        mask = m_k.unpack()
        w = torch.where(mask, trained(average, noise), 0.0)
        growth = torch.rand(w.shape, generator=noise)
        next_mask = prune_and_regrow(
            w, mask, growth, prune_rate(task.t, context.settings.rounds, 0.5), context.layout
        )
        return StepResult(
            Report(), state=PeerState(PackedModel.pack(w, mask), WeightMask.pack(next_mask))
        )

    def _check(self, task: PeerTask, state: PeerState, received: Mapping[str, PackedModel]) -> None:
        """Check that each model is what its sender published in this round, under our mask, and was
        trained."""
        if self.world.context.settings.is_async:
            self._check_newest(task.peer, received)
            return
        for sender, model in received.items():
            candidates = self.world.published[sender, task.t]
            masks = [state.next_mask]
            if self.world.is_slow(task.peer, sender):  # its model may be of an earlier round
                masks.append(model.mask)
                for t in range(max(0, task.t - MAX_AGE), task.t):
                    candidates = [*candidates, *self.world.published[sender, t]]
            assert any(same(model, each.restrict(mask)) for each in candidates for mask in masks), (
                task,
                sender,
            )
            assert model.values.any(), (task, sender)

    def _check_newest(self, peer: str, received: Mapping[str, PackedModel]) -> None:
        """Check that each model is a whole one that its sender has published, newer than before."""
        for sender, model in received.items():
            rounds = []
            for t in range(self.world.context.settings.rounds + 1):
                if any(same(model, each) for each in self.world.published[sender, t]):
                    rounds.append(t)
            assert rounds, (peer, sender)
            assert model.values.any(), (peer, sender)
            before = self.world.newest.get((peer, sender), -1)
            assert max(rounds) > before, (peer, sender)
            self.world.newest[peer, sender] = max(rounds)


def trained(weights: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
    """Change the weights a little, and keep their norm."""
    change = torch.randn(weights.shape, generator=noise)
    scale = float(torch.linalg.vector_norm(weights) / torch.linalg.vector_norm(change))
    return weights + 0.05 * scale * change


def same(one: PackedModel, other: PackedModel) -> bool:
    return one.values.equal(other.values) and one.mask.bits.equal(other.mask.bits)


def reliable(delivery: Delivery, rng: random.Random) -> Sequence[float]:
    """Short delays, no losses."""
    return [rng.uniform(0.01, 0.2)]


def unreliable(delivery: Delivery, rng: random.Random) -> Sequence[float]:
    """Lose one message in twenty, duplicate one in twenty, and delay a few enough to reorder
    them."""
    chance = rng.random()
    if chance < 0.05:
        return []
    delay = rng.uniform(3.0, 8.0) if chance < 0.08 else rng.uniform(0.01, 0.5)
    return [delay, rng.uniform(0.01, 4.0)] if chance > 0.95 else [delay]


async def inject_faults(world: World, running: dict[str, "asyncio.Task[None]"]) -> None:
    """Crash and restart peers and partition the network, for the first minutes."""
    for _ in range(6):
        await asyncio.sleep(world.rng.uniform(2.0, 15.0))
        if world.rng.random() < 0.3:
            half = set(world.rng.sample(world.names, len(world.names) // 2))
            world.network.partition(half, set(world.names) - half)
            world.returning.clear()
            await asyncio.sleep(world.rng.uniform(5.0, 60.0))
            world.network.heal()
            continue
        target = world.rng.choice(world.names)
        if running[target].done():
            continue
        running[target].cancel()
        await asyncio.wait([running[target]])
        await asyncio.sleep(world.rng.uniform(0.0, 60.0))
        running[target] = asyncio.create_task(world.live(target))
        world.returning.add(target)


async def whole_run(world: World, faulty: bool = True) -> None:
    running = {name: asyncio.create_task(world.live(name)) for name in world.names}
    if faulty:
        await inject_faults(world, running)
    while not all(task.done() for task in running.values()):
        rounds = sum(len(store.rounds) for store in world.stores.values())
        await asyncio.wait(running.values(), timeout=PATIENCE)
        if sum(len(store.rounds) for store in world.stores.values()) == rounds:
            break  # those that were down when the others finished wait for them
    for name, task in running.items():
        if not task.done():
            world.left_behind.add(name)
            task.cancel()
    await asyncio.wait(running.values())
    for task in running.values():
        if not task.cancelled():
            task.result()


def simulate(seed: int, faulty: bool = True, **more: Any) -> World:
    world = World(seed, **more)
    run(whole_run(world, faulty), LIMIT)
    return world


def check_choices(seed: int) -> str:
    """Check a federation whose peers choose each other, with faults."""
    return check(seed, method=Pairing(density=0.5))


def check_async(seed: int) -> str:
    """Check a federation that never waits, with faults: everybody takes the last step."""
    world = simulate(seed, mode="async")
    assert set(world.finished) == set(world.names), seed
    received = 0
    for store in world.stores.values():
        assert store.rounds == sorted(set(store.rounds)), seed
        assert store.rounds[-1] == ROUNDS - 1, seed
        received += sum(map(len, store.received.values()))
    assert received > PEERS * ROUNDS, seed
    return hashlib.blake2b(repr(world.trace).encode()).hexdigest()


def check(seed: int, **more: Any) -> str:
    """Run a federation with faults and all checks; return a digest of its trace."""
    world = simulate(seed, **more)
    assert set(world.finished) | world.left_behind == set(world.names), seed
    assert len(world.left_behind) <= 2, seed
    for name, store in world.stores.items():
        is_last = store.last is not None and store.last[0] == ROUNDS
        assert is_last or name in world.left_behind, (seed, name)
    assert len(world.trace) > PEERS * ROUNDS / 2, seed
    return hashlib.blake2b(repr(world.trace).encode()).hexdigest()


def events_about(world: World, logger: str, peer: str) -> list[str]:
    """The events about a peer in another peer's log."""
    return [
        event
        for _, name, event, facts in world.trace
        if name == logger and f"'peer': '{peer}'" in facts
    ]


class Liar:
    """A member that claims a round and has no models."""

    def __init__(self, world: World, name: str, claim: int) -> None:
        self.transport = world.network.join(name)
        self.claim = claim

    async def answer(self, sender: str, request: Request) -> Response:
        if request.kind == "sync":
            return Response({"spec": {}, "current_round": self.claim})
        if "newer_than" in request.header:
            return Response({"status": "wait", "current_round": self.claim})
        return Response({"status": "stale", "current_round": self.claim})
