"""Greetings: what members say of themselves travels once, in any number, and only as far as it is verified."""

import asyncio
import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dispfl.peer import greeting, heads
from dispfl.peer.address import Address
from dispfl.peer.answers import Answers
from dispfl.peer.asks import Asks
from dispfl.peer.book import Book, Member
from dispfl.peer.certificates import der
from dispfl.peer.context import Context
from dispfl.peer.door import Door
from dispfl.peer.fellows import Fellows
from dispfl.peer.greeting import News, body_of, digest_of_record
from dispfl.peer.identity import Identity
from dispfl.peer.invite import Invite
from dispfl.peer.learning import Aside
from dispfl.peer.log import teller
from dispfl.peer.pace import Pace
from dispfl.peer.plan import Plan
from dispfl.peer.records import Record
from dispfl.peer.running import prepared
from dispfl.peer.share import Share, share_of
from dispfl.peer.site import Site, Whereabouts
from dispfl.peer.transport import JSON, Ask, Handler, Refused, Reply
from dispfl.up import free_ports

PLAN = Plan(model={"name": "mlp"}).to_toml()
SOMEWHERE = Address("192.0.2.7", 7601)


@pytest.fixture
def two_sites(tmp_path: Path) -> tuple[Site, Site]:
    """Alice and bob, who have accepted each other."""
    alice, bob = (
        Site.create(tmp_path / name, Whereabouts(name=name, listen=f"127.0.0.1:{port}"), PLAN)
        for name, port in zip(("alice", "bob"), free_ports(2), strict=True)
    )
    alice.members.accept(bob.invite())
    bob.members.accept(alice.invite())
    return alice, bob


def quiet(event: str, facts: object) -> None: ...


def greet(asking: Site, answering: Site, share: Callable[[Site], Share] = share_of) -> list[str]:
    """One greets the other over real sockets; the events that the asking one told of."""
    told: list[str] = []

    async def story() -> None:
        async with (
            prepared(answering, share(answering), Pace(), quiet) as (there, _),
            prepared(asking, share(asking), Pace(), lambda event, facts: told.append(event)) as (here, _),
        ):
            await there.asks.transport.serve(Answers(there.here))
            await here.asks.greet([answering.name])

    asyncio.run(story())
    return told


def test_four_hundred_members_records_travel_in_one_greeting(two_sites: tuple[Site, Site]) -> None:
    """They are some 350 kB, far more than a head may have."""
    alice, bob = two_sites
    others = [Identity.make(f"site-{k:03d}") for k in range(400)]
    for site in two_sites:  # all at once, for a change of the file takes a moment
        accepted = [*site.members.accepted(), *(Member(one.name, SOMEWHERE, one.certificate) for one in others)]
        site.members.path.write_bytes(Book(members={member.name: member for member in accepted}).to_bytes())
    said = [Record.sign(other, "dispfl", SOMEWHERE, 0.25, 3, 1).to_json() for other in others]
    assert len(alice.members.merge(said).learned) == 400
    assert len(body_of(said, said)) > 5 * heads.LIMIT
    assert greet(bob, alice) == []
    learned = [bob.members.get(other.name) for other in others]
    assert all(member is not None and (member.density, member.first_round) == (0.25, 3) for member in learned)
    assert len(bob.members.roster(2)) == 2
    assert len(bob.members.roster(3)) == 402


def test_each_learns_what_the_other_knows_whoever_greets(two_sites: tuple[Site, Site]) -> None:
    alice, bob = two_sites
    carol = Identity.make("carol")
    for site in two_sites:
        site.members.accept(Invite("dispfl", "carol", SOMEWHERE, carol.certificate))
    alice.members.merge([Record.sign(carol, "dispfl", SOMEWHERE, 0.25, 3, 1).to_json()])
    assert greet(alice, bob) == []  # it is the asker who knows more
    for site, other in ((alice, "bob"), (bob, "alice")):
        for name in (other, "carol"):
            member = site.members.get(name)
            assert member is not None
            assert member.density is not None


class Overheard:
    """A transport that leads straight to a handler, and remembers how many records each body had."""

    def __init__(self, handler: Handler, sender: str) -> None:
        self.handler, self.sender = handler, sender
        self.records: list[int] = []

    async def ask(self, peer: str, ask: Ask) -> Reply:
        reply = await self.handler(self.sender, ask)
        self.records += [len(News.read(body).records) for body in (ask.body, reply.body)]
        return reply

    async def serve(self, handler: Handler) -> None: ...

    async def close(self) -> None: ...


def test_a_record_travels_once(two_sites: tuple[Site, Site]) -> None:
    contexts = {}
    for site in two_sites:
        share = share_of(site)
        site.members.announce(site.identity, site.where.address, share.density, 0)
        fellows = Fellows(site, share.setting.method, share.layout, share.density)
        contexts[site.name] = (share, fellows)

    async def story() -> list[int]:
        alice, bob = (
            Context(name, share.setting, share.codec(), share.terms, fellows)
            for name, (share, fellows) in contexts.items()
        )
        line = Overheard(Answers(alice), "bob")
        asks = Asks(bob, line, Pace(), random.Random(0))
        await asks.greet(["alice"])
        await asks.greet(["alice"])
        return line.records

    # Bob names none and gets alice's; he brings his own, for she did not name it; then there is nothing new.
    assert asyncio.run(story()) == [0, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b"{}", b'{"knows":[]}', b'{"knows":{},"records":[]}', b'{"knows":[],"records":{}}', b"[" * 100_000],
)
def test_a_body_that_is_no_greeting_is_refused_and_counted(two_sites: tuple[Site, Site], body: bytes) -> None:
    alice, _ = two_sites
    share = share_of(alice)
    fellows = Fellows(alice, share.setting.method, share.layout, share.density)

    async def story() -> Context:
        here = Context("alice", share.setting, share.codec(), share.terms, fellows)
        with pytest.raises(Refused, match="A greeting's body cannot be read"):
            await Answers(here)("bob", Ask("hello", {"terms": dict(share.terms), "at": 0}, body))
        return here

    assert dict(asyncio.run(story()).door.refused["bob"]) == {"malformed": 1}


