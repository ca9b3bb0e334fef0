"""The interface of methods: frozen settings, and functions from a peer's state to its next state.

Every method defines a peer's first state (`start`). A gossip method defines what a peer publishes
(`publish`), which peers it receives from (`choose`), and its step with the models it received
(`step`). A server method defines what the server broadcasts (`broadcast`), the step of a peer of
the cohort (`step`), and how the server aggregates the uploads (`aggregate`). Methods keep no state
of their own, so one object serves every peer, round and worker.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor, nn

from dispfl.core.device_classes import FIT
from dispfl.core.layout import Layout
from dispfl.core.optimizers import Moments
from dispfl.core.packed import Mask, PackedModel, WeightMask
from dispfl.core.report import Passes
from dispfl.core.rng import stream_seed
from dispfl.core.tensors import TensorSpec
from dispfl.core.train import Train, Trainer
from dispfl.errors import ConfigError
from dispfl.settings import Component
from dispfl.topology import Topology


@dataclass(frozen=True)
class PeerState:
    """A peer between two rounds, packed."""

    model: PackedModel
    """Its weights and the mask that they were trained under (`mask`, m_{k,t} in the paper)."""
    next_mask: Mask
    """The mask found after training, applied at the next mix (`next_mask`, m_{k,t+1})."""
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """The module's buffers, such as running means; they never leave the peer (deviation 10)."""
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    """Anything else that a method remembers about the peer."""
    moments: Mapping[str, Moments] = field(default_factory=dict)
    """With `train.keep_moments`: what the optimizer remembers of each of the peer's models."""
    upload: PackedModel | None = None
    """Server methods: the model that the peer sends to the server, until the server has it."""
    private: PackedModel | None = None
    """Server methods: the peer's own weights of private parameters, kept for it by the round."""
    sent: Mapping[int, PackedModel] = field(default_factory=dict)
    """Asynchronous gossip: the models that others may still average, by the number of the step
    that each is the result of."""
    late: Mapping[str, PackedModel] = field(default_factory=dict)
    """Gossip with a deadline: the models that arrived after it and may still be averaged, by
    sender."""


def _check_patterns(value: Any) -> Any:
    patterns = value if isinstance(value, (list, tuple)) else (value,)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"must be names or patterns of parameters, got {pattern!r}.")
    return tuple(patterns)


Patterns = Annotated[str | tuple[str, ...], BeforeValidator(_check_patterns)]
"""Names and patterns of parameters (`Layout.matching`); one may stand alone."""


