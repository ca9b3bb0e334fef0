"""A federation of real site folders on a virtual clock, whose operators and whose one hostile
member do as they like.

Keys, member lists, signed records, specs and checkpoints are real; the network is in memory and
training is noise, on weights with the norms of real networks. Operators accept, revoke, rotate,
join late, restart and leave, disks fail and clocks jump. One member lies about its round, its
records, its models and its version. The same seed gives the same run.

What must hold: no node ends by itself, no honest node is cut off, no weights are averaged in that
were not trained, no site finishes alone without saying so, no
two sites wait for each other, nothing that was saved is lost, no key
that was rotated away returns, and no log fills the disk.
"""

import asyncio
import contextlib
import dataclasses
import errno
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from simulated_world import METHOD, TIMEOUT, trained, unreliable
from torch import nn
from yarl import URL

from dispfl.core.averaging import average_of
from dispfl.core.packed import PackedModel, WeightMask
from dispfl.core.report import Report
from dispfl.core.rng import stream
from dispfl.core.sparsity import prune_and_regrow, prune_rate
from dispfl.core.task import Task
from dispfl.costs.flops import ForwardCost
from dispfl.errors import DispflError, RunError
from dispfl.experiment import RunSettings
from dispfl.methods.base import PeerState
from dispfl.peer.client import Client
from dispfl.peer.deadlines import Deadlines
from dispfl.peer.membership.address import Address
from dispfl.peer.membership.identity import der
from dispfl.peer.membership.records import MemberRecord
from dispfl.peer.membership.sync import SiteMembership
from dispfl.peer.node import Node
from dispfl.peer.node_context import NodeContext
from dispfl.peer.setup.spec import federation_spec
from dispfl.peer.setup.spec_versions import SpecVersions
from dispfl.peer.site import Site, SiteInfo
from dispfl.peer.state.store import PeerStore, SavingThread, isolation_problem
from dispfl.peer.transport.base import JSON, Handler, Refused, Request, Response, Unreachable
from dispfl.round.context import PeerTask, RunContext, RunData, StepResult
from dispfl.testing.memory_transport import MemoryNetwork, MemoryTransport
from dispfl.testing.virtual_time import VirtualTimeLoop, run
from dispfl.topology import RandomRegular
from dispfl.wire.refusals import Refusal

SITES, ROUNDS, LIMIT = 5, 10, 6 * 3600.0
HOSTILE = "mallory"
NORMS = (1.4, 12.7, 55.0, 75.0)
"""Norms of first weights: of a tiny network, the mlp, VGG-11 and ResNet-18."""
STARTUP = 60.0
SETTLED = 10.0
"""Seconds after which two sites that can reach each other should receive from each other."""
PATIENCE = 1200.0
"""Seconds without a round after which sites that wait are stopped."""
MAX_LOG_CHARS = 100_000
"""Characters that a site may log about one member in a run."""


def network_of_norm(norm: float) -> Callable[[], nn.Module]:
    """Return a function that makes a small network whose weights have the norm of a large one."""

    def make() -> nn.Module:
        net = nn.Linear(6, 5)
        weights = torch.cat([parameter.flatten() for parameter in net.parameters()])
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(norm / torch.linalg.vector_norm(weights))
        return net

    return make


def hostile_address(rng: random.Random) -> Address:
    """An address that a member may sign, if it does not use the functions that check addresses."""
    zones = ["\n", "\x1b[2J", " ", "a" * 300, "%25", "eth0/../../", "é", "eth0"]
    hosts = [
        f"fe80::1%{rng.choice(zones)}",
        "a" * 64 + ".example",
        "xn--a.example",
        "127.0.0.1",
        "169.254.169.254",
    ]
    return Address(rng.choice(hosts), rng.choice([1, 80, 7600, 65535]))


