"""Responses and refusals of one peer, on a virtual clock."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from simulated_world import LAYOUT, LIMIT, ROUNDS, Pairing, World, reliable
from torch import nn

from dispfl.channels.channel_mask import ChannelMask
from dispfl.core.layout import Layout
from dispfl.core.packed import WeightMask
from dispfl.methods.dispfl import DisPFL
from dispfl.peer.node_context import NodeContext
from dispfl.peer.server import HOLD_SECONDS, Server
from dispfl.peer.setup.spec import federation_spec, spec_difference, spec_digest
from dispfl.peer.transport.base import JSON, Refused, Request, Response, Unreachable
from dispfl.peer.transport.guard import RequestGuard
from dispfl.round.exchange import exchange_graph, gossip_senders, published_model
from dispfl.testing.memory_transport import instant
from dispfl.testing.virtual_time import run
from dispfl.wire.codec import Codec


def send_all(
    world: World, requests: list[Request], used: int = 0
) -> tuple[list[str], dict[str, int]]:
    """Send these requests of a member that has used some bytes; return the peer's responses and
    refusal counts."""
    answers: list[str] = []
    nodes = {}

    async def story() -> None:
        node = nodes["000"] = world.node("000")
        living = asyncio.create_task(node.run(0, world.start["000"]))
        transport = world.network.join("001")
        await asyncio.sleep(1)
        if used:
            node.ctx.guard.charge("001", used, is_sync=True)
        for request in requests:
            try:
                response = await transport.request("000", request)
                answers.append(str(response.header.get("status", "sync")))
            except Refused as refused:
                answers.append(refused.reason)
            except Unreachable:
                answers.append("unreachable")
        living.cancel()
        await asyncio.wait([living])
        await node.client.transport.close()
        await transport.close()

    run(story(), LIMIT)
    return answers, dict(nodes["000"].ctx.guard.refused["001"])


def test_a_newer_version_of_the_spec_is_waited_for_unless_its_settings_are_ours() -> None:
    world = World(8, reliable, peers=2)
    node = world.node("000")
    digest = node.ctx.versions.latest.digest
    mask = node.ctx.codec.encode_request(world.start["001"].next_mask)

    def request(spec: str, version: JSON) -> Request:
        header: dict[str, JSON] = {"spec": spec, "spec_version": version, "round": 0}
        return Request("model", {**header, "nonce": f"{spec}-{version}"}, mask)

    requests = [request(digest, 7), request("other", 7), request("other", 1), request("other", "7")]
    answers, _ = send_all(world, requests)
    assert answers == ["model", "wait", "spec-mismatch", "spec-mismatch"]


def test_every_bad_request_is_refused_by_name_and_counted() -> None:
    world = World(8, reliable, peers=2)
    codec, start = world.context.codec, world.start["001"]
    spec = federation_spec("test", world.context, LAYOUT, world.weights, 0.5)
    header: dict[str, JSON] = {"spec": spec_digest(spec), "round": 0, "nonce": "a"}
    good = codec.encode_request(start.next_mask)
    denser = np.ones(LAYOUT.size, np.bool_)
    dense = codec.encode_request(WeightMask.pack(torch.from_numpy(denser)))
    answers, counted = send_all(
        world,
        [
            Request("model", header, good),
            Request("model", header, good),
            Request("model", {**header, "nonce": "b", "round": ROUNDS}, good),
            Request("model", {**header, "nonce": "c", "round": "0"}, good),
            Request("model", {**header, "nonce": "d", "spec": "other"}, good),
            Request("model", {**header, "nonce": "e"}, good[:-1]),
            Request("model", {**header, "nonce": "f"}, dense),
            Request("wish", {}),
            Request("sync", {"spec": {**spec, "rounds": "21"}}),
            Request("sync", {"spec": dict(spec)}),
        ],
    )
    assert answers == [
        "model",
        "replayed",
        "no-such-round",
        "malformed",
        "spec-mismatch",
        "checksum",
        "density",
        "unknown-request",
        "spec-mismatch",
        "sync",
    ]
    assert counted == {
        reason: answers.count(reason) for reason in answers if reason not in ("model", "sync")
    }


def hidden_layer() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5))


def test_bad_requests_with_masks_of_channels_are_refused_by_name_and_counted() -> None:
    """One unit more or fewer than announced, a message of another length, and a mask of single
    weights."""
    world = World(8, reliable, peers=2, method=DisPFL(structure="channels"), model=hidden_layer)
    codec, layout, asked = world.context.codec, world.context.layout, world.start["001"].next_mask
    assert isinstance(asked, ChannelMask)
    spec = federation_spec("test", world.context, layout, world.weights, 0.5)
    more, fewer = asked.units.copy(), asked.units.copy()
    more[np.flatnonzero(~more)[0]], fewer[np.flatnonzero(fewer)[0]] = True, False
    masks = [asked.layout.mask(flags) for flags in (more, fewer, np.zeros(16, np.bool_))]
    other_codec = Codec(
        Layout(layout.names, layout.shapes), [False] * 4, world.context.settings.wire
    )
    weights = other_codec.encode_request(WeightMask.pack(asked.unpack()))
    bodies = [
        *map(codec.encode_request, masks),
        codec.encode_request(asked)[:-1],
        weights,
        codec.encode_request(asked),
    ]
    header: dict[str, JSON] = {"spec": spec_digest(spec), "round": 0}
    requests = [
        Request("model", {**header, "nonce": str(n)}, body) for n, body in enumerate(bodies)
    ]
    answers, counted = send_all(world, requests)
    assert answers == ["density", "density", "density", "checksum", "length", "model"]
    assert counted == {"density": 3, "checksum": 1, "length": 1}


def test_all_requests_for_a_later_round_are_held_for_the_same_time_whatever_they_ask() -> None:
    """A request does not reveal how long its sender waits."""
    world = World(8, reliable, peers=2)
    spec = federation_spec("test", world.context, LAYOUT, world.weights, 0.5)
    header: dict[str, JSON] = {"spec": spec_digest(spec), "round": 3}
    body = world.context.codec.encode_request(world.start["001"].next_mask)
    holds: list[dict[str, JSON]] = [{}, {"hold": 0.0}]
    requests = [
        Request("model", {**header, "nonce": str(n), **hold}, body) for n, hold in enumerate(holds)
    ]
    world.network.timeout = HOLD_SECONDS / 2
    answers, _ = send_all(world, requests)
    assert answers == ["unreachable", "unreachable"]
    world = World(8, reliable, peers=2)
    world.network.timeout = 3 * HOLD_SECONDS
    answers, _ = send_all(world, requests)
    assert answers == ["wait", "wait"]


def test_a_choice_is_answered_by_our_own_and_a_spare_place_by_how_many_of_ours_agree() -> None:
    """000 chooses two others in round 0, of which nobody answers: all its spare places are free
    once it has given them up, and it holds requests in such places until then."""
    world = World(1, reliable, peers=12, method=Pairing(density=0.5))
    graph = exchange_graph(world.context, 0)
    choices = gossip_senders(world.context, graph, "000", 0, world.start["000"])
    is_chosen = "001" in choices and "001" not in graph["000"]
    spec = federation_spec("test", world.context, LAYOUT, world.weights, 0.5)
    header: dict[str, JSON] = {"spec": spec_digest(spec), "round": 0}
    body = world.context.codec.encode_request(world.start["001"].next_mask)
    world.network.timeout = 3 * HOLD_SECONDS
    requests = [
        Request("choice", {**header, "nonce": "0"}, b""),
        Request("model", {**header, "nonce": "1", "spare_place": "all", "needed": True}, body),
        Request("model", {**header, "nonce": "2", "spare_place": 1, "needed": False}, b""),
        Request("model", {**header, "nonce": "3", "spare_place": 1, "needed": True}, body),
    ]
    answers, counted = send_all(world, requests)
    assert answers == ["agreed" if is_chosen else "declined", "malformed", "declined", "wait"]
    assert counted == {"malformed": 1}


def test_resuming_the_same_response_too_often_is_refused_and_counted() -> None:
    world = World(8, reliable, peers=2)
    spec = federation_spec("test", world.context, LAYOUT, world.weights, 0.5)
    header: dict[str, JSON] = {"spec": spec_digest(spec), "round": 0, "nonce": "recorded"}
    body = world.context.codec.encode_request(world.start["001"].next_mask)
    answers, counted = send_all(
        world, [Request("model", header, body), *[Request("model", header, body, offset=1)] * 22]
    )
    assert answers == ["model"] * 21 + ["replayed"] * 2
    assert counted == {"replayed": 2}


def test_a_resumed_request_must_have_the_same_body() -> None:
    world = World(8, reliable, peers=2)
    spec = federation_spec("test", world.context, LAYOUT, world.weights, 0.5)
    header: dict[str, JSON] = {"spec": spec_digest(spec), "round": 0, "nonce": "recorded"}
    encode = world.context.codec.encode_request
    first, other = (encode(world.start[name].next_mask) for name in ("001", "000"))
    answers, counted = send_all(
        world, [Request("model", header, first), Request("model", header, other, offset=1)]
    )
    assert (answers, counted) == (["model", "replayed"], {"replayed": 1})


def test_requests_that_get_wait_are_not_limited() -> None:
    world = World(8, reliable, peers=2)
    spec = federation_spec("test", world.context, LAYOUT, world.weights, 0.5)
    header: dict[str, JSON] = {"spec": spec_digest(spec), "round": 3}
    body = world.context.codec.encode_request(world.start["001"].next_mask)
    answers, counted = send_all(
        world, [Request("model", {**header, "nonce": str(n)}, body) for n in range(21)]
    )
    assert (answers, counted) == (["wait"] * 21, {})


def test_a_spec_mismatch_names_the_entry_that_differs() -> None:
    world = World(9, reliable, peers=2)
    spec = federation_spec("test", world.context, LAYOUT, world.weights, 0.5)
    other = federation_spec("test", world.context.changed(rounds=21), LAYOUT, world.weights, 0.5)
    assert spec_difference(spec, other) == "rounds is 20 here and 21 there."


def test_a_spec_mismatch_names_the_structure_of_the_masks() -> None:
    worlds = [
        World(9, reliable, peers=2, method=DisPFL(structure=structure), model=hidden_layer)  # type: ignore[arg-type]
        for structure in ("weights", "channels")
    ]
    one, other = (
        federation_spec("test", w.context, w.context.layout, w.weights, 0.5) for w in worlds
    )
    assert one["layout"] != other["layout"]
    found = spec_difference(one, other, "at alice", "at carol") or ""
    assert found.endswith("method.structure is weights at alice and channels at carol.")


def test_a_repeat_offender_is_banned() -> None:
    world = World(10, reliable, peers=2)
    answers, counted = send_all(world, [Request("wish", {})] * 12)
    assert answers == ["unknown-request"] * 10 + ["banned"] * 2
    assert counted == {"unknown-request": 10, "banned": 2}


def in_round_0(world: World, requests: list[Request]) -> tuple[NodeContext, list[Response]]:
    """Send these requests of peer 001 to peer 000 in round 0; return its context and its
    responses."""

    async def story() -> tuple[NodeContext, list[Response]]:
        ctx, state = world.node("000").ctx, world.start["000"]
        ctx.published.publish(0, published_model(ctx.run, state), ["001"], silent=())
        return ctx, [await Server(ctx)("001", request) for request in requests]

    return run(story(), LIMIT)


def test_a_transfer_resumed_after_a_restart_of_the_sender_has_the_same_bytes() -> None:
    world = World(8, reliable, peers=2)
    spec = federation_spec("test", world.context, LAYOUT, world.weights, 0.5)
    body = world.context.codec.encode_request(world.start["001"].next_mask)
    request = Request("model", {"spec": spec_digest(spec), "round": 0, "nonce": "a"}, body)
    _, [begun] = in_round_0(world, [request])
    _, [resumed] = in_round_0(
        world, [replace(request, offset=7)]
    )  # a new process, without the nonces
    assert begun.header["status"] == "model"
    assert resumed == begun


def test_a_model_counts_as_fetched_once_it_is_sent_completely() -> None:
    world = World(8, reliable, peers=2)
    spec = federation_spec("test", world.context, LAYOUT, world.weights, 0.5)
    body = world.context.codec.encode_request(world.start["001"].next_mask)
    request = Request("model", {"spec": spec_digest(spec), "round": 0, "nonce": "a"}, body)
    ctx, [broken, whole] = in_round_0(world, [request, replace(request, offset=7)])
    neighbour = ctx.status.peers["001"]
    assert broken.body == whole.body
    assert ctx.published.pending() == {"001"}
    assert (neighbour.received_bytes, neighbour.sent_bytes) == (0, 0)
    whole.on_sent()
    assert ctx.published.pending() == set()
    assert (neighbour.received_bytes, neighbour.sent_bytes) == (len(body), len(whole.body))


def test_a_member_that_has_used_up_its_syncs_is_refused_until_the_next_round() -> None:
    world = World(8, instant, peers=2)
    world.members.joins["001"] = ROUNDS  # the node does not wait for it
    spec = federation_spec("test", world.context, LAYOUT, world.weights, 0.5)
    sync = Request("sync", {"spec": dict(spec), "current_round": 0})
    header: dict[str, JSON] = {"spec": spec_digest(spec), "round": 1, "nonce": "n"}
    later = Request(
        "model", header, world.context.codec.encode_request(world.start["000"].next_mask)
    )
    until_published = [later] * 5
    answers, _ = send_all(world, [*[sync] * (RequestGuard.MAX_SYNCS + 1), *until_published, sync])
    refused_at = RequestGuard.MAX_SYNCS
    assert answers[: refused_at + 1] == [*["sync"] * refused_at, "too-many-requests"]
    assert "model" in answers
    assert answers[-1] == "sync"


def test_a_member_that_has_used_up_its_bytes_is_refused_and_large_models_have_more() -> None:
    world = World(8, instant, peers=2)
    node, codec = world.node("000"), world.context.codec
    allowed = RequestGuard().max_bytes + 50 * 4 * world.context.layout.size
    assert node.ctx.guard.max_bytes == allowed
    spec = federation_spec("test", world.context, LAYOUT, world.weights, 0.5)
    body = codec.encode_request(world.start["001"].next_mask)
    header: dict[str, JSON] = {"spec": spec_digest(spec), "round": 0}
    requests = [Request("model", {**header, "nonce": str(n)}, body) for n in range(3)]
    size = codec.answer_size(world.start["000"].model, world.start["001"].next_mask)
    for unused, answered in ((1, 1), (len(body) + size + 1, 2), (10_000, 3)):
        world = World(8, instant, peers=2)
        answers, _ = send_all(world, requests, used=allowed - unused)
        assert answers == ["model"] * answered + ["too-many-requests"] * (3 - answered)


def test_a_spec_that_differs_at_length_is_short_in_the_status() -> None:
    context = World(8, instant, peers=2).node("000").ctx
    server = Server(context)

    async def story() -> None:
        own_spec = context.versions.latest.spec
        spec: dict[str, JSON] = {**own_spec, "seed": "\x1b[2J" + "9" * 60_000}
        with pytest.raises(Refused):
            await server("001", Request("sync", {"spec": spec, "current_round": 0}))

    run(story(), LIMIT)
    shown = context.status.peers["001"].spec_mismatch or ""
    assert "seed is" in shown
    assert len(shown) < 400
    assert shown.isprintable()
