"""What rounds are made of: their shared context, a peer's task and its result, and the engine."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from dispfl.clock.schedule import ModelMessage
from dispfl.core.device_classes import (
    ClassTraining,
    DeviceClass,
    FittedDensities,
    assign_classes,
)
from dispfl.core.flat_module import FlatModule
from dispfl.core.inputs import Inputs
from dispfl.core.layout import Layout
from dispfl.core.metric import IGNORED_LABEL
from dispfl.core.optimizers import OptimizerFactory
from dispfl.core.packed import PackedModel, WeightMask
from dispfl.core.report import Report
from dispfl.core.rng import forked_generators, global_stream
from dispfl.core.samples import PeerData, Samples
from dispfl.core.task import Task
from dispfl.core.tensors import TensorSpec
from dispfl.core.train import Train, TrainingRun
from dispfl.data.batches import data_digest, label_range
from dispfl.errors import ConfigError, DataError, user_errors
from dispfl.experiment import RunSettings, Simulation
from dispfl.extras import require
from dispfl.methods.affinity import Affinity
from dispfl.methods.base import FineTuning, GossipMethod, Method, PeerState
from dispfl.privacy.accountant import PrivacyPlan, PrivateHistory, make_plan
from dispfl.privacy.steps import PrivateSteps, SecretStream, check_private_network
from dispfl.robust.attacks import Attack
from dispfl.round.ledger import MessageCost
from dispfl.topology import Topology
from dispfl.wire.codec import Codec


@dataclass(frozen=True)
class RunData:
    """The data of a run."""

    peers: Mapping[str, PeerData] = field(default_factory=dict)
    """The data of the peers in this process, by name."""
    remote_peers: Sequence[str] = ()
    """Peers of the federation whose data are in other processes or on other machines."""
    unseen: Mapping[str, PeerData] = field(default_factory=dict)
    """Peers that do not take part in the rounds, by name: they join after the last one, to be
    evaluated."""
    global_test: Samples | None = None
    """Test data on which every peer's model is evaluated too, besides its own test data."""

    @cached_property
    def roster(self) -> list[str]:
        """All peers' names, sorted: the order of every sum."""
        return sorted({*self.peers, *self.remote_peers})

    @property
    def participants(self) -> list[str]:
        """The peers that take part in the rounds: all but an unseen one that has joined."""
        return [peer for peer in self.roster if peer not in self.unseen]

    def with_peers(self, peers: Mapping[str, PeerData]) -> "RunData":
        """Return the data with those of some peers replaced or added."""
        return replace(self, peers={**self.peers, **peers})

    def digest(self) -> str:
        """Return a digest of all data in this process, with which a resumed run compares them."""
        everyone = {**self.peers, **self.unseen}
        parts: list[Samples] = []
        for peer in sorted(everyone):
            parts += everyone[peer].parts
        if self.global_test is not None:
            parts.append(self.global_test)
        return data_digest(parts)


