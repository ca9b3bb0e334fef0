"""Refusals are named and counted, questions are answered once, and who keeps offending is cut off for a while."""

import pytest

from dispfl.peer.door import Door, Reason
from dispfl.peer.transport import Refused


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def door(clock: Clock) -> Door:
    return Door(clock)


def test_a_question_is_answered_once(door: Door) -> None:
    door.once("bob", 3, "nonce")
    door.once("bob", 3, "another")
    door.once("carol", 3, "nonce")
    with pytest.raises(Refused, match="sent the same question for round 3 twice") as refused:
        door.once("bob", 3, "nonce")
    assert refused.value.reason == Reason.REPLAYED
    assert door.refused == {"bob": {"replayed": 1}}


def test_the_same_model_may_be_asked_for_twenty_times_because_connections_break(door: Door) -> None:
    for number in range(20):
        door.once("bob", 0, str(number))
    with pytest.raises(Refused, match="has asked for round 0 20 times already"):
        door.once("bob", 0, "20")
    door.once("bob", 1, "20")  # another round


def test_questions_of_old_rounds_are_forgotten(door: Door) -> None:
    door.once("bob", 3, "nonce")
    door.forget_before(4)
    door.once("bob", 3, "nonce")


def test_ten_offences_within_a_minute_cut_a_peer_off_for_a_minute(door: Door, clock: Clock) -> None:
    for second in range(10):
        door.check("bob")
        clock.now = float(second)
        door.count("bob", "checksum")
    clock.now = 20.0
    with pytest.raises(Refused, match="bob was refused too often; it may come back in 49 s"):
        door.check("bob")
    door.check("carol")
    clock.now = 70.0
    door.check("bob")
    assert door.refused["bob"] == {"checksum": 10, "cut-off": 1}


def test_ten_offences_over_an_hour_do_not(door: Door, clock: Clock) -> None:
    for minute in range(10):
        clock.now = 360.0 * minute
        door.count("bob", "checksum")
    door.check("bob")


def test_being_slow_is_no_offence(door: Door) -> None:
    for _ in range(50):
        door.count("bob", Reason.STALE)
    door.check("bob")
    assert door.refused["bob"]["stale"] == 50


def test_a_broken_answer_may_be_gone_on_with_twenty_times_and_no_oftener(door: Door) -> None:
    door.once("bob", 3, "nonce")
    for _ in range(20):
        door.once("bob", 3, "nonce", goes_on=True)
    with pytest.raises(Refused, match="bob has gone on with the same answer for round 3 20 times already") as refused:
        door.once("bob", 3, "nonce", goes_on=True)
    assert refused.value.reason == Reason.REPLAYED
    assert door.refused == {"bob": {"replayed": 1}}


def test_going_on_with_an_answer_of_our_last_life_counts_as_a_question(door: Door) -> None:
    for number in range(20):
        door.once("bob", 3, str(number), goes_on=True)
    with pytest.raises(Refused, match="has asked for round 3 20 times already"):
        door.once("bob", 3, "20", goes_on=True)
    with pytest.raises(Refused, match="sent the same question for round 3 twice"):
        door.once("bob", 3, "0")


def test_five_thousand_records_of_one_sender_are_looked_at_in_a_minute(door: Door, clock: Clock) -> None:
    assert door.ration("bob", 3000) == 3000
    clock.now = 30.0
    assert door.ration("bob", 3000) == 2000
    assert door.ration("bob", 1) == 0
    assert door.ration("carol", 3000) == 3000
    clock.now = 60.0
    assert door.ration("bob", 3000) == 3000
    assert door.refused == {"bob": {"too-much-news": 2}}


def test_bringing_too_much_news_is_no_offence(door: Door) -> None:
    for _ in range(50):
        door.ration("bob", 10_000)
    door.check("bob")
