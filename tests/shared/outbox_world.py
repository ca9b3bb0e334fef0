"""Sites that share only storage, with real folders, keys and nodes, in one event loop.

Their nodes run no rounds: tests publish models, send requests, and damage what is stored.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from tables import small_table

from dispfl.core.packed import PackedModel
from dispfl.peer.deadlines import Deadlines
from dispfl.peer.node import Node
from dispfl.peer.run_site import open_node
from dispfl.peer.setup.local_setup import local_setup
from dispfl.peer.setup.site_config import SiteConfig
from dispfl.peer.site import Site, SiteInfo
from dispfl.peer.transport.base import JSON, Request, Response, Unreachable
from dispfl.peer.transport.http import Limits
from dispfl.round.exchange import published_model

T = TypeVar("T")
Event = tuple[str, Mapping[str, object]]
LIMITS = Limits(outbox_interval=0.01, stall_timeout=1.0, connect_timeout=2.0, min_rate=1e6)
PATIENCE = 30.0


def make_site(folder: Path, name: str, outbox: str, *, exchange: str = "push", **info: Any) -> Site:
    """Create a site with a small table of its own, reached by its outbox alone."""
    config = SiteConfig.from_values(
        {
            "rounds": 50,
            "model": {"name": "mlp"},
            "data": {"path": "table.csv", "label": "y"},
            "wire": {"exchange": exchange},
        }
    ).to_toml()
    site = Site.create(folder / name, SiteInfo(name=name, outbox=outbox, **info), config)
    (site.folder / "table.csv").write_text(small_table(8))
    return site


def introduce(sites: Iterable[Site]) -> None:
    """Let all accept each other."""
    sites = list(sites)
    for site in sites:
        for other in sites:
            if other is not site:
                site.members.accept(other.invite())


def folder_sites(folder: Path, *names: str) -> dict[str, Site]:
    """Create sites with outboxes in folders, which all accept each other."""
    sites = {}
    for name in names:
        outbox = folder / "share" / name
        outbox.mkdir(parents=True)
        sites[name] = make_site(folder, name, str(outbox))
    introduce(sites.values())
    return sites


class RunningSite:
    """A site whose node listens, stores and requests, but runs no rounds."""

    def __init__(self, site: Site, node: Node, state: PackedModel, events: list[Event]) -> None:
        self.site = site
        self.events = events
        """What it has logged."""
        self.ctx = node.ctx
        self.transport = node.client.transport
        self.client = node.client
        self.members = node.client.members
        self._model = state

    @property
    def outbox(self) -> Path:
        """The folder of its outbox."""
        return Path(self.site.info.outbox or "")

    async def publish(self, t: int) -> PackedModel:
        """Publish a model of round t whose weights no other round has; wait until it is stored."""
        generator = torch.Generator().manual_seed(t)
        values = torch.randn(self._model.values.shape, generator=generator)
        model = PackedModel(values, self._model.mask)
        self.ctx.status.round = t
        self.ctx.published.publish(t, model, ["nobody"], [])
        await until(lambda: not self.ctx.published.pending())
        return model

    async def request_model(self, peer: str, t: int) -> Response:
        """Request a model once."""
        version = self.ctx.versions.at(t)
        header: dict[str, JSON] = {
            "spec": version.digest,
            "spec_version": version.number,
            "round": t,
            "nonce": "n",
        }
        return await self.transport.request(peer, Request("model", header))

    async def model(self, peer: str, t: int) -> PackedModel:
        """Request a model until it is there."""

        async def request() -> PackedModel | None:
            response = await self.request_model(peer, t)
            if response.header["status"] != "model":
                return None
            return self.ctx.codec.decode_model(response.body)

        model = await eventually(request)
        assert model is not None
        return model

    def refused(self, peer: str) -> Mapping[str, int]:
        """What was refused of a peer, by reason."""
        return self.ctx.guard.refused[peer]


@contextlib.asynccontextmanager
async def running(
    site: Site, limits: Limits = LIMITS, deadlines: Deadlines | None = None
) -> AsyncIterator[RunningSite]:
    """Open the node of a site."""
    setup = local_setup(site)
    state = setup.initial_state()
    events: list[Event] = []

    def log(event: str, fields: Mapping[str, object]) -> None:
        events.append((event, fields))

    async with open_node(site, setup, deadlines or Deadlines(), log, limits) as (node, _):
        await node.client.transport.serve(lambda *_: None)  # type: ignore[arg-type]
        try:
            yield RunningSite(site, node, published_model(setup.run, state), events)
        finally:
            await node.client.close()


async def eventually(attempt: Callable[[], Awaitable[T | None]]) -> T:
    """Repeat an attempt until it has a result."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with contextlib.suppress(Unreachable):
                result = await attempt()
                if result:
                    return result
            await asyncio.sleep(0.02)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""

    async def attempt() -> bool:
        return condition()

    await eventually(attempt)


async def meet(*sites: RunningSite) -> None:
    """Let all sites read each other's heads, until all are recipients of all."""
    names = {site.site.name for site in sites}

    async def everybody_replies() -> bool:
        replies = []
        for site in sites:
            others = sorted(names - {site.site.name})
            await site.members.sync(others)
            # Not those of all members: one that is not among the sites never replies.
            replies += [site.ctx.status.peers[name].replies for name in others]
        return all(replies)

    await eventually(everybody_replies)
