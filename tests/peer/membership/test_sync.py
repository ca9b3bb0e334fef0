"""Membership sync: records are transferred once, in any number, and accepted only if verified."""

import asyncio
import json
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from messages import refused

from dispfl.errors import MessageError
from dispfl.methods.dispfl import DisPFL
from dispfl.peer.client import Client
from dispfl.peer.deadlines import Deadlines
from dispfl.peer.local_federation import free_ports
from dispfl.peer.membership import sync
from dispfl.peer.membership.address import Address
from dispfl.peer.membership.identity import Identity, der
from dispfl.peer.membership.invite import Invite
from dispfl.peer.membership.list_file import to_bytes
from dispfl.peer.membership.member_list import Fork, Member, MemberList
from dispfl.peer.membership.records import MemberRecord
from dispfl.peer.membership.roster import Roster
from dispfl.peer.membership.sync import Offer, SiteMembership, SyncMessage, check_progress
from dispfl.peer.node_context import NodeContext
from dispfl.peer.run_site import CodecExecutor, open_node
from dispfl.peer.server import Server
from dispfl.peer.setup.local_setup import LocalSetup, local_setup
from dispfl.peer.setup.site_config import SiteConfig
from dispfl.peer.setup.spec_versions import SpecVersions
from dispfl.peer.site import Site, SiteInfo
from dispfl.peer.state.log import event_logger
from dispfl.peer.transport.base import JSON, Handler, Refused, Request, Response
from dispfl.peer.transport.guard import RequestGuard
from dispfl.round.exchange import check_request
from dispfl.testing.rounds import tiny_context

CONFIG = SiteConfig.from_values({"model": {"name": "mlp"}}).to_toml()
SOMEWHERE = Address("192.0.2.7", 7601)


@pytest.fixture
def two_sites(tmp_path: Path) -> tuple[Site, Site]:
    """Alice and bob, who have accepted each other."""
    alice, bob = (
        Site.create(tmp_path / name, SiteInfo(name=name, listen=f"127.0.0.1:{port}"), CONFIG)
        for name, port in zip(("alice", "bob"), free_ports(2), strict=True)
    )
    alice.members.accept(bob.invite())
    bob.members.accept(alice.invite())
    return alice, bob


def quiet(event: str, facts: object) -> None: ...


def sync_members(
    client: Site, server: Site, setup: Callable[[Site], LocalSetup] = local_setup
) -> list[str]:
    """Sync over real sockets; returns the events that the client logs."""
    events: list[str] = []

    async def scenario() -> None:
        async with (
            open_node(server, setup(server), Deadlines(), quiet) as (serving, _),
            open_node(
                client, setup(client), Deadlines(), lambda event, facts: events.append(event)
            ) as (node, _),
        ):
            await serving.client.transport.serve(Server(serving.ctx))
            await node.client.members.sync([server.name])

    asyncio.run(scenario())
    return events


def test_four_hundred_records_are_transferred_in_pages(two_sites: tuple[Site, Site]) -> None:
    """They have about 350 kB: two pages."""
    alice, bob = two_sites
    others = [Identity.make(f"site-{k:03d}") for k in range(400)]
    for site in two_sites:  # written directly, because 400 updates of the file are slow
        accepted = [
            *site.members.accepted(),
            *(Member(one.name, SOMEWHERE, one.certificate) for one in others),
        ]
        site.members.path.write_bytes(
            to_bytes(MemberList(members={member.name: member for member in accepted}))
        )
    records = [
        MemberRecord.sign(other, "dispfl", SOMEWHERE, 0.25, 3, 1).to_json() for other in others
    ]
    assert len(alice.members.merge(records).learned) == 400
    assert sum(len(json.dumps(record)) for record in records) > 1.5 * sync.PAGE_BYTES
    assert sync_members(bob, alice) == []
    learned = [bob.members.get(other.name) for other in others]
    assert all(
        member is not None and (member.density, member.first_round) == (0.25, 3)
        for member in learned
    )
    assert len(bob.members.participants(2)) == 2
    assert len(bob.members.participants(3)) == 402


def test_sync_transfers_records_in_both_directions(two_sites: tuple[Site, Site]) -> None:
    alice, bob = two_sites
    carol = Identity.make("carol")
    for site in two_sites:
        site.members.accept(Invite("dispfl", "carol", SOMEWHERE, carol.certificate))
    alice.members.merge([MemberRecord.sign(carol, "dispfl", SOMEWHERE, 0.25, 3, 1).to_json()])
    assert sync_members(alice, bob) == []  # own records, both ways
    for site, other in ((alice, "bob"), (bob, "alice")):
        member = site.members.get(other)
        assert member is not None
        assert member.density is not None
    assert sync_members(bob, alice) == []  # a client fetches what it lacks
    for site, other in ((alice, "bob"), (bob, "alice")):
        for name in (other, "carol"):
            member = site.members.get(name)
            assert member is not None
            assert member.density is not None


