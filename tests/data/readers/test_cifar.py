"""CIFAR in both versions, on files of a few images; and what a pickle must not do."""

import os
import pickle
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from messages import refused

from dispfl.data.readers.cifar import read_cifar
from dispfl.errors import DataError

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def image(label: int) -> Pixels:
    """Red is the label, green 100, blue 200; the first green pixel is 7, so a mixed-up order
    shows."""
    pixels = np.repeat(np.array([label, 100, 200], dtype=np.uint8), 1024)
    pixels[1024] = 7
    return pixels


def images(labels: Sequence[int]) -> Pixels:
    return np.stack([image(label) for label in labels])


def binary(labels: Sequence[int], *, coarse: bool = False) -> bytes:
    return b"".join(
        (b"\x05" if coarse else b"") + bytes([label]) + image(label).tobytes() for label in labels
    )


def python2_protocol_2(
    labels: Sequence[int], key: bytes = b"labels", *, fortran: bool = False
) -> bytes:
    """What Python 2's cPickle wrote, opcode by opcode, as in the official files."""
    raw = images(labels).tobytes(order="F" if fortran else "C")
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNN"
    dtype += b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"K" + bytes([len(labels)]) + b"M\x00\x0c\x86"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01"
        + shape
        + dtype
    )
    array += (b"\x88" if fortran else b"\x89") + b"T" + struct.pack("<i", len(raw)) + raw + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U" + bytes([len(key)]) + key + numbers + b"u."


def python2_protocol_0(labels: Sequence[int]) -> bytes:
    """The same as text, as Python 2's pickle wrote it by default."""
    raw = repr(images(labels).tobytes())[1:].encode()
    dtype = b"cnumpy\ndtype\n(S'u1'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI0\ntb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR(I1\n"
    array += b"(I%d\nI3072\nt" % len(labels) + dtype + b"I00\nS" + raw + b"\ntb"
    numbers = b"(l" + b"".join(b"I%d\na" % label for label in labels)
    return b"(dS'data'\n" + array + b"sS'labels'\n" + numbers + b"s."


def python3(labels: Sequence[int], protocol: int = 2) -> bytes:
    return pickle.dumps({"data": images(labels), "labels": list(labels)}, protocol=protocol)


def write_cifar10(folder: Path, encode: Callable[[Sequence[int]], bytes], suffix: str = "") -> None:
    """Ten training images, two to a batch, labels 0 to 9; two test images, labels 4 and 2."""
    for number in range(1, 6):
        (folder / f"data_batch_{number}{suffix}").write_bytes(
            encode([2 * number - 2, 2 * number - 1])
        )
    (folder / f"test_batch{suffix}").write_bytes(encode([4, 2]))


@pytest.mark.parametrize(
    ("encode", "suffix"),
    [
        (binary, ".bin"),
        (python2_protocol_2, ""),
        (lambda labels: python2_protocol_2(labels, fortran=True), ""),
        (python2_protocol_0, ""),
        (python3, ""),
        (lambda labels: python3(labels, protocol=4), ""),
    ],
    ids=[
        "binary",
        "python 2",
        "python 2, fortran order",
        "python 2, protocol 0",
        "python 3",
        "python 3, protocol 4",
    ],
)
def test_cifar10_reads_the_same_from_every_version(
    tmp_path: Path, encode: Any, suffix: str
) -> None:
    write_cifar10(tmp_path, encode, suffix)
    reading = read_cifar(tmp_path, classes=10)
    assert reading.train.labels.tolist() == list(range(10))
    assert reading.test.labels.tolist() == [4, 2]
    assert reading.train.inputs.shape == (10, 3, 32, 32)
    assert reading.train.inputs.is_contiguous()
    assert reading.train.inputs[:, 0, 31, 31].tolist() == list(range(10))
    assert reading.test.inputs[1, :, 0, 1].tolist() == [2, 100, 200]
    assert reading.test.inputs[1, 1, 0, 0].item() == 7