class SiteTransport(MemoryTransport):
    """Looks addresses up, and authenticates both sides by their certificates, as the HTTPS
    transport does."""

    def __init__(self, world: "SiteWorld", site: Site, membership: SiteMembership) -> None:
        super().__init__(world.network, site.name)
        self.world, self.site, self.membership = world, site, membership

    async def request(self, peer: str, request: Request) -> Response:
        address = self.membership.address(peer)
        assert address is not None
        host, port = address
        URL.build(scheme="https", host=host, port=port, path=f"/v1/{request.kind}")
        if (other := self.world.sites.get(peer)) is None or other.info.address != (host, port):
            raise Unreachable(peer, f"cannot be reached at {host}:{port}")
        if self.membership.identify(*certificates(other)) != peer:
            raise Refused(
                Refusal.WRONG_CERTIFICATE, f"{peer}'s certificate is not the accepted one."
            )
        return await super().request(peer, request)

    async def serve(self, handler: Handler) -> None:
        async def authenticated(sender: str, request: Request) -> Response:
            if self.membership.identify(*certificates(self.world.sites[sender])) != sender:
                raise Refused(
                    Refusal.NOT_A_MEMBER, f"{self.name} does not accept this certificate."
                )
            return await handler(sender, request)

        await super().serve(authenticated)


def certificates(site: Site) -> tuple[bytes, list[bytes]]:
    """The certificate that a running node presents, and the earlier ones."""
    leaf, *issuers = (der(certificate) for certificate in site.identity.chain)
    return leaf, issuers


@dataclass
class NoisyTraining:
    """Mixes and evolves as Dis-PFL does, with noise instead of training, and checks the received
    models."""

    world: "SiteWorld"
    rng: random.Random

    async def step(
        self, task: PeerTask, state: PeerState, received: Mapping[str, PackedModel]
    ) -> StepResult:
        for sender, model in received.items():
            assert model.values.any() or not len(model.values), (
                f"{task.peer} averages zeros of {sender}"
            )
        await asyncio.sleep(self.rng.uniform(0.5, 3.0))
        context, mask = self.world.context, state.next_mask.unpack()
        assert state.model.values.any(), f"{task.peer} trains weights that are all zero"
        noise = stream(context.settings.seed, "pretend", task.peer, task.t)
        models = {**received, task.peer: state.model}
        average = average_of((models[name] for name in sorted(models)), mask)
        w = torch.where(mask, trained(average, noise), 0.0)
        rate = prune_rate(task.t, context.settings.rounds, 0.5)
        next_mask = prune_and_regrow(
            w, mask, torch.rand(w.shape, generator=noise), rate, context.layout
        )
        return StepResult(
            Report(), state=PeerState(PackedModel.pack(w, mask), WeightMask.pack(next_mask))
        )


class WatchedSaving(SavingThread):
    """Saves a site's rounds, and tells the world about them."""

    world: "SiteWorld"

    async def save(
        self, t: int, step: StepResult, received: Sequence[str], missed: Sequence[str]
    ) -> None:
        await super().save(t, step, received, missed)
        now = asyncio.get_running_loop().time()
        self.world.rounds.append((now, self.store.name, set(received), set(missed)))


