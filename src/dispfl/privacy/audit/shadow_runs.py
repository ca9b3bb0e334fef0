"""The federations that an audit trains: shadows of the run, and one with canaries.

Both are the run again, with its seed and settings, and so with the same first weights, masks and
neighbours, all of which every member knows. Only the peers' samples differ. In a shadow federation
a coin decides for each pair of a member and a non-member, of the same peer and class, on which of
the two the peer trains. Shadows come in twos, the second with all coins turned: so half of the
shadows were trained on any sample, and half were not.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dispfl.config import compose, differing_keys
from dispfl.core.rng import stream
from dispfl.core.samples import Samples
from dispfl.data.batches import ResidentSamples
from dispfl.data.fetch import ProgressCallback
from dispfl.data.labelled import LabelledDataset
from dispfl.data.split import Split
from dispfl.errors import RunError
from dispfl.experiment import Experiment
from dispfl.round.context import RunContext
from dispfl.runs.directory import RunDirectory, read_config
from dispfl.runs.execute import ExperimentRun
from dispfl.runs.grid import GridRun

FOLDER = "audit"
"""The folder of the federations that an audit trains, in the run directory."""


@dataclass(frozen=True)
class Candidates:
    """The samples of a peer that an attacker has to tell apart, in pairs of one class."""

    always: ResidentSamples
    """Members without a partner: every federation trains on them."""
    members: ResidentSamples
    outsiders: ResidentSamples
    """As many, on which no peer was trained, with the same labels in the same order."""

    def __len__(self) -> int:
        return len(self.members)

    def chosen(self, coins: Tensor) -> ResidentSamples:
        """Return a training set of the run's size: of each pair the member where its coin is
        true."""
        first, second = (rows.nonzero().squeeze(1) for rows in (coins, ~coins))
        return joined(self.always, self.members.take(first), self.outsiders.take(second))

    def canaries(self, count: int, classes: int, rng: torch.Generator) -> ResidentSamples:
        """Return outsiders with wrong labels, which a network learns only if it is trained on
        them."""
        chosen = joined(self.outsiders.take(torch.arange(count)))
        shift = torch.randint(1, classes, (count,), generator=rng)
        return replace(chosen, labels=(chosen.labels + shift) % classes)

    def with_canaries(self, canaries: ResidentSamples, coins: Tensor) -> "CanarySamples":
        """Return the training set with members replaced by as many canaries, of which coins leave
        some out."""
        real = joined(self.always, self.members.take(torch.arange(len(canaries), len(self))))
        present = torch.cat([torch.ones(len(real), dtype=torch.bool), coins])
        return CanarySamples(joined(real, canaries), present)


@dataclass(frozen=True)
class CanarySamples:
    """A peer's training samples with canaries, of which coins leave some out.

    Those that are left out still count: the number of a peer's samples is public, and must not tell
    the coins. They are in no batch.
    """

    samples: Samples
    present: Tensor
    """Which of them are there."""

    def __len__(self) -> int:
        return len(self.present)

    def batches(
        self, size: int, *, rng: torch.Generator | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of the samples that are there; an empty one if none is."""
        rows = self.present.nonzero().squeeze(1)
        if len(rows):
            yield from self.samples.take(rows).batches(size, rng=rng)
        else:
            x, y = next(self.samples.take(torch.tensor([0])).batches(1))
            yield x[:0], y[:0]

    def take(self, rows: Tensor) -> "CanarySamples":
        """Return some of the samples."""
        return CanarySamples(self.samples.take(rows), self.present[rows])


def joined(*parts: ResidentSamples) -> ResidentSamples:
    """Return samples one after another, in tensors of their own."""
    where = [torch.arange(len(part.labels)) if part.index is None else part.index for part in parts]
    inputs = torch.cat([part.inputs[rows] for part, rows in zip(parts, where, strict=True)])
    labels = torch.cat([part.labels[rows] for part, rows in zip(parts, where, strict=True)])
    return ResidentSamples(inputs, labels, None, parts[0].transform)


@dataclass(frozen=True)
class AllData:
    """The training data and, numbered after them, the test data."""

    train: Samples
    test: Samples
    labels: Tensor

    @classmethod
    def of(cls, data: LabelledDataset, augment: bool) -> "AllData":
        train, test = data.samples(augment=augment)
        return cls(train, test, torch.cat([data.train_labels, data.test_labels]))

    def read(self, rows: Tensor) -> ResidentSamples:
        """Return samples as tensors; those of a Dataset are read once, so that its random
        transforms are fixed."""
        tested = rows >= len(self.train)
        parts = [_read(self.train, rows[~tested]), _read(self.test, rows[tested] - len(self.train))]
        order = torch.cat([(~tested).nonzero(), tested.nonzero()]).squeeze(1).argsort()
        return joined(joined(*parts).take(order))


