"""Storage that lies, drops, truncates, swaps and replays: everything is refused by name, nothing of
it is averaged, and once the storage behaves the model arrives."""

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from outbox_world import RunningSite, eventually, folder_sites, meet, running, until

from dispfl.errors import MessageError
from dispfl.peer.membership.encoding import to_text
from dispfl.peer.outbox import head as outbox_head
from dispfl.peer.outbox.head import HEAD, SignedHead
from dispfl.peer.outbox.sealing import SealingKey
from dispfl.peer.outbox.state import OutboxState
from dispfl.peer.outbox.writer import KEEP_ROUNDS
from dispfl.peer.site import IDENTITY, Site
from dispfl.peer.state.site_status import SiteStatus
from dispfl.peer.state.status_text import status_notes
from dispfl.peer.transport.base import Refused, Unreachable
from dispfl.wire.refusals import Refusal

Damage = Callable[[Path, Path], None]
"""Does something to alice's outbox; the other one is that of carol, another member."""


def objects(outbox: Path) -> list[Path]:
    return sorted(path for path in outbox.iterdir() if path.name != HEAD)


def truncate(outbox: Path, other: Path) -> None:
    for path in objects(outbox):
        path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(outbox: Path, other: Path) -> None:
    for path in objects(outbox):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def swap(outbox: Path, other: Path) -> None:
    for path in objects(outbox):
        path.write_bytes(objects(other)[0].read_bytes())


def grow(outbox: Path, other: Path) -> None:
    for path in objects(outbox):
        os.truncate(path, 10**12)


def pipes(outbox: Path, other: Path) -> None:
    """Files that would block a reader for ever."""
    for path in objects(outbox):
        path.unlink()
        os.mkfifo(path)


def drop(outbox: Path, other: Path) -> None:
    for path in objects(outbox):
        path.unlink()


def restore(outbox: Path, copy: Path) -> None:
    shutil.rmtree(outbox)
    shutil.copytree(copy, outbox)


def test_damaged_objects_are_refused_and_read_again(tmp_path: Path) -> None:
    """The object that was damaged is requested once, then it is as it was, and arrives."""
    damages = {
        truncate: Refusal.DAMAGED_OBJECT,
        flip_a_bit: Refusal.DAMAGED_OBJECT,
        swap: Refusal.DAMAGED_OBJECT,
        grow: Refusal.DAMAGED_OBJECT,
        pipes: Refusal.DAMAGED_OBJECT,
        drop: Refusal.MISSING_OBJECT,
    }
    sites = folder_sites(tmp_path, "alice", "bob", "carol")

    async def scenario() -> None:
        async with (
            running(sites["alice"]) as alice,
            running(sites["bob"]) as bob,
            running(sites["carol"]) as carol,
        ):
            await meet(alice, bob, carol)
            await carol.publish(0)
            model = await alice.publish(0)
            await bob.model("alice", 0)
            shutil.copytree(alice.outbox, tmp_path / "copy")
            for damage, reason in damages.items():
                damage(alice.outbox, carol.outbox)
                before = bob.refused("alice").get(reason, 0)
                response = await bob.request_model("alice", 0)
                assert response.header["status"] == "wait", damage
                assert not response.body
                assert bob.refused("alice")[reason] == before + 1, damage
                bob.ctx.note_response("alice", response.header)
                await bob.request_model("alice", 0)
                assert bob.refused("alice")[reason] == before + 2
                restore(alice.outbox, tmp_path / "copy")
                received = await bob.model("alice", 0)
                assert torch.equal(received.values, model.values)
            bob.ctx.guard.check("alice")  # not banned: the storage may be to blame
            assert [event for event, _ in bob.events].count("bad outbox") == len(damages)

    asyncio.run(scenario())


def test_bad_heads_are_refused_and_the_last_good_one_stays_in_force(tmp_path: Path) -> None:
    sites = folder_sites(tmp_path, "alice", "bob", "carol")

    async def scenario() -> None:
        async with (
            running(sites["alice"]) as alice,
            running(sites["bob"]) as bob,
            running(sites["carol"]) as carol,
        ):
            await meet(alice, bob, carol)
            await alice.publish(0)
            await bob.model("alice", 0)
            old_head = (alice.outbox / HEAD).read_bytes()
            await alice.publish(1)
            model = await bob.model("alice", 1)
            good_head = (alice.outbox / HEAD).read_bytes()
            carol_head = (carol.outbox / HEAD).read_bytes()

            forged = json.loads(good_head)
            forged["signature"] = json.loads(carol_head)["signature"]
            emptied = {**json.loads(good_head), "recipients": []}
            bad_heads = {
                carol_head: Refusal.WRONG_CERTIFICATE,
                old_head: Refusal.REPLAYED,
                good_head[:-20]: Refusal.MALFORMED,
                b"\xff\x00" * 100: Refusal.MALFORMED,
                b"[" * 100_000: Refusal.MALFORMED,
                json.dumps({**forged, "version": 2}).encode(): Refusal.VERSION,
                json.dumps(forged).encode(): Refusal.SIGNATURE,
                json.dumps(emptied).encode(): Refusal.SIGNATURE,
            }
            for bad_head, reason in bad_heads.items():
                (alice.outbox / HEAD).write_bytes(bad_head)
                before = bob.refused("alice").get(reason, 0)
                await until_refused(bob, reason, before)
                received = await bob.model("alice", 1)
                assert torch.equal(received.values, model.values)
            os.truncate(alice.outbox / HEAD, 10**12)
            assert torch.equal((await bob.model("alice", 1)).values, model.values)
            (alice.outbox / HEAD).unlink()
            await until_refused(bob, Refusal.MISSING_OBJECT, 0)

            newest = await alice.publish(2)
            assert torch.equal((await bob.model("alice", 2)).values, newest.values)
        # An old head is refused after a restart, too.
        (alice.outbox / HEAD).write_bytes(old_head)
        async with running(sites["bob"]) as bob:
            with pytest.raises(Unreachable, match="the storage shows an old one"):
                await bob.request_model("alice", 0)

    asyncio.run(scenario())


