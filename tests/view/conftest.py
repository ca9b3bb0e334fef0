"""Folders of handwritten runs, as in the tests of the report."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from recorded_runs import a_line, scored, spread

from dispfl.runs.links import encode_links
from dispfl.topology import Ring, peer_names

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write("runs/a", [[0.5, 0.7]])`: a run of two peers and one round; `rounds` may be more."""

    def run(
        name: str, scores: Sequence[Sequence[float]], rounds: int | None = None, **config: Any
    ) -> Path:
        path = tmp_path / name
        path.mkdir(parents=True)
        peers = len(scores[0]) if scores else 2
        roster = peer_names(peers)
        settings = {
            "seed": 0,
            "rounds": rounds or len(scores),
            "peers": peers,
            "method": {"name": "dispfl"},
            "topology": {"name": "ring"},
            **config,
        }
        (path / "config.toml").write_bytes(tomli_w.dumps(settings).encode())
        lines = []
        for t, of_peers in enumerate(scores):
            line = a_line(t, scored(spread(of_peers)), peers=peers)
            line["links"] = encode_links(Ring().neighbours(0, t, roster), roster)
            lines.append(json.dumps(line) + "\n")
        (path / "metrics.jsonl").write_text("".join(lines))
        if settings["rounds"] == len(scores):
            summary = {
                "method": "dispfl",
                "peers": peers,
                "rounds": len(scores),
                "metric": "accuracy",
                "scores": scored(spread(scores[-1])),
            }
            (path / "summary.json").write_text(json.dumps(summary))
        return path

    return run
