"""Transfers share links max-min fairly, in whole bytes per second."""

from random import Random

import pytest

from dispfl.clock.links import (
    UNLIMITED,
    Link,
    SharedLinks,
    Transfer,
    fair_level,
    steps_after,
    sum_of_steps,
)


def test_what_slow_users_leave_is_shared_by_the_others():
    """Of 100, one user takes 10 at most: 90 are left for two."""
    assert fair_level(100, [10, UNLIMITED, UNLIMITED]) == 45
    assert fair_level(100, [10, 50, UNLIMITED]) == 45
    assert fair_level(100, [10, 20, 30]) == UNLIMITED  # 60 in all: nobody is limited here
    assert fair_level(100, [UNLIMITED] * 3) == 33
    assert fair_level(0, [UNLIMITED]) == 0


def test_three_transfers_share_one_uplink():
    """One of them has a slow receiver, 10 B/s, so the other two get (100 - 10) / 2 each."""
    uplink = Link(100)
    links = SharedLinks()
    transfers = [Transfer(uplink, Link(down), 1000) for down in (10, 200, 200)]
    for transfer in transfers:
        links.add(transfer, now=0)
    links.share(0)
    assert [transfer.rate for transfer in transfers] == [10, 45, 45]

    links.remove(transfers[1])
    retimed, _ = links.share(5)
    assert [transfer.rate for transfer in retimed] == [90]


def filled(transfers: list[Transfer], links: list[Link]) -> list[int]:
    """The same rates by definition: raise all rates together, and fix those of each full link."""
    rates: dict[Transfer, int] = {}
    while len(rates) < len(transfers):
        shares = []
        for index, link in enumerate(links):
            others = [transfer for transfer in link.transfers if transfer not in rates]
            if others:
                left = link.capacity - sum(rates.get(transfer, 0) for transfer in link.transfers)
                shares.append((left // len(others), index))
        share, index = min(shares)
        limited = [each for each in transfers if each not in rates and each.limit <= share]
        if limited:
            slowest = min(limited, key=lambda transfer: transfer.limit)
            rates[slowest] = slowest.limit
            continue
        for transfer in links[index].transfers:
            rates.setdefault(transfer, share)
    return [rates[transfer] for transfer in transfers]


@pytest.mark.parametrize("seed", range(20))
def test_rates_after_starts_ends_and_changes_are_those_of_filling_all_links_anew(seed: int):
    random = Random(seed)
    uplinks = [Link(random.choice((10**6, 3 * 10**6, 10**7))) for _ in range(12)]
    downlinks = [Link(random.choice((10**6, 5 * 10**6, 10**8))) for _ in range(12)]
    links = SharedLinks()
    transfers: list[Transfer] = []
    for now in range(60):
        for _ in range(random.randrange(1, 4)):
            limit = random.choice((UNLIMITED, UNLIMITED, 400_000))
            transfer = Transfer(random.choice(uplinks), random.choice(downlinks), 10**9, limit)
            links.add(transfer, now)
            transfers.append(transfer)
        if random.random() < 0.5:
            links.remove(transfers.pop(random.randrange(len(transfers))))
        if random.random() < 0.3:  # a device goes offline, or comes back
            link = random.choice(uplinks + downlinks)
            link.capacity = link.bandwidth = random.choice((0, 2 * 10**6))
            links.touch(link)
        links.share(now)
        # Rounding down may leave a byte per second of a link to one transfer or another.
        expected = filled(transfers, uplinks + downlinks)
        for transfer, rate in zip(transfers, expected, strict=True):
            assert abs(transfer.rate - rate) <= len(transfers)
        for link in uplinks + downlinks:
            assert sum(transfer.rate for transfer in link.transfers) <= link.capacity


def test_use_of_several_rounds_adds_up():
    first = [(0, 5), (10, 0)]
    second = [(4, 2), (10, 3), (20, 0)]
    assert sum_of_steps(first, second) == [(0, 5), (4, 7), (10, 3), (20, 0)]
    assert steps_after([(0, 5), (4, 7), (10, 3), (20, 0)], 12) == [(10, 3), (20, 0)]
    assert steps_after([(0, 5), (10, 0)], 10) == []
