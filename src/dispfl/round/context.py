"""What a round is made of: the context that all rounds of a run share, one peer's task, its result,
and the engine."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from dispfl.core.flat_module import FlatModule, Precision
from dispfl.core.layout import Layout
from dispfl.core.optimizers import OptimizerFactory
from dispfl.core.packed import PackedModel
from dispfl.core.report import Report
from dispfl.core.rng import forked_generators, global_stream
from dispfl.core.samples import Samples
from dispfl.core.task import Task
from dispfl.core.train import Train
from dispfl.data.batches import data_digest, label_range
from dispfl.errors import ConfigError, DataError, user_errors
from dispfl.extras import require
from dispfl.methods.base import FineTuning, GossipMethod, Method, PeerState
from dispfl.privacy.accountant import PrivacyPlan, PrivateHistory, make_plan
from dispfl.privacy.steps import Privacy, PrivateSteps, SecretStream, check_private_network
from dispfl.robust.attacks import Attack
from dispfl.round.ledger import MessageCost
from dispfl.topology import Topology
from dispfl.wire.codec import Codec, Wire

IGNORED_LABEL = -100
"""The label that torch's cross-entropy ignores."""


@dataclass(frozen=True)
class PeerData:
    """One peer's training and test data, and its validation data if it has any."""

    train: Samples
    test: Samples
    validation: Samples | None = None
    """For choices, such as when to stop; neither trained on nor tested with."""

    @property
    def parts(self) -> tuple[Samples, ...]:
        """All of its data."""
        return self.train, self.test, *([] if self.validation is None else [self.validation])


