"""All checks of a site, in the order in which they are printed."""

from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from dispfl.errors import DispflError
from dispfl.peer.doctor.findings import Finding, Level, check_certificate
from dispfl.peer.doctor.machine import check_key, check_privacy, check_run, check_training
from dispfl.peer.doctor.network import check_network
from dispfl.peer.membership.identity import IdentityError
from dispfl.peer.participant import local_setup
from dispfl.peer.site import Site


def examine(folder: Path) -> Iterator[Finding]:
    """Check the site in a folder; findings are yielded as they are made.

    The site's node may be running or not. What a check trains is not kept.
    """
    try:
        site = Site.open(folder)
    except DispflError as problem:
        yield Finding(
            "key" if isinstance(problem, IdentityError) else "site", Level.FAILURE, str(problem)
        )
        return
    running = site.is_running()
    yield check_key(site)
    yield check_certificate(
        "certificate", site.identity.certificate, f"dispfl peer rotate {quote(str(folder))}"
    )
    try:
        config, setup = site.config(), local_setup(site)
    except DispflError as problem:
        yield Finding(
            "settings", Level.FAILURE, str(problem), f"Mend {folder / 'site.toml'} or the data."
        )
        return
    data = setup.run.peers[site.name]
    text = (
        f"{len(data.train)} training and {len(data.test)} test samples, {setup.layout.size:,}"
        " weights"
    )
    yield Finding("settings", Level.OK, text)
    try:
        status = site.status() or {}
    except DispflError as problem:
        status = {}
        yield Finding("run", Level.WARNING, str(problem))
    yield check_run(site, setup, status, running=running)
    if setup.run.privacy.enabled:
        yield check_privacy(site, setup)
    yield from check_training(site, setup, config, running=running)
    yield from check_network(site, setup, config, status, running=running)
