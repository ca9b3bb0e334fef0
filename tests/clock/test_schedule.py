"""When rounds happen, computed by hand. 8 Mbit/s are 1 MB/s."""

import pytest
from messages import refused

from dispfl.clock.fleet import Fleet, Network, make_fleet
from dispfl.clock.links import SECOND
from dispfl.clock.schedule import Clock, ModelMessage, RoundTimes, RoundWork
from dispfl.core.device_classes import Device
from dispfl.errors import RunError
from dispfl.runs.timing import PHASES

MB = 10**6


def fleet(network: Network | None = None, **devices: Device) -> Fleet:
    return Fleet(devices, dict.fromkeys(devices, "devices"), network or Network())


def ends(times: RoundTimes) -> dict[str, float]:
    return {peer: of_peer.end / SECOND for peer, of_peer in times.peers.items()}


def phases(times: RoundTimes, peer: str) -> dict[str, float]:
    """The seconds of each phase of a peer's round."""
    of_peer = times.peers[peer]
    return {phase: getattr(of_peer, phase) / SECOND for phase in PHASES}


def test_two_unequal_peers_without_requests():
    """a computes 2 s and sends with 1 MB/s, b computes 10 s and sends with 4 MB/s.

    Round 0: both send 8 MB at 0. b's model arrives at 2 s, a's at 8 s: a ends at 2 + 2 = 4 s, b at
    8 + 10 = 18 s. Round 1: a starts at 4 s, but its uplink is its own round's until 8 s, so that
    its next model leaves then and arrives at 16 s. b publishes at 18 s: its model arrives at a at
    20 s, who ends at 22 s; b has a's model when it starts, and ends at 28 s.
    """
    a = Device(speed=1e9, up=8, down=800)
    b = Device(speed=2e8, up=32, down=800)
    clock = Clock(fleet(a=a, b=b))
    work = RoundWork(
        {"a": 2 * 10**9, "b": 2 * 10**9},
        [ModelMessage("a", "b", 8 * MB), ModelMessage("b", "a", 8 * MB)],
    )
    times = clock.advance(work)
    assert ends(times) == {"a": 4, "b": 18}
    assert times.end == 18 * SECOND
    assert times.peers["a"].transferring == 2 * SECOND
    assert times.peers["b"].transferring == 8 * SECOND

    times = clock.advance(work)
    assert ends(times) == {"a": 22, "b": 28}
    assert times.peers["a"].waiting == 14 * SECOND  # from 4 s to 18 s
    assert times.peers["b"].waiting == times.peers["b"].transferring == 0


def test_a_request_is_sent_first_and_waits_until_the_model_is_published():
    """Each requests 1 MB and gets 4 MB, at 1 MB/s and with 0.5 s of latency.

    Requests arrive at 1.5 s, and models 4.5 s later, at 6 s. With 1 s and 3 s of computing the
    peers end at 7 s and 9 s. In round 1, a's request arrives at b at 8.5 s and waits until 9 s.
    """
    a = Device(speed=3e9, up=8, down=8)
    b = Device(speed=1e9, up=8, down=8)
    clock = Clock(fleet(Network(latency=500), a=a, b=b))
    work = RoundWork(
        {"a": 3 * 10**9, "b": 3 * 10**9},
        [ModelMessage("a", "b", 4 * MB, MB), ModelMessage("b", "a", 4 * MB, MB)],
    )
    assert ends(clock.advance(work)) == {"a": 7, "b": 9}
    times = clock.advance(work)
    # b's model leaves at 9 s. b's request goes out from 9 s to 10 s beside it: each gets 0.5 MB/s,
    # so the request is through at 11 s with 1 MB of the model, which has its last byte at 14 s.
    assert times.peers["a"].end == round((14 + 0.5 + 1) * SECOND)
    assert times.peers["a"].waiting == SECOND // 2
    # a gets the request at 11.5 s and sends until 15.5 s.
    assert times.peers["b"].end == round((15.5 + 0.5 + 3) * SECOND)