class Method(Component):
    """Base class of gossip and server methods."""

    table: ClassVar[str] = "method"
    can_be_private: ClassVar[bool] = True
    """Whether it uses a peer's data in `learn` and `gradient` only, where privacy is accounted."""
    plain_sgd: ClassVar[bool] = False
    """Whether its equations hold for plain SGD only; then other optimizers are refused."""
    train_defaults: ClassVar[Mapping[str, Any]] = {}
    """Settings of `train` that have another default with this method, such as its momentum."""
    evaluates_global: ClassVar[bool] = False
    """Whether peers are evaluated with the global model instead of their own.

    Then `global_model` and `evaluated_model` return it.
    """
    private: Patterns = ()
    """Parameters that never leave a peer: names, globs such as `layer4.*`, `head` or `norm`.

    Neither their values nor their masks are sent, and each peer trains its own.
    """

    @property
    def fine_tuning(self) -> "FineTuning | None":
        """How the global model is fine-tuned on a peer's data before evaluation, if at all."""
        return None

    @property
    def gossips(self) -> bool:
        """Whether peers receive models from their neighbours."""
        return False

    @property
    def masks_channels(self) -> bool:
        """Whether masks leave out whole channels, so that peers train small networks."""
        return False

    @property
    def depends_on_rounds(self) -> str:
        """Why a finished run cannot be extended to more rounds; empty if it can be.

        Override it in a method whose `step` uses `Trainer.T`: "the prune rate depends on it".
        """
        return ""

    @property
    def needs_rounds(self) -> str:
        """Why its peers have to wait for each other; empty if they need not.

        Then it runs with `schedule = "async"`.
        """
        return "it is not a gossip method"

    @property
    def training_method(self) -> "Method":
        """The method that trains in exactly the same way, even if it is evaluated differently."""
        return self

    @property
    def independent_init(self) -> bool:
        """Whether each peer draws its own first weights, instead of sharing them with all peers."""
        return False

    def private_steps(self, train: Train, samples: int) -> int:
        """Return the steps of a peer in a round that use its data, each of which spends privacy."""
        return train.local_steps(samples)

    def searched_samples(self, train: Train) -> int:
        """Return the samples of a round whose dense gradient tells how to change the mask."""
        return 0

    def held_back(self, samples: int) -> int:
        """Return how many of so many training samples a peer holds back, to choose by them.

        A step that uses it calls `Trainer.hold_back`.
        """
        return 0

    def scored_samples(self, samples: int, models: int) -> int:
        """Return how many samples a step scores models on, after so many models are received."""
        return 0

    def training_passes(
        self, train: Train, samples: int, layout: Layout, kept: Sequence[int]
    ) -> list[Passes]:
        """Return what a peer with so many samples and kept weights trains in a round.

        Costs are estimated from it; a run counts what it does (`Report.passes`).
        """
        return [Passes(train.samples_trained(samples), list(kept))]

    def training_rounds(
        self, topology: Topology, seed: int, rounds: int, roster: Sequence[str]
    ) -> int:
        """Return in how many rounds a peer trains at most: a privacy budget lasts for as many."""
        return rounds

    def densities(self, peers: int) -> list[float]:
        """Return the density of each peer's model."""
        return [1.0] * peers

    def resolved(self, topology: Topology, peers: int) -> Self:
        """Return this method with the defaults that depend on topology and number of peers."""
        return self

    def layout(self, module: nn.Module, example: Callable[[], Tensor]) -> Layout:
        """Return the layout of the network.

        `example` returns a batch of inputs, for methods that try the network.
        """
        return Layout.of(module)

    def kept_counts(self, layout: Layout, density: float) -> tuple[int, ...]:
        """Return how many weights of each layer a peer of this density keeps in round 0.

        Override it where the counts are known without drawing the mask.
        """
        if type(self).start is Method.start:
            return layout.sizes
        state = self.start(torch.zeros(layout.size), layout, density, seed=0, peer="000")
        return tuple(state.next_mask.kept_per_layer(layout))

    def private_parameters(self, layout: Layout) -> list[bool]:
        """Return for each parameter whether it is private."""
        if not self.private:
            return [False] * len(layout.names)
        if layout.has_small_networks:
            raise ConfigError(
                f"method.private is {','.join(self.private)}, but with method.structure=channels a"
                " channel is sent with its weights in all layers; omit one of the two.",
                key="method.private",
            )
        return layout.matching(self.private, "method.private")

    def private_mask(self, layout: Layout) -> WeightMask | None:
        """Return the mask of the private weights; None if nothing is private."""
        if not self.private:
            return None
        return WeightMask.pack(layout.flags(self.private_parameters(layout)))

    def sent_counts(self, layout: Layout, density: float) -> tuple[int, ...]:
        """Return how many weights of each layer a peer of this density sends in round 0.

        They are those that it keeps, without the private ones.
        """
        counts = list(self.kept_counts(layout, density))
        for layer, is_private in enumerate(self.private_parameters(layout)):
            if is_private:
                counts[layer] = 0
        return tuple(counts)

    def tensors(self, layout: Layout) -> Mapping[str, TensorSpec]:
        """Return the tensors that are sent beside every model, by name; by default none.

        What `publish` and `broadcast` return and a state's `upload` have all of them
        (`PackedModel.with_tensors`), and so has what `step` and `aggregate` receive.
        """
        return {}

    def always_dense(self, layout: Layout, densities: Collection[float]) -> list[bool]:
        """Return for each layer whether all peers keep it whole in every round.

        No mask is sent for such a layer. By default it is what all keep whole in round 0. Override
        it in a method that prunes these layers later.
        """
        always_dense = [True] * len(layout.sizes)
        for density in densities:
            for layer, kept_count in enumerate(self.kept_counts(layout, density)):
                if kept_count < layout.sizes[layer]:
                    always_dense[layer] = False
        return always_dense

    def start(
        self, weights: Tensor, layout: Layout, density: float, *, seed: int, peer: str
    ) -> PeerState:
        """Return a peer's state before round 0, from its first weights; by default dense."""
        return initial_state(weights, torch.ones(layout.size, dtype=torch.bool))

    def global_model(self, states: Mapping[str, PeerState]) -> PackedModel:
        """Return the global model, where the method has one."""
        raise NotImplementedError

    def evaluated_model(self, state: PeerState, global_model: PackedModel) -> PackedModel:
        """Return the model that a peer is evaluated with: by default the global model."""
        return global_model


