"""A peer that joins a running federation: which round it joins, and the weights that it begins
with."""

import asyncio
from collections.abc import Mapping

import pytest
import torch
from messages import refused
from simulated_world import LIMIT, METHOD, FakeTraining, Liar, World, reliable

from dispfl.core.packed import PackedModel
from dispfl.errors import MessageError
from dispfl.methods.base import GossipMethod, PeerState
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.dpsgd import DPSGD
from dispfl.methods.fedfomo import FedFOMO
from dispfl.models.settings import MODELS
from dispfl.peer.node import Node, joining_state
from dispfl.peer.transport.base import Request, Response
from dispfl.round.context import PeerTask, StepResult
from dispfl.round.exchange import check_norm, decode_model, encode_model, model_norm
from dispfl.testing.virtual_time import run

SHAPES: dict[str, tuple[int, ...]] = {
    "mlp": (1, 28, 28),
    "cnn": (1, 28, 28),
    "vgg11": (3, 32, 32),
    "resnet18": (3, 32, 32),
    "unet": (1, 16, 16),
    "text": (12,),
}


def a_world(name: str, structure: str, rounds: int = 4) -> World:
    """A federation of three peers with a built-in network."""
    method = DisPFL(density=0.5, structure=structure)  # type: ignore[arg-type]
    return World(
        3,
        reliable,
        peers=3,
        rounds=rounds,
        method=method,
        model=lambda: MODELS[name](SHAPES[name], 10),
        input_shape=SHAPES[name],
    )


@pytest.mark.parametrize(
    ("name", "structure"),
    [
        *((name, "weights") for name in MODELS),
        *((name, "channels") for name in MODELS if name != "text"),  # it takes inputs by name
    ],
)
def test_a_joining_peer_accepts_the_first_weights_of_every_built_in_network(
    name: str, structure: str
) -> None:
    world = a_world(name, structure)
    own, codec, run_ = world.start["002"], world.context.codec, world.context
    message = encode_model(run_, codec, world.start["000"].model, own.next_mask, "000", "002", 2)
    model = decode_model(codec, message, own.next_mask)
    check_norm(model, model_norm(own.model), "000")
    if (name, structure) in (("mlp", "weights"), ("vgg11", "weights"), ("resnet18", "weights")):
        with refused(MessageError):
            check_norm(world.start["000"].model, 0.0, "000")  # against a model that is still empty
    state = joining_state(world.context.method, own, {"000": model}, 2)
    assert state.model.mask.unpack().equal(own.next_mask.unpack())
    # All peers have the same first weights, so their average is what the peer would have started
    # with.
    assert state.model.values.allclose(own.model.values)


class Watched(FakeTraining):
    """Remembers the states that steps begin with."""

    begun: dict[int, tuple[PeerState, Mapping[str, PackedModel]]]

    async def step(
        self, task: PeerTask, state: PeerState, received: Mapping[str, PackedModel]
    ) -> StepResult:
        self.begun[task.t] = (state, received)
        return await super().step(task, state, received)


def join_late(
    world: World, deaf: bool = False
) -> tuple[dict[int, tuple[PeerState, Mapping[str, PackedModel]]], Node]:
    """Let 002 join after two rounds; `deaf` if no model reaches it. Return the states its steps
    begin with."""
    nodes = {}

    async def story() -> None:
        living = [asyncio.create_task(world.live(name)) for name in ("000", "001")]
        while world.federation_round("002") < 2:
            await asyncio.sleep(0.5)
        node = nodes["002"] = world.node("002")
        watched = node.training = Watched(world, world.rng)
        watched.begun = {}
        if deaf:
            request = node.client.transport.request

            async def syncs_only(peer: str, asked: Request) -> Response:
                return await request(peer, asked if asked.kind == "sync" else Request("none", {}))

            node.client.transport.request = syncs_only  # type: ignore[method-assign, assignment]
        await node.run(0, world.start["002"])
        await node.client.transport.close()
        await asyncio.gather(*living)

    world.members.joins["002"] = world.context.settings.rounds
    run(story(), LIMIT)
    return nodes["002"].training.begun, nodes["002"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "structure"), [("mlp", "weights"), ("mlp", "channels"), ("cnn", "weights")]
)
def test_a_late_peer_hears_its_neighbours_and_is_heard_with_trained_weights(
    name: str, structure: str
) -> None:
    world = a_world(name, structure, rounds=8)
    begun, node = join_late(world)
    first = min(begun)
    assert sorted(begun[first][1]) == ["000", "001"]
    assert sorted(world.stores["000"].received[7]) == ["001", "002"]
    assert all(reasons.keys() == {"joining"} for reasons in node.ctx.guard.refused.values())
    # Nobody's weights shrink: those of the mlp had norms 12.7, 8.7, 6.1, 4.6 with a joining peer of
    # zeros.
    before = model_norm(world.start["000"].model)
    assert all(model_norm(world.finished[peer].model) > 0.8 * before for peer in ("000", "001"))
    assert not [event for _, _, event, _ in world.trace if event == "bad response"]


