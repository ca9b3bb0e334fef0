"""One peer of a simulated federation: late, unreachable, restarted, new, or malicious."""

import asyncio
import itertools
import random
from collections.abc import Mapping, Sequence

import pytest
import torch
from messages import refused
from simulated_world import LIMIT, ROUNDS, FakeTraining, World, events_about, reliable

from dispfl.core.averaging import average_of
from dispfl.core.packed import PackedModel
from dispfl.core.report import Report
from dispfl.errors import RunError
from dispfl.methods.base import PeerState
from dispfl.peer.node import Node
from dispfl.peer.probing import MAX_PAUSE
from dispfl.peer.state.log import MAX_LINES
from dispfl.peer.transport.base import JSON, Handler, Refused, Request, Response
from dispfl.round.context import PeerTask, StepResult
from dispfl.testing.memory_transport import MemoryTransport
from dispfl.testing.virtual_time import run


async def everyone(world: World, *but: str) -> dict[str, "asyncio.Task[None]"]:
    return {name: asyncio.create_task(world.live(name)) for name in world.names if name not in but}


def replace_transport(node: Node, transport: MemoryTransport) -> None:
    node.client.transport = node.client.members.transport = transport


def test_a_peer_restarted_after_half_a_minute_is_within_two_rounds_of_the_others() -> None:
    world = World(1, reliable)

    async def story() -> None:
        living = await everyone(world)
        while (world.stores["003"].last or (0, None))[0] < 4:
            await asyncio.sleep(0.5)
        living["003"].cancel()
        await asyncio.wait([living["003"]])
        done = len(world.stores["003"].rounds)
        await asyncio.sleep(30)
        living["003"] = asyncio.create_task(world.live("003"))
        while len(world.stores["003"].rounds) == done:
            await asyncio.sleep(0.1)
        assert (
            world.stores["003"].rounds[-1] > 4 + 2
        )  # it skipped the rounds that the others had finished
        assert world.federation_round("003") - world.stores["003"].rounds[-1] <= 2
        await asyncio.gather(*living.values())

    run(story(), LIMIT)
    assert all(
        store.last is not None and store.last[0] == ROUNDS for store in world.stores.values()
    )


def test_a_dead_peer_costs_the_others_one_deadline_and_then_nothing() -> None:
    world = World(2, reliable)

    async def story() -> float:
        living = await everyone(world, "007")  # it never starts
        await asyncio.gather(*living.values())
        return asyncio.get_running_loop().time()

    took = run(story(), LIMIT)
    assert set(world.finished) == set(world.names) - {"007"}
    # The first round waits 120 s. Later rounds train for 0.5 to 3 s, and wait for no probe.
    assert took < 120 + ROUNDS * (3 + 1) + 20


async def until_others_finish(world: World, transport: MemoryTransport) -> None:
    """Run all peers until the others have finished; 003 has a transport of its own."""
    living = await everyone(world, "003")
    node = world.node("003")
    replace_transport(node, transport)
    running = asyncio.create_task(node.run(0, world.start["003"]))
    await asyncio.gather(*living.values())
    running.cancel()
    await asyncio.wait([running])
    await node.client.transport.close()


class Unresponsive(MemoryTransport):
    """Sends requests, but never responds to any."""

    async def serve(self, handler: Handler) -> None:
        async def never(sender: str, request: Request) -> Response:
            await asyncio.sleep(LIMIT)
            raise AssertionError

        await super().serve(never)


def test_a_peer_that_only_sends_requests_costs_others_one_deadline_and_then_nothing() -> None:
    world = World(2, reliable, peers=4)

    run(until_others_finish(world, Unresponsive(world.network, "003")), LIMIT)
    for name in world.names[:3]:
        ends = [at for at, peer, event, _ in world.trace if (peer, event) == (name, "round")]
        assert len(ends) == ROUNDS
        # The first round waits for it. Later rounds train for 0.5 to 3 s and do not wait for it; a
        # deadline is 20 s.
        assert max(after - before for before, after in itertools.pairwise(ends)) < 3 + 3
        received = [peers for t, peers in world.stores[name].received.items() if t > 0]
        assert received == [[other for other in world.names[:3] if other != name]] * (ROUNDS - 1)