@dataclass(frozen=True)
class Neighbourhood:
    """The peers that a peer may receive from in a round."""

    roster: Sequence[str]
    """All peers of the federation."""
    neighbours: Sequence[str]
    """Those that the topology connects it with in this round."""
    reachable: Sequence[str]
    """Those that it may choose besides."""
    choices: int = 0
    """How many of them, at most."""


class GossipMethod(Method):
    """A method in which peers exchange models directly."""

    communicates: ClassVar[bool] = True
    """Whether peers exchange models at all."""
    pulls_masked: ClassVar[bool] = False
    """Whether a peer uses only the weights under its own next mask.

    Then neighbours need not send the others.
    """

    density_falls: ClassVar[bool] = False
    """Whether a peer may keep fewer weights of a layer later than in round 0."""

    @property
    def gossips(self) -> bool:
        return self.communicates

    @property
    def uses_mixing_weights(self) -> bool:
        """Whether `step` averages by `Trainer.mixing_weights`, which a topology may have.

        A topology with weights is refused where they would be ignored.
        """
        return False

    @property
    def pushes(self) -> bool:
        """Whether senders divide their models among their receivers, as push-sum does.

        Then the mixing weights of each sender, its own among them, add up to 1, not those of each
        receiver.
        """
        return False

    @property
    def needs_rounds(self) -> str:
        if self.pushes:
            return "its senders divide their models among the receivers of a round"
        if self.density_falls:
            return "its models become smaller, so that the time of a step is not known beforehand"
        if self.chooses:
            return "its peers choose whom they receive from"
        return ""

    def publish(self, state: PeerState) -> PackedModel:
        """Return the model that neighbours may request."""
        return state.model

    @property
    def chooses(self) -> bool:
        """Whether a peer may prefer some of its neighbours, or other peers (`choose`)."""
        return type(self).choose is not GossipMethod.choose

    def choices(self, neighbours: int, t: int, T: int) -> int:
        """Return how many of so many neighbours a peer chooses itself in round t of T.

        By default none. The topology gives it so many fewer, so that it neither receives nor sends
        more models.
        """
        return 0

    def choose(
        self, state: PeerState, neighbourhood: "Neighbourhood", *, rng: torch.Generator
    ) -> Sequence[str]:
        """Return the peers to receive from: by default the topology's neighbours.

        Besides neighbours it may name `neighbourhood.choices` reachable peers. A model of such a
        peer is received if that peer chooses this one too; otherwise a random neighbour takes its
        place.
        """
        return neighbourhood.neighbours

    @abstractmethod
    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        """Return a peer's next state, from its state and the received models, by sender."""


SERVER = "server"
"""The server's name in states, ledgers and checkpoints."""


