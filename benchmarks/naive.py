"""Dis-PFL as simulations usually implement it, against ours: ratio of times at equal work with
equally many threads.

The baseline has the same algorithm, model (small CNN, 32x32 colour), peers, neighbours, epochs,
batch and sizes of data. It keeps a state dict and a dictionary of float masks for each peer. Every
round it deep-copies everyone's state dict, and each peer's again before it is loaded, mixed and
returned. Mixing adds up dictionaries, key by key. Pruning and regrowing sort whole layers. A
`DataLoader` (no worker processes: threads are equal) makes images one by one with Pillow: pad,
crop, mirror, to tensor, normalize. Each peer is evaluated before mixing, after mixing and after
training, through a `DataLoader` too. Peers train one after another, each with all threads.

Ours runs through `execute`, as `dispfl run` does, with its default evaluation: after mixing and
after training. The second line of a pair is at equal evaluation: the baseline leaves out the one
before mixing. Shares of time: the baseline's are timed while it runs; ours are a profile of one
peer's step.
"""

import copy
import cProfile
import pstats
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil

import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dispfl import Train
from dispfl.core.flat_module import FlatModule
from dispfl.core.sparsity import prune_rate
from dispfl.data.batches import ResidentSamples
from dispfl.round.context import RunContext
from dispfl.round.round import initial_states, peer_step
from dispfl.runs.execute import execute
from dispfl.runs.loop import RunObserver
from measure import best_times, report
from synthetic import federation, first_step

LIMIT = 1 / 2.5
Weights = dict[str, Tensor]


class TransformedImages(Dataset[tuple[Tensor, int]]):
    """Images that are transformed when they are accessed."""

    def __init__(self, samples: ResidentSamples, training: bool) -> None:
        assert samples.index is not None
        assert samples.transform is not None
        self.images = [Image.fromarray(samples.inputs[row].numpy()) for row in samples.index]
        self.labels = samples.labels[samples.index].tolist()
        self.mean, self.std = (
            torch.tensor(v).view(-1, 1, 1) for v in (samples.transform.mean, samples.transform.std)
        )
        self.training = training

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        image = self.images[row]
        if self.training:
            padded, (width, height) = ImageOps.expand(image, 4), image.size
            left, top = random.randint(0, 8), random.randint(0, 8)
            image = padded.crop((left, top, left + width, top + height))
            if random.random() < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        size = (image.height, image.width, 3)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(size)
        return (pixels.permute(2, 0, 1).float().div(255) - self.mean) / self.std, self.labels[row]


