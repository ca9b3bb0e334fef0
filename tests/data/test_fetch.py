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


class Shelf(ThreadingHTTPServer):
    """Serves `files`, by path; those of `cut` break off half way; counts what was asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.cut: set[str] = set()
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Shelf

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
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
def shelf() -> Iterator[Shelf]:
    with Shelf() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def offer(shelf: Shelf, path: str, content: bytes) -> Download:
    shelf.files[path] = content
    return Download(shelf.address + path, hashlib.sha256(content).hexdigest(), len(content))


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


def test_files_land_in_their_folder_and_are_not_fetched_twice(shelf: Shelf, tmp_path: Path) -> None:
    downloads = [offer(shelf, "/a.gz", b"first"), offer(shelf, "/b.gz", b"second")]
    folder = fetch(downloads, "numbers", tmp_path / "cache")
    assert folder == tmp_path / "cache" / "numbers"
    assert {name: (folder / name).read_bytes() for name in entries(folder)} == {"a.gz": b"first", "b.gz": b"second"}
    (folder / "b.gz").write_bytes(b"damaged since")
    fetch(downloads, "numbers", tmp_path / "cache")
    assert shelf.asked == ["/a.gz", "/b.gz", "/b.gz"]
    assert (folder / "b.gz").read_bytes() == b"second"


@pytest.mark.parametrize(("pack", "name"), [(tar, "/set.tar.gz"), (zipped, "/set.zip")])
def test_archive_is_unpacked_and_dropped(shelf: Shelf, tmp_path: Path, pack: Pack, name: str) -> None:
    download = offer(shelf, name, pack({"set/one.bin": b"1", "set/deep/two.bin": b"22", "README": b"beside"}))
    folder = fetch([download], "set", tmp_path)
    assert (folder / "one.bin").read_bytes() == b"1"
    assert (folder / "deep" / "two.bin").read_bytes() == b"22"
    assert entries(tmp_path) == ["set"]


def test_progress_ends_at_the_total(shelf: Shelf, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    fetch([offer(shelf, "/a", bytes(3_000_000))], "x", tmp_path, lambda done, total: calls.append((done, total)))
    assert calls[0] == (1_048_576, 3_000_000)
    assert calls[-1] == (3_000_000, 3_000_000)


def test_wrong_checksum_keeps_nothing(shelf: Shelf, tmp_path: Path) -> None:
    download = offer(shelf, "/set.zip", zipped({"set/a": b"right"}))
    shelf.files["/set.zip"] = zipped({"set/a": b"wrong"})
    with pytest.raises(DataError, match=rf"set.zip does not have the SHA-256 {download.sha256}.*not kept"):
        fetch([download], "set", tmp_path)
    assert entries(tmp_path) == []


def test_download_that_breaks_off_keeps_nothing(shelf: Shelf, tmp_path: Path) -> None:
    download = offer(shelf, "/a.gz", bytes(1000))
    shelf.cut.add("/a.gz")
    with pytest.raises(DataError, match=r"127.0.0.1:\d+ broke off while sending http://127.0.0.1:\d+/a.gz"):
        fetch([download], "x", tmp_path)
    assert entries(tmp_path / "x") == []


def test_interrupted_download_keeps_nothing(shelf: Shelf, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch([offer(shelf, "/a.gz", bytes(1000))], "x", tmp_path, interrupt)
    assert entries(tmp_path / "x") == []


def test_missing_file_names_the_answer(shelf: Shelf, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"refused: 404 .*/gone.zip. Try again later, or .*DISPFL_MIRROR"):
        fetch([Download(f"{shelf.address}/gone.zip", "0" * 64, 1)], "x", tmp_path)


def test_unreachable_host_is_named(tmp_path: Path) -> None:
    with Shelf() as closed:
        address = closed.address
    with pytest.raises(
        DataError, match=rf"Cannot reach {address.removeprefix('http://')} to fetch .*Check the network"
    ):
        fetch([Download(f"{address}/a.zip", "0" * 64, 1)], "x", tmp_path)


def test_full_disk_is_said_while_writing_and_keeps_nothing(shelf: Shelf, tmp_path: Path) -> None:
    def fill_up(done: int, total: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DataError, match=r"The disk of .* is full. Make room, or .*DISPFL_CACHE"):
        fetch([offer(shelf, "/a.gz", bytes(10))], "x", tmp_path, fill_up)
    assert entries(tmp_path / "x") == []


def test_disk_that_will_not_do_is_said_before_anything_is_sent(shelf: Shelf, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"needs about 3,000,000,000,000 MB and only [\d,]+ MB are free"):
        fetch([Download(f"{shelf.address}/a.zip", "0" * 64, 10**18)], "x", tmp_path)
    assert shelf.asked == []


def test_cache_folder_that_is_a_file_gets_a_sentence(tmp_path: Path) -> None:
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
    shelf: Shelf, tmp_path: Path, pack: Pack, file: str, name: str
) -> None:
    download = offer(shelf, file, pack({"set/a": b"fine", name: b"not fine"}))
    cache = tmp_path / "cache"
    with pytest.raises(DataError, match="cannot be unpacked safely"):
        fetch([download], "set", cache)
    assert entries(tmp_path) == ["cache"]
    assert entries(cache) == [file.removeprefix("/")]


def test_tar_with_a_link_that_leads_outside_is_refused(shelf: Shelf, tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        link = tarfile.TarInfo("set/link")
        link.type, link.linkname = tarfile.SYMTYPE, "../../outside"
        archive.addfile(link)
    with pytest.raises(DataError, match="cannot be unpacked safely"):
        fetch([offer(shelf, "/set.tar.gz", packed.getvalue())], "set", tmp_path)
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [(tar({"other/a": b""}), "has no folder set"), (tar({"set/a": bytes(999)})[:60], "cannot be unpacked safely")],
    ids=["another folder", "cut"],
)
def test_archive_that_is_not_what_it_should_be_is_refused(
    shelf: Shelf, tmp_path: Path, content: bytes, reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        fetch([offer(shelf, "/set.tar.gz", content)], "set", tmp_path)
    assert entries(tmp_path) == ["set.tar.gz"]  # it has the right checksum, so it is kept; the folder is not there


def test_folder_that_is_there_but_not_complete_is_left_alone(shelf: Shelf, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "mine").write_text("precious")
    with pytest.raises(DataError, match=r"/set is there already but not complete. Move it away"):
        fetch([offer(shelf, "/set.zip", zipped({"set/a": b""}))], "set", tmp_path)
    assert (tmp_path / "set" / "mine").read_text() == "precious"
    assert shelf.asked == []


@pytest.mark.parametrize("slash", ["", "/"])
def test_mirror_serves_by_file_name_under_the_same_checksum(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slash: str
) -> None:
    offered = offer(shelf, "/mirror/a.gz", b"content")
    official = Download("http://unreachable.invalid/deep/a.gz", offered.sha256, offered.size)
    monkeypatch.setenv("DISPFL_MIRROR", f"{shelf.address}/mirror{slash}")
    assert (fetch([official], "x", tmp_path) / "a.gz").read_bytes() == b"content"


def test_mirror_that_is_no_address_gets_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPFL_MIRROR", "nowhere")
    with pytest.raises(DataError, match=r"Cannot fetch nowhere/a.gz: Invalid URL"):
        fetch([Download("http://127.0.0.1:9/a.gz", "0" * 64, 1)], "x", tmp_path)


def test_cache_folder_is_the_chosen_one_or_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPFL_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("DISPFL_CACHE")
    assert cache_folder().name == "dispfl"


def test_get_downloads_a_data_set_once_and_load_reads_it(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    content = tar({f"cifar-10-batches-bin/{name}": b"\x03" + bytes(3072) for name in names})
    spec = datasets.describe("cifar10")
    shelf.files["/cifar-10-binary.tar.gz"] = content
    small = Download(spec.downloads[0].url, hashlib.sha256(content).hexdigest(), len(content))
    monkeypatch.setitem(datasets.DATASETS, "cifar10", replace(spec, downloads=(small,)))
    monkeypatch.setenv("DISPFL_MIRROR", shelf.address)
    folder = datasets.get("cifar10", tmp_path)
    assert folder == tmp_path / "cifar-10-batches-bin"
    assert datasets.get("cifar10", tmp_path) == folder
    assert shelf.asked == ["/cifar-10-binary.tar.gz"]
    assert datasets.load(datasets.Data(name="cifar10", dir=os.fspath(tmp_path))).train_labels.tolist() == [3] * 5


def test_get_refuses_a_mirror_that_serves_something_else(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.files["/train-images-idx3-ubyte.gz"] = b"not the clothes"
    monkeypatch.setenv("DISPFL_MIRROR", shelf.address)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz does not have the SHA-256 3aede38d"):
        datasets.get("fashion-mnist", tmp_path)