def test_cifar100_binary_takes_the_fine_label_and_the_names_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(binary([99, 0, 17], coarse=True))
    (tmp_path / "test.bin").write_bytes(binary([42], coarse=True))
    (tmp_path / "fine_label_names.txt").write_text(
        "\n".join(f"name{number}" for number in range(100)) + "\n\n"
    )
    reading = read_cifar(tmp_path, classes=100)
    assert reading.train.labels.tolist() == [99, 0, 17]
    assert reading.test.inputs[0, 0, 3, 3].item() == 42
    assert reading.classes[17] == "name17"


def test_cifar100_python_takes_the_fine_label_and_the_names_of_meta(tmp_path: Path) -> None:
    (tmp_path / "train").write_bytes(python2_protocol_2([99, 5], key=b"fine_labels"))
    (tmp_path / "test").write_bytes(python2_protocol_2([1], key=b"fine_labels"))
    names = b"".join(b"U\x06name%02d" % number for number in range(100))
    (tmp_path / "meta").write_bytes(b"\x80\x02}U\x10fine_label_names](" + names + b"es.")
    reading = read_cifar(tmp_path, classes=100)
    assert reading.train.labels.tolist() == [99, 5]
    assert reading.classes[99] == "name99"


def test_cifar100_without_names_numbers_its_classes(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(binary([3], coarse=True))
    (tmp_path / "test.bin").write_bytes(binary([3], coarse=True))
    assert read_cifar(tmp_path, classes=100).classes[99] == "99"


def test_binary_batch_cut_within_an_image_is_refused_as_truncated(tmp_path: Path) -> None:
    write_cifar10(tmp_path, binary, ".bin")
    (tmp_path / "data_batch_3.bin").write_bytes(binary([1, 2])[:-100])
    with refused(DataError):
        read_cifar(tmp_path, classes=10)


def test_binary_batch_cut_between_two_images_is_refused_as_truncated(tmp_path: Path) -> None:
    write_cifar10(tmp_path, binary, ".bin")
    (tmp_path / "data_batch_3.bin").write_bytes(binary([1]))
    with refused(DataError):
        read_cifar(tmp_path, classes=10)


def test_empty_batch_is_refused(tmp_path: Path) -> None:
    write_cifar10(tmp_path, binary, ".bin")
    (tmp_path / "test_batch.bin").write_bytes(b"")
    with refused(DataError):
        read_cifar(tmp_path, classes=10)


def test_label_10_of_cifar10_is_refused(tmp_path: Path) -> None:
    write_cifar10(tmp_path, binary, ".bin")
    (tmp_path / "data_batch_2.bin").write_bytes(binary([3, 10]))
    with refused(DataError):
        read_cifar(tmp_path, classes=10)


class Calls:
    """Pickles as the call of `what` with `arguments`."""

    def __init__(self, what: Any, *arguments: Any) -> None:
        self.call = (what, arguments)

    def __reduce__(self) -> Any:
        return self.call


def refusal(folder: Path, content: bytes) -> str:
    write_cifar10(folder, python3)
    (folder / "data_batch_1").write_bytes(content)
    with pytest.raises(DataError) as refused:
        read_cifar(folder, classes=10)
    assert str(folder / "data_batch_1") in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("protocol", range(6))
def test_pickle_that_runs_a_command_is_refused_and_does_not_run_it(
    tmp_path: Path, protocol: int
) -> None:
    trace = tmp_path / "trace"
    sentence = refusal(
        tmp_path, pickle.dumps(Calls(os.system, f"touch {trace}"), protocol=protocol)
    )
    assert f"refers to {os.system.__module__}.system" in sentence
    assert not trace.exists()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"c__builtin__\neval\n(S'1'\ntR.", "__builtin__.eval"),
        (b"cbuiltins\neval\n(S'1'\ntR.", "builtins.eval"),
        (b"(S'1'\nios\nsystem\n.", "os.system"),
        (b"(cos\nsystem\nS'1'\no.", "os.system"),
        (b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93.", "builtins.getattr"),
        (b"cnumpy\nfromfile\n.", "numpy.fromfile"),
        (b"cnumpy\nndarray.tofile\n.", "numpy.ndarray.tofile"),
        (b"cnumpy.core.multiarray\nscalar\n.", "numpy.core.multiarray.scalar"),
        (b"c_codecs\ndecode\n.", "_codecs.decode"),
        (b"ccopyreg\n_reconstructor\n.", "copyreg._reconstructor"),
    ],
)
def test_pickle_that_names_anything_but_an_array_is_refused(
    tmp_path: Path, content: bytes, named: str
) -> None:
    assert f"refers to {named}, which no data file needs" in refusal(tmp_path, content)