def test_a_late_peer_that_hears_nobody_begins_with_the_shared_first_weights() -> None:
    world = a_world("mlp", "weights", rounds=8)
    begun, _ = join_late(world, deaf=True)
    state, received = begun[min(begun)]
    assert min(begun) >= 2
    assert received == {}
    assert state.model.values.equal(world.start["002"].model.values)
    assert all(
        model.values.any() for (name, _), models in world.published.items() for model in models
    )


@pytest.mark.parametrize("method", [METHOD, DPSGD(), FedFOMO()], ids=lambda method: method.name)
def test_the_beginning_of_a_late_peer_is_the_average_of_those_it_hears(
    method: GossipMethod,
) -> None:
    """Two of four weights by hand: one that both hold, one that one of them holds, one that nobody
    holds."""
    ones = torch.ones(4, dtype=torch.bool)
    own = PeerState(
        PackedModel.pack(torch.full((4,), 9.0), ones), PackedModel.pack(torch.ones(4), ones).mask
    )
    received = {
        "a": PackedModel.pack(
            torch.tensor([1.0, 2.0, 0.0, 0.0]), torch.tensor([True, True, False, False])
        ),
        "b": PackedModel.pack(
            torch.tensor([3.0, 0.0, 0.0, 5.0]), torch.tensor([True, False, False, True])
        ),
    }
    assert joining_state(method, own, received, 2).model.values.tolist() == [2.0, 2.0, 9.0, 5.0]


@pytest.mark.parametrize("rule", ["clip", "trim", "nnm"])
def test_a_liar_among_the_first_answers_cannot_decide_the_beginning_of_a_late_peer(
    rule: str,
) -> None:
    """Three honest peers send 2; a Byzantine peer sends 100. All hold the first two weights, one
    honest peer each of the next three, the Byzantine peer alone the sixth and nobody the last one.
    """
    ones = torch.ones(7, dtype=torch.bool)
    own = PeerState(
        PackedModel.pack(torch.full((7,), 9.0), ones), PackedModel.pack(torch.ones(7), ones).mask
    )
    received = {}
    for place, name in enumerate("abcd"):
        held = torch.tensor([k < 2 or k == 2 + place for k in range(7)])
        received[name] = PackedModel.pack(torch.full((7,), 100.0 if name == "d" else 2.0), held)
    plain = joining_state(DPSGD(), own, received, 4).model.values
    assert plain.tolist() == [26.5, 26.5, 2.0, 2.0, 2.0, 100.0, 9.0]
    method = DPSGD(robust=rule, byzantine=1)  # type: ignore[arg-type]
    assert joining_state(method, own, received, 4).model.values.tolist() == [
        2.0,
        2.0,
        2.0,
        2.0,
        2.0,
        9.0,
        9.0,
    ]


def test_weights_that_are_all_zero_are_neither_sent_nor_accepted() -> None:
    world = World(3, reliable, peers=3, rounds=4)
    zero = PackedModel(
        torch.zeros_like(world.start["002"].model.values), world.start["002"].model.mask
    )
    with refused(MessageError):
        check_norm(zero, 1.0, "002")
    check_norm(
        PackedModel.pack(torch.ones(3), torch.zeros(3, dtype=torch.bool)), 1.0, "002"
    )  # nothing in common
    world.start["002"] = PeerState(zero, world.start["002"].next_mask)

    async def story() -> None:
        await asyncio.gather(*(world.live(name) for name in world.names))

    run(story(), LIMIT)
    assert world.published["002", 0] == []
    assert world.published["002", 1] != []
    received = world.stores["000"].received
    assert (received[0], received[3]) == (["001"], ["001", "002"])


@pytest.mark.parametrize("claim", [17, 10**9])
def test_one_liar_that_is_up_first_takes_no_site_out(claim: int) -> None:
    world = World(4, reliable, peers=5, rounds=20)

    async def story() -> None:
        attacker = Liar(world, "004", claim)
        await attacker.transport.serve(attacker.answer)
        living = []
        for name in world.names[:4]:
            living.append(asyncio.create_task(world.live(name)))
            await asyncio.sleep(5)  # started by hand, one after another
        await asyncio.gather(*living)
        await attacker.transport.close()

    run(story(), LIMIT)
    for name in world.names[:4]:
        store = world.stores[name]
        assert store.rounds == list(range(20))
        assert all(
            received == [peer for peer in world.names[:4] if peer != name]
            for received in store.received.values()
        )
    assert world.members.joins == dict.fromkeys(world.names[:4], 0)