@dataclass(frozen=True)
class RunContext:
    """Everything that stays constant through a run: its settings, its data, and its network."""

    settings: RunSettings
    data: RunData
    model: Callable[[], nn.Module]
    task: Task = field(default_factory=Task)
    optimizer: OptimizerFactory | None = None
    """Makes the optimizer of local training, instead of the one of `train`."""
    known_layout: Layout | None = None
    """The network's layout, where another process has found it already."""
    input_shape: Sequence[int] | None = None
    """The shape of an input, where no data are here."""
    fitted: FittedDensities | None = None
    """With `method.density=fit`: the density that fits each peer's device."""
    secret_key: bytes = field(default=b"", repr=False)
    """With privacy: what batches and noise are drawn from; known to this process alone."""
    step_counts: Mapping[str, int] = field(default_factory=dict)
    """With privacy and `schedule = "async"`: how many steps each peer takes in the run."""

    def changed(self, **settings: Any) -> "RunContext":
        """Return the same run with other settings."""
        return replace(self, settings=self.settings.model_copy(update=settings))

    @property
    def simulation(self) -> Simulation:
        """The settings of a simulated run."""
        assert isinstance(self.settings, Simulation), "a real site is not simulated"
        return self.settings

    @cached_property
    def method(self) -> Method:
        """The method, fitted to the topology and the number of peers."""
        return self.settings.method.resolved(self.settings.topology, len(self.roster))

    def choices(self, t: int) -> int:
        """Return how many of its neighbours of round t a peer chooses itself.

        It is 0 if the topology gives it all.
        """
        topology = self.settings.topology
        if not isinstance(self.method, GossipMethod) or not topology.offers_choice:
            return 0
        if self.settings.is_async:
            return 0
        neighbours = topology.connections(len(self.roster))
        return self.method.choices(neighbours, t, self.settings.rounds)

    def topology(self, t: int) -> Topology:
        """Return the topology of the neighbours of round t that a peer does not choose itself."""
        choices = self.choices(t)
        if not choices:
            return self.settings.topology
        return self.settings.topology.thinned(choices)

    @property
    def roster(self) -> list[str]:
        """All peers' names, sorted: the order of every sum."""
        return self.data.roster

    @cached_property
    def attack(self) -> Attack | None:
        """The simulated attack; None without one."""
        return self.settings.attack_among(self.data.participants)

    @property
    def byzantine(self) -> frozenset[str]:
        """The Byzantine peers; they are not evaluated, and no part of a global model."""
        return self.attack.byzantine if self.attack else frozenset()

    @property
    def honest_peers(self) -> list[str]:
        """All peers but the Byzantine ones, sorted."""
        return [peer for peer in self.roster if peer not in self.byzantine]

    @property
    def pulls(self) -> bool:
        """Whether peers request models with their own masks."""
        if self.settings.is_async:
            return False  # whole models: the receiver's next mask is not known yet
        return (
            self.settings.wire.exchange == "pull"
            and isinstance(self.method, GossipMethod)
            and self.method.pulls_masked
        )

    @cached_property
    def layout(self) -> Layout:
        """The layout of the network, with its units where the method leaves out whole units."""
        return self.known_layout or self.method.layout(self.module(), self.example)

    @cached_property
    def training(self) -> TrainingRun:
        """What the local training of all peers has in common."""
        return TrainingRun(
            settings=self.settings.train,
            task=self.task,
            seed=self.settings.seed,
            rounds=self.settings.rounds,
            optimizer=self.optimizer,
            first_weights=lambda: self.first_weights,
            layout=self.layout,
        )

    @cached_property
    def class_of(self) -> dict[str, str]:
        """The name of each peer's class, if there are classes."""
        if not isinstance(self.settings, Simulation):
            return {}
        return assign_classes(self.settings.classes, self.data.participants)

    def device_class(self, peer: str) -> DeviceClass | None:
        """Return a peer's class, if there are classes; an unseen peer has that of the last one."""
        if not self.class_of:
            return None
        name = self.class_of.get(peer) or self.class_of[self.data.participants[-1]]
        return self.simulation.classes[name]

    def train_of(self, peer: str) -> Train:
        """Return the settings of a peer's local training: those of all, or of its class."""
        device = self.device_class(peer)
        if device is None:
            return self.settings.train
        return device.train.applied_to(self.settings.train)

    def training_of(self, peer: str) -> TrainingRun:
        """Return what the local training of a peer needs of the run."""
        return replace(self.training, settings=self.train_of(peer))

    @cached_property
    def densities(self) -> dict[str, float]:
        """The density of each peer's model; an unseen peer has that of the last one."""
        peers = self.data.participants
        if self.fitted:
            densities = self.fitted.densities
        else:
            densities = dict(zip(peers, self.method.densities(len(peers)), strict=True))
        for peer in peers:
            device = self.device_class(peer)
            if device is not None and device.density is not None:
                densities[peer] = device.density
        return {peer: densities.get(peer, densities[peers[-1]]) for peer in self.roster}

    @cached_property
    def private_mask(self) -> WeightMask | None:
        """The mask of the weights that never leave a peer; None without any."""
        return self.method.private_mask(self.layout)

    @cached_property
    def shared_mask(self) -> WeightMask | None:
        """The mask of all other weights, which are sent; None if nothing is private."""
        if self.private_mask is None:
            return None
        return ~self.private_mask

    @cached_property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """The tensors that the method sends beside each model."""
        tensors = self.method.tensors(self.layout)
        for name, spec in tensors.items():
            if not isinstance(spec, TensorSpec):  # a user's method, without type checks
                raise ConfigError(
                    f"{type(self.method).__name__}.tensors declares {name} as {spec!r}; give a"
                    " dispfl.TensorSpec(shape, dtype).",
                    key="method",
                )
        return tensors

    @cached_property
    def announced(self) -> dict[str, tuple[int, ...]]:
        """The number of weights of each layer that each peer's messages hold, by its density."""
        densities = self.densities
        counts = {}
        for density in set(densities.values()):
            counts[density] = self.method.sent_counts(self.layout, density)
        return {peer: counts[density] for peer, density in densities.items()}

    @cached_property
    def first_weights(self) -> Tensor:
        """The flat weights that all peers start from."""
        return FlatModule(self.module()).read()

    def peer_weights(self, peer: str) -> Tensor:
        """Return the flat weights that a peer starts from: those of all, or its own."""
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

    def example(self) -> Inputs:
        """Return a batch of two inputs."""
        if self.data.peers:
            first_peer = next(iter(self.data.peers.values()))
            return next(first_peer.train.batches(2))[0]
        assert self.input_shape is not None, "a context without data needs the shape of an input"
        return torch.zeros(2, *self.input_shape)

    @cached_property
    def codec(self) -> Codec:
        """The codec of this run's messages."""
        return self.codec_of(set(self.densities.values()))

    def codec_of(self, densities: Collection[float]) -> Codec:
        """Return the codec of messages between peers of these densities."""
        layout = self.layout
        always_dense = self.method.always_dense(layout, densities)
        private = self.method.private_parameters(layout)
        return Codec(layout, always_dense, self.settings.wire, private, self.tensors)

    def check(self) -> None:
        """Refuse data, a network or densities that do not fit each other.

        Called before anything is written or trained.
        """
        if isinstance(self.settings, Simulation):
            self.settings.topology.check_roster(self.data.participants)
        network = self.network()
        _ = self.class_of  # refuses classes of peers that do not exist
        _ = self.codec  # finds the layout, and what a peer of each density keeps
        self._check_optimizer()
        if self.settings.privacy.enabled:
            self._check_privacy()
        peer = next(iter(self.data.peers))
        with (
            user_errors(f"Peer {peer}, before round 0"),
            forked_generators(self.settings.device),
            torch.no_grad(),
        ):
            network.module.eval()
            inputs, labels = next(self.data.peers[peer].train.batches(2))
            outputs = network(inputs)
            classifies = self.task.loss is functional.cross_entropy
            if classifies and outputs.dim() == 2:
                _check_one_hot(labels, peer)
                self._check_labels(outputs.shape[1])
            self._check_loss(outputs, network.to_device(labels))

    def _check_loss(self, outputs: Tensor, labels: Tensor) -> None:
        """Try the loss on outputs and labels of two samples."""
        compares = self.task.loss in (functional.mse_loss, functional.l1_loss)
        if compares and outputs.shape != labels.shape:
            name = getattr(self.task.loss, "__name__", "")
            raise DataError(
                f"The model's outputs for two samples have shape {list(outputs.shape)} and their"
                f" labels {list(labels.shape)}; {name} needs the same shape for both."
            )
        self.task.loss(outputs, labels)

    def _check_optimizer(self) -> None:
        if not self.method.plain_sgd:
            return
        if self.optimizer is not None or not self.settings.train.is_plain:
            raise ConfigError(
                f"method.name={self.method.name} is defined for plain SGD; use train.optimizer=sgd,"
                " train.momentum=0 and no optimizer of your own.",
                key="train.optimizer",
            )

    def _check_privacy(self) -> None:
        require("privacy", "The table privacy")
        if self.tensors:
            check_private_tensors(self.method)
        check_private_network(self.module())
        check_private_settings(self.settings)
        for peer in self.data.peers:
            self.privacy_plan(peer)
        for peer in self.data.unseen:
            self.joined_by(peer).privacy_plan(peer)

    def joined_by(self, peer: str) -> "RunContext":
        """Return the context in which an unseen peer takes its only step.

        The learning rate is the initial one.
        """
        steps = self.simulation.unseen_steps
        constant_rate = {"steps": steps, "schedule": "constant", "warmup": 0}
        joined = self.changed(train=self.train_of(peer).model_copy(update=constant_rate))
        if self.class_of:
            classes = {}
            for name, device in self.simulation.classes.items():
                classes[name] = device.model_copy(update={"train": ClassTraining()})
            joined = joined.changed(classes=classes)
        data = self.data.with_peers({peer: self.data.unseen[peer]})
        return replace(joined, data=data, known_layout=self.layout)

    def privacy_plan(self, peer: str, history: PrivateHistory | None = None) -> PrivacyPlan:
        """Return how a peer of this process trains privately, after what a real site has spent."""
        privacy = self.settings.privacy
        train = self.train_of(peer)
        samples = len(self.data.peers[peer].train)
        rounds = 1 if peer in self.data.unseen else self._training_rounds
        rounds = self.step_counts.get(peer, rounds)
        plan = make_plan(
            privacy.epsilon,
            privacy.delta,
            privacy.noise_multiplier,
            samples,
            train.batch_size,
            self.method.private_steps(train, samples),
            rounds,
        )
        if history is None:
            return plan
        return plan.after(history)

    @cached_property
    def _training_rounds(self) -> int:
        s = self.settings
        return self.method.training_rounds(s.topology, s.seed, s.rounds, self.roster)

    def private_steps(self, task: "PeerTask", taken: int) -> PrivateSteps | None:
        """Return a peer's private steps of a round, after those of earlier rounds.

        None without privacy.
        """
        if not self.settings.privacy.enabled or task.idle:
            return None
        plan = self.privacy_plan(task.peer, task.private)
        purpose: tuple[str | int, ...] = (task.peer, task.t)
        if task.private is not None:
            purpose = (*purpose, task.private.rounds)
        remaining = None
        if plan.max_steps is not None:
            remaining = plan.max_steps - taken
        return PrivateSteps(
            SecretStream(self.secret_key),
            purpose,
            plan.noise_multiplier,
            self.settings.privacy.clip,
            plan.rate,
            plan.rate * len(self.data.peers[task.peer].train),
            remaining,
        )

    def _check_labels(self, count: int) -> None:
        """Refuse labels that the network has no output for.

        Labels of Datasets are only known once they are read.
        """
        for peer, data in {**self.data.peers, **self.data.unseen}.items():
            purposes = ("training", "test", "validation")
            for purpose, samples in zip(purposes, data.parts, strict=False):
                low, high = label_range(samples) or (0, 0)
                label = high if high >= count else low
                if low == high == IGNORED_LABEL:
                    raise DataError(
                        f"Peer {peer}'s {purpose} data have the label {IGNORED_LABEL} only, which"
                        " cross-entropy ignores, so that nothing can be learned or measured; give"
                        " their classes."
                    )
                if label >= count or (label < 0 and label != IGNORED_LABEL):
                    raise DataError(
                        f"Peer {peer}'s {purpose} data have the label {label}, but the model has"
                        f" {count} outputs, for the labels 0 to {count - 1}. Give it more outputs,"
                        " or correct the labels."
                    )

    def module(self, peer: str | None = None) -> nn.Module:
        """Build the network with the weights that all peers start from, or that a peer draws."""
        purpose = ("model",) if peer is None else ("model", peer)
        with global_stream(self.settings.seed, *purpose), user_errors("Building the network"):
            return self.model()

    def network(self) -> FlatModule:
        """Build the network on the run's device, as a flat vector of weights."""
        s = self.settings
        return FlatModule(self.module(), s.device, s.precision, s.memory_format)

    def evaluates(self, t: int) -> bool:
        """Whether all models are evaluated at the end of round t, as they are after the last."""
        rounds = t + 1
        tuning = self.method.fine_tuning
        due = rounds % self.settings.eval_every == 0
        if tuning is not None:
            due = due and rounds % tuning.every == 0
        return due or rounds == self.settings.rounds


