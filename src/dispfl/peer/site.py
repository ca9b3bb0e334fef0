"""The folder of a site: everything that one participant has on its machine.

site.toml       its name, addresses and settings
identity/       key and certificate
members.json    accepted and revoked members, and the roster
spec.json       signed changes of the settings that all sites share
NAME.invite     the invite that others need to accept it
audit.jsonl     accepted, confirmed and revoked members, changed keys and addresses
run/            written by the node: a run directory (checkpoints, metrics.jsonl), the data
                contract (data.safetensors) and status.json
"""

import ipaddress
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import tomli_w
from pydantic import Field, field_validator

from dispfl.core.names import check_name
from dispfl.errors import ConfigError, RunError
from dispfl.files import (
    RUN,
    SITE,
    is_locked,
    make_folder,
    open_or_create,
    plain_disk_errors,
    read_regular,
    user_name,
    write_atomically,
)
from dispfl.peer.membership.address import (
    Address,
    RelayAddress,
    parse_outbox,
    parse_relays,
    reach_text,
)
from dispfl.peer.membership.audit_log import Change, operator
from dispfl.peer.membership.identity import Identity
from dispfl.peer.membership.invite import Invite
from dispfl.peer.membership.list_file import file_lock
from dispfl.peer.membership.member_list import ROTATION_INTERVAL
from dispfl.peer.membership.members import MembersFile
from dispfl.peer.membership.spec_changes import SpecChangesFile
from dispfl.peer.outbox.sealing import SEALING_KEY, SealingKey
from dispfl.peer.state.log import finite
from dispfl.settings import Settings
from dispfl.trust import check_site, remember_site

if TYPE_CHECKING:
    from dispfl.peer.setup.site_config import SiteConfig

IDENTITY = "identity"
MEMBERS = "members.json"
SPEC_CHANGES = "spec.json"
STATUS = "status.json"
WARM_START = "warm-start"
"""The folder of the first model of a site that begins with an earlier one's."""
STOP = ".stop"
"""An empty file in the run folder: a request to its node to stop."""
STATUS_SPARE = 1024
"""Blanks at the end of the status file, so that a longer one can be written in its place on a full
disk."""
_COMMENT = """\
# A site of a federation. `dispfl peer status` and `dispfl peer run` read this file. Equal at all
# sites of the federation: federation, seed, rounds, smallest_density, [model], [method] except
# density, [topology], [wire], and the classes, columns and input shape of the data. Everything else
# is this site's own.

"""


