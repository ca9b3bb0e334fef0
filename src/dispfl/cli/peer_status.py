"""What `dispfl peer status` shows: the site, its members, and what its node wrote about itself."""

import time
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dispfl.peer.site import Site

_EPOCH = 1e9  # a time of day in seconds; what a monotonic clock says is far less


def facts(site: "Site") -> dict[str, Any]:
    """Everything, as JSON."""
    return {
        "name": site.name,
        "federation": site.where.federation,
        "listen": site.where.listen,
        "address": str(site.where.address),
        "fingerprint": site.identity.fingerprint,
        "members": [
            {
                "name": member.name,
                "state": member.state,
                "address": str(member.address),
                "fingerprint": member.fingerprint,
                "density": member.density,
                "first_round": member.first_round,
                "serial": member.serial,
            }
            for member in site.members.all()
        ],
        "known": [
            {"name": record.name, "address": str(record.address), "fingerprint": record.fingerprint}
            for record in site.members.known()
        ],
        "running": site.is_running(),
        "node": site.status(),
    }


def print_status(found: Mapping[str, Any], folder: Path, console: "Console") -> None:
    """Everything, for people."""
    from dispfl.peer.certificates import readable

    if not console.is_terminal:
        console.width = 200  # a table in a pipe or a file stays in one piece
    first, second = readable(found["fingerprint"])
    _say(console, f"{found['name']} of the federation {found['federation']}, reached at {found['address']}")
    _say(console, f"fingerprint  {first}\n             {second}")
    _say(console, "\n" + _progress(found["node"], found["running"], quote(str(folder))))
    node = found["node"] or {}
    for title, table in (
        ("Members", _members(found["members"])),
        ("Traffic", _traffic(node.get("peers") or {})),
        ("Refused", _refused(node.get("refused") or {})),
        ("Refused before they could ask", _at_the_door(node.get("refused_at_the_door") or {})),
        ("Known to others, not accepted here; ask for an invite", _known(found["known"])),
        ("Fingerprints", _fingerprints([*found["members"], *found["known"]])),
    ):
        if table.row_count:
            _say(console, f"\n{title}")
            console.print(table)
    if not found["members"]:
        _say(console, f"\nNobody is accepted yet: dispfl peer accept {quote(str(folder))} INVITE")


def _progress(node: Mapping[str, Any] | None, running: bool, folder: str) -> str:
    if node is None:
        return "The node is starting." if running else f"The node has not run yet: dispfl peer run {folder}"
    state = node.get("state", "state unknown")
    if not running and state not in ("finished", "stopped"):  # it could not write down how it ended
        state = "not running"
    sentence = f"Round {node.get('round', '?')} of {node.get('rounds', '?')}, {state}"
    if running and node.get("deadline_seconds"):
        sentence += f"; others have {node['deadline_seconds']:.0f} s to answer"
    age = _ago(node.get("updated"))
    sentence = f"{sentence}. Written {age}." if age else f"{sentence}."
    return sentence if running or state == "finished" else f"{sentence} To go on: dispfl peer run {folder}"


def _members(members: list[dict[str, Any]]) -> "Table":
    table = _table("name", "state", "address", "density", "from round")
    for member in members:
        density = "-" if member["density"] is None else f"{member['density']:g}"
        _add(table, member["name"], member["state"], member["address"], density, str(member["first_round"]))
    return table


def _traffic(peers: Mapping[str, Mapping[str, Any]]) -> "Table":
    table = _table("name", "round", "seen", "received", "sent", "answered", "missed")
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
        )
    return table


def _refused(refused: Mapping[str, Mapping[str, int]]) -> "Table":
    table = _table("who", "why", "times")
    for name, reasons in sorted(refused.items()):
        for reason, times in sorted(reasons.items()):
            _add(table, name, reason, str(times))
    return table


def _at_the_door(refused: Mapping[str, int]) -> "Table":
    table = _table("why (who, where that is known)", "times")
    for why, times in sorted(refused.items()):
        _add(table, why, str(times))
    return table


def _known(known: list[dict[str, Any]]) -> "Table":
    table = _table("name", "address")
    for record in known:
        _add(table, record["name"], record["address"])
    return table


def _fingerprints(everyone: list[dict[str, Any]]) -> "Table":
    """Apart from all else, because each needs two lines of 39 letters in one piece to be read out on the phone."""
    from dispfl.peer.certificates import readable

    table = _table("name", "fingerprint")
    table.columns[1].no_wrap = True
    for one in everyone:
        _add(table, one["name"], "\n".join(readable(one["fingerprint"])))
    return table


def _table(*columns: str) -> "Table":
    from rich.table import Table

    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for column in table.columns:
        column.overflow = "fold"
    return table


def _add(table: "Table", *cells: str) -> None:
    from rich.text import Text

    table.add_row(*map(Text, cells))  # as plain text: [fd00::1] looks like markup


def _ago(moment: Any) -> str:
    """`12 s ago`, or nothing if it is no time of day."""
    if not isinstance(moment, int | float) or moment < _EPOCH:
        return ""
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("days", 86_400), ("hours", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _say(console: "Console", text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)