class Naive:
    """All peers' dictionaries, and one module into which they are loaded."""

    def __init__(self, context: RunContext, before: bool) -> None:
        self.context, self.before, self.module, self.spent = (
            context,
            before,
            context.module(),
            Counter[str](),
        )
        train = context.settings.train
        self.loaders = {
            peer: (
                DataLoader(TransformedImages(data.train, True), train.batch_size, shuffle=True),  # type: ignore[arg-type]
                DataLoader(TransformedImages(data.test, False), train.batch_size),  # type: ignore[arg-type]
            )
            for peer, data in context.data.peers.items()
        }
        layout = FlatModule(context.module()).layout
        names, states = layout.names, initial_states(context)
        unpacked = {peer: state.model.unpack() for peer, state in states.items()}
        split = {peer: [layout.views(flat) for flat in both] for peer, both in unpacked.items()}
        self.models = {
            peer: dict(zip(names, weights, strict=True)) for peer, (weights, _) in split.items()
        }
        self.masks = {
            peer: dict(zip(names, [m.float() for m in ms], strict=True))
            for peer, (_, ms) in split.items()
        }
        self.next_masks = copy.deepcopy(self.masks)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.spent[what] += time.perf_counter() - began

    def batches(self, loader: DataLoader[tuple[Tensor, int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """A loader's batches, its work counted as data."""
        batches = iter(loader)
        while True:
            with self.timed("data"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def run_round(self, t: int) -> None:
        received = self.context.settings.topology.online_neighbours(
            self.context.settings.seed, t, self.context.roster
        )
        with self.timed("copying and mixing"):
            last, last_masks = copy.deepcopy(self.models), copy.deepcopy(self.masks)
        for peer in self.context.roster:
            if self.before:
                self.evaluate(peer, last[peer])
            with self.timed("copying and mixing"):
                group = sorted([peer, *received[peer]])
                mask = self.next_masks[peer]
                mixed = copy.deepcopy(last[peer])
                for name in mixed:
                    total = sum(last[k][name] for k in group)
                    mixed[name] = (
                        total / sum(last_masks[k][name] for k in group).clamp(min=1) * mask[name]
                    )
            self.evaluate(peer, mixed)
            self.train(peer, mixed, mask)
            with self.timed("copying and mixing"):
                self.models[peer], self.masks[peer] = copy.deepcopy(self.module.state_dict()), mask
            self.evaluate(peer, self.models[peer])
            self.evolve(peer, t)

    def train(self, peer: str, weights: Weights, mask: Weights) -> None:
        with self.timed("copying and mixing"):
            self.module.load_state_dict(copy.deepcopy(weights))
        self.module.train()
        s = self.context.settings.train
        optimizer = torch.optim.SGD(self.module.parameters(), lr=s.lr, weight_decay=s.weight_decay)
        for _ in range(s.epochs):
            for x, y in self.batches(self.loaders[peer][0]):
                with self.timed("training"):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(self.module(x), y).backward()
                    for name, parameter in self.module.named_parameters():
                        assert parameter.grad is not None
                        parameter.grad *= mask[name]
                    nn.utils.clip_grad_norm_(self.module.parameters(), s.clip_norm)
                    optimizer.step()
                    for name, parameter in self.module.named_parameters():
                        parameter.data *= mask[name]

    @torch.no_grad()
    def evaluate(self, peer: str, weights: Weights) -> float:
        with self.timed("copying and mixing"):
            self.module.load_state_dict(copy.deepcopy(weights))
        self.module.eval()
        right = 0
        for x, y in self.batches(self.loaders[peer][1]):
            with self.timed("evaluation"):
                right += int((self.module(x).argmax(1) == y).sum())
        return right / len(self.context.data.peers[peer].test)

    def evolve(self, peer: str, t: int) -> None:
        """The gradient of one batch, then whole sorts of each layer."""
        x, y = next(self.batches(self.loaders[peer][0]))
        with self.timed("training"):
            self.module.zero_grad()
            nn.functional.cross_entropy(self.module(x), y).backward()
        with self.timed("prune and regrow"):
            rate = prune_rate(t, self.context.settings.rounds, 0.5)
            masks = copy.deepcopy(self.masks[peer])
            for name, parameter in self.module.named_parameters():
                mask, kept = masks[name].view(-1), int(masks[name].sum())
                if kept == mask.numel():
                    continue
                assert parameter.grad is not None
                count = ceil(rate * kept)
                held = torch.where(mask > 0, parameter.data.view(-1).abs(), torch.inf)
                mask[torch.sort(held).indices[:count]] = 0
                empty = torch.where(mask == 0, parameter.grad.view(-1).abs(), -torch.inf)
                mask[torch.sort(empty, descending=True).indices[:count]] = 1
            self.next_masks[peer] = masks


def our_shares(context: RunContext) -> dict[str, float]:
    """Where the time of one peer's step goes."""
    network, step, profile = (
        FlatModule(context.module()),
        first_step(context, evaluate=True),
        cProfile.Profile(),
    )
    peer_step(context, network, *step)
    profile.enable()
    peer_step(context, network, *step)
    profile.disable()
    spent = Counter[str]()
    for (_, _, function), (_, _, _, cumulative, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        spent[function] += cumulative
    parts = {
        "data": spent["batches"],  # those of the evaluation too, a twenty-sixth of them
        "training": spent["learn"] + spent["gradient"] - spent["batches"],
        "evaluation": spent["score"],
        "copying and mixing": spent["mix"] + spent["pack"],
        "prune and regrow": spent["prune_and_regrow"],
    }
    return {what: round(taken / spent["peer_step"], 3) for what, taken in parts.items()}


def measure(threads: int) -> None:
    """One round of all peers, both ways in turn."""
    context = federation("cnn", 3, 32, samples=500, tests=100, train=Train(), peers=8, degree=4)
    context = context.changed(rounds=1)
    usual, equal = Naive(context, before=True), Naive(context, before=False)

    def measured_round(naive: Naive) -> None:
        torch.set_num_threads(threads)
        naive.spent.clear()
        naive.run_round(0)

    ours, *others = best_times(
        lambda: execute(context, None, threads, RunObserver()),
        lambda: measured_round(usual),
        lambda: measured_round(equal),
        repeats=3,
    )
    torch.set_num_threads(1)
    evaluates_global = our_shares(context)
    for naive, evaluation, taken in zip(
        (usual, equal), ("each its own", "equal"), others, strict=True
    ):
        whole = naive.spent.total()  # of the last repeat
        report(
            "naive",
            ours / taken,
            LIMIT,
            workers=threads,
            evaluation=evaluation,
            times_faster=round(taken / ours, 2),
            seconds=[round(ours, 2), round(taken, 2)],
            naive_shares={what: round(spent / whole, 3) for what, spent in naive.spent.items()},
            our_shares=evaluates_global,
        )


if __name__ == "__main__":
    for threads in (1, 2):
        measure(threads)