def _check_one_hot(labels: Tensor, peer: str) -> None:
    """Refuse one-hot labels, which metrics do not take for classes."""
    if labels.ndim != 2 or labels.shape[1] < 2:
        return
    is_binary = bool(((labels == 0) | (labels == 1)).all())
    if is_binary and bool((labels.sum(1) == 1).all()):
        raise DataError(
            f"Peer {peer}'s labels are one-hot, {labels.shape[1]} numbers for each sample; give the"
            " number of the class instead: labels.argmax(1)."
        )


def check_private_settings(settings: RunSettings) -> None:
    """Refuse settings that do not work with differential privacy."""
    check_private_method(settings.method)
    if settings.eval_train:
        raise ConfigError(
            "eval_train is true, but with privacy nothing may be reported about training data that"
            " is not accounted; leave it false.",
            key="eval_train",
        )
    if settings.precision != "float32":
        raise ConfigError(
            f"precision is {settings.precision}, but with privacy gradients are float32; omit it.",
            key="precision",
        )
    if settings.memory_format != "contiguous":
        raise ConfigError(
            f"memory_format is {settings.memory_format}, but with privacy the gradients of single"
            " samples are computed row-major; omit it.",
            key="memory_format",
        )
    if isinstance(settings, Simulation) and settings.vmap_peers > 1:
        raise ConfigError(
            f"vmap_peers is {settings.vmap_peers}, but with privacy peers train one by one; use 1.",
            key="vmap_peers",
        )
    if settings.train.sam_rho:
        raise ConfigError(
            f"train.sam_rho is {settings.train.sam_rho:g}, but with privacy a step may use the"
            " gradient at its own weights only; leave it 0.",
            key="train.sam_rho",
        )
    if settings.train.noise_std:
        raise ConfigError(
            f"train.noise_std is {settings.train.noise_std:g}: its noise is drawn from the public"
            " seed and protects nothing. With privacy leave it 0; privacy.noise_multiplier is"
            " the secret noise.",
            key="train.noise_std",
        )


