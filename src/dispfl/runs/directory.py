"""The run directory: everything about one run, in files that other tools can read.

config.toml         complete; `dispfl run config.toml` repeats the run
split.safetensors   which samples each peer has, and the format of the models' inputs
metrics.jsonl       one line per round
checkpoints/        see checkpoint.py
.progress.json      while it runs: see progress_file.py
.secret-key         with privacy, until the end: never share it
summary.json        at the end
learning-curve.png  at the end
report.html         at the end, from the command line
audit.json, audit/  of `dispfl audit`
"""

import contextlib
import fcntl
import json
import os
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import safetensors
import safetensors.torch
import tomli_w
import torch
from torch import Tensor

from dispfl.config import MADE_IN_PYTHON
from dispfl.core.layout import Layout
from dispfl.data.catalogue import describe
from dispfl.data.labelled import InputFormat
from dispfl.data.split import Split
from dispfl.engines.checkpoint import Checkpoints
from dispfl.errors import ConfigError, DamagedError, RunError, TakenError
from dispfl.files import (
    LOCK,
    append_durably,
    open_regular,
    plain_disk_errors,
    read_regular,
    sync_folder,
    write_atomically,
)
from dispfl.methods.base import SERVER, PeerState
from dispfl.methods.dispfl import DisPFL
from dispfl.models.settings import Model
from dispfl.privacy.steps import KEY_BYTES
from dispfl.round.context import LazyStates
from dispfl.runs.compact import compact, expanded
from dispfl.runs.metrics import Metrics
from dispfl.topology import peer_names
from dispfl.trust import check_run, remember

SECRET_KEY = ".secret-key"
LOCK_ATTEMPTS = 3
"""A process that looks whether a run is locked holds the lock for some microseconds."""
LOCK_PAUSE = 0.01
"""Seconds between two attempts."""


class RunDirectory:
    """A run directory that only this process writes to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoints")
        self._new_folders: list[Path] | None = None
        """Of a new directory: the folders that were created for it."""
        self._lock = self._take_lock()

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any]) -> "RunDirectory":
        """Create a new one; refuse a folder with results of a run or other files in it."""
        directory = cls.claim(path)
        with directory.closed_on_failure():
            directory.write_config(config)
        return directory

    @classmethod
    def claim(cls, path: Path) -> "RunDirectory":
        """Create and lock a new one without a config.

        If it is closed before it has one, it is removed again.
        """
        _refuse_existing(path)
        new_folders = [folder for folder in (path, *path.parents) if not folder.exists()]
        with plain_disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        directory = cls(path)
        directory._new_folders = new_folders
        with directory.closed_on_failure():
            _refuse_existing(path)  # another process may have been faster
            if _has_no_results(path):
                for name in (SPLIT, "metrics.jsonl", "config.toml"):
                    (path / name).unlink(missing_ok=True)
        return directory

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """Open an existing one, to resume its run."""
        read_config(path)
        return cls(path)

    def _take_lock(self) -> IO[bytes]:
        """Lock the directory; the lock ends with the process, so a killed run leaves none."""
        file = self.path / LOCK
        while True:
            with plain_disk_errors(self.path):
                lock = file.open("ab")
            if not _lock(lock):
                lock.close()
                raise TakenError(
                    f"Another process is using {self.path}; wait for it or stop it first."
                )
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock.fileno()), file.stat()):
                    return lock
            lock.close()  # the process that had it before has removed the file

    def close(self) -> None:
        """Release the directory; remove what was created for it if it never got a config."""
        if self._new_folders is not None and not (self.path / "config.toml").exists():
            (self.path / LOCK).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty any more
                for folder in self._new_folders:
                    folder.rmdir()
        self._lock.close()

    @contextlib.contextmanager
    def closed_on_failure(self) -> Iterator[None]:
        """Close the directory if an exception occurs."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the config, and remember that this user made the directory."""
        write_atomically(self.path / "config.toml", tomli_w.dumps(dict(config)).encode())
        remember(self.path, config)

    def extend(self, config: Mapping[str, Any]) -> None:
        """Continue with a config of more rounds.

        The run first loses its summary, so that it no longer counts as finished.
        """
        with plain_disk_errors(self.path):
            (self.path / "summary.json").unlink(missing_ok=True)
            sync_folder(self.path)
        self.write_config(config)

    def append(self, record: Metrics) -> None:
        """Append a line to the metrics."""
        append_durably(self.path / "metrics.jsonl", json_line(record))

    def truncate_metrics(self, rounds: int, *, gaps: bool = False) -> list[Metrics]:
        """Keep the lines of the first rounds only: those after the checkpoint are repeated.

        Only a site that joined late or was behind may have `gaps`: rounds that it missed.
        """
        records = [record for record in read_metrics(self.path) if record["round"] < rounds]
        if len(records) < rounds and not gaps:
            raise RunError(
                f"{self.path / 'metrics.jsonl'} has {len(records)} lines, but {rounds} rounds are"
                " finished: lines were lost. Restore the file, or start the run again."
            )
        try:
            content = b"".join(map(json_line, records))
        except ValueError as problem:  # nan, which no run writes
            raise RunError(
                f"{self.path / 'metrics.jsonl'} is damaged ({problem}). Restore the file, or start"
                " the run again."
            ) from problem
        write_atomically(self.path / "metrics.jsonl", content)
        return records

    def secret_key(self) -> bytes:
        """Return the key of private training; a new one where there is none, as in a copied run.

        It is drawn from the operating system, not from the seed, and only this user can read it.
        Resuming needs it to repeat a round with the same noise; a finished run does not, and keeps
        no copy.
        """
        file = self.path / SECRET_KEY
        with plain_disk_errors(file):
            if file.exists():
                saved_key = file.read_bytes()
                if len(saved_key) == KEY_BYTES:
                    return saved_key

            file.unlink(missing_ok=True)
            key = os.urandom(KEY_BYTES)
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as opened:
                opened.write(key)
                opened.flush()
                os.fsync(opened.fileno())
            sync_folder(self.path)
        return key

    def forget_secret_key(self) -> None:
        """Delete the key of private training."""
        (self.path / SECRET_KEY).unlink(missing_ok=True)

    def write_summary(self, summary: Metrics) -> None:
        """Write the summary, which makes the run count as finished."""
        write_atomically(
            self.path / "summary.json",
            json.dumps(summary, indent=2, allow_nan=False).encode() + b"\n",
        )


