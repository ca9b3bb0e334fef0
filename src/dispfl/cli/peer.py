"""`dispfl peer`: create, connect, run and inspect one site of a real federation."""

import json
import shutil
import sys
import textwrap
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from dispfl.cli import prompts
from dispfl.cli.roster import app as roster_app
from dispfl.cli.spec import app as spec_app
from dispfl.terminal import SafeConsole

if TYPE_CHECKING:
    from dispfl.peer.doctor.findings import Finding
    from dispfl.peer.peer import Peer
    from dispfl.peer.setup.site_data import DataStatus

app = typer.Typer(
    help="Create, connect, run and inspect one site of a real federation.", no_args_is_help=True
)
app.add_typer(roster_app, name="roster")
app.add_typer(spec_app, name="spec")

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The site's folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Import the code that site.toml names, although somebody else made the site.",
    ),
]

LEVEL_WIDTH = 9
TOPIC_WIDTH = 13
MAX_WIDTH = 100
"""Columns of the output of `doctor`."""
COLOURS = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "failure": typer.colors.RED}


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
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Address to listen on; 0.0.0.0:PORT for all. Not needed with --relay or --outbox.",
        ),
    ] = None,
    relay: Annotated[
        list[str] | None,
        typer.Option(
            metavar="wss://HOST:PORT",
            help="A relay by which others reach it, as `dispfl relay` prints it; repeatable.",
        ),
    ] = None,
    outbox: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Storage for its models: s3://, gs:// or az://BUCKET/PREFIX, or a folder.",
        ),
    ] = None,
    ca_bundle: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Authorities of relays' and buckets' certificates besides the system's.",
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Address where others reach it, if it differs."),
    ] = None,
    federation: Annotated[
        str | None,
        typer.Option(help="The federation's name; the same at every site.", show_default="dispfl"),
    ] = None,
    roster: Annotated[
        Path | None,
        typer.Option(help="The federation's roster: its name, settings and administrators."),
    ] = None,
    fingerprint: Annotated[
        str | None,
        typer.Option(help="The fingerprint of the roster, which its administrators told you."),
    ] = None,
    smallest_density: Annotated[
        float | None,
        typer.Option(
            help="The smallest density of any site, if they differ; the same at every site."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="A config file with settings.")
    ] = None,
    warm_start: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="An earlier site, whose model is the first of this one."),
    ] = None,
    allow_module: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE",
            help="A module from which the config may import code; several with several options.",
        ),
    ] = None,
) -> None:
    """Create a site: its folder, its key and certificate, its settings and its invite.

    With --roster, the settings that all sites share come from there; only the
    site's own, such as data.path, have to be given.

    Equal at all sites of the federation: its name, seed, rounds,
    smallest_density, model, method except its density, topology, wire, and
    the classes, columns and input shape of the data.
    `dispfl explain site.toml` lists the settings that only sites have.
    Code that the settings name (model.factory=mine:net) is imported from the
    site's folder only, unless you name the module here, by --allow-module or
    in KEY=VALUE.

    Example: dispfl peer init alice --name alice --listen 0.0.0.0:7600 --advertise
    alice.example.org:7600
    """
    from dispfl.peer.peer import Peer

    overrides = overrides or []
    if roster is not None and fingerprint is None:
        fingerprint = _ask_for_fingerprint(roster)
    if smallest_density is not None:
        overrides = [f"smallest_density={smallest_density}", *overrides]
    peer = Peer.create(
        directory,
        name=name,
        listen=listen,
        relays=relay or [],
        outbox=outbox,
        ca_bundle=ca_bundle,
        advertise=advertise,
        federation=federation,
        roster=roster,
        fingerprint=fingerprint,
        config=config,
        overrides=overrides,
        allow_modules=allow_module or [],
        warm_start=warm_start,
    )
    info = peer.site.info
    typer.echo(f"Created the site {peer.name} of the federation {info.federation} in {directory}.")
    typer.echo(f"Others reach it at {info.reach}. The fingerprint of its certificate:\n")
    prompts.echo_fingerprint(peer.fingerprint)
    _echo_next_steps(peer, roster)


def _ask_for_fingerprint(roster: Path) -> str | None:
    """The fingerprint of a roster, if the operator says that it is right."""
    from dispfl.peer.membership.roster import Roster

    founding = Roster.load(roster)
    return founding.fingerprint if prompts.ask_about_roster(founding) else None


