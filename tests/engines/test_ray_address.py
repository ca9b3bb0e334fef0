"""A Ray cluster that is not there: one sentence, and nothing left behind."""

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
SENTENCE = "No Ray cluster at {} lets us in: Connection refused. Is it running, and are RAY_AUTH_MODE and the token"


@pytest.fixture
def nobody() -> str:
    """An address at which nobody listens any more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("by", ["option", "environment"])
def test_a_run_at_an_address_without_a_cluster_is_a_sentence_and_leaves_no_run_directory(
    dispfl: Dispfl, nobody: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if by == "environment":
        monkeypatch.setenv("RAY_ADDRESS", nobody)
    said = dispfl("run", "engine=ray", *(["--ray-address", nobody] if by == "option" else []))
    assert (said.code, said.out) == (1, "")
    assert said.err.startswith(f"dispfl: {SENTENCE.format(nobody)}")
    assert not list(tmp_path.iterdir())


def test_a_federation_at_an_address_without_a_cluster_leaves_no_run_directory_either(
    nobody: str, tmp_path: Path, net: Callable[[], nn.Module], points: Callable[[int, int], tuple[Tensor, Tensor]]
) -> None:
    federation = Federation(net, [(points(20, 0), points(10, 1))], engine="ray", ray_address=nobody)
    with pytest.raises(ConfigError, match=SENTENCE.format(nobody)):
        federation.run(1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