def _lock(file: IO[bytes]) -> bool:
    """Lock a file; return whether no other process has it locked."""
    for attempt in range(LOCK_ATTEMPTS):
        if attempt:
            time.sleep(LOCK_PAUSE)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    return False


def json_line(record: Metrics) -> bytes:
    """Return a line of the metrics."""
    return json.dumps(compact(record), allow_nan=False).encode() + b"\n"


def _has_no_results(path: Path) -> bool:
    """Whether a directory is of a run that failed before its first step was saved."""
    names = {entry.name for entry in path.iterdir() if not entry.name.startswith(".")}
    if "config.toml" not in names or names - {"config.toml", "metrics.jsonl", "checkpoints", SPLIT}:
        return False
    metrics = path / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size:
        return False
    return not any(entry.is_file() for entry in (path / "checkpoints").rglob("*"))


def _refuse_existing(path: Path) -> None:
    """Refuse a path with anything in it but hidden files, or a run without any result."""
    if not path.exists():
        return
    if path.is_dir() and (_is_empty(path) or _has_no_results(path)):
        return
    fix = "Choose"
    if (path / "config.toml").exists():
        fix = f"Resume it (--resume {path}; in Python, resume=True), or choose"
    raise RunError(
        f"The run directory {path} exists already. {fix} another (--out; in Python, out=...)."
    )


def _is_empty(path: Path) -> bool:
    return all(entry.name.startswith(".") for entry in path.iterdir())


def read_config(path: Path) -> dict[str, Any]:
    """Return a run directory's config."""
    file = path / "config.toml"
    try:
        return tomllib.loads(read_regular(file).decode())
    except FileNotFoundError:
        raise RunError(f"{path} is not a run directory: it has no config.toml.") from None
    except NotADirectoryError:
        raise RunError(
            f"{path} is a file; name the run directory, such as {path.parent}."
        ) from None
    except (OSError, ValueError, RecursionError) as problem:
        raise RunError(f"{file} cannot be read: {problem}.") from problem


