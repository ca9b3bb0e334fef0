"""What the tests of exported models share: a small finished run, and one peer's model of it in every format."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dispfl.config import compose
from dispfl.export.formats import save
from dispfl.export.personal import Personal, personal_model
from dispfl.launch import Launch
from dispfl.runs.loop import Progress

TINY = ["peers=4", "rounds=2", "topology=full", "partition.samples=20", "partition.test_samples=10", "train.epochs=1"]


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Path]:
    """`make_run(path, "method=local")`: a finished run of four peers and two rounds on the bundled pictures."""

    def make(path: Path, *words: str) -> Path:
        Launch.begin(compose({}, [*TINY, *words]), path).run(Progress())
        return path

    return make


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, make_run: Callable[..., Path]) -> Path:
    """A finished run of Dis-PFL; not to be changed."""
    return make_run(tmp_path_factory.mktemp("run") / "dispfl")


@pytest.fixture(scope="session")
def personal(finished: Path) -> Personal:
    """The model of its second peer."""
    return personal_model(finished, "1")


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, personal: Personal) -> Callable[[str], Path]:
    """`exported(".onnx")`: that model as a file, written once."""
    folder = tmp_path_factory.mktemp("exported")

    def write(ending: str) -> Path:
        path = folder / f"model{ending}"
        if not path.exists():
            if ending == ".onnx":
                for package in ("onnx", "onnxscript", "onnxruntime"):
                    pytest.importorskip(package, reason="the extra dispfl[onnx] is not installed")
            save(personal.network, personal.card, path)
        return path

    return write
