"""A backup of a site as one file, from which it continues elsewhere.

A tar file of what a site needs, without its data, and last `backup.json` with a digest of each
file. It holds the site's key and model. Links are neither followed nor stored, and a restored site
has what the backup lists and nothing else, in a folder that did not exist before.

A node may run while its site is backed up: every file is replaced as a whole or appended to. What a
private site has spent is copied after its newest checkpoint, so it never counts less than the model
has taken.
"""

import contextlib
import datetime
import hashlib
import io
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from dispfl.errors import DispflError, RunError
from dispfl.files import (
    RUN,
    SITE,
    leave_to_owner,
    new_private_file,
    open_regular,
    plain_disk_errors,
    sync_folder,
    write_atomically,
)
from dispfl.peer.membership.audit_log import AUDIT
from dispfl.peer.membership.identity import CERTIFICATE, KEY
from dispfl.peer.outbox.sealing import SEALING_KEY
from dispfl.peer.site import IDENTITY, MEMBERS, SPEC_CHANGES, STATUS, WARM_START, Site

MANIFEST = "backup.json"
PRIVACY = "run/privacy.json"
CHECKPOINTS = "checkpoints"
_FORMAT = "dispfl backup"
_VERSION = 1
_BLOCK_BYTES = 1_000_000
_ATTEMPTS = 20
"""How often a checkpoint is looked for that the running node does not delete meanwhile."""


@dataclass(frozen=True)
class Backup:
    """What a backup says about itself."""

    site: str
    federation: str
    time: str
    """When it was made, in UTC."""
    rounds: int
    """Finished rounds of the model in it; 0 without one."""
    is_private: bool
    """Whether the site trains privately, and so has a budget that it may have spent since."""


def is_backed_up(name: str) -> bool:
    """Whether a file of a site, by its path inside the folder, belongs into a backup."""
    path = PurePosixPath(name)
    parts = path.parts
    is_hidden = any(part.startswith(".") for part in parts)
    if not parts or str(path) != name or path.is_absolute() or is_hidden:
        return False
    match parts:
        case (file,):
            is_known = file in (SITE, MEMBERS, SPEC_CHANGES, AUDIT)
            return is_known or path.suffix in (".invite", ".py")
        case (folder, file) if folder == IDENTITY:
            return file in (KEY, CERTIFICATE, SEALING_KEY)
        case (folder, file) if folder == RUN:
            return file != STATUS
        case (folder, *rest) if folder == RUN:
            return rest[0] == CHECKPOINTS and len(rest) == 3
        case (folder, *rest) if folder == WARM_START:
            return len(rest) <= 2
    return path.suffix == ".py"  # the operator's own modules


# writing


def write_backup(site: Site, file: Path) -> Backup:
    """Write everything that the site needs to continue elsewhere; refuse an existing file."""
    if file.exists():
        raise RunError(f"{file} exists; choose another file for the backup.")
    with new_private_file(file, replace=False) as output:
        return _write(site, output)


def _write(site: Site, output: IO[bytes]) -> Backup:
    files: dict[str, list[Any]] = {}
    with tarfile.open(fileobj=output, mode="w") as archive, contextlib.ExitStack() as stack:
        rounds, checkpoint = _open_checkpoint(site, stack)
        for name, source in checkpoint.items():
            files[name] = _add(archive, name, source)
        for name in _other_files(site.folder):
            with contextlib.suppress(FileNotFoundError), _open(site.folder / name) as source:
                files[name] = _add(archive, name, source)
        for name in (SITE, MEMBERS, f"{IDENTITY}/{KEY}", f"{IDENTITY}/{CERTIFICATE}"):
            if name not in files:
                raise RunError(
                    f"{site.folder / name} is missing, or a link, which a backup does not follow."
                    " Nothing was written."
                )
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        backup = Backup(site.name, site.info.federation, time, rounds, PRIVACY in files)
        manifest = {
            "format": _FORMAT,
            "version": _VERSION,
            "site": backup.site,
            "federation": backup.federation,
            "time": backup.time,
            "rounds": backup.rounds,
            "files": files,
        }
        content = json.dumps(manifest, indent=1).encode()
        _add(archive, MANIFEST, io.BytesIO(content), len(content))
    return backup


def _open_checkpoint(site: Site, stack: contextlib.ExitStack) -> tuple[int, dict[str, IO[bytes]]]:
    """Open the files of the newest complete checkpoint; an open file survives its deletion."""
    folder = site.run_folder / CHECKPOINTS
    for _ in range(_ATTEMPTS):
        complete = sorted(folder.glob("round-*/complete.json"))
        complete = [file for file in complete if file.parent.suffix != ".damaged"]
        if not complete:
            return 0, {}
        newest = complete[-1].parent
        try:
            with _open(newest / "complete.json") as file:
                manifest = json.load(file)
            opened = {}
            for name in (*manifest["parts"], "complete.json"):
                path = newest / PurePosixPath(name).name
                opened[str(path.relative_to(site.folder))] = stack.enter_context(_open(path))
            return int(manifest["rounds"]), opened
        except FileNotFoundError:
            continue  # the node has deleted it meanwhile
        except (ValueError, KeyError, TypeError) as problem:
            raise RunError(f"{newest / 'complete.json'} cannot be read: {problem}.") from None
    raise RunError(f"The checkpoints in {folder} change all the time; stop the node first.")