@dataclass(frozen=True)
class RunContext:
    """Everything that stays constant through a run."""

    model: Callable[[], nn.Module]
    peers: Mapping[str, PeerData]
    """The data of the peers in this process, by name."""
    method: Method
    topology: Topology
    train: Train
    task: Task
    seed: int
    rounds: int
    eval_every: int = 1
    eval_train: bool = False
    """Whether models are evaluated on the training data of their peers too."""
    device: str = "cpu"
    precision: Precision = "float32"
    wire: Wire = field(default_factory=Wire)
    vmap_peers: int = 1
    """How many peers with equally many samples train as one stack of models."""
    average_buffers: bool = False
    """Whether a simulated peer averages its buffers with those of the peers that it receives
    from."""
    optimizer: OptimizerFactory | None = None
    """Makes the optimizer of local training, instead of the one of `train`."""
    remote_peers: Sequence[str] = ()
    """Peers of the federation whose data are in other processes or on other machines."""
    known_layout: Layout | None = None
    """The network's layout, where another process has found it already."""
    input_shape: Sequence[int] | None = None
    """The shape of an input, where no data are here."""
    privacy: Privacy = field(default_factory=Privacy)
    secret_key: bytes = field(default=b"", repr=False)
    """With privacy: what batches and noise are drawn from; known to this process alone."""
    global_test: Samples | None = None
    """Test data on which every peer's model is evaluated too, besides its own test data."""
    unseen: Mapping[str, PeerData] = field(default_factory=dict)
    """Peers that do not take part in the rounds, by name: they join after the last one, to be
    evaluated."""
    unseen_steps: int = 20
    """The local steps of an unseen peer."""
    attack: Attack | None = None
    """Which peers lie, in a simulation of an attack."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", self.method.resolved(self.topology, len(self.roster)))

    @cached_property
    def roster(self) -> list[str]:
        """All peers' names, sorted: the order of every sum."""
        return sorted({*self.peers, *self.remote_peers})

    @property
    def byzantine(self) -> frozenset[str]:
        """The peers that lie; they are neither evaluated nor averaged in a global model's
        evaluation."""
        return self.attack.byzantine if self.attack else frozenset()

    @property
    def pulls(self) -> bool:
        """Whether peers request models with their own masks."""
        return (
            self.wire.exchange == "pull"
            and isinstance(self.method, GossipMethod)
            and self.method.pulls_masked
        )

    @cached_property
    def layout(self) -> Layout:
        """The layout of the network, with its units where the method leaves out whole units."""
        return self.known_layout or self.method.layout(self.module(), self.example)

    @cached_property
    def densities(self) -> dict[str, float]:
        """The density of each peer's model; one that joins after the run has that of the last
        peer."""
        peers = [peer for peer in self.roster if peer not in self.unseen]
        densities = dict(zip(peers, self.method.densities(len(peers)), strict=True))
        return {peer: densities.get(peer, densities[peers[-1]]) for peer in self.roster}

    @cached_property
    def announced(self) -> dict[str, tuple[int, ...]]:
        """The number of weights of each layer that each peer's masks keep, by its density."""
        densities = self.densities
        counts = {
            density: self.method.kept_counts(self.layout, density)
            for density in set(densities.values())
        }
        return {peer: counts[density] for peer, density in densities.items()}

    @cached_property
    def first_weights(self) -> Tensor:
        """The flat weights that all peers start from."""
        return FlatModule(self.module()).read()

    def peer_weights(self, peer: str) -> Tensor:
        """Return the flat weights that a peer starts from: those of all, or its own where the
        method wants that."""
        if not self.method.independent_init:
            return self.first_weights
        weights = FlatModule(self.module(peer)).read()
        if torch.equal(weights, self.first_weights):
            raise ConfigError(
                "method.first_weights is own, but the network has the same weights each time that"
                " it is built; give a function that draws them, or leave method.first_weights"
                " shared.",
                key="method.first_weights",
            )
        return weights

    def example(self) -> Tensor:
        """Return a batch of two inputs."""
        if self.peers:
            return next(next(iter(self.peers.values())).train.batches(2))[0]
        assert self.input_shape is not None, "a context without data needs the shape of an input"
        return torch.zeros(2, *self.input_shape)

    @cached_property
    def codec(self) -> Codec:
        """The codec of this run's messages."""
        return Codec(
            self.layout,
            self.method.always_dense(self.layout, set(self.densities.values())),
            self.wire,
        )

    def data_digest(self) -> str:
        """Return a digest of the data of the peers in this process, with which a resumed run knows
        them again."""
        everyone = {**self.peers, **self.unseen}
        parts = [part for peer in sorted(everyone) for part in everyone[peer].parts]
        return data_digest(parts if self.global_test is None else [*parts, self.global_test])

    def check(self) -> None:
        """Refuse data, a network or densities that do not fit each other, before anything is
        written or trained."""
        network = FlatModule(self.module(), self.device, self.precision)
        _ = self.codec  # finds the layout, and what a peer of each density keeps
        if self.privacy.enabled:
            self._check_privacy()
        peer = next(iter(self.peers))
        with (
            user_errors(f"Peer {peer}, before round 0"),
            forked_generators(self.device),
            torch.no_grad(),
        ):
            network.module.eval()
            outputs = network(next(self.peers[peer].train.batches(2))[0])
        if (
            self.task.loss is functional.cross_entropy
            and isinstance(outputs, Tensor)
            and outputs.dim() == 2
        ):
            self._check_labels(outputs.shape[1])

    def _check_privacy(self) -> None:
        require("privacy", "The table privacy")
        check_private_network(self.module())
        check_private_method(self.method)
        if self.eval_train:
            raise ConfigError(
                "eval_train is true, but with privacy nothing may be told about training data that"
                " is not accounted; leave it false.",
                key="eval_train",
            )
        if self.precision != "float32":
            raise ConfigError(
                f"precision is {self.precision}, but with privacy gradients are float32; omit it.",
                key="precision",
            )
        if self.vmap_peers > 1:
            raise ConfigError(
                f"vmap_peers is {self.vmap_peers}, but with privacy peers train one by one; use 1.",
                key="vmap_peers",
            )
        if self.train.noise_std:
            raise ConfigError(
                f"train.noise_std is {self.train.noise_std:g}: its noise is drawn from the public"
                " seed and protects nothing. With privacy leave it 0; privacy.noise_multiplier is"
                " the secret noise.",
                key="train.noise_std",
            )
        for peer in self.peers:
            self.privacy_plan(peer)
        for peer in self.unseen:
            self.joined_by(peer).privacy_plan(peer)

    def joined_by(self, peer: str) -> "RunContext":
        """Return the context in which an unseen peer takes its one step, at the initial learning
        rate."""
        settings = {"steps": self.unseen_steps, "schedule": "constant", "warmup": 0}
        return replace(
            self,
            peers={**self.peers, peer: self.unseen[peer]},
            train=self.train.model_copy(update=settings),
            known_layout=self.layout,
        )

    def privacy_plan(self, peer: str, history: PrivateHistory | None = None) -> PrivacyPlan:
        """Return how a peer of this process trains privately, after what a real site has spent."""
        p, samples = self.privacy, len(self.peers[peer].train)
        steps = self.method.private_steps(self.train, samples)
        noise, batch = p.noise_multiplier, self.train.batch_size
        rounds = 1 if peer in self.unseen else self._training_rounds
        plan = make_plan(p.epsilon, p.delta, noise, samples, batch, steps, rounds)
        return plan if history is None else plan.after(history)

    @cached_property
    def _training_rounds(self) -> int:
        return self.method.training_rounds(self.topology, self.seed, self.rounds, self.roster)

    def private_steps(self, task: "PeerTask", taken: int) -> PrivateSteps | None:
        """Return a peer's private steps of a round, after those taken in earlier rounds; None
        without privacy."""
        if not self.privacy.enabled or task.idle:
            return None
        peer, plan = task.peer, self.privacy_plan(task.peer, task.private)
        return PrivateSteps(
            SecretStream(self.secret_key),
            (peer, task.t) if task.private is None else (peer, task.t, task.private.rounds),
            plan.noise_multiplier,
            self.privacy.clip,
            plan.rate,
            plan.rate * len(self.peers[peer].train),
            None if plan.max_steps is None else plan.max_steps - taken,
        )

    def _check_labels(self, count: int) -> None:
        """Refuse labels that the network has no output for; labels of Datasets are only known once
        they are read."""
        for peer, data in {**self.peers, **self.unseen}.items():
            for which, samples in zip(("training", "test", "validation"), data.parts, strict=False):
                low, high = label_range(samples) or (0, 0)
                wrong = high if high >= count else low
                if wrong >= count or (wrong < 0 and wrong != IGNORED_LABEL):
                    raise DataError(
                        f"Peer {peer}'s {which} data have the label {wrong}, but the model has"
                        f" {count} outputs, for the labels 0 to {count - 1}. Give it more outputs,"
                        " or correct the labels."
                    )

    def module(self, peer: str | None = None) -> nn.Module:
        """Build the network with the weights that all peers start from, or with those that a peer
        draws."""
        with (
            global_stream(self.seed, "model", *([] if peer is None else [peer])),
            user_errors("Building the network"),
        ):
            return self.model()

    def evaluates(self, t: int) -> bool:
        """Whether all models are evaluated at the end of round t; after the last round they always
        are."""
        tuning = self.method.fine_tuning
        due = (t + 1) % self.eval_every == 0 and (tuning is None or (t + 1) % tuning.every == 0)
        return due or t + 1 == self.rounds


