"""Where an outbox is: a folder, or a bucket at S3, Google or Azure.

Three operations are enough: read an object unless it is unchanged, replace one as a whole, delete
one. Nothing is ever listed, and nobody but its owner writes to an outbox.
"""

import asyncio
import atexit
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dispfl.errors import DispflError
from dispfl.extras import require
from dispfl.files import open_regular, write_atomically
from dispfl.peer.transport.bandwidth import MODEL, Bandwidth
from dispfl.peer.transport.http import ByteCounter, Limits, os_error_text

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ClientConfig

T = TypeVar("T")
_RETRIES = 2
_RETRY_TIME = timedelta(seconds=10)
_REQUEST_TIME = timedelta(days=1)
"""The longest that one request to a bucket may take."""
_EXIT_SECONDS = 0.5
"""For obstore's threads, when the process ends."""


class StorageError(DispflError):
    """The storage has refused an access, or does not answer."""

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.advice = advice
        """What the operator can do about it."""


class MissingError(StorageError):
    """The storage has no such object, or not yet."""


@dataclass(frozen=True)
class StoredObject:
    """An object as it was read."""

    content: bytes
    tag: str
    """What changes when the object is replaced."""


class Storage(Protocol):
    """The objects of one outbox."""

    async def read(self, name: str, limit: int, unless: str | None = None) -> StoredObject | None:
        """Return an object of at most `limit` bytes; None if its tag is still `unless`."""
        ...

    async def write(self, name: str, content: bytes) -> None:
        """Create or replace an object; readers find the whole one or the one before."""
        ...

    async def delete(self, name: str) -> None:
        """Delete an object, if it is there."""
        ...


@dataclass
class StorageAccess:
    """How a site accesses all outboxes, its own and those of others."""

    limits: Limits
    bandwidth: Bandwidth = field(default_factory=Bandwidth)
    """Shared with all other transfers of the site."""
    counter: ByteCounter = field(default_factory=ByteCounter)
    ca_bundle: str | None = None
    """A file of authorities that a bucket's certificate may have, besides those of the system."""


def open_storage(place: str, access: StorageAccess) -> Storage:
    """Open an outbox by its address, which `parse_outbox` has checked."""
    if place.startswith("/"):
        return FolderStorage(Path(place), access)
    return BucketStorage(place, access)


def _too_long(name: str, limit: int) -> StorageError:
    return StorageError(f"the object {name} has more than {limit} bytes")


class FolderStorage:
    """An outbox in a folder, which may be a network mount: every access is on a thread of its own.

    A mount that hangs blocks that thread and nothing else.
    """

    def __init__(self, folder: Path, access: StorageAccess) -> None:
        self._folder = folder
        self._counter = access.counter
        self._bandwidth = access.bandwidth
        self._patience = access.limits.stall_timeout
        self._lock = asyncio.Lock()
        self._last_access: asyncio.Future[Any] | None = None
        self._progress = 0

    async def read(self, name: str, limit: int, unless: str | None = None) -> StoredObject | None:
        """Return an object, unless it is unchanged."""
        throttle = self._bandwidth.receiving(MODEL)
        clock = asyncio.get_running_loop().time

        def read() -> StoredObject | None:
            with open_regular(self._folder / name) as file:
                status = os.fstat(file.fileno())
                tag = f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"
                if tag == unless:
                    return None
                content = bytearray()
                while chunk := file.read(throttle.limit.turn):
                    content += chunk
                    time.sleep(throttle.limit.reserve(len(chunk), clock()))
                    self._progress += 1
                    if len(content) > limit:
                        raise _too_long(name, limit)
            return StoredObject(bytes(content), tag)

        stored = await self._on_thread(read)
        if stored is not None:
            self._counter.received += len(stored.content)
        return stored

    async def write(self, name: str, content: bytes) -> None:
        """Write a temporary file and rename it."""
        throttle = self._bandwidth.sending(MODEL)
        clock = asyncio.get_running_loop().time

        def chunks() -> Iterator[memoryview]:
            for chunk in _chunks(content, throttle.limit.turn):
                time.sleep(throttle.limit.reserve(len(chunk), clock()))
                self._progress += 1
                yield chunk

        def write() -> None:
            # Not created: a folder on a share that is not mounted would be one on this disk.
            if not self._folder.is_dir():
                raise StorageError(
                    f"there is no folder {self._folder}", "Mount the share, or create the folder."
                )
            write_atomically(self._folder / name, chunks())

        await self._on_thread(write)
        self._counter.sent += len(content)

    async def delete(self, name: str) -> None:
        """Delete a file."""
        await self._on_thread(lambda: (self._folder / name).unlink(missing_ok=True))

    async def _on_thread(self, work: Callable[[], T]) -> T:
        """Run one access, after the one before; give up when it makes no progress."""
        async with self._lock:
            if self._last_access is not None:  # of a request that was cancelled meanwhile
                await self._wait_for(self._last_access)
            access = _start_thread(work)
            self._last_access = access
            await self._wait_for(access)
        try:
            return access.result()
        except FileNotFoundError:
            raise MissingError(f"{self._folder} has no such file") from None
        except OSError as problem:
            text = f"{self._folder}: {os_error_text(problem)}"
            raise StorageError(text, "Check the folder's permissions and the mount.") from None
        except StorageError:
            raise
        except DispflError as problem:  # a full disk, say
            raise StorageError(str(problem).rstrip(".")) from None

    async def _wait_for(self, access: "asyncio.Future[Any]") -> None:
        while not access.done():
            progress = self._progress
            await asyncio.wait([access], timeout=self._patience)
            if not access.done() and self._progress == progress:
                raise StorageError(
                    f"{self._folder} does not answer", "Check the mount: it may have to be renewed."
                )


