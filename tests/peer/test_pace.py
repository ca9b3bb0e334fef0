"""How long a peer waits for others."""

from dispfl.peer.pace import Pace


def test_the_first_round_waits_for_sites_that_are_started_by_hand() -> None:
    assert Pace(floor=30, first=600).deadline == 600
    assert Pace(floor=30, first=5).deadline == 30  # never below the floor


def test_the_deadline_is_three_times_the_usual_round_and_never_below_the_floor() -> None:
    pace = Pace(floor=30)
    for seconds in (10, 20, 90):
        pace.took(seconds)
    assert pace.deadline == 3 * 20
    for _ in range(5):
        pace.took(1)
    assert pace.deadline == 30


def test_one_slow_round_does_not_move_it_and_nothing_moves_it_beyond_the_ceiling() -> None:
    pace = Pace(floor=1, ceiling=100)
    for seconds in (10, 10, 10, 10, 5000):
        pace.took(seconds)
    assert pace.deadline == 30
    for _ in range(5):
        pace.took(5000)
    assert pace.deadline == 100


def test_who_did_not_answer_the_last_time_gets_a_fifth_of_the_floor() -> None:
    assert Pace(floor=30).glance == 6