def test_a_head_that_cannot_be_read_any_more_is_refused_logged_once_and_shown(
    tmp_path: Path,
) -> None:
    """The site goes on with what it has read before."""
    sites = folder_sites(tmp_path, "alice", "bob")

    async def scenario() -> None:
        async with running(sites["alice"]) as alice, running(sites["bob"]) as bob:
            await meet(alice, bob)
            model = await alice.publish(0)
            await bob.model("alice", 0)
            head = alice.outbox / HEAD
            good_head = head.read_bytes()
            head.unlink()
            os.mkfifo(head)
            for count in range(1, 4):
                await until_refused(bob, Refusal.DAMAGED_OBJECT, count)
            assert torch.equal((await bob.model("alice", 0)).values, model.values)

            def note() -> str | None:
                notes = status_notes(SiteStatus.of(bob.site))
                return next((note for note in notes if note.startswith("Outbox of alice")), None)

            await until(lambda: note() is not None)
            assert "its outbox cannot be read" in str(note())

            head.unlink()
            head.write_bytes(good_head)

            async def is_read_again() -> bool:
                await bob.members.sync(["alice"])
                return bob.events[-1][0] == "outbox read again"

            await eventually(is_read_again)
            await until(lambda: note() is None)
            logged = [fields for event, fields in bob.events if event == "bad outbox"]
            assert [fields["reason"] for fields in logged] == [Refusal.DAMAGED_OBJECT]

    asyncio.run(scenario())


def test_a_killed_reader_remembers_the_newest_head_that_it_has_used(tmp_path: Path) -> None:
    """The copy of its folder is what a killed process leaves behind."""
    sites = folder_sites(tmp_path, "alice", "bob")
    killed = tmp_path / "killed"

    async def scenario() -> None:
        async with running(sites["alice"]) as alice, running(sites["bob"]) as bob:
            await meet(alice, bob)
            await alice.publish(0)
            await bob.model("alice", 0)
            old_head = (alice.outbox / HEAD).read_bytes()
            await alice.publish(1)
            await bob.model("alice", 1)
            shutil.copytree(bob.site.folder, killed)
        (alice.outbox / HEAD).write_bytes(old_head)
        async with running(Site.open(killed)) as bob:
            with pytest.raises(Unreachable, match="the storage shows an old one"):
                await bob.request_model("alice", 0)

    asyncio.run(scenario())


async def until_refused(reader: RunningSite, reason: str, before: int) -> None:
    """Send requests until the reader has looked at the present head."""

    async def attempt() -> bool:
        await reader.members.sync(["alice"])
        return reader.refused("alice").get(reason, 0) > before

    await eventually(attempt)


def test_nothing_is_readable_for_the_storage_or_for_a_revoked_member(tmp_path: Path) -> None:
    """The storage keeps for ever all that it ever saw."""
    sites = folder_sites(tmp_path, "alice", "bob", "carol")
    seen = tmp_path / "seen"

    async def scenario() -> None:
        async with running(sites["alice"]) as alice, running(sites["carol"]) as carol:
            async with running(sites["bob"]) as bob:
                await meet(alice, bob, carol)
                weights = []
                for t in range(3):
                    model = await alice.publish(t)
                    shutil.copytree(tmp_path / "share", seen / str(t))
                    assert torch.equal((await bob.model("alice", t)).values, model.values)
                    weights.append(model.values.numpy().tobytes())
            stored = b"".join(path.read_bytes() for path in seen.rglob("*") if path.is_file())
            assert len(stored) > 3 * sum(map(len, weights)) / 2
            for model_bytes in weights:
                for start in range(0, 64, 8):
                    assert model_bytes[start : start + 8] not in stored
            for text in ("bob", "carol"):  # for whom alice's head is
                head = json.loads((seen / "2" / "alice" / HEAD).read_bytes())
                assert text not in json.dumps({**head, "record": None})
            for secret in (b"current_round", b"smallest density", b"spec_version"):
                assert secret not in stored

            bob_key = SealingKey.load(sites["bob"].folder / IDENTITY)
            assert bob_key is not None
            assert SignedHead((alice.outbox / HEAD).read_bytes()).open(bob_key).models
            alice.site.members.revoke("bob")
            await alice.publish(3)
            with pytest.raises(MessageError, match="has not encrypted its outbox for this site"):
                SignedHead((alice.outbox / HEAD).read_bytes()).open(bob_key)
            await carol.model("alice", 3)
            with pytest.raises(Refused, match="is not accepted"):
                await alice.request_model("bob", 3)

    asyncio.run(scenario())


