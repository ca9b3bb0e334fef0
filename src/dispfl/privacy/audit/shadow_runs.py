"""The federations that an audit trains, and what attackers see of a trained federation.

An audit trains shadows of the run, and one federation with canaries. Both are the run again, with
its seed and settings, and so with the same first weights, masks and neighbours, all of which every
member knows. Only the peers' samples differ. In a shadow federation a coin decides for each pair of
a member and a non-member, of the same peer and class, on which of the two the peer trains. Shadows
come in twos, the second with all coins turned: so half of the shadows were trained on any sample,
and half were not.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dispfl.config import compose, differing_keys
from dispfl.core.flat_module import loaded_network
from dispfl.core.packed import PackedModel
from dispfl.core.rng import stream
from dispfl.core.samples import Samples
from dispfl.data.batches import ResidentSamples
from dispfl.data.fetch import ProgressCallback
from dispfl.data.labelled import LabelledDataset
from dispfl.data.split import Split
from dispfl.engines.checkpoint import Checkpoints
from dispfl.errors import RunError
from dispfl.experiment import Experiment
from dispfl.methods.base import PeerState
from dispfl.round.context import RunContext
from dispfl.round.exchange import (
    choices_of,
    deliver,
    exchange_graph,
    published_model,
    requested_mask,
    round_senders,
)
from dispfl.runs.directory import RunDirectory, trusted_config
from dispfl.runs.execute import ExperimentRun
from dispfl.runs.grid import GridRun
from dispfl.runs.saved import SavedRun

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
        """Return a training set of the run's size: of each pair the member if its coin is true."""
        members = self.members.take(_rows_where(coins))
        outsiders = self.outsiders.take(_rows_where(~coins))
        return joined(self.always, members, outsiders)

    def canaries(self, count: int, classes: int, rng: torch.Generator) -> ResidentSamples:
        """Return outsiders with wrong labels, which a network learns only by training on them."""
        chosen = joined(self.outsiders.take(torch.arange(count)))
        shift = torch.randint(1, classes, (count,), generator=rng)
        return replace(chosen, labels=(chosen.labels + shift) % classes)

    def with_canaries(self, canaries: ResidentSamples, coins: Tensor) -> "CanarySamples":
        """Return the training set with as many canaries in place of members.

        Coins leave some of the canaries out.
        """
        remaining = self.members.take(torch.arange(len(canaries), len(self)))
        real = joined(self.always, remaining)
        present = torch.cat([torch.ones(len(real), dtype=torch.bool), coins])
        return CanarySamples(joined(real, canaries), present)


