"""Rounds whose peers go on without late models, computed by hand. 8 Mbit/s are 1 MB/s."""

import pytest

from dispfl.clock.deadline import DeadlineClock, Exchange
from dispfl.clock.fleet import Fleet
from dispfl.clock.links import SECOND
from dispfl.clock.schedule import Clock, ModelMessage, RoundWork
from dispfl.core.device_classes import Device

MB = 10**6
FAST = Device(speed=1e9)
OPERATIONS = 10**9
"""Of every step: a second on these devices."""


def fleet(**devices: Device) -> Fleet:
    return Fleet(devices, dict.fromkeys(devices, "devices"))


def clock(deadline: float, **devices: Device) -> DeadlineClock:
    return DeadlineClock(
        fleet(**devices), round(deadline * SECOND), lambda peer, models: OPERATIONS
    )


def exchanged(clock: DeadlineClock) -> dict[str, Exchange]:
    """Let every peer ask all others for 1 MB."""
    peers = clock.fleet.peers
    senders = {peer: [other for other in peers if other != peer] for peer in peers}
    messages = []
    for receiver, names in clock.asked(senders).items():
        messages += [ModelMessage(name, receiver, MB) for name in names]
    return clock.exchange(messages)


def ends(clock: DeadlineClock) -> dict[str, float]:
    return {peer: times.end / SECOND for peer, times in clock.times.peers.items()}


def test_a_late_model_is_not_waited_for_and_averaged_when_it_has_arrived():
    """c sends with 0.5 MB/s, so that its two models take 4 s; all other links are unlimited.

    Round 0: a and b go on at their deadline, 2 s, without c, and end at 3 s; c has their models at
    0 s. Round 1: c's models arrive at 4 s. So a and b neither wait for them at 3 s, nor ask again.
    c waits from 1 s to its deadline at 3 s, when the models of both arrive just in time. Round 2:
    at 4 s all begin, and a and b ask c again: its next models are late, too, and they go on at 6 s
    with those of round 0.
    """
    three = clock(2, a=FAST, b=FAST, c=Device(speed=1e9, up=4))
    first = exchanged(three)
    assert first["a"] == Exchange(["b"], late=["c"], arrived=[], on_the_way=[])
    assert first["c"] == Exchange(["a", "b"], late=[], arrived=[], on_the_way=[])
    assert ends(three) == {"a": 3, "b": 3, "c": 1}
    assert three.times.peers["a"].transferring == 2 * SECOND  # until it goes on
    assert three.times.peers["a"].waiting == 0

    second = exchanged(three)
    assert second["a"] == Exchange(["b"], late=[], arrived=[], on_the_way=["c"])
    assert second["c"] == Exchange(["a", "b"], late=[], arrived=[], on_the_way=[])
    assert ends(three) == {"a": 4, "b": 4, "c": 4}
    assert three.times.peers["c"].waiting == 2 * SECOND

    third = exchanged(three)
    assert third["a"] == Exchange(["b"], late=["c"], arrived=["c"], on_the_way=[])
    assert ends(three) == {"a": 7, "b": 7, "c": 5}


def test_a_peer_does_not_go_on_without_any_model():
    """b's model takes 5 s: a waits for it beyond its deadline of 1 s."""
    two = clock(1, a=FAST, b=Device(speed=1e9, up=1.6))
    assert exchanged(two)["a"] == Exchange(["b"], late=[], arrived=[], on_the_way=[])
    assert ends(two) == {"a": 6, "b": 1}


def test_with_only_a_late_model_on_its_way_a_peer_waits_for_that():
    """b hears c alone, whose model takes 5 s, and is not drawn in round 1.

    Round 0: a and b average each other and, at their deadline of 1 s, not c. Round 1: b hears c
    alone, which is not asked, and waits from 2 s until its model of round 0 arrives at 5 s.
    """
    three = clock(1, a=FAST, b=FAST, c=Device(speed=1e9, up=1.6))
    messages = [ModelMessage("a", "b", MB), ModelMessage("c", "b", MB)]
    assert three.exchange(messages)["b"].late == ["c"]
    assert three.asked({"b": ["c"]}) == {"b": []}
    second = three.exchange([])
    assert second["b"] == Exchange([], late=[], arrived=["c"], on_the_way=[])
    assert ends(three) == {"a": 2, "b": 6, "c": 2}


def test_a_model_more_than_eight_rounds_late_is_asked_for_again():
    """c's models take minutes. a waits 2 s in round 0, and in rounds 1 to 8 not at all.

    So round 0 ends at 3 s, round 8 at 11 s. In round 9 it asks c again: that one ends at 14 s.
    """
    three = clock(2, a=FAST, b=FAST, c=Device(speed=1e9, up=0.01))
    for _ in range(9):
        exchange = exchanged(three)["a"]
    assert exchange.on_the_way == ["c"]
    assert ends(three)["a"] == 11
    assert exchanged(three)["a"].late == ["c"]
    assert ends(three)["a"] == 14


@pytest.mark.parametrize("request_size", [0, MB // 10])
def test_with_a_deadline_that_nobody_misses_times_are_those_without(request_size: int) -> None:
    devices = fleet(a=Device(speed=1e9, up=8), b=Device(speed=2e8, down=4), c=FAST)
    patient = DeadlineClock(devices, 10**6 * SECOND, lambda peer, models: OPERATIONS)
    plain = Clock(devices)
    pairs = [("a", "b"), ("b", "c"), ("c", "a"), ("a", "c")]
    messages = [ModelMessage(*pair, MB, request_size) for pair in pairs]
    for _ in range(4):
        patient.exchange(messages)
        work = RoundWork(dict.fromkeys("abc", OPERATIONS), messages)
        assert patient.times == plain.advance(work)


def test_operations_follow_from_the_models_that_are_averaged():
    """a's step takes 2 s for each model: b's in time, and in round 1 also that of c."""
    devices = fleet(a=FAST, b=FAST, c=Device(speed=1e9, up=4))
    counting = DeadlineClock(devices, 2 * SECOND, lambda peer, models: 2 * models * OPERATIONS)
    computing = []
    for _ in range(2):
        exchanged(counting)
        computing.append(counting.times.peers["a"].computing // SECOND)
    assert computing == [2, 4]  # c's model arrives at 4 s, when round 1 begins
