"""Storage as sites have it: a bucket at a real server with faults, a mount that hangs, a disk that
is full."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from messages import refused
from object_storage import BUCKET, FaultyProxy, moto_server
from outbox_world import (
    LIMITS,
    RunningSite,
    eventually,
    folder_sites,
    introduce,
    make_site,
    meet,
    running,
    until,
)
from own_authority import authority_and_certificate
from small_disk import SmallDisk

from dispfl.errors import ConfigError
from dispfl.peer.deadlines import Deadlines
from dispfl.peer.local_federation import LOOPBACK
from dispfl.peer.membership.address import parse_outbox
from dispfl.peer.outbox import storage as outbox_storage
from dispfl.peer.outbox.head import HEAD
from dispfl.peer.outbox.storage import (
    FolderStorage,
    MissingError,
    StorageAccess,
    StorageError,
    open_storage,
)
from dispfl.peer.setup.local_setup import local_setup
from dispfl.peer.site import Site
from dispfl.peer.transport.bandwidth import Bandwidth
from dispfl.peer.transport.base import JSON, Request
from dispfl.peer.transport.http import Limits


def use_test_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


def test_sites_exchange_models_over_s3_whose_server_fails_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Busy, slow, broken off and denied, for both directions; nothing is listed."""

    async def scenario(server: str) -> None:
        async with FaultyProxy(server).running() as proxy:
            monkeypatch.setenv("AWS_ENDPOINT", proxy.endpoint)
            sites = [make_site(tmp_path, name, f"s3://{BUCKET}/{name}") for name in ("ann", "ben")]
            introduce(sites)
            async with running(sites[0]) as ann, running(sites[1]) as ben:
                await meet(ann, ben)
                for t, fault in enumerate(("503", "partial", "denied", "slow", "503")):
                    proxy.faults += [("GET", fault), ("PUT", fault), ("GET", fault)]
                    model = await ann.publish(t)
                    received = await ben.model("ann", t)
                    assert torch.equal(received.values, model.values)
                    proxy.faults.clear()
                assert ben.transport.route("ann") == f"outbox s3://{BUCKET}/ann"  # type: ignore[attr-defined]

                async def is_unchanged() -> bool:
                    await ben.members.sync(["ann"])
                    return f"GET /{BUCKET}/ann/{HEAD} 304" in proxy.requests

                await eventually(is_unchanged)
            assert not any(line.startswith(f"GET /{BUCKET} ") for line in proxy.requests)

    use_test_credentials(monkeypatch)
    with moto_server(tmp_path) as server:
        asyncio.run(scenario(server))


ENDS_WITH_OPEN_REQUESTS = """
import asyncio
import os
from dispfl.peer.outbox.storage import StorageAccess, open_storage
from dispfl.peer.transport.http import Limits

READERS = 40
ANSWER = b"HTTP/1.1 200 OK\\r\\nContent-Length: 1\\r\\nETag: a\\r\\n\\r\\nx"

async def main():
    waiting = []
    all_wait = asyncio.Event()

    async def take(reader, writer):
        await reader.readuntil(b"\\r\\n\\r\\n")
        waiting.append(writer)
        if len(waiting) == READERS:
            all_wait.set()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    os.environ["AWS_ENDPOINT"] = f"http://{host}:{port}"
    storage = open_storage("s3://hearts/alice", StorageAccess(Limits()))
    reads = [asyncio.create_task(storage.read(str(number), 10)) for number in range(READERS)]
    await all_wait.wait()
    for writer in waiting:
        writer.write(ANSWER)
    await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
    for writer in waiting:
        writer.close()
    for read in reads:
        read.cancel()
    await asyncio.gather(*reads, return_exceptions=True)

asyncio.run(main())
"""