@dataclass(frozen=True)
class CanarySamples:
    """A peer's training samples with canaries, of which coins leave some out.

    Those that are left out still count: the number of a peer's samples is public, and must not
    reveal the coins. They are in no batch.
    """

    samples: Samples
    present: Tensor
    """Which of them are in batches."""

    def __len__(self) -> int:
        return len(self.present)

    def batches(
        self, size: int, *, rng: torch.Generator | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of the samples that are present; an empty one if none is."""
        rows = _rows_where(self.present)
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
    inputs = []
    labels = []
    for samples in parts:
        rows = samples.rows(torch.arange(len(samples)))
        inputs.append(samples.inputs[rows])
        labels.append(samples.labels[rows])
    return ResidentSamples(torch.cat(inputs), torch.cat(labels), None, parts[0].transform)


def _rows_where(condition: Tensor) -> Tensor:
    return condition.nonzero().squeeze(1)


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
        """Return samples as tensors.

        Those of a Dataset are read once, so that its random transforms are fixed.
        """
        is_test = rows >= len(self.train)
        train = _read(self.train, rows[~is_test])
        test = _read(self.test, rows[is_test] - len(self.train))
        order = torch.cat([_rows_where(~is_test), _rows_where(is_test)]).argsort()
        return joined(joined(train, test).take(order))


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
    train_size = len(everything.train)
    free = _free_samples(experiment, split, everything)
    trained = set(_contents(everything.read(torch.cat(split.train))))
    candidates = []
    for k, train_rows in enumerate(split.train):
        rng = stream(experiment.seed, "audit", "candidates", k)
        spare = _rows_where(free[:train_size])
        test_rows = torch.from_numpy(np.unique(split.test[k].numpy())) + train_size
        offered = torch.cat([_shuffled(spare, rng), _shuffled(test_rows[free[test_rows]], rng)])
        members, partners = _pairs(_shuffled(train_rows, rng), offered, everything.labels)
        free[partners] = False

        partner_contents = _contents(everything.read(partners))
        fresh = torch.tensor([content not in trained for content in partner_contents]).bool()
        members = members[fresh]
        partners = partners[fresh]
        order = torch.randperm(len(members), generator=rng)
        candidates.append(
            Candidates(
                always=everything.read(train_rows[~torch.isin(train_rows, members)]),
                members=everything.read(members[order]),
                outsiders=everything.read(partners[order]),
            )
        )
    return candidates


def _free_samples(experiment: Experiment, split: Split, everything: AllData) -> Tensor:
    """Return which samples may become partners: those that no peer trains on."""
    free = torch.ones(len(everything.labels), dtype=torch.bool)
    for peers in (split, split.unseen):
        if peers is not None:
            free[torch.cat([*peers.train, *peers.validation])] = False
    if not experiment.partition.draws_from_one_pool:
        free[: len(everything.train)] = False
    return free


def _pairs(rows: Tensor, offered: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return members and as many of the offered samples, with equal labels, as far as they last."""
    members = [rows[:0]]
    partners = [rows[:0]]
    for label in np.unique(labels[rows].numpy()).tolist():
        class_rows = rows[labels[rows] == label]
        class_offered = offered[labels[offered] == label]
        members.append(class_rows[: len(class_offered)])
        partners.append(class_offered[: len(class_rows)])
    return torch.cat(members), torch.cat(partners)


def _shuffled(rows: Tensor, rng: torch.Generator) -> Tensor:
    return rows[torch.randperm(len(rows), generator=rng)]


def _contents(samples: ResidentSamples) -> list[bytes]:
    return [sample.numpy().tobytes() for sample in samples.inputs]


# What an audit trains


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
        peers = dict(self.context.data.peers)
        for name, train in self.data().items():
            peers[name] = replace(peers[name], train=train)
        context = replace(self.context, data=self.context.data.with_peers(peers))
        return ExperimentRun(self.experiment, context, directory)

    def check(self) -> None:
        """Refuse a directory of another run: the audited one may have been extended since."""
        if not (self.path / "config.toml").exists():
            return
        saved = compose(trusted_config(self.path, own=self.experiment.to_toml()))
        for key, (before, audited) in differing_keys(saved, self.experiment).items():
            if key not in ("data.dir", "workers"):
                raise RunError(
                    f"{self.path} was trained with {key}={before}, the audited run has {audited}."
                    f" Delete {self.path.parent} to audit it anew."
                )


def trained_again(
    name: str,
    path: Path,
    experiment: Experiment,
    context: RunContext,
    data: Callable[[], Mapping[str, Samples]],
) -> AuditRun:
    """Return a run like the one in a directory, with other training data.

    It is evaluated at its end only. Peers train one by one: stacked ones would need equally many
    samples.
    """
    changes = {
        "eval_every": experiment.rounds,
        "engine": "inprocess",
        "vmap_peers": 1,
        "unseen_peers": 0,
    }
    again = experiment.model_copy(update=changes)
    run_data = replace(context.data, unseen={}, global_test=None)
    context = replace(context, settings=again, data=run_data)
    return AuditRun({FOLDER: name}, again, path / FOLDER / name, context, data)


# What attackers see

PERSONAL = "personal model"
RECEIVED = "what a neighbour received"

AttackedModel = Callable[[str], nn.Module | None]
"""Returns the model of a peer that attackers see, if there is one."""


class TrainedFederation:
    """The models in a run directory, as attackers see them."""

    def __init__(self, path: Path, context: RunContext) -> None:
        self.context = context
        self._saved = SavedRun(path)
        self._checkpoints = Checkpoints(path / "checkpoints")

    @cached_property
    def before_last_round(self) -> Mapping[str, PeerState]:
        """Every peer's state before the last round, in which its model was sent for the last time.

        Empty if it was not saved.
        """
        steps = self._checkpoints.load(self.context.settings.rounds - 1)
        return {name: step.next_state for name, step in steps.items()}

    def personal(self, peer: str) -> nn.Module:
        """Return a peer's personal model at the end."""
        state = self._saved.personal_state(peer)
        return loaded_network(self.context.module(), state.model, state.buffers)

    def received(self, peer: str) -> nn.Module | None:
        """Return the model that a neighbour can build from a peer's model of the last round.

        The neighbour is the first that received it; None where nobody did. Where it requested with
        its own mask, it has the peer's weights only where both hold them, and takes its own
        elsewhere, as it does for private weights.
        """
        context = self.context
        states = self.before_last_round
        receiver = self._first_receiver(peer)
        if receiver is None:
            return None
        request = requested_mask(context, states[receiver])
        published = published_model(context, states[peer])
        t = context.settings.rounds - 1
        model = deliver(context, context.codec, published, request, peer, receiver, t).model
        own_weights, _ = states[receiver].model.unpack()
        if request is not None:
            model = PackedModel.pack(model.restrict(request).over(own_weights), request)
        if context.private_mask is not None:
            model = model.joined(states[receiver].model.restrict(context.private_mask))
        return loaded_network(context.module(), model, states[receiver].buffers)

    def _first_receiver(self, peer: str) -> str | None:
        """The first peer that received this one's model in the last round."""
        t = self.context.settings.rounds - 1
        graph = exchange_graph(self.context, t)
        choices = choices_of(self.context, t, graph, self.before_last_round)
        senders = round_senders(self.context, t, graph, choices)
        for name in sorted(graph):
            if peer in senders[name]:
                return name
        return None

    def views(self) -> dict[str, AttackedModel]:
        """Return what there is to attack, by name."""
        views: dict[str, AttackedModel] = {PERSONAL: self.personal}
        method = self.context.method
        if method.gossips and self.before_last_round:
            views[RECEIVED] = self.received
        return views
