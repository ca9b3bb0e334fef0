"""One site of a real federation from Python: what `dispfl peer` does."""

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dispfl.errors import ConfigError, RunError
from dispfl.peer.membership.invite import Invite, InviteError
from dispfl.peer.membership.roster import Roster
from dispfl.peer.setup.roster_settings import roster_settings
from dispfl.peer.site import Site, SiteInfo
from dispfl.peer.state.site_status import MemberStatus, RosterStatus, SiteStatus
from dispfl.registry import REGISTRIES
from dispfl.trust import check_modules, named_code, remember_site

if TYPE_CHECKING:
    from dispfl.export.formats import SavedModel
    from dispfl.methods.base import PeerState
    from dispfl.peer.backup import Backup
    from dispfl.peer.setup.site_data import DataStatus
    from dispfl.runs.run import Run

POLL_SECONDS = 0.1
DEFAULT_FEDERATION = "dispfl"


class Peer:
    """A site of a real federation, by its folder.

        peer = Peer.open("alice")
        peer.run()
        peer.export("model.onnx")

    `status`, `stop` and `export` also work while the node runs in another process.
    """

    def __init__(self, site: Site) -> None:
        self.site = site

    def __repr__(self) -> str:
        return f"Peer({self.name!r}, federation={self.site.info.federation!r}, in {self.folder})"

    @classmethod
    def open(cls, folder: str | Path, *, trust: bool = False) -> "Peer":
        """Open the site in a folder.

        If you did not create it on this machine and its settings name code (`module:name`), running
        it needs your `trust`.
        """
        return cls(Site.open(Path(folder), trust=trust))

    @classmethod
    def create(
        cls,
        folder: str | Path,
        *,
        name: str,
        listen: str | None = None,
        relays: Iterable[str] = (),
        outbox: str | None = None,
        ca_bundle: str | None = None,
        advertise: str | None = None,
        federation: str | None = None,
        roster: str | Path | None = None,
        fingerprint: str | None = None,
        config: Mapping[str, Any] | str | Path | None = None,
        overrides: Iterable[str] = (),
        allow_modules: Iterable[str] = (),
        warm_start: str | Path | None = None,
    ) -> "Peer":
        """Create a site with a new key, as `dispfl peer init`.

        `config` is a config file or its content, `overrides` are `key=value` settings that take
        precedence over it. Instead of `federation` and `config`, the file of a `roster` and the
        `fingerprint` that its administrators have told you. Code that the settings name is imported
        from the site's folder and from `allow_modules`; a module that an override names is allowed
        too. A site with `relays` or an `outbox` needs no address to `listen` on. `warm_start` is an
        earlier site, whose newest model is this one's first. Writes the site's invite as a file.
        """
        accepted_roster = None
        if roster is not None:
            if federation is not None or config is not None:
                raise ConfigError(
                    "The roster names the federation and its settings: omit --federation and"
                    " --config. Settings of this site alone are key=value.",
                    key="roster",
                )
            accepted_roster = Roster.load(Path(roster))
            accepted_roster.check_fingerprint(fingerprint)
            if not accepted_roster.is_founding:
                accepted_roster.verify()
            federation = accepted_roster.federation
            config = roster_settings(accepted_roster.settings)

        overrides = list(overrides)
        modules = (*allow_modules, *_named_modules(overrides))
        info = SiteInfo(
            name=name,
            listen=listen,
            relays=tuple(relays),
            outbox=outbox,
            ca_bundle=ca_bundle,
            advertise=advertise,
            federation=federation or DEFAULT_FEDERATION,
            allow_modules=tuple(dict.fromkeys(modules)),
        )
        settings = site_settings(config, overrides, info.allow_modules, Path(folder), outbox=outbox)
        first_model = None
        if warm_start is not None:
            first_model = _warm_start(Path(warm_start), settings)
        site = Site.create(Path(folder), info, settings)
        remember_site(site.folder)
        if accepted_roster is not None:
            site.members.accept_roster(accepted_roster, fingerprint)
        if first_model is not None:
            from dispfl.peer.setup.warm_start import write_warm_start

            write_warm_start(site, *first_model)
        site.write_invite()
        return cls(site)

    @property
    def name(self) -> str:
        """The site's name."""
        return self.site.name

    @property
    def folder(self) -> Path:
        """The site's folder."""
        return self.site.folder

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the site's certificate, to be compared by phone."""
        return self.site.identity.fingerprint

    # members

    def invite(self) -> str:
        """Return the invite that other sites need to accept this one. It holds no secret."""
        return str(self.site.invite())

    def accept(self, invite: str, fingerprint: str | None = None) -> MemberStatus:
        """Accept another site by its invite.

        Without the fingerprint that the other site's operator has told you, it is pending until
        `confirm`.
        """
        fingerprints = [] if fingerprint is None else [fingerprint]
        [member] = self.accept_all([invite], fingerprints)
        return member

    def accept_all(
        self, invites: Iterable[str], fingerprints: Iterable[str] = ()
    ) -> list[MemberStatus]:
        """Accept other sites by their invites, all or none.

        Those whose fingerprint is among `fingerprints` are members at once, the others are pending
        until `confirm`. A fingerprint that no invite has is refused.
        """
        parsed_invites = [Invite.read(invite) for invite in invites]
        for invite in parsed_invites:
            address = invite.address
            if address is not None and not self.site.info.may_connect(address.host):
                raise InviteError(
                    f"{invite.name} is at {address}, which is not in allow_networks of"
                    f" {self.folder}/site.toml."
                )
        members = self.site.members.accept_all(parsed_invites, list(fingerprints), confirmed=False)
        return [MemberStatus.of(member) for member in members]

    def accept_roster(self, roster: str | Path, fingerprint: str | None = None) -> RosterStatus:
        """Accept the file of a roster, and everyone on it; return the roster in force.

        The administrators' fingerprint is needed the first time. A roster that does not succeed
        the one in force is refused, and listed in `RosterStatus.forks`.
        """
        member_list = self.site.members.accept_roster(Roster.load(Path(roster)), fingerprint)
        assert member_list.roster is not None
        return RosterStatus.of(member_list.roster, member_list.forks)

    def confirm(self, name: str) -> MemberStatus:
        """Make a pending site a member, after its fingerprint was compared."""
        return MemberStatus.of(self.site.members.confirm(name))

    def revoke(self, name: str) -> MemberStatus:
        """Refuse a member from now on, also on open connections."""
        return MemberStatus.of(self.site.members.revoke(name))

    # backups

    def backup(self, file: str | Path) -> "Backup":
        """Write everything that the site needs to continue elsewhere as one file.

        It holds the key and the model: protect it like the key. The data are not in it. The node
        may run meanwhile.
        """
        from dispfl.peer.backup import write_backup

        return write_backup(self.site, Path(file))

    @classmethod
    def restore(cls, file: str | Path, folder: str | Path, *, newest: bool = False) -> "Peer":
        """Create a site's folder from a backup; open it.

        What a private site has spent is only restored from the `newest` state, if the site has not
        run since; otherwise it does not train until its newest `run/privacy.json` is in place.
        """
        from dispfl.peer.backup import restore_backup

        restore_backup(Path(file), Path(folder), newest=newest)
        return cls.open(folder)

    # the node

    def status(self) -> SiteStatus:
        """Return the site's members and what its node last reported."""
        return SiteStatus.of(self.site)

    def data(self, *, refresh: bool = False) -> "DataStatus":
        """Return what the site's data are, and what changed since its node took them in.

        `refresh` takes in the new rows: a running node does so before its next round. The returned
        changes are those that were taken in.
        """
        from dispfl.peer.setup.site_data import SiteData

        data = SiteData.read(self.site, self.site.config())
        if not refresh:
            return data.status()
        return replace(data.refresh().status(), changes=data.changes)

    def run(
        self, *, alone: bool = False, at_round: int | None = None, log_json: bool = False
    ) -> "Run":
        """Train with the accepted sites to the last round, or until the node is stopped.

        A stopped node resumes, in the round that more than half of the members agree on, or
        `at_round`. The log goes to stderr. A site without members only starts if it may train
        `alone`. Returns the run so far.
        """
        from dispfl.peer.run_site import run_site
        from dispfl.runs.run import Run

        self.site.check_user()
        run_site(self.site, log_json, alone=alone, at_round=at_round)
        return Run.load(self.folder, trust=True)  # its code has just run

    def reopen(self, rounds: int | None = None) -> int:
        """Continue a run that has ended, or gone too far alone, after this many rounds.

        By default after the last round with a received model. Nothing is lost: later metrics and
        checkpoints are renamed. Returns the number of rounds.
        """
        from dispfl.peer.state.store import reopen

        self.site.check_user()
        rounds = reopen(self.site.run_folder, self.name, rounds)
        status = self.site.status()
        if status is not None:
            self.site.write_status({**status, "state": "stopped", "round": rounds, "waiting": None})
        return rounds

    def stop(self, timeout: float = 60.0) -> bool:
        """Stop the node, which may run in another process, and wait until it has ended.

        It ends between two batches, as after SIGTERM, and saves its finished rounds. Returns
        whether it was running; raises `RunError` if it still runs after `timeout` seconds.
        """
        if not self.site.is_running():
            return False
        deadline = time.monotonic() + timeout
        while self.site.is_running():
            self.site.request_stop()  # again: a node that just starts withdraws earlier requests
            if time.monotonic() >= deadline:
                raise RunError(
                    f"The node of {self.name} still runs after {timeout:g} s. It ends after its"
                    " current batch; `dispfl peer status` shows what it does."
                )
            time.sleep(POLL_SECONDS)
        self.site.withdraw_stop_request()
        return True

    def export(self, to: str | Path, *, data_dir: str | Path | None = None) -> "SavedModel":
        """Write the site's model as one file, .onnx, .pt2 or .safetensors, as `dispfl export`.

        It is the model after the newest complete round. `data_dir` is the folder of the data set's
        files, if it has moved.
        """
        from dispfl.export.formats import check_writable, save_model
        from dispfl.export.personal import site_model

        file = Path(to)
        check_writable(file)
        personal = site_model(self.folder, None if data_dir is None else Path(data_dir))
        return save_model(personal.network, personal.card, file)


