"""What Prometheus reads of nodes and relays, and what deploy/ names of it."""

import asyncio
import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from messages import check_wording, refused
from prometheus_client.parser import text_string_to_metric_families
from real_peers import TINY, Peers, create_sites
from relay_world import RelayWorld

from dispfl.config import compose
from dispfl.errors import ConfigError
from dispfl.files import SITE, SITES
from dispfl.peer.deadlines import Deadlines
from dispfl.peer.local_federation import LOOPBACK, free_ports
from dispfl.peer.site import Site, SiteInfo
from dispfl.peer.state.metrics import (
    MetricsSettings,
    node_metrics,
    reach_metrics,
    relay_metrics,
    serve_metrics,
    site_metrics,
)
from dispfl.peer.state.status import NodeStatus
from dispfl.topology import peer_names

DEPLOY = Path(__file__).parents[3] / "deploy"
HOSTILE = 'x"} 1\ndispfl_round 999\n# HELP \\'
Samples = dict[tuple[str, ...], float]


async def scraped(
    read: Callable[[], Any], log: Callable[..., None] = lambda event, fields: None
) -> str:
    """Serve figures on a real port, and read them once."""
    [port] = free_ports(1)
    async with serve_metrics(f"{LOOPBACK}:{port}", read, log):
        return await fetch(port)


async def fetch(port: int) -> str:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{LOOPBACK}:{port}/metrics") as response,
    ):
        assert response.status == 200
        return await response.text()


def samples(text: str) -> Samples:
    """The values by name and labels."""
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name, *sample.labels.values()] = sample.value
    return values


def names(text: str) -> set[str]:
    return set(re.findall(r"^# TYPE (\w+)", text, re.M))


def a_status() -> NodeStatus:
    """A node in round 7 whose members and former members have sent what they like."""
    status = NodeStatus(round=7, rounds=20, state="training", alone_rounds=2, score=0.75)
    status.peers["bob"].round = 9
    status.peers["bob"].answered = 5
    status.peers["bob"].latencies = [1.0, 3.0, 2.0]
    status.peers["carol"].round = 12
    status.peers["carol"].missed = 4
    status.peers[HOSTILE].round = 5000
    status.refused.add("bob", "norm")
    status.refused.add("bob", HOSTILE)
    status.refused.add(HOSTILE, "norm")
    status.refused.add("unknown", "norm")
    return status


def test_figures_are_those_of_the_status_and_of_members_alone() -> None:
    async def read() -> Any:
        return node_metrics(a_status(), ["bob", "carol"])

    text = asyncio.run(scraped(read))
    values = samples(text)
    assert values["dispfl_round",] == 7
    assert values["dispfl_rounds_behind",] == 2  # 7, 9 and 12
    assert values["dispfl_rounds_alone_total",] == 2
    assert values["dispfl_state", "training"] == 1
    assert values["dispfl_models_received_total", "bob"] == 5
    assert values["dispfl_models_missed_total", "carol"] == 4
    assert values["dispfl_model_latency_seconds", "bob"] == 2
    assert values["dispfl_refusals_total", "bob", "norm"] == 1
    assert values["dispfl_refusals_total", "bob", "other"] == 1
    assert values["dispfl_refusals_total", "unknown", "norm"] == 2
    assert "HELP \\" not in text
    assert ("dispfl_epsilon_spent",) not in values  # it trains without privacy
    assert "dispfl_epsilon_spent" in names(text)


def test_a_site_without_members_is_not_behind() -> None:
    async def read() -> Any:
        return node_metrics(NodeStatus(round=3), [])

    assert samples(asyncio.run(scraped(read)))["dispfl_rounds_behind",] == 0