class Declining(MemoryTransport):
    """Declines every request for a model, as if it did not choose who asks."""

    async def serve(self, handler: Handler) -> None:
        async def declines(sender: str, request: Request) -> Response:
            if request.kind == "model":
                return Response({"status": "declined", "current_round": request.header["round"]})
            return await handler(sender, request)

        await super().serve(declines)


def test_a_neighbour_that_declines_has_not_answered() -> None:
    """Only those that were chosen may decline: others would count as if nobody had asked them."""
    world = World(2, reliable, peers=4)

    run(until_others_finish(world, Declining(world.network, "003")), LIMIT)
    for name in world.names[:3]:
        assert "003" in world.stores[name].missed[1]
        assert all("003" not in received for received in world.stores[name].received.values())


class LateAnswers(MemoryTransport):
    """Answers requests for models, 18 s after they arrived: just before the deadline."""

    async def serve(self, handler: Handler) -> None:
        async def late(sender: str, request: Request) -> Response:
            response = await handler(sender, request)
            await asyncio.sleep(18 if response.header.get("status") == "model" else 0)
            return response

        await super().serve(late)


def test_a_member_that_answers_just_in_time_delays_few_rounds_and_is_received_when_it_answers() -> (
    None
):
    world = World(2, reliable, peers=5, rounds=60)
    world.network.timeout = 30
    make = world.node
    nodes: dict[str, Node] = {}

    def with_a_slow_one(name: str) -> Node:
        node = nodes[name] = make(name)
        if name == "004":
            replace_transport(node, LateAnswers(world.network, name))
        return node

    world.node = with_a_slow_one  # type: ignore[method-assign]

    async def story() -> None:
        await asyncio.gather(*(await everyone(world)).values())

    run(story(), LIMIT)
    for name in world.names[:4]:
        status = nodes[name].ctx.status
        assert status.peers["004"].slow
        assert (status.peers["004"].latency or 0) > 15
        assert not any(status.peers[other].slow for other in world.names[:4] if other != name)
        ends = [at for at, peer, event, _ in world.trace if (peer, event) == (name, "round")]
        durations = [after - before for before, after in itertools.pairwise(ends)]
        assert max(durations[6:]) < 2 * (3 + 1)
        assert status.deadline == 20.0  # it has not grown
        later = [t for t, peers in world.stores[name].received.items() if "004" in peers and t > 10]
        assert len(later) >= 3
        assert events_about(world, name, "004").count("slow") == 1


def test_no_peer_misses_another_that_starts_within_the_startup_period() -> None:
    world = World(4, reliable, peers=8)

    async def story() -> None:
        living = await everyone(world, "007")
        await asyncio.sleep(100)  # the startup period is 120 s
        living["007"] = asyncio.create_task(world.live("007"))
        await asyncio.gather(*living.values())

    run(story(), LIMIT)
    assert not any(missed for store in world.stores.values() for missed in store.missed.values())


class SlowLink(MemoryTransport):
    """A model takes 8 s from the first byte to the last: longer than a probe."""

    async def request(self, peer: str, request: Request) -> Response:
        response = await super().request(peer, request)
        if response.header.get("status") == "model":
            request.on_alive()
            await asyncio.sleep(8)
        return response


def test_a_peer_on_a_slow_link_is_received_again_after_the_next_probe() -> None:
    world = World(3, reliable, peers=2, rounds=30)
    make = world.node

    def slow(name: str) -> Node:
        node = make(name)
        replace_transport(node, SlowLink(world.network, name))
        return node

    world.node = slow  # type: ignore[method-assign]

    async def story() -> dict[str, int]:
        living = await everyone(world)
        await asyncio.sleep(40)
        world.network.partition({"000"}, {"001"})
        await asyncio.sleep(40)
        world.network.heal()
        await asyncio.sleep(MAX_PAUSE)  # the longest time between two probes
        begun = {name: len(world.stores[name].rounds) for name in living}
        await asyncio.gather(*living.values())
        return begun

    world.alone_rounds = ROUNDS
    begun = run(story(), LIMIT)
    for name, store in world.stores.items():
        assert any(store.missed.values())
        assert not [t for t, missed in store.missed.items() if missed and t > begun[name]]


