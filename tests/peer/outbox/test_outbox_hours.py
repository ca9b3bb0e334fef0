"""Sites with hours that share only storage: what a sleeping site has stored is read meanwhile."""

import asyncio
import datetime
import time
from pathlib import Path

import pytest
import torch
from outbox_world import RunningSite, eventually, folder_sites, meet, running

from dispfl.peer.outbox import writer as outbox_writer
from dispfl.peer.outbox.state import OutboxState
from dispfl.peer.schedule import DailyHours, Schedule

HOUR = 3600.0


def asleep_for_two_hours() -> Schedule:
    """A site whose hours begin in two hours, and end an hour later."""
    now = datetime.datetime.now(datetime.UTC).replace(second=0, microsecond=0)
    opens = (now + datetime.timedelta(hours=2)).time()
    closes = (now + datetime.timedelta(hours=3)).time()
    return Schedule(DailyHours(opens, closes, datetime.UTC))


def test_a_sleeping_site_stores_one_head_and_readers_know_until_when_it_sleeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a head for each change of the seconds that are left there would be ten a second."""
    monkeypatch.setattr(outbox_writer, "WATCH_SECONDS", 0.01)
    sites = folder_sites(tmp_path, "alice", "bob")

    async def asleep(bob: RunningSite, t: int) -> dict[str, object] | None:
        response = await bob.request_model("alice", t)
        return dict(response.header) if response.header["status"] == "asleep" else None

    def alice_serial() -> int:
        return OutboxState.load(sites["alice"].run_folder).serial

    async def scenario() -> None:
        async with running(sites["alice"]) as alice, running(sites["bob"]) as bob:
            await meet(alice, bob)
            model = await alice.publish(0)
            assert (await bob.request_model("alice", 1)).header["status"] == "wait"

            alice.ctx.schedule = asleep_for_two_hours()
            header = await eventually(lambda: asleep(bob, 1))
            assert HOUR < header["asleep_for"] <= 2 * HOUR  # type: ignore[operator]
            assert header["hours"] == alice.ctx.about_us()["hours"]

            async def is_unchanged() -> bool:
                serial = alice_serial()
                await asyncio.sleep(0.3)
                return alice_serial() == serial

            await eventually(is_unchanged)

            # Its stored model is read nevertheless, and a sync does not wake it up.
            peer = bob.ctx.status.peers["alice"]
            now = asyncio.get_running_loop().time
            await asleep(bob, 1)
            await bob.members.sync(["alice"])
            assert peer.is_asleep(now())
            assert torch.equal((await bob.model("alice", 0)).values, model.values)
            await bob.members.sync(["alice"])
            assert not peer.is_asleep(now())

            alice.ctx.schedule = Schedule()
            next_model = await alice.publish(1)
            assert torch.equal((await bob.model("alice", 1)).values, next_model.values)

    asyncio.run(scenario())


def test_a_site_that_should_be_awake_by_now_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = folder_sites(tmp_path, "alice", "bob")

    async def scenario() -> None:
        async with running(sites["alice"]) as alice, running(sites["bob"]) as bob:
            await meet(alice, bob)
            alice.ctx.schedule = asleep_for_two_hours()
            await alice.publish(0)
            await bob.model("alice", 0)
            assert (await bob.request_model("alice", 1)).header["status"] == "asleep"
            true_time = time.time
            monkeypatch.setattr(time, "time", lambda: true_time() + 2 * HOUR)
            assert (await bob.request_model("alice", 1)).header["status"] == "wait"

    asyncio.run(scenario())