def _named_modules(overrides: Iterable[str]) -> list[str]:
    """Return the modules that `key=value` overrides name."""
    from dispfl.config import parse_overrides

    return [name.partition(":")[0] for _, name in named_code(parse_overrides(overrides))]


def _warm_start(old: Path, settings: Mapping[str, Any]) -> "tuple[PeerState, dict[str, str]]":
    """The model of an earlier site; refuse one for a site that trains privately."""
    from dispfl.peer.setup.warm_start import check_private_start, read_model
    from dispfl.privacy.steps import Privacy

    check_private_start(is_private=Privacy(**settings.get("privacy", {})).enabled)
    return read_model(old)


def site_settings(
    config: Mapping[str, Any] | str | Path | None,
    overrides: Iterable[str] = (),
    allow_modules: Iterable[str] = (),
    folder: Path = Path(),
    *,
    outbox: str | None = None,
) -> dict[str, Any]:
    """Return the complete settings of a new site, from a config and `key=value` overrides.

    Its method and topology are imported here; what else it names, once the site needs it.
    """
    from dispfl.config import read_toml
    from dispfl.peer.setup.site_config import OUTBOX_NEEDS_PUSH, SiteConfig

    if config is None:
        config = {}
    elif isinstance(config, str | Path):
        config = read_toml(Path(config))
    overrides = list(overrides)
    for key in config:
        _check_key(key)
    for override in overrides:
        path, _, _ = override.partition("=")
        _check_key(path.partition(".")[0].strip())
    imported = {key: value for key, value in config.items() if key in REGISTRIES}
    check_modules(folder, named_code(imported), tuple(allow_modules))
    composed = SiteConfig.compose(config, overrides)
    if outbox is not None and composed.pulls:
        raise ConfigError(OUTBOX_NEEDS_PUSH, key="outbox")
    settings = composed.to_toml()
    _anchor_paths(settings["data"], folder)
    if "path" in settings["topology"]:  # absolute
        settings["topology"]["path"] = _anchored(Path(settings["topology"]["path"]), folder)
    return settings


