"""`dispfl peer roster`: for a federation's administrators, who sign the list of its members."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dispfl.cli import prompts
from dispfl.errors import ConfigError

if TYPE_CHECKING:
    from dispfl.peer.membership.roster import Roster

app = typer.Typer(
    help="Create and sign the roster of a federation, as its administrators.", no_args_is_help=True
)

File = Annotated[Path, typer.Argument(metavar="ROSTER", help="The roster's file.")]
SigningKey = Annotated[
    Path | None, typer.Option("--key", metavar="KEY", help="Your key: sign the change at once.")
]

INVITE = (r"\s*dispfl\d+-", "an invite, which begins with dispfl1-,")
"""How an invite begins, and what to call it."""
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
    threshold: Annotated[int, typer.Option(help="Signatures that a roster needs.")],
    admin: Annotated[
        list[str] | None,
        typer.Option(help="An administrator's public key or a file with it; repeatable."),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(help="Your own key, NAME.key; it is created if there is no such file."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="The settings that all sites share, for new sites."),
    ] = None,
) -> None:
    """Create a roster without members, for `dispfl peer init --roster`.

    Its administrators and settings cannot be changed later: the fingerprint
    that it prints is theirs.

    Example: dispfl peer roster init hearts.roster --federation hearts --threshold 2 --key ann.key
    --admin ben.pub --admin cat.pub --config federation.toml
    """
    from dispfl.core.names import check_name
    from dispfl.peer.membership.roster import Roster, RosterError, read_admin

    if file.exists():
        raise RosterError(f"{file} exists; choose another file for the new roster.")
    settings = {} if config is None else _shared_settings(config)
    public_keys = [text_of(argument, *ADMIN) for argument in admin or []]
    if key is not None:
        public_keys.insert(0, _own_public_key(key))
    admins = dict(map(read_admin, public_keys))
    if len(admins) != len(public_keys):
        raise ConfigError(
            "Two administrators have the same name; give every key a name of its own."
        )
    if not 1 <= threshold <= len(admins):
        raise ConfigError(
            f"--threshold must be from 1 to {len(admins)}, the administrators, got {threshold}.",
            key="--threshold",
        )
    roster = Roster(
        check_name("--federation", federation),
        0,
        threshold,
        dict(sorted(admins.items())),
        settings=settings,
    )
    _write(file, Roster.from_json(roster.to_json()))
    typer.echo(f"Created {file}.")
    _echo_administrators(roster)
    typer.echo(
        "\nNext: send the file to the sites, and read the fingerprint to them by phone. They create"
        " their folders with `dispfl peer init --roster`, and send you their invites:"
    )
    typer.echo(f"    dispfl peer roster add {quote(str(file))} INVITE...")


def _shared_settings(config: Path) -> dict[str, Any]:
    """The settings of a config file, which new sites must be able to use."""
    from dispfl.config import read_toml
    from dispfl.peer.peer import site_settings
    from dispfl.peer.setup.roster_settings import roster_settings

    settings = roster_settings(read_toml(config))
    site_settings(settings, ["data.path=of-each-site.csv"])
    return settings


def _own_public_key(file: Path) -> str:
    """The public part of an administrator's key, which is created if there is none."""
    from dispfl.peer.membership.roster import create_admin_key, public_key, read_admin_key

    if not file.exists():
        return create_admin_key(file, file.stem)
    return public_key(file.stem, read_admin_key(file))


@app.command()
def add(
    file: File,
    invite: Annotated[
        list[str], typer.Argument(metavar="INVITE...", help="Invites, or files with them.")
    ],
    key: SigningKey = None,
) -> None:
    """Add members. Compare the fingerprint of each by phone before you sign.

    Example: dispfl peer roster add hearts.roster alice.invite bob.invite --key ann.key
    """
    from dispfl.peer.membership.invite import Invite

    invites = [Invite.read(text_of(argument, *INVITE)) for argument in invite]
    _change(file, lambda roster: roster.with_members(invites))
    for member in invites:
        typer.echo(f"{member.name} at {member.reach}")
        prompts.echo_fingerprint(member.fingerprint)
    if key is not None:
        _sign(file, key, "Compare each fingerprint by phone. Are all right?")


