"""The site's folder: everything that one participant has on its machine.

site.toml       its name and addresses, and its plan (see plan.py)
identity/       key and certificate
members.json    whom it has accepted
run/            what the node writes: checkpoints, metrics, status.json
"""

import fcntl
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
from pydantic import field_validator

from dispfl.errors import ConfigError, RunError
from dispfl.peer.address import Address, check_name
from dispfl.peer.identity import Identity
from dispfl.peer.invite import Invite
from dispfl.peer.members import Members, locked
from dispfl.runs.files import plain_disk_errors, write_atomically
from dispfl.settings import Settings

if TYPE_CHECKING:
    from dispfl.peer.plan import Plan

SITE, IDENTITY, MEMBERS, RUN, STATUS = "site.toml", "identity", "members.json", "run", "status.json"
_HEAD = """\
# A site of a federation. `dispfl peer status` and `dispfl peer run` read this file.
# All sites must agree on everything but name, addresses, device, precision, threads, [data], [train],
# method.density, [limits] and [pace].

"""


class Whereabouts(Settings):
    """What a site is called, and where it is."""

    name: str
    listen: str
    """HOST:PORT to listen on; 0.0.0.0 or [::] for all of the machine's addresses."""
    advertise: str | None = None
    """HOST:PORT where others reach it, if that is not where it listens."""
    federation: str = "dispfl"

    @field_validator("name", "federation")
    @classmethod
    def _nameable(cls, name: str, info: Any) -> str:
        return check_name(info.field_name, name)

    @field_validator("listen", "advertise")
    @classmethod
    def _canonical(cls, address: str | None) -> str | None:
        return None if address is None else str(Address.parse(address))

    def model_post_init(self, context: Any, /) -> None:
        """Refuse an address that others cannot call."""
        if self.address.is_everywhere:
            raise ConfigError(
                f"Nobody can call {self.address}; say where others reach this site: advertise = HOST:PORT "
                "(--advertise HOST:PORT)."
            )

    @property
    def listening(self) -> Address:
        """Where the site listens."""
        return Address.parse(self.listen)

    @property
    def address(self) -> Address:
        """Where others reach the site."""
        return Address.parse(self.advertise or self.listen)


@dataclass(frozen=True)
class Site:
    """A site's folder, opened. The identity is that of the moment of opening; the members are always current."""

    folder: Path
    where: Whereabouts
    identity: Identity
    members: Members
    _plan: Mapping[str, Any]

    @classmethod
    def create(cls, folder: Path, where: Whereabouts, plan: Mapping[str, Any]) -> "Site":
        """Make a new one, with a new key; `plan` is a `Plan` as TOML. The settings come last: they make it a site."""
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RunError(f"{folder} exists already and is not empty; choose another folder for the new site.")
        with plain_disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)  # the model and what others sent are nobody else's business
        Identity.make(where.name).save(folder / IDENTITY)
        Members.create(folder / MEMBERS, where.name, where.federation)
        _write(folder, where, plan)
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path) -> "Site":
        """Open one that exists. Its plan is checked when it is asked for."""
        content = _read(folder)
        where = Whereabouts(**{key: content.pop(key) for key in Whereabouts.model_fields if key in content})
        identity = Identity.load(folder / IDENTITY)
        if identity.name != where.name:
            raise RunError(
                f"{folder / SITE} calls the site {where.name}, its certificate {identity.name}. Write {identity.name} "
                "again, or make another site with `dispfl peer init`."
            )
        members = Members(folder / MEMBERS, where.name, where.federation)
        return cls(folder, where, identity, members, content)

    def moved(self, listen: str) -> "Site":
        """The same site, listening elsewhere from now on; others have to be told with a new invite."""
        where = Whereabouts(name=self.name, listen=listen, federation=self.where.federation)
        _write(self.folder, where, self._plan)
        return Site.open(self.folder)

    @property
    def name(self) -> str:
        """What the site is called."""
        return self.where.name

    @property
    def run_folder(self) -> Path:
        """Where the node writes."""
        return self.folder / RUN

    def plan(self, **instead: Any) -> "Plan":
        """What it trains; `instead` of what the file says, if given."""
        from dispfl.peer.plan import Plan  # torch comes with it, and most commands do without

        return Plan(**{**self._plan, **instead})

    def invite(self) -> Invite:
        """What another site needs to accept this one."""
        return Invite(self.where.federation, self.name, self.where.address, self.identity.certificate)

    def rotate(self) -> Identity:
        """A new key and certificate, issued by the present one; a node takes it up when it starts again."""
        folder = self.folder / IDENTITY
        with locked(folder / ".lock"):
            identity = Identity.load(folder).rotate()
            identity.save(folder)
        return identity

    def is_running(self) -> bool:
        """Whether a node holds the run folder's lock, which goes with its process, however that ends."""
        try:
            lock = os.open(self.run_folder / ".lock", os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)  # at once: a node that starts now must find it free
        return False

    def status(self) -> dict[str, Any] | None:
        """What the node last wrote about itself; None if it never ran."""
        file = self.run_folder / STATUS
        try:
            found = json.loads(file.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as problem:
            raise RunError(f"{file} cannot be read: {problem}. The node writes it anew while it runs.") from None
        if not isinstance(found, dict):
            raise RunError(f"{file} is not a status. The node writes it anew while it runs.")
        return found


def _write(folder: Path, where: Whereabouts, plan: Mapping[str, Any]) -> None:
    content = where.model_dump(exclude_none=True) | dict(plan)
    write_atomically(folder / SITE, (_HEAD + tomli_w.dumps(content)).encode())


def _read(folder: Path) -> dict[str, Any]:
    file = folder / SITE
    try:
        return tomllib.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(
            f"{folder} is not a site: it has no {SITE}. Make one with `dispfl peer init {folder}`."
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise RunError(f"{file} cannot be read: {problem}.") from None
