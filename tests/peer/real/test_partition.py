"""Two halves in two network namespaces, with a virtual cable that is unplugged for a while."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator

import pytest
from real_peers import TINY, Peers
from slow_network import SLOW

from dispfl.config import compose
from dispfl.peer.deadlines import Deadlines
from dispfl.topology import peer_names

ROUNDS = 32
NAMES = peer_names(8)
SIDES = (NAMES[:4], NAMES[4:])


class Cable:
    """A virtual cable between two network namespaces, each with one address."""

    def __init__(self) -> None:
        self.namespaces = [f"dispfl-{os.getpid()}-{side}" for side in (0, 1)]
        self.addresses = ["10.77.0.1", "10.77.0.2"]

    def connect(self) -> None:
        one, other = self.namespaces
        for namespace in self.namespaces:
            _ip("netns", "add", namespace)
        _ip(
            "link",
            "add",
            "end0",
            "netns",
            one,
            "type",
            "veth",
            "peer",
            "name",
            "end1",
            "netns",
            other,
        )
        for side, namespace in enumerate(self.namespaces):
            _ip(
                "-n", namespace, "address", "add", f"{self.addresses[side]}/24", "dev", f"end{side}"
            )
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "link", "set", f"end{side}", "up")

    def unplug(self) -> None:
        """Disconnect: one side gets network errors, the packets of the other are lost."""
        _ip("-n", self.namespaces[1], "link", "set", "end1", "down")

    def plug_in(self) -> None:
        _ip("-n", self.namespaces[1], "link", "set", "end1", "up")

    def remove(self) -> None:
        for namespace in self.namespaces:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", namespace)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def cable() -> Iterator[Cable]:
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` command (Debian: apt-get install iproute2)")
    cable = Cable()
    try:
        cable.connect()
    except subprocess.CalledProcessError as problem:
        cable.remove()
        pytest.skip(f"network namespaces cannot be created here: {problem.stderr.decode().strip()}")
    yield cable
    cable.remove()


def test_two_halves_continue_alone_and_exchange_models_when_the_network_is_repaired(
    federation: Callable[..., Peers], cable: Cable
) -> None:
    where = {
        name: f"{cable.addresses[side]}:{4000 + place}"
        for side in (0, 1)
        for place, name in enumerate(SIDES[side])
    }
    peers = federation(
        compose({}, [*TINY, *SLOW, "topology=full", "peers=8", f"rounds={ROUNDS}"]),
        Deadlines(min=2.5, startup=120.0),
        addresses={name: (address, address) for name, address in where.items()},
        namespaces={name: cable.namespaces[side] for side in (0, 1) for name in SIDES[side]},
    )
    peers.start(*peers.names)

    def across(name: str, key: str) -> int:
        """The number of rounds in which peers of the other side answered, or were missed."""
        others = SIDES[0] if name in SIDES[1] else SIDES[1]
        return sum(peers.status(name)["peers"][other][key] for other in others)

    peers.until(lambda: all(peers.newest(name) >= 2 for name in NAMES))
    cable.unplug()
    parted = {name: peers.newest(name) for name in NAMES}
    peers.until(
        lambda: all(peers.newest(name) >= parted[name] + 4 for name in NAMES)
    )  # both halves continue
    alone = {name: peers.newest(name) for name in NAMES}
    answered, missed = (
        {name: across(name, key) for name in NAMES} for key in ("answered", "missed")
    )
    cable.plug_in()
    peers.until(lambda: all(across(name, "answered") > answered[name] for name in NAMES))
    peers.until(lambda: len(peers.ended()) == len(NAMES))

    for side, others in (SIDES, SIDES[::-1]):
        for name in side:
            rounds = peers.rounds(name)
            assert max(rounds) == ROUNDS - 1
            assert missed[name] > 0
            assert rounds[alone[name]]["received"]
            assert not set(rounds[alone[name]]["received"]) & set(others)
            assert any(
                set(entry["received"]) & set(others)
                for t, entry in rounds.items()
                if t > alone[name]
            )
    assert set(peers.ended().values()) == {0}


def test_a_site_whose_link_is_down_waits_and_joins_the_round_of_the_others_afterwards(
    federation: Callable[..., Peers], cable: Cable
) -> None:
    rounds = 100
    names = peer_names(4)
    cut_off, others = names[3], names[:3]
    side = {name: int(name == cut_off) for name in names}
    where = {
        name: f"{cable.addresses[side[name]]}:{4100 + place}" for place, name in enumerate(names)
    }
    peers = federation(
        compose({}, [*TINY, *SLOW, "topology=full", "peers=4", f"rounds={rounds}"]),
        Deadlines(min=2.5, startup=120.0),
        addresses={name: (address, address) for name, address in where.items()},
        namespaces={name: cable.namespaces[side[name]] for name in names},
    )
    peers.start(*names)
    peers.until(lambda: all(peers.newest(name) >= 2 for name in names))
    cable.unplug()
    peers.until(lambda: peers.status(cut_off)["state"] == "waiting")
    last = peers.newest(cut_off)
    peers.until(lambda: all(peers.newest(name) >= last + 10 for name in others))
    assert peers.status(cut_off)["waiting"] == "no member answers"
    assert peers.newest(cut_off) == last  # it has not trained on alone

    cable.plug_in()
    peers.until(lambda: peers.newest(cut_off) > last)
    assert peers.rounds(cut_off)[peers.newest(cut_off)]["received"]
    skipped = min(t for t in peers.rounds(cut_off) if t > last) - last
    assert skipped > 5
    peers.until(lambda: len(peers.ended()) == len(names))
    assert set(peers.ended().values()) == {0}
    assert all(peers.status(name)["state"] == "finished" for name in names)