def test_a_process_that_ends_while_it_reads_a_bucket_is_not_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a pause for obstore's threads about every fourth one was, by SIGABRT."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    for _ in range(12):
        program = [sys.executable, "-c", ENDS_WITH_OPEN_REQUESTS]
        ended = subprocess.run(program, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, ended.stderr


def test_a_mount_that_hangs_blocks_nobody_and_is_used_again_when_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    open_regular = outbox_storage.open_regular  # type: ignore[attr-defined]

    def hanging(path: Path) -> object:
        answers.wait()
        return open_regular(path)

    async def scenario() -> None:
        storage = FolderStorage(tmp_path, StorageAccess(Limits(stall_timeout=0.05)))
        await storage.write("object", b"content")
        monkeypatch.setattr(outbox_storage, "open_regular", hanging)
        for _ in range(2):
            with pytest.raises(StorageError, match="does not answer"):
                await storage.read("object", 100)
        assert threading.active_count() < 20
        answers.set()
        stored = await storage.read("object", 100)
        assert stored is not None
        assert stored.content == b"content"
        assert await storage.read("object", 100, stored.tag) is None
        with pytest.raises(StorageError, match="more than 3 bytes"):
            await storage.read("object", 3)
        with pytest.raises(MissingError):
            await storage.read("other", 100)

    asyncio.run(scenario())


def test_a_share_that_is_not_mounted_is_not_written_to(tmp_path: Path) -> None:
    async def scenario() -> None:
        storage = open_storage(str(tmp_path / "not-mounted" / "alice"), StorageAccess(LIMITS))
        with pytest.raises(StorageError, match="there is no folder"):
            await storage.write("object", b"content")

    asyncio.run(scenario())
    assert not (tmp_path / "not-mounted").exists()


def test_what_a_full_share_refuses_is_stored_once_it_has_space(
    tmp_path: Path, small_disk: SmallDisk
) -> None:
    outbox = small_disk.path / "ann"
    outbox.mkdir()
    (tmp_path / "ben").mkdir()
    sites = [
        make_site(tmp_path / "sites", "ann", str(outbox)),
        make_site(tmp_path / "sites", "ben", str(tmp_path / "ben")),
    ]
    introduce(sites)

    async def scenario() -> None:
        async with running(sites[0]) as ann, running(sites[1]) as ben:
            await meet(ann, ben)
            small_disk.fill()
            publishing = asyncio.create_task(ann.publish(0))
            await until(lambda: "full" in str((ann.site.status() or {}).get("outbox")))
            assert (await ben.request_model("ann", 0)).header["status"] == "wait"
            small_disk.free()
            model = await publishing
            assert torch.equal((await ben.model("ann", 0)).values, model.values)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "share",
        "../share",
        "/mnt/../etc",
        "s3://",
        "s3:///x",
        "http://x/y",
        "/a\nb",
        "/ä",
        "s3://b/x y",
    ],
)
def test_addresses_that_are_no_outbox_are_refused(text: str) -> None:
    with refused(ConfigError, key="outbox"):
        parse_outbox(text)


def test_a_reader_may_name_another_place_for_a_members_outbox(tmp_path: Path) -> None:
    """Ann says where the share is mounted at her site; Ben has mounted it elsewhere."""
    for name in ("ann", "ben"):
        (tmp_path / "here" / name).mkdir(parents=True)
    (tmp_path / "there").symlink_to(tmp_path / "here")
    ann = make_site(tmp_path, "ann", str(tmp_path / "here" / "ann"))
    elsewhere = str(tmp_path / "there" / "ann")
    ben = make_site(tmp_path, "ben", str(tmp_path / "here" / "ben"), outboxes={"ann": elsewhere})
    assert Site.open(ben.folder).info.outboxes == {"ann": elsewhere}
    introduce([ann, ben])

    async def scenario() -> None:
        async with running(ann) as sender, running(ben) as reader:
            await meet(sender, reader)
            model = await sender.publish(0)
            assert torch.equal((await reader.model("ann", 0)).values, model.values)
            assert reader.transport.route("ann") == f"outbox {elsewhere}"  # type: ignore[attr-defined]

    asyncio.run(scenario())