class Slow(FakeTraining):
    """Trains for longer than the others' deadline, which is 20 s."""

    async def step(
        self, task: PeerTask, state: PeerState, received: Mapping[str, PackedModel]
    ) -> StepResult:
        await asyncio.sleep(100)
        return await super().step(task, state, received)


def test_a_quick_peer_that_restarts_waits_for_the_slow_majority_instead_of_racing_alone() -> None:
    world = World(5, reliable, peers=4)
    make = world.node

    def slow(name: str) -> Node:
        node = make(name)
        training = node.training if name == "000" else Slow(world, random.Random(0))
        return Node(
            node.ctx, node.client, training, node.store
        )  # whose rounds may exceed twice their deadline

    world.node = slow  # type: ignore[method-assign]

    async def story() -> None:
        living = await everyone(world)
        await asyncio.sleep(150)
        living["000"].cancel()
        await asyncio.wait([living["000"]])
        living["000"] = asyncio.create_task(
            world.live("000")
        )  # it does not know how long rounds take
        await asyncio.gather(*living.values())

    run(story(), LIMIT)
    for store in world.stores.values():
        assert store.rounds == list(range(ROUNDS))
        assert not any(store.missed.values())


class Stuck(FakeTraining):
    """Never finishes round 3."""

    async def step(
        self, task: PeerTask, state: PeerState, received: Mapping[str, PackedModel]
    ) -> StepResult:
        await asyncio.sleep(LIMIT if task.t == 3 else 0)
        return await super().step(task, state, received)


def test_a_peer_that_dies_after_responding_wait_does_not_get_the_startup_deadline() -> None:
    world = World(2, reliable, peers=2)
    world.alone_rounds = ROUNDS

    async def story() -> None:
        living = asyncio.create_task(world.live("000"))
        stuck = world.node("001")
        stuck.training = Stuck(world, random.Random(0))
        dying = asyncio.create_task(stuck.run(0, world.start["001"]))
        await asyncio.sleep(40.0)  # it has responded "wait"; the startup period is 120 s
        dying.cancel()
        await asyncio.wait([dying])
        await stuck.client.transport.close()
        await living

    run(story(), LIMIT)
    rounds = [
        (when, facts)
        for when, name, event, facts in world.trace
        if (name, event) == ("000", "round")
    ]
    [waited] = [when for when, facts in rounds if "'round': 4" in facts]
    assert 40 < waited < 60


def test_an_absent_peer_and_a_restarted_peer_are_logged_once_each() -> None:
    world = World(12, reliable, peers=4)

    async def story() -> None:
        living = await everyone(world, "003")
        while (world.stores["002"].last or (0, None))[0] < 2:
            await asyncio.sleep(0.5)
        living["002"].cancel()
        await asyncio.wait([living["002"]])
        await asyncio.sleep(40)
        living["002"] = asyncio.create_task(world.live("002"))
        await asyncio.gather(*living.values())

    run(story(), LIMIT)
    for name in ("000", "001"):
        assert events_about(world, name, "003") == ["waiting", "unreachable"]
        assert [
            event
            for event in events_about(world, name, "002")
            if event in ("unreachable", "reconnected")
        ] == [
            "unreachable",
            "reconnected",
        ]
        assert all("003" in missed for missed in world.stores[name].missed.values())


def test_two_halves_continue_alone_and_exchange_models_after_the_partition() -> None:
    world = World(5, reliable, peers=8, rounds=20)
    left, right = set(world.names[:4]), set(world.names[4:])

    async def story() -> tuple[float, float]:
        living = await everyone(world)
        await asyncio.sleep(6)
        world.network.partition(left, right)
        parted = world.federation_round("")
        await asyncio.sleep(60)
        world.network.heal()
        healed = world.federation_round("")
        await asyncio.gather(*living.values())
        return parted, healed

    parted, healed = run(story(), LIMIT)
    assert healed >= parted + 2  # both sides continued
    across = [
        sender
        for name, store in world.stores.items()
        for t, received in store.received.items()
        if t > healed + 2
        for sender in received
        if (name in left) != (sender in left)
    ]
    assert across


