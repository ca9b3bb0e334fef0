"""Dis-PFL as simulations usually implement it, against ours: ratio of times at equal work.

Both have equally many threads. The baseline has the same algorithm, model (small CNN, 32x32
colour), peers, neighbours, epochs, batch and sizes of data. It keeps a state dict and a dictionary
of float masks for each peer. Every round it deep-copies everyone's state dict, and each peer's
again before it is loaded, mixed and returned. Mixing adds up dictionaries, key by key. Pruning and
regrowing sort whole layers. A `DataLoader` (no worker processes: threads are equal) makes images
one by one with Pillow: pad, crop, mirror, to tensor, normalize. Each peer is evaluated before
mixing, after mixing and after training, through a `DataLoader` too. Peers train one after another,
each with all threads.

Ours runs through `execute`, as `dispfl run` does, with its default evaluation: after mixing and
after training. The second line of a pair is at equal evaluation: the baseline leaves out the one
before mixing. Shares of time: the baseline's are timed while it runs; ours are a profile of one
peer's step.
"""

import copy
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil

import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dispfl import Train
from dispfl.core.samples import Samples
from dispfl.core.sparsity import prune_rate
from dispfl.data.batches import ResidentSamples
from dispfl.round.context import RunContext
from dispfl.round.round import initial_states, peer_step
from dispfl.runs.execute import execute
from measure import best_times, report, seconds_by_function
from synthetic import PAPER_BATCH, federation, first_step

LIMIT = 1 / 2.5
ALPHA_0 = 0.5
ZERO = torch.tensor(0.0)
Weights = dict[str, Tensor]
Loader = DataLoader[tuple[Tensor, int]]


class TransformedImages(Dataset[tuple[Tensor, int]]):
    """Images that are transformed when they are accessed."""

    def __init__(self, samples: Samples, *, training: bool) -> None:
        assert isinstance(samples, ResidentSamples)
        assert samples.index is not None
        assert samples.transform is not None
        self.images = [Image.fromarray(samples.inputs[row].numpy()) for row in samples.index]
        self.labels = samples.labels[samples.index].tolist()
        self.mean = torch.tensor(samples.transform.mean).view(-1, 1, 1)
        self.std = torch.tensor(samples.transform.std).view(-1, 1, 1)
        self.training = training

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        image = self.images[row]
        if self.training:
            image = augmented(image)
        size = (image.height, image.width, 3)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(size)
        scaled = pixels.permute(2, 0, 1).float().div(255)
        return (scaled - self.mean) / self.std, self.labels[row]


def augmented(image: Image.Image) -> Image.Image:
    """Return the image padded, cropped and perhaps mirrored."""
    width, height = image.size
    left = random.randint(0, 8)
    top = random.randint(0, 8)
    image = ImageOps.expand(image, 4).crop((left, top, left + width, top + height))
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image


