"""`dispfl peer`: a site of a real federation. It is made, introduced to others, run and looked after."""

import contextlib
import sys
import tomllib
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from dispfl.errors import ConfigError

app = typer.Typer(help="Make, introduce, run and watch one site of a real federation.", no_args_is_help=True)

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The site's folder.")]

SIMULATED = ("peers", "partition", "engine")
"""What an experiment has and a site has not."""
LOCAL = ("limits", "pace")
"""Tables that a site has and an experiment has not."""
_ANY_NUMBER = 10_000  # of peers, for the check of settings while nobody knows how many sites there will be


@app.command()
def init(
    directory: Directory,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings, as for dispfl run.")
    ] = None,
    *,
    name: Annotated[str, typer.Option(help="What the site is called: letters, digits and dashes.")],
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where it listens; 0.0.0.0:PORT for everywhere.")],
    advertise: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where others reach it, if that is somewhere else.")
    ] = None,
    federation: Annotated[str, typer.Option(help="The federation's name; the same at every site.")] = "dispfl",
    smallest_density: Annotated[
        float | None, typer.Option(help="The smallest density of any site, if they differ; the same at every site.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="A config file with settings.")] = None,
) -> None:
    """Make a site: its folder, its key and certificate, and its settings.

    All sites need the same settings; data, density and the tables limits and
    pace (how long this site waits for others) are each site's own.

    Example: dispfl peer init alice --name alice --listen 0.0.0.0:7600 --advertise alice.example.org:7600
    """
    from dispfl.peer.site import Site, Whereabouts

    where = Whereabouts(name=name, listen=listen, advertise=advertise, federation=federation)
    site = Site.create(directory, where, _plan(config, words or [], smallest_density))
    typer.echo(f"Made the site {site.name} of the federation {federation} in {directory}.")
    typer.echo(f"Others reach it at {where.address}. The fingerprint of its certificate:\n")
    _echo_fingerprint(site.identity.fingerprint)
    typer.echo(f"\nNext: give every other site what this prints: dispfl peer invite {quote(str(directory))}")


def _plan(config: Path | None, words: list[str], smallest_density: float | None) -> dict[str, Any]:
    """The complete settings of a site, from a config file under `key=value` words."""
    from dispfl.config import compose, read_toml
    from dispfl.peer.plan import Plan

    said = read_toml(config) if config else {}
    local, words = _of_this_site_alone(said, words)
    keys = {*said, *(word.partition("=")[0].partition(".")[0].strip() for word in words)}
    for key in SIMULATED:
        if key in keys:
            raise ConfigError(f"{key} is for simulated runs: a site is one peer with its own data. Leave it away.")
    least = smallest_density if smallest_density is not None else said.pop("smallest_density", None)
    composed = compose({"topology": "full", **said, "peers": _ANY_NUMBER}, words).to_toml()
    tables = {key: value for key, value in composed.items() if key in Plan.model_fields}
    if "threads" not in keys:  # a simulation takes the whole machine, a site one core
        tables.pop("threads")
    for key in {"path", "test_path", "dir"} & tables["data"].keys():  # typed from here, read from anywhere
        tables["data"][key] = str(Path(tables["data"][key]).expanduser().absolute())
    return Plan(**tables, **local, smallest_density=least).to_toml()


def _of_this_site_alone(said: dict[str, Any], words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The tables [limits] and [pace], which no simulation has, taken out of a config and of words; the other words."""
    tables: dict[str, Any] = {key: said.pop(key) for key in LOCAL if key in said}
    others = []
    for word in words:
        key, _, value = word.partition("=")
        table, _, field = key.strip().partition(".")
        if table not in LOCAL:
            others.append(word)
            continue
        if not field:
            raise ConfigError(
                f"{table} is a table, got {word!r}. Say which of its settings is meant: {table}.KEY=VALUE."
            )
        try:
            tables[table] = {**tables.get(table, {}), field: tomllib.loads(f"value = {value}")["value"]}
        except tomllib.TOMLDecodeError:
            raise ConfigError(f"{key} must be a number, got {value!r}.") from None
    return tables, others


@app.command()
def invite(directory: Directory) -> None:
    """Print the invite that other sites need to accept this one. It holds no secret.

    Example: dispfl peer invite alice
    """
    from dispfl.peer.site import Site

    site = Site.open(directory)
    typer.echo(str(site.invite()))
    if sys.stdout.isatty():
        typer.echo(f"\nThe fingerprint of {site.name}, to compare by phone:\n", err=True)
        _echo_fingerprint(site.identity.fingerprint, err=True)


@app.command()
def accept(
    directory: Directory,
    invite: Annotated[
        list[str], typer.Argument(metavar="INVITE", help="What the other site printed, or a file with it; - reads it.")
    ],
) -> None:
    """Accept another site. Two sites talk once each has accepted the other.

    A node that is running notices it by itself.

    Example: dispfl peer accept alice dispfl1-AAhob3NwaXRhbHMAA2JvYg...
    """
    from dispfl.peer.invite import Invite
    from dispfl.peer.site import Site

    site = Site.open(directory)
    member = site.members.accept(Invite.read(_text_of(invite)))
    typer.echo(f"Accepted {member.name} at {member.address}. The fingerprint of its certificate:\n")
    _echo_fingerprint(member.fingerprint)
    typer.echo(f"\nCompare it by phone with what {member.name} sees in `dispfl peer status`. If it differs:")
    typer.echo(f"dispfl peer revoke {quote(str(directory))} {member.name}")


def _text_of(words: list[str]) -> str:
    """An invite as it was given: piped, in a file, or pasted, perhaps in pieces."""
    if words == ["-"]:
        return sys.stdin.read()
    with contextlib.suppress(OSError):  # no such file, or a name that is too long for one: the invite itself
        if len(words) == 1:
            return Path(words[0]).read_text(errors="replace")
    return " ".join(words)


@app.command()
def revoke(directory: Directory, name: Annotated[str, typer.Argument(help="The member to refuse.")]) -> None:
    """Refuse a member from now on. Other sites decide for themselves.

    A node that is running refuses it at once, also on connections that are
    open. To take the member back, accept its invite again.

    Example: dispfl peer revoke alice bob
    """
    from dispfl.peer.site import Site

    member = Site.open(directory).members.revoke(name)
    typer.echo(f"Revoked {member.name}: this site neither hears it nor answers it any more.")


@app.command()
def rotate(directory: Directory) -> None:
    """Make a new key and certificate, signed by the present key.

    Members that have accepted the present certificate accept the new one by
    themselves. If the key may be in wrong hands, make a new site instead, and
    have the others revoke this one.

    Example: dispfl peer rotate alice
    """
    from dispfl.peer.site import Site

    site = Site.open(directory)
    identity = site.rotate()
    typer.echo(f"{site.name} has a new certificate. Its fingerprint:\n")
    _echo_fingerprint(identity.fingerprint)
    typer.echo(f"\nA node that is running uses it once it is started again: dispfl peer run {quote(str(directory))}")


@app.command()
def status(directory: Directory, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show the members, what they sent, what was refused and why.

    Example: dispfl peer status alice
    """
    import json

    from rich.console import Console

    from dispfl.cli.peer_status import facts, print_status
    from dispfl.peer.site import Site

    found = facts(Site.open(directory))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        print_status(found, directory, Console())


@app.command()
def run(
    directory: Directory,
    log_json: Annotated[bool, typer.Option("--log-json", help="Write the log as JSON, an object a line.")] = False,
    alone: Annotated[bool, typer.Option("--alone", help="Begin although nobody was accepted yet.")] = False,
) -> None:
    """Take part: train with the sites that were accepted, to the last round. Started again, it goes on.

    Example: dispfl peer run alice
    """
    from dispfl.peer.running import run_site
    from dispfl.peer.site import Site

    run_site(Site.open(directory), log_json, alone=alone)


def _echo_fingerprint(print_: str, err: bool = False) -> None:
    from dispfl.peer.certificates import readable

    for line in readable(print_):
        typer.echo(f"    {line}", err=err)