def _chunks(content: bytes, size: int) -> Iterator[memoryview]:
    view = memoryview(content)
    for start in range(0, len(view), size):
        yield view[start : start + size]


def _start_thread(work: Callable[[], T]) -> "asyncio.Future[T]":
    """Run work on a daemon thread, which may hang without keeping the process from ending."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def finish(value: T | None, problem: BaseException | None) -> None:
        if problem is not None:
            result.set_exception(problem)
            result.exception()  # retrieved, also if nobody waits any more
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value: T | None = None
        problem: BaseException | None = None
        try:
            value = work()
        except BaseException as error:
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, value, problem)

    threading.Thread(target=run, name="outbox", daemon=True).start()
    return result


class BucketStorage:
    """An outbox in a bucket. Credentials come from the environment, as obstore reads them."""

    def __init__(self, place: str, access: StorageAccess) -> None:
        require("outbox", f"An outbox at {place}", "obstore")
        import obstore
        from obstore.store import from_url

        # A request that was just cancelled is still ended by a thread of obstore. If that needs the
        # interpreter while it shuts down, the process is aborted. Registered once.
        atexit.unregister(_wait_for_threads)
        atexit.register(_wait_for_threads)
        limits = access.limits
        self._place = place
        self._counter = access.counter
        self._bandwidth = access.bandwidth
        self._patience = limits.stall_timeout
        self._min_rate = max(1.0, limits.min_rate)
        self._obstore = obstore
        client_options: ClientConfig = {
            "connect_timeout": timedelta(seconds=limits.connect_timeout),
            "read_timeout": timedelta(seconds=limits.stall_timeout),
            "timeout": _REQUEST_TIME,
            "allow_http": True,  # only of an endpoint that the operator has set
        }
        if access.ca_bundle is not None:
            client_options["root_certificate"] = _read_authorities(access.ca_bundle)
        with self._plain_errors():
            self._store = from_url(
                place,
                client_options=client_options,
                retry_config={"max_retries": _RETRIES, "retry_timeout": _RETRY_TIME},
            )

    async def read(self, name: str, limit: int, unless: str | None = None) -> StoredObject | None:
        """Send a conditional request."""
        from obstore.exceptions import NotModifiedError

        options: GetOptions = {"if_none_match": unless} if unless else {}
        with self._plain_errors():
            try:
                async with asyncio.timeout(self._patience):
                    result = await self._obstore.get_async(self._store, name, options=options)
            except NotModifiedError:
                return None
            if result.meta["size"] > limit:
                raise _too_long(name, limit)
            content = bytearray()
            throttle = self._bandwidth.receiving(MODEL)
            chunks = aiter(result.stream(throttle.limit.turn))
            while True:
                async with asyncio.timeout(self._patience):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    break
                content += memoryview(chunk)
                self._counter.received += len(chunk)
                await throttle.take(len(chunk))
                if len(content) > limit:
                    raise _too_long(name, limit)
            return StoredObject(bytes(content), result.meta["e_tag"] or "")

    async def write(self, name: str, content: bytes) -> None:
        """Upload an object, a large one in parts."""
        loop = asyncio.get_running_loop()
        throttle = self._bandwidth.sending(MODEL)

        async def chunks() -> AsyncIterator[bytes]:
            for chunk in _chunks(content, throttle.limit.turn):
                asked_at = loop.time()
                await throttle.take(len(chunk))
                end = timeout.when()
                assert end is not None
                timeout.reschedule(end + loop.time() - asked_at)  # a turn may take long
                yield bytes(chunk)

        with self._plain_errors():
            async with asyncio.timeout(self._patience + len(content) / self._min_rate) as timeout:
                upload = content if throttle.limit.rate is None else chunks()
                await self._obstore.put_async(self._store, name, upload)
        self._counter.sent += len(content)

    async def delete(self, name: str) -> None:
        """Delete an object."""
        with self._plain_errors(), contextlib.suppress(FileNotFoundError):
            async with asyncio.timeout(self._patience):
                await self._obstore.delete_async(self._store, name)

    @contextlib.contextmanager
    def _plain_errors(self) -> Iterator[None]:
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

        try:
            yield
        except FileNotFoundError:
            raise MissingError(f"{self._place} has no such object") from None
        except TimeoutError:
            raise StorageError(f"{self._place} does not answer in time") from None
        except (PermissionDeniedError, UnauthenticatedError) as problem:
            raise StorageError(
                f"{self._place}: access is denied ({_first_line(problem)})",
                "Check the credentials in the environment, and the bucket's policy.",
            ) from None
        except (BaseError, OSError, ValueError) as problem:
            advice = (
                "Check its name, the environment (region, endpoint) and the network; if a proxy"
                " inspects TLS, set ca_bundle in site.toml to the certificate of its authority."
            )
            raise StorageError(f"{self._place}: {_first_line(problem)}", advice) from None


def _read_authorities(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as problem:
        raise StorageError(
            f"ca_bundle of site.toml, {file}, cannot be read: {os_error_text(problem)}",
            "It must be a PEM file of certificates.",
        ) from None


def _wait_for_threads() -> None:
    time.sleep(_EXIT_SECONDS)


def _first_line(problem: Exception) -> str:
    lines = str(problem).strip().splitlines()
    return lines[0][:300] if lines else type(problem).__name__