def check_private_tensors(method: Method) -> None:
    """Refuse tensors beside the model of which their method does not say how they are computed."""
    for method_class in type(method).__mro__:
        if "can_be_private" in vars(method_class):
            return
        if "tensors" in vars(method_class):
            raise ConfigError(
                f"privacy is enabled, but {method.name} sends tensors beside its models, and does"
                " not say how they are computed: if they use training data in no other way than"
                " `learn` and `gradient` do, set can_be_private = True in the class.",
                key="method",
            )


def check_private_method(method: Method) -> None:
    """Refuse a method that cannot be differentially private."""
    if not method.can_be_private or method.fine_tuning is not None:
        raise ConfigError(
            f"privacy does not work with method.name={method.name}, which uses training data in"
            " other ways than training steps. Use dispfl, dpsgd, fedavg, ditto or local.",
            key="method",
        )
    if isinstance(method, Affinity) and method.affinity != "none" and method.affinity_held_back:
        raise ConfigError(
            f"method.affinity_held_back is {method.affinity_held_back:g}, but what a peer decides"
            " by held-back data is not accounted; with privacy set it to 0.",
            key="method.affinity_held_back",
        )


@dataclass(frozen=True)
class PeerTask:
    """What one peer has to do in a round. It names other peers; the engine adds their states."""

    peer: str
    t: int
    senders: Sequence[str] | None = None
    """Gossip round: the peers whose models it receives; None: it takes no part in the exchange."""
    requested: int = 0
    """Gossip round: how many neighbours the peer has, with those that are offline or do not
    respond."""
    mixing_weights: Mapping[str, float] | None = None
    """Gossip round: how much the models of the neighbours, and the peer's own, count in its
    average; None: all the same."""
    models: Mapping[str, int] | None = None
    """Asynchronous step, where `t` counts the peer's own steps: by sender, the number of the step
    that the received model is the result of."""
    late: Sequence[str] = ()
    """Gossip round with a deadline: the senders whose models arrive too late for this round."""
    arrived: Sequence[str] = ()
    """With a deadline: the senders of late models of earlier rounds that have arrived by now."""
    on_the_way: Sequence[str] = ()
    """With a deadline: the senders of late models of earlier rounds that have not."""
    passed: float | None = None
    """Asynchronous step: the rounds that have passed when it begins."""
    sends: bool = False
    """Asynchronous step: its model will be averaged by others."""
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

    @property
    def takes_part(self) -> bool:
        """Whether the peer exchanges models in this round: it is online, or the server's choice."""
        return self.senders is not None or self.server is not None


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
        self._peers = list(peers)
        self._fetch = fetch

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
        """Restore every peer's state after this many rounds, from seed or checkpoint."""
        ...

    def partial_round(self, t: int) -> dict[str, StepResult]:
        """Restore the steps of round t that were finished before an interruption."""
        ...

    def choices(self, t: int, graph: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
        """Return whom each online peer would receive from in round t; `graph` has neighbours."""
        ...

    def message_sizes(self, senders: Mapping[str, Sequence[str]]) -> list[ModelMessage]:
        """Return the messages of the next round with their sizes, by whom each peer asks."""
        ...

    def run_tasks(self, tasks: Iterable[PeerTask]) -> Iterator[tuple[str, StepResult]]:
        """Run the tasks; yield each peer's name and result as soon as it is done."""
        ...

    def run_steps(self, tasks: Sequence[PeerTask]) -> Iterator[tuple[PeerTask, StepResult]]:
        """Run asynchronous steps, each after those that it depends on; yield them when done."""
        ...

    def end_steps(self, t: int, needed: Mapping[str, Collection[int]]) -> None:
        """End asynchronous round t; `needed` has the models that later steps may average."""
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
