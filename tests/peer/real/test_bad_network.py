"""A network that is slow, narrow at one peer, and breaks connections: everyone takes part in every round."""

from collections.abc import Callable, Iterator

import pytest
import torch
from bad_network import LOOPBACK, Carrying, Proxy
from real_peers import TINY, Peers

from dispfl.config import compose
from dispfl.peer.pace import Pace
from dispfl.roster import roster_names
from dispfl.up import free_ports

ROUNDS = 10
NAMES = roster_names(8)
NARROW = "003"


@pytest.fixture
def proxies() -> Iterator[dict[str, Proxy]]:
    """100+-50 ms, one exchange in twenty is reset, and one peer has 1 MB/s."""
    made = {
        name: Proxy(port, seed, (0.05, 0.15), 0.05, 1e6 if name == NARROW else float("inf"))
        for seed, (name, port) in enumerate(zip(NAMES, free_ports(len(NAMES)), strict=True))
    }
    carrying = Carrying(made.values())
    carrying.open()
    yield made
    carrying.stop()


def test_everyone_finishes_every_round_and_broken_answers_are_gone_on_with(
    federation: Callable[..., Peers], proxies: dict[str, Proxy]
) -> None:
    peers = federation(
        compose({}, [*TINY, "topology=random", "topology.degree=3", "peers=8", f"rounds={ROUNDS}"]),
        Pace(floor=10.0, first=120.0),
        whereabouts={
            name: (f"{LOOPBACK}:{proxy.target}", f"{LOOPBACK}:{proxy.port}") for name, proxy in proxies.items()
        },
    )
    peers.start(*NAMES)
    peers.until(lambda: len(peers.ended()) == len(NAMES))
    assert set(peers.ended().values()) == {0}
    for name in NAMES:
        assert sorted(peers.rounds(name)) == list(range(ROUNDS))
        assert torch.isfinite(peers.state(name).model.values).all()
    heard = sum(len(entry["heard"]) for name in NAMES for entry in peers.rounds(name).values())
    assert heard > 0.9 * 8 * 3 * ROUNDS  # who asks anew too late may find that the others have left its round behind
    assert sum(proxy.resets for proxy in proxies.values()) > 0
    assert any("going on" in peers.log(name) for name in NAMES)