def trusted_config(
    path: Path, *, trust: bool = False, own: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a run directory's config if the code that it names may be imported.

    The directory is this user's, or they `trust` it, or their `own` config names the same code.
    """
    config = read_config(path)
    if trust:
        remember(path, config)
    check_run(path, config, own)
    return config


def read_metrics(path: Path) -> list[Metrics]:
    """Return the metrics of a run's rounds so far.

    Lines that a crash has truncated or a resume repeated are left out.
    """
    file = path / "metrics.jsonl"
    try:
        content = read_regular(file)
    except FileNotFoundError:
        return []
    except OSError as problem:
        raise RunError(f"{file} cannot be read: {problem}.") from problem
    records: list[Metrics] = []
    last_round = -1
    for line in content.split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(record, dict):
            continue
        t = record.get("round")
        if type(t) is int and t > last_round:
            records.append(expanded(record))
            last_round = t
    return records


def read_summary(path: Path) -> Metrics | None:
    """Return a run's summary, or None while the run is not finished."""
    file = path / "summary.json"
    try:
        summary = json.loads(read_regular(file))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as problem:
        raise RunError(f"{file} cannot be read: {problem}.") from problem
    if not isinstance(summary, dict):
        raise RunError(f"{file} is not the summary of a run: it does not hold a JSON object.")
    return summary


PEERS_NAMED = 5
"""Peers that a message names."""


def check_learned(path: Path) -> None:
    """Refuse to call a finished run a success if some of its peers have learned nothing."""
    summary = read_summary(path) or {}
    failed = [str(name) for name in summary.get("failed_peers", [])]
    if not failed:
        return
    names = ", ".join(failed[:PEERS_NAMED])
    if len(failed) > PEERS_NAMED:
        names += ", ..."
    subject = f"peer {names}" if len(failed) == 1 else f"{len(failed)} peers ({names})"
    raise RunError(
        f"{path}: every step of {subject} failed, so that nothing was learned there; metrics.jsonl"
        " has the reasons. The results are kept."
    )


def has_all_rounds(path: Path, rounds: int) -> bool:
    """Whether a run has this many rounds, neither interrupted nor stopped early by a callback."""
    summary = read_summary(path)
    if summary is None or "stopped" in summary:
        return False
    return int(summary.get("rounds", 0)) >= rounds


LABELS = "labels.json"
"""In the folder of a comparison or a sweep: by the folder of a row, the label it was given."""


def read_labels(folder: Path) -> dict[str, str]:
    """Return the labels of rows in a folder of runs, by the folder of each row."""
    try:
        labels = json.loads(read_regular(folder / LABELS))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as problem:
        raise RunError(f"{folder / LABELS} cannot be read: {problem}.") from problem
    if not isinstance(labels, dict) or not all(isinstance(text, str) for text in labels.values()):
        raise RunError(f"{folder / LABELS} does not hold labels by row; correct or delete it.")
    return labels


SPLIT = "split.safetensors"


def write_split(
    path: Path,
    split: Split,
    label_counts: Tensor,
    data_digest: str = "",
    inputs: InputFormat | None = None,
) -> None:
    """Save a split, the digest of the data, and the format of the models' inputs.

    Its tensors are `train/000`, `test/000`, ... and `label_counts` (peers, classes).
    """
    tensors = {"label_counts": label_counts, **_split_tensors(split, "")}
    if split.unseen is not None:
        tensors |= _split_tensors(split.unseen, "unseen/")
    if split.global_test is not None:
        tensors["global_test"] = split.global_test
    about: dict[str, Any] = {"sha256": data_digest}
    if inputs is not None:
        about["inputs"] = inputs.to_json()
    # One entry, because safetensors writes several in any order.
    write_atomically(path / SPLIT, safetensors.torch.save(tensors, {"data": json.dumps(about)}))


def _split_tensors(split: Split, prefix: str) -> dict[str, Tensor]:
    """Return the rows of each peer, by their names in the file."""
    tensors = {}
    for subset, rows_of_peers in split.parts.items():
        names = peer_names(len(rows_of_peers))
        for name, rows in zip(names, rows_of_peers, strict=True):
            tensors[f"{prefix}{subset}/{name}"] = rows
    return tensors


def read_split(path: Path) -> tuple[Split, Tensor] | None:
    """Return a saved split and its label counts; None if there is none."""
    try:
        tensors = safetensors.torch.load(read_regular(path / SPLIT))
        label_counts = tensors["label_counts"]
        split = _split_of(tensors, "", peer_names(len(label_counts)))
        unseen_keys = [key for key in tensors if key.startswith("unseen/train/")]
        if unseen_keys:
            names = sorted(key.rpartition("/")[2] for key in unseen_keys)
            split = replace(split, unseen=_split_of(tensors, "unseen/", names))
        return replace(split, global_test=tensors.get("global_test")), label_counts
    except FileNotFoundError:
        return None
    except (safetensors.SafetensorError, KeyError, TypeError, OSError) as problem:
        raise _damaged_split(path, problem) from problem


def _damaged_split(path: Path, problem: Exception) -> RunError:
    return RunError(
        f"{path / SPLIT} is damaged ({problem}). Restore it; of a run on a built-in data set it can"
        " be deleted, and resuming creates it again."
    )


def _split_of(tensors: Mapping[str, Tensor], prefix: str, names: Sequence[str]) -> Split:
    """Return the split of these peers; without validation data it has none."""
    train = []
    test = []
    validation = []
    for name in names:
        train.append(tensors[f"{prefix}train/{name}"])
        test.append(tensors[f"{prefix}test/{name}"])
        if f"{prefix}validation/{name}" in tensors:
            validation.append(tensors[f"{prefix}validation/{name}"])
    return Split(tuple(train), tuple(test), tuple(validation))


def read_data_digest(path: Path) -> str:
    """Return the digest of the data that a saved split is of; empty where there is none."""
    return str(_about_data(path).get("sha256", ""))


def read_inputs(path: Path) -> InputFormat | None:
    """Return the format of the inputs that a run's models are trained with, where it was saved."""
    inputs = _about_data(path).get("inputs")
    return InputFormat.from_json(inputs) if inputs else None


def _about_data(path: Path) -> dict[str, Any]:
    try:
        open_regular(path / SPLIT).close()  # it refuses what could block
        with safetensors.safe_open(path / SPLIT, "pt") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {}).get("data", "{}"))
        return about
    except FileNotFoundError:
        return {}
    except (safetensors.SafetensorError, ValueError, RecursionError, OSError) as problem:
        raise _damaged_split(path, problem) from problem


