"""A node's view of the other peers: rounds, reachability and traffic."""

from dispfl.peer.client import RoundResponses
from dispfl.peer.node import agreed_round
from dispfl.peer.status import NodeStatus


def test_one_false_claim_has_no_effect_while_most_members_have_not_been_heard() -> None:
    def agreed(*claims: int, members: int, is_final: bool = False) -> int | None:
        return agreed_round(0, claims, members, is_final=is_final)

    assert agreed(members=4) == agreed(0, 1, 0, members=4) == 0
    assert agreed(19, members=4) is None  # the first one that responds
    assert agreed(19, 0, members=4) is None
    assert agreed(19, 0, 0, members=4) == 0
    assert agreed(19, 7, members=4) is None
    assert agreed(19, 7, 8, members=4) == 8
    assert agreed(19, 7, 8, 0, members=4) == 7
    assert agreed(7, members=1) == 7
    assert agreed(19, members=4, is_final=True) == 19  # nobody else came
    assert agreed(19, 0, members=4, is_final=True) == agreed(19, 1, members=4, is_final=True) == 0


def test_a_skip_needs_more_than_half_of_the_requested_peers() -> None:
    def is_stale(stale: int, requested: int) -> bool:
        names = [f"{number:03d}" for number in range(requested)]
        return RoundResponses(names, stale=names[:stale]).is_stale

    assert [is_stale(k, 2) for k in range(3)] == [False, False, True]
    assert [is_stale(k, 3) for k in range(4)] == [False, False, True, True]
    assert not is_stale(0, 0)


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