class SiteInfo(Settings):
    """The name, the addresses and the federation of a site."""

    name: str
    """The site's name, which its certificate has too: letters, digits and dashes."""
    listen: str | None = None
    """HOST:PORT to listen on; 0.0.0.0 or [::] for all of the machine's addresses. A site with
    `relays` or an `outbox` needs none."""
    advertise: str | None = None
    """HOST:PORT where other sites reach it, if it differs from `listen`."""
    relays: tuple[str, ...] = ()
    """Relays by which other sites reach it where they cannot connect to it: what `dispfl relay`
    prints, such as wss://relay.example.org:443. The site needs no open port then."""
    ca_bundle: str | None = None
    """A PEM file of authorities that the certificates of relays and buckets may have besides those
    of the system: that of a proxy which inspects TLS, for example."""
    outbox: str | None = None
    """Storage in which the site leaves its encrypted models for members that cannot reach it:
    s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, or a folder such as
    /mnt/share/alice. Only this site writes there. It needs `wire.exchange = "push"`."""
    outboxes: dict[str, str] = Field(default_factory=dict)
    """By member: where this site reads its outbox, if that is not where the member says; a share
    that is mounted elsewhere, for example."""
    federation: str = "dispfl"
    """The federation's name; the same at every site."""
    allow_modules: tuple[str, ...] = ()
    """Modules and packages from which the settings may import code (`model.factory`, ...), besides
    those in the site's folder. The operator's choice: a federation's config cannot set it."""
    allow_networks: tuple[str, ...] = ()
    """Networks that the site may connect to, such as 10.0.0.0/8; empty for all. Members announce
    their own addresses."""

    @field_validator("name", "federation")
    @classmethod
    def _check_name(cls, name: str, info: Any) -> str:
        return check_name(info.field_name, name)

    @field_validator("listen", "advertise")
    @classmethod
    def _check_address(cls, address: str | None) -> str | None:
        return None if address is None else str(Address.parse(address))

    @field_validator("relays")
    @classmethod
    def _check_relays(cls, relays: tuple[str, ...]) -> tuple[str, ...]:
        try:
            return tuple(map(str, parse_relays(" ".join(relays))))
        except ConfigError as problem:
            raise ConfigError(f"relays: {problem}", key="relays") from None

    @field_validator("outbox")
    @classmethod
    def _check_outbox(cls, outbox: str | None) -> str | None:
        return None if outbox is None else parse_outbox(outbox)

    @field_validator("outboxes")
    @classmethod
    def _check_outboxes(cls, outboxes: dict[str, str]) -> dict[str, str]:
        places = {}
        for name, place in outboxes.items():
            try:
                places[check_name("a member", name)] = parse_outbox(place)
            except ConfigError as problem:
                raise ConfigError(f"outboxes.{name}: {problem}", key="outboxes") from None
        return places

    @field_validator("ca_bundle")
    @classmethod
    def _check_ca_bundle(cls, file: str | None) -> str | None:
        if file is not None and not Path(file).is_file():
            raise ConfigError(
                f"ca_bundle names {file!r}, which is no file; name a PEM file of certificates.",
                key="ca_bundle",
            )
        return file

    @field_validator("allow_networks")
    @classmethod
    def _check_networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as problem:
                raise ConfigError(
                    f"allow_networks has {network!r}: {problem}; for example 10.0.0.0/8.",
                    key="allow_networks",
                ) from None
        return networks

    def model_post_init(self, context: Any, /) -> None:
        """Refuse a site that others cannot reach."""
        if self.listen is None and not self.relays and not self.outbox:
            raise ConfigError(
                "A site needs an address where others reach it: listen = HOST:PORT (--listen"
                " HOST:PORT), or, without an open port, relays = [...] (--relay wss://HOST:PORT)"
                " or outbox = PLACE (--outbox PLACE).",
                key="listen",
            )
        if self.listen is None and self.advertise is not None:
            raise ConfigError(
                f"advertise is {self.advertise}, but the site listens nowhere; set listen ="
                " HOST:PORT, or omit advertise.",
                key="advertise",
            )
        if self.address is not None and self.address.is_unspecified:
            raise ConfigError(
                f"Other sites cannot connect to {self.address}; set the address where they reach"
                " this site: advertise = HOST:PORT (--advertise HOST:PORT).",
                key="advertise",
            )

    def may_connect(self, host: str) -> bool:
        """Whether the site may connect to an IP address; a host name is checked once resolved."""
        if not self.allow_networks:
            return True
        try:
            ip = ipaddress.ip_address(host)
        except ValueError:
            return True
        ip = getattr(ip, "ipv4_mapped", None) or ip
        return any(ip in ipaddress.ip_network(network) for network in self.allow_networks)

    @property
    def listen_address(self) -> Address | None:
        """The address to listen on; None if it needs none."""
        return Address.parse(self.listen) if self.listen else None

    @property
    def address(self) -> Address | None:
        """The address where others connect to the site; None if it is reached in another way."""
        place = self.advertise or self.listen
        return Address.parse(place) if place else None

    @property
    def relay_addresses(self) -> tuple[RelayAddress, ...]:
        """The relays by which others reach the site."""
        return parse_relays(" ".join(self.relays))

    @property
    def reach(self) -> str:
        """Its address, its relays and its outbox, for people."""
        return reach_text(self.address, self.relay_addresses, self.outbox)


