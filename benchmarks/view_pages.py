"""The pages of `dispfl view`: the list of a thousand runs, and the page of a run of 4,000 peers.

The first ratio is the time to open the list (folders searched, runs read, page drawn) to 2 seconds,
the second the size of the page about 4,000 peers and 20 rounds to 2 MB; both limits are 1. The time
of that page is printed too. The files are those of a small real run, with its lines repeated for
more rounds and its peers for more peers.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w
import torch
from safetensors.torch import save_file

from dispfl import RandomRegular, run
from dispfl.report.html import HtmlPage
from dispfl.runs.directory import json_line, read_config, read_metrics
from dispfl.runs.links import encode_links
from dispfl.topology import peer_names
from dispfl.view.pages import RunPages
from measure import report

RUNS = 1000
ROUNDS = 30
SECONDS = 2.0
PEERS = 4000
MANY_PEERS_ROUNDS = 20
DEGREE = 10
BYTES = 2e6


def main() -> None:
    """Both pages."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(peers=20, rounds=2, workers=1, out=folder / "small")
        open_list(folder / "small", folder / "runs")
        open_large_run(folder / "small", folder / "large")


def open_list(small: Path, folder: Path) -> None:
    """A thousand runs in comparisons of ten, some of them interrupted."""
    record = read_metrics(small)[-1]
    lines = b"".join(json_line(record | {"round": t}) for t in range(ROUNDS))
    for number in range(RUNS):
        path = folder / f"comparison-{number // 10}" / "dispfl" / f"seed-{number % 10}"
        path.mkdir(parents=True)
        shutil.copy(small / "config.toml", path)
        (path / "metrics.jsonl").write_bytes(lines)
        if number % 10:
            shutil.copy(small / "summary.json", path)
    seconds, page, size = opened(RunPages([folder]).find, "")
    rows = sum(html.count("<tr ") for html in page.parts.values())
    assert rows >= RUNS, rows
    report("view_list", seconds / SECONDS, 1.0, seconds=round(seconds, 2), bytes=size)


def open_large_run(small: Path, folder: Path) -> None:
    """A run of many peers."""
    config = read_config(small)
    roster = peer_names(PEERS)
    topology = RandomRegular(degree=DEGREE)
    folder.mkdir()
    settings = config | {"peers": PEERS, "rounds": MANY_PEERS_ROUNDS}
    (folder / "config.toml").write_bytes(tomli_w.dumps(settings).encode())
    record = repeated(read_metrics(small)[-1], PEERS // config["peers"])
    lines = []
    for t in range(MANY_PEERS_ROUNDS):
        neighbours = topology.neighbours(0, t, roster)
        record["links"] = encode_links(neighbours, roster)
        record["traffic"] = {peer: [1e6 + t, 1e6] for peer in roster}
        lines.append(json_line(record | {"round": t}))
    (folder / "metrics.jsonl").write_bytes(b"".join(lines))
    shutil.copy(small / "summary.json", folder)
    rows = {
        f"{part}/{peer}": torch.zeros(1, dtype=torch.int64)
        for part in ("train", "test")
        for peer in roster
    }
    save_file({"label_counts": torch.randint(9, (PEERS, 10)), **rows}, folder / "split.safetensors")
    seconds, _, size = opened(RunPages([folder]).find, folder.name)
    report("view_large_run", size / BYTES, 1.0, seconds=round(seconds, 2), bytes=size)


def repeated(record: Any, times: int) -> Any:
    """Return a line of the metrics with each peer's numbers repeated."""
    if not isinstance(record, dict):
        return record
    lists = {key: value * times for key, value in record.items() if key == "per_peer"}
    others = {key: repeated(value, times) for key, value in record.items() if key != "per_peer"}
    content: dict[str, Any] = json.loads(json.dumps(others | lists))
    return content


def opened(
    find: Callable[[str], Callable[[], HtmlPage] | None], address: str
) -> tuple[float, HtmlPage, int]:
    """Return the seconds until a page is drawn, the page, and its bytes."""
    began = time.perf_counter()
    draw = find(address)
    assert draw is not None
    page = draw()
    size = len(page.html("/events/").encode())
    return time.perf_counter() - began, page, size


if __name__ == "__main__":
    main()