def _echo_next_steps(peer: "Peer", roster: Path | None) -> None:
    """Say what the operator of a new site does next."""
    folder = quote(str(peer.folder))
    invite = quote(str(peer.site.invite_file))
    if roster is None:
        receivers = "every other site"
        if peer.site.info.relays:
            receivers += " and the owner of each relay"
        typer.echo(f"\nNext: send {invite} to {receivers}, and accept theirs:")
        typer.echo(f"    dispfl peer accept {folder} INVITE...")
        typer.echo(f"    dispfl peer run {folder}")
    else:
        typer.echo(f"\nNext: send {invite} to an administrator. Once the roster is signed:")
        typer.echo(f"    dispfl peer run {folder} {quote(roster.name)}")


@app.command()
def invite(directory: Directory) -> None:
    """Print the invite that other sites need to accept this one. It holds no secret.

    Example: dispfl peer invite alice
    """
    from dispfl.peer.peer import Peer

    peer = Peer.open(directory)
    typer.echo(peer.invite())
    if sys.stdout.isatty():
        typer.echo(f"\nThe fingerprint of {peer.name}, to compare by phone:\n", err=True)
        prompts.echo_fingerprint(peer.fingerprint, err=True)


@app.command()
def accept(
    directory: Directory,
    file: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="Invites of other sites, a roster, or a change of the spec; - for stdin.",
        ),
    ],
    fingerprint: Annotated[
        list[str] | None,
        typer.Option(
            help="A fingerprint that another site or the administrators told you; repeatable."
        ),
    ] = None,
) -> None:
    """Accept other sites, or everyone on a roster.

    Two sites communicate once each has accepted the other. A new site's
    fingerprint has to be compared by phone: the command asks for it, or takes
    it as --fingerprint. Until then the site is pending, see `dispfl peer
    confirm`. A roster needs its administrators' fingerprint the first time;
    newer versions come from other sites. A running node applies it without a
    restart.

    Example: dispfl peer accept alice bob.invite carol.invite
    """
    from dispfl.cli.accept import accept_documents
    from dispfl.peer.peer import Peer

    accept_documents(Peer.open(directory), file, fingerprint or [])


@app.command()
def confirm(
    directory: Directory,
    name: Annotated[list[str], typer.Argument(metavar="NAME...", help="Pending members.")],
) -> None:
    """Confirm that the fingerprints of pending sites are right: they become members.

    Example: dispfl peer confirm alice bob
    """
    from dispfl.peer.peer import Peer

    peer = Peer.open(directory)
    for pending in name:
        member = peer.confirm(pending)
        typer.echo(f"Accepted {member.name} at {member.address}.")


@app.command()
def revoke(
    directory: Directory, name: Annotated[str, typer.Argument(help="The member to refuse.")]
) -> None:
    """Refuse a member from now on. Other sites decide for themselves.

    A running node cuts its connections at once. To undo it, accept the
    member's invite again.

    Example: dispfl peer revoke alice bob
    """
    from dispfl.peer.peer import Peer

    member = Peer.open(directory).revoke(name)
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
    prompts.echo_fingerprint(identity.fingerprint)
    typer.echo(f"\nA running node uses it after a restart: dispfl peer run {quote(str(directory))}")


@app.command()
def status(
    directory: Directory,
    as_json: AsJson = False,
) -> None:
    """Show the members, their traffic, and what was refused and why.

    Example: dispfl peer status alice
    """

    from dispfl.cli.status import print_status
    from dispfl.peer.peer import Peer

    site_status = Peer.open(directory).status()
    if as_json:
        typer.echo(json.dumps(asdict(site_status), indent=2))
    else:
        print_status(site_status, directory, SafeConsole())


@app.command()
def log(
    directory: Directory,
    as_json: AsJson = False,
) -> None:
    """Show the audit log: accepted and revoked sites, changed keys, addresses and rosters.

    Example: dispfl peer log alice
    """
    from dispfl.peer.site import Site

    for entry in Site.open(directory).members.file.audit_log():
        if as_json:
            typer.echo(json.dumps(entry))
        else:
            typer.echo(_audit_line(entry))


