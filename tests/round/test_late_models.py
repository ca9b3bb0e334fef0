"""With a deadline, rounds give what the functions of `examples/dispfl_one_file.py` give by hand."""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dispfl import DisPFL, Federation, PackedModel, RandomRegular, Run, Train
from dispfl.runs.metrics import weights_sha256

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "dispfl_one_file.py"
CLASSES = {
    "fast": {"peers": ["000", "001"], "speed": 1e9},
    "slow": {"peers": ["002"], "speed": 1e9, "up": 4.0},
}


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("dispfl_one_file", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dispfl_one_file"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    with torch.random.fork_rng(devices=[]):
        yield module
    del sys.modules["dispfl_one_file"]


def run_package(example: ModuleType, data: list[Any], settings: Any, **options: Any) -> Run:
    train = {
        key: getattr(settings, key)
        for key in ("epochs", "batch_size", "lr", "lr_decay", "weight_decay", "clip_norm")
    }
    federation = Federation(
        example.small_cnn,
        data,
        DisPFL(density=settings.density, alpha_0=settings.alpha_0),
        RandomRegular(degree=settings.degree),
        train=Train(**train),
        seed=settings.seed,
        rounds=settings.rounds,
        classes=CLASSES,
        eval_every=settings.rounds,
        **options,
    )
    return federation.run(progress=False)


def first_peers(example: ModuleType, data: list[Any], settings: Any) -> tuple[Any, dict[str, Any]]:
    """Return the network and the peers before their first step (Algorithm 1, line 2)."""
    torch.manual_seed(example.stream_seed(settings.seed, "model"))
    net = example.small_cnn()
    shapes = [parameter.shape for parameter in net.parameters()]
    w_0 = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
    peers = {}
    for k, (train, test) in enumerate(data):
        name = f"{k:03d}"
        m = example.random_mask(shapes, settings.density, example.stream(1, "mask", name))
        peers[name] = example.Peer(name, train, test, torch.where(m, w_0, 0.0), m, next_m=m)
    return net, peers


def answered(sender: Any, request: Tensor) -> Any:
    """Return what a sender answers to a request: its weights on the requested coordinates."""
    mask = sender.m & request
    return replace(sender, m=mask, w=torch.where(mask, sender.w, 0.0))


@pytest.mark.parametrize("workers", [1, 3])
def test_late_models_are_averaged_as_they_were_requested_in_the_round_in_which_they_have_arrived(
    example: ModuleType, workers: int
) -> None:
    """Three peers hear each other. A step takes 0.274 s, 002 sends with 0.5 MB/s, others at once.

    002's two models of round 0, 114 kB each, and its requests, 13 kB each, take 0.51 s. So the
    others go on at their deadline, 0.2 s, and in round 1 at once, at 0.474 s. In round 2, from
    0.749 s on, they have its models of round 0, and ask it again: these are late, too, and are
    averaged in round 4. 002 itself has the models of the others in time.
    """
    settings = example.Settings(seed=1, rounds=5, degree=2, epochs=1)
    data = example.dirichlet_split(peers=3, alpha=0.3, seed=1)
    run = run_package(example, data, settings, deadline=0.2, workers=workers)

    net, peers = first_peers(example, data, settings)
    late: dict[str, Any] = {}
    for t in range(settings.rounds):
        after = {}
        for name, peer in peers.items():
            senders = [other for other in peers.values() if other is not peer]
            if name != "002":
                senders = [other for other in senders if other.name != "002"]
                if t in (2, 4):
                    senders.append(late[name])
                if t in (0, 2):
                    late[name] = answered(peers["002"], peer.next_m)
            after[name] = example.next_state(net, peer, senders, settings, t)
        peers = after
    digests = [weights_sha256(PackedModel.pack(peer.w, peer.m)) for peer in peers.values()]
    assert run.summary["weights_sha256"] == digests

    missed = [record["missed_links"] for record in run.metrics]
    assert missed == ["2;2;-", "2;2;-", None, "2;2;-", None]
    ends = [record["simulated"]["end"]["per_peer"][0] for record in run.metrics]
    assert ends == pytest.approx([0.474, 0.749, 1.223, 1.498, 1.972], abs=0.001)


def test_with_a_deadline_that_nobody_misses_a_run_learns_the_same_in_the_same_time(
    example: ModuleType,
) -> None:
    settings = example.Settings(seed=1, rounds=3, degree=2, epochs=1)
    data = example.dirichlet_split(peers=3, alpha=0.3, seed=1)
    plain = run_package(example, data, settings)
    patient = run_package(example, data, settings, deadline=3600)
    assert patient.summary["weights_sha256"] == plain.summary["weights_sha256"]
    for before, after in zip(plain.metrics, patient.metrics, strict=True):
        assert after["message_bytes"] == before["message_bytes"]
        assert after["links"] == before["links"]
    # Evaluations, in the last round, take no time where it decides what is learned.
    for before, after in zip(plain.metrics[:-1], patient.metrics[:-1], strict=True):
        assert after["simulated"] == before["simulated"]
