"""Sites that train and exchange models at certain hours of the day only."""

import asyncio
import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from messages import check_wording, refused
from simulated_world import ROUNDS, World, reliable, unreliable

from dispfl.errors import ConfigError
from dispfl.peer.doctor.network import Answers, check_hours
from dispfl.peer.node import Node
from dispfl.peer.schedule import (
    ScheduleSettings,
    announced_hours,
    announced_sleep,
    overlap,
)
from dispfl.peer.setup.site_config import SiteConfig
from dispfl.testing.virtual_time import run

HOUR = 3600.0
DAYS = 3 * 24 * HOUR
EVENING = datetime.datetime(2026, 11, 18, 23, 58, tzinfo=datetime.UTC).timestamp()
"""Two minutes before midnight; a round takes about three seconds."""
AT_MIDNIGHT = "23:59-00:01"
NOT_AT_MIDNIGHT = "00:01-23:59"


def sleeps(world: World, name: str, hours: str, clock_ahead: float = 0.0) -> None:
    """Give a peer hours, by a clock that is right or not."""

    def now() -> float:
        return EVENING + clock_ahead + asyncio.get_running_loop().time()

    world.schedules[name] = ScheduleSettings(hours=hours, timezone="UTC").start(now)


def times(world: World, name: str, event: str) -> list[float]:
    return [at for at, peer, logged, _ in world.trace if (peer, logged) == (name, event)]


def test_the_others_go_on_without_a_site_that_sleeps_and_it_catches_up() -> None:
    """000 sleeps around midnight, 001 is awake only then, and the network loses messages."""
    world = World(1, unreliable, peers=6, rounds=ROUNDS)
    sleeps(world, "000", NOT_AT_MIDNIGHT)
    sleeps(world, "001", AT_MIDNIGHT)
    nodes: dict[str, Node] = {}
    make = world.node

    def noted(name: str) -> Node:
        nodes[name] = make(name)
        return nodes[name]

    world.node = noted  # type: ignore[method-assign]

    async def story() -> None:
        living = {name: asyncio.create_task(world.live(name)) for name in world.names}
        await asyncio.gather(*(living[name] for name in world.names if name != "001"))
        assert nodes["001"].ctx.status.state == "sleeping"
        living["001"].cancel()
        await asyncio.wait([living["001"]])

    run(story(), DAYS)
    first = world.stores["000"]
    second = world.stores["001"]
    assert times(world, "000", "sleeping")[0] == pytest.approx(60, abs=5)  # a step is finished
    assert times(world, "000", "awake")[0] == pytest.approx(180, abs=1)
    assert first.last is not None
    assert first.last[0] == ROUNDS
    assert len(set(range(ROUNDS)) - set(first.rounds)) > 4  # the federation's rounds meanwhile
    assert times(world, "001", "awake")[0] == pytest.approx(60, abs=1)
    assert min(second.rounds) > 1  # it joined late
    assert not any("001" in received for received in first.received.values())
    for name in world.names[2:]:
        assert world.stores[name].rounds == list(range(ROUNDS))
        assert times(world, name, "round")[0] < 60  # the first round did not wait for 001
        missed = [t for t, names in world.stores[name].missed.items() if "001" in names]
        peer = nodes[name].ctx.status.peers["001"]
        assert peer.missed < len(missed) / 2  # what it slept through does not count


def test_sites_with_the_same_hours_and_different_clocks_train_together_over_two_nights() -> None:
    world = World(2, reliable, peers=4, rounds=60)
    for name, clock_ahead in zip(world.names, (0.0, 4.0, -5.0, 1.0), strict=True):
        sleeps(world, name, AT_MIDNIGHT, clock_ahead)

    async def story() -> None:
        await asyncio.gather(*(world.live(name) for name in world.names))

    run(story(), DAYS)
    for name in world.names:
        store = world.stores[name]
        assert store.last is not None
        assert store.last[0] == 60
        assert len(store.rounds) > 55  # all but those between the first and the last to fall asleep
        assert sum(len(missed) for missed in store.missed.values()) <= 6
        assert len(times(world, name, "sleeping")) == 2
    events = {event for _, _, event, _ in world.trace}
    assert not events & {"unreachable", "late", "slow"}


