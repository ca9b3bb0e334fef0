"""`dispfl peer roster`: for a federation's administrators, who sign the list of its members."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from dispfl.errors import ConfigError

if TYPE_CHECKING:
    from dispfl.peer.membership.roster import Roster

app = typer.Typer(
    help="Create and sign the roster of a federation, as its administrators.", no_args_is_help=True
)

File = Annotated[Path, typer.Argument(metavar="ROSTER", help="The roster's file.")]

INVITE = (r"\s*(dispfl\d+-|{)", "an invite, which begins with dispfl1-,")
"""How an invite or a whole roster begins, and what to call it."""
ADMIN = (r"\s*[\w-]+:", "an administrator's public key, NAME:KEY,")


@app.command()
def key(
    file: Annotated[Path, typer.Argument(metavar="KEY", help="The new file for the secret key.")],
    name: Annotated[str, typer.Option(help="The administrator's name.")],
) -> None:
    """Create an administrator's key, and print its public part for `roster init`.

    Keep the file on a machine of your own: who has it can sign for you.

    Example: dispfl peer roster key ann.key --name ann > ann.pub
    """
    from dispfl.peer.membership.roster import create_admin_key

    typer.echo(create_admin_key(file, name))


@app.command()
def init(
    file: File,
    federation: Annotated[str, typer.Option(help="The federation's name, as at every site.")],
    admin: Annotated[
        list[str], typer.Option(help="An administrator's public key or a file with it; repeatable.")
    ],
    threshold: Annotated[int, typer.Option(help="Signatures that a roster needs.")],
) -> None:
    """Create an empty roster. Its administrators cannot be changed later.

    Example: dispfl peer roster init hearts.roster --federation hearts --threshold 2 --admin ann.pub
    --admin ben.pub
    """
    from dispfl.peer.membership.address import check_name
    from dispfl.peer.membership.roster import Roster, RosterError, read_admin

    if file.exists():
        raise RosterError(f"{file} exists; choose another file for the new roster.")
    admins = dict(read_admin(text_of(argument, *ADMIN)) for argument in admin)
    if len(admins) != len(admin):
        raise ConfigError(
            "Two administrators have the same name; give every key a name of its own."
        )
    if not 1 <= threshold <= len(admins):
        raise ConfigError(
            f"--threshold must be from 1 to {len(admins)}, the administrators, got {threshold}.",
            key="--threshold",
        )
    roster = Roster(
        check_name("--federation", federation), 1, threshold, dict(sorted(admins.items()))
    )
    _write(file, Roster.from_json(roster.to_json()))
    typer.echo(
        f"Created {file}. Add members with: dispfl peer roster add {quote(str(file))} INVITE"
    )
    _echo_administrators(roster)


@app.command()
def add(
    file: File,
    invite: Annotated[
        list[str], typer.Argument(metavar="INVITE...", help="Invites, or files with them.")
    ],
) -> None:
    """Add members. Compare the fingerprint of each by phone before you sign.

    Example: dispfl peer roster add hearts.roster alice.invite bob.invite
    """
    from dispfl.peer.membership.identity import readable_fingerprint
    from dispfl.peer.membership.invite import Invite

    invites = [Invite.read(text_of(argument, *INVITE)) for argument in invite]
    _change(file, lambda roster: roster.with_members(invites))
    for member in invites:
        typer.echo(f"{member.name} at {member.address}")
        for line in readable_fingerprint(member.fingerprint):
            typer.echo(f"    {line}")


@app.command()
def remove(
    file: File, name: Annotated[list[str], typer.Argument(metavar="NAME...", help="Members.")]
) -> None:
    """Remove members: every site revokes them when it gets the signed roster.

    Example: dispfl peer roster remove hearts.roster carol
    """
    _change(file, lambda roster: roster.without_members(name))


@app.command()
def sign(
    file: File,
    key: Annotated[Path, typer.Option("--key", metavar="KEY", help="Your key, from `roster key`.")],
) -> None:
    """Sign the roster. Look at it before: dispfl peer roster show.

    Example: dispfl peer roster sign hearts.roster --key ann.key
    """
    from dispfl.peer.membership.roster import read_admin_key

    roster = read_roster(file).signed_by(read_admin_key(key))
    _write(file, roster)
    typer.echo(_signatures(roster))


@app.command()
def show(
    file: File, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Show a roster: its version, its administrators, who has signed it, and its members.

    Example: dispfl peer roster show hearts.roster
    """
    from dispfl.peer.membership.identity import readable_fingerprint

    roster = read_roster(file)
    members = roster.members().values()
    if as_json:
        facts = {
            "federation": roster.federation,
            "version": roster.version,
            "digest": roster.digest,
            "fingerprint": roster.fingerprint,
            "threshold": roster.threshold,
            "admins": sorted(roster.admins),
            "signed_by": roster.signers(),
            "members": [
                {
                    "name": member.name,
                    "address": str(member.address),
                    "fingerprint": member.fingerprint,
                }
                for member in members
            ],
            "problems": roster.unusable,
        }
        typer.echo(json.dumps(facts, indent=2))
        return
    typer.echo(
        f"Roster of the federation {roster.federation}, version {roster.version}, {len(members)}"
        " members."
    )
    typer.echo(_signatures(roster))
    _echo_administrators(roster)
    for member in members:
        first, second = readable_fingerprint(member.fingerprint)
        typer.echo(f"\n{member.name} at {member.address}\n    {first}\n    {second}")
    for problem in roster.unusable:
        typer.echo(f"\n{problem}")


def _change(file: Path, edit: Callable[["Roster"], "Roster"]) -> None:
    before = read_roster(file)
    roster = edit(before)
    if roster is before:
        typer.echo("Nothing changes.")
        return
    _write(file, roster)
    typer.echo(
        f"Version {roster.version} of the roster has {len(roster.invites)} members."
        f" {_signatures(roster)}"
    )


def _signatures(roster: "Roster") -> str:
    signers = roster.signers()
    text = f"Signed by {', '.join(signers)}" if signers else "Not signed yet"
    missing = roster.threshold - len(signers)
    if missing > 0:
        return f"{text}; {missing} more of the {len(roster.admins)} administrators must sign it."
    return f"{text}; it is complete. Sites accept it once: dispfl peer accept DIR ROSTER"


def _echo_administrators(roster: "Roster") -> None:
    from dispfl.peer.membership.identity import readable_fingerprint

    typer.echo(
        f"{roster.threshold} of {len(roster.admins)} administrators: {', '.join(roster.admins)}."
        " Fingerprint:\n"
    )
    for line in readable_fingerprint(roster.fingerprint):
        typer.echo(f"    {line}")


def read_roster(file: Path) -> "Roster":
    """Return the roster in a file."""
    from dispfl.peer.membership.roster import Roster, RosterError

    try:
        return Roster.read(file.read_text())
    except (OSError, UnicodeDecodeError) as problem:
        raise RosterError(f"The roster {file} cannot be read: {problem}.") from None


def _write(file: Path, roster: "Roster") -> None:
    from dispfl.files import write_atomically

    write_atomically(file, json.dumps(roster.to_json(), indent=1).encode() + b"\n")


def text_of(argument: str, pattern: str, description: str) -> str:
    """Return the content of a file, or the argument itself if it begins with the pattern."""
    try:
        return Path(argument).read_text(errors="replace")
    except OSError as problem:
        if re.match(pattern, argument):
            return argument
        raise ConfigError(
            f"{argument[:60]!r} is neither {description} nor a file: {problem.strerror}."
        ) from None