def test_removal_from_a_roster_is_revocation_at_the_next_sync(
    two_sites: tuple[Site, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alice gets the second version from an administrator, bob from alice, in parts."""
    monkeypatch.setattr(sync, "PAGE_BYTES", 500)
    alice, bob = two_sites
    carol, ann = Identity.make("carol"), Ed25519PrivateKey.generate()
    invites = [
        alice.invite(),
        bob.invite(),
        Invite("dispfl", "carol", SOMEWHERE, carol.certificate),
    ]
    empty = Roster("dispfl", 1, 1, {"ann": ann.public_key().public_bytes_raw()})
    first = empty.with_members(invites).signed_by(ann)
    second = first.without_members(["carol"]).signed_by(ann)
    assert len(second.text) > 2 * sync.PAGE_BYTES
    for site in two_sites:
        site.members.accept_roster(first, first.fingerprint)
    alice.members.accept_roster(second)
    assert bob.members.names() == ["alice", "carol"]
    events = sync_members(bob, alice)
    assert bob.members.names() == ["alice"]
    assert bob.members.file.current().roster == second
    assert "sync failed" not in events
    fork = first.without_members(["alice"]).signed_by(ann)
    alice.members.file.update(lambda members: replace(members, roster=fork), "a test")
    sync_members(bob, alice)
    assert (bob.members.names(), bob.members.file.current().forks) == (
        ["alice"],
        (Fork(2, fork.digest),),
    )


class RecordingTransport:
    """A transport that calls a handler directly and stores the number of records in each body."""

    def __init__(self, handler: Handler, sender: str) -> None:
        self.handler, self.sender = handler, sender
        self.records: list[int] = []

    async def request(self, peer: str, request: Request) -> Response:
        response = await self.handler(self.sender, request)
        self.records += [
            len(SyncMessage.read(body).records) for body in (request.body, response.body)
        ]
        return response

    async def serve(self, handler: Handler) -> None: ...

    async def close(self) -> None: ...


def node_context(
    name: str, setup: LocalSetup, membership: SiteMembership, **settings: Any
) -> NodeContext:
    versions = SpecVersions.single(setup.run, setup.spec)
    return NodeContext(name, setup.run, setup.codec(), versions, membership, **settings)


def test_a_record_is_transferred_once(two_sites: tuple[Site, Site]) -> None:
    contexts = {}
    for site in two_sites:
        setup = local_setup(site)
        site.members.announce(site.identity, site.info.address, setup.density, 0)
        membership = SiteMembership(site, setup.run.method, setup.layout, setup.density)
        contexts[site.name] = (setup, membership)

    async def scenario() -> list[int]:
        alice, bob = (
            node_context(name, setup, membership) for name, (setup, membership) in contexts.items()
        )
        transport = RecordingTransport(Server(alice), "bob")
        client = Client(bob, transport, Deadlines(), random.Random(0))
        await client.members.sync(["alice"])
        await client.members.sync(["alice"])
        return transport.records

    # Both send their own record in a greeting; then both have the same, and nothing else is sent.
    assert asyncio.run(scenario()) == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'{"known":[]}',
        b'{"known":{},"after":"","until":"~"}',
        b'{"records":{}}',
        b'{"roster":[1]}',
        b'{"roster_from":-1}',
        b'{"roster_from":null}',
        b'{"size":true}',
        b"[" * 100_000,
    ],
)
def test_an_invalid_sync_body_is_refused_and_counted(
    two_sites: tuple[Site, Site], body: bytes
) -> None:
    alice, _ = two_sites
    setup = local_setup(alice)
    membership = SiteMembership(alice, setup.run.method, setup.layout, setup.density)

    async def scenario() -> NodeContext:
        ctx = node_context("alice", setup, membership)
        with refused(Refused):
            await Server(ctx)(
                "bob", Request("sync", {"spec": dict(setup.spec), "current_round": 0}, body)
            )
        return ctx

    assert dict(asyncio.run(scenario()).guard.refused["bob"]) == {"malformed": 1}


def test_a_density_that_the_network_cannot_have_ends_no_node_but_no_request_of_it_is_accepted(
    two_sites: tuple[Site, Site],
) -> None:
    """Bob announces a density that leaves layers without channels."""
    alice, bob = two_sites
    context = tiny_context(DisPFL(structure="channels"))
    record = bob.members.announce(bob.identity, bob.info.address, 1e-6, 0)
    alice.members.merge([record.to_json()])
    membership = SiteMembership(alice, context.method, context.layout, 0.5)
    announced = membership.kept_counts("bob")
    assert announced is not None
    for density in (0.2, 0.5, 1.0):
        mask = context.method.start(
            context.first_weights, context.layout, density, seed=0, peer="bob"
        ).next_mask
        with refused(MessageError):
            check_request(mask, announced, "bob", context.layout)


def greeting(records: list[JSON]) -> bytes:
    """A greeting with any number of records; an honest one has one."""
    return json.dumps({"state": "", "roster": None, "records": records}).encode()


def receive(alice: Site, *syncs: list[JSON]) -> NodeContext:
    """Alice's node context after bob has sent her these records."""
    setup = local_setup(alice)
    membership = SiteMembership(alice, setup.run.method, setup.layout, setup.density)

    async def scenario() -> NodeContext:
        ctx = node_context("alice", setup, membership)
        for records in syncs:
            request = Request(
                "sync", {"spec": dict(setup.spec), "current_round": 0}, greeting(records)
            )
            response = await Server(ctx)("bob", request)
            assert SyncMessage.read(response.body).state == Offer(alice.members.records()).state
        return ctx

    return asyncio.run(scenario())


def test_a_modified_record_is_not_accepted_and_counts_as_an_offence_of_its_sender(
    two_sites: tuple[Site, Site],
) -> None:
    alice, bob = two_sites
    record = json.loads(
        json.dumps(MemberRecord.sign(bob.identity, "dispfl", SOMEWHERE, 0.25, 3, 1).to_json())
    )
    record["record"]["density"] = 1.0
    ctx = receive(alice, [record, record, {"no": "record"}])
    member = alice.members.get("bob")
    assert member is not None
    assert member.density is None
    assert ctx.guard.refused == {
        "bob": {"signature": 1, "malformed": 1}
    }  # per sync, not per record


def test_relaying_a_record_that_only_we_refuse_is_not_an_offence(
    two_sites: tuple[Site, Site],
) -> None:
    """A record older than ours, and one with a key that the sender has accepted for a name that we
    know."""
    alice, _ = two_sites
    carol = Identity.make("carol")
    alice.members.accept(Invite("dispfl", "carol", SOMEWHERE, carol.certificate))
    newer, older = (
        MemberRecord.sign(carol, "dispfl", SOMEWHERE, 0.25, 3, serial).to_json()
        for serial in (2, 1)
    )
    another = MemberRecord.sign(Identity.make("carol"), "dispfl", SOMEWHERE, 0.5, 0, 9).to_json()
    ctx = receive(alice, [newer], *[[older, another]] * 20)
    assert not ctx.guard.refused
    member = alice.members.get("carol")
    assert member is not None
    assert (member.serial, member.density) == (2, 0.25)


def test_records_above_the_limit_are_ignored(
    two_sites: tuple[Site, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, _ = two_sites
    monkeypatch.setattr(RequestGuard, "MAX_RECORDS", 3)
    records = [
        MemberRecord.sign(Identity.make(f"site-{k}"), "dispfl", SOMEWHERE, 0.25, 3, 1).to_json()
        for k in range(4)
    ]
    ctx = receive(alice, records[:2], records)
    assert [record.name for record in alice.members.known()] == [
        "site-0",
        "site-1",
    ]  # the third was site-0 again
    assert ctx.guard.refused == {"bob": {"too-many-records": 1}}


def test_only_an_accepted_member_is_identified_and_a_revoked_one_is_told_so(
    two_sites: tuple[Site, Site],
) -> None:
    (alice, bob), carol = two_sites, Identity.make("carol")
    setup = local_setup(alice)
    membership = SiteMembership(alice, setup.run.method, setup.layout, setup.density)
    assert membership.identify(der(bob.identity.certificate), ()) == "bob"
    assert membership.identify(der(carol.certificate), ()) is None
    alice.members.accept(Invite("dispfl", "carol", SOMEWHERE, carol.certificate), confirmed=False)
    assert membership.identify(der(carol.certificate), ()) is None  # pending
    alice.members.revoke("bob")
    with refused(Refused):
        membership.identify(der(bob.identity.certificate), ())


def test_syncs_are_verified_in_a_thread_while_the_event_loop_looks_up_members(
    two_sites: tuple[Site, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob = two_sites
    setup = local_setup(alice)
    membership = SiteMembership(alice, setup.run.method, setup.layout, setup.density)
    records = [
        MemberRecord.sign(Identity.make(f"site-{k}"), "dispfl", SOMEWHERE, 0.25, 3, 1).to_json()
        for k in range(50)
    ]
    certificate, threads = der(bob.identity.certificate), []
    for owner in (SyncMessage, MemberRecord):

        def recorded(found: Any, read: Callable[[Any], Any] = owner.read) -> Any:
            threads.append(threading.current_thread().name)
            return read(found)

        monkeypatch.setattr(owner, "read", recorded)

    async def scenario() -> int:
        executor, lookups = CodecExecutor(), 0
        ctx = node_context("alice", setup, membership, executor=executor)
        request = Request("sync", {"spec": dict(setup.spec), "current_round": 0}, greeting(records))
        syncs = [asyncio.create_task(Server(ctx)("bob", request)) for _ in range(3)]
        while not all(task.done() for task in syncs):
            assert membership.identify(certificate, ()) == "bob"
            lookups += 1
            await asyncio.sleep(0)
        executor.close()
        assert all(task.result().header["spec"] == setup.spec for task in syncs)
        return lookups

    assert asyncio.run(scenario()) > 3
    assert len(threads) == 3 + 50  # no signature is verified twice
    assert all(name.startswith("messages") for name in threads)
    assert len(alice.members.known()) == 50


@pytest.fixture(scope="module")
def two_thousand() -> list[JSON]:
    """Records as long as real ones, with other fingerprints: pages do not depend on their
    validity."""
    found: Any = MemberRecord.sign(Identity.make("bob"), "dispfl", SOMEWHERE, 0.25, 3, 1).to_json()
    return [
        {**found, "record": {**found["record"], "fingerprint": f"{k:0>64}"}} for k in range(2000)
    ]


@pytest.mark.parametrize("has", [0, 1, 1500, 2000])
def test_pages_of_records_have_a_limit_and_bring_everything_that_is_missing(
    two_thousand: list[JSON], has: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "PAGE_DIGESTS", 300)
    offer, held = Offer(two_thousand), two_thousand[:has]
    after: str | None = ""
    pages = 0
    while after is not None:
        request = Offer(held).request_after(after)
        answer = offer.answer(SyncMessage.read(request))
        assert max(len(request), len(answer)) <= sync.MAX_BODY_BYTES
        page = SyncMessage.read(answer)
        held = held + page.records  # no record comes twice
        check_progress(page, after)
        after, pages = page.next, pages + 1
    assert sorted(map(str, held)) == sorted(map(str, two_thousand))
    assert pages <= 2000 * 950 / sync.PAGE_BYTES + 2000 / 300 + 2


def test_the_messages_of_a_sync_do_not_grow_with_the_number_of_members(
    two_thousand: list[JSON],
) -> None:
    assert len(Offer(two_thousand).greeting()) == len(Offer(two_thousand[:1]).greeting())
    assert Offer(two_thousand).state != Offer(two_thousand[:-1]).state
    assert Offer(two_thousand).state == Offer(two_thousand[::-1]).state


def test_an_offer_encodes_only_the_records_that_the_last_one_did_not_have(
    two_thousand: list[JSON], monkeypatch: pytest.MonkeyPatch
) -> None:
    last, encoded, encode = Offer(two_thousand[:-1]), list[JSON](), sync._encode

    def counted(record: JSON) -> tuple[str, str]:
        encoded.append(record)
        return encode(record)

    monkeypatch.setattr(sync, "_encode", counted)
    offer = Offer(two_thousand, before=last)
    assert encoded == two_thousand[-1:]
    assert offer.state == Offer(two_thousand).state


@pytest.mark.parametrize("response", [b'{"records":[],"next":""}', b'{"records":[],"next":"~"}'])
def test_a_page_that_does_not_lead_on_is_refused(response: bytes) -> None:
    with refused(MessageError):
        check_progress(SyncMessage.read(response), "")


def test_a_body_above_the_limit_is_refused_before_it_is_read(
    two_sites: tuple[Site, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob = two_sites
    monkeypatch.setattr(sync, "MAX_BODY_BYTES", 50)
    lines: list[object] = []

    async def scenario() -> None:
        async with (
            open_node(alice, local_setup(alice), Deadlines(), event_logger("alice")) as (there, _),
            open_node(
                bob, local_setup(bob), Deadlines(), lambda event, facts: lines.append(facts)
            ) as (ctx, _),
        ):
            await there.client.transport.serve(Server(there.ctx))
            await ctx.client.members.sync(["alice"])

    asyncio.run(scenario())
    assert "at most 50 bytes" in str(lines) or "at most 50 are allowed" in str(lines)