def test_a_late_peer_starts_from_its_neighbours_average_under_its_own_mask() -> None:
    world = World(6, reliable)
    world.members.joins["015"] = ROUNDS  # not announced yet
    given: dict[int, tuple[PeerState, Mapping[str, PackedModel]]] = {}

    async def story() -> None:
        living = await everyone(world, "015")
        while world.federation_round("015") < 7:
            await asyncio.sleep(0.5)
        make = world.node

        def watched(name: str):  # type: ignore[no-untyped-def]
            node = make(name)
            step = node.training.step

            async def recorded(task, state, received):  # type: ignore[no-untyped-def]
                given.setdefault(task.t, (state, received))
                return await step(task, state, received)

            node.training.step = recorded  # type: ignore[method-assign]
            return node

        world.node = watched  # type: ignore[method-assign]
        living["015"] = asyncio.create_task(world.live("015"))
        await asyncio.gather(*living.values())

    run(story(), LIMIT)
    state, received = given[min(given)]
    assert min(given) >= 7
    assert world.members.joins["015"] == min(given)
    assert received
    models = [received[name] for name in sorted(received)]
    average = average_of(models, state.next_mask.unpack())
    held = torch.stack([model.mask.unpack() for model in received.values()]).any(0)
    own, mask = state.model.unpack()
    assert mask.equal(state.next_mask.unpack())
    assert own[held].allclose(average[held])  # so that its own weights do not change the average
    assert own[mask & ~held].equal(world.weights[mask & ~held])
    assert world.stores["015"].last is not None
    heard_by_others = [
        t
        for name, store in world.stores.items()
        for t, received in store.received.items()
        if "015" in received
    ]
    assert min(heard_by_others) > min(given)  # it is received after its first round


def test_a_late_peer_does_not_wait_for_peers_that_left_before_it_came() -> None:
    world, left = World(6, reliable, peers=8), {"001", "002"}
    world.members.joins["007"] = ROUNDS

    async def story() -> None:
        living = await everyone(world, "007")
        while world.federation_round("007") < 4:
            await asyncio.sleep(0.5)
        for name in left:
            living.pop(name).cancel()
        living["007"] = asyncio.create_task(world.live("007"))
        await asyncio.gather(*living.values())

    run(story(), LIMIT)
    store, first_round = world.stores["007"], world.members.joins["007"]
    assert store.rounds == list(range(first_round, ROUNDS))
    assert left == {name for missed in store.missed.values() for name in missed}
    ends = [at for at, peer, event, _ in world.trace if (peer, event) == ("007", "round")]
    assert (
        max(after - before for before, after in itertools.pairwise(ends)) < 4 + 3 + 3 + 1
    )  # not the startup period


class FailsAtFirst(FakeTraining):
    """The first step of a late peer fails: it keeps its state."""

    async def step(
        self, task: PeerTask, state: PeerState, received: Mapping[str, PackedModel]
    ) -> StepResult:
        if isinstance(self.world, WorldWithFailure) and not self.world.failed:
            self.world.failed.append(task.t)
            return StepResult(Report(failure="nan"), state=state)
        return await super().step(task, state, received)


