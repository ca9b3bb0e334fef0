"""What a peer brings into a federation: its data, its model and its density, as the setting of its rounds."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from dispfl.core.layout import Layout
from dispfl.core.live import LiveModel
from dispfl.data.datasets import Pictures, load
from dispfl.data.own.loading import load_own
from dispfl.data.own.samples import OwnSamples
from dispfl.data.own.settings import OwnData
from dispfl.described import setting_of
from dispfl.methods.base import PeerState
from dispfl.peer.plan import Plan
from dispfl.peer.site import Site
from dispfl.peer.terms import Meaning, Terms, terms_of
from dispfl.wire.codec import Codec
from dispfl.work import PeerData, Setting


@dataclass(frozen=True)
class Share:
    """One peer's part, complete."""

    name: str
    federation: str
    setting: Setting
    density: float
    smallest_density: float
    layout: Layout
    weights: Tensor
    """What all peers start from."""
    buffers: Mapping[str, Tensor]
    meaning: Meaning | None = None
    """What the model's inputs and outputs are."""
    threads: int = 1
    """How many threads learn."""

    @classmethod
    def of(
        cls,
        name: str,
        federation: str,
        setting: Setting,
        density: float,
        smallest_density: float,
        meaning: Meaning | None = None,
    ) -> "Share":
        """The share of a setting in which only this peer's data are here."""
        live = LiveModel(setting.module())
        weights, buffers = live.read(), live.read_buffers()
        return cls(name, federation, setting, density, smallest_density, live.layout, weights, buffers, meaning)

    @property
    def terms(self) -> Terms:
        """What others must have in common with it."""
        model = (self.layout, self.weights)
        return terms_of(self.federation, self.setting, *model, self.smallest_density, self.meaning)

    def codec(self) -> Codec:
        """How its models travel."""
        dense = self.setting.method.always_dense(self.layout, {self.smallest_density})
        return Codec(self.layout, dense, self.setting.wire)

    def first_state(self) -> PeerState:
        """Algorithm 1, line 2."""
        method, seed = self.setting.method, self.setting.seed
        state = method.start(self.weights, self.layout, self.density, seed=seed, peer=self.name)
        return replace(state, buffers={name: buffer.clone() for name, buffer in self.buffers.items()})


def share_of(site: Site) -> Share:
    """A site's share, from its plan and its own data."""
    plan = site.plan()
    data = data_of(site, plan)
    setting = setting_of_site(site, plan, data)
    where = (site.name, site.where.federation)
    share = Share.of(*where, setting, plan.density, plan.least_density, meaning_of(data))
    return replace(share, threads=plan.threads)


def data_of(site: Site, plan: Plan) -> Pictures | OwnSamples:
    """The data that a site's plan names."""
    if isinstance(plan.data, OwnData):
        return load_own(plan.data, folder=site.folder, site=site.name, seed=plan.seed)
    return load(plan.data)


def meaning_of(data: Pictures | OwnSamples) -> Meaning:
    """What the inputs and outputs of a model of these data are."""
    return Meaning(data.classes, data.shape, data.columns if isinstance(data, OwnSamples) else ())


def setting_of_site(site: Site, plan: Plan, data: Pictures | OwnSamples) -> Setting:
    """What the site's rounds need: its own data are all that is here."""
    others = tuple(site.members.names())
    return setting_of(plan, data, lambda *parts: {site.name: PeerData(*parts)}, folder=site.folder, elsewhere=others)