def _audit_line(entry: dict[str, object]) -> str:
    """`2026-11-16T03:10:08+00:00  accepted  bob  9db1e899c82a7ac9  by user ann  address=...`"""
    columns = ("time", "event", "member", "fingerprint", "by")
    time, event, member, fingerprint, by = (str(entry.get(key, "")) for key in columns)
    line = f"{time}  {event:<15} {member:<12} {fingerprint[:16]}  by {by}"
    for key, value in entry.items():
        if key not in columns:
            line += f"  {key}={value}"
    return line


@app.command()
def data(
    directory: Directory,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Take in new rows, and drop removed ones.")
    ] = False,
    as_json: AsJson = False,
    trust: Trust = False,
) -> None:
    """Show the site's data: rows, classes, columns, scaling, and what changed since they were taken
    in.

    The node uses the rows that were there at its first start. New rows wait
    for --refresh; a running node takes them in before its next round. Rows
    that are removed are no longer used after a restart or a refresh. The
    scaling stays that of the first start, because the model was trained
    with it.

    Example: dispfl peer data alice
    """
    from dispfl.cli.site_data import print_data
    from dispfl.peer.peer import Peer

    peer = Peer.open(directory, trust=trust)
    status = peer.data(refresh=refresh)
    if as_json:
        typer.echo(json.dumps(asdict(status), indent=2))
        return
    print_data(status, SafeConsole())
    command = f"dispfl peer data {quote(str(directory))} --refresh"
    if refresh:
        typer.echo(_refreshed(status, running=peer.site.is_running()))
    elif status.changes:
        typer.echo(f"New rows are not used before: {command}")


def _refreshed(status: "DataStatus", *, running: bool) -> str:
    """Say when the rows of a refresh are used."""
    if status.contract is None:
        return "Nothing to refresh: the node takes in all rows at its first start."
    if not status.changes:
        return "Nothing to refresh: all rows are in use."
    when = "before its next round" if running else "when it starts"
    return f"Refreshed: the node uses these rows {when}."


@app.command()
def doctor(
    directory: Directory,
    as_json: AsJson = False,
    trust: Trust = False,
) -> None:
    """Check the site, its machine and its members, and say what to do.

    Key, settings, time of a round, memory, disk, port, clock, and every
    member both ways. The node may be running or not. The exit code is 1 if
    something has failed.

    Example: dispfl peer doctor alice
    """
    from dispfl.peer.doctor.examine import examine

    findings = []
    for finding in examine(directory, trust=trust):
        findings.append(finding)
        if not as_json:
            _echo_finding(finding)

    levels = Counter(str(finding.level) for finding in findings)
    failures, warnings = levels["failure"], levels["warning"]
    if as_json:
        report = {
            "failures": failures,
            "warnings": warnings,
            "findings": [asdict(finding) for finding in findings],
        }
        typer.echo(json.dumps(report, indent=2))
    else:
        typer.echo(f"\n{_count(failures, 'failure')}, {_count(warnings, 'warning')}.")
    if failures:
        raise typer.Exit(1)


def _count(number: int, noun: str) -> str:
    """`no failures`, `1 failure` or `2 failures`."""
    return f"{number or 'no'} {noun}" if number == 1 else f"{number or 'no'} {noun}s"


def _echo_finding(finding: "Finding") -> None:
    """`ok  key  readable by its owner alone`, and below it what to do, as wide as the terminal."""
    topic = f"{finding.topic:<{TOPIC_WIDTH}}"
    if len(finding.topic) >= TOPIC_WIDTH:
        topic = f"{finding.topic} "
    level = typer.style(f"{finding.level:<{LEVEL_WIDTH}}", fg=COLOURS[finding.level])
    text = _wrapped(" " * LEVEL_WIDTH + topic, finding.text)
    typer.echo(level + text[LEVEL_WIDTH:])
    if finding.advice:
        typer.echo(_wrapped(" " * (LEVEL_WIDTH + TOPIC_WIDTH) + "-> ", finding.advice, indent=3))


def _wrapped(beginning: str, text: str, indent: int = 0) -> str:
    terminal_width = shutil.get_terminal_size((80, 24)).columns
    wrapper = textwrap.TextWrapper(
        min(MAX_WIDTH, terminal_width),
        initial_indent=beginning,
        subsequent_indent=" " * (LEVEL_WIDTH + TOPIC_WIDTH + indent),
        break_on_hyphens=False,
        break_long_words=False,
    )
    return wrapper.fill(text)


