"""Downloads: verified by checksum, unpacked safely, never left incomplete.

A file is moved into place after its SHA-256 is checked, and an archive's folder after all of it is
unpacked; an interrupted download leaves nothing that looks complete.
"""

import errno
import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from dispfl.errors import DataError

ProgressCallback = Callable[[int, int], None]
"""Called with the amount done and the total, in bytes or images."""

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Download:
    """One file to download; a .tar.gz or .zip is unpacked."""

    url: str
    sha256: str
    size: int

    @property
    def file_name(self) -> str:
        return self.url.rsplit("/", 1)[-1]

    @property
    def is_archive(self) -> bool:
        return self.file_name.endswith((".tar.gz", ".zip"))

    @property
    def address(self) -> str:
        """The URL to download from: the official one, or that of the file at `DISPFL_MIRROR`."""
        mirror = os.environ.get("DISPFL_MIRROR")
        if not mirror:
            return self.url
        return f"{mirror.rstrip('/')}/{self.file_name}"


def cache_folder() -> Path:
    """The folder of downloads and decoded images: `DISPFL_CACHE`, or the user's cache folder."""
    user_folder = os.environ.get("DISPFL_CACHE")
    if user_folder:
        return Path(user_folder).expanduser()
    import pooch

    return Path(pooch.os_cache("dispfl"))


def fetch(
    downloads: Sequence[Download], folder: str, into: Path, progress: ProgressCallback | None = None
) -> Path:
    """Download a data set's files into `into/folder` and return that folder.

    Files with the right checksum are not downloaded again. The checksums apply to mirrors too.
    """
    target = into / folder
    if target.exists() and any(download.is_archive for download in downloads):
        raise DataError(
            f"{target} exists but is not complete. Move or delete it, then download the data set"
            " again."
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _check_room(downloads, into)
        for download in downloads:
            if download.is_archive:
                _unpack(_retrieve(download, into, progress), into, target)
            else:
                _retrieve(download, target, progress)
    except OSError as problem:
        _refuse(problem, into)
    return target


def _retrieve(download: Download, into: Path, progress: ProgressCallback | None) -> Path:
    """Download one file with pooch, which checks a temporary copy before it moves it into place."""
    import pooch
    import requests

    pooch.get_logger().setLevel("WARNING")
    # identity: the checksum is of the compressed file, which must not be decompressed in transit.
    downloader = pooch.HTTPDownloader(
        progressbar=_Meter(progress, download.size) if progress else False,
        chunk_size=_CHUNK,
        headers={"Accept-Encoding": "identity"},
    )
    url = download.address
    host = urlsplit(url).netloc
    checksum = f"sha256:{download.sha256}"
    hint = "Try again later, or set DISPFL_MIRROR to another server."
    try:
        file = pooch.retrieve(url, checksum, download.file_name, into, downloader=downloader)
        return Path(file)
    except requests.HTTPError as problem:
        raise DataError(f"{host} refused the download: {problem}. {hint}") from None
    except (requests.ConnectionError, requests.Timeout):
        raise DataError(
            f"Cannot reach {host} to download {url}. Check the network. {hint}"
        ) from None
    except requests.exceptions.ChunkedEncodingError:
        raise DataError(f"{host} closed the connection while sending {url}. {hint}") from None
    except requests.RequestException as problem:
        raise DataError(f"Cannot download {url}: {problem}. {hint}") from None
    except ValueError:  # what pooch raises for a wrong checksum
        raise DataError(
            f"{url} does not have the SHA-256 {download.sha256}, so it is damaged or was changed;"
            f" it was discarded. {hint}"
        ) from None


class _Meter:
    """The progress bar that pooch expects, which calls a `ProgressCallback`."""

    def __init__(self, progress: ProgressCallback, size: int) -> None:
        self.progress = progress
        self.total = size
        self.done = 0

    def update(self, count: int) -> None:
        self.done = min(self.done + count, self.total)
        self.progress(self.done, self.total)

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        pass


def _unpack(archive: Path, into: Path, target: Path) -> None:
    """Unpack next to the target, move the finished folder into place, and delete the archive."""
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=into) as scratch:
        try:
            if archive.suffix == ".zip":
                _unzip(archive, Path(scratch))
            else:
                with tarfile.open(archive) as packed:
                    packed.extractall(scratch, filter="data")
        except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error) as problem:
            raise DataError(
                f"{archive} cannot be unpacked safely: {problem}. Delete it and download it again."
            ) from None
        unpacked = Path(scratch) / target.name
        if not unpacked.is_dir():
            raise DataError(
                f"{archive} has no folder {target.name}. Delete it and download it again."
            )
        unpacked.rename(target)
    archive.unlink()


def _unzip(archive: Path, into: Path) -> None:
    with zipfile.ZipFile(archive) as packed:
        for name in packed.namelist():
            if not (into / name).resolve().is_relative_to(into.resolve()):
                raise zipfile.BadZipFile(f"{name!r} would be written outside its folder")
        packed.extractall(into)


def _check_room(downloads: Sequence[Download], into: Path) -> None:
    needed = 0
    for download in downloads:
        # An archive and its content are on the disk together; unpacked images take up to twice
        # the space.
        needed += download.size * (3 if download.is_archive else 1)
    free = shutil.disk_usage(into).free
    if free < needed:
        room = f"needs about {needed / 1e6:,.0f} MB and only {free / 1e6:,.0f} MB are free"
        raise DataError(
            f"The download into {into} {room}. Free some space, or set DISPFL_CACHE to another"
            " folder."
        )


def _refuse(problem: OSError, into: Path) -> NoReturn:
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        raise DataError(
            f"The disk of {into} is full. Free some space, or set DISPFL_CACHE to another folder."
        ) from None
    reason = problem.strerror or str(problem)
    raise DataError(
        f"Cannot write to {into}: {reason}. Set DISPFL_CACHE to another folder."
    ) from None