class SiteWorld:
    """The sites, their operators, the network and the hostile member."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng, self.folder = random.Random(seed), folder
        self.norm = self.rng.choice(NORMS)
        self.names = [f"s{number}" for number in range(self.rng.randint(2, SITES))]
        self.context = RunContext(
            settings=RunSettings(
                seed=seed,
                rounds=ROUNDS,
                method=METHOD,
                topology=RandomRegular(degree=self.rng.choice([1, 2, 10])),
            ),
            data=RunData(remote_peers=self.names),
            model=network_of_norm(self.norm),
            input_shape=(6,),
        )
        self.spec = federation_spec(
            "test", self.context, self.context.layout, self.context.first_weights, 0.5
        )
        self.network = MemoryNetwork(unreliable, seed=seed, timeout=TIMEOUT)
        self.sites: dict[str, Site] = {}
        self.running: dict[str, asyncio.Task[None]] = {}
        self.chars: dict[tuple[str, str], int] = {}
        """Characters logged, by site and by the member they are about."""
        self.trace: list[tuple[float, str, str, str]] = []
        self.started: dict[str, float] = {}
        self.reached: dict[str, int] = {}
        """Rounds that sites have finished, or joined."""
        self.saved: dict[str, int] = {}
        """Rounds that every site has saved."""
        self.clock_offset = 0.0
        self.lives: dict[str, list[tuple[float, float]]] = {}
        """When each site ran."""
        self.rounds: list[tuple[float, str, set[str], set[str]]] = []
        """When rounds ended, of which site, who was received and who was missed."""
        self.left: set[str] = set()
        """Sites whose operators have stopped them for good."""
        self.rotated: set[str] = set()
        self.cut: set[frozenset[str]] = set()
        """Pairs of which one has revoked the other at some time."""
        self.alone: set[str] = set()
        """Sites whose operator has revoked all members at some time, so that they went ahead
        without anybody."""
        self.nodes: dict[str, Node] = {}
        self.waiting: dict[str, tuple[int, str]] = {}
        """Sites that wait for others at the end: their round, and why."""
        self.ends: dict[str, str] = {}
        """What sites that ended said."""
        for name in [*self.names, HOSTILE]:
            self.create(name)
        for name in self.names:
            self.accept(name, *(other for other in self.sites if other != name))

    # what operators do

    def create(self, name: str) -> Site:
        info = SiteInfo(name=name, listen=f"10.0.0.{len(self.sites) + 1}:7600", federation="test")
        site = self.sites[name] = Site.create(self.folder / name, info, {})
        return site

    def accept(self, name: str, *others: str) -> None:
        self.sites[name].members.accept_all([self.sites[other].invite() for other in others])

    def start(self, name: str) -> None:
        self.running[name] = asyncio.create_task(self._live(name))

    async def stop(self, name: str) -> None:
        self.running[name].cancel()
        await asyncio.wait([self.running[name]])

    async def _live(self, name: str) -> None:
        """Run a site from its last checkpoint, as `dispfl.peer.run_site` does, without threads and
        sockets."""
        site = self.sites[name] = Site.open(self.folder / name)
        with contextlib.closing(
            PeerStore(site.run_folder, name, self.spec, {}, ForwardCost((2,), (3,)), Task())
        ) as store:
            node, saving = self.node(site, store)
            retrying = asyncio.create_task(saving.retry())
            last, began = store.last(), asyncio.get_running_loop().time()
            assert (last[0] if last else 0) >= self.saved.get(name, 0), (
                f"{name} has lost saved rounds"
            )
            try:
                await node.run(*(last or (0, self.first_state(name))))
                await saving.wait_until_saved()
            finally:
                retrying.cancel()
                self.lives.setdefault(name, []).append((began, asyncio.get_running_loop().time()))
                self.saved[name] = max([0, *store._directory.checkpoints.finished_rounds()])
                await node.client.transport.close()
            self.ends[name] = isolation_problem(site.run_folder) or "finished"

    def first_state(self, name: str) -> PeerState:
        weights, layout = self.context.first_weights, self.context.layout
        return METHOD.start(weights, layout, 0.5, seed=self.context.settings.seed, peer=name)

    def node(self, site: Site, store: PeerStore) -> tuple[Node, SavingThread]:
        membership = SiteMembership(site, METHOD, self.context.layout, 0.5)
        site.members.announce(site.identity, site.info.address, 0.5, site.members.own_first_round)
        ctx = NodeContext(
            site.name,
            self.context,
            self.context.codec,
            SpecVersions.single(self.context, self.spec),
            membership,
            log=self._log_of(site.name),
        )
        rng = random.Random(self.rng.getrandbits(64))
        transport = SiteTransport(self, site, membership)
        client = Client(ctx, transport, Deadlines(min=20.0, startup=STARTUP), rng)
        saving = WatchedSaving(store, ctx.status, ctx.log)
        saving.world = self
        node = self.nodes[site.name] = Node(ctx, client, NoisyTraining(self, rng), saving)
        return node, saving

    def were_mates(self, one: str, other: str, end: float) -> bool:
        """Whether two sites had not revoked each other, and ran for a round's time until one of
        them ended a round."""
        lives = [
            any(a <= end - SETTLED and end <= b for a, b in self.lives[name])
            for name in (one, other)
        ]
        return one != other and frozenset({one, other}) not in self.cut and all(lives)

    def _log_of(self, name: str) -> Callable[[str, Mapping[str, object]], None]:
        def log(event: str, fields: Mapping[str, object]) -> None:
            line, about = repr(dict(fields)), str(fields.get("peer", ""))
            assert all(str(value).isprintable() for value in fields.values()), (
                name,
                event,
                line[:200],
            )
            self.chars[name, about] = self.chars.get((name, about), 0) + len(line)
            now = asyncio.get_running_loop().time()
            self.trace.append((now, name, event, line))
            if event == "starting":
                self.started[name] = now
            elif event in ("round", "joining"):
                self.reached[name] = max(self.reached.get(name, 0), int(str(fields["round"])))
            if event == "joining" and now < self.started[name] + STARTUP:
                honest = [other for other in self.sites[name].members.names() if other != HOSTILE]
                furthest = max((self.reached.get(other, 0) for other in honest), default=ROUNDS)
                assert self.reached[name] <= furthest + 2, f"{name} joins beyond all honest sites"

        return log

    # what happens during the run

    async def play(self) -> None:
        """Run the federation while its operators act, until all sites that are left have
        finished."""
        mallory = HostileMember(self, random.Random(self.rng.getrandbits(64)))
        await mallory.transport.serve(mallory.answer)
        attack = asyncio.create_task(mallory.attack())
        for name in self.names:
            await asyncio.sleep(self.rng.uniform(0.0, 8.0))  # started by hand, one after another
            self.start(name)
        for _ in range(6):
            await asyncio.sleep(self.rng.uniform(1.0, 6.0))
            await self.rng.choice(EVENTS)(self)
        self.network.heal()
        await self.finish()
        attack.cancel()
        await asyncio.wait([attack])
        await mallory.transport.close()

    async def finish(self) -> None:
        """Let the sites run to the end; those that wait for others for long are stopped."""
        while pending := [name for name in self.names if not self.running[name].done()]:
            before = len(self.rounds)
            await asyncio.wait([self.running[name] for name in pending], timeout=PATIENCE)
            waiting = [name for name in pending if self.nodes[name].ctx.status.waiting]
            if waiting == pending and len(self.rounds) == before:
                for name in waiting:
                    status = self.nodes[name].ctx.status
                    self.waiting[name] = (status.round, str(status.waiting))
                    await self.stop(name)

    def one(self) -> str | None:
        """A running honest site."""
        return self.rng.choice(
            [None, *(name for name in self.names if not self.running[name].done())]
        )

    async def crash(self) -> None:
        """A site is killed and started again."""
        if name := self.one():
            await self.stop(name)
            await asyncio.sleep(self.rng.uniform(0.0, 20.0))
            self.start(name)

    async def leave(self) -> None:
        """A site is stopped for good, unless it is one of the last two."""
        if (name := self.one()) and len(self.names) - len(self.left) > 2:
            await self.stop(name)
            self.left.add(name)

    async def join(self) -> None:
        """A new site is accepted by all, which it accepts, and joins the running federation."""
        name = f"late{len(self.names)}"
        others = list(self.sites)
        self.create(name)
        self.accept(name, *others)
        for other in others:
            if other != HOSTILE:
                self.accept(other, name)
        self.names.append(name)
        self.start(name)

    async def revoke(self) -> None:
        """An operator revokes some members, or all of them, and accepts some again."""
        if (name := self.one()) and self.sites[name].members.names():
            members = self.sites[name].members
            revoked = self.rng.sample(members.names(), self.rng.randint(1, len(members.names())))
            self.alone |= {name} if len(revoked) == len(members.names()) else set()
            for other in revoked:
                members.revoke(other)
                self.cut.add(frozenset({name, other}))
            await asyncio.sleep(self.rng.uniform(0.0, 8.0))
            self.accept(name, *self.rng.sample(revoked, self.rng.randint(0, len(revoked))))

    async def rotate(self) -> None:
        """A site gets a new key."""
        if (name := self.one()) and name not in self.rotated:  # once an hour is allowed
            self.rotated.add(name)
            await self.stop(name)
            self.sites[name].rotate()
            self.start(name)

    async def return_key(self) -> None:
        """A site gets a new key; later another operator revokes it and is given its old invite
        again."""
        name, other = self.one(), self.one()
        if not (name and other) or name == other or other in self.rotated:
            return
        self.rotated.add(other)
        old = self.sites[other].invite()
        await self.stop(other)
        self.sites[other].rotate()
        self.start(other)
        await asyncio.sleep(self.rng.uniform(5.0, 20.0))
        members = self.sites[name].members
        if not (member := members.get(other)) or member.certificate == old.certificate:
            return  # it has not seen the new key yet
        members.revoke(other)
        self.cut.add(frozenset({name, other}))
        with contextlib.suppress(DispflError):
            members.accept(old)
            raise AssertionError(f"{name} has accepted a key that {other} has rotated away")

    async def fail_disk(self) -> None:
        """A site is killed, and started again while its disk cannot be read; then its operator
        repairs the disk."""
        if not (name := self.one()):
            return
        await self.stop(name)
        real_open = Path.open

        def fail(path: Path, mode: str = "r", *args: Any, **settings: Any) -> Any:
            if path.suffix == ".safetensors" and mode == "rb":
                raise OSError(errno.EIO, "Input/output error")
            return real_open(path, mode, *args, **settings)

        with mock.patch.object(Path, "open", fail):
            self.start(name)
            await asyncio.sleep(0.1)
        if self.running[name].done():  # it says what is wrong, and stops
            assert isinstance(self.running[name].exception(), RunError)
            self.start(name)

    async def fill_disk(self) -> None:
        """All disks are full for a while."""
        with mock.patch("os.fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")):
            await asyncio.sleep(self.rng.uniform(2.0, 15.0))

    async def part(self) -> None:
        """The network is cut in two for a while."""
        half = set(self.rng.sample(self.names, len(self.names) // 2))
        self.network.partition(half, set(self.names) - half)
        await asyncio.sleep(self.rng.uniform(2.0, 10.0))
        self.network.heal()

    async def jump(self) -> None:
        """All clocks jump, forwards or backwards."""
        self.clock_offset += self.rng.uniform(-20.0, 20.0) * 3600


EVENTS = (
    SiteWorld.crash,
    SiteWorld.leave,
    SiteWorld.join,
    SiteWorld.revoke,
    SiteWorld.rotate,
    SiteWorld.return_key,
    SiteWorld.fail_disk,
    SiteWorld.fill_disk,
    SiteWorld.part,
    SiteWorld.jump,
)


class HostileMember:
    """A member with a valid key, accepted by all at first, that does everything else wrong."""

    def __init__(self, world: SiteWorld, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.favourite: int | None = rng.choice([None, None, ROUNDS - 2])
        """The round that it always claims to be in, if it lies about nothing else in a sync."""
        self.transport = MemoryTransport(world.network, HOSTILE)
        self.identity, self.serial = world.sites[HOSTILE].identity, int(time.time())

    def record(self) -> JSON:
        """A signed record, valid or not."""
        self.serial += 1
        address = self.rng.choice(
            [hostile_address(self.rng), self.world.sites[HOSTILE].info.address]
        )
        first_round = self.rng.choice([0, 0, 3, ROUNDS, ROUNDS + 1, 2**53])
        return MemberRecord.sign(
            self.identity, "test", address, 0.5, first_round, self.serial
        ).to_json()

    def claim(self) -> JSON:
        """A round, as it claims to be in it."""
        if self.favourite is not None:
            return self.favourite
        claims: list[JSON] = [
            0,
            ROUNDS - 2,
            ROUNDS - 1,
            ROUNDS,
            10**30,
            -1,
            "9",
            None,
            0.5,
            [9],
            True,
        ]
        return self.rng.choice(claims)

    def sync(self) -> tuple[dict[str, JSON], bytes]:
        """Header and body of a sync, of this version or another."""
        spec: dict[str, JSON] = dict(self.world.spec)
        if self.favourite is not None:
            return {"spec": spec, "current_round": self.favourite}, b""
        if self.rng.random() < 0.3:
            spec |= self.rng.choice(
                [{"protocol": "2"}, {"seed\x1b[2J": "\n" * 70_000}, {"new": {"a": 1}}]
            )
        records = [self.record() for _ in range(self.rng.randint(0, 3))]
        greeting = json.dumps(
            {"state": str(self.rng.random()), "roster": [7, "x", "y"], "records": records}
        ).encode()
        page = json.dumps({"records": records, "next": self.rng.choice(["", "0", "~"])}).encode()
        body = self.rng.choice(
            [
                greeting,
                page,
                b"",
                b'{"part":"x","size":9}',
                b'{"known":3,"records":[[]]}',
                b"\xff" * 9,
            ]
        )
        return {"spec": spec, "current_round": self.claim(), "future": [{}]}, body

    async def answer(self, sender: str, request: Request) -> Response:
        chance = self.rng.random()
        if chance < 0.2 and self.favourite is None:
            raise Refused(
                f"no-{self.rng.random()}\x1b[2J", f"\x1b[31m{self.rng.random()}\r\n" + "x" * 60_000
            )
        if request.kind == "sync":
            return Response(*self.sync())
        if chance < 0.4:
            return Response(
                {
                    "status": self.rng.choice(["stale", "wait", 5, None]),
                    "current_round": self.claim(),
                }
            )
        await asyncio.sleep(self.rng.choice([0.0, 0.0, 19.0, 60.0]))
        return self.model(request)

    def model(self, request: Request) -> Response:
        """A model: of zeros, far too large, garbled, or not a model at all."""
        codec = self.world.context.codec
        model = self.world.first_state(HOSTILE).model
        model = dataclasses.replace(model, values=model.values * self.rng.choice([0.0, 1e9]))
        body = codec.encode_answer(model, codec.decode_request(request.body), rng=torch.Generator())
        body = self.rng.choice([body, body, body[:-1], self.rng.randbytes(len(body)), b""])
        header = {
            "status": "model",
            "round": request.header["round"],
            "nonce": request.header["nonce"],
            "values": 10**9,
        }
        return Response({**header, "current_round": self.claim()}, body)

    async def attack(self) -> None:
        """Send requests of all kinds to the others, all the time."""
        while True:
            await asyncio.sleep(self.rng.uniform(0.5, 3.0))
            request = Request("sync", *self.sync())
            if self.rng.random() < 0.3:
                header: dict[str, JSON] = {
                    "round": self.claim(),
                    "nonce": self.rng.choice(["n", 7, "x" * 99]),
                    "spec": "x",
                }
                request = Request(self.rng.choice(["model", "key"]), header, self.rng.randbytes(40))
            with contextlib.suppress(DispflError):
                await self.transport.request(self.rng.choice(self.world.names), request)


def check_sites(seed: int) -> str:
    """Run a federation of sites, and check what must hold; return a summary."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(dir=memory) as folder,
        time_of(world := SiteWorld(seed, Path(folder))),
    ):
        run(world.play(), LIMIT)
    for name, task in world.running.items():
        problem = None if task.cancelled() else task.exception()
        is_late = isinstance(problem, RunError) and "is too late to join" in str(problem)
        assert problem is None or is_late, f"{name} ended: {problem!r}"
    check_nobody_is_cut_off(world)
    check_those_that_wait(world)
    for (name, about), chars in world.chars.items():
        assert chars < MAX_LOG_CHARS, f"{name} logged {chars} characters about {about}"
    return f"{len(world.names)} sites, norm {world.norm:g}: {sorted(world.ends.items())}"