def saved_rounds(path: Path) -> int:
    """Return after how many rounds the newest complete checkpoint was written."""
    config = read_config(path)
    finished = Checkpoints(path / "checkpoints").finished_rounds()
    if not finished:
        raise RunError(
            f"{path} has no complete checkpoint: no round was finished yet."
            f" {_how_to_resume(path, config)}"
        )
    return finished[-1]


def final_states(path: Path) -> dict[str, PeerState]:
    """Return the states in the newest complete checkpoint, in roster order; a server's is last."""
    rounds = saved_rounds(path)
    try:
        steps = Checkpoints(path / "checkpoints").load(rounds)
        if not steps:
            raise DamagedError(f"The checkpoint of round {rounds} in {path} is empty.")
    except DamagedError as damage:
        raise RunError(f"{damage} {_how_to_resume(path, read_config(path))}") from damage
    return {name: steps[name].next_state for name in sorted(steps)}


def personal_states(path: Path) -> dict[str, PeerState]:
    """Return the peers' states in the newest complete checkpoint, without a server's."""
    return {name: state for name, state in final_states(path).items() if name != SERVER}


def saved_states(path: Path, roster: Sequence[str]) -> LazyStates:
    """Return the peers' states in the newest complete checkpoint, read on access."""
    return Checkpoints(path / "checkpoints").states(saved_rounds(path), roster)


def label_counts(path: Path) -> Tensor | None:
    """Return the training samples per peer and class; None where the run saved no split."""
    read_config(path)
    saved = read_split(path)
    if saved is None:
        return None
    _, counts = saved
    return counts


def layout_of(path: Path) -> Layout:
    """Return the layout of the run's model, which must be a built-in one.

    It knows the model's units if masks are of channels.
    """
    config = read_config(path)
    if MADE_IN_PYTHON in config:
        raise RunError(f"{path} was made in Python: only its caller has the model and its layout.")
    try:
        spec = describe(config["data"]["name"])
        inputs = read_inputs(path)  # a partial data set has fewer classes
        classes = len(inputs.classes) if inputs else spec.classes
        model = Model(**config["model"])
        if config.get("method", {}).get("structure") == "channels":
            method = DisPFL(**config["method"])
            module = model.build(spec.shape[0], classes, spec.shape[1])
            return method.layout(module, lambda: torch.zeros(2, *spec.shape))
        with torch.device("meta"):  # shapes alone, no memory
            module = model.build(spec.shape[0], classes, spec.shape[1])
    except (KeyError, TypeError, ConfigError) as problem:
        why = str(problem).rstrip(".")
        raise RunError(
            f"{path / 'config.toml'} does not name a built-in model and a known data set: {why}."
        ) from None
    return Layout.of(module)


def _how_to_resume(path: Path, config: dict[str, Any]) -> str:
    """Return how to resume the run, which then repeats what is missing."""
    if MADE_IN_PYTHON in config:
        return "Resume the run: Federation.run(..., resume=True)."
    return f"Resume the run: dispfl run --resume {path}."