@dataclass(frozen=True)
class Site:
    """An open site folder. The identity is read once; the members are always current."""

    folder: Path
    info: SiteInfo
    identity: Identity
    members: MembersFile
    _config: Mapping[str, Any]

    @classmethod
    def create(cls, folder: Path, info: SiteInfo, config: Mapping[str, Any]) -> "Site":
        """Create a site with a new key; `config` is a `SiteConfig` as TOML."""
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RunError(
                f"{folder} exists and is not empty; choose another folder for the new site."
            )
        with plain_disk_errors(folder):
            make_folder(folder)
            folder.chmod(0o700)  # it holds models and the key
        Identity.make(info.name).save(folder / IDENTITY)
        MembersFile.create(folder / MEMBERS, info.name, info.federation)
        _write(folder, info, config)  # last: it makes the folder a site
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path, *, trust: bool = False) -> "Site":
        """Open an existing site. Its settings are checked by `config`.

        One of somebody else whose settings name code needs `trust` before `config`.
        """
        content = _read(folder)
        if trust:
            remember_site(folder)
        info_keys = content.keys() & SiteInfo.model_fields.keys()
        info = SiteInfo(**{key: content.pop(key) for key in info_keys})
        identity = Identity.load(folder / IDENTITY)
        if identity.name != info.name:
            raise RunError(
                f"{folder / SITE} names the site {info.name}, but its certificate names"
                f" {identity.name}. Restore the name, or create another site with `dispfl peer"
                " init`."
            )
        members = MembersFile(folder / MEMBERS, info.name, info.federation)
        return cls(folder, info, identity, members, content)

    def moved(self, listen: str) -> "Site":
        """Change the listening address; the node announces it to the members in a signed record."""
        address = str(Address.parse(listen))
        info = self.info.model_copy(update={"listen": address, "advertise": None})
        _write(self.folder, info, self._config)
        moved = Site.open(self.folder)
        moved.write_invite()
        return moved

    @property
    def name(self) -> str:
        """The site's name."""
        return self.info.name

    @property
    def run_folder(self) -> Path:
        """The folder that the node writes to."""
        return self.folder / RUN

    def config(self, **overrides: Any) -> "SiteConfig":
        """The settings in site.toml, with overrides."""
        # It imports torch, which most commands do not need.
        from dispfl.peer.setup.site_config import SiteConfig

        check_site(self.folder, self._config)
        return SiteConfig.from_values({**self._config, **overrides}, self.folder)

    def invite(self) -> Invite:
        """The invite that another site needs to accept this one."""
        info = self.info
        return Invite(
            info.federation,
            self.name,
            info.address,
            self.identity.certificate,
            info.relay_addresses,
            info.outbox,
        )

    def announce(self, density: float, first_round: int, *, again: bool = False) -> None:
        """Sign this site's record for the members, if it has changed, or if `again`."""
        sealing_key = SealingKey.load(self.folder / IDENTITY)
        self.members.announce(
            self.identity,
            self.info.address,
            density,
            first_round,
            relays=self.info.relay_addresses,
            outbox=self.info.outbox,
            sealing_key=sealing_key.public if sealing_key else None,
            again=again,
        )

    def make_sealing_key(self) -> SealingKey:
        """Return the key for which others seal what they store for this site; make it first."""
        key = SealingKey.load(self.folder / IDENTITY)
        if key is None:
            key = SealingKey.generate()
            key.save(self.folder / IDENTITY)
        return key

    @cached_property
    def spec_changes(self) -> SpecChangesFile:
        """The changes of the federation's spec that this site knows."""
        file = self.folder / SPEC_CHANGES
        return SpecChangesFile(file, self.identity, self.info.federation, self.members)

    @property
    def invite_file(self) -> Path:
        """Where the invite is written, to be sent to others."""
        return self.folder / f"{self.name}.invite"

    def write_invite(self) -> None:
        """Write the invite of the site's present key and address."""
        write_atomically(self.invite_file, f"{self.invite()}\n".encode())

    def rotate(self) -> Identity:
        """Create a new key, certified by the current one; a node uses it after a restart."""
        folder = self.folder / IDENTITY
        with file_lock(folder / ".lock"):
            current = Identity.load(folder)
            self._check_rotation(current)
            successor = current.rotate()
            detail = {"before": current.fingerprint}
            change = Change("rotated", self.name, successor.fingerprint, detail)
            successor.save(folder)
            (folder / SEALING_KEY).unlink(missing_ok=True)  # the node makes a new one
            self.members.file.update(lambda members: members, operator(), [change])
            Site.open(self.folder).write_invite()
        return successor

    def _check_rotation(self, identity: Identity) -> None:
        """Refuse a rotation that other sites would refuse, so soon after the last one."""
        if not identity.issuers:
            return
        age = identity.age
        if 0 <= age < ROTATION_INTERVAL:  # negative: the clock was set back meanwhile
            remaining = ROTATION_INTERVAL - age
            raise ConfigError(
                f"{self.name} replaced its key {age / 60:.0f} minutes ago, and other sites accept"
                f" one rotation an hour: repeat the command in {remaining / 60:.0f} minutes."
            )

    def check_user(self) -> None:
        """Refuse to run the site as root if it is another user's, who could not use its files."""
        owner = self.folder.stat().st_uid
        if os.geteuid() == 0 and owner != 0:
            name = user_name(owner)
            raise RunError(
                f"{self.folder} belongs to the user {name}, and you are root, so {name} could not"
                f" use what the node writes. Run: sudo -u {name} dispfl peer run"
                f" {quote(str(self.folder))}"
            )

    def is_running(self) -> bool:
        """Whether a node holds the run folder's lock, which ends with its process."""
        return is_locked(self.run_folder)

    def request_stop(self) -> None:
        """Ask the running node to stop, as SIGTERM does."""
        with plain_disk_errors(self.run_folder / STOP):
            os.close(open_or_create(self.run_folder / STOP))

    def is_stop_requested(self) -> bool:
        """Whether the node was asked to stop."""
        return (self.run_folder / STOP).exists()

    def withdraw_stop_request(self) -> None:
        """Remove the request to stop, if there is one."""
        with plain_disk_errors(self.run_folder / STOP):
            (self.run_folder / STOP).unlink(missing_ok=True)

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Write the status file; on a full disk in place of the last one, which needs no space."""
        file = self.run_folder / STATUS
        content = json.dumps(finite(status)).encode()
        try:
            write_atomically(file, content + b" " * STATUS_SPARE, durable=False)
        except RunError:
            try:
                with file.open("r+b") as last:
                    last.write(content.ljust(file.stat().st_size))
            except OSError:
                pass
            else:
                return
            raise

    def status(self) -> dict[str, Any] | None:
        """The last status that the node wrote; None if it never ran."""
        file = self.run_folder / STATUS
        try:
            status = json.loads(read_regular(file))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as problem:
            raise RunError(
                f"{file} cannot be read: {problem}. A running node rewrites it."
            ) from None
        if not isinstance(status, dict):
            raise RunError(f"{file} does not hold a JSON object. A running node rewrites it.")
        return status


def _write(folder: Path, info: SiteInfo, config: Mapping[str, Any]) -> None:
    content = info.model_dump(exclude_none=True) | dict(config)
    if not info.outboxes:
        del content["outboxes"]
    write_atomically(folder / SITE, (_COMMENT + tomli_w.dumps(content)).encode())


def _read(folder: Path) -> dict[str, Any]:
    file = folder / SITE
    try:
        return tomllib.loads(read_regular(file).decode())
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(
            f"{folder} is not a site: it has no {SITE}. Create one with `dispfl peer init"
            f" {folder}`."
        ) from None
    except (OSError, ValueError, RecursionError) as problem:
        raise RunError(f"{file} cannot be read: {problem}.") from None
