"""Refusals are counted, requests are answered once, and repeat offenders are banned."""

import pytest
from messages import refused

from dispfl.peer.transport.base import Refused
from dispfl.peer.transport.guard import AddressLimit, RequestGuard
from dispfl.wire.refusals import Refusal


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def guard(clock: Clock) -> RequestGuard:
    return RequestGuard(clock)


def test_a_request_is_answered_once(guard: RequestGuard) -> None:
    guard.check_nonce("bob", 3, "nonce")
    guard.check_nonce("bob", 3, "another")
    guard.check_nonce("carol", 3, "nonce")
    with pytest.raises(Refused, match="sent the same request for round 3 twice") as refused:
        guard.check_nonce("bob", 3, "nonce")
    assert refused.value.reason == Refusal.REPLAYED
    assert guard.refused == {"bob": {"replayed": 1}}


def test_the_same_model_may_be_requested_twenty_times_because_connections_break(
    guard: RequestGuard,
) -> None:
    for number in range(20):
        guard.check_nonce("bob", 0, str(number))
    with refused(Refused):
        guard.check_nonce("bob", 0, "20")
    guard.check_nonce("bob", 1, "20")  # another round


def test_nonces_of_old_rounds_are_dropped(guard: RequestGuard) -> None:
    guard.check_nonce("bob", 3, "nonce")
    guard.forget_before(4)
    guard.check_nonce("bob", 3, "nonce")


def test_ten_offences_within_a_minute_ban_a_peer_for_a_minute(
    guard: RequestGuard, clock: Clock
) -> None:
    for second in range(10):
        guard.check("bob")
        clock.now = float(second)
        guard.count("bob", "checksum")
    clock.now = 20.0
    with refused(Refused):
        guard.check("bob")
    guard.check("carol")
    clock.now = 70.0
    guard.check("bob")
    assert guard.refused["bob"] == {"checksum": 10, "banned": 1}


def test_ten_offences_over_an_hour_do_not_ban_a_peer(guard: RequestGuard, clock: Clock) -> None:
    for minute in range(10):
        clock.now = 360.0 * minute
        guard.count("bob", "checksum")
    guard.check("bob")


def test_stale_requests_are_no_offence(guard: RequestGuard) -> None:
    for _ in range(50):
        guard.count("bob", Refusal.STALE)
    guard.check("bob")
    assert guard.refused["bob"]["stale"] == 50


def test_a_response_may_be_resumed_twenty_times(guard: RequestGuard) -> None:
    guard.check_nonce("bob", 3, "nonce")
    for _ in range(20):
        guard.check_nonce("bob", 3, "nonce", resumes=True)
    with pytest.raises(
        Refused, match="bob has resumed the same response for round 3 20 times already"
    ) as refused:
        guard.check_nonce("bob", 3, "nonce", resumes=True)
    assert refused.value.reason == Refusal.REPLAYED
    assert guard.refused == {"bob": {"replayed": 1}}


def test_resuming_a_response_from_before_a_restart_counts_as_a_new_request(
    guard: RequestGuard,
) -> None:
    for number in range(20):
        guard.check_nonce("bob", 3, str(number), resumes=True)
    with refused(Refused):
        guard.check_nonce("bob", 3, "20", resumes=True)
    with refused(Refused):
        guard.check_nonce("bob", 3, "0")


def test_five_thousand_records_of_a_sender_are_verified_within_a_minute(
    guard: RequestGuard, clock: Clock
) -> None:
    assert guard.allow_records("bob", 3000) == 3000
    clock.now = 30.0
    assert guard.allow_records("bob", 3000) == 2000
    assert guard.allow_records("bob", 1) == 0
    assert guard.allow_records("carol", 3000) == 3000
    clock.now = 60.0
    assert guard.allow_records("bob", 3000) == 3000
    assert guard.refused == {"bob": {"too-many-records": 2}}


def test_too_many_records_are_no_offence(guard: RequestGuard) -> None:
    for _ in range(50):
        guard.allow_records("bob", 10_000)
    guard.check("bob")


def test_a_model_is_sent_to_a_peer_forty_times_at_most_however_it_asks(guard: RequestGuard) -> None:
    for number in range(8):
        guard.check_nonce("bob", 3, str(number))
        for _ in range(4):
            guard.check_nonce("bob", 3, str(number), resumes=True)
    with refused(Refused):
        guard.check_nonce("bob", 3, "8")
    with refused(Refused):
        guard.check_nonce("bob", 3, "0", resumes=True)
    guard.check_nonce("bob", 4, "0")
    guard.check_nonce("carol", 3, "0")


def test_a_peer_has_a_budget_of_requests_and_syncs_that_a_round_or_a_minute_renews(
    guard: RequestGuard, clock: Clock
) -> None:
    def send(count: int, *, is_sync: bool) -> None:
        for _ in range(count):
            guard.charge("bob", 10, is_sync=is_sync)

    send(300, is_sync=True)
    with pytest.raises(Refused, match="bob has used up its syncs of this round") as refused:
        send(1, is_sync=True)
    assert refused.value.reason == Refusal.TOO_MANY_REQUESTS
    send(200, is_sync=False)
    with pytest.raises(Refused, match="bob has used up its requests of this round"):
        send(1, is_sync=False)
    guard.charge("carol", 10, is_sync=True)
    guard.start_round()
    send(200, is_sync=False)
    clock.now = 60.0
    send(300, is_sync=True)
    assert guard.refused == {"bob": {"too-many-requests": 2}}
    for _ in range(50):
        with pytest.raises(Refused, match="syncs"):
            send(1, is_sync=True)
    guard.check("bob")  # it is not banned: a site in a faster round may send as many


def test_a_peer_has_a_budget_of_bytes_both_ways(guard: RequestGuard) -> None:
    guard.charge("bob", 4_000_000, is_sync=True)
    guard.charge_response("bob", 59_999_999)
    guard.charge("bob", 1, is_sync=True)
    with refused(Refused):
        guard.charge("bob", 0, is_sync=False)


def test_an_address_is_limited_while_its_member_is_banned_and_no_other_is() -> None:
    now = 100.0
    limit = AddressLimit(lambda: now)
    assert all(limit.allows("192.0.2.1") for _ in range(1000))
    limit.limit("192.0.2.1", 60)
    allowed = [limit.allows("192.0.2.1") for _ in range(100)]
    assert allowed == [True] * 20 + [False] * 80
    assert all(limit.allows("192.0.2.2") for _ in range(1000))
    now += 1.0
    assert [limit.allows("192.0.2.1") for _ in range(100)].count(True) == 20
    now += 60
    assert all(limit.allows("192.0.2.1") for _ in range(1000))
    limit.limit("192.0.2.3", 60)  # forgets the first one
    assert limit._until.keys() == limit._handshakes.keys() == {"192.0.2.3"}
