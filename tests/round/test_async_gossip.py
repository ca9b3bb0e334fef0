"""Asynchronous gossip gives what the functions of `examples/dispfl_one_file.py` give by hand."""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from math import cos, pi
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dispfl import DisPFL, Federation, PackedModel, RandomRegular, Run, Train
from dispfl.runs.metrics import weights_sha256

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "dispfl_one_file.py"


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
        schedule="async",
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
        rng = example.stream(settings.seed, "mask", name)
        m = example.random_mask(shapes, settings.density, rng)
        peers[name] = example.Peer(name, train, test, torch.where(m, w_0, 0.0), m, next_m=m)
    return net, peers


def digests(peers: dict[str, Any]) -> list[str]:
    return [weights_sha256(PackedModel.pack(peer.w, peer.m)) for peer in peers.values()]


def test_equal_devices_without_latency_take_synchronous_rounds_from_the_second_on(
    example: ModuleType,
) -> None:
    """All steps end together, and all models arrive at once: each step averages those of the step
    before. Only the first one has none, because nobody sends the model that it starts with."""
    settings = example.Settings(seed=3, rounds=3, degree=2, epochs=1)
    data = example.dirichlet_split(peers=4, alpha=0.3, seed=3)
    run = run_package(example, data, settings, classes={"board": {"share": 1.0, "speed": 1e9}})

    net, peers = first_peers(example, data, settings)
    for t in range(settings.rounds):
        graph = example.neighbours(sorted(peers), settings, t)
        after = {}
        for name, peer in peers.items():
            senders = [peers[sender] for sender in graph[name]] if t else []
            after[name] = example.next_state(net, peer, senders, settings, t)
        peers = after
        accuracies = [example.accuracy(net, peer) for peer in peers.values()]
        assert run.metrics[t]["scores"]["accuracy"]["per_peer"] == accuracies
    assert run.summary["weights_sha256"] == digests(peers)


def weighted_average(models: list[Any], weights: list[float], m_k: Tensor) -> Tensor:
    """(sum_j a_j w_j / sum_j a_j m_j) * m_k."""
    total = torch.zeros_like(m_k, dtype=torch.float32)
    holders = torch.zeros_like(total)
    for model, weight in zip(models, weights, strict=True):
        total += model.w * weight
        holders += model.m * weight
    return torch.where(m_k, total / torch.where(holders > 0, holders, 1.0), 0.0)


def step_by_hand(
    example: ModuleType, net: Any, peer: Any, arrived: dict[str, Any], settings: Any, number: int,
    now: int,
) -> Any:  # fmt: skip
    """Take the step of this number at this time; `arrived` has models with their staleness."""
    models = {name: model for name, (model, _) in arrived.items()} | {peer.name: peer}
    names = sorted(models)
    weights = [1.0 if name == peer.name else (1 + arrived[name][1]) ** -0.5 for name in names]
    w_half = weighted_average([models[name] for name in names], weights, peer.next_m)

    # Random streams follow the peer's own steps; the rates follow the time. A decay of 1/2 is
    # exact in floating point, however it is divided.
    lr = settings.lr * 0.5 ** (now - number)
    w_k = example.train(net, peer, w_half, peer.next_m, replace(settings, lr=lr), number)
    alpha = settings.alpha_0 / 2 * (1 + cos(pi * now / settings.rounds))
    rng = example.stream(settings.seed, "evolve", peer.name, number)
    batch = next(example.batches(peer.train, settings.batch_size, rng))
    sizes = [parameter.numel() for parameter in net.parameters()]
    gradient = example.dense_gradient(net, w_k, batch)
    next_m = example.search_mask(w_k, peer.next_m, gradient, alpha, sizes)
    return replace(peer, w=w_k, m=peer.next_m, next_m=next_m)


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_two_fast_and_two_slow_peers_average_what_has_arrived_by_its_staleness(
    example: ModuleType, reuse: bool, workers: int
) -> None:
    """Fast peers take a step in each tick, slow ones in every second. A round is a tick, the lower
    median. Models arrive at once, also those that a slow peer gets in the middle of its step."""
    settings = example.Settings(seed=1, rounds=5, degree=2, epochs=1, lr_decay=0.5)
    data = example.dirichlet_split(peers=4, alpha=0.3, seed=1)
    run = run_package(
        example,
        data,
        settings,
        classes={"fast": {"share": 0.5, "speed": 1e9}, "slow": {"share": 0.5, "speed": 5e8}},
        staleness={"reuse": reuse},
        workers=workers,
    )

    net, peers = first_peers(example, data, settings)
    ticks = {"000": 1, "001": 1, "002": 2, "003": 2}
    number = dict.fromkeys(peers, 0)
    starts: dict[str, list[int]] = {name: [] for name in peers}
    inbox: dict[str, dict[str, tuple[Any, int]]] = {name: {} for name in peers}
    training: dict[str, Any] = {}
    for now in range(settings.rounds + 1):
        ready = [name for name in peers if now % ticks[name] == 0]
        for name in ready if now else []:
            peers[name] = training[name]
            number[name] += 1
            graph = example.neighbours(sorted(peers), settings, number[name])
            for receiver in peers:
                if name in graph[receiver]:
                    inbox[receiver][name] = (peers[name], now)
        for name in ready:
            arrived = {}
            for sender, (model, finished) in inbox[name].items():
                arrived[sender] = (model, sum(start >= finished for start in starts[name]))
            if not reuse:
                inbox[name] = {}
            starts[name].append(now)
            training[name] = step_by_hand(
                example, net, peers[name], arrived, settings, number[name], now
            )
    assert run.summary["weights_sha256"] == digests(peers)
    assert [record["steps"]["per_peer"] for record in run.metrics] == [
        [1, 1, None, None],
        [1, 1, 1, 1],
        [1, 1, None, None],
        [1, 1, 1, 1],
        [1, 1, None, None],
    ]
    staleness = [record["staleness"] for record in run.metrics]
    assert any(each and each["mean"] > 0 for each in staleness) == reuse
