"""Real sites in processes of their own that share only storage, or have other ways besides."""

from collections import Counter
from pathlib import Path

from real_peers import TINY, Peers, check_same_as_simulation, create_sites
from relay_process import RelayProcess

from dispfl.config import compose
from dispfl.peer.deadlines import Deadlines
from dispfl.peer.local_federation import LOOPBACK, free_ports
from dispfl.peer.transport.http import Limits
from dispfl.topology import peer_names


def test_sites_that_share_a_folder_and_a_reachable_one_get_the_models_of_the_simulation(
    tmp_path: Path,
) -> None:
    """The first site listens; the others have nothing but their outboxes. One is killed and
    restarted in between."""
    names = peer_names(4)
    direct, *stored = names
    overrides = ["topology=full", "peers=4", "rounds=5", "wire.exchange=push"]
    experiment = compose({}, [*TINY, *overrides])
    outboxes = {}
    for name in stored:
        (tmp_path / "share" / name).mkdir(parents=True)
        outboxes[name] = str(tmp_path / "share" / name)
    [port] = free_ports(1)
    address = f"{LOOPBACK}:{port}"
    out = tmp_path / "up"
    create_sites(experiment, out, {direct: (address, address)}, outboxes=outboxes)
    limits = Limits(outbox_interval=0.1)
    peers = Peers(out, names, Deadlines(min=60.0, startup=240.0), limits=limits)
    try:
        peers.start(*stored)  # they cannot ask the direct one for its key when they start
        peers.until(lambda: all((tmp_path / "share" / name / "head").exists() for name in stored))
        peers.start(direct)
        peers.until(lambda: all(peers.newest(name) >= 1 for name in names))
        peers.kill(stored[0])
        peers.start(stored[0])
        peers.until(lambda: len(peers.ended()) == len(names))
        for name in names:
            for other, status in peers.status(name)["peers"].items():
                way = "direct" if other == direct else f"outbox {outboxes[other]}"
                assert status["route"] == way
    finally:
        peers.stop()

    check_same_as_simulation(out, experiment)


def test_a_direct_a_relayed_and_two_stored_sites_get_the_models_of_the_simulation(
    tmp_path: Path,
) -> None:
    """One federation with all three ways."""
    names = peer_names(4)
    direct, relayed, *stored = names
    overrides = ["topology=full", "peers=4", "rounds=4", "wire.exchange=push"]
    experiment = compose({}, [*TINY, *overrides])
    relay = RelayProcess(tmp_path / "relay")
    [port] = free_ports(1)
    address = f"{LOOPBACK}:{port}"
    outboxes = {}
    for name in stored:
        (tmp_path / "share" / name).mkdir(parents=True)
        outboxes[name] = str(tmp_path / "share" / name)
    ways = {
        direct: "direct",
        relayed: relay.address.partition("#")[0],
        **{name: f"outbox {place}" for name, place in outboxes.items()},
    }
    out = tmp_path / "up"
    sites = create_sites(
        experiment, out, {direct: (address, address)}, {relayed: [relay.address]}, outboxes
    )
    relay.admit(sites)
    peers = Peers(
        out, names, Deadlines(min=60.0, startup=240.0), limits=Limits(outbox_interval=0.1)
    )
    try:
        relay.start()
        peers.start(*names)
        peers.until(lambda: len(peers.ended()) == len(names))
        assert set(peers.ended().values()) == {0}
        for name in names:
            for other, status in peers.status(name)["peers"].items():
                assert status["route"] == ways[other]
    finally:
        peers.stop()
        relay.stop()
    check_same_as_simulation(out, experiment)


def test_sites_that_share_a_folder_and_wait_for_nobody_average_each_others_models(
    tmp_path: Path,
) -> None:
    names = peer_names(3)
    overrides = ["topology=full", "peers=3", "rounds=100000", "wire.exchange=push"]
    experiment = compose({}, [*TINY, *overrides, "schedule=async"])
    outboxes = {}
    for name in names:
        (tmp_path / "share" / name).mkdir(parents=True)
        outboxes[name] = str(tmp_path / "share" / name)
    out = tmp_path / "up"
    create_sites(experiment, out, {}, outboxes=outboxes)
    deadlines = Deadlines(min=60.0, startup=240.0)
    peers = Peers(out, names, deadlines, limits=Limits(outbox_interval=0.1))

    def has_averaged_all_others_twice(name: str) -> bool:
        received = Counter[str]()
        for line in peers.rounds(name).values():
            received.update(line["received"])
        return all(received[other] >= 2 for other in names if other != name)

    try:
        peers.start(*names)
        peers.until(lambda: all(map(has_averaged_all_others_twice, names)), pause=0.5)
    finally:
        peers.stop()