class ServerMethod(Method):
    """A method in which a server trains a global model with a random cohort of peers each round."""

    evaluates_global: ClassVar[bool] = True
    cohort: int | None = Field(default=None, ge=1)
    """Peers that the server selects in a round; by default as many as a peer has neighbours."""

    def kept_counts(self, layout: Layout, density: float) -> tuple[int, ...]:
        """Return the sizes of all layers: the server's first model is dense."""
        return layout.sizes

    @property
    def needs_rounds(self) -> str:
        return "its server waits for the whole cohort"

    def pick(self, seed: int, t: int, online: Sequence[str]) -> list[str]:
        """Return the cohort of round t."""
        assert self.cohort is not None, "a run's context has fitted it"
        order = sorted(online, key=lambda peer: stream_seed(seed, "cohort", peer, t))
        return sorted(order[: self.cohort])

    def cohort_of(self, topology: Topology, seed: int, t: int, roster: Sequence[str]) -> list[str]:
        """Return the peers that the server selects in round t, of those that are online."""
        return self.pick(seed, t, sorted(topology.online(seed, t, roster)))

    def training_rounds(
        self, topology: Topology, seed: int, rounds: int, roster: Sequence[str]
    ) -> int:
        """Return in how many rounds the peer trains that is selected most often.

        Whom a server selects is public.
        """
        selections: Counter[str] = Counter()
        for t in range(rounds):
            selections.update(self.cohort_of(topology, seed, t, roster))
        return max(selections.values(), default=1)

    def resolved(self, topology: Topology, peers: int) -> Self:
        """Return this method with a cohort, by default as large as a peer's neighbourhood."""
        cohort = self.cohort or topology.connections(peers)
        return self.model_copy(update={"cohort": min(cohort, peers)})

    def start_server(self, weights: Tensor, layout: Layout) -> PeerState:
        """Return the server's state before round 0, from the first weights; by default dense."""
        return initial_state(weights, torch.ones(layout.size, dtype=torch.bool))

    def global_model(self, states: Mapping[str, PeerState]) -> PackedModel:
        """Return the server's model."""
        return states[SERVER].model

    def broadcast(self, server: PeerState, state: PeerState) -> PackedModel:
        """Return the model that the server sends to a peer."""
        return server.model

    @abstractmethod
    def step(self, trainer: Trainer, state: PeerState, received: PackedModel) -> PeerState:
        """Return a peer's next state, with its upload, from its state and the server's model."""

    @abstractmethod
    def aggregate(
        self, server: PeerState, uploads: Mapping[str, PackedModel], samples: Mapping[str, int]
    ) -> PeerState:
        """Return the server's next state, from the cohort's uploads.

        `samples` has the number of training samples of every peer of the federation.
        """


@dataclass(frozen=True)
class FineTuning:
    """How models are fine-tuned before evaluation."""

    epochs: int
    rate: Literal["initial", "current"]
    """The learning rate: that of round 0, or of the present round."""
    every: int
    """The interval in rounds; the last round is always included."""
    steps: int | None = None
    """Steps, instead of epochs."""


def share_held_back(share: float, samples: int) -> int:
    """Return how many of so many samples this share is: at least one, but never the only one."""
    if share == 0 or samples <= 1:
        return 0
    return max(1, int(share * samples))


def initial_state(weights: Tensor, mask: Tensor | Mask) -> PeerState:
    """Return a state whose mask is also its next mask."""
    model = PackedModel.pack(weights, mask)
    return PeerState(model, model.mask)


def counts_where(flags: Sequence[bool], kept: Sequence[int]) -> list[int]:
    """Return the kept weights of the parameters that are flagged, and 0 of the others."""
    return [count * flag for count, flag in zip(kept, flags, strict=True)]


def empty_state(layout: Layout) -> PeerState:
    """Return the state of a peer that keeps no model between rounds."""
    return initial_state(torch.zeros(layout.size), torch.zeros(layout.size, dtype=torch.bool))