def test_sites_whose_hours_never_overlap_wait_and_doctor_says_so() -> None:
    world = World(3, reliable, peers=2, rounds=20)
    sleeps(world, "000", AT_MIDNIGHT)
    sleeps(world, "001", NOT_AT_MIDNIGHT)

    async def story() -> None:
        living = [asyncio.create_task(world.live(name)) for name in world.names]
        await asyncio.wait(living, timeout=HOUR)
        for task in living:
            task.cancel()
        await asyncio.wait(living)

    run(story(), DAYS)
    assert not world.stores["000"].rounds
    assert not world.stores["001"].rounds
    text = "all members that answer sleep outside of their hours"
    assert any(text in facts for _, _, event, facts in world.trace if event == "waiting")

    config = SiteConfig.from_values({"schedule": {"hours": AT_MIDNIGHT, "timezone": "UTC"}})
    answers = Answers(hours={"bob": [1, 1439], "carol": [0, 60], "dave": None})
    [finding] = check_hours(config, answers)
    check_wording(f"{finding.level} {finding.text} {finding.advice}")
    assert [finding.level for finding in check_hours(config, Answers())] == ["ok"]
    assert not list(check_hours(SiteConfig(), answers))


def test_hours_follow_the_clocks_of_their_time_zone() -> None:
    berlin = ScheduleSettings(hours="20:00-06:00", timezone="Europe/Berlin")

    def at(month: int, day: int, hour: int, minute: int = 0) -> float:
        zone = ZoneInfo("Europe/Berlin")
        return datetime.datetime(2026, month, day, hour, minute, tzinfo=zone).timestamp()

    def awake(month: int, day: int, hour: int, minute: int = 0) -> float | None:
        schedule = berlin.start(lambda: at(month, day, hour, minute))
        return None if schedule.asleep_for() else schedule.awake_for()

    assert awake(6, 1, 19, 59) is None
    assert awake(6, 1, 20, 0) == 10 * HOUR
    assert awake(6, 2, 0, 0) == 6 * HOUR
    assert awake(6, 2, 6, 0) is None
    assert awake(3, 28, 20, 0) == 9 * HOUR  # the night in which clocks are set forward
    assert awake(10, 24, 20, 0) == 11 * HOUR
    assert berlin.start(lambda: at(6, 1, 12)).announcement() == {
        "hours": [18 * 60, 4 * 60],
        "asleep_for": 8 * HOUR,
    }
    assert berlin.start(lambda: at(12, 1, 22)).announcement() == {"hours": [19 * 60, 5 * 60]}
    skipped = ScheduleSettings(hours="02:30-03:15", timezone="Europe/Berlin")
    night = skipped.start(lambda: at(3, 29, 1))
    assert night.asleep_for() == at(3, 30, 2, 30) - at(3, 29, 1)


def test_what_others_say_of_their_hours_is_checked() -> None:
    for claim in (None, "1", True, -5, 1e12, float("nan"), [60]):
        assert announced_sleep(claim) == 0
    assert announced_sleep(60.5) == 60.5
    wrong_hours: list[Any] = [None, 7, [1], [0, 1440], [True, 2], ["0", 1], [1, 2, 3], [-1, 5]]
    for claimed in wrong_hours:
        assert announced_hours(claimed) is None
    assert announced_hours([1200, 360]) == [1200, 360]
    assert overlap([1200, 360], [300, 400]) == 60
    assert overlap([1200, 360], [360, 1200]) == 0
    assert overlap(None, [360, 1200]) == 840


def test_impossible_hours_are_refused() -> None:
    for hours in ("20-6", "25:00-06:00", "20:00-20:00", ""):
        with refused(ConfigError, key="schedule.hours"):
            ScheduleSettings(hours=hours)
    for zone in ("Europe/Nowhere", "../../etc/passwd"):
        with refused(ConfigError, key="schedule.timezone"):
            ScheduleSettings(hours="20:00-06:00", timezone=zone)
    with refused(ConfigError, key="schedule.timezone"):
        ScheduleSettings(timezone="UTC")
