"""Deadlines of rounds."""

from dispfl.peer.deadlines import Deadlines


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
