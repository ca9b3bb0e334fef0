"""`dispfl peer`: create, connect, run and inspect one site of a real federation."""

import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dispfl.cli.roster import INVITE, text_of
from dispfl.cli.roster import app as roster_app
from dispfl.errors import ConfigError

if TYPE_CHECKING:
    from dispfl.peer.site import Site

app = typer.Typer(
    help="Create, connect, run and inspect one site of a real federation.", no_args_is_help=True
)
app.add_typer(roster_app, name="roster")

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The site's folder.")]


@app.command()
def init(
    directory: Directory,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings, as for dispfl run."),
    ] = None,
    *,
    name: Annotated[str, typer.Option(help="The site's name: letters, digits and dashes.")],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to listen on; 0.0.0.0:PORT for all.")
    ],
    advertise: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Address where others reach it, if it differs."),
    ] = None,
    federation: Annotated[
        str, typer.Option(help="The federation's name; the same at every site.")
    ] = "dispfl",
    smallest_density: Annotated[
        float | None,
        typer.Option(
            help="The smallest density of any site, if they differ; the same at every site."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="A config file with settings.")
    ] = None,
) -> None:
    """Create a site: its folder, its key and certificate, and its settings.

    Equal at all sites of the federation: its name, seed, rounds,
    smallest_density, model, method except its density, topology, wire, and
    the classes, columns and input shape of the data.
    `dispfl explain site.toml` lists the settings that only sites have.

    Example: dispfl peer init alice --name alice --listen 0.0.0.0:7600 --advertise
    alice.example.org:7600
    """
    from dispfl.peer.site import Site, SiteInfo

    info = SiteInfo(name=name, listen=listen, advertise=advertise, federation=federation)
    site = Site.create(directory, info, _site_config(config, overrides or [], smallest_density))
    typer.echo(f"Created the site {site.name} of the federation {federation} in {directory}.")
    typer.echo(f"Others reach it at {info.address}. The fingerprint of its certificate:\n")
    _echo_fingerprint(site.identity.fingerprint)
    typer.echo(
        f"\nNext: send every other site the output of: dispfl peer invite {quote(str(directory))}"
    )


def _site_config(
    config: Path | None, overrides: list[str], smallest_density: float | None
) -> dict[str, Any]:
    """Return the complete settings of a site, from a config file and `key=value` overrides."""
    from dispfl.config import read_toml
    from dispfl.experiment import Experiment
    from dispfl.peer.setup.site_config import SiteConfig
    from dispfl.peer.site import SiteInfo

    given = read_toml(config) if config else {}
    for key in (
        *given,
        *(override.partition("=")[0].partition(".")[0].strip() for override in overrides),
    ):
        if key in Experiment.model_fields.keys() - SiteConfig.model_fields.keys():
            raise ConfigError(
                f"{key} is for simulated runs: a site is one peer with its own data. Omit it.",
                key=key,
            )
        if key in SiteInfo.model_fields:
            where = (
                "add it to site.toml of the new site"
                if key == "allow_networks"
                else f"pass --{key}"
            )
            raise ConfigError(f"{key} is no setting of the training: {where}.", key=key)
    if smallest_density is not None:
        given["smallest_density"] = smallest_density
    values = SiteConfig.compose(given, overrides).to_toml()
    data = values["data"]
    for key in (
        ["dir"] if "dir" in data else {"path", "test_path"} & data.keys()
    ):  # paths are relative to `dir`
        data[key] = str(Path(data[key]).expanduser().absolute())
    if (
        "dir" not in data and "hub" in data and Path(data["hub"]).expanduser().exists()
    ):  # otherwise a name on the hub
        data["hub"] = str(Path(data["hub"]).expanduser().absolute())
    return values


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
        list[str],
        typer.Argument(
            metavar="INVITE",
            help="The other site's invite, a file with it, or a roster; - for stdin.",
        ),
    ],
    fingerprint: Annotated[
        str | None,
        typer.Option(
            help="The fingerprint that the other site told you; accepted at once if it matches."
        ),
    ] = None,
) -> None:
    """Accept another site, or everyone on a roster.

    Two sites communicate once each has accepted the other. Without
    --fingerprint the site is pending: compare fingerprints by phone, then
    `dispfl peer confirm`. A roster needs its administrators' fingerprint the
    first time; newer versions come from other sites. A running node applies
    it without a restart.

    Example: dispfl peer accept alice dispfl1-AAhob3NwaXRhbHMAA2JvYg... --fingerprint "9db1 e899
    ..."
    """
    from dispfl.peer.membership.invite import Invite, InviteError
    from dispfl.peer.site import Site

    site, text = Site.open(directory), _invite_text(invite)
    if text.lstrip().startswith("{"):
        _accept_roster(site, text, fingerprint)
        return
    found = Invite.read(text)
    if not site.info.may_connect(found.address.host):
        raise InviteError(
            f"{found.name} is at {found.address}, which is not in allow_networks of"
            f" {directory}/site.toml."
        )
    member = site.members.accept(found, fingerprint, confirmed=False)
    if member.state == "accepted":
        typer.echo(f"Accepted {member.name} at {member.address}.")
        return
    typer.echo(
        f"{member.name} at {member.address} is pending. The fingerprint of its certificate:\n"
    )
    _echo_fingerprint(member.fingerprint)
    typer.echo(
        f"\nCompare it by phone with what `dispfl peer status` shows at {member.name}. If it is the"
        " same:"
    )
    typer.echo(f"dispfl peer confirm {quote(str(directory))} {member.name}")


