"""Fixtures for tests of exported models: a small complete run, and one peer's model in every
format."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dispfl.config import compose
from dispfl.export.formats import save_model
from dispfl.export.personal import PersonalModel, personal_model
from dispfl.runs.execute import ExperimentRun

TINY = [
    "peers=4",
    "rounds=2",
    "topology=full",
    "partition.samples_per_peer=20",
    "partition.test_samples_per_peer=10",
    "train.epochs=1",
]


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Path]:
    """`make_run(path, "method=local")`: a finished run of four peers and two rounds on the bundled
    images."""

    def make(path: Path, *words: str) -> Path:
        ExperimentRun.create(compose({}, [*TINY, *words]), path).run()
        return path

    return make


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, make_run: Callable[..., Path]) -> Path:
    """A finished run of Dis-PFL; not to be changed."""
    return make_run(tmp_path_factory.mktemp("run") / "dispfl")


@pytest.fixture(scope="session")
def personal(finished: Path) -> PersonalModel:
    """The model of its second peer."""
    return personal_model(finished, "1")


@pytest.fixture(scope="session")
def exported(
    tmp_path_factory: pytest.TempPathFactory, personal: PersonalModel
) -> Callable[[str], Path]:
    """`exported(".onnx")`: that model as a file, written once."""
    folder = tmp_path_factory.mktemp("exported")

    def write(ending: str) -> Path:
        path = folder / f"model{ending}"
        if not path.exists():
            if ending == ".onnx":
                for package in ("onnx", "onnxscript", "onnxruntime"):
                    pytest.importorskip(package, reason="the extra dispfl[export] is not installed")
            save_model(personal.network, personal.card, path)
        return path

    return write
