"""Dis-PFL in one file: decentralized sparse training of personal models (Dai et al., ICML 2022).

    python examples/dispfl_one_file.py

For readers of the paper. Each function is an equation or a few lines of Algorithms 1 and 2, which
it cites. Sixteen peers with 96 images each train for 16 rounds, without a server; the accuracy is
the mean over the peers, each on test images with its own label distribution.

A model is one flat vector of weights w, and a mask m is a flat vector of booleans. The package
`dispfl` computes the same, bit for bit (tests/test_one_file.py), and adds everything else: other
methods, messages, checkpoints, clusters, real networks.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, cos, pi
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

IMAGES = Path(__file__).parent.parent / "src/dispfl/data/bundled/fashion-sample.npz"

Samples = tuple[Tensor, Tensor]  # inputs and labels
Data = list[tuple[Samples, Samples]]  # training and test samples of each peer


@dataclass(frozen=True)
class Settings:
    """The symbols of the paper, and its appendix "Hyper-Parameters"."""

    seed: int = 0
    rounds: int = 16  # T
    degree: int = 4  # neighbours of a peer in a round
    density: float = 0.5  # share of weights that a peer keeps: its capacity c_k
    alpha_0: float = 0.5  # share of the kept weights that round 0 replaces
    epochs: int = 5
    batch_size: int = 32
    lr: float = 0.1  # eta
    lr_decay: float = 0.998  # after each round
    weight_decay: float = 5e-4
    clip_norm: float = 10.0  # the authors' code clips gradients; the paper does not mention it


@dataclass
class Peer:
    """One client of the paper."""

    name: str
    train: Samples
    test: Samples
    w: Tensor  # w_{k,t}: zero outside m
    m: Tensor  # the mask that w was trained under
    next_m: Tensor  # m_{k,t}: the mask that Algorithm 2 found afterwards, used from the next mix on


Peers = dict[str, Peer]


# Every random draw has a generator of its own, named after seed, purpose, peer and round, so that
# the order in which peers run does not change any result.


def stream_seed(*names: str | int) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for name in names:
        text = f"{type(name).__name__}:{name}".encode()
        digest.update(len(text).to_bytes(4, "little") + text)
    return int.from_bytes(digest.digest(), "little") >> 1


def stream(*names: str | int) -> torch.Generator:
    return torch.Generator().manual_seed(stream_seed(*names))


# Masks


def erk_densities(shapes: list[torch.Size], density: float) -> list[float]:
    """Distribute the density over the layers by ERK: small layers are denser than large ones.

    A layer's density is eps * sum(shape) / prod(shape), with one eps for all layers, so that the
    whole model has the given density. Layers that would exceed 1 are dense, and eps is solved
    again for the others.
    """
    dense: set[int] = set()
    while True:
        sparse = set(range(len(shapes))) - dense
        kept = density * sum(shape.numel() for shape in shapes)
        kept -= sum(shapes[layer].numel() for layer in dense)
        eps = kept / max(1, sum(sum(shapes[layer]) for layer in sparse))

        densities = [1.0] * len(shapes)
        for layer in sparse:
            densities[layer] = eps * sum(shapes[layer]) / shapes[layer].numel()
        if max(densities) <= 1.0:
            return densities
        dense |= {layer for layer in sparse if densities[layer] > 1.0}


def random_mask(shapes: list[torch.Size], density: float, rng: torch.Generator) -> Tensor:
    """Keep a random part of each layer (Algorithm 1, line 2)."""
    parts = []
    for shape, layer_density in zip(shapes, erk_densities(shapes, density), strict=True):
        size = shape.numel()
        part = torch.ones(size, dtype=torch.bool)
        kept = max(1, int(layer_density * size + 1e-9 * size))  # 0.29 * 100 is 28.999...96
        if kept < size:
            part[torch.randperm(size, generator=rng)[kept:]] = False
        parts.append(part)
    return torch.cat(parts)


def search_mask(w: Tensor, m: Tensor, gradient: Tensor, alpha_t: float, sizes: list[int]) -> Tensor:
    """Algorithm 2, for each layer: prune the smallest kept weights, regrow as many others.

    Those with the largest dense gradient regrow. A layer's number of weights never changes.
    """
    next_m = m.clone()
    layers = zip(w.split(sizes), next_m.split(sizes), gradient.split(sizes), strict=True)
    for w_j, m_j, g_j in layers:
        kept = int(m_j.sum())
        replaced = ceil(alpha_t * kept)
        if kept == m_j.numel():
            continue  # a dense layer would regrow what it pruned

        kept_weights = m_j.nonzero().flatten()
        order = w_j[kept_weights].abs().argsort(stable=True)
        m_j[kept_weights[order[:replaced]]] = False  # m_{k,t+1/2}

        empty = (~m_j).nonzero().flatten()
        order = g_j[empty].abs().argsort(stable=True, descending=True)
        m_j[empty[order[:replaced]]] = True  # m_{k,t+1}
    return next_m


# One round


def neighbours(names: list[str], settings: Settings, t: int) -> dict[str, list[str]]:
    """Draw S_{k,t}, a new random graph in each round.

    The peers stand on a circle in random order, and each receives from those that are `degree`
    random offsets further on. So each also sends to as many: no peer is busier than another.
    """
    seed = settings.seed
    circle = sorted(names, key=lambda name: stream_seed(seed, "circle", name, t))
    offsets = sorted(range(1, len(names)), key=lambda step: stream_seed(seed, "offset", step, t))
    graph = {}
    for place, name in enumerate(circle):
        senders = [circle[(place + step) % len(circle)] for step in offsets[: settings.degree]]
        graph[name] = sorted(senders)
    return graph


def gossip_average(weights: list[Tensor], masks: list[Tensor], m_k: Tensor) -> Tensor:
    """Average each weight over the peers that hold it, then apply our own mask.

    Algorithm 1, line 7:  w_{k,t+1/2} = (sum_j w_j / sum_j m_j) * m_k

    A weight that no peer holds becomes 0.
    """
    holders = torch.stack(masks).sum(0)
    total = torch.zeros_like(weights[0])
    for w_j in weights:
        total += w_j
    return torch.where(m_k, total / holders.clamp(min=1), 0.0)


def batches(samples: Samples, size: int, rng: torch.Generator) -> Iterator[Samples]:
    """Yield the samples in random order."""
    inputs, labels = samples
    for rows in torch.randperm(len(labels), generator=rng).split(size):
        yield inputs[rows], labels[rows]


def dense_gradient(net: nn.Module, w: Tensor, batch: Samples) -> Tensor:
    """Return g(w), the gradient of the loss on a batch, also of weights that are masked out."""
    inputs, labels = batch
    vector_to_parameters(w, net.parameters())
    loss = cross_entropy(net(inputs), labels)
    return parameters_to_vector(torch.autograd.grad(loss, list(net.parameters())))


def train(net: nn.Module, peer: Peer, w: Tensor, m: Tensor, settings: Settings, t: int) -> Tensor:
    """Local sparse SGD (Algorithm 1, lines 8-14):  w <- w - eta * m * g(w)."""
    w = w.clone()
    eta = settings.lr * settings.lr_decay**t
    rng = stream(settings.seed, "batches", peer.name, t)
    for _ in range(settings.epochs):
        for batch in batches(peer.train, settings.batch_size, rng):
            g = torch.where(m, dense_gradient(net, w, batch), 0.0)
            clip = min(1.0, settings.clip_norm / (float(g.norm()) + 1e-6))
            w.mul_(1 - eta * settings.weight_decay).add_(g, alpha=-eta * clip)
    return w


def next_state(net: nn.Module, peer: Peer, senders: list[Peer], settings: Settings, t: int) -> Peer:
    """One peer's round: mix, train, search the next mask (Algorithm 1, lines 6-15)."""
    models = sorted([peer, *senders], key=lambda model: model.name)
    # The paper divides by m_{j,t}. We divide by the masks that the weights were trained under:
    # a neighbour's regrown weight is still zero, and would count as a value (deviation 2).
    m_k = peer.next_m
    w_half = gossip_average([j.w for j in models], [j.m for j in models], m_k)

    w_k = train(net, peer, w_half, m_k, settings, t)

    # Algorithm 2, lines 1 and 2: the prune rate, and the dense gradient on one batch.
    alpha_t = settings.alpha_0 / 2 * (1 + cos(pi * t / settings.rounds))
    rng = stream(settings.seed, "evolve", peer.name, t)
    gradient = dense_gradient(net, w_k, next(batches(peer.train, settings.batch_size, rng)))
    sizes = [parameter.numel() for parameter in net.parameters()]
    next_m = search_mask(w_k, m_k, gradient, alpha_t, sizes)
    return Peer(peer.name, peer.train, peer.test, w_k, m_k, next_m)


