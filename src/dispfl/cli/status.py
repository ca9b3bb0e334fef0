"""`dispfl peer status`: the site, its members, and the status that its node last wrote."""

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from dispfl.report.units import bytes_text
from dispfl.terminal import print_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dispfl.peer.peer import MemberStatus, RosterStatus, SiteStatus

_MIN_UNIX_TIME = 1e9  # monotonic clocks show far less


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
    print_text(console, f"\n{_progress(status, site)}")
    for note in _notes(status):
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


def _progress(status: "SiteStatus", site: str) -> str:
    """`Round 3 of 20, training; deadline 30 s. Updated 1 s ago.`, and how to resume."""
    node = status.node
    if node is None and status.running:
        return "The node is starting."
    if node is None:
        return f"The node has not run yet: dispfl peer run {site}"

    text = f"Round {node.get('round', '?')} of {node.get('rounds', '?')}, {status.state}"
    if status.running and node.get("waiting"):
        text += f": {node['waiting']}"
    if status.running and node.get("deadline_seconds"):
        text += f"; deadline {node['deadline_seconds']:.0f} s"
    text += "."
    age = _ago(node.get("updated"))
    if age:
        text += f" Updated {age}."
    if not status.running and status.state == "finished alone":
        text += (
            f" {node.get('alone_rounds')} of {node.get('trained_rounds')} rounds were trained"
            f" without a model of any other site. Continue with: dispfl peer reopen {site}"
        )
    elif not status.running and status.state != "finished":
        text += f" Resume with: dispfl peer run {site}"
    return text


def _notes(status: "SiteStatus") -> list[str]:
    """Problems, the roster, and the node's disk, privacy and protection."""
    node = status.node or {}
    notes = [f"Problem in members.json: {problem}" for problem in status.problems]
    if status.roster:
        notes.append(_roster_text(status.roster))
    if status.spec_version > 1:
        notes.append(f"Version {status.spec_version} of the federation's spec: peer spec show")
    for proposal in status.proposals:
        notes.append(f"Proposed change of the spec: {proposal} (dispfl peer spec confirm)")
    if status.running and node.get("clone_seen_by"):
        notes.append(
            f"A COPY of this site runs, too, says {', '.join(node['clone_seen_by'])}: stop one of"
            " them; if it is not yours, have the others revoke this site."
        )
    if status.running and node.get("save_problem"):
        notes.append(
            f"{node.get('unsaved_rounds')} rounds are only in memory: {node['save_problem']}. Free"
            " some space, and do not stop the node: it saves them as soon as it can."
        )
    if status.running:
        for relay, problem in (node.get("relays") or {}).items():
            notes.append(f"Relay {relay}: {problem or 'others reach this site by it'}.")
    if node.get("outbox"):
        notes.append(_outbox_text(node["outbox"]))
    if node.get("epsilon") is not None:
        notes.append(f"Private training: epsilon {node['epsilon']:.3g} is spent.")
    if node.get("protection"):
        notes.append(f"Byzantine peers: {node['protection']}.")
    return notes


def _outbox_text(outbox: Mapping[str, Any]) -> str:
    """`Outbox s3://hearts/alice: it has the models of rounds 3 to 10.`, and what is wrong."""
    rounds = outbox.get("rounds") or []
    text = "it has no model yet"
    if rounds:
        text = f"it has the models of rounds {rounds[0]} to {rounds[-1]}"
    if outbox.get("problem"):
        text += f"; the newest state is NOT stored: {outbox['problem']}"
    return f"Outbox {outbox.get('place')}: {text}."


def _roster_text(roster: "RosterStatus") -> str:
    if roster.version == 0:
        return f"Waiting for a roster; fingerprint of its administrators {roster.fingerprint}"
    text = (
        f"Roster version {roster.version} with {roster.members} sites, signed by"
        f" {', '.join(roster.signed_by)}; fingerprint of its administrators {roster.fingerprint}"
    )
    for fork in roster.forks:
        text += f"\nFORK: another roster with version {fork.version} was signed, "
        if fork.version == roster.version:
            text += (
                f"{fork.digest[:16]}... instead of {roster.digest[:16]}...; it is refused. The"
                " administrators have to sign a newer version."
            )
        else:
            text += (
                f"{fork.digest[:16]}..., too far ahead; it is refused. Ask the administrators. If"
                " this site has missed so many, accept the roster again with --fingerprint."
            )
    return text


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
            _ago(peer.get("last_seen")) or "-",
            bytes_text(peer.get("received_bytes", 0)),
            bytes_text(peer.get("sent_bytes", 0)),
            str(peer.get("answered", 0)),
            str(peer.get("missed", 0)),
            _latency(peer),
        ]
        if has_distances:
            distance = peer.get("distance")
            cells.append("-" if distance is None else f"{distance:.3g}")
        if has_affinities:
            cells += [_two_digits(peer.get("similarity")), _two_digits(peer.get("affinity"))]
        if has_privacy:
            cells.append(_privacy(peer.get("privacy")))
        if has_routes:
            cells.append(_route(peer.get("route")))
        _add(table, *cells)
    return table


def _two_digits(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}"


def _latency(peer: Mapping[str, Any]) -> str:
    """`0.12 s`, how long a peer usually takes to answer, or `27 s, slow`."""
    latencies = peer.get("latencies") or []
    if not latencies:
        return "-"
    text = f"{statistics.median(latencies):.2g} s"
    return f"{text}, slow" if peer.get("slow") else text


def _route(route: str | None) -> str:
    """`direct`, `by wss://relay.example.org:443` or `by outbox s3://hearts/bob`."""
    if route is None or route == "direct":
        return route or "-"
    return f"by {route}"


def _privacy(announced: Mapping[str, Any] | None) -> str:
    """`epsilon 4, delta 1e-05`, as a peer announces it."""
    if announced is None:
        return "-"
    budget = "noise without a budget"
    if announced["epsilon"] is not None:
        budget = f"epsilon {announced['epsilon']:g}"
    text = f"{budget}, delta {announced['delta']:g}"
    return text if announced["left"] else f"{text}, used up"


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


def _ago(unix_time: Any) -> str:
    """`12 s ago`, or an empty string for anything but a Unix time."""
    if not isinstance(unix_time, int | float) or unix_time < _MIN_UNIX_TIME:
        return ""
    seconds = max(0.0, time.time() - unix_time)
    for unit, length in (("days", 86_400), ("hours", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
