"""Handwritten run directories."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from recorded_runs import a_line, scored, spread
from safetensors.torch import save_file

from dispfl.runs.links import encode_links
from dispfl.topology import Ring, peer_names

Scores = Sequence[Sequence[float | None] | None]


def write_run(
    path: Path,
    scores: Scores,
    method: str = "dispfl",
    seed: int = 0,
    *,
    mb: float = 1.0,
    flops: float = 1e9,
    connections: int = 0,
    rounds: int | None = None,
    record: Mapping[str, Any] | None = None,
    labels: Sequence[Sequence[int]] | None = None,
    own: Mapping[str, Any] | None = None,
    metric: str = "accuracy",
    higher_is_better: bool = True,
    **config: Any,
) -> Path:
    """Write a run whose peers have these scores in each round; it is unfinished if `rounds` is
    larger.

    `mb` is the busiest node's traffic per round on the wire in MB, twice as much as the paper
    counts. Who received whose model is a ring's. `own` are the method's settings, `record`
    overrides keys in every line of the metrics.
    """
    peers = next(len(own) for own in scores if own is not None)
    roster = peer_names(peers)
    path.mkdir(parents=True)
    settings: dict[str, Any] = {
        "seed": seed,
        "rounds": rounds or len(scores),
        "peers": peers,
        "data": {"name": "mnist"},
        "partition": {"name": "dirichlet", "alpha": 0.3},
        "topology": {"name": "ring", "offline_prob": 0.0, "offline": "train"},
        "metric": [metric],
    }
    settings |= config
    settings["method"] = {"name": method, **(own or {})}
    (path / "config.toml").write_bytes(tomli_w.dumps(settings).encode())
    lines = []
    for t, of_peers in enumerate(scores):
        in_round = scored(spread(of_peers), metric, higher_is_better)
        shape: dict[str, Any] = {"mb": mb, "flops": flops, "peers": peers, "metric": metric}
        line = a_line(t, in_round, **shape)
        line["busiest"]["connections"] = connections
        line["links"] = encode_links(Ring().neighbours(seed, t, roster), roster)
        lines.append(line | dict(record or {}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if settings["rounds"] == len(scores):
        (path / "summary.json").write_text(
            json.dumps({"method": method, "versions": {"dispfl": "0.1.0"}})
        )
    if labels is not None:
        indices = {
            f"{part}/{k:03d}": torch.arange(3) for k in range(peers) for part in ("train", "test")
        }
        save_file({"label_counts": torch.tensor(labels), **indices}, path / "split.safetensors")
    return path


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write("a", [[0.5, 0.7]], method="local")`: a run of two peers and one round in
    tmp_path/a."""

    def run(name: str, scores: Scores, method: str = "dispfl", seed: int = 0, **more: Any) -> Path:
        return write_run(tmp_path / name, scores, method, seed, **more)

    return run
