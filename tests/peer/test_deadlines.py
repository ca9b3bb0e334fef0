"""Deadlines of rounds."""

from dispfl.peer.config import Deadlines


def test_the_first_round_has_the_startup_deadline() -> None:
    assert Deadlines(min=30, startup=600).deadline == 600
    assert Deadlines(min=30, startup=5).deadline == 30  # never below min


def test_the_deadline_is_three_times_the_median_round_and_never_below_min() -> None:
    deadlines = Deadlines(min=30)
    for seconds in (10, 20, 90):
        deadlines.record_round(seconds)
    assert deadlines.deadline == 3 * 20
    for _ in range(5):
        deadlines.record_round(1)
    assert deadlines.deadline == 30


def test_one_slow_round_does_not_change_the_deadline_and_max_limits_it() -> None:
    deadlines = Deadlines(min=1, max=100)
    for seconds in (10, 10, 10, 10, 5000):
        deadlines.record_round(seconds)
    assert deadlines.deadline == 30
    for _ in range(5):
        deadlines.record_round(5000)
    assert deadlines.deadline == 100


def test_the_probe_timeout_is_a_fifth_of_min() -> None:
    assert Deadlines(min=30).probe_timeout == 6