def test_an_outbox_needs_whole_models(tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    site = make_site(tmp_path, "ann", str(tmp_path / "share"), exchange="pull")

    async def scenario() -> None:
        async with running(site):
            pass

    with refused(ConfigError, key="outbox"):
        asyncio.run(scenario())


def test_the_newest_model_of_an_outbox_is_read_by_a_site_that_waits_for_nobody(
    tmp_path: Path,
) -> None:
    async def newest(bob: RunningSite, newer_than: int) -> tuple[object, object]:
        version = bob.ctx.versions.at(1)
        header: dict[str, JSON] = {
            "spec": version.digest,
            "spec_version": version.number,
            "round": 1,
            "newer_than": newer_than,
            "nonce": "n",
        }
        response = await bob.transport.request("alice", Request("model", header))
        return response.header["status"], response.header.get("round")

    async def scenario() -> None:
        sites = folder_sites(tmp_path, "alice", "bob")
        async with running(sites["alice"]) as alice, running(sites["bob"]) as bob:
            await meet(alice, bob)
            assert await newest(bob, -1) == ("wait", None)
            for t in (3, 5):
                await alice.publish(t)

            async def is_there() -> bool:
                return await newest(bob, 3) == ("model", 5)

            await eventually(is_there)
            assert await newest(bob, -1) == ("model", 5)
            assert await newest(bob, 5) == ("wait", None)

    asyncio.run(scenario())


def test_the_bytes_of_outboxes_are_counted(tmp_path: Path) -> None:
    """A model is stored once, and counts as sent to each receiver."""
    sites = folder_sites(tmp_path, "alice", "bob")

    def sockets(site: RunningSite) -> dict[str, int]:
        traffic: dict[str, int] = (site.site.status() or {})["sockets"]
        return traffic

    async def scenario() -> None:
        async with running(sites["alice"]) as alice, running(sites["bob"]) as bob:
            await meet(alice, bob)
            await alice.publish(0)
            await bob.model("alice", 0)
            model_bytes = alice.ctx.status.peers["nobody"].sent_bytes
            largest = max(path.stat().st_size for path in alice.outbox.iterdir())
            assert model_bytes == largest
            await until(lambda: sockets(alice)["sent"] > model_bytes)
            await until(lambda: sockets(bob)["received"] > model_bytes)

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_objects_are_stored_and_read_no_faster_than_the_sites_bandwidth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """6 MB at 4 MB a second take one and a half seconds, less the first turn.

    Whoever waits for a turn is not taken for a storage that does not answer.
    """
    content = bytes(range(250)) * 24_000
    limits = Limits(bandwidth="4 MB/s", stall_timeout=1.0, min_rate=1e9)

    async def scenario(place: str) -> None:
        clock = asyncio.get_running_loop().time
        access = StorageAccess(limits, Bandwidth(limits.bytes_per_second))
        storage = open_storage(place, access)
        began = clock()
        await storage.write("object", content)
        stored_at = clock()
        stored = await storage.read("object", len(content))
        read_at = clock()
        assert stored is not None
        assert stored.content == content
        assert stored_at - began > 1.4
        assert read_at - stored_at > 1.4
        assert (access.counter.sent, access.counter.received) == (len(content), len(content))

    if kind == "folder":
        asyncio.run(scenario(str(tmp_path)))
        return
    use_test_credentials(monkeypatch)
    with moto_server(tmp_path) as server:
        monkeypatch.setenv("AWS_ENDPOINT", server)
        asyncio.run(scenario(f"s3://{BUCKET}/alice"))


def test_a_bucket_behind_a_proxy_that_inspects_tls_is_trusted_by_the_sites_ca_bundle_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = authority_and_certificate(tmp_path)

    async def scenario() -> None:
        place = f"s3://{BUCKET}/alice"
        trusting = open_storage(place, StorageAccess(LIMITS, ca_bundle=str(authority)))
        await trusting.write("object", b"content")
        stored = await trusting.read("object", 100)
        assert stored is not None
        assert stored.content == b"content"
        with pytest.raises(StorageError) as caught:
            await open_storage(place, StorageAccess(LIMITS)).read("object", 100)
        assert "ca_bundle" in caught.value.advice

        monkeypatch.setenv("HTTPS_PROXY", f"http://{LOOPBACK}:1")  # where nothing listens
        bundle = StorageAccess(LIMITS, ca_bundle=str(authority))
        with pytest.raises(StorageError):
            await open_storage(place, bundle).read("object", 100)
        monkeypatch.setenv("NO_PROXY", LOOPBACK)
        assert await open_storage(place, bundle).read("object", 100)
        with pytest.raises(StorageError, match=r"deleted\.pem, cannot be read"):
            open_storage(place, StorageAccess(LIMITS, ca_bundle=str(tmp_path / "deleted.pem")))

    use_test_credentials(monkeypatch)
    with moto_server(tmp_path, tmp_path / "relay.pem", authority) as server:
        monkeypatch.setenv("AWS_ENDPOINT", server)
        asyncio.run(scenario())


def test_a_stored_model_that_still_arrives_at_the_deadline_is_waited_for_and_a_damaged_one_is_not(
    tmp_path: Path,
) -> None:
    """At 0.1 Mbit/s it takes seconds; without any other model the round waits for it."""
    sites = folder_sites(tmp_path, "alice", "bob")
    state = local_setup(sites["bob"]).initial_state()
    slowly = Limits(outbox_interval=0.01, bandwidth="0.1 Mbit/s")

    async def fetched(bob: RunningSite, t: int) -> bool:
        bob.client.deadlines.skip_startup()
        bob.client.deadlines.start(asyncio.get_running_loop().time())
        responses = await bob.client.fetch_models(t, state)
        return "alice" in responses.received

    async def scenario() -> None:
        async with running(sites["alice"]) as alice:
            async with running(sites["bob"]) as bob:
                await meet(alice, bob)
            for t in (0, 1):
                await alice.publish(t)
            deadlines = Deadlines(min=0.5, startup=100.0)
            async with running(sites["bob"], slowly, deadlines) as bob, asyncio.timeout(50):
                assert await fetched(bob, 0)
                for path in alice.outbox.iterdir():
                    if path.name != HEAD:
                        path.write_bytes(path.read_bytes()[:-1])
                assert not await fetched(bob, 1)

    asyncio.run(scenario())
