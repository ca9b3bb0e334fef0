"""A node's view of the other peers: rounds, reachability and traffic."""

from dispfl.peer.client import RoundResponses
from dispfl.peer.status import NodeStatus


def claiming(*rounds: int) -> NodeStatus:
    status = NodeStatus()
    for number, t in enumerate(rounds):
        status.mark_seen(f"{number:03d}", t, now=1.0)
    return status


def test_one_false_claim_does_not_change_the_median_round() -> None:
    assert claiming(3, 1000).median_round() == 3
    assert claiming(1000, 3).median_round() == 3
    assert claiming(3, 1000, 4).median_round() == 4
    assert claiming(3, 1000, 4, 999).median_round() == 4
    assert claiming().median_round() == -1
    assert claiming(1000).median_round() == 1000  # a single claim cannot be checked


def test_a_skip_needs_more_than_half_of_the_requested_peers() -> None:
    def current(*stale: int, requested: int) -> int | None:
        return RoundResponses([f"{number:03d}" for number in range(requested)], stale=list(stale)).current(5)

    assert current(1000, requested=2) is None
    assert current(8, 1000, requested=2) == 8
    assert current(8, 1000, 9, requested=3) == 9
    assert current(8, 1000, 999, 9, requested=4) == 9
    assert current(5, 4, 1000, requested=3) is None


def test_a_request_of_an_unreachable_peer_does_not_make_it_reachable() -> None:
    status = NodeStatus()
    status.mark_unreachable("bob")
    assert (status.is_unreachable("bob"), status.is_silent("bob")) == (True, True)
    status.mark_seen("bob", 3, now=1.0)  # its own request
    assert (status.is_unreachable("bob"), status.is_silent("bob")) == (True, False)
    status.record_reply("bob")
    assert (status.is_unreachable("bob"), status.is_silent("bob")) == (False, False)


def test_bytes_sent_by_one_site_are_bytes_received_by_the_other() -> None:
    alice, bob = NodeStatus(), NodeStatus()
    alice.record_received("alice", "bob", 0, requested=10, size=300, values=70)
    bob.record_sent("alice", requested=10, size=300)
    mine, theirs = alice.peers["bob"], bob.peers["alice"]
    assert (mine.sent_bytes, mine.received_bytes) == (theirs.received_bytes, theirs.sent_bytes) == (10, 300)
