"""What a peer makes of the others: where they are, who answers, who only asks, and what was carried."""

from dispfl.peer.asks import Gathered
from dispfl.peer.standing import Standing


def claiming(*rounds: int) -> Standing:
    standing = Standing()
    for number, t in enumerate(rounds):
        standing.met(f"{number:03d}", t, now=1.0)
    return standing


def test_one_liar_of_two_moves_nobody_and_one_of_three_neither() -> None:
    assert claiming(3, 1000).others_are_at() == 3
    assert claiming(1000, 3).others_are_at() == 3
    assert claiming(3, 1000, 4).others_are_at() == 4
    assert claiming(3, 1000, 4, 999).others_are_at() == 4
    assert claiming().others_are_at() == -1
    assert claiming(1000).others_are_at() == 1000  # nobody can tell the truth from one witness


def test_a_skip_needs_most_of_those_who_were_asked_and_goes_no_further_than_half_of_them_say() -> None:
    def current(*stale: int, asked: int) -> int | None:
        return Gathered([f"{number:03d}" for number in range(asked)], stale=list(stale)).current(5)

    assert current(1000, asked=2) is None
    assert current(8, 1000, asked=2) == 8
    assert current(8, 1000, 9, asked=3) == 9
    assert current(8, 1000, 999, 9, asked=4) == 9
    assert current(5, 4, 1000, asked=3) is None


def test_asking_does_not_make_up_for_not_answering() -> None:
    standing = Standing()
    standing.lost("bob")
    assert (standing.is_gone("bob"), standing.is_silent("bob")) == (True, True)
    standing.met("bob", 3, now=1.0)  # it asks us
    assert (standing.is_gone("bob"), standing.is_silent("bob")) == (True, False)
    standing.replied("bob")
    assert (standing.is_gone("bob"), standing.is_silent("bob")) == (False, False)


def test_what_one_site_has_sent_is_what_the_other_has_received() -> None:
    alice, bob = Standing(), Standing()
    alice.received("alice", "bob", 0, requested=10, size=300, values=70)
    bob.served("alice", requested=10, size=300)
    mine, theirs = alice.neighbours["bob"], bob.neighbours["alice"]
    assert (mine.sent_bytes, mine.received_bytes) == (theirs.received_bytes, theirs.sent_bytes) == (10, 300)
