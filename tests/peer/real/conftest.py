"""A federation of real processes, of which none is left running whatever happens."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from real_peers import Peers, settle

from dispfl.config import Experiment
from dispfl.peer.pace import Pace
from dispfl.roster import roster_names
from dispfl.up import LOOPBACK, free_ports

Whereabouts = Mapping[str, tuple[str, str]]


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Callable[..., Peers]]:
    """Makes the peers of an experiment, not started yet: on loopback, unless it is told where."""
    made = []

    def make(
        experiment: Experiment,
        pace: Pace,
        whereabouts: Whereabouts | None = None,
        namespaces: Mapping[str, str] | None = None,
    ) -> Peers:
        names = roster_names(experiment.peers)
        here = [f"{LOOPBACK}:{port}" for port in free_ports(len(names))]
        settle(experiment, tmp_path / "up", whereabouts or dict(zip(names, zip(here, here, strict=True), strict=True)))
        made.append(Peers(tmp_path / "up", names, pace, namespaces))
        return made[-1]

    yield make
    for peers in made:
        peers.stop()