def _read(samples: Samples, rows: Tensor) -> ResidentSamples:
    taken = samples.take(rows if len(rows) else torch.tensor([0]))
    if not isinstance(taken, ResidentSamples):
        taken = ResidentSamples(*next(taken.batches(len(taken) + 1)))
    return taken.take(torch.arange(len(rows)))


def find_candidates(
    experiment: Experiment, data: LabelledDataset, split: Split
) -> list[Candidates]:
    """Return the candidates of each peer, in roster order.

    The partner of a member is a training sample that no peer has, of the same class; where none is
    left, one of the peer's test samples. No sample has two partners, and no partner is equal to a
    sample that a peer trained on.
    """
    everything = AllData.of(data, experiment.data.augment)
    free = torch.ones(len(everything.labels), dtype=torch.bool)
    for part in (split, split.unseen):
        if part is not None:
            free[torch.cat([*part.train, *part.validation])] = False
    if not experiment.partition.draws_from_one_pool:
        free[: len(data.train_labels)] = False
    trained = set(_contents(everything.read(torch.cat(split.train))))
    found = []
    for k, mine in enumerate(split.train):
        rng = stream(experiment.seed, "audit", "candidates", k)
        spare = free[: len(data.train_labels)].nonzero().squeeze(1)
        tested = torch.from_numpy(np.unique(split.test[k].numpy())) + len(data.train_labels)
        offered = torch.cat([_shuffled(spare, rng), _shuffled(tested[free[tested]], rng)])
        members, partners = _pairs(_shuffled(mine, rng), offered, everything.labels)
        free[partners] = False
        fresh = torch.tensor(
            [one not in trained for one in _contents(everything.read(partners))], dtype=torch.bool
        )
        members, partners = members[fresh], partners[fresh]
        order = torch.randperm(len(members), generator=rng)
        always = mine[~torch.isin(mine, members)]
        found.append(Candidates(*map(everything.read, (always, members[order], partners[order]))))
    return found


def _pairs(mine: Tensor, offered: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return members and as many of the offered samples, with equal labels, as far as they last."""
    members, partners = [mine[:0]], [mine[:0]]
    for label in np.unique(labels[mine].numpy()).tolist():
        own, others = mine[labels[mine] == label], offered[labels[offered] == label]
        members.append(own[: len(others)])
        partners.append(others[: len(own)])
    return torch.cat(members), torch.cat(partners)


def _shuffled(rows: Tensor, rng: torch.Generator) -> Tensor:
    return rows[torch.randperm(len(rows), generator=rng)]


def _contents(samples: ResidentSamples) -> list[bytes]:
    return [one.numpy().tobytes() for one in samples.inputs]


# What is trained


@dataclass(frozen=True)
class AuditRun(GridRun):
    """A run that an audit trains, with data of its own."""

    context: RunContext
    data: Callable[[], Mapping[str, Samples]]
    """Returns each peer's training samples."""

    @property
    def title(self) -> str:
        return self.path.name

    @property
    def training(self) -> str:
        return str(self.path)  # no two have the same data

    def start(
        self, directory: RunDirectory, decoding: ProgressCallback | None = None
    ) -> ExperimentRun:
        if not (self.path / "config.toml").exists():
            directory.write_config(self.experiment.to_toml())
        train = self.data()
        peers = {
            name: replace(data, train=train.get(name, data.train))
            for name, data in self.context.peers.items()
        }
        return ExperimentRun(self.experiment, replace(self.context, peers=peers), directory)

    def check(self) -> None:
        """Refuse a directory of another run: the audited one may have been extended or repeated
        since."""
        if not (self.path / "config.toml").exists():
            return
        for key, (was, now) in differing_keys(
            compose(read_config(self.path)), self.experiment
        ).items():
            if key not in ("data.dir", "workers"):
                raise RunError(
                    f"{self.path} was trained with {key}={was}, the audited run has {now}. Delete"
                    f" {self.path.parent} to audit it anew."
                )


def trained_again(
    name: str,
    path: Path,
    experiment: Experiment,
    context: RunContext,
    data: Callable[[], Mapping[str, Samples]],
) -> AuditRun:
    """Return a run like the one in a directory, with other training data, evaluated at its end
    only.

    Peers train one by one: stacked ones would need equally many samples.
    """
    changes = {
        "eval_every": experiment.rounds,
        "engine": "inprocess",
        "vmap_peers": 1,
        "unseen_peers": 0,
    }
    again = experiment.model_copy(update=changes)
    context = replace(
        context, eval_every=again.eval_every, vmap_peers=1, unseen={}, global_test=None
    )
    return AuditRun({FOLDER: name}, again, path / FOLDER / name, context, data)