DTYPE = b"cnumpy\ndtype\n"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            pickle.dumps({"data": np.array([{}, []], dtype=object)}, protocol=2),
            "type 'O8', which is not plain numbers",
        ),
        (
            pickle.dumps({"data": np.zeros(2, dtype=[("x", "u1")])}, protocol=2),
            "type 'V1', which is not plain numbers",
        ),
        (DTYPE + b"(S'u1'\nI0\nI1\ntR(I3\nS'|'\nN(S'x'\nt(dI-1\nI-1\nI0\ntb.", "fields or objects"),
        (DTYPE + b"(S'u1'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI63\ntb.", "fields or objects"),
        (DTYPE + b"(S'u1'\nI0\nI1\ntR(I3\nS'O'\nNNNI-1\nI-1\nI0\ntb.", "byte order"),
        (DTYPE + b"(dS'dtype'\nI1\nsb.", "is truncated or not a CIFAR file"),
        (b"c_codecs\nencode\n(V1\nS'rot13'\ntR.", "instead of latin1"),
        (b"c_codecs\nencode\n(I1\nS'latin1'\ntR.", "instead of latin1"),
        (b"cnumpy\nndarray\n(I99\ncnumpy\ndtype\nS'b'\ntR.", "an array of another class"),
        (
            b"cnumpy\nndarray\n(cnumpy\nndarray\n(I0\ntS'b'\ntR(I1\n(I-1\nttb.",
            "state is not numbers",
        ),
        (b"Pos.system\n.", "persistent"),
        (b"(dI1\nI2\ns(lI3\na.", "a list instead of a dict"),
        (b"(dS'data'\nI2\ns.", "lacks data or labels"),
        (
            b"(dS'labels'\n(lsS'data'\ncnumpy\nndarray\n(cnumpy\nndarray\n(I0\ntS'b'\ntRs.",
            "lacks data or labels",
        ),
        (python3([1, 2])[:-40], "is truncated or not a CIFAR file"),
        (b"", "is truncated or not a CIFAR file"),
    ],
)
def test_pickle_with_a_trick_is_refused_with_the_reason(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    assert reason in refusal(tmp_path, content)


def test_pickle_of_nine_bytes_cannot_claim_all_memory(tmp_path: Path) -> None:
    # "Remember this as number 2^24": pickle's C version allocates 2^25 numbers, 268 MB.
    tracemalloc.start()
    try:
        assert "lacks data or labels" in refusal(tmp_path, b"\x80\x02}r\x00\x00\x00\x01.")
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_pickle_cannot_change_how_later_files_are_read(tmp_path: Path) -> None:
    # BUILD with (None, {...}) sets attributes on what it finds: here on the class that stands for
    # numpy.ndarray.
    refusal(tmp_path, b"cnumpy\nndarray\n(N(dS'__init__'\nNsS'array'\nI1\nstb.")
    refusal(tmp_path, b"c_codecs\nencode\n(N(dS'__new__'\nNstb.")
    write_cifar10(tmp_path, python3)
    assert read_cifar(tmp_path, classes=10).test.labels.tolist() == [4, 2]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"data": images([1, 2]), "labels": [1]}, "1 labels for 2 images"),
        ({"data": images([1, 2]).astype(np.int32), "labels": [1, 2]}, "data of int32"),
        ({"data": images([1, 2])[:, :-1], "labels": [1, 2]}, r"shape (2, 3071)"),
        ({"data": images([1, 2]), "labels": [1, 2.0]}, "not integers from 0 to 255"),
        ({"data": images([1, 2]), "labels": [1, 10**30]}, "not integers from 0 to 255"),
    ],
)
def test_plain_pickle_that_is_not_a_batch_is_refused(
    tmp_path: Path, content: dict[str, Any], reason: str
) -> None:
    assert reason in refusal(tmp_path, pickle.dumps(content, protocol=2))
