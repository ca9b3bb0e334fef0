"""Federations of real processes, which are killed after the test."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from real_peers import Peers, create_sites

from dispfl.experiment import Experiment
from dispfl.peer.deadlines import Deadlines
from dispfl.peer.local_federation import LOOPBACK, free_ports
from dispfl.topology import peer_names

Addresses = Mapping[str, tuple[str, str]]
"""By peer: where it listens and where others reach it."""


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Callable[..., Peers]]:
    """Create the peers of an experiment, not started yet; by default on loopback."""
    made = []

    def make(
        experiment: Experiment,
        deadlines: Deadlines,
        addresses: Addresses | None = None,
        namespaces: Mapping[str, str] | None = None,
    ) -> Peers:
        names = peer_names(experiment.peers)
        loopback = [f"{LOOPBACK}:{port}" for port in free_ports(len(names))]
        default = {name: (address, address) for name, address in zip(names, loopback, strict=True)}
        create_sites(experiment, tmp_path / "up", addresses or default)
        made.append(Peers(tmp_path / "up", names, deadlines, namespaces))
        return made[-1]

    yield make
    for peers in made:
        peers.stop()