class Naive:
    """All peers' dictionaries, and one module into which they are loaded."""

    def __init__(self, context: RunContext, *, evaluates_before_mixing: bool) -> None:
        self.context = context
        self.evaluates_before_mixing = evaluates_before_mixing
        self.module = context.module()
        self.seconds: dict[str, float] = defaultdict(float)
        """The seconds that each part has taken."""
        self.train_loaders: dict[str, Loader] = {}
        self.test_loaders: dict[str, Loader] = {}
        batch_size = context.settings.train.batch_size
        for peer, data in context.data.peers.items():
            train_images = TransformedImages(data.train, training=True)
            test_images = TransformedImages(data.test, training=False)
            self.train_loaders[peer] = DataLoader(train_images, batch_size, shuffle=True)
            self.test_loaders[peer] = DataLoader(test_images, batch_size)

        self.models: dict[str, Weights] = {}
        self.masks: dict[str, Weights] = {}
        layout = context.layout
        for peer, state in initial_states(context).items():
            weights, mask = state.model.unpack()
            float_masks = [view.float() for view in layout.views(mask)]
            self.models[peer] = dict(zip(layout.names, layout.views(weights), strict=True))
            self.masks[peer] = dict(zip(layout.names, float_masks, strict=True))
        self.next_masks = copy.deepcopy(self.masks)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - began

    def batches(self, loader: Loader) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a loader's batches; its work is counted as data."""
        batches = iter(loader)
        while True:
            with self.timed("data"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def run_round(self, t: int) -> None:
        settings = self.context.settings
        roster = self.context.roster
        neighbours = settings.topology.online_neighbours(settings.seed, t, roster)
        with self.timed("copying and mixing"):
            last_models = copy.deepcopy(self.models)
            last_masks = copy.deepcopy(self.masks)
        for peer in roster:
            if self.evaluates_before_mixing:
                self.evaluate(peer, last_models[peer])
            with self.timed("copying and mixing"):
                senders = sorted([peer, *neighbours[peer]])
                mask = self.next_masks[peer]
                mixed = copy.deepcopy(last_models[peer])
                for name in mixed:
                    total = sum((last_models[sender][name] for sender in senders), ZERO)
                    holders = sum((last_masks[sender][name] for sender in senders), ZERO)
                    mixed[name] = total / holders.clamp(min=1) * mask[name]
            self.evaluate(peer, mixed)
            self.train(peer, mixed, mask)
            with self.timed("copying and mixing"):
                self.models[peer] = copy.deepcopy(self.module.state_dict())
                self.masks[peer] = mask
            self.evaluate(peer, self.models[peer])
            self.evolve(peer, t)

    def train(self, peer: str, weights: Weights, mask: Weights) -> None:
        with self.timed("copying and mixing"):
            self.module.load_state_dict(copy.deepcopy(weights))
        self.module.train()
        s = self.context.settings.train
        optimizer = torch.optim.SGD(self.module.parameters(), lr=s.lr, weight_decay=s.weight_decay)
        for _ in range(s.epochs):
            for x, y in self.batches(self.train_loaders[peer]):
                with self.timed("training"):
                    optimizer.zero_grad()
                    self.backward(x, y)
                    for name, parameter in self.module.named_parameters():
                        assert parameter.grad is not None
                        parameter.grad *= mask[name]
                    nn.utils.clip_grad_norm_(self.module.parameters(), s.clip_norm)
                    optimizer.step()
                    for name, parameter in self.module.named_parameters():
                        parameter.data *= mask[name]

    def backward(self, x: Tensor, y: Tensor) -> None:
        loss = nn.functional.cross_entropy(self.module(x), y)
        loss.backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def evaluate(self, peer: str, weights: Weights) -> float:
        with self.timed("copying and mixing"):
            self.module.load_state_dict(copy.deepcopy(weights))
        self.module.eval()
        correct = 0
        for x, y in self.batches(self.test_loaders[peer]):
            with self.timed("evaluation"):
                correct += int((self.module(x).argmax(1) == y).sum())
        return correct / len(self.context.data.peers[peer].test)

    def evolve(self, peer: str, t: int) -> None:
        """The gradient of one batch, then whole sorts of each layer."""
        x, y = next(self.batches(self.train_loaders[peer]))
        with self.timed("training"):
            self.module.zero_grad()
            self.backward(x, y)
        with self.timed("prune and regrow"):
            rate = prune_rate(t, self.context.settings.rounds, ALPHA_0)
            masks = copy.deepcopy(self.masks[peer])
            for name, parameter in self.module.named_parameters():
                mask = masks[name].view(-1)
                held_count = int(mask.sum())
                if held_count == mask.numel():
                    continue
                assert parameter.grad is not None
                count = ceil(rate * held_count)
                magnitudes = torch.where(mask > 0, parameter.data.view(-1).abs(), torch.inf)
                mask[torch.sort(magnitudes).indices[:count]] = 0
                gradients = torch.where(mask == 0, parameter.grad.view(-1).abs(), -torch.inf)
                mask[torch.sort(gradients, descending=True).indices[:count]] = 1
            self.next_masks[peer] = masks


def our_shares(context: RunContext) -> dict[str, float]:
    """Return where the time of one peer's step goes."""
    network = context.network()
    task, state, received = first_step(context, evaluate=True)

    def step() -> None:
        peer_step(context, network, task, state, received)

    step()
    spent = seconds_by_function(step)
    data = spent["batches.batches"]  # those of the evaluation too, a twenty-sixth of them
    parts = {
        "data": data,
        "training": spent["train.learn"] + spent["train.gradient"] - data,
        "evaluation": spent["train.score"],
        "copying and mixing": spent["dispfl.mix"] + spent["packed.under"],
        "prune and regrow": spent["sparsity.prune_and_regrow"],
    }
    step_seconds = spent["round.peer_step"]
    return {part: round(seconds / step_seconds, 3) for part, seconds in parts.items()}


def measure(threads: int) -> None:
    """One round of all peers, both ways in turn."""
    train = Train(batch_size=PAPER_BATCH)
    context = federation("cnn", 3, 32, samples=500, tests=100, train=train, peers=8, degree=4)
    context = context.changed(rounds=1, workers=threads)
    usual = Naive(context, evaluates_before_mixing=True)
    equal = Naive(context, evaluates_before_mixing=False)

    def naive_round(naive: Naive) -> None:
        torch.set_num_threads(threads)
        naive.seconds.clear()
        naive.run_round(0)

    our_time, usual_time, equal_time = best_times(
        lambda: execute(context),
        lambda: naive_round(usual),
        lambda: naive_round(equal),
        repeats=3,
    )
    torch.set_num_threads(1)
    shares = our_shares(context)
    for naive, evaluation, naive_time in (
        (usual, "each its own", usual_time),
        (equal, "equal", equal_time),
    ):
        naive_total = sum(naive.seconds.values())  # of the last repeat
        naive_shares = {}
        for part, seconds in naive.seconds.items():
            naive_shares[part] = round(seconds / naive_total, 3)
        report(
            "naive",
            our_time / naive_time,
            LIMIT,
            workers=threads,
            evaluation=evaluation,
            times_faster=round(naive_time / our_time, 2),
            seconds=[round(our_time, 2), round(naive_time, 2)],
            naive_shares=naive_shares,
            our_shares=shares,
        )


if __name__ == "__main__":
    for threads in (1, 2):
        measure(threads)
