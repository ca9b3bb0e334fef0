"""`dispfl peer status`: the site, its members, and the status that its node last wrote."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from dispfl.peer.state.status_text import (
    ago_text,
    latency_text,
    privacy_text,
    progress_text,
    route_text,
    status_notes,
    two_digits,
)
from dispfl.report.units import bytes_text
from dispfl.terminal import print_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dispfl.peer.state.site_status import MemberStatus, SiteStatus


def print_status(status: "SiteStatus", folder: Path, console: "Console") -> None:
    """Print the status as text."""
    from dispfl.peer.membership.identity import readable_fingerprint

    if not console.is_terminal:
        console.width = 200  # do not wrap tables in a pipe or a file
    site = quote(str(folder))
    first, second = readable_fingerprint(status.fingerprint)
    print_text(
        console, f"{status.name} of the federation {status.federation}, reached at {status.address}"
    )
    print_text(console, f"fingerprint  {first}\n             {second}")
    print_text(console, f"\n{progress_text(status, site)}")
    for note in status_notes(status):
        print_text(console, note)
    for title, table in _tables(status).items():
        if table.row_count:
            print_text(console, f"\n{title}")
            console.print(table)
    for member in status.members:
        if member.state == "pending":
            command = f"dispfl peer confirm {site} {member.name}"
            print_text(
                console,
                f"\n{member.name} is pending: compare its fingerprint by phone, then: {command}",
            )
    if not status.members:
        print_text(console, f"\nNo other site is accepted yet: dispfl peer accept {site} INVITE")


def _tables(status: "SiteStatus") -> "dict[str, Table]":
    """The tables by their titles."""
    node = status.node or {}
    fingerprints = [(member.name, member.fingerprint) for member in status.members]
    fingerprints += [(record["name"], record["fingerprint"]) for record in status.known]
    return {
        "Members": _members(status.members),
        "Traffic": _traffic(node.get("peers") or {}),
        "Refused": _refused(node.get("refused") or {}),
        "Members of other sites, not accepted here": _known(status.known),
        "Fingerprints": _fingerprints(fingerprints),
    }


def _members(members: "Sequence[MemberStatus]") -> "Table":
    table = _table("name", "state", "address", "density", "from round")
    for member in members:
        state = member.state if member.by == "hand" else f"{member.state} by roster"
        density = "-" if member.density is None else f"{member.density:g}"
        first_round = str(member.first_round)
        _add(table, member.name, state, member.address or "-", density, first_round)
    return table


def _traffic(peers: Mapping[str, Mapping[str, Any]]) -> "Table":
    has_distances = any(peer.get("distance") is not None for peer in peers.values())
    has_affinities = any(peer.get("affinity") is not None for peer in peers.values())
    has_privacy = any(peer.get("privacy") for peer in peers.values())
    has_routes = any(peer.get("route") for peer in peers.values())
    columns = ["name", "round", "seen", "received", "sent", "answered", "missed", "latency"]
    if has_distances:
        columns.append("distance")
    if has_affinities:
        columns += ["similarity", "counts"]
    if has_privacy:
        columns.append("privacy")
    if has_routes:
        columns.append("reached")

    table = _table(*columns)
    for name, peer in sorted(peers.items()):
        cells = [
            name,
            str(peer["round"]) if peer.get("round", -1) >= 0 else "-",
            ago_text(peer.get("last_seen")) or "-",
            bytes_text(peer.get("received_bytes", 0)),
            bytes_text(peer.get("sent_bytes", 0)),
            str(peer.get("answered", 0)),
            str(peer.get("missed", 0)),
            latency_text(peer),
        ]
        if has_distances:
            distance = peer.get("distance")
            cells.append("-" if distance is None else f"{distance:.3g}")
        if has_affinities:
            cells += [two_digits(peer.get("similarity")), two_digits(peer.get("affinity"))]
        if has_privacy:
            cells.append(privacy_text(peer.get("privacy")))
        if has_routes:
            cells.append(route_text(peer.get("route")))
        _add(table, *cells)
    return table


def _refused(refused: Mapping[str, Mapping[str, int]]) -> "Table":
    table = _table("name", "reason", "count")
    for name, reasons in sorted(refused.items()):
        for reason, count in sorted(reasons.items()):
            _add(table, name, reason, str(count))
    return table


def _known(records: Sequence[Mapping[str, Any]]) -> "Table":
    table = _table("name", "address")
    for record in records:
        _add(table, record["name"], record["address"])
    return table


def _fingerprints(fingerprints: Sequence[tuple[str, str]]) -> "Table":
    """A table of its own, because each fingerprint needs two unwrapped lines of 39 characters."""
    from dispfl.peer.membership.identity import readable_fingerprint

    table = _table("name", "fingerprint")
    table.columns[1].no_wrap = True
    for name, fingerprint in fingerprints:
        _add(table, name, "\n".join(readable_fingerprint(fingerprint)))
    return table


def _table(*columns: str) -> "Table":
    from rich.table import Table

    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for column in table.columns:
        column.overflow = "fold"
    return table


def _add(table: "Table", *cells: str) -> None:
    from rich.text import Text

    table.add_row(*map(Text, cells))  # not markup, which [fd00::1] looks like
