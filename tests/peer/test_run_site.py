"""The node of a site with a real network and disk: start, events while it runs, and end."""

import asyncio
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from messages import refused
from small_disk import SmallDisk
from tables import small_table

from dispfl.core.metric import Metric
from dispfl.core.task import Task
from dispfl.errors import ConfigError, RunError
from dispfl.peer import run_site
from dispfl.peer.deadlines import Deadlines
from dispfl.peer.doctor.examine import check_run
from dispfl.peer.doctor.findings import Level
from dispfl.peer.local_federation import free_ports
from dispfl.peer.membership.address import Address
from dispfl.peer.membership.records import MemberRecord
from dispfl.peer.membership.sync import SiteMembership
from dispfl.peer.node import Node
from dispfl.peer.run_site import open_node, run_node
from dispfl.peer.setup.local_setup import local_setup
from dispfl.peer.setup.site_config import SiteConfig
from dispfl.peer.site import STATUS, Site, SiteInfo
from dispfl.peer.site_network import SiteNetwork
from dispfl.peer.state.status import ServiceManager
from dispfl.peer.state.store import SavingThread, report_of, rounds_of
from dispfl.peer.transport.base import Request, Response, Unreachable
from dispfl.peer.transport.guard import RequestGuard
from dispfl.peer.transport.http import Limits
from dispfl.round.context import StepResult

PATIENCE = 60.0
"""Seconds after which a test fails; generous for a loaded machine."""
PROGRAM = "from dispfl.cli import main; main()"


@pytest.fixture
def make_site(tmp_path: Path) -> Callable[..., Site]:
    """`make_site("alice")`: create a site with its own table and many rounds."""

    def make(name: str, parent: Path = tmp_path) -> Site:
        data = {"path": "table.csv", "label": "y"}
        config = SiteConfig.from_values(
            {"rounds": 100_000, "model": {"name": "mlp"}, "data": data}
        ).to_toml()
        [port] = free_ports(1)
        site = Site.create(parent / name, SiteInfo(name=name, listen=f"127.0.0.1:{port}"), config)
        (site.folder / "table.csv").write_text(small_table(8))
        return site

    return make


class EventRecorder(list[tuple[str, Mapping[str, object]]]):
    """Records the logged events."""

    def __call__(self, event: str, fields: Mapping[str, object]) -> None:
        self.append((event, fields))

    @property
    def events(self) -> list[str]:
        """The names of the events."""
        return [event for event, _ in self]

    async def until(self, event: str, times: int = 1) -> Mapping[str, object]:
        """Wait for an event, or for a number of them, and return the last one's fields."""
        async with asyncio.timeout(PATIENCE):
            while self.events.count(event) < times:
                await asyncio.sleep(0.02)
        return dict(self)[event]


def test_sigterm_is_logged_and_sets_the_status_to_stopped(make_site: Callable[[str], Site]) -> None:
    alice, recorder = make_site("alice"), EventRecorder()

    async def story() -> None:
        running = asyncio.create_task(run_node(alice, local_setup(alice), Deadlines(), recorder))
        await recorder.until("round")
        assert alice.is_running()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait([running], timeout=PATIENCE)
        assert running.cancelled()

    asyncio.run(story())
    assert recorder.events[0] == "starting"
    assert recorder[-1][0] == "stopped"
    assert recorder[-1][1]["by"] == ["SIGTERM"]
    status = alice.status()
    assert status is not None
    assert status["state"] == "stopped"
    assert not alice.is_running()


