"""An address without a Ray cluster: one sentence, and no run directory."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from program import Dispfl, dispfl
from torch import Tensor, nn

from dispfl import Federation
from dispfl.errors import ConfigError

__all__ = ["dispfl"]

pytest.importorskip("ray")
SENTENCE = (
    "Cannot connect to the Ray cluster at {}: Connection refused. Is it running, and are"
    " RAY_AUTH_MODE and the token"
)


@pytest.fixture
def unused_address() -> str:
    """An address at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("source", ["option", "environment"])
def test_a_run_at_an_address_without_a_cluster_is_a_sentence_and_leaves_no_run_directory(
    dispfl: Dispfl,
    unused_address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if source == "environment":
        monkeypatch.setenv("RAY_ADDRESS", unused_address)
    result = dispfl(
        "run", "engine=ray", *(["--ray-address", unused_address] if source == "option" else [])
    )
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith(f"dispfl: {SENTENCE.format(unused_address)}")
    assert not list(tmp_path.iterdir())


def test_a_federation_at_an_address_without_a_cluster_leaves_no_run_directory(
    unused_address: str,
    tmp_path: Path,
    net: Callable[[], nn.Module],
    points: Callable[[int, int], tuple[Tensor, Tensor]],
) -> None:
    federation = Federation(
        net, [(points(20, 0), points(10, 1))], engine="ray", ray_address=unused_address, rounds=1
    )
    with pytest.raises(ConfigError, match=SENTENCE.format(unused_address)):
        federation.run(out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