def learned_by(alice: Site, *greetings: list[JSON]) -> Context:
    """Alice, after bob has brought her these records."""
    share = share_of(alice)
    fellows = Fellows(alice, share.setting.method, share.layout, share.density)

    async def story() -> Context:
        here = Context("alice", share.setting, share.codec(), share.terms, fellows)
        for records in greetings:
            ask = Ask("hello", {"terms": dict(share.terms), "at": 0}, body_of(records, records))
            reply = await Answers(here)("bob", ask)
            assert News.read(reply.body).knows == {digest_of_record(record) for record in alice.members.records()}
        return here

    return asyncio.run(story())


def test_a_record_that_somebody_changed_on_the_way_is_not_believed_and_is_an_offence_of_who_brings_it(
    two_sites: tuple[Site, Site],
) -> None:
    alice, bob = two_sites
    said = json.loads(json.dumps(Record.sign(bob.identity, "dispfl", SOMEWHERE, 0.25, 3, 1).to_json()))
    said["record"]["density"] = 1.0
    here = learned_by(alice, [said, said, {"no": "record"}])
    member = alice.members.get("bob")
    assert member is not None
    assert member.density is None
    assert here.door.refused == {"bob": {"signature": 1, "malformed": 1}}  # by greeting, not by record


def test_who_passes_on_what_only_we_do_not_believe_is_not_blamed(two_sites: tuple[Site, Site]) -> None:
    """A record that is older than ours, and one of a key that the other has accepted under a name that we know."""
    alice, _ = two_sites
    carol = Identity.make("carol")
    alice.members.accept(Invite("dispfl", "carol", SOMEWHERE, carol.certificate))
    newer, older = (Record.sign(carol, "dispfl", SOMEWHERE, 0.25, 3, serial).to_json() for serial in (2, 1))
    another = Record.sign(Identity.make("carol"), "dispfl", SOMEWHERE, 0.5, 0, 9).to_json()
    here = learned_by(alice, [newer], *[[older, another]] * 20)
    assert not here.door.refused
    member = alice.members.get("carol")
    assert member is not None
    assert (member.serial, member.density) == (2, 0.25)


def test_of_too_many_records_the_rest_is_not_looked_at(
    two_sites: tuple[Site, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, _ = two_sites
    monkeypatch.setattr(Door, "RECORDS", 3)
    strangers = [Record.sign(Identity.make(f"site-{k}"), "dispfl", SOMEWHERE, 0.25, 3, 1).to_json() for k in range(4)]
    here = learned_by(alice, strangers[:2], strangers)
    assert [record.name for record in alice.members.known()] == ["site-0", "site-1"]  # one was brought twice
    assert here.door.refused == {"bob": {"too-much-news": 1}}


def test_greetings_are_read_and_verified_aside_while_the_event_loop_looks_members_up(
    two_sites: tuple[Site, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob = two_sites
    share = share_of(alice)
    fellows = Fellows(alice, share.setting.method, share.layout, share.density)
    strangers = [Record.sign(Identity.make(f"site-{k}"), "dispfl", SOMEWHERE, 0.25, 3, 1).to_json() for k in range(50)]
    certificate, threads = der(bob.identity.certificate), []
    for owner in (News, Record):

        def noted(found: Any, read: Callable[[Any], Any] = owner.read) -> Any:
            threads.append(threading.current_thread().name)
            return read(found)

        monkeypatch.setattr(owner, "read", noted)

    async def story() -> int:
        aside, looks = Aside(), 0
        here = Context("alice", share.setting, share.codec(), share.terms, fellows, aside)
        ask = Ask("hello", {"terms": dict(share.terms), "at": 0}, body_of([], strangers))
        greetings = [asyncio.create_task(Answers(here)("bob", ask)) for _ in range(3)]
        while not all(greeting.done() for greeting in greetings):
            assert fellows.who(certificate, ()) == "bob"
            looks += 1
            await asyncio.sleep(0)
        aside.close()
        assert all(greeting.result().head["terms"] == share.terms for greeting in greetings)
        return looks

    assert asyncio.run(story()) > 3
    assert len(threads) == 3 + 50  # no signature is verified twice
    assert all(name.startswith("messages") for name in threads)
    assert len(alice.members.known()) == 50


def test_a_body_beyond_the_limit_is_refused_before_it_is_read(
    two_sites: tuple[Site, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob = two_sites
    monkeypatch.setattr(greeting, "LIMIT", 50)
    lines: list[object] = []

    async def story() -> None:
        async with (
            prepared(alice, share_of(alice), Pace(), teller("alice")) as (there, _),
            prepared(bob, share_of(bob), Pace(), lambda event, facts: lines.append(facts)) as (here, _),
        ):
            await there.asks.transport.serve(Answers(there.here))
            await here.asks.greet(["alice"])

    asyncio.run(story())
    assert "at most 50 bytes" in str(lines) or "at most 50 are allowed" in str(lines)