def test_lost_relays_and_a_failing_outbox_are_shown_by_sites_that_have_them() -> None:
    def shown(relays: dict[str, str | None], outbox: dict[str, Any] | None) -> Any:
        async def read() -> Any:
            return reach_metrics(relays, outbox)

        return samples(asyncio.run(scraped(read)))

    relays = {"wss://one": "connection refused", "wss://two": None}
    values = shown(relays, {"problem": "access is denied"})
    assert values == {("dispfl_relays_lost",): 1, ("dispfl_outbox_failing",): 1}
    values = shown({"wss://two": None}, {"problem": None})
    assert values == {("dispfl_relays_lost",): 0, ("dispfl_outbox_failing",): 0}
    assert shown({}, None) == {}


def test_dashboard_and_alerts_name_metrics_that_exist(tmp_path: Path) -> None:
    async def served() -> str:
        async with RelayWorld.of(tmp_path, "alice").relay() as relay:

            async def read() -> Any:
                site = Site.create(
                    tmp_path / "site", SiteInfo(name="alice", listen="127.0.0.1:7600"), {}
                )
                machine = await site_metrics(site, {"sent": 1, "received": 2})
                reach = reach_metrics({"wss://relay": None}, {"problem": None})
                node = node_metrics(a_status(), ["bob"])
                return [*node, *reach, *machine, *await relay_metrics(relay)]

            return await scraped(read)

    text = asyncio.run(served())
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    variables = [str(each["query"]) for each in dashboard["templating"]["list"]]
    [group] = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    alerts = [rule["expr"] for rule in group["rules"]]
    for expressions in (panels, alerts):
        named = set(re.findall(r"\bdispfl_\w+", " ".join([*expressions, *variables])))
        assert len(named) > 10
        assert named <= names(text)
    page = (DEPLOY.parent / "docs/deploy.md").read_text()
    assert set(re.findall(r"`(dispfl_\w+)", page)) == names(text)


def test_real_nodes_show_their_rounds_and_a_stranger_page_is_not_found(tmp_path: Path) -> None:
    experiment = compose({}, [*TINY, "topology=full", "peers=2", "rounds=500"])
    ports = free_ports(3)
    where = {name: f"{LOOPBACK}:{port}" for name, port in zip(peer_names(2), ports, strict=False)}
    create_sites(experiment, tmp_path / "up", {name: (at, at) for name, at in where.items()})
    with (tmp_path / "up" / SITES / "000" / SITE).open("a") as settings:
        settings.write(f'[metrics]\nlisten = "{LOOPBACK}:{ports[2]}"\n')
    peers = Peers(tmp_path / "up", peer_names(2), Deadlines(min=60.0))
    try:
        peers.start(*peers.names)
        peers.until(lambda: peers.newest("000") >= 2)
        values = samples(asyncio.run(fetch(ports[2])))
        with socket.create_connection((LOOPBACK, ports[2])) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert b"404" in stranger.recv(100)
    finally:
        peers.stop()
    assert values["dispfl_round",] >= 2
    assert values["dispfl_models_received_total", "001"] >= 2
    assert values["dispfl_received_bytes_total", "001"] > 1000
    assert values["dispfl_network_bytes_total", "received"] > 1000
    assert values["dispfl_step_seconds",] > 0
    assert values["dispfl_certificate_days_left",] > 3000
    assert values["dispfl_disk_free_bytes",] > 0
    assert values["dispfl_robust_protection",] == 0


def test_an_address_that_others_reach_is_warned_about_and_a_wrong_one_refused() -> None:
    lines = []

    async def open_to_all() -> None:
        [port] = free_ports(1)
        async with serve_metrics(f"0.0.0.0:{port}", read_nothing, log):
            pass
        with socket.create_server((LOOPBACK, port)), refused(ConfigError, key="metrics.listen"):
            async with serve_metrics(f"{LOOPBACK}:{port}", read_nothing, log):
                pass

    def log(event: str, fields: Any) -> None:
        lines.append((event, fields.get("detail")))

    async def read_nothing() -> Any:
        return []

    asyncio.run(open_to_all())
    [warning] = [detail for event, detail in lines if event == "warning"]
    check_wording(re.sub(r"0\.0\.0\.0:\d+", "0.0.0.0:PORT", warning))
    with refused(ConfigError, key="metrics.listen"):
        MetricsSettings(listen="9464")