def test_serials_never_go_back_and_old_objects_are_deleted_after_a_crash_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = folder_sites(tmp_path, "alice", "bob")

    async def first_process() -> int:
        async with running(sites["alice"]) as alice, running(sites["bob"]) as bob:
            await meet(alice, bob)
            for t in range(KEEP_ROUNDS + 4):
                await alice.publish(t)
            await bob.model("alice", KEEP_ROUNDS)
            response = await bob.request_model("alice", 0)
            assert response.header["status"] == "stale"
            await until(lambda: len(objects(alice.outbox)) == KEEP_ROUNDS + 1)
            return OutboxState.load(alice.site.run_folder).serial

    async def second_process(serial: int) -> None:
        async with running(sites["alice"]) as alice, running(sites["bob"]) as bob:
            received = await bob.model("alice", KEEP_ROUNDS)  # stored by the first one
            assert received.values.any()
            await alice.publish(KEEP_ROUNDS + 4)
            await bob.model("alice", KEEP_ROUNDS + 4)
            await until(lambda: len(objects(alice.outbox)) == KEEP_ROUNDS + 1)
            assert OutboxState.load(alice.site.run_folder).serial > serial

    serial = asyncio.run(first_process())
    state = OutboxState.load(sites["alice"].run_folder)
    state.garbage.append("0" * 32)  # as if a process had been killed while it stored an object
    state.save()
    (tmp_path / "share" / "alice" / ("0" * 32)).write_bytes(b"half of a model")
    monkeypatch.setattr(time, "time", lambda: 1_000_000.0)  # the clock is set back
    asyncio.run(second_process(serial))


def test_a_site_that_was_reopened_stores_its_earlier_rounds_instead_of_the_later_ones(
    tmp_path: Path,
) -> None:
    """Eight rounds are kept: the lowest are dropped first, unless later ones are outdated."""
    sites = folder_sites(tmp_path, "alice", "bob")

    async def before_it_goes_back() -> None:
        async with running(sites["alice"]) as alice, running(sites["bob"]) as bob:
            await meet(alice, bob)
            for t in range(20, 20 + KEEP_ROUNDS):
                await alice.publish(t)

    async def afterwards() -> None:
        async with running(sites["alice"]) as alice, running(sites["bob"]) as bob:
            model = await alice.publish(10)
            assert torch.equal((await bob.model("alice", 10)).values, model.values)
            assert sorted(OutboxState.load(alice.site.run_folder).models) == [10]
            await until(lambda: len(objects(alice.outbox)) == 2)  # and the member list
            next_model = await alice.publish(11)
            assert torch.equal((await bob.model("alice", 11)).values, next_model.values)

    asyncio.run(before_it_goes_back())
    asyncio.run(afterwards())


def test_a_malicious_owner_cannot_name_files_or_huge_objects(tmp_path: Path) -> None:
    """What a member signs is checked as well: names are no paths, sizes have limits."""
    sites = folder_sites(tmp_path, "alice", "bob")
    key = to_text(bytes(32))
    good = {"name": "a" * 32, "size": 5, "digest": "", "key": key}
    content = {
        "serial": 1,
        "about": {"current_round": 0},
        "wakes_at": None,
        "joining": False,
        "models": [],
    }
    bad_refs = [
        {**good, "name": "../../../../etc/passwd"},
        {**good, "name": 7},
        {**good, "size": -1},
        {**good, "key": to_text(bytes(31))},
        {"name": "a" * 32},
        "text",
    ]
    bad_contents = [{**content, "sync": ref} for ref in bad_refs]
    bad_contents += [{**content, "sync": good, "wakes_at": time} for time in ("7", -1, True)]
    outbox_head.HeadContent.parse(json.dumps({**content, "sync": good}).encode())
    for bad_content in bad_contents:
        with pytest.raises((ValueError, TypeError, KeyError)):
            outbox_head.HeadContent.parse(json.dumps(bad_content).encode())

    async def scenario() -> None:
        async with running(sites["alice"]) as alice, running(sites["bob"]) as bob:
            await meet(alice, bob)
            await alice.publish(0)
            await bob.model("alice", 0)
            bob.transport.outboxes._max_model = 100  # type: ignore[attr-defined]
            response = await bob.request_model("alice", 0)
            assert response.header["status"] == "wait"
            assert bob.refused("alice")[Refusal.TOO_LONG] == 1

    asyncio.run(scenario())