@torch.no_grad()
def accuracy(net: nn.Module, peer: Peer) -> float:
    """Return the share of the peer's test samples that its personal model classifies correctly."""
    inputs, labels = peer.test
    vector_to_parameters(peer.w, net.parameters())
    return float((net(inputs).argmax(1) == labels).double().mean())


def dispfl(make_net: Callable[[], nn.Module], data: Data, settings: Settings) -> Iterator[Peers]:
    """Algorithm 1: yield all peers after each round."""
    torch.manual_seed(stream_seed(settings.seed, "model"))
    net = make_net()
    shapes = [parameter.shape for parameter in net.parameters()]
    w_0 = parameters_to_vector(net.parameters()).detach()

    # Line 2. All peers start from the same weights, each under its own random mask (deviation 0).
    peers = {}
    for k, (train_samples, test_samples) in enumerate(data):
        name = f"{k:03d}"
        m = random_mask(shapes, settings.density, stream(settings.seed, "mask", name))
        peers[name] = Peer(name, train_samples, test_samples, torch.where(m, w_0, 0.0), m, next_m=m)

    for t in range(settings.rounds):  # line 4
        graph = neighbours(sorted(peers), settings, t)
        after = {}
        for name, peer in peers.items():  # line 5; every peer mixes models of the last round
            senders = [peers[sender] for sender in graph[name]]
            after[name] = next_state(net, peer, senders, settings, t)
        peers = after
        yield peers


