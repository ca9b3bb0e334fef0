"""What a peer needs to take part: its data, its model, its density and its settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from dispfl.core.flat_module import FlatModule
from dispfl.core.layout import Layout
from dispfl.costs.flops import ForwardCost, forward_cost
from dispfl.data.datasets import CustomData, Data
from dispfl.data.labelled import LabelledDataset
from dispfl.methods.base import PeerState
from dispfl.peer.setup.site_data import SiteData
from dispfl.peer.setup.spec import DataSchema, FederationSpec, federation_spec
from dispfl.peer.setup.warm_start import warm_state
from dispfl.peer.site import Site
from dispfl.robust.averages import check_byzantine
from dispfl.round.context import RunContext, RunData
from dispfl.runs.prepare import named_context
from dispfl.wire.codec import Codec


@dataclass(frozen=True)
class LocalSetup:
    """Everything that one peer needs to run its rounds."""

    name: str
    federation: str
    run: RunContext
    density: float
    smallest_density: float
    layout: Layout
    weights: Tensor
    """The first weights that all peers share, of which the spec has a digest."""
    buffers: Mapping[str, Tensor]
    schema: DataSchema | None = None
    """The model's inputs and outputs."""
    threads: int = 1
    """Threads that train."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings as TOML, for the run directory."""
    data: SiteData | None = None
    """The site's data and their contract; None for a site of `dispfl up`."""
    warm_state: PeerState | None = None
    """The first state of a site that was created with `--warm-start`."""

    @classmethod
    def of(
        cls,
        name: str,
        federation: str,
        context: RunContext,
        density: float,
        smallest_density: float,
        schema: DataSchema | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> "LocalSetup":
        """Return the setup of a peer; of the peers in `context`, only this one has data."""
        layout = context.layout
        context.method.kept_counts(layout, density)  # refuses a density that it cannot have
        network = FlatModule(context.module())
        return cls(
            name=name,
            federation=federation,
            run=context,
            density=density,
            smallest_density=smallest_density,
            layout=layout,
            weights=network.read(),
            buffers=network.read_buffers(),
            schema=schema,
            settings=settings or {},
        )

    @property
    def spec(self) -> FederationSpec:
        """What all peers of the federation must have in common."""
        return federation_spec(
            self.federation,
            self.run,
            self.layout,
            self.weights,
            self.smallest_density,
            self.schema,
        )

    def cost(self) -> ForwardCost:
        """Return the operations of the network's forward pass."""
        sample = next(self.run.data.peers[self.name].train.batches(1))[0]
        cost = forward_cost(self.run.module(), self.layout, sample)
        cost.warn()
        return cost

    def codec(self) -> Codec:
        """The codec of its messages."""
        return self.run.codec_of({self.smallest_density})

    def initial_state(self) -> PeerState:
        """The state before the first round (Algorithm 1, line 2)."""
        if self.warm_state is not None:
            return self.warm_state
        weights = self.run.peer_weights(self.name)
        state = self.run.method.start(
            weights, self.layout, self.density, seed=self.run.settings.seed, peer=self.name
        )
        buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        return replace(state, buffers=buffers)


def local_setup(site: Site) -> LocalSetup:
    """Return a site's setup, from its settings and its own data; refuse inconsistent ones."""
    config = site.config()
    data = SiteData.read(site, config)
    context = site_context(data)
    check_byzantine(context.method, context.settings.topology, len(context.roster))
    context.check()
    setup = LocalSetup.of(
        site.name,
        site.info.federation,
        context,
        config.density,
        config.least_density,
        data_schema(data.dataset, config.data),
    )
    setup = replace(setup, threads=config.threads, settings=config.to_toml(), data=data)
    return replace(setup, warm_state=warm_state(site, setup))


def data_schema(data: LabelledDataset, settings: Data) -> DataSchema:
    """The inputs and outputs of a model for this data."""
    declared = isinstance(settings, CustomData) and settings.target_mean is not None
    unit = data.unit if declared else None
    return DataSchema(data.classes, data.shape, data.columns, data.task, unit)


def site_context(data: SiteData) -> RunContext:
    """Return the context of a site's rounds, with the site's own data."""
    site = data.site
    run_data = RunData({site.name: data.peer_data()}, remote_peers=tuple(site.members.names()))
    return named_context(data.config, data.dataset, run_data, site.folder)