def _check_key(key: str) -> None:
    """Refuse the keys of simulations, and those that identify the site."""
    from dispfl.experiment import Experiment
    from dispfl.peer.setup.site_config import SiteConfig

    if key in Experiment.model_fields.keys() - SiteConfig.model_fields.keys():
        raise ConfigError(
            f"{key} is for simulated runs: a site is one peer with its own data. Omit it.", key=key
        )
    if key in ("allow_networks", "allow_modules"):
        raise ConfigError(
            f"{key} is not a training setting: add it to site.toml of the new site.", key=key
        )
    if key in SiteInfo.model_fields:
        raise ConfigError(f"{key} is not a training setting: pass --{key}.", key=key)


def _anchor_paths(data: dict[str, Any], folder: Path) -> None:
    """Keep the paths in the settings of the data valid from any working directory.

    A path in the site's folder or next to it becomes relative to the folder, so that both can be
    moved together; any other becomes absolute.
    """
    if "dir" in data:
        keys = ["dir"]  # the others are relative to it
    else:
        keys = [key for key in ("path", "test_path") if key in data]
        if "hub" in data and Path(data["hub"]).expanduser().exists():  # else a name on the hub
            keys.append("hub")
    is_own = data["name"] == "custom"
    for key in keys:
        path = Path(data[key]).expanduser().absolute()
        data[key] = _anchored(path, folder) if is_own else str(path)


def _anchored(path: Path, folder: Path) -> str:
    # A link to a folder is followed, as the system does for `..`; a link to the file itself may be
    # changed later, and is kept.
    target = path.parent.resolve() / path.name
    home = folder.resolve()
    root = Path(home.anchor)
    if target.is_relative_to(home) or (home.parent != root and target.is_relative_to(home.parent)):
        return os.path.relpath(target, home)
    return str(path)