# The experiment


def small_cnn() -> nn.Module:
    """Return a network of about 100,000 weights."""
    conv1 = [nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.ReLU()]
    conv2 = [nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU()]
    linear = [nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*conv1, *conv2, *linear)


def load_images(part: str) -> Samples:
    """Read the bundled sample of Fashion-MNIST: `train` or `test`."""
    with np.load(IMAGES) as arrays:
        pixels = torch.from_numpy(arrays[f"{part}_inputs"]).float().unsqueeze(1)
        labels = torch.from_numpy(arrays[f"{part}_labels"]).long()
    return (pixels / 255 - 0.286) / 0.353, labels


def dirichlet_split(peers: int, alpha: float, seed: int) -> Data:
    """Give each peer 96 training and 100 test images with its own Dirichlet(alpha) label shares.

    No two peers share a training image.
    """
    rng = np.random.default_rng(stream_seed(seed, "split"))
    x_train, y_train = load_images("train")
    x_test, y_test = load_images("test")
    unused = np.ones(len(y_train))
    data = []
    for _ in range(peers):
        label_shares = rng.dirichlet(np.full(10, alpha))

        p_train = label_shares[y_train] * unused
        train_rows = rng.choice(len(y_train), 96, replace=False, p=p_train / p_train.sum())
        unused[train_rows] = 0

        p_test = label_shares[y_test]
        test_rows = rng.choice(len(y_test), 100, replace=False, p=p_test / p_test.sum())

        train_samples = x_train[train_rows], y_train[train_rows]
        test_samples = x_test[test_rows], y_test[test_rows]
        data.append((train_samples, test_samples))
    return data


def main() -> None:
    settings = Settings()
    data = dirichlet_split(peers=16, alpha=0.3, seed=settings.seed)
    net = small_cnn()
    for t, peers in enumerate(dispfl(small_cnn, data, settings)):
        accuracies = [accuracy(net, peer) for peer in peers.values()]
        mean = sum(accuracies) / len(accuracies)
        print(f"round {t + 1:2}  accuracy {mean:.3f}  worst peer {min(accuracies):.2f}")


if __name__ == "__main__":
    main()