def test_a_server_waits_for_the_slowest_of_its_cohort():
    """Two downloads of 4 MB share the server's 2 MB/s: both arrive at 4 s.

    a computes 1 s and uploads 4 MB with 4 MB/s from 5 s to 6 s; b computes 3 s and uploads with
    1 MB/s from 7 s to 11 s.
    """
    clock = Clock(
        fleet(
            Network(server_up=16, server_down=160),
            a=Device(speed=3e9, up=32, down=80),
            b=Device(speed=1e9, up=8, down=80),
            c=Device(speed=1e9),
        )
    )
    messages = [ModelMessage("server", peer, 4 * MB) for peer in "ab"]
    messages += [ModelMessage(peer, "server", 4 * MB) for peer in "ab"]
    work = RoundWork({"a": 3 * 10**9, "b": 3 * 10**9}, messages, has_server=True)
    times = clock.advance(work)
    assert ends(times) == {"a": 11, "b": 11}
    assert times.peers["a"].waiting == 5 * SECOND
    assert times.peers["b"].transferring == 8 * SECOND
    assert clock.advance(work).end == 22 * SECOND


def test_with_unlimited_links_and_equal_devices_a_round_lasts_as_long_as_it_computes():
    peers = [f"{number:03d}" for number in range(10)]
    clock = Clock(Fleet(dict.fromkeys(peers, Device(speed=3e9)), dict.fromkeys(peers, "devices")))
    messages = []
    for number, peer in enumerate(peers):
        for step in (1, 2, 3):
            messages.append(ModelMessage(peers[(number + step) % 10], peer, 5 * MB, MB))
    for t in range(5):
        times = clock.advance(RoundWork(dict.fromkeys(peers, 10**9), messages))
        assert times.end == (t + 1) * (SECOND // 3 + 1)  # whole nanoseconds, rounded up
        assert {of_peer.computing for of_peer in times.peers.values()} == {SECOND // 3 + 1}


def test_a_peer_without_neighbours_is_not_held_up_by_others():
    clock = Clock(
        fleet(a=Device(speed=1e9, up=8, down=8), b=Device(speed=1e6), c=Device(speed=1e9))
    )
    work = RoundWork(dict.fromkeys("abc", 10**9), [ModelMessage("a", "b", MB)])
    for _ in range(3):
        times = clock.advance(work)
    assert ends(times)["c"] == 3
    assert ends(times)["b"] > 3000


def test_who_takes_no_part_is_ready_with_the_first_of_the_others():
    clock = Clock(fleet(a=Device(speed=1e9), b=Device(speed=1e8), c=Device(speed=1e9)))
    clock.advance(RoundWork({"a": 10**9, "b": 10**9}))
    times = clock.advance(RoundWork({"c": 10**9}, [ModelMessage("c", "a", MB)]))
    assert times.peers["c"].start == SECOND


def test_a_device_goes_on_where_it_stopped_when_it_is_online_again():
    """b is online from 00:01 on. Its 4 MB leave from then on at 1 MB/s; a computes 60 s more."""
    a = Device(speed=1e9, down=800)
    b = Device(speed=1e9, up=8, daily="00:01-00:02")
    clock = Clock(fleet(a=a, b=b))
    work = RoundWork({"a": 60 * 10**9, "b": 90 * 10**9}, [ModelMessage("b", "a", 4 * MB)])
    times = clock.advance(work)
    assert ends(times)["a"] == 60 + 4 + 60
    # b computes from 00:01 to 00:02, and the other 30 s from 00:01 of the next day on.
    assert ends(times)["b"] == 24 * 3600 + 60 + 30
    # a's minute until b is online is no transfer, and b's time offline is not computing.
    assert phases(times, "a") == {"computing": 60, "transferring": 4, "waiting": 60, "offline": 0}
    offline = 24 * 3600
    assert phases(times, "b") == {
        "computing": 90,
        "transferring": 0,
        "waiting": 0,
        "offline": offline,
    }


def test_with_a_server_time_offline_is_neither_computing_nor_a_transfer():
    """b is online in the first minute of the day. It downloads for 20 s, and computes for 50 s: 40
    s, and 10 s of the next day. Its upload takes the next 20 s. a is ready at 2 s and waits."""
    b = Device(speed=1e9, up=8, down=8, daily="00:00-00:01")
    clock = Clock(fleet(a=Device(speed=5e10), b=b))
    messages = [ModelMessage("server", peer, 20 * MB) for peer in "ab"]
    messages += [ModelMessage(peer, "server", 20 * MB) for peer in "ab"]
    operations = dict.fromkeys("ab", 50 * 10**9)
    times = clock.advance(RoundWork(operations, messages, has_server=True))
    day = 24 * 3600
    assert times.end == (day + 10 + 20) * SECOND
    offline = day - 60
    assert phases(times, "b") == {
        "computing": 50,
        "transferring": 40,
        "waiting": 0,
        "offline": offline,
    }
    assert phases(times, "a")["waiting"] == day + 30 - 1


def test_devices_that_are_never_online_together_are_refused() -> None:
    a = Device(speed=1e9, up=8, daily="08:00-18:00")
    b = Device(speed=1e9, up=8, daily="20:00-06:00")
    clock = Clock(fleet(a=a, b=b))
    with refused(RunError):
        clock.advance(RoundWork({"a": 1, "b": 1}, [ModelMessage("b", "a", MB)]))


def test_links_that_are_too_slow_are_named_as_the_reason() -> None:
    """Two copies share a byte per second: each gets half a byte, which is none."""
    slow = Device(speed=1e9, up=1e-30)
    clock = Clock(fleet(a=slow, b=slow, c=slow))
    messages = [ModelMessage("a", receiver, MB) for receiver in "bc"]
    with refused(RunError):
        clock.advance(RoundWork(dict.fromkeys("abc", 1), messages))

    slow_server = Network(server_up=1e-30)
    clock = Clock(fleet(slow_server, a=slow, b=slow, c=slow))
    messages = [ModelMessage("server", peer, MB) for peer in "abc"]
    with refused(RunError):
        clock.advance(RoundWork(dict.fromkeys("abc", 1), messages, has_server=True))


def test_random_turns_and_latencies_follow_the_seed():
    def run(seed: int) -> list[int]:
        devices = dict.fromkeys(
            "abc", Device(speed=1e9, up=8, down=8, on_hours=0.01, off_hours=0.01)
        )
        network = Network(latency=100, latency_sigma=1)
        clock = Clock(Fleet(devices, dict.fromkeys("abc", "x"), network, seed=seed))
        pairs = [(sender, receiver) for sender in "abc" for receiver in "abc" if sender != receiver]
        messages = [ModelMessage(*pair, 4 * MB, MB) for pair in pairs]
        work = RoundWork(dict.fromkeys("abc", 10**10), messages)
        return [clock.advance(work).end for _ in range(5)]

    assert run(0) == [
        230_269_414_500,
        326_635_573_136,
        432_176_435_428,
        761_810_755_164,
        884_401_763_582,
    ]  # on every machine
    assert run(0) != run(1)


@pytest.mark.parametrize("name", ["hospitals", "phones", "edge-boards", "cloud-regions"])
def test_presets_are_dealt_by_the_seed(name: str):
    roster = [f"{number:03d}" for number in range(50)]
    first = make_fleet(name, {}, Network(), roster, 0)
    again = make_fleet(name, {}, Network(), roster, 0)
    other = make_fleet(name, {}, Network(), roster, 1)
    assert first is not None
    assert again is not None
    assert other is not None
    assert first.class_of == again.class_of != other.class_of
    assert first.latency("000", "001") > 0
    sizes = sorted(map(list(first.class_of.values()).count, set(first.class_of.values())))
    assert sum(sizes) == 50
    assert sizes[0] >= 5