class WorldWithFailure(World):
    """A federation in which the first step of a late peer fails."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, reliable)
        self.failed: list[int] = []

    def node(self, name: str) -> Node:
        node = super().node(name)
        if name == "015":
            node.training, save = FailsAtFirst(self, random.Random(0)), node.store.save

            async def save_good(
                t: int, step: StepResult, received: Sequence[str], missed: Sequence[str]
            ) -> None:
                if not step.report.failure:
                    await save(t, step, received, missed)

            node.store.save = save_good  # type: ignore[method-assign]
        return node


def test_a_late_peer_whose_first_step_fails_sends_no_model() -> None:
    world = WorldWithFailure(6)
    world.members.joins["015"] = ROUNDS

    async def story() -> None:
        living = await everyone(world, "015")
        while world.federation_round("015") < 7:
            await asyncio.sleep(0.5)
        living["015"] = asyncio.create_task(world.live("015"))
        await asyncio.gather(*living.values())

    run(story(), LIMIT)
    [failed] = world.failed
    assert world.published["015", failed + 1] == []
    assert world.published["015", failed + 2] != []


def test_joining_in_the_last_round_is_refused() -> None:
    world = World(6, reliable, peers=6)
    world.members.joins["005"] = ROUNDS

    async def story() -> None:
        living = await everyone(world, "005")
        async with asyncio.timeout(600):
            while min((world.stores[name].last or (0, None))[0] for name in living) < ROUNDS - 1:
                await asyncio.sleep(0.05)
        with refused(RunError):
            await world.live("005")
        await asyncio.gather(*living.values())

    run(story(), LIMIT)
    assert world.members.joins["005"] == ROUNDS  # it was not announced
    assert sorted(world.finished) == world.names[:5]


class MaliciousPeer:
    """A member that violates the protocol."""

    def __init__(self, world: World, name: str, fault: str) -> None:
        self.world, self.name, self.fault = world, name, fault
        self.transport = world.network.join(name)
        self.codec = world.context.codec
        self.rng = random.Random(0)
        self.refused: list[JSON] = []

    async def answer(self, sender: str, request: Request) -> Response:
        if request.kind == "sync":
            return Response({"spec": {}, "current_round": 0, "members": None})
        t, nonce = request.header["round"], request.header["nonce"]
        mask = self.codec.decode_request(request.body)
        model = self.world.start[self.name].model
        if self.fault == "huge":
            model = PackedModel(model.values * 1e6, model.mask)
        elif self.fault == "dense":
            model = PackedModel.pack(
                model.unpack()[0], torch.ones(model.mask.size, dtype=torch.bool)
            )
        frame = bytearray(self.codec.encode_answer(model, mask, rng=torch.Generator()))
        if self.fault == "noise":
            frame = bytearray(self.rng.randbytes(len(frame)))
        elif self.fault == "cut":
            frame = frame[:-3]
        elif self.fault == "another round":
            t = int(t) + 1  # type: ignore[arg-type]
        elif self.fault == "another nonce":
            nonce = "0" * 32
        header = {"status": "model", "round": t, "nonce": nonce, "current_round": 10**9}
        values = "all" if self.fault == "no number of values" else 10**9
        return Response({**header, "values": values}, bytes(frame))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("noise", "not-ours"),
        ("cut", "checksum"),
        ("huge", "norm"),
        ("dense", "density"),
        ("another round", "wrong-response"),
        ("another nonce", "wrong-response"),
        ("no number of values", "malformed"),
    ],
)
def test_bad_responses_are_discarded_and_counted_and_honest_peers_finish(
    fault: str, reason: str
) -> None:
    world = World(7, reliable, peers=6, rounds=6)
    if fault == "dense":  # it announced fewer weights than the others request
        world.members.announced["002"] = [count // 2 for count in world.members.keeps]
    nodes = {}

    async def story() -> None:
        mallory = MaliciousPeer(world, "002", fault)
        await mallory.transport.serve(mallory.answer)
        make = world.node

        def noted(name: str):  # type: ignore[no-untyped-def]
            nodes[name] = make(name)
            return nodes[name]

        world.node = noted  # type: ignore[method-assign]
        living = await everyone(world, "002")
        await asyncio.gather(*living.values())
        await mallory.transport.close()

    run(story(), LIMIT)
    assert set(world.finished) == set(world.names) - {"002"}
    assert not any(
        "002" in received for store in world.stores.values() for received in store.received.values()
    )
    counted = [
        node.ctx.guard.refused["002"][reason]
        for node in nodes.values()
        if "002" in node.ctx.guard.refused
    ]
    assert sum(counted) > 0


class FailingTransport(MemoryTransport):
    """Raises an error of no expected kind for one peer, as a transport does for an address it
    cannot use."""

    async def request(self, peer: str, request: Request) -> Response:
        if peer == "002":
            raise UnicodeError("label empty or too long")
        return await super().request(peer, request)


def test_an_unexpected_error_about_one_peer_is_logged_with_its_type_and_ends_no_node() -> None:
    world = World(7, reliable, peers=4, rounds=4)
    make = world.node

    def failing(name: str) -> Node:
        node = make(name)
        replace_transport(node, FailingTransport(world.network, name))
        return node

    world.node = failing  # type: ignore[method-assign]

    async def story() -> None:
        await asyncio.gather(*(await everyone(world)).values())

    run(story(), LIMIT)
    assert set(world.finished) == set(world.names)
    for name in ("000", "001", "003"):
        assert world.stores[name].missed == {t: ["002"] for t in range(4)}
        [logged] = [
            facts for _, logger, event, facts in world.trace if (logger, event) == (name, "failed")
        ]
        assert "'peer': '002'" in logged
        assert "UnicodeError: label empty or too long" in logged


class Flooding(MaliciousPeer):
    """Refuses every request with a long new sentence and a new reason; between two refusals it
    responds."""

    count = 0

    async def answer(self, sender: str, request: Request) -> Response:
        self.count += 1
        if self.fault == "responds" and self.count % 2:
            return Response({"status": "wait", "spec": {}, "current_round": 0})
        raise Refused(f"reason-{self.count}\x1b[2J", f"\x1b[31m{self.count}\n" + "x" * 64_000)


@pytest.mark.parametrize("fault", ["refuses", "responds"])
def test_a_member_that_refuses_with_ever_new_sentences_fills_neither_log_nor_status(
    fault: str,
) -> None:
    world, nodes = World(7, reliable, peers=2, rounds=150), dict[str, Node]()
    world.alone_rounds = 150

    async def story() -> None:
        mallory = Flooding(world, "001", fault)
        await mallory.transport.serve(mallory.answer)
        node = nodes["000"] = world.node("000")
        await node.run(0, world.start["000"])
        await node.client.transport.close()
        await mallory.transport.close()

    run(story(), LIMIT)
    about = [facts for _, _, event, facts in world.trace if "'peer': '001'" in facts]
    assert len(about) <= (
        3 if fault == "refuses" else MAX_LINES
    )  # once until it responds, and so many in an hour
    assert len("".join(about)) < 100_000  # 13 MB before
    assert max(map(len, about)) < 500
    assert not any("x1b" in facts or "\\n" in facts for facts in about)
    status = nodes["000"].ctx.status.as_json()
    assert status["peers"]["001"]["refusals"] >= 149
    assert len(str(status)) < 1000


def test_a_step_that_was_given_up_is_logged_and_in_the_status() -> None:
    world = WorldWithFailure(6)
    world.alone_rounds = ROUNDS
    node = {}

    async def story() -> None:
        node["015"] = world.node("015")
        living = asyncio.create_task(node["015"].run(0, world.start["015"]))
        while world.stores["015"].last is None:
            await asyncio.sleep(1)
        living.cancel()
        await asyncio.wait([living])
        await node["015"].client.transport.close()

    run(story(), LIMIT)
    [logged] = [facts for _, _, event, facts in world.trace if event == "step failed"]
    assert "'round': 0, 'detail': 'nan The model of the last round is kept.'" in logged
    status = node["015"].ctx.status.as_json()
    assert (status["failed_steps"], status["last_failure"]) == (1, "round 0: nan")


class RefusesFirst(MaliciousPeer):
    """Refuses the first request of each round as replayed."""

    async def answer(self, sender: str, request: Request) -> Response:
        if request.kind == "model" and request.header["round"] not in self.refused:
            self.refused.append(request.header["round"])
            raise Refused("replayed", "The response was resumed 20 times already.")
        return await super().answer(sender, request)


def test_a_response_that_may_not_be_resumed_again_is_requested_anew_in_the_same_round() -> None:
    world = World(7, reliable, peers=2, rounds=3)
    for t in range(3):
        world.published["001", t].append(world.start["001"].model)

    async def story() -> None:
        other = RefusesFirst(world, "001", "none")
        await other.transport.serve(other.answer)
        await world.live("000")
        await other.transport.close()
        assert other.refused == [0, 1, 2]

    run(story(), LIMIT)
    assert world.stores["000"].received == {t: ["001"] for t in range(3)}
