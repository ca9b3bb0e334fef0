"""`dispfl peer spec`: show and change the settings that all sites of a federation share."""

import json
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dispfl.peer.membership.spec_change import SpecChange
    from dispfl.peer.site import Site

app = typer.Typer(
    help="Show and change the settings that all sites of a federation share.", no_args_is_help=True
)

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The site's folder.")]
ChangeFile = Annotated[Path, typer.Argument(metavar="FILE", help="A proposed change.")]


@app.command()
def show(
    directory: Directory,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the versions of the spec, proposed changes, and who has signed them.

    Example: dispfl peer spec show alice
    """
    from dispfl.peer.membership.spec_change import FIRST_VERSION
    from dispfl.peer.setup.spec_proposals import latest_config, shared_settings
    from dispfl.peer.site import Site

    site = Site.open(directory)
    changes = site.spec_changes.current()
    settings = shared_settings(latest_config(site))
    if as_json:
        facts = {
            "version": changes.version,
            "settings": settings,
            "changes": [_facts(site, change) for change in changes.in_force],
            "proposed": [_facts(site, change) for change in changes.proposed],
        }
        typer.echo(json.dumps(facts, indent=2))
        return

    typer.echo(f"The spec of {site.info.federation} at {site.name} has version {changes.version}:")
    for key, value in settings.items():
        typer.echo(f"    {key} = {json.dumps(value)}")
    typer.echo(f"\nversion {FIRST_VERSION} from round 0: the settings in site.toml")
    for change in changes.in_force:
        signers = ", ".join(sorted([*change.administrators, *change.members]))
        typer.echo(f"{change.summary}; signed by {signers}")
    for proposal in changes.proposed:
        _echo_proposal(site, proposal)


@app.command()
def propose(
    directory: Directory,
    settings: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE...", help="Settings, as for dispfl run.")
    ],
    from_round: Annotated[
        int | None,
        typer.Option(help="The first round of the change; more rounds follow the last one."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A file for the proposal, to be sent to others.")
    ] = None,
) -> None:
    """Propose a change: rounds, [topology], [train], [deadlines], or a rule of [method].

    It is in force once everyone who decides has signed it: where sites have
    accepted a roster, its administrators (`dispfl peer spec sign`), else the
    operator of every site (`dispfl peer spec confirm`), of which this is the
    first. Running nodes pass it on. A finished federation continues if the
    change adds rounds: `dispfl peer run` again.

    Example: dispfl peer spec propose alice rounds=40
    """
    from dispfl.peer.setup.spec_proposals import make_change
    from dispfl.peer.site import Site

    site = Site.open(directory)
    change = make_change(site, settings, from_round)
    roster = site.members.file.current().roster
    if roster is not None:
        out = out or Path(f"{site.info.federation}-spec-{change.version}.json")
        _write(out, change)
        typer.echo(
            f"Wrote {out}: {change.summary}. {roster.threshold} of the administrators"
            f" {', '.join(roster.admins)} sign it: dispfl peer spec sign {quote(str(out))} --roster"
            " ROSTER --key KEY"
        )
        return

    changes = site.spec_changes.confirm(change)
    if out is not None:
        _write(out, change.signed_by_site(site.identity))
        typer.echo(f"Wrote {out}.")
    _echo_result(site, change, changes.version)


@app.command()
def sign(
    file: ChangeFile,
    roster: Annotated[Path, typer.Option(help="The federation's roster.")],
    key: Annotated[Path, typer.Option(help="Your key, from `roster key`.")],
) -> None:
    """Sign a change as an administrator.

    Example: dispfl peer spec sign hearts-spec-2.json --roster hearts.roster --key ann.key
    """
    from dispfl.peer.membership.roster import Roster, read_admin_key
    from dispfl.peer.membership.spec_change import Signatories

    signatories = Signatories({}, Roster.load(roster))
    assert signatories.roster is not None
    change = _read(file).signed_by_administrator(read_admin_key(key), signatories.roster)
    _write(file, change)
    typer.echo(f"Signed {change.summary}.")
    missing = signatories.missing(change)
    if missing:
        typer.echo(f"It needs the signature of {missing} too.")
    else:
        typer.echo(f"It is complete. One site takes it: dispfl peer spec confirm DIR {file}")


@app.command()
def confirm(
    directory: Directory,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="The change; default: the one proposed.")
    ] = None,
) -> None:
    """Confirm a proposed change, as this site's operator; or take one that is signed completely.

    Example: dispfl peer spec confirm bob
    """
    from dispfl.peer.setup.spec_proposals import proposal_to_confirm
    from dispfl.peer.site import Site

    site = Site.open(directory)
    take_change(site, _read(file) if file else proposal_to_confirm(site))


def take_change(site: "Site", change: "SpecChange") -> None:
    """Confirm a change, or take one that the administrators have signed."""
    from dispfl.peer.setup.spec_proposals import check_change

    if change.version > site.spec_changes.current().version:
        check_change(site, change)
    if site.members.file.current().roster is not None:
        changes = site.spec_changes.add(change)
    else:
        changes = site.spec_changes.confirm(change)
    _echo_result(site, change, changes.version)


@app.command()
def withdraw(directory: Directory) -> None:
    """Forget a proposal that this site has confirmed; others may still have it.

    Example: dispfl peer spec withdraw alice
    """
    from dispfl.peer.membership.spec_change import SpecChangeError
    from dispfl.peer.site import Site

    site = Site.open(directory)
    proposals = site.spec_changes.current().confirmed_by(site.name)
    if not proposals:
        raise SpecChangeError(f"{site.name} has confirmed no proposal that is not in force.")
    for proposal in proposals:
        site.spec_changes.withdraw(proposal)
        typer.echo(f"Withdrew {proposal.summary}.")


def _echo_result(site: "Site", change: "SpecChange", version: int) -> None:
    """Say whether a change is in force now, or who has to sign it."""
    if version >= change.version:
        typer.echo(
            f"In force: {change.summary}. Running nodes pass it on; a node that has finished"
            f" continues with: dispfl peer run {quote(str(site.folder))}"
        )
        return
    for proposal in site.spec_changes.current().proposed:
        if proposal.digest == change.digest:
            _echo_proposal(site, proposal)


def _echo_proposal(site: "Site", proposal: "SpecChange") -> None:
    facts = _facts(site, proposal)
    typer.echo(
        f"Proposed: {proposal.summary}; signed by {', '.join(facts['signed_by'])}, not yet by"
        f" {facts['missing']}"
    )
    if site.name not in proposal.members and site.members.file.current().roster is None:
        typer.echo(f"Confirm it with: dispfl peer spec confirm {quote(str(site.folder))}")


def _facts(site: "Site", change: "SpecChange") -> dict[str, Any]:
    return {
        "version": change.version,
        "from_round": change.from_round,
        "settings": dict(change.settings),
        "signed_by": sorted([*change.administrators, *change.members]),
        "missing": site.spec_changes.signatories().missing(change),
    }


def _read(file: Path) -> "SpecChange":
    from dispfl.files import read_regular
    from dispfl.peer.membership.spec_change import SpecChange, SpecChangeError

    try:
        return SpecChange.read(read_regular(file).decode())
    except (OSError, UnicodeDecodeError) as problem:
        raise SpecChangeError(f"The change {file} cannot be read: {problem}.") from None


def _write(file: Path, change: "SpecChange") -> None:
    from dispfl.files import write_atomically

    write_atomically(file, json.dumps(change.to_json(), indent=1).encode() + b"\n")
