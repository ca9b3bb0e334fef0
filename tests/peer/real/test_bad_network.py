"""A slow network with limited bandwidth at one peer and broken connections: all peers take part in
every round."""

from collections.abc import Callable, Iterator

import pytest
import torch
from bad_network import LOOPBACK, Proxy, ProxyThread
from real_peers import TINY, Peers

from dispfl.config import compose
from dispfl.peer.deadlines import Deadlines
from dispfl.peer.local_federation import free_ports
from dispfl.topology import peer_names

ROUNDS = 10
NAMES = peer_names(8)
NARROW = "003"


@pytest.fixture
def proxies() -> Iterator[dict[str, Proxy]]:
    """Delays of 100+-50 ms, one exchange in twenty is reset, and one peer has 1 MB/s."""
    made = {
        name: Proxy(port, seed, (0.05, 0.15), 0.05, 1e6 if name == NARROW else float("inf"))
        for seed, (name, port) in enumerate(zip(NAMES, free_ports(len(NAMES)), strict=True))
    }
    thread = ProxyThread(made.values())
    thread.open()
    yield made
    thread.stop()


def test_all_peers_finish_every_round_and_broken_responses_are_resumed(
    federation: Callable[..., Peers], proxies: dict[str, Proxy]
) -> None:
    peers = federation(
        compose({}, [*TINY, "topology=random", "topology.degree=3", "peers=8", f"rounds={ROUNDS}"]),
        Deadlines(min=10.0, startup=120.0),
        addresses={
            name: (f"{LOOPBACK}:{proxy.target}", f"{LOOPBACK}:{proxy.port}")
            for name, proxy in proxies.items()
        },
    )
    peers.start(*NAMES)
    peers.until(lambda: len(peers.ended()) == len(NAMES))
    assert set(peers.ended().values()) == {0}
    for name in NAMES:
        assert sorted(peers.rounds(name)) == list(range(ROUNDS))
        assert torch.isfinite(peers.state(name).model.values).all()
    received = sum(
        len(entry["received"]) for name in NAMES for entry in peers.rounds(name).values()
    )
    assert (
        received > 0.9 * 8 * 3 * ROUNDS
    )  # a late retry may find that the others have left the round
    assert sum(proxy.resets for proxy in proxies.values()) > 0
    assert any("resuming transfer" in peers.log(name) for name in NAMES)
