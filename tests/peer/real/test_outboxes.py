"""Real sites in processes of their own that share only storage."""

from pathlib import Path

from real_peers import TINY, Peers, create_sites

from dispfl.config import compose
from dispfl.peer.deadlines import Deadlines
from dispfl.peer.local_federation import LOOPBACK, collect_results, free_ports
from dispfl.peer.transport.http import Limits
from dispfl.runs.directory import read_metrics, read_summary
from dispfl.runs.execute import ExperimentRun
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

    simulation = tmp_path / "simulated"
    ExperimentRun.create(experiment, simulation).run()
    collect_results(out)
    simulated, real = read_summary(simulation), read_summary(out)
    assert simulated is not None
    assert real is not None
    for key in ("weights_sha256", "scores", "busiest", "rounds", "failures"):
        assert real[key] == simulated[key], key
    for one, other in zip(read_metrics(out), read_metrics(simulation), strict=True):
        assert one["links"] == other["links"]
