"""`dispfl peer status`: the site, its members, and the status that its node last wrote."""

import time
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from dispfl.terminal import print_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dispfl.peer.membership.roster import Roster
    from dispfl.peer.site import Site

_MIN_UNIX_TIME = 1e9  # monotonic clocks show far less


def facts(site: "Site") -> dict[str, Any]:
    """Return the complete status as a JSON object."""
    members, node = site.members.file.current(), site.status()
    return {
        "name": site.name,
        "federation": site.info.federation,
        "listen": site.info.listen,
        "address": str(site.info.address),
        "fingerprint": site.identity.fingerprint,
        "members": [
            {
                "name": member.name,
                "state": member.state,
                "by": member.by,
                "address": str(member.address) if member.address else None,
                "fingerprint": member.fingerprint,
                "density": member.density,
                "first_round": member.first_round,
                "serial": member.serial,
            }
            for member in site.members.all()
        ],
        "roster": _roster_facts(members.roster, members.forks),
        "problems": site.members.file.problems,
        "running": site.is_running(),
        "known": (node or {}).get("known") or [],
        "node": node,
    }


def _roster_facts(roster: "Roster | None", forks: tuple[str, ...]) -> dict[str, Any] | None:
    if roster is None:
        return None
    return {
        "version": roster.version,
        "digest": roster.digest,
        "fingerprint": roster.fingerprint,
        "signed_by": sorted(roster.signatures),
        "members": len(roster.invites),
        "forks": list(forks),
    }


def print_status(found: Mapping[str, Any], folder: Path, console: "Console") -> None:
    """Print the status as text."""
    from dispfl.peer.membership.identity import readable_fingerprint

    if not console.is_terminal:
        console.width = 200  # do not wrap tables in a pipe or a file
    first, second = readable_fingerprint(found["fingerprint"])
    print_text(
        console,
        f"{found['name']} of the federation {found['federation']}, reached at {found['address']}",
    )
    print_text(console, f"fingerprint  {first}\n             {second}")
    print_text(console, "\n" + _progress(found["node"], found["running"], quote(str(folder))))
    for problem in found["problems"]:
        print_text(console, f"Problem in members.json: {problem}")
    if roster := found["roster"]:
        print_text(console, _roster_text(roster))
    node = found["node"] or {}
    if found["running"] and node.get("save_problem"):
        unsaved = f"{node.get('unsaved_rounds')} rounds are only in memory: {node['save_problem']}."
        print_text(
            console,
            f"{unsaved} Free some space, and do not stop the node: it saves them as soon as it"
            " can.",
        )
    if node.get("epsilon") is not None:
        print_text(console, f"Private training: epsilon {node['epsilon']:.3g} is spent.")
    for title, table in (
        ("Members", _members(found["members"])),
        ("Traffic", _traffic(node.get("peers") or {})),
        ("Refused", _refused(node.get("refused") or {})),
        ("Members of other sites, not accepted here", _known(found["known"])),
        ("Fingerprints", _fingerprints([*found["members"], *found["known"]])),
    ):
        if table.row_count:
            print_text(console, f"\n{title}")
            console.print(table)
    for member in found["members"]:
        if member["state"] == "pending":
            command = f"dispfl peer confirm {quote(str(folder))} {member['name']}"
            print_text(
                console,
                f"\n{member['name']} is pending: compare its fingerprint by phone, then: {command}",
            )
    if not found["members"]:
        print_text(
            console,
            f"\nNo other site is accepted yet: dispfl peer accept {quote(str(folder))} INVITE",
        )


def _roster_text(roster: Mapping[str, Any]) -> str:
    text = (
        f"Roster version {roster['version']} with {roster['members']} sites, signed by"
        f" {', '.join(roster['signed_by'])}; fingerprint of its administrators"
        f" {roster['fingerprint']}"
    )
    for digest in roster["forks"]:
        text += (
            f"\nFORK: another roster with version {roster['version']} was signed, {digest[:16]}..."
            f" instead of {roster['digest'][:16]}...; it is refused. The administrators have to"
            " sign a newer version."
        )
    return text


