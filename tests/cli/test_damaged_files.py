"""Commands answer files that somebody else has made or damaged with one sentence, never a
traceback.

A fixed number of mutations in `make test`; `make fuzz` tries more.
"""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import tomllib
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from fuzz import seeds
from messages import refused
from mutations import mutate
from PIL import Image
from program import Dispfl

from dispfl.config import compose
from dispfl.data.datasets import CustomData, load_dataset
from dispfl.data.readers import table
from dispfl.data.readers.folder import UnreadableImageError, decode_image, read_folder
from dispfl.data.readers.table import read_arrays, read_rows, read_table
from dispfl.errors import DataError, DispflError
from dispfl.export import predict_process
from dispfl.export.card import Card
from dispfl.export.formats import load_model
from dispfl.export.predictor import read_image
from dispfl.runs.execute import ExperimentRun

TINY = [
    "peers=4",
    "rounds=2",
    "topology=full",
    "partition.samples_per_peer=20",
    "partition.test_samples_per_peer=10",
    "train.epochs=1",
    "workers=1",
]
PATIENCE = 60
"""Seconds after which a command counts as hanging; it takes less than one."""
FILES = (
    "config.toml",
    "metrics.jsonl",
    "summary.json",
    "split.safetensors",
    "checkpoints/round-000002/complete.json",
    "checkpoints/round-000002/part-000.safetensors",
)
COMMANDS: dict[str, Callable[[Path], list[str | Path]]] = {
    "show": lambda run: ["show", run],
    "show --json": lambda run: ["show", run, "--json"],
    "report": lambda run: ["report", run, "-o", run.parent / "report.html"],
    "masks": lambda run: ["masks", run, "--json"],
    "bound": lambda run: ["bound", "--run", run],
    "export": lambda run: ["export", run, "--peer", "1", "--to", run.parent / "one.safetensors"],
    "audit": lambda run: ["audit", run, "--shadows", "0", "--canaries", "0"],
    "run --resume": lambda run: ["run", "--resume", run],
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    path = tmp_path_factory.mktemp("runs") / "finished"
    ExperimentRun.create(compose({}, TINY), path).run()
    return path


@contextlib.contextmanager
def patience() -> Iterator[None]:
    """Fail instead of hanging."""

    def give_up(*_: object) -> None:
        raise AssertionError(f"no answer in {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check_answer(dispfl: Dispfl, words: list[str | Path], change: str) -> None:
    """A command ends with an exit code and, if it fails, with one sentence."""
    try:
        with patience():
            ended = dispfl(*words)
    except Exception as problem:
        raise AssertionError(f"{words[0]} after {change}: {problem!r}") from problem
    assert ended.code in (0, 1), (words[0], change)
    if ended.code:
        sentences = [line for line in ended.err.splitlines() if line.startswith("dispfl: ")]
        assert len(sentences) == 1, (words[0], change, ended.err)
    for letter in "\x1b\x07\x9b":
        assert letter not in ended.out + ended.err, (words[0], change)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_damaged_run_directory_is_one_sentence(
    command: str, finished: Path, tmp_path: Path, dispfl: Dispfl
) -> None:
    for seed in seeds(10, share=1 / len(COMMANDS)):
        rng = random.Random(seed)
        run = tmp_path / "run"
        shutil.copytree(finished, run)
        change = mutate(run / rng.choice(FILES), rng)
        if command == "run --resume":  # as if it had been killed after its last round
            (run / "summary.json").unlink()
        check_answer(dispfl, COMMANDS[command](run), f"seed {seed}: {change}")
        shutil.rmtree(run)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_a_run_directory_does_not_block(
    name: str, command: str, finished: Path, tmp_path: Path, dispfl: Dispfl
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / name).unlink()
    os.mkfifo(run / name)
    check_answer(dispfl, COMMANDS[command](run), f"a pipe called {name}")


def test_parts_of_a_checkpoint_outside_of_it_are_refused(
    finished: Path, tmp_path: Path, dispfl: Dispfl
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    manifest = run / "checkpoints/round-000002/complete.json"
    content = json.loads(manifest.read_text())
    [part] = content["parts"]
    shutil.copy(manifest.with_name(part), tmp_path / "part-000.safetensors")
    manifest.write_text(json.dumps(content | {"parts": ["../../../part-000.safetensors"]}))
    ended = dispfl("export", run, "--peer", "1", "--to", tmp_path / "one.safetensors")
    assert ended.code == 1
    assert "it names the part '../../../part-000.safetensors'" in ended.err


HOSTILE_NAME = "evil\x1b[2J\x1b]0;title\x07\x9b31m\u202e"


@pytest.mark.parametrize("command", ["show", "show --json", "report", "masks"])
def test_escape_codes_in_a_name_are_printed_as_text(
    command: str, finished: Path, tmp_path: Path, dispfl: Dispfl
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    config = tomllib.loads((run / "config.toml").read_text())
    config["method"]["name"] = HOSTILE_NAME
    (run / "config.toml").write_text(tomli_w.dumps(config))
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"method": HOSTILE_NAME}))

    ended = dispfl(*COMMANDS[command](run))
    written = ended.out + ended.err
    if command == "report":
        written += (tmp_path / "report.html").read_text()
    assert "evil\\u001b[2J" in written
    for letter in HOSTILE_NAME.removeprefix("evil"):
        assert letter in "[]2J0;title31m" or letter not in written


def test_the_format_of_a_metric_cannot_ask_for_millions_of_digits(
    finished: Path, tmp_path: Path, dispfl: Dispfl
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    summary = json.loads((run / "summary.json").read_text())
    summary["scores"]["accuracy"]["format"] = ".99999999f"
    (run / "summary.json").write_text(json.dumps(summary))
    ended = dispfl("show", run)
    assert ended.code == 1
    assert "The format of the metric accuracy must be like .3f" in ended.err


# data and model files


def tables(folder: Path) -> list[Path]:
    """A CSV file, and the same as an NPZ file, compressed and not."""
    rng = np.random.default_rng(0)
    inputs = rng.random((30, 3), dtype=np.float32)
    labels = rng.integers(0, 2, 30)
    np.savez(folder / "plain.npz", x=inputs, y=labels)
    np.savez_compressed(folder / "compressed.npz", x=inputs, y=labels)
    lines = [
        f"{','.join(map(str, row))},{label}" for row, label in zip(inputs, labels, strict=True)
    ]
    (folder / "table.csv").write_text("\n".join(["a,b,c,label", *lines]))
    return [folder / name for name in ("plain.npz", "compressed.npz", "table.csv")]


def test_damaged_tables_are_one_sentence(tmp_path: Path) -> None:
    originals = tables(tmp_path)
    for seed in seeds(300, share=0.1):
        rng = random.Random(seed)
        original = rng.choice(originals)
        file = tmp_path / f"mutated{original.suffix}"
        shutil.copy(original, file)
        mutate(file, rng)
        with patience(), contextlib.suppress(DataError):
            read_table(file) if file.suffix == ".csv" else read_arrays(file)


def test_damaged_images_are_skipped(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    for name in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"):
        original = tmp_path / f"image.{name.lower()}"
        Image.fromarray(pixels).save(original, format=name)
        assert decode_image(original, "RGB").size == (8, 8)
        for seed in seeds(20, share=0.01):
            file = tmp_path / "mutated"
            shutil.copy(original, file)
            mutate(file, random.Random(seed))
            with patience(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with contextlib.suppress(UnreadableImageError):
                    decode_image(file, "RGB")


@pytest.mark.parametrize("suffix", [".safetensors", ".onnx"])
def test_damaged_models_are_one_sentence(
    suffix: str, finished: Path, tmp_path: Path, dispfl: Dispfl
) -> None:
    if suffix == ".onnx":
        pytest.importorskip("onnxruntime", reason="the extra dispfl[export] is not installed")
    original = tmp_path / f"original{suffix}"
    assert dispfl("export", finished, "--peer", "1", "--to", original).code == 0
    Image.new("L", (28, 28), 200).save(tmp_path / "image.png")
    for seed in seeds(15, share=0.1):
        file = tmp_path / f"mutated{suffix}"
        shutil.copy(original, file)
        mutate(file, random.Random(seed))
        with patience(), contextlib.suppress(DataError):
            load_model(file).predict([tmp_path / "image.png"])


@pytest.fixture
def file_kinds(tmp_path: Path) -> Path:
    """A folder with a pipe for each kind of file that is read."""
    for name in ("model.onnx", "model.safetensors", "image.png", "table.csv", "arrays.npz"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "images" / "cats").mkdir(parents=True)
    os.mkfifo(tmp_path / "images" / "cats" / "cat.png")
    return tmp_path


def test_pipes_in_place_of_files_do_not_block(file_kinds: Path) -> None:
    readers: dict[str, Callable[[Path], object]] = {
        "model.onnx": load_model,
        "model.safetensors": load_model,
        "image.png": lambda path: read_image(path, (1, 8, 8)),
        "table.csv": lambda path: read_rows(path, ("a",)),
        "arrays.npz": lambda path: load_dataset(CustomData(path=str(path))),
        "images": lambda path: read_folder(path, 8, colour=True),
    }
    for name, read in readers.items():
        with patience(), pytest.raises(DispflError):
            read(file_kinds / name)


def test_postscript_in_a_png_is_not_given_to_ghostscript(tmp_path: Path) -> None:
    file = tmp_path / "image.png"
    Image.new("RGB", (8, 8)).save(file, format="EPS")
    with refused(DataError):
        read_image(file, (3, 8, 8))


def npz_with_header(file: Path, shape: tuple[int, ...], zeros: int) -> None:
    """An NPZ file whose x has so many zeros, whatever its header says."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"shape": shape, "fortran_order": False, "descr": "<f4"}
    )
    labels = io.BytesIO()
    np.save(labels, np.zeros(2, np.int64))
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("x.npy", "w", force_zip64=True) as array:
            array.write(header.getvalue())
            for _ in range(0, zeros, 1 << 20):
                array.write(bytes(1 << 20))
        archive.writestr("y.npy", labels.getvalue())


def test_a_small_file_cannot_claim_a_huge_array(tmp_path: Path) -> None:
    npz_with_header(tmp_path / "claim.npz", (2, 2**40), 0)
    with refused(DataError):
        read_arrays(tmp_path / "claim.npz")


def test_arrays_that_do_not_fit_into_memory_are_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npz_with_header(tmp_path / "bomb.npz", (64, 1 << 18), 64 << 20)
    assert (tmp_path / "bomb.npz").stat().st_size < 100_000
    monkeypatch.setattr(table, "memory", lambda: (1e8, 1e8))
    monkeypatch.setattr(table, "_array", lambda *_: pytest.fail("it was read"))
    with refused(DataError):
        read_arrays(tmp_path / "bomb.npz")


def endless_model(file: Path, card: Card) -> None:
    """An ONNX graph that loops for ever."""
    onnx = pytest.importorskip("onnx", reason="the extra dispfl[export] is not installed")
    make, float32 = onnx.helper, onnx.TensorProto.FLOAT
    body = make.make_graph(
        [
            make.make_node("Identity", ["go_on"], ["goes_on"]),
            make.make_node("Identity", ["value"], ["next"]),
        ],
        "body",
        [
            make.make_tensor_value_info("step", onnx.TensorProto.INT64, []),
            make.make_tensor_value_info("go_on", onnx.TensorProto.BOOL, []),
            make.make_tensor_value_info("value", float32, None),
        ],
        [
            make.make_tensor_value_info("goes_on", onnx.TensorProto.BOOL, []),
            make.make_tensor_value_info("next", float32, None),
        ],
    )
    graph = make.make_graph(
        [make.make_node("Loop", ["steps", "start", "images"], ["probabilities"], body=body)],
        "endless",
        [make.make_tensor_value_info("images", float32, None)],
        [make.make_tensor_value_info("probabilities", float32, None)],
        [
            make.make_tensor("steps", onnx.TensorProto.INT64, [], [2**62]),
            make.make_tensor("start", onnx.TensorProto.BOOL, [], [True]),
        ],
    )
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 17)], ir_version=8)
    for key, value in card.to_strings().items():
        model.metadata_props.add(key=key, value=value)
    onnx.save(model, file)


def test_an_endless_model_is_stopped(tmp_path: Path, dispfl: Dispfl) -> None:
    pytest.importorskip("onnxruntime", reason="the extra dispfl[export] is not installed")
    card = Card(classes=("a", "b"), shape=(1, 8, 8), mean=(0.0,), std=(1.0,))
    endless_model(tmp_path / "endless.onnx", card)
    Image.new("L", (8, 8)).save(tmp_path / "image.png")
    with patience():
        words = ["predict", tmp_path / "endless.onnx", tmp_path / "image.png", "--timeout", "2"]
        ended = dispfl(*words)
    assert ended.code == 1
    assert "has not answered for 2 s and was stopped" in ended.err


def test_a_model_that_ends_its_process_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict_process, "_PROGRAM", "import os; os.abort()")
    with refused(DataError):
        predict_process.predict_files(Path("model.onnx"), [])