def check_private_method(method: Method) -> None:
    """Refuse a method that cannot be differentially private."""
    if not method.can_be_private or method.fine_tuning is not None:
        raise ConfigError(
            f"privacy does not work with method.name={method.name}, which uses training data in"
            " other ways than training steps. Use dispfl, dpsgd, fedavg, ditto or local.",
            key="method",
        )


@dataclass(frozen=True)
class PeerTask:
    """What one peer has to do in a round. It names other peers; the engine adds their states."""

    peer: str
    t: int
    graph: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Gossip round: the neighbours of every peer that is online."""
    server: PeerState | None = None
    """Server round: the state of the server that selected the peer."""
    global_model: PackedModel | None = None
    """Evaluation after the round: the global model, evaluated in place of the peer's own."""
    idle: bool = False
    """The peer neither exchanges nor trains in this round; its model may still be evaluated."""
    evaluate: bool = True
    """Evaluate the peer's model at the end."""
    fine_tuning: FineTuning | None = None
    """How the model is fine-tuned before it is evaluated."""
    private: PrivateHistory | None = None
    """Real site with privacy: the rounds of training that it has begun before, also those that a
    crash has undone. Each has spent its steps, and this one draws from a stream of its own. In a
    simulation the state counts, and a repeated round is the same."""


@dataclass(frozen=True)
class StepResult:
    """The result of one peer's step."""

    report: Report
    messages: Sequence[MessageCost] = ()
    """The messages sent for it."""
    upload: PackedModel | None = None
    """Server round: the model that the server receives."""
    state: PeerState | None = None
    """The peer's next state; None once the engine has stored it."""

    @property
    def next_state(self) -> PeerState:
        """The peer's next state, of a result that still has it."""
        assert self.state is not None
        return self.state

    def without_state(self) -> "StepResult":
        """Return the result for the round, without the state, which the engine keeps."""
        upload = self.upload if self.state is None else self.state.upload
        return replace(self, upload=upload, state=None)


class LazyStates(Mapping[str, PeerState]):
    """States of peers that are fetched on access: all of them may not fit into memory together."""

    def __init__(self, peers: Iterable[str], fetch: Callable[[str], PeerState]) -> None:
        self._peers, self._fetch = list(peers), fetch

    def __getitem__(self, peer: str) -> PeerState:
        return self._fetch(peer)

    def __iter__(self) -> Iterator[str]:
        return iter(self._peers)

    def __len__(self) -> int:
        return len(self._peers)


class Engine(Protocol):
    """Keeps the peers' states and runs their tasks, in any order, in any process."""

    @property
    def states(self) -> Mapping[str, PeerState]:
        """Every peer's state after the last finished round."""
        ...

    @property
    def evaluated(self) -> Mapping[str, PeerState]:
        """The state that each peer was last evaluated with, where that was a global model."""
        ...

    def restore(self, rounds: int) -> None:
        """Restore every peer's state after this many rounds, from the seed or from the
        checkpoint."""
        ...

    def partial_round(self, t: int) -> dict[str, StepResult]:
        """Restore the steps of round t that were finished before an interruption."""
        ...

    def run_tasks(self, tasks: Iterable[PeerTask]) -> Iterator[tuple[str, StepResult]]:
        """Run the tasks; yield each peer's name and result as soon as it is done."""
        ...

    def end_round(self) -> None:
        """End the round: the peers' next states become their states."""
        ...

    def flush(self, t: int) -> None:
        """Write the finished steps of round t that are not on the disk yet."""
        ...

    def close(self) -> None:
        """Release threads, processes and memory."""
        ...
