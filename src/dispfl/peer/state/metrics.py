"""What a monitoring system reads of a node or a relay: `/metrics` in the format of Prometheus.

The figures are those that the node keeps anyway (`NodeStatus`). Labels are names of members and
words of ours: no text of another site becomes one.
"""

import asyncio
import contextlib
import datetime
import ipaddress
import shutil
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import field_validator

from dispfl.errors import ConfigError
from dispfl.extras import require
from dispfl.peer.membership.address import Address
from dispfl.peer.state.log import EventLog
from dispfl.peer.state.status import NodeStatus, PeerStatus
from dispfl.peer.transport.http import os_error_text
from dispfl.settings import Settings
from dispfl.wire.refusals import Refusal, RefusalCounter

if TYPE_CHECKING:
    from aiohttp import web
    from prometheus_client.core import Metric

    from dispfl.peer.site import Site
    from dispfl.peer.transport.relay_server import Relay

PATH = "/metrics"
NO_MEMBER = "unknown"
"""The label of clients that are no members, or no longer."""
_REASONS = frozenset(Refusal)
_DAY = datetime.timedelta(days=1)


class MetricsSettings(Settings):
    """Where a site shows its figures to a monitoring system."""

    table: ClassVar[str] = "metrics"

    listen: str | None = None
    """HOST:PORT at which Prometheus reads the site's metrics, such as 127.0.0.1:9464; by default
    nowhere. Anybody who can connect to it can read them."""

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, listen: str | None) -> str | None:
        return None if listen is None else str(parse_listen(listen, "metrics.listen"))


def parse_listen(listen: str, key: str) -> Address:
    """Return the address of metrics; an error names the setting or the option."""
    try:
        return Address.parse(listen)
    except ConfigError as problem:
        raise ConfigError(f"{key}: {problem}", key=key) from None


# what a node and a relay show


def node_metrics(status: NodeStatus, members: Sequence[str]) -> "list[Metric]":
    """The figures of a node, with those of its present members."""
    own_and_reported = [status.round]
    for name in members:
        if name in status.peers and status.peers[name].round >= 0:
            own_and_reported.append(status.peers[name].round)
    behind = max(0.0, statistics.median(own_and_reported) - status.round)
    is_protected = None if status.is_protected is None else float(status.is_protected)
    peers = {name: status.peers[name] for name in members if name in status.peers}
    return [
        _gauge("round", "The current round, counted from 0.", status.round),
        _gauge("rounds", "Rounds of the federation.", status.rounds),
        _gauge("rounds_behind", "Rounds behind the median of the members.", behind),
        _by_label("gauge", "state", "1: what the node does now.", "state", {status.state: 1}),
        _counter("rounds_trained", "Rounds that the site has trained.", status.trained_rounds),
        _counter("rounds_alone", "Those of them without any received model.", status.alone_rounds),
        _gauge("robust_protection", "1: averages withstand Byzantine peers.", is_protected),
        _gauge("models_discarded", "Models of the last round not averaged.", status.discarded),
        *_peer_metrics(peers),
        _refusals("refusals", status.refused, members),
        _gauge("deadline_seconds", "How long the round waits for models.", status.deadline),
        _gauge("step_seconds", "How long the last training step took.", status.step_seconds),
        _counter("steps_failed", "Steps with numbers that are not finite.", status.failed_steps),
        _counter("saving_errors", "Attempts to save that failed.", status.saving_errors),
        _gauge("rounds_unsaved", "Finished rounds only in memory.", status.unsaved_rounds),
        _gauge("score", "The main metric of the own model on own test data.", status.score),
        _gauge("epsilon_spent", "With privacy: the spent budget.", status.epsilon),
    ]


def _peer_metrics(peers: Mapping[str, PeerStatus]) -> "list[Metric]":
    """What the node knows of each member."""
    received = {name: peer.answered for name, peer in peers.items()}
    missed = {name: peer.missed for name, peer in peers.items()}
    received_bytes = {name: peer.received_bytes for name, peer in peers.items()}
    sent_bytes = {name: peer.sent_bytes for name, peer in peers.items()}
    unreachable = {name: float(peer.unreachable) for name, peer in peers.items()}
    latencies = {name: peer.latency for name, peer in peers.items() if peer.latency is not None}
    rounds = {name: peer.round for name, peer in peers.items() if peer.round >= 0}
    return [
        _by_label("counter", "models_received", "Models averaged.", "member", received),
        _by_label("counter", "models_missed", "Rounds without its model.", "member", missed),
        _by_label(
            "gauge", "model_latency_seconds", "Usual time until its model.", "member", latencies
        ),
        _by_label("counter", "received_bytes", "Of messages from it.", "member", received_bytes),
        _by_label("counter", "sent_bytes", "Of messages to it.", "member", sent_bytes),
        _by_label("gauge", "member_unreachable", "1: it does not answer.", "member", unreachable),
        _by_label("gauge", "member_round", "The round that it reports.", "member", rounds),
    ]


async def site_metrics(site: "Site", traffic: Mapping[str, int]) -> "list[Metric]":
    """The figures of a site's machine: traffic by direction, certificate and disk."""
    from prometheus_client.core import InfoMetricFamily

    usage = await asyncio.to_thread(shutil.disk_usage, site.folder)  # a disk may take long
    days_left = _days_until(site.identity.certificate.not_valid_after_utc)
    about = {"site": site.name, "federation": site.info.federation, "version": version("dispfl")}
    return [
        InfoMetricFamily("dispfl_site", "The site and its software.", about),
        _by_label(
            "counter",
            "network_bytes",
            "Bytes on the sockets and of outboxes.",
            "direction",
            traffic,
        ),
        _gauge("certificate_days_left", "Days until the site's certificate ends.", days_left),
        _gauge("disk_free_bytes", "Free space for the site's folder.", usage.free),
    ]