@app.command()
def run(
    directory: Directory,
    file: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE]...", help="Invites or a roster to accept first, as `peer accept` does."
        ),
    ] = None,
    *,
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Write the log as JSON, one object per line.")
    ] = False,
    alone: Annotated[
        bool, typer.Option("--alone", help="Start although no other site is accepted yet.")
    ] = False,
    at_round: Annotated[
        int | None,
        typer.Option(
            "--round", help="Continue in this round, although too few members have reported it."
        ),
    ] = None,
    trust: Trust = False,
) -> None:
    """Train with the accepted sites, to the last round. A stopped node resumes.

    It continues in the round that more than half of the members agree on. A
    site that receives no model waits for the others.

    Example: dispfl peer run alice
    """
    from dispfl.cli.accept import accept_documents
    from dispfl.peer.peer import Peer

    peer = Peer.open(directory, trust=trust)
    if file:
        accept_documents(peer, file, [])
    peer.run(alone=alone, at_round=at_round, log_json=log_json)


@app.command()
def reopen(
    directory: Directory,
    rounds: Annotated[
        int | None,
        typer.Option(
            "--round", help="The next round; by default the one after the last received model."
        ),
    ] = None,
) -> None:
    """Continue a site that has finished, or gone too far, without the others.

    Its newest model continues in that round; `dispfl peer run` then joins the
    others. Later metrics and checkpoints are renamed to *.reopened.

    Example: dispfl peer reopen alice
    """
    from dispfl.peer.peer import Peer

    peer = Peer.open(directory)
    rounds = peer.reopen(rounds)
    command = f"dispfl peer run {quote(str(directory))}"
    typer.echo(f"{peer.name} continues with round {rounds}: {command}")


@app.command()
def stop(
    directory: Directory,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for it to end.")] = 60.0,
) -> None:
    """Stop the site's node, which runs in another process, and wait until it has ended.

    It ends between two batches, as after Ctrl-C, and saves its finished
    rounds. `dispfl peer run` resumes it.

    Example: dispfl peer stop alice
    """
    from dispfl.peer.peer import Peer

    peer = Peer.open(directory)
    if peer.stop(timeout):
        typer.echo(f"Stopped {peer.name}. Resume with: dispfl peer run {quote(str(directory))}")
    else:
        typer.echo(f"{peer.name} does not run.")


@app.command()
def backup(
    directory: Directory,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The new file for the backup.")],
) -> None:
    """Write everything that the site needs to continue elsewhere as one file.

    Settings, key, members, changes of the spec, audit log, and of its run the
    newest checkpoint, the metrics, what is kept about the data and the spent
    privacy budget. The data are not in it. The node may run meanwhile.

    Example: dispfl peer backup alice alice-2026-11-18.backup
    """
    from dispfl.peer.peer import Peer

    written = Peer.open(directory).backup(file)
    size = file.stat().st_size / 1e6
    typer.echo(
        f"Wrote {file} ({size:.1f} MB): {written.site} of {written.federation} after"
        f" {written.rounds} rounds."
    )
    typer.echo("It has the site's key and model: protect it like the key. The data are not in it.")


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The backup.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The site's new folder.")],
    newest: Annotated[
        bool,
        typer.Option("--newest", help="The site has not run since: its privacy budget counts."),
    ] = False,
) -> None:
    """Create a site's folder from a backup. Never run the old folder again.

    The node continues in the round of the others. Members that were revoked
    after the backup are members again, and a key that was rotated since is
    refused: look at `dispfl peer status` before the start.

    Example: dispfl peer restore alice-2026-11-18.backup site
    """
    from dispfl.peer.backup import restore_backup

    restored = restore_backup(file, directory, newest=newest)
    typer.echo(
        f"Restored {restored.site} of {restored.federation} as it was at {restored.time}, after"
        f" {restored.rounds} rounds."
    )
    if restored.is_private and not newest:
        typer.echo(
            "Its privacy budget is not restored, because it may have spent more since: it does not"
            f" train until its newest privacy.json is in {directory / 'run'}. If it has not run"
            " since the backup, restore it with --newest."
        )
    folder = quote(str(directory))
    typer.echo(
        "Make sure that the old folder is never run again, that the data are where site.toml says,"
        f" and that nobody was revoked since:\n    dispfl peer status {folder}\n    dispfl peer"
        f" run {folder}"
    )
