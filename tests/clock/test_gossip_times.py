"""When asynchronous steps happen, computed by hand. 8 Mbit/s are 1 MB/s."""

from collections.abc import Sequence

from dispfl.clock.fleet import Fleet, Network
from dispfl.clock.gossip_times import Arrival, GossipTimes, GossipWork, TimedRound, TimedStep
from dispfl.clock.links import SECOND
from dispfl.core.device_classes import Device

MB = 10**6


def times(
    *,
    size: int = 0,
    length: int = 10,
    limit: int = 8,
    reuses: bool = False,
    network: Network | None = None,
    **devices: Device,
) -> GossipTimes:
    """Times of peers that all send to all others; a step takes 10^9 operations."""
    fleet = Fleet(devices, dict.fromkeys(devices, "devices"), network or Network())

    def receivers(peer: str, number: int) -> Sequence[str]:
        return [name for name in devices if name != peer]

    work = GossipWork(lambda peer, models: 10**9, dict.fromkeys(devices, size), receivers)
    return GossipTimes(fleet, work, length * SECOND, limit, reuses=reuses)


def steps_of(timed: TimedRound, peer: str) -> list[TimedStep]:
    return [step for step in timed.steps if step.peer == peer]


def seconds(steps: Sequence[TimedStep]) -> list[tuple[float, float]]:
    return [(step.start / SECOND, step.end / SECOND) for step in steps]


def test_nobody_waits_and_each_step_takes_the_newest_model_that_has_arrived_since() -> None:
    """a takes 2 s for a step, b 5 s; models arrive after 1 s. a's steps begin at 0, 2, 4, 6, 8 s,
    and b's models arrive at 6 and 11 s. b's second step, at 5 s, has a's model of 4 s, not that of
    2 s: it has arrived at 5 s, in time."""
    network = Network(latency=1000)
    clock = times(a=Device(speed=5e8), b=Device(speed=2e8), network=network)
    timed = clock.advance()
    a, b = steps_of(timed, "a"), steps_of(timed, "b")
    assert seconds(a) == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]
    assert seconds(b) == [(0, 5), (5, 10)]
    assert [dict(step.models) for step in a] == [{}, {}, {}, {"b": 0}, {}]
    assert [dict(step.models) for step in b] == [{}, {"a": 1}]
    # The model was finished at 5 s, and the step of 6 s is the first that begins after it.
    assert dict(a[3].staleness) == {"b": 0}
    # On the way at 10 s: b's model of 10 s, and a's, of which the one of 8 s was at b at 9 s.
    assert {sender: set(numbers) for sender, numbers in timed.needed.items()} == {
        "a": {3, 4},
        "b": {1},
    }
    assert dict(steps_of(clock.advance(), "b")[0].models) == {"a": 3}


def test_a_stale_model_is_dropped_beyond_the_limit() -> None:
    """a takes 1 s for a step. b's model of 4 s arrives at 6.5 s: a has begun steps at 4, 5 and 6 s
    since, so that it is 3 steps old in the step of 7 s."""
    for limit, models in ((3, {"b": 0}), (2, {})):
        network = Network(latency=2500)
        clock = times(a=Device(speed=1e9), b=Device(speed=2.5e8), network=network, limit=limit)
        step = steps_of(clock.advance(), "a")[7]
        assert step.start == 7 * SECOND
        assert dict(step.models) == models
        assert dict(step.staleness) == dict.fromkeys(models, 3)
        assert step.dropped == ([] if models else ["b"])


def test_a_reused_model_gets_staler_until_a_newer_one_arrives() -> None:
    """a takes 1 s, b 4 s. Without latency b's models are there at 4 and 8 s."""
    clock = times(a=Device(speed=1e9), b=Device(speed=2.5e8), reuses=True)
    a = steps_of(clock.advance(), "a")
    assert [dict(step.models) for step in a] == [{}] * 4 + [{"b": 0}] * 4 + [{"b": 1}] * 2
    assert [step.staleness.get("b") for step in a] == [None] * 4 + [0, 1, 2, 3, 0, 1]


def test_a_copy_that_has_not_left_is_replaced_by_the_next_model() -> None:
    """a takes 1 s, and its 1 MB take 4 s to b. That of 1 s is on the link until 5 s. Those of 2 and
    3 and 4 s are replaced by that of 5 s, which leaves then and arrives at 9 s. b takes 20 s."""
    clock = times(a=Device(speed=1e9, up=2), b=Device(speed=5e7), size=MB, length=8)
    timed = clock.advance()
    assert [arrival.sender for arrival in timed.arrivals] == ["a"]
    assert timed.sending == {"a": 7 * SECOND, "b": 0}
    # 0 has arrived; the one of 5 s has number 4; the newest, of 8 s, waits.
    assert set(timed.needed["a"]) == {0, 4, 7}
    timed = clock.advance()
    assert len(timed.arrivals) == 2  # of 5 s, at 9 s, and of 9 s, at 13 s
    # The newest at b is number 8, of 9 s; that of 13 s is on the link until 17 s.
    assert set(timed.needed["a"]) == {8, 12, 15}


def test_copies_share_the_uplink_and_as_many_leave_as_a_peer_has_receivers() -> None:
    """a's copies of 1 MB to b and c share 1 MB/s: both arrive 2 s after its first step of 1 s. Of
    its later models, those of 2 s wait, and are replaced by that of 3 s."""
    slow = Device(speed=1e7)
    clock = times(a=Device(speed=1e9, up=8), b=slow, c=slow, size=MB, length=4)
    timed = clock.advance()
    assert [arrival.receiver for arrival in timed.arrivals] == ["b", "c"]
    assert timed.sending["a"] == 3 * SECOND
    assert set(timed.needed["a"]) == {0, 2, 3}


def test_a_device_that_is_offline_pauses_and_so_do_its_transfers() -> None:
    """b is online for a minute after midnight. Its first step takes 50 s, the second one the 10 s
    that are left and 40 s of the next day. Of its message of 20 s half is sent on each day, and
    that of the second model on the second day, from 40 s to 60 s."""
    day = 24 * 3600
    night = Device(speed=2e7, up=8, daily="00:00-00:01")
    clock = times(a=Device(speed=1e7), b=night, size=20 * MB, length=day)
    first = clock.advance()
    assert seconds(steps_of(first, "b")) == [(0, 50)]
    assert Arrival("b", "a") not in first.arrivals
    second = clock.advance()
    assert second.arrivals.count(Arrival("b", "a")) == 2
    # b's uplink sends while b is online only: the last 10 s of the first minute, and 10 and 20 s.
    assert first.sending["b"] == 10 * SECOND
    assert second.sending["b"] == 30 * SECOND
    assert seconds(steps_of(second, "b")) == [(50, day + 40)]


def test_rounds_of_any_length_have_the_same_steps() -> None:
    a = Device(speed=7e8, up=3)
    b = Device(speed=3e8, down=2)
    whole = times(size=MB, length=60, a=a, b=b).advance()
    parts = times(size=MB, length=4, a=a, b=b)
    steps: list[TimedStep] = []
    arrivals: list[Arrival] = []
    for _ in range(15):
        timed = parts.advance()
        steps += timed.steps
        arrivals += timed.arrivals
    assert steps == whole.steps
    assert arrivals == whole.arrivals
    assert len(steps) > 50
