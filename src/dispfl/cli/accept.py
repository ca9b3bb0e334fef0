"""`dispfl peer accept`: what others give to a site as a file, each kind in its own way."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import typer

from dispfl.cli import prompts
from dispfl.errors import ConfigError

if TYPE_CHECKING:
    from dispfl.peer.membership.invite import Invite
    from dispfl.peer.peer import Peer

_BEGINNING = re.compile(r"\s*(dispfl\d+-|{)")
"""How an invite, or a signed document as JSON, begins."""


def accept_documents(peer: "Peer", arguments: Sequence[str], fingerprints: Sequence[str]) -> None:
    """Accept invites and signed documents, given as files, as text, or on stdin (`-`)."""
    invites = []
    for text in _texts(arguments):
        if text.lstrip().startswith("{"):
            _accept_signed(peer, text, fingerprints)
        else:
            invites.append(text)
    if invites:
        _accept_invites(peer, invites, fingerprints)


def _texts(arguments: Sequence[str]) -> list[str]:
    """The text of every document; an invite may be pasted with line breaks, as several words."""
    texts: list[str] = []
    is_pasted = False
    for argument in arguments:
        if argument == "-":
            texts.append(sys.stdin.read())
            is_pasted = False
            continue
        try:
            texts.append(Path(argument).read_text(errors="replace"))
            is_pasted = False
        except OSError as problem:
            if _BEGINNING.match(argument):
                texts.append(argument)
            elif is_pasted:
                texts[-1] += f" {argument}"
            else:
                raise ConfigError(
                    f"{argument[:60]!r} is neither an invite, which begins with dispfl1-, nor a"
                    f" file: {problem.strerror}."
                ) from None
            is_pasted = True
    return texts


# signed documents


def _accept_roster(peer: "Peer", text: str, fingerprints: Sequence[str]) -> None:
    from dispfl.peer.membership.identity import same_fingerprint
    from dispfl.peer.membership.roster import Roster

    site = peer.site
    roster = Roster.read(text)
    told_fingerprint = None
    for fingerprint in fingerprints:
        if same_fingerprint(fingerprint, roster.fingerprint):
            told_fingerprint = fingerprint
    if told_fingerprint is None and not site.members.follows(roster):
        if fingerprints:
            told_fingerprint = fingerprints[0]  # another one, which is refused
        elif prompts.ask_about_roster(roster):
            told_fingerprint = roster.fingerprint

    after = site.members.accept_roster(roster, told_fingerprint)
    if after.is_fork(roster):
        typer.echo(
            f"Refused: version {roster.version} does not succeed the roster that is in force, see"
            " peer status."
        )
        raise typer.Exit(1)

    version = after.roster.version if after.roster else 0
    if version == 0:
        typer.echo("The administrators are accepted. Their roster has no members yet.")
        return
    count = sum(member.by == "roster" for member in site.members.accepted())
    typer.echo(
        f"Version {version} of the roster is in force: {count} other sites are accepted by it."
    )
    for problem in roster.unusable:
        typer.echo(problem)
    own_invite = roster.members().get(site.name)
    if own_invite is None:
        typer.echo(f"This site, {site.name}, is not on it: send an administrator its invite.")
    elif own_invite.certificate not in site.identity.chain:
        typer.echo(
            f"It lists {site.name} with another key than this site's: send an administrator a new"
            " invite."
        )


def _accept_change(peer: "Peer", text: str, fingerprints: Sequence[str]) -> None:
    from dispfl.cli.spec import take_change
    from dispfl.peer.membership.spec_change import SpecChange

    take_change(peer.site, SpecChange.read(text))


SIGNED: dict[str, Callable[["Peer", str, Sequence[str]], None]] = {
    "roster": _accept_roster,
    "change": _accept_change,
}
"""What accepts a signed document, by the field that only this kind has."""


def _accept_signed(peer: "Peer", text: str, fingerprints: Sequence[str]) -> None:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = {}
    for kind, accept in SIGNED.items():
        if isinstance(fields, dict) and kind in fields:
            accept(peer, text, fingerprints)
            return
    raise ConfigError(
        f"{text.strip()[:40]!r}... is not what a site accepts: an invite, a roster, or a change of"
        " the spec. Ask for the file again."
    )


# invites


def _accept_invites(peer: "Peer", texts: Sequence[str], fingerprints: Sequence[str]) -> None:
    from dispfl.peer.membership.invite import Invite

    invites = []
    for text in texts:
        invite = Invite.read(text)
        if len(texts) > 1 and invite.certificate in peer.site.identity.chain:
            typer.echo(f"Left out the invite of this site, {invite.name}.")
        else:
            invites.append(invite)
    if not fingerprints and prompts.at_terminal():
        fingerprints = _compared_by_phone(peer, invites)

    pending = []
    for member in peer.accept_all(map(str, invites), fingerprints):
        if member.state == "accepted":
            typer.echo(f"Accepted {member.name} at {member.address}.")
        else:
            pending.append(member)
    for member in pending:
        typer.echo(
            f"{member.name} at {member.address} is pending. The fingerprint of its certificate:\n"
        )
        prompts.echo_fingerprint(member.fingerprint)
        typer.echo("")
    if pending:
        names = [member.name for member in pending]
        typer.echo(
            f"Compare by phone with what `dispfl peer status` shows at {', '.join(names)}. Where it"
            " is the same:"
        )
        typer.echo(f"dispfl peer confirm {quote(str(peer.folder))} {' '.join(names)}")


def _compared_by_phone(peer: "Peer", invites: Sequence["Invite"]) -> list[str]:
    """Ask the operator at the terminal whether the fingerprints of new sites are right."""
    accepted = {member.fingerprint for member in peer.site.members.accepted()}
    fingerprints = [invite.fingerprint for invite in invites]
    new = [invite for invite in invites if invite.fingerprint not in accepted]
    for invite in new:
        typer.echo(f"{invite.name} at {invite.reach}")
        prompts.echo_fingerprint(invite.fingerprint)
    if not new:
        return []
    question = (
        "Compare each fingerprint by phone with what `dispfl peer status` shows there. Are all"
        f" {len(new)} the same?"
    )
    return fingerprints if prompts.confirm(question) else []