def check_nobody_is_cut_off(world: SiteWorld) -> None:
    """Check that a site that requests models of running members, which accept it, receives from one
    now and then."""
    for name in world.lives:
        received, missed = 0, 0
        for end, who, senders, absent in world.rounds:
            if who == name:
                mates = {other for other in world.lives if world.were_mates(name, other, end)}
                received, missed = received + len(mates & senders), missed + len(mates & absent)
        assert received or missed < 5 or name in world.alone, (
            f"{name} received no model of running members and missed {missed}"
        )


def check_those_that_wait(world: SiteWorld) -> None:
    """Check that no two sites wait for ever which could send each other their models."""
    for name, (t, reason) in world.waiting.items():
        for other, (other_t, _) in world.waiting.items():
            is_apart = abs(t - other_t) > 1 or frozenset({name, other}) in world.cut
            assert name == other or is_apart, f"{name} waits ({reason}), and so does {other}"


@contextlib.contextmanager
def time_of(world: SiteWorld) -> Iterator[None]:
    """Let `time.time` be the virtual clock, with its jumps, and threads a part of the event
    loop."""
    began = time.time()

    def now() -> float:
        try:
            return began + asyncio.get_running_loop().time() + world.clock_offset
        except RuntimeError:
            return began

    def inline(
        loop: VirtualTimeLoop, pool: Any, work: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Do on the event loop what a real node does on a thread."""
        result = loop.create_future()
        try:
            result.set_result(work(*args))
        except Exception as problem:
            result.set_exception(problem)
        return result

    with (
        mock.patch("time.time", now),
        mock.patch.object(VirtualTimeLoop, "run_in_executor", inline),
    ):
        yield