def reach_metrics(
    relay_problems: Mapping[str, str | None], outbox: Mapping[str, Any] | None
) -> "list[Metric]":
    """Whether others reach a site by its relays and by its outbox, as far as it has these."""
    relays_lost = None
    if relay_problems:
        relays_lost = sum(problem is not None for problem in relay_problems.values())
    outbox_failing = None if outbox is None else float(outbox["problem"] is not None)
    return [
        _gauge("relays_lost", "Own relays by which nobody reaches the site.", relays_lost),
        _gauge("outbox_failing", "1: the newest state is not stored.", outbox_failing),
    ]


async def relay_metrics(relay: "Relay") -> "list[Metric]":
    """The figures of a relay."""
    counters = relay.counters
    days_left = _days_until(relay.certificate.ends)
    return [
        _gauge("relay_members", "Members that may use the relay.", len(relay.admitted)),
        _gauge("relay_parked", "Connections on which sites wait for calls.", counters.parked),
        _gauge("relay_connected", "Pairs of sites that are connected now.", counters.connected),
        _counter("relay_calls", "Calls that were connected.", counters.calls),
        _counter("relay_missed_calls", "Calls of absent sites.", counters.missed_calls),
        _counter("relay_passed_on_bytes", "Bytes that were passed on.", counters.passed_on),
        _refusals("relay_refusals", relay.traffic.refused),
        _gauge("relay_certificate_days_left", "Days until its certificate ends.", days_left),
    ]


def _days_until(end: datetime.datetime) -> float:
    return (end - datetime.datetime.now(datetime.UTC)) / _DAY


def _gauge(name: str, text: str, value: float | None) -> "Metric":
    """A number that goes up and down; None if it is not known."""
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(f"dispfl_{name}", text, value)


def _counter(name: str, text: str, value: float) -> "Metric":
    """A number that only grows; its name gets the ending `_total`."""
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(f"dispfl_{name}", text, value)


def _by_label(kind: str, name: str, text: str, label: str, values: Mapping[str, float]) -> "Metric":
    """A number for each value of a label."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    family_of_kind = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    family = family_of_kind(f"dispfl_{name}", text, labels=[label])
    for value_of_label, value in sorted(values.items()):
        family.add_metric([value_of_label], value)
    return family


def _refusals(name: str, refused: RefusalCounter, members: Sequence[str] | None = None) -> "Metric":
    """Refusals by reason, and by member if there are `members`."""
    from prometheus_client.core import CounterMetricFamily

    counts = Counter[tuple[str, ...]]()
    for peer, reasons in refused.items():
        member = peer if peer in (members or ()) else NO_MEMBER
        for reason, count in reasons.items():
            known_reason = reason if reason in _REASONS else "other"
            counts[(known_reason,) if members is None else (known_reason, member)] += count
    label_names = ["reason"] if members is None else ["reason", "member"]
    family = CounterMetricFamily(f"dispfl_{name}", "Refused requests.", labels=label_names)
    for labels, count in sorted(counts.items()):
        family.add_metric(labels, count)
    return family


# the server


class _Families:
    """Figures in the form in which the library writes them."""

    def __init__(self, families: "Iterable[Metric]") -> None:
        self._families = families

    def collect(self) -> "Iterable[Metric]":
        """Return the figures."""
        return self._families


@contextlib.asynccontextmanager
async def serve_metrics(
    listen: str | None,
    read: "Callable[[], Awaitable[Iterable[Metric]]]",
    log: EventLog,
    key: str = "metrics.listen",
) -> AsyncIterator[None]:
    """Show figures at an address while the block runs; without an address do nothing.

    They are read on the event loop, so that no count changes meanwhile. `key` is the setting or the
    option that names the address.
    """
    if listen is None:
        yield
        return
    require("metrics", key)
    from aiohttp import web

    where = Address.parse(listen)
    application = web.Application()
    application.router.add_get(PATH, _answer_with(read))
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, where.host, where.port).start()
        except OSError as problem:
            raise ConfigError(
                f"{key} is {where}, where this machine cannot listen ({os_error_text(problem)});"
                " choose another address.",
                key=key,
            ) from None
        log("metrics", {"address": f"http://{where}{PATH}"})
        if not _is_loopback(where):
            log("warning", {"detail": _open_to_others(where, key)})
        yield
    finally:
        await runner.cleanup()


def _answer_with(
    read: "Callable[[], Awaitable[Iterable[Metric]]]",
) -> "Callable[[web.Request], Awaitable[web.Response]]":
    from aiohttp import web
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

    async def answer(request: web.Request) -> web.Response:
        text = generate_latest(_Families(await read()))
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    return answer


def _is_loopback(address: Address) -> bool:
    """Whether only programs on this machine can connect to an address."""
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return address.host == "localhost"


def _open_to_others(address: Address, key: str) -> str:
    """Say what it means that metrics are shown beyond this machine."""
    return (
        f"{key} is {address}, which other machines may reach: whoever does can read the figures"
        " without a password; use 127.0.0.1, or a firewall."
    )