def private_model(state: PeerState, private: Mask) -> PackedModel:
    """Return a peer's own weights under the mask of private weights."""
    if state.private is not None:
        return state.private
    return state.model.restrict(private)


def evaluated_state(
    method: Method, state: PeerState, global_model: PackedModel, private: WeightMask | None
) -> PeerState:
    """Return a peer's state with the model that it is evaluated with, given the global model.

    Private weights, if any, are the peer's own.
    """
    model = method.evaluated_model(state, global_model)
    if private is not None:
        model = model.restrict(~private).joined(private_model(state, private))
    return replace(state, model=model, next_mask=model.mask)


def check_async(method: Method, topology: Topology) -> None:
    """Refuse a method or a topology that does not work without common rounds."""
    if method.needs_rounds:
        raise ConfigError(
            f"schedule is async, but method {method.name} needs rounds: {method.needs_rounds}. Use"
            " schedule=sync, or dispfl, dpsgd or fedfomo.",
            key="schedule",
        )
    if topology.is_weighted:
        raise ConfigError(
            f"schedule is async, but topology {topology.name} has weights for the average of a"
            " round; set topology.weights=false.",
            key="schedule",
        )


def check_deadline(deadline: float, method: Method, topology: Topology) -> None:
    """Refuse a method or a topology that does not work without the late models."""
    if method.needs_rounds:
        raise ConfigError(
            f"deadline is {deadline:g}, but method {method.name} does not work with one:"
            f" {method.needs_rounds}. Omit deadline, or use dispfl, dpsgd or fedfomo.",
            key="deadline",
        )
    if topology.is_weighted:
        raise ConfigError(
            f"deadline is {deadline:g}, but topology {topology.name} has weights for the average of"
            " all models of a round; set topology.weights=false.",
            key="deadline",
        )


def _check_density(value: Any) -> Any:
    if value == FIT:
        return value
    if not isinstance(value, (list, tuple)):
        _check_one_density(value, value)
        return value
    if not value:
        raise ValueError("must be a number or a list of numbers in (0, 1], got an empty list.")
    for density in value:
        _check_one_density(density, value)
    return tuple(value)


def _check_one_density(density: Any, value: Any) -> None:
    if isinstance(density, bool) or not isinstance(density, (int, float)):
        raise ValueError(f"must be a number in (0, 1], a list of them, or fit, got {value!r}.")
    if not 0 < density <= 1:
        hint = ""
        if 1 < density <= 100:
            hint = f" To keep {density:g}% of the weights write {density / 100:g}."
        raise ValueError(f"must be in (0, 1], got {density:g}.{hint}")


Density = Annotated[float | tuple[float, ...] | Literal["fit"], BeforeValidator(_check_density)]
"""One density for all peers, a list of densities for groups of equal size, in roster order, or
"fit"."""


def has_density_groups(method: Method) -> bool:
    """Whether each peer of this method may have a density of its own."""
    field = type(method).model_fields.get("density")
    return field is not None and tuple[float, ...] in get_args(field.annotation)


def spread_densities(
    density: float | tuple[float, ...] | Literal["fit"], peers: int
) -> list[float]:
    """Return a density for each peer: g densities make g groups of peers, in roster order.

    The sizes of two groups differ by at most one. Densities that fit devices are only known to a
    run (`RunContext.densities`).
    """
    if isinstance(density, str):
        raise ConfigError(
            "method.density is fit, which needs the devices of a simulation; give a number in (0,"
            " 1].",
            key="method.density",
        )
    groups = density if isinstance(density, tuple) else (density,)
    if len(groups) > peers:
        raise ConfigError(
            f"method.density lists {len(groups)} groups for {peers} peers; give at most one per"
            " peer.",
            key="method.density",
        )
    return [groups[k * len(groups) // peers] for k in range(peers)]