def _accept_roster(site: "Site", text: str, fingerprint: str | None) -> None:
    from dispfl.peer.membership.roster import Roster

    roster = Roster.read(text)
    before = site.members.file.current()
    after = site.members.accept_roster(roster, fingerprint)
    names = [member.name for member in site.members.accepted() if member.by == "roster"]
    if after.forks != before.forks:
        typer.echo(
            f"Refused: version {roster.version} of the roster was signed with another content, see"
            " peer status."
        )
        raise typer.Exit(1)
    version = after.roster.version if after.roster else 0
    typer.echo(
        f"Version {version} of the roster is in force: {len(names)} other sites are accepted by it."
    )
    for problem in roster.unusable:
        typer.echo(problem)
    own = roster.members().get(site.name)
    if own is None:
        typer.echo(f"This site, {site.name}, is not on it: send an administrator its invite.")
    elif own.certificate not in site.identity.chain:
        typer.echo(
            f"It lists {site.name} with another key than this site's: send an administrator a new"
            " invite."
        )


@app.command()
def confirm(
    directory: Directory, name: Annotated[str, typer.Argument(help="The pending member.")]
) -> None:
    """Confirm that a pending site's fingerprint is the right one: it becomes a member.

    Example: dispfl peer confirm alice bob
    """
    from dispfl.peer.site import Site

    member = Site.open(directory).members.confirm(name)
    typer.echo(f"Accepted {member.name} at {member.address}.")


def _invite_text(arguments: list[str]) -> str:
    """Return the text of an invite from stdin, from a file, or from the arguments."""
    if arguments == ["-"]:
        return sys.stdin.read()
    first = text_of(arguments[0], *INVITE)
    if len(arguments) > 1 and first is not arguments[0]:
        raise ConfigError(
            f"One invite at a time, got {len(arguments)} files; repeat the command for each."
        )
    return " ".join([first, *arguments[1:]])  # one that was pasted with line breaks


@app.command()
def revoke(
    directory: Directory, name: Annotated[str, typer.Argument(help="The member to refuse.")]
) -> None:
    """Refuse a member from now on. Other sites decide for themselves.

    A running node cuts its connections at once. To undo it, accept the
    member's invite again.

    Example: dispfl peer revoke alice bob
    """
    from dispfl.peer.site import Site

    member = Site.open(directory).members.revoke(name)
    typer.echo(f"Revoked {member.name}: this site no longer sends requests to it or answers it.")


@app.command()
def rotate(directory: Directory) -> None:
    """Create a new key and certificate, signed by the current key.

    Members that have accepted the current certificate accept the new one
    automatically. If the key may be stolen, create a new site instead, and
    have the others revoke this one.

    Example: dispfl peer rotate alice
    """
    from dispfl.peer.site import Site

    site = Site.open(directory)
    identity = site.rotate()
    typer.echo(f"{site.name} has a new certificate. Its fingerprint:\n")
    _echo_fingerprint(identity.fingerprint)
    typer.echo(f"\nA running node uses it after a restart: dispfl peer run {quote(str(directory))}")


@app.command()
def status(
    directory: Directory,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the members, their traffic, and what was refused and why.

    Example: dispfl peer status alice
    """
    import json

    from rich.console import Console

    from dispfl.cli.status import facts, print_status
    from dispfl.peer.site import Site

    found = facts(Site.open(directory))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        print_status(found, directory, Console())


@app.command()
def log(
    directory: Directory,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the audit log: who was accepted, confirmed and revoked, which keys, addresses and
    rosters changed.

    Example: dispfl peer log alice
    """
    import json

    from dispfl.peer.membership.audit_log import read_audit
    from dispfl.peer.site import Site

    for entry in read_audit(Site.open(directory).folder):
        if as_json:
            typer.echo(json.dumps(entry))
            continue
        shown = ("time", "event", "member", "fingerprint", "by")
        rest = "".join(f"  {key}={value}" for key, value in entry.items() if key not in shown)
        time, event, member, print_, by = (str(entry.get(key, "")) for key in shown)
        typer.echo(f"{time}  {event:<15} {member:<12} {print_[:16]}  by {by}{rest}")


@app.command()
def doctor(
    directory: Directory,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the site, its machine and its members, and say what to do.

    Key, settings, time of a round, memory, disk, port, clock, and every
    member both ways. The node may be running or not. The exit code is 1 if
    something has failed.

    Example: dispfl peer doctor alice
    """
    from dispfl.cli.doctor import print_findings

    if not print_findings(directory, as_json):
        raise typer.Exit(1)


@app.command()
def run(
    directory: Directory,
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Write the log as JSON, one object per line.")
    ] = False,
    alone: Annotated[
        bool, typer.Option("--alone", help="Start although no other site is accepted yet.")
    ] = False,
) -> None:
    """Train with the accepted sites, to the last round. A stopped node resumes.

    Example: dispfl peer run alice
    """
    from dispfl.peer.run_site import run_site
    from dispfl.peer.site import Site

    run_site(Site.open(directory), log_json, alone=alone)


def _echo_fingerprint(fingerprint: str, err: bool = False) -> None:
    from dispfl.peer.membership.identity import readable_fingerprint

    for line in readable_fingerprint(fingerprint):
        typer.echo(f"    {line}", err=err)
