"""A site of a new federation begins with the model of an earlier one, and with its score."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refused
from tables import small_table

from dispfl import Peer
from dispfl.errors import ConfigError, RunError
from dispfl.peer.local_federation import free_ports
from dispfl.peer.setup.local_setup import local_setup
from dispfl.peer.setup.warm_start import read_model

MakePeer = Callable[..., Peer]
STILL = {"epochs": 1, "lr": 1e-12}
"""Training that changes nothing."""


@pytest.fixture
def make_peer(tmp_path: Path) -> MakePeer:
    """`make_peer("alice", rounds=2)`: create a site; the tables of all are the same."""

    def make(folder: str, warm_start: Path | None = None, **settings: Any) -> Peer:
        (tmp_path / "table.csv").write_text(small_table(40))
        data = {
            "name": "custom",
            "path": str(tmp_path / "table.csv"),
            "label": "y",
            "classes": ["x", "z"],
        }
        method = {"name": "dispfl", "density": 0.5}
        config = {"rounds": 8, "model": "mlp", "method": method, "data": data, **settings}
        listen = f"127.0.0.1:{free_ports(1)[0]}"
        return Peer.create(
            tmp_path / folder, name="alice", listen=listen, config=config, warm_start=warm_start
        )

    return make


@pytest.fixture
def old(make_peer: MakePeer) -> Peer:
    """A site that has learned to tell the classes apart."""
    peer = make_peer("old", train={"epochs": 5, "lr": 0.1})
    peer.run(alone=True)
    return peer


def first_score(peer: Peer) -> float:
    """The score after a round that changes nothing."""
    peer.run(alone=True)
    score = peer.status().score
    assert score is not None
    return score


def test_a_warm_started_federation_begins_at_the_old_scores(old: Peer, make_peer: MakePeer) -> None:
    old_score = old.status().score
    assert old_score is not None
    settings: dict[str, Any] = {"rounds": 1, "seed": 99, "train": STILL}
    settings["method"] = {"name": "dispfl", "density": 0.5, "alpha_0": 0.0}
    cold = first_score(make_peer("cold", **settings))
    warm = first_score(make_peer("warm", old.folder, **settings))
    assert warm == old_score
    assert cold < old_score


def test_the_first_state_is_the_old_model_and_the_spec_has_the_shared_weights(
    old: Peer, make_peer: MakePeer
) -> None:
    warm = local_setup(make_peer("warm", old.folder, seed=99).site)
    cold = local_setup(make_peer("cold", seed=99).site)
    assert warm.spec == cold.spec
    last, _ = read_model(old.folder)
    state = warm.initial_state()
    assert torch.equal(state.model.values, last.model.values)
    assert torch.equal(state.model.mask.unpack(), last.model.mask.unpack())
    assert torch.equal(state.next_mask.unpack(), last.next_mask.unpack())
    assert not state.memory
    assert not torch.equal(state.model.values, cold.initial_state().model.values)


@pytest.mark.parametrize(
    "method",
    [
        {"name": "dispfl", "density": 0.4},
        {"name": "dispfl", "density": 0.5, "layers": "uniform"},
        {"name": "dpsgd"},
    ],
)
def test_a_model_that_keeps_other_weights_is_refused(
    method: dict[str, Any], old: Peer, make_peer: MakePeer
) -> None:
    warm = make_peer("warm", old.folder, method=method)
    with pytest.raises(ConfigError, match=r"keeps .* of all weights") as refusal:
        local_setup(warm.site)
    assert refusal.value.key == "method.density"


@pytest.mark.parametrize(
    ("key", "table", "classes"),
    [
        ("columns", "c,a,b,y\n", ["x", "z"]),
        ("classes", "a,b,y\n", ["z", "x"]),
    ],
)
def test_a_model_of_other_columns_or_classes_is_refused(
    key: str, table: str, classes: list[str], old: Peer, make_peer: MakePeer, tmp_path: Path
) -> None:
    path = tmp_path / "other.csv"
    rows = small_table(40).splitlines()[1:]
    if key == "columns":
        rows = [f"{number},{row}" for number, row in enumerate(rows)]
    path.write_text(table + "\n".join(rows) + "\n")
    data = {"name": "custom", "path": str(path), "label": "y", "classes": classes}
    warm = make_peer("warm", old.folder, data=data)
    with pytest.raises(ConfigError, match=r"The model of --warm-start does not fit"):
        local_setup(warm.site)


def test_a_private_site_does_not_begin_with_a_model_that_its_budget_does_not_cover(
    old: Peer, make_peer: MakePeer, tmp_path: Path
) -> None:
    with refused(ConfigError, key="privacy"):
        make_peer("warm", old.folder, privacy={"noise_multiplier": 1.0})
    assert not (tmp_path / "warm").exists()
    warm = make_peer("warm", old.folder)
    toml = warm.folder / "site.toml"
    toml.write_text(toml.read_text().replace("[privacy]", "[privacy]\nnoise_multiplier = 1.0"))
    with refused(ConfigError, key="privacy"):
        local_setup(Peer.open(warm.folder).site)


def test_a_site_without_a_model_and_a_damaged_first_model_are_refused(
    old: Peer, make_peer: MakePeer, tmp_path: Path
) -> None:
    empty = make_peer("empty")
    with pytest.raises(RunError, match="has no complete round yet, and so no model"):
        make_peer("warm", empty.folder)
    warm = make_peer("warm", old.folder)
    (warm.folder / "warm-start" / "spec.json").write_text("{")
    with pytest.raises(RunError, match=r"The first model in .* cannot be read"):
        local_setup(warm.site)
    warm.backup(tmp_path / "backup")
    assert (Peer.restore(tmp_path / "backup", tmp_path / "b").folder / "warm-start").is_dir()