def test_a_second_ctrl_c_does_not_break_off_the_end_of_a_node(
    make_site: Callable[[str], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, recorder = make_site("alice"), EventRecorder()

    def long_step(*arguments: Any) -> StepResult:
        recorder("training", {})
        for _ in range(1000):
            arguments[-1]()  # between two batches
            time.sleep(0.01)
        raise AssertionError("it was not stopped")

    async def story() -> None:
        running = asyncio.create_task(run_node(alice, local_setup(alice), Deadlines(), recorder))
        await recorder.until("training")
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0)
        await asyncio.wait([running], timeout=PATIENCE)
        assert running.cancelled()

    monkeypatch.setattr(run_site, "peer_step", long_step)
    asyncio.run(story())
    assert recorder.events[-1] == "stopped"
    assert (alice.status() or {})["state"] == "stopped"
    assert not alice.is_running()


def test_a_score_that_is_not_a_number_ends_no_node_and_its_rounds_are_saved(
    make_site: Callable[[str], Site],
) -> None:
    """As an AUC of test data with a single class."""
    alice, recorder = make_site("alice"), EventRecorder()
    undefined = Metric(lambda outputs, labels: math.nan, name="auc")
    setup = local_setup(alice)
    setup = replace(
        setup, run=replace(setup.run.changed(rounds=2), task=Task(metrics=(undefined,)))
    )
    asyncio.run(run_node(alice, setup, Deadlines(), recorder))
    assert recorder.events.count("round") == 2
    assert "lost" not in recorder.events
    assert [entry["report"]["scores"] for entry in rounds_of(alice.run_folder).values()] == [
        {"auc": None}
    ] * 2
    assert report_of(rounds_of(alice.run_folder)[1])[0].score is None
    assert (alice.status() or {})["score"] is None


def test_a_port_in_use_is_reported_and_the_node_does_not_start(
    make_site: Callable[[str], Site],
) -> None:
    alice, recorder = make_site("alice"), EventRecorder()
    where = alice.info.listen_address
    assert where is not None
    sentence = f"Cannot listen on {where} (address already in use); choose another address."
    with (
        socket.create_server(tuple(where)),
        pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"),
    ):
        asyncio.run(run_node(alice, local_setup(alice), Deadlines(), recorder))
    assert "starting" not in recorder.events


def test_an_unwritable_status_hides_no_error_and_keeps_no_lock(
    make_site: Callable[[str], Site],
) -> None:
    alice, recorder = make_site("alice"), EventRecorder()

    async def story() -> None:
        async with open_node(alice, local_setup(alice), Deadlines(), recorder):
            (alice.run_folder / STATUS).mkdir()  # a folder cannot be replaced by a file
            raise RunError("The first error.")

    with refused(RunError):
        asyncio.run(story())
    assert not alice.is_running()
    assert "status.json could not be written" in str(dict(recorder)["problem"]["detail"])


def test_a_run_is_not_resumed_with_another_density(make_site: Callable[[str], Site]) -> None:
    """The site's masks keep the share that it started with, and the others would refuse its
    requests."""
    alice = make_site("alice")
    file = alice.folder / "site.toml"

    async def start() -> None:
        site = Site.open(alice.folder)
        async with open_node(site, local_setup(site), Deadlines(), EventRecorder()):
            pass

    file.write_text("smallest_density = 0.2\n" + file.read_text())
    for _ in range(2):
        asyncio.run(start())
    file.write_text(file.read_text().replace("\ndensity = 0.5", "\ndensity = 0.3"))
    with refused(RunError):
        asyncio.run(start())
    site = Site.open(alice.folder)
    found = check_run(site, local_setup(site), {}, running=False)
    assert found.level == Level.FAILURE
    assert found.text.startswith("it was started with method.density=0.5, and now it is 0.3")


def test_a_site_announces_itself_with_a_newer_record_at_every_start(
    make_site: Callable[[str], Site],
) -> None:
    alice = make_site("alice")

    async def start() -> int:
        async with open_node(alice, local_setup(alice), Deadlines(), EventRecorder()):
            own = alice.members.file.current().own
            assert own is not None
            return own.serial

    first = asyncio.run(start())
    assert asyncio.run(start()) > first


def test_a_running_site_logs_changes_of_its_members(make_site: Callable[[str], Site]) -> None:
    alice, bob, recorder = make_site("alice"), make_site("bob"), EventRecorder()

    async def story() -> None:
        async with open_node(alice, local_setup(alice), Deadlines(), recorder):
            other = Site.open(alice.folder)  # as in another process
            await asyncio.sleep(0.1)
            other.members.accept(bob.invite())
            assert await recorder.until("accepted") == {"peer": "bob", "address": bob.info.listen}
            bob.rotate()
            other.members.accept(Site.open(bob.folder).invite())
            assert await recorder.until("rotated") == {
                "peer": "bob",
                "before": bob.identity.fingerprint,
            }
            other.members.revoke("bob")
            assert await recorder.until("revoked") == {"peer": "bob"}

    asyncio.run(story())
    assert recorder.events == ["accepted", "rotated", "revoked"]


@asynccontextmanager
async def transfer_to_bob(
    alice: Site, bob: Site, recorder: EventRecorder
) -> AsyncIterator[tuple[Node, Node, "asyncio.Task[Response]"]]:
    """Run alice's node, whose log is recorded, and bob's, who has requested a model that alice
    never sends."""
    alice.members.accept(bob.invite())
    bob.members.accept(alice.invite())
    asked = asyncio.Event()

    async def never(sender: str, request: Request) -> Response:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with (
        open_node(alice, local_setup(alice), Deadlines(), recorder) as (node, _),
        open_node(bob, local_setup(bob), Deadlines(), EventRecorder()) as (other, _),
    ):
        await node.client.transport.serve(never)
        transfer = asyncio.create_task(
            other.client.transport.request("alice", Request("model", {}))
        )
        await asked.wait()
        yield node, other, transfer


def test_a_revoked_members_transfer_is_cut_and_its_certificate_no_longer_passes_tls(
    make_site: Callable[[str], Site],
) -> None:
    alice, bob, recorder = make_site("alice"), make_site("bob"), EventRecorder()

    async def story() -> None:
        async with transfer_to_bob(alice, bob, recorder) as (node, other, transfer):
            Site.open(alice.folder).members.revoke("bob")  # as in another process
            async with asyncio.timeout(PATIENCE):
                with refused(Unreachable):
                    await transfer
                with refused(Unreachable):
                    await other.client.transport.request("alice", Request("model", {}))
            assert node.ctx.guard.refused["unknown"]["unknown-certificate"] == 1
            assert "bob" not in node.ctx.guard.refused  # no request of it was read

    asyncio.run(story())


def test_a_revoked_members_transfer_is_cut_also_where_no_tls_context_can_be_made(
    make_site: Callable[[str], Site], small_disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob, recorder = make_site("alice"), make_site("bob"), EventRecorder()

    async def story() -> None:
        async with transfer_to_bob(alice, bob, recorder) as (_, _, transfer):
            monkeypatch.setattr(
                tempfile, "tempdir", str(small_disk.path)
            )  # a context's key passes through it
            small_disk.fill()
            Site.open(alice.folder).members.revoke("bob")  # as in another process
            assert "No space left" in str((await recorder.until("problem"))["detail"])
            done, _ = await asyncio.wait([transfer], timeout=5)
            assert done == {transfer}
            with refused(Unreachable):
                await transfer
            assert recorder.events.count("revoked") == 1

    asyncio.run(story())


def test_members_that_a_full_disk_kept_from_being_trusted_are_trusted_when_there_is_space_again(
    make_site: Callable[[str], Site], small_disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob, eve = map(make_site, ("alice", "bob", "eve"))
    alice.members.accept(bob.invite())
    setup = local_setup(alice)
    membership = SiteMembership(alice, setup.run.method, setup.layout, setup.density)

    async def story() -> list[str]:
        network = SiteNetwork(alice, setup, membership, Limits(), RequestGuard())
        alice.members.revoke("bob")
        alice.members.accept(eve.invite())
        monkeypatch.setattr(
            tempfile, "tempdir", str(small_disk.path)
        )  # a context's key passes through it
        small_disk.fill()
        with pytest.raises(OSError, match="No space left"):
            await network.follow_members()
        small_disk.free()
        await network.follow_members()
        return [entry["subject"][0][0][1] for entry in network.server_tls.get_ca_certs()]

    assert asyncio.run(story()) == ["eve"]


def test_a_new_address_of_a_member_is_logged_and_not_used_outside_the_allowed_networks(
    make_site: Callable[[str], Site],
) -> None:
    alice, bob, recorder = make_site("alice"), make_site("bob"), EventRecorder()
    config = alice.folder / "site.toml"
    config.write_text(
        config.read_text().replace("allow_networks = []", 'allow_networks = ["127.0.0.2/32"]')
    )
    alice = Site.open(alice.folder)
    alice.members.accept(bob.invite())
    record = MemberRecord.sign(bob.identity, "dispfl", Address("localhost", 9), 0.5, 0, 1).to_json()

    async def story() -> None:
        async with open_node(alice, local_setup(alice), Deadlines(), recorder) as (node, _):
            await node.ctx.compute(lambda: node.ctx.membership.merge([record]))
            changed = {"peer": "bob", "address": "localhost:9", "before": bob.info.listen}
            assert await recorder.until("address changed") == changed
            with refused(Unreachable):
                await node.client.transport.request("bob", Request("sync", {}))

    asyncio.run(story())


async def stop(running: "asyncio.Task[object]") -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait([running], timeout=PATIENCE)
    assert running.cancelled()


def test_a_running_node_waits_for_the_disk_on_other_threads_and_not_for_its_status(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, recorder, synced = make_site("alice"), EventRecorder(), list[tuple[str, str]]()
    fsync = os.fsync

    def recording(descriptor: int) -> None:
        synced.append(
            (
                threading.current_thread().name.partition("_")[0],
                str(Path(f"/proc/self/fd/{descriptor}").readlink()),
            )
        )
        fsync(descriptor)

    async def story() -> None:
        running = asyncio.create_task(run_node(alice, local_setup(alice), Deadlines(), recorder))
        await recorder.until("round")
        monkeypatch.setattr(os, "fsync", recording)
        await asyncio.sleep(1.1)  # two updates of the status
        await recorder.until("round", recorder.events.count("round") + 2)
        monkeypatch.undo()
        await stop(running)

    asyncio.run(story())
    assert any("checkpoints/round-" in path for _, path in synced)
    assert {thread for thread, _ in synced} == {"saving"}
    assert not [path for _, path in synced if STATUS in path]


def test_a_full_disk_does_not_stop_a_node_and_it_saves_again_when_there_is_space(
    make_site: Callable[..., Site], small_disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SavingThread, "RETRY_SECONDS", 0.1)
    alice, recorder = make_site("alice", small_disk.path), EventRecorder()

    async def status_until(saved: bool) -> Mapping[str, object]:
        async with asyncio.timeout(PATIENCE):
            while ((found := alice.status() or {}).get("save_problem") is None) != saved:
                await asyncio.sleep(0.02)
        return found

    async def story() -> None:
        running = asyncio.create_task(run_node(alice, local_setup(alice), Deadlines(), recorder))
        await recorder.until("round", 2)
        await status_until(saved=True)
        small_disk.fill()
        await recorder.until("not saved")
        await recorder.until("round", recorder.events.count("round") + 3)  # it continues
        found = await status_until(saved=False)
        assert isinstance(found["unsaved_rounds"], int)
        assert found["unsaved_rounds"] > 0
        assert found["save_problem"] == f"No space left on device in {alice.run_folder}"
        small_disk.free()
        await recorder.until("saved")
        assert (await status_until(saved=True))["unsaved_rounds"] == 0
        await stop(running)

    asyncio.run(story())
    saved = sorted(rounds_of(alice.run_folder))
    assert saved == list(range(len(saved)))  # no line was lost
    assert len(saved) >= 5


def received(service: socket.socket) -> list[str]:
    """The lines of the next message."""
    return service.recv(4096).decode().split("\n")


def test_a_service_is_told_when_the_node_is_ready_alive_and_stopping(
    make_site: Callable[..., Site],
) -> None:
    """A real process, and a real socket in the place of systemd's."""
    alice = make_site("alice")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as service:
        service.bind(str(alice.folder / "notify"))
        service.settimeout(PATIENCE)
        environment = os.environ | {
            "NOTIFY_SOCKET": str(alice.folder / "notify"),
            "WATCHDOG_USEC": "400000",
        }
        command = [sys.executable, "-c", PROGRAM, "peer", "run", str(alice.folder), "--alone"]
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
            try:
                lines = received(service)
                while "READY=1" not in lines:
                    assert "STOPPING=1" not in lines
                    lines = received(service)
                where = alice.info.listen_address
                assert where is not None
                socket.create_connection(where, PATIENCE).close()  # it is ready indeed
                seen = [line for _ in range(12) for line in received(service)]  # less than 3 s
                process.terminate()
                while "STOPPING=1" not in received(service):
                    pass
                process.communicate(timeout=PATIENCE)
            finally:
                process.kill()
    assert process.returncode == 0
    assert seen.count("WATCHDOG=1") == 12
    assert any(
        re.fullmatch(r"STATUS=Round \d+ of 100000, (fetching|training)", line) for line in seen
    )


def test_the_service_manager_is_asked_by_the_environment_for_this_process_alone() -> None:
    environment = {
        "NOTIFY_SOCKET": "@dispfl",
        "WATCHDOG_USEC": "30000000",
        "WATCHDOG_PID": str(os.getpid()),
        "A": "b",
    }
    assert ServiceManager.of_process(environment) == ServiceManager("\0dispfl", 30.0)
    assert environment == {"A": "b"}  # not for children
    assert ServiceManager.of_process(
        {"NOTIFY_SOCKET": "/run/s", "WATCHDOG_USEC": "9", "WATCHDOG_PID": "1"}
    ) == (ServiceManager("/run/s"))
    assert ServiceManager.of_process({}) == ServiceManager()
    ServiceManager().send("READY=1")  # to nobody
    ServiceManager("/nowhere/at/all").send("READY=1")


def test_the_status_is_updated_also_while_the_members_cannot_be_read(
    make_site: Callable[..., Site],
) -> None:
    alice, recorder = make_site("alice"), EventRecorder()

    async def status_after(moment: float) -> None:
        async with asyncio.timeout(PATIENCE):
            while (alice.status() or {"updated": 0.0})["updated"] <= moment:
                await asyncio.sleep(0.02)

    async def story() -> None:
        async with open_node(alice, local_setup(alice), Deadlines(), recorder):
            await status_after(0.0)
            alice.members.path.write_bytes(b"{")
            await recorder.until("problem")
            await status_after(time.time())

    asyncio.run(story())
