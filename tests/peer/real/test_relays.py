"""Real sites that nothing can connect to, and relays in processes of their own."""

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from namespaces import cable, hosts, ip, require_programs
from real_peers import TINY, Peers, check_same_as_simulation, create_sites
from relay_process import RelayProcess

from dispfl.config import compose
from dispfl.experiment import Experiment
from dispfl.peer.deadlines import Deadlines
from dispfl.peer.local_federation import LOOPBACK, free_ports
from dispfl.topology import peer_names

NAMES = peer_names(8)
REACHABLE = NAMES[:2]
UNREACHABLE = NAMES[2:]


@pytest.fixture
def relays(tmp_path: Path) -> Iterator[list[RelayProcess]]:
    """Two relays, not started yet."""
    made = [RelayProcess(tmp_path / f"relay-{number}") for number in (0, 1)]
    yield made
    for relay in made:
        relay.stop()


@contextlib.contextmanager
def federation(
    experiment: Experiment, out: Path, relays: Sequence[RelayProcess], namespaces: Mapping[str, str]
) -> Iterator[Peers]:
    """Eight sites, of which six listen nowhere."""
    ports = free_ports(len(REACHABLE))
    places = {name: f"{LOOPBACK}:{port}" for name, port in zip(REACHABLE, ports, strict=True)}
    addresses = {name: (place, place) for name, place in places.items()}
    own_relays = {name: [relay.address for relay in relays] for name in UNREACHABLE}
    sites = create_sites(experiment, out, addresses, own_relays)
    for relay in relays:
        relay.admit(sites)
    peers = Peers(out, NAMES, Deadlines(min=60.0, startup=240.0), namespaces)
    try:
        yield peers
    finally:
        peers.stop()


def routes(peers: Peers, name: str) -> dict[str, Any]:
    return {other: status["route"] for other, status in peers.status(name)["peers"].items()}


def test_eight_sites_of_which_six_are_unreachable_get_the_models_of_the_simulation(
    tmp_path: Path, relays: list[RelayProcess]
) -> None:
    """One of the two relays is killed in between, and the other one restarted."""
    experiment = compose({}, [*TINY, "topology=full", "peers=8", "rounds=6", "train.epochs=3"])
    with federation(experiment, tmp_path / "up", relays, {}) as peers:
        for relay in relays:
            relay.start()
        peers.start(*NAMES)
        peers.until(lambda: all(peers.newest(name) >= 1 for name in NAMES))
        relays[0].stop()
        peers.until(lambda: all(peers.newest(name) >= 3 for name in NAMES))
        relays[1].stop()
        time.sleep(0.5)
        relays[1].start()
        peers.until(lambda: len(peers.ended()) == len(NAMES))
        assert set(peers.ended().values()) == {0}, peers.log(NAMES[2])[-3000:]
        by_relay = relays[1].address.partition("#")[0]
        for name in NAMES:
            expected = {
                other: "direct" if other in REACHABLE else by_relay
                for other in NAMES
                if other != name
            }
            assert routes(peers, name) == expected
        check_same_as_simulation(peers.out, experiment, traffic=True)


RELAY_HOST = "10.78.99.1"
PROXY = "10.79.0.1"
BEHIND_PROXY = "002"


def connect(namespaces: dict[str, str]) -> None:
    """Two sites have a cable to the relay's host, the third one only to its proxy.

    No host forwards packets, and no site takes a connection from outside.
    """
    internet = namespaces["internet"]
    ip("-n", internet, "address", "add", f"{RELAY_HOST}/32", "dev", "lo")
    for number, name in enumerate(("000", "001", "proxy")):
        cable(namespaces[name], f"10.78.{number}.2", internet, f"10.78.{number}.1")
        way = (f"{RELAY_HOST}/32", "via", f"10.78.{number}.1")
        ip("-n", namespaces[name], "route", "add", *way)
    cable(namespaces[BEHIND_PROXY], "10.79.0.2", namespaces["proxy"], PROXY)
    for name in peer_names(3):
        inward = ("-A", "INPUT", "-p", "tcp", "--syn", "!", "-i", "lo", "-j", "DROP")
        ip("netns", "exec", namespaces[name], "iptables", *inward)


@contextlib.contextmanager
def tinyproxy(folder: Path, namespace: str) -> Iterator[Path]:
    """A proxy in a namespace; yield its log."""
    log = folder / "proxy.log"
    config = folder / "tinyproxy.conf"
    config.write_text(
        f'Port 8888\nListen {PROXY}\nTimeout 600\nLogLevel Connect\nLogFile "{log}"\n'
        "MaxClients 50\n"
    )
    command = ["ip", "netns", "exec", namespace, "tinyproxy", "-d", "-c", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield log
    finally:
        process.kill()
        process.wait()


def test_sites_that_nothing_can_connect_to_train_by_a_relay_one_of_them_through_a_proxy(
    tmp_path: Path,
) -> None:
    require_programs("ip", "iptables", "tinyproxy")
    names = peer_names(3)
    experiment = compose({}, [*TINY, "topology=full", "peers=3", "rounds=3"])
    with hosts([*names, "proxy", "internet"], connect) as namespaces:
        relay = RelayProcess(tmp_path / "relay", f"{RELAY_HOST}:7443", namespaces["internet"])
        sites = create_sites(
            experiment, tmp_path / "up", {}, {name: [relay.address] for name in names}
        )
        relay.admit(sites)
        own_namespaces = {name: namespaces[name] for name in names}
        deadlines = Deadlines(min=60.0, startup=240.0)
        peers = Peers(tmp_path / "up", names, deadlines, own_namespaces)
        peers.proxies[BEHIND_PROXY] = f"http://{PROXY}:8888"
        with tinyproxy(tmp_path, namespaces["proxy"]) as proxy_log:
            try:
                relay.start("--metrics", f"{LOOPBACK}:9465")
                peers.start(*names)
                peers.until(lambda: len(peers.ended()) == len(names))
                metrics = ip(
                    "netns", "exec", namespaces["internet"], sys.executable, "-c", READ_METRICS
                )
            finally:
                peers.stop()
                relay.stop()
        assert f"CONNECT {RELAY_HOST}:7443" in proxy_log.read_text()
    by_relay = relay.address.partition("#")[0]
    for name in names:
        assert sorted(peers.rounds(name)) == [0, 1, 2]
        others = [other for other in names if other != name]
        assert peers.rounds(name)[2]["received"] == others
        assert routes(peers, name) == dict.fromkeys(others, by_relay)
    calls = float(re.findall(r"^dispfl_relay_calls_total (.*)$", metrics, re.M)[0])
    assert calls >= 6  # each site calls both others
    check_same_as_simulation(peers.out, experiment, traffic=True)


READ_METRICS = """
from urllib.request import urlopen
print(urlopen("http://127.0.0.1:9465/metrics").read().decode())
"""
