"""Predictions in a process of their own, which is ended if a model file does not answer.

The graph in a file from somebody else may compute for ever, use all memory, or end its process.
Nothing in Python can interrupt it, so it runs elsewhere: `predict_files` starts the process, and
ends it after some seconds without progress, on Ctrl-C, and on SIGTERM. This side imports no torch
and reads plain JSON from the other one.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dispfl.errors import ConfigError, DataError, DispflError

TIMEOUT = 120.0
"""Seconds without progress after which a model is given up: a batch takes far less, and so does the
start of the process."""
TOP = 3
"""The most probable classes that are returned for each image or row."""
_PROGRAM = "from dispfl.export.predict_process import main; main()"
_ERRORS: dict[str, type[DispflError]] = {"ConfigError": ConfigError}


@dataclass
class Prediction:
    """What is predicted for an image or a row of a table, or why a file cannot be read."""

    path: Path
    line: int | None = None
    """The row's line in its table; the header is line 1."""
    guesses: list[tuple[str, float]] = field(default_factory=list)
    """All classes with their probabilities, the most probable first. Of other tasks, in the order
    of the outputs: labels with their probabilities, classes with their share of the pixels, or
    targets with their values."""
    resized_from: tuple[int, int] | None = None
    """The image's width and height, if they differ from the model's input."""
    problem: str | None = None
    """Why there are no guesses, as a sentence."""


@dataclass(frozen=True)
class FilePredictions:
    """The predictions of a model for files, of classes with the most probable ones only."""

    predictions: list[Prediction]
    input: str
    """`images` or `rows`."""
    shape: tuple[int, ...]
    """The shape of one input."""
    task: str = "classification"


def predict_files(
    model: Path,
    files: Sequence[Path],
    *,
    trust: bool = False,
    timeout: float = TIMEOUT,
    masks: Path | None = None,
) -> FilePredictions:
    """Predict for image files or the rows of tables with a model file, in another process.

    A segmentation writes the class of each pixel into the folder `masks`, if there is one.

    A .pt2 can contain code that runs when it is read, so it needs `trust`.
    """
    order = {
        "model": str(model),
        "files": list(map(str, files)),
        "trust": trust,
        "masks": str(masks) if masks else None,
    }
    receiving, sending = os.pipe()
    with closing(Connection(receiving, writable=False)) as answers:
        process = subprocess.Popen(
            # -P: no module of the current directory takes the place of an installed one.
            [sys.executable, "-P", "-c", _PROGRAM, str(sending)],
            stdin=subprocess.PIPE,  # the order; it ends when this process does
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[sending],
        )
        os.close(sending)
        try:
            _send_order(process, order)
            return _collect(model, answers, timeout)
        except EOFError:
            code = process.wait()
            raise DataError(
                f"{model} ended the process that ran it (exit code {code}); it is not a model that"
                " dispfl can run, or it needs more memory than there is."
            ) from None
        finally:
            process.kill()
            process.communicate()


def _send_order(process: subprocess.Popen[bytes], order: Mapping[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(order).encode() + b"\n")
    process.stdin.flush()


def _collect(model: Path, answers: Connection, timeout: float) -> FilePredictions:
    """Return what the other process has sent, once it is complete."""
    predictions: list[Prediction] = []
    for answer in _answers(model, answers, timeout):
        if "problem" in answer:
            raise _ERRORS.get(answer["error"], DataError)(answer["problem"])
        for values in answer.get("predictions", []):
            values["path"] = Path(values["path"])
            predictions.append(Prediction(**values))
        if "input" in answer:
            shape = tuple(answer["shape"])
            return FilePredictions(predictions, answer["input"], shape, answer["task"])
    raise AssertionError("answers end by an exception")


def _answers(model: Path, answers: Connection, timeout: float) -> Iterator[dict[str, Any]]:
    while True:
        if not answers.poll(timeout):
            raise DataError(
                f"{model} has not answered for {timeout:g} s and was stopped. If it is that slow,"
                " allow it more: --timeout SECONDS."
            )
        yield json.loads(answers.recv_bytes())


# the other process


def main() -> None:
    """Predict as the first line of the input says, and send the results."""
    with contextlib.suppress(OSError):  # if memory runs out, the kernel ends this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    order = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with closing(Connection(int(sys.argv[1]), readable=False)) as answers:
        try:
            _predict(answers, **order)
        except DispflError as problem:
            _send(answers, {"problem": str(problem), "error": type(problem).__name__})


def _end_with_parent() -> None:
    sys.stdin.buffer.read()  # returns at the end of the process that holds the other side
    os._exit(1)


def _predict(
    answers: Connection, model: str, files: list[str], trust: bool, masks: str | None
) -> None:
    from dispfl.export.formats import load_model  # imports torch

    predictor = load_model(Path(model), trust=trust)
    card = predictor.card
    folder = None
    if masks is not None:
        if card.task != "segmentation":
            raise ConfigError(f"--masks needs a model of a segmentation; {model} is none.")
        folder = Path(masks)
    _send(answers, {})
    predictions = predictor.predict(list(map(Path, files)), lambda: _send(answers, {}), folder)
    shown = TOP if card.task == "classification" else len(card.classes)
    for start in range(0, len(predictions), 1000):
        part = predictions[start : start + 1000]
        _send(answers, {"predictions": [_as_json(prediction, shown) for prediction in part]})
    _send(answers, {"input": card.input, "shape": card.shape, "task": card.task})


def _as_json(prediction: Prediction, shown: int) -> dict[str, Any]:
    values = asdict(prediction)
    return values | {"path": str(prediction.path), "guesses": prediction.guesses[:shown]}


def _send(answers: Connection, content: Mapping[str, Any]) -> None:
    answers.send_bytes(json.dumps(content).encode())
