"""The clock's schedule of one round of 10,000 peers, without training, against one of 1,000.

The ratio is that of the times per event, in processor time: 1 if an event costs the same in a
federation ten times as large. Links, speeds and latencies are those of phones; each peer requests 3
MB models from 5 others. Without a limit: 10 s of peers that do not wait, and send 0.4 MB to 5
others that the topology draws for every step, which takes most of the time.
"""

import time
from random import Random

from dispfl.clock.fleet import Network, make_fleet
from dispfl.clock.gossip_times import GossipTimes, GossipWork
from dispfl.clock.links import SECOND
from dispfl.clock.schedule import Clock, ModelMessage, RoundWork
from dispfl.topology import RandomRegular, peer_names
from measure import report

LIMIT = 2.0
DEGREE = 5


def schedule(peers: int) -> tuple[int, float, float]:
    """Return the events of a round, its seconds of processor time, and its simulated hours."""
    roster = peer_names(peers)
    random = Random(0)
    offsets = random.sample(range(1, peers), DEGREE)
    order = list(roster)
    random.shuffle(order)
    messages = []
    for position, receiver in enumerate(order):
        for offset in offsets:
            sender = order[(position + offset) % peers]
            size = 3_000_000 + random.randrange(100_000)
            messages.append(ModelMessage(sender, receiver, size, request=180_000))

    fleet = make_fleet("phones", {}, Network(), roster, seed=0)
    assert fleet is not None
    clock = Clock(fleet)
    began = time.process_time()
    times = clock.advance(RoundWork(dict.fromkeys(roster, 10**11), messages))
    return clock.events, time.process_time() - began, times.end / 3.6e12


def async_schedule(peers: int) -> tuple[int, int, float]:
    """Return the steps and events of asynchronous peers, and the seconds of processor time."""
    roster = peer_names(peers)
    topology = RandomRegular(degree=DEGREE)
    fleet = make_fleet("phones", {}, Network(), roster, seed=0)
    assert fleet is not None

    def receivers(peer: str, number: int) -> list[str]:
        return topology.row(0, number, roster, peer)[1]

    work = GossipWork(lambda peer, models: 8 * 10**10, dict.fromkeys(roster, 375_000), receivers)
    times = GossipTimes(fleet, work, 10 * SECOND, limit=8, reuses=False)
    began = time.process_time()
    steps = len(times.advance().steps)
    return steps, times.events, time.process_time() - began


def main() -> None:
    few_events, few_seconds, _ = schedule(1_000)
    events, seconds, hours = schedule(10_000)
    report(
        "clock",
        (seconds / events) / (few_seconds / few_events),
        LIMIT,
        events=events,
        seconds=round(seconds, 1),
        microseconds_per_event=round(1e6 * seconds / events, 1),
        simulated_hours=round(hours, 4),
    )
    _, few_events, few_seconds = async_schedule(1_000)
    steps, events, seconds = async_schedule(10_000)
    report(
        "async_clock",
        (seconds / events) / (few_seconds / few_events),
        None,
        steps=steps,
        events=events,
        seconds=round(seconds, 1),
        microseconds_per_event=round(1e6 * seconds / events, 1),
    )


if __name__ == "__main__":
    main()