def _other_files(folder: Path) -> Iterator[str]:
    """The files of a site without its checkpoints; the key before its certificate, which a rotation
    writes in the other order."""
    key = folder / IDENTITY / KEY
    paths = [path for path in sorted(folder.rglob("*")) if path != key]
    for path in (key, *paths):
        name = path.relative_to(folder).as_posix()
        is_checkpoint = name.startswith(f"{RUN}/{CHECKPOINTS}/")
        is_plain = path.is_file() and not path.is_symlink()
        if is_plain and is_backed_up(name) and not is_checkpoint:
            yield name


def _open(path: Path) -> IO[bytes]:
    try:
        return open_regular(path)
    except FileNotFoundError:
        raise
    except OSError as problem:
        raise RunError(f"{path} cannot be read: {problem.strerror}. Nothing was written.") from None


def _add(
    archive: tarfile.TarFile, name: str, source: IO[bytes], size: int | None = None
) -> list[Any]:
    """Add what a file has now; return its size and digest."""
    info = tarfile.TarInfo(name)
    info.size = os.fstat(source.fileno()).st_size if size is None else size
    info.mode = 0o600
    hashed = _HashedFile(source)
    archive.addfile(info, hashed)  # type: ignore[arg-type]
    return [info.size, hashed.digest.hexdigest()]


class _HashedFile:
    """A file that is hashed as it is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def read(self, size: int) -> bytes:
        """Read the next bytes."""
        content = self._file.read(size)
        self.digest.update(content)
        return content


# restoring


def restore_backup(file: Path, folder: Path, *, newest: bool = False) -> Backup:
    """Create a site's folder from its backup; refuse a folder that is not empty.

    The budget of a private site is only restored if this is the `newest` state: the site has not
    run since the backup was made.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder} exists and is not empty; choose another folder for the site.")
    with plain_disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        backup = _extract(file, partial)
        try:
            Site.open(partial)
        except DispflError as problem:
            text = str(problem).replace(str(partial), "The site")
            raise RunError(f"{file} is not a backup of a whole site: {text}") from None
        if backup.is_private and not newest:
            _withhold_budget(partial, backup)
        _leave_all_to_owner(partial, folder.parent)
        with plain_disk_errors(folder):
            partial.rename(folder)  # over an empty folder, and no other
            sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return backup


def _extract(file: Path, folder: Path) -> Backup:
    """Write the files of a backup into a new folder, if they are those that it lists."""
    extracted: dict[str, list[Any]] = {}
    manifest: dict[str, Any] = {}
    try:
        with open_regular(file) as source, tarfile.open(fileobj=source, mode="r:") as archive:
            for entry in archive:
                content = _content(archive, entry)
                if entry.name == MANIFEST:
                    manifest = json.load(content)
                elif not is_backed_up(entry.name) or entry.name in extracted:
                    raise ValueError(f"{entry.name[:80]!r} does not belong into a backup")
                else:
                    extracted[entry.name] = _write_new(folder, entry.name, content)
        if manifest["format"] != _FORMAT or manifest["version"] != _VERSION:
            raise ValueError("it has another format or version")
        if manifest["files"] != extracted:
            raise ValueError("its files are not those that it lists")
        return Backup(
            str(manifest["site"]),
            str(manifest["federation"]),
            str(manifest["time"])[:40],
            int(manifest["rounds"]),
            PRIVACY in extracted,
        )
    except OSError as problem:
        raise RunError(f"{file} cannot be read: {problem.strerror or problem}.") from None
    except (tarfile.TarError, EOFError, ValueError, KeyError, TypeError, RecursionError) as problem:
        raise RunError(
            f"{file} is not a backup of a site, or is damaged ({str(problem)[:200]}). Nothing was"
            " restored; use another backup."
        ) from None


def _content(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> IO[bytes]:
    """The content of a plain file; links, devices and holes are refused."""
    if entry.type != tarfile.REGTYPE or entry.issparse():
        raise ValueError(f"{entry.name[:80]!r} is not a plain file")
    content = archive.extractfile(entry)
    assert content is not None
    return content


def _write_new(folder: Path, name: str, content: IO[bytes]) -> list[Any]:
    """Write a file that does not exist yet; return its size and digest."""
    path = folder / name
    with plain_disk_errors(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "wb") as output:
            hashed = _HashedFile(content)
            while block := hashed.read(_BLOCK_BYTES):
                output.write(block)
            output.flush()
            os.fsync(output.fileno())
            return [output.tell(), hashed.digest.hexdigest()]


def _leave_all_to_owner(folder: Path, parent: Path) -> None:
    """Give a new folder and its files to the owner of the folder around it."""
    for path in (folder, *folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            leave_to_owner(descriptor, parent)
        finally:
            os.close(descriptor)


def _withhold_budget(folder: Path, backup: Backup) -> None:
    """Keep a private site from training on a budget that it may have spent meanwhile."""
    file = folder / PRIVACY
    file.rename(file.with_name("privacy.json.backup"))
    write_atomically(file, json.dumps({"restored_from": backup.time}).encode())
