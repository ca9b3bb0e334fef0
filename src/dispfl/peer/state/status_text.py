"""The status of a site as sentences and words, for the terminal and for its page."""

import statistics
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispfl.peer.state.site_status import RosterStatus, SiteStatus

_MIN_UNIX_TIME = 1e9  # monotonic clocks show far less


def progress_text(status: "SiteStatus", site: str) -> str:
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
    age = ago_text(node.get("updated"))
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


def status_notes(status: "SiteStatus") -> list[str]:
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
        notes.append(outbox_text(node["outbox"]))
    if status.running:
        for name, peer in (node.get("peers") or {}).items():
            if peer.get("outbox_problem"):
                notes.append(
                    f"Outbox of {name}: {peer['outbox_problem']}; what was read before is used"
                    " meanwhile."
                )
    if node.get("epsilon") is not None:
        notes.append(f"Private training: epsilon {node['epsilon']:.3g} is spent.")
    if node.get("protection"):
        notes.append(f"Byzantine peers: {node['protection']}.")
    return notes


def outbox_text(outbox: Mapping[str, Any]) -> str:
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


def two_digits(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}"


def latency_text(peer: Mapping[str, Any]) -> str:
    """`0.12 s`, how long a peer usually takes to answer, or `27 s, slow`."""
    latencies = peer.get("latencies") or []
    if not latencies:
        return "-"
    text = f"{statistics.median(latencies):.2g} s"
    return f"{text}, slow" if peer.get("slow") else text


def route_text(route: str | None) -> str:
    """`direct`, `by wss://relay.example.org:443` or `by outbox s3://hearts/bob`."""
    if route is None or route == "direct":
        return route or "-"
    return f"by {route}"


def privacy_text(announced: Mapping[str, Any] | None) -> str:
    """`epsilon 4, delta 1e-05`, as a peer announces it."""
    if announced is None:
        return "-"
    budget = "noise without a budget"
    if announced["epsilon"] is not None:
        budget = f"epsilon {announced['epsilon']:g}"
    text = f"{budget}, delta {announced['delta']:g}"
    return text if announced["left"] else f"{text}, used up"


def ago_text(unix_time: Any) -> str:
    """`12 s ago`, or an empty string for anything but a Unix time."""
    if not isinstance(unix_time, int | float) or unix_time < _MIN_UNIX_TIME:
        return ""
    seconds = max(0.0, time.time() - unix_time)
    for unit, length in (("days", 86_400), ("hours", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
