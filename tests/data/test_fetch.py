"""Downloads from a real web server on this machine, whole, damaged, cut off and refused."""

import errno
import hashlib
import io
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from dispfl.data import datasets
from dispfl.data.fetch import Download, cache_folder, fetch
from dispfl.errors import DataError


class FileServer(ThreadingHTTPServer):
    """Serves `files` by path, those in `cut` only by half; records the requested paths."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.cut: set[str] = set()
        self.requested: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        self.server.requested.append(self.path)
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if self.path in self.server.cut else content)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def file_server() -> Iterator[FileServer]:
    with FileServer() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def offer(file_server: FileServer, path: str, content: bytes) -> Download:
    file_server.files[path] = content
    return Download(file_server.address + path, hashlib.sha256(content).hexdigest(), len(content))


Pack = Callable[[dict[str, bytes]], bytes]


def tar(members: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def zipped(members: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return packed.getvalue()


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_files_are_downloaded_into_their_folder_once(
    file_server: FileServer, tmp_path: Path
) -> None:
    downloads = [offer(file_server, "/a.gz", b"first"), offer(file_server, "/b.gz", b"second")]
    folder = fetch(downloads, "numbers", tmp_path / "cache")
    assert folder == tmp_path / "cache" / "numbers"
    assert {name: (folder / name).read_bytes() for name in entries(folder)} == {
        "a.gz": b"first",
        "b.gz": b"second",
    }
    (folder / "b.gz").write_bytes(b"damaged since")
    fetch(downloads, "numbers", tmp_path / "cache")
    assert file_server.requested == ["/a.gz", "/b.gz", "/b.gz"]
    assert (folder / "b.gz").read_bytes() == b"second"


@pytest.mark.parametrize(("pack", "name"), [(tar, "/set.tar.gz"), (zipped, "/set.zip")])
def test_archive_is_unpacked_and_deleted(
    file_server: FileServer, tmp_path: Path, pack: Pack, name: str
) -> None:
    download = offer(
        file_server,
        name,
        pack({"set/one.bin": b"1", "set/deep/two.bin": b"22", "README": b"beside"}),
    )
    folder = fetch([download], "set", tmp_path)
    assert (folder / "one.bin").read_bytes() == b"1"
    assert (folder / "deep" / "two.bin").read_bytes() == b"22"
    assert entries(tmp_path) == ["set"]


def test_progress_ends_at_the_total(file_server: FileServer, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    fetch(
        [offer(file_server, "/a", bytes(3_000_000))],
        "x",
        tmp_path,
        lambda done, total: calls.append((done, total)),
    )
    assert calls[0] == (1_048_576, 3_000_000)
    assert calls[-1] == (3_000_000, 3_000_000)


def test_wrong_checksum_keeps_nothing(file_server: FileServer, tmp_path: Path) -> None:
    download = offer(file_server, "/set.zip", zipped({"set/a": b"right"}))
    file_server.files["/set.zip"] = zipped({"set/a": b"wrong"})
    with pytest.raises(
        DataError, match=rf"set.zip does not have the SHA-256 {download.sha256}.*discarded"
    ):
        fetch([download], "set", tmp_path)
    assert entries(tmp_path) == []


def test_download_that_breaks_off_keeps_nothing(file_server: FileServer, tmp_path: Path) -> None:
    download = offer(file_server, "/a.gz", bytes(1000))
    file_server.cut.add("/a.gz")
    with pytest.raises(
        DataError,
        match=r"127.0.0.1:\d+ closed the connection while sending http://127.0.0.1:\d+/a.gz",
    ):
        fetch([download], "x", tmp_path)
    assert entries(tmp_path / "x") == []


def test_interrupted_download_keeps_nothing(file_server: FileServer, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch([offer(file_server, "/a.gz", bytes(1000))], "x", tmp_path, interrupt)
    assert entries(tmp_path / "x") == []


def test_missing_file_names_the_http_error(file_server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"refused the download: 404 .*/gone.zip. Try again later, or .*DISPFL_MIRROR",
    ):
        fetch([Download(f"{file_server.address}/gone.zip", "0" * 64, 1)], "x", tmp_path)


def test_unreachable_host_is_named(tmp_path: Path) -> None:
    with FileServer() as closed:
        address = closed.address
    with pytest.raises(
        DataError,
        match=rf"Cannot reach {address.removeprefix('http://')} to download .*Check the network",
    ):
        fetch([Download(f"{address}/a.zip", "0" * 64, 1)], "x", tmp_path)


def test_full_disk_is_reported_and_keeps_nothing(file_server: FileServer, tmp_path: Path) -> None:
    def fill_up(done: int, total: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(
        DataError, match=r"The disk of .* is full. Free some space, or .*DISPFL_CACHE"
    ):
        fetch([offer(file_server, "/a.gz", bytes(10))], "x", tmp_path, fill_up)
    assert entries(tmp_path / "x") == []


def test_too_small_disk_is_reported_before_the_download(
    file_server: FileServer, tmp_path: Path
) -> None:
    with pytest.raises(
        DataError, match=r"needs about 3,000,000,000,000 MB and only [\d,]+ MB are free"
    ):
        fetch([Download(f"{file_server.address}/a.zip", "0" * 64, 10**18)], "x", tmp_path)
    assert file_server.requested == []


def test_cache_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(DataError, match=r"Cannot write to .*/cache: .*DISPFL_CACHE"):
        fetch([Download("http://127.0.0.1:9/a.gz", "0" * 64, 1)], "x", tmp_path / "cache")


@pytest.mark.parametrize(
    ("pack", "file", "name"),
    [
        (tar, "/set.tar.gz", "../outside"),
        (tar, "/set.tar.gz", "set/../../outside"),
        (zipped, "/set.zip", "../outside"),
        (zipped, "/set.zip", "set/../../outside"),
        (zipped, "/set.zip", "/outside"),
    ],
)
def test_archive_cannot_write_outside_its_folder(
    file_server: FileServer, tmp_path: Path, pack: Pack, file: str, name: str
) -> None:
    download = offer(file_server, file, pack({"set/a": b"fine", name: b"not fine"}))
    cache = tmp_path / "cache"
    with pytest.raises(DataError, match="cannot be unpacked safely"):
        fetch([download], "set", cache)
    assert entries(tmp_path) == ["cache"]
    assert entries(cache) == [file.removeprefix("/")]


def test_tar_with_a_link_to_the_outside_is_refused(file_server: FileServer, tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        link = tarfile.TarInfo("set/link")
        link.type, link.linkname = tarfile.SYMTYPE, "../../outside"
        archive.addfile(link)
    with pytest.raises(DataError, match="cannot be unpacked safely"):
        fetch([offer(file_server, "/set.tar.gz", packed.getvalue())], "set", tmp_path)
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (tar({"other/a": b""}), "has no folder set"),
        (tar({"set/a": bytes(999)})[:60], "cannot be unpacked safely"),
    ],
    ids=["another folder", "cut"],
)
def test_archive_with_other_content_is_refused(
    file_server: FileServer, tmp_path: Path, content: bytes, reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        fetch([offer(file_server, "/set.tar.gz", content)], "set", tmp_path)
    assert entries(tmp_path) == [
        "set.tar.gz"
    ]  # it has the right checksum, so it is kept; the folder is not there


def test_incomplete_folder_is_not_changed(file_server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "mine").write_text("precious")
    with pytest.raises(DataError, match=r"/set exists but is not complete. Move or delete it"):
        fetch([offer(file_server, "/set.zip", zipped({"set/a": b""}))], "set", tmp_path)
    assert (tmp_path / "set" / "mine").read_text() == "precious"
    assert file_server.requested == []


@pytest.mark.parametrize("slash", ["", "/"])
def test_mirror_serves_by_file_name_under_the_same_checksum(
    file_server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slash: str
) -> None:
    offered = offer(file_server, "/mirror/a.gz", b"content")
    official = Download("http://unreachable.invalid/deep/a.gz", offered.sha256, offered.size)
    monkeypatch.setenv("DISPFL_MIRROR", f"{file_server.address}/mirror{slash}")
    assert (fetch([official], "x", tmp_path) / "a.gz").read_bytes() == b"content"


def test_invalid_mirror_url_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPFL_MIRROR", "nowhere")
    with pytest.raises(DataError, match=r"Cannot download nowhere/a.gz: Invalid URL"):
        fetch([Download("http://127.0.0.1:9/a.gz", "0" * 64, 1)], "x", tmp_path)


def test_cache_folder_is_the_configured_one_or_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISPFL_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("DISPFL_CACHE")
    assert cache_folder().name == "dispfl"


def test_get_downloads_a_data_set_once_and_load_reads_it(
    file_server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    content = tar({f"cifar-10-batches-bin/{name}": b"\x03" + bytes(3072) for name in names})
    spec = datasets.describe("cifar10")
    file_server.files["/cifar-10-binary.tar.gz"] = content
    small = Download(spec.downloads[0].url, hashlib.sha256(content).hexdigest(), len(content))
    monkeypatch.setitem(datasets.DATASETS, "cifar10", replace(spec, downloads=(small,)))
    monkeypatch.setenv("DISPFL_MIRROR", file_server.address)
    folder = datasets.download("cifar10", tmp_path)
    assert folder == tmp_path / "cifar-10-batches-bin"
    assert datasets.download("cifar10", tmp_path) == folder
    assert file_server.requested == ["/cifar-10-binary.tar.gz"]
    assert (
        datasets.load_dataset(
            datasets.Data(name="cifar10", dir=os.fspath(tmp_path))
        ).train_labels.tolist()
        == [3] * 5
    )


def test_get_refuses_a_mirror_that_serves_something_else(
    file_server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_server.files["/train-images-idx3-ubyte.gz"] = b"not the clothes"
    monkeypatch.setenv("DISPFL_MIRROR", file_server.address)
    with pytest.raises(
        DataError, match=r"train-images-idx3-ubyte.gz does not have the SHA-256 3aede38d"
    ):
        datasets.download("fashion-mnist", tmp_path)