@app.command()
def remove(
    file: File,
    name: Annotated[list[str], typer.Argument(metavar="NAME...", help="Members.")],
    key: SigningKey = None,
) -> None:
    """Remove members: every site revokes them when it gets the signed roster.

    Example: dispfl peer roster remove hearts.roster carol --key ann.key
    """
    _change(file, lambda roster: roster.without_members(name))
    if key is not None:
        _sign(file, key, "Do you sign this removal?")


@app.command()
def sign(
    file: File,
    key: Annotated[Path, typer.Option("--key", metavar="KEY", help="Your key, from `roster key`.")],
) -> None:
    """Sign the roster. On a terminal it is shown, and you are asked.

    Example: dispfl peer roster sign hearts.roster --key ben.key
    """
    from dispfl.peer.membership.roster import Roster

    if prompts.at_terminal():
        _echo_roster(Roster.load(file))
    _sign(file, key, "\nIs this right, and was each new fingerprint compared by phone?")


def _sign(file: Path, key: Path, question: str) -> None:
    """Add a signature, unless the administrator at the terminal says no."""
    from dispfl.peer.membership.roster import Roster, read_admin_key

    if prompts.at_terminal() and not prompts.confirm(question):
        typer.echo("Not signed.")
        raise typer.Exit(1)
    roster = Roster.load(file).signed_by(read_admin_key(key))
    _write(file, roster)
    typer.echo(_signatures(roster))


@app.command()
def show(
    file: File, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Show a roster: its version, its administrators, who has signed it, and its members.

    Example: dispfl peer roster show hearts.roster
    """
    from dispfl.peer.membership.roster import Roster

    roster = Roster.load(file)
    if as_json:
        facts = {
            "federation": roster.federation,
            "version": roster.version,
            "digest": roster.digest,
            "fingerprint": roster.fingerprint,
            "threshold": roster.threshold,
            "admins": sorted(roster.admins),
            "signed_by": roster.signers(),
            "settings": dict(roster.settings),
            "members": [
                {
                    "name": member.name,
                    "address": member.reach,
                    "fingerprint": member.fingerprint,
                }
                for member in roster.members().values()
            ],
            "problems": roster.unusable,
        }
        typer.echo(json.dumps(facts, indent=2))
    else:
        _echo_roster(roster)


def _echo_roster(roster: "Roster") -> None:
    import tomli_w

    members = roster.members().values()
    typer.echo(
        f"Roster of the federation {roster.federation}, version {roster.version}, {len(members)}"
        " members."
    )
    typer.echo(_signatures(roster))
    _echo_administrators(roster)
    if roster.settings:
        typer.echo("\nSettings of new sites:\n")
        typer.echo(tomli_w.dumps(roster.settings).strip())
    for member in members:
        typer.echo(f"\n{member.name} at {member.reach}")
        prompts.echo_fingerprint(member.fingerprint)
    for problem in roster.unusable:
        typer.echo(f"\n{problem}")


def _change(file: Path, edit: Callable[["Roster"], "Roster"]) -> None:
    from dispfl.peer.membership.roster import Roster

    before = Roster.load(file)
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
    if roster.is_founding:
        return "It has no members yet, and needs no signature."
    text = f"Signed by {', '.join(signers)}" if signers else "Not signed yet"
    missing = roster.threshold - len(signers)
    if missing > 0:
        return f"{text}; {missing} more of the {len(roster.admins)} administrators must sign it."
    return f"{text}; it is complete. Sites take it: dispfl peer run DIR ROSTER"


def _echo_administrators(roster: "Roster") -> None:
    typer.echo(
        f"{roster.threshold} of {len(roster.admins)} administrators: {', '.join(roster.admins)}."
        " Fingerprint:\n"
    )
    prompts.echo_fingerprint(roster.fingerprint)


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
