"""What `dispfl peer doctor` and `dispfl peer status` say of outboxes."""

import asyncio
from pathlib import Path

import pytest
from outbox_world import LIMITS, folder_sites, make_site, meet, running

from dispfl.peer.doctor.findings import Level
from dispfl.peer.doctor.network import check_network
from dispfl.peer.doctor.outboxes import check_outbox
from dispfl.peer.outbox.state import STATE
from dispfl.peer.outbox.storage import StorageAccess
from dispfl.peer.peer import Peer
from dispfl.peer.setup.local_setup import local_setup
from dispfl.peer.state.status_text import outbox_text


def test_the_own_outbox_is_written_read_and_left_as_it_was(tmp_path: Path) -> None:
    outbox = tmp_path / "share"
    finding = asyncio.run(check_outbox(str(outbox), StorageAccess(LIMITS)))
    assert finding.level == Level.FAILURE
    assert "there is no folder" in finding.text
    assert "Mount the share" in finding.advice
    outbox.mkdir()
    finding = asyncio.run(check_outbox(str(outbox), StorageAccess(LIMITS)))
    assert finding.level == Level.OK
    assert not list(outbox.iterdir())


def test_a_bucket_that_cannot_be_used_says_what_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-site")
    finding = asyncio.run(check_outbox("s3://hearts/alice", StorageAccess(LIMITS)))
    assert finding.level == Level.FAILURE
    assert "nothing can be stored" in finding.text
    assert "secret-of-the-site" not in finding.text
    assert "environment" in finding.advice


def test_the_doctor_reads_members_outboxes_and_says_how_they_are_reached(tmp_path: Path) -> None:
    sites = folder_sites(tmp_path, "alice", "bob")
    stranger = make_site(tmp_path, "carol", str(tmp_path / "nowhere"))
    sites["alice"].members.accept(stranger.invite())

    async def run_both() -> None:
        async with running(sites["alice"]) as alice, running(sites["bob"]) as bob:
            await meet(alice, bob)
            await bob.publish(0)

    asyncio.run(run_both())
    site = sites["alice"]
    state_of_the_node = (site.run_folder / STATE).read_bytes()
    setup = local_setup(site)
    findings = list(check_network(site, setup, site.config(), {}, running=False))
    by_topic = {finding.topic: finding for finding in findings}
    assert by_topic["outbox"].level == Level.WARNING
    assert "carol has announced no key yet" in by_topic["outbox"].text
    assert by_topic["port"].text == "none is needed: others reach this site by its outbox"
    assert by_topic["bob"].text == (
        f"reached by outbox {tmp_path}/share/bob, and it finds our models in our outbox"
    )
    assert by_topic["carol"].level == Level.WARNING
    assert "has stored nothing in its outbox yet" in by_topic["carol"].text
    assert (site.run_folder / STATE).read_bytes() == state_of_the_node
    assert Peer(site).status().members[0].address == f"outbox {tmp_path}/share/bob"


def test_the_status_says_what_is_stored_and_what_is_not() -> None:
    stored = {"place": "s3://hearts/alice", "rounds": [3, 4], "problem": None}
    assert outbox_text(stored) == "Outbox s3://hearts/alice: it has the models of rounds 3 to 4."
    failing = {"place": "/mnt/share/alice", "rounds": [], "problem": "there is no folder"}
    assert outbox_text(failing) == (
        "Outbox /mnt/share/alice: it has no model yet; the newest state is NOT stored: there is no"
        " folder."
    )
