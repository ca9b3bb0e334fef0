"""Deadlines of rounds."""

from dispfl.peer.deadlines import Deadlines
from dispfl.peer.model_fetch import RoundResponses
from dispfl.peer.state.status import PeerStatus


def test_the_first_round_has_the_startup_deadline() -> None:
    assert Deadlines(min=30, startup=600).deadline == 600
    assert Deadlines(min=30, startup=5).deadline == 30  # never below min


def test_the_deadline_is_three_times_the_median_round_and_never_below_min() -> None:
    deadlines = Deadlines(min=30)
    for seconds in (10, 20, 90):
        deadlines.record_round(0, seconds)
    assert deadlines.deadline == 3 * 20
    for _ in range(5):
        deadlines.record_round(0, 1)
    assert deadlines.deadline == 30


def test_one_slow_round_does_not_change_the_deadline_and_max_limits_it() -> None:
    deadlines = Deadlines(min=1, max=100)
    for seconds in (10, 10, 10, 10, 5000):
        deadlines.record_round(0, seconds)
    assert deadlines.deadline == 30
    for _ in range(5):
        deadlines.record_round(0, 5000)
    assert deadlines.deadline == 100


def test_the_probe_timeout_is_a_fifth_of_min() -> None:
    assert Deadlines(min=30).probe_timeout == 6


def test_responses_just_in_time_cannot_extend_deadlines_beyond_that_of_the_first_round() -> None:
    deadlines = Deadlines(min=30, startup=600, max=3600)
    for _ in range(50):
        deadlines.record_round(waited=0.99 * deadlines.deadline, step=2)
    assert deadlines.deadline == 600
    resumed = Deadlines(min=30, startup=600, max=3600)
    resumed.startup = resumed.min  # a restarted site does not wait for others to be started
    for _ in range(50):
        resumed.record_round(waited=0.99 * resumed.deadline, step=2)
    assert resumed.deadline == 600


def test_deadlines_follow_our_own_steps_beyond_that_of_the_first_round() -> None:
    deadlines = Deadlines(min=30, startup=600, max=3600)
    for _ in range(5):
        deadlines.record_round(waited=500, step=900)
    assert deadlines.deadline == 3 * 900


def test_a_member_is_slow_if_most_of_its_last_answers_were_and_quick_if_none_was() -> None:
    deadlines = Deadlines(min=30)
    peer = PeerStatus()
    for _ in range(5):
        deadlines.note_latency(peer, 500)
    assert not peer.slow  # in the first round nothing is
    deadlines.record_round(0.5, 0.5)
    assert deadlines.slow_after == 6  # a fifth of min, more than three times the usual second
    for seconds, is_slow in ((5, True), (5, True), (5, True), (7, True), (5, True)):
        deadlines.note_latency(peer, seconds)
        assert peer.slow == is_slow
    for _ in range(3):
        deadlines.note_latency(peer, 5)
        assert peer.slow  # the seven seconds are one of the last five
    deadlines.note_latency(peer, 5)
    assert not peer.slow
    for seconds, is_slow in ((7, False), (7, False), (7, True)):
        deadlines.note_latency(peer, seconds)
        assert peer.slow == is_slow


def test_only_half_of_the_answers_decide_how_long_a_round_was() -> None:
    responses = RoundResponses(["a", "b", "c", "d"])
    assert responses.waited == 0.0
    responses.latencies = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 500.0}
    assert responses.waited == 2.0
    responses.latencies = {"a": 1.0, "d": 500.0}
    assert responses.waited == 1.0
