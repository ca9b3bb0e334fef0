"""Files are written entirely or not at all: against full disks, size limits and interruptions."""

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from dispfl.errors import RunError
from dispfl.files import append_durably, plain_disk_errors, write_atomically


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel refuses to let any file of this process grow past a size, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_written_file_has_the_content_and_no_temporary_file_beside_it(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a.txt", b"one")
    write_atomically(tmp_path / "a.txt", b"two")
    assert (tmp_path / "a.txt").read_bytes() == b"two"
    assert names(tmp_path) == ["a.txt"]


def test_a_reader_that_opened_the_old_file_still_reads_the_old_content(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    write_atomically(file, b"old and long")
    with file.open("rb") as reader:
        write_atomically(file, b"new")
        assert reader.read() == b"old and long"


def test_the_temporary_file_of_a_killed_write_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / ".a.txt.partial").write_bytes(b"part of something much longer")
    write_atomically(tmp_path / "a.txt", b"whole")
    assert (tmp_path / "a.txt").read_bytes() == b"whole"
    assert names(tmp_path) == ["a.txt"]


def test_no_space_for_the_new_content_keeps_the_old_and_leaves_no_temporary_file(
    tmp_path: Path,
) -> None:
    file = tmp_path / "a.txt"
    write_atomically(file, b"old")
    with files_of_at_most(1000), pytest.raises(RunError) as caught:
        write_atomically(file, b"x" * 1001)
    assert (
        str(caught.value)
        == f"The disk is full: {file} could not be written. Everything saved before is intact; free"
        " some space and start again; a run is resumed with --resume."
    )
    assert file.read_bytes() == b"old"
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_ctrl_c_while_writing_keeps_the_old_and_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    file = tmp_path / "a.txt"
    write_atomically(file, b"old")
    monkeypatch.setattr(os, at, interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(file, b"new")
    assert file.read_bytes() == b"old"
    assert names(tmp_path) == ["a.txt"]


def test_appending_adds_to_the_end(tmp_path: Path) -> None:
    append_durably(tmp_path / "log", b"one\n")
    append_durably(tmp_path / "log", b"two\n")
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"


def test_a_truncated_line_does_not_absorb_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"one\ntw")
    append_durably(tmp_path / "log", b"three\n")
    append_durably(tmp_path / "log", b"four\n")
    assert (tmp_path / "log").read_bytes() == b"one\ntw\nthree\nfour\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_appending_to_a_full_disk_is_a_sentence() -> None:
    with pytest.raises(
        RunError,
        match=(
            r"^The disk is full: /dev/full could not be written\. .* start again; a run is resumed"
            r" with --resume\.$"
        ),
    ):
        append_durably(Path("/dev/full"), b"a line\n")


def test_a_missing_folder_is_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "none" / "a.txt"
    for write in (write_atomically, append_durably):
        with pytest.raises(RunError) as caught:
            write(file, b"content")
        assert (
            str(caught.value)
            == f"{file} could not be written: the folder {file.parent} does not exist; create it"
            " first."
        )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_every_kind_of_full_disk_has_the_same_sentence(number: int) -> None:
    with (
        pytest.raises(RunError, match=r"^The disk is full: somewhere"),
        plain_disk_errors(Path("somewhere")),
    ):
        raise OSError(number, os.strerror(number))


def test_an_error_without_a_number_keeps_its_text() -> None:
    with (
        pytest.raises(RunError, match=r"^somewhere could not be written: odd\.$"),
        plain_disk_errors(Path("somewhere")),
    ):
        raise OSError("odd")