def _progress(node: Mapping[str, Any] | None, running: bool, folder: str) -> str:
    if node is None:
        return (
            "The node is starting."
            if running
            else f"The node has not run yet: dispfl peer run {folder}"
        )
    state = node.get("state", "state unknown")
    if not running and state not in (
        "finished",
        "stopped",
    ):  # killed before it could update the status
        state = "not running"
    text = f"Round {node.get('round', '?')} of {node.get('rounds', '?')}, {state}"
    if running and node.get("deadline_seconds"):
        text += f"; deadline {node['deadline_seconds']:.0f} s"
    age = _ago(node.get("updated"))
    text = f"{text}. Updated {age}." if age else f"{text}."
    return (
        text if running or state == "finished" else f"{text} Resume with: dispfl peer run {folder}"
    )


def _members(members: list[dict[str, Any]]) -> "Table":
    table = _table("name", "state", "address", "density", "from round")
    for member in members:
        density = "-" if member["density"] is None else f"{member['density']:g}"
        state = member["state"] if member["by"] == "hand" else f"{member['state']} by roster"
        _add(
            table,
            member["name"],
            state,
            member["address"] or "-",
            density,
            str(member["first_round"]),
        )
    return table


def _traffic(peers: Mapping[str, Mapping[str, Any]]) -> "Table":
    measured = any(peer.get("distance") is not None for peer in peers.values())
    private = any(peer.get("privacy") for peer in peers.values())
    more = (["distance"] if measured else []) + (["privacy"] if private else [])
    table = _table("name", "round", "seen", "received", "sent", "answered", "missed", *more)
    for name, peer in sorted(peers.items()):
        _add(
            table,
            name,
            str(peer["round"]) if peer.get("round", -1) >= 0 else "-",
            _ago(peer.get("last_seen")) or "-",
            f"{peer.get('received_bytes', 0) / 1e6:.2f} MB",
            f"{peer.get('sent_bytes', 0) / 1e6:.2f} MB",
            str(peer.get("answered", 0)),
            str(peer.get("missed", 0)),
            *(["-" if (far := peer.get("distance")) is None else f"{far:.3g}"] if measured else []),
            *([_privacy(peer.get("privacy"))] if private else []),
        )
    return table


def _privacy(announced: Mapping[str, Any] | None) -> str:
    """`epsilon 4, delta 1e-05`, as a peer announces it."""
    if announced is None:
        return "-"
    budget = (
        "noise without a budget"
        if announced["epsilon"] is None
        else f"epsilon {announced['epsilon']:g}"
    )
    return f"{budget}, delta {announced['delta']:g}" + ("" if announced["left"] else ", used up")


def _refused(refused: Mapping[str, Mapping[str, int]]) -> "Table":
    table = _table("name", "reason", "count")
    for name, reasons in sorted(refused.items()):
        for reason, times in sorted(reasons.items()):
            _add(table, name, reason, str(times))
    return table


def _known(known: list[dict[str, Any]]) -> "Table":
    table = _table("name", "address")
    for record in known:
        _add(table, record["name"], record["address"])
    return table


def _fingerprints(sites: list[dict[str, Any]]) -> "Table":
    """A table of its own, because each fingerprint needs two unwrapped lines of 39 characters."""
    from dispfl.peer.membership.identity import readable_fingerprint

    table = _table("name", "fingerprint")
    table.columns[1].no_wrap = True
    for site in sites:
        _add(table, site["name"], "\n".join(readable_fingerprint(site["fingerprint"])))
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


def _ago(then: Any) -> str:
    """`12 s ago`, or an empty string for anything but a Unix time."""
    if not isinstance(then, int | float) or then < _MIN_UNIX_TIME:
        return ""
    seconds = max(0.0, time.time() - then)
    for unit, length in (("days", 86_400), ("hours", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
