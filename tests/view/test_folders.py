"""What is found below folders, and under which address."""

from collections.abc import Callable
from pathlib import Path

from messages import refused

from dispfl.errors import RunError
from dispfl.view.folders import WatchedFolders

Write = Callable[..., Path]


def test_runs_are_found_by_address_in_natural_order_and_grouped_by_comparison(
    write: Write, tmp_path: Path
) -> None:
    for seed in (10, 2):
        write(f"runs/five/local/seed-{seed}", [[0.5]])
    write("runs/single", [[0.5]])
    found = WatchedFolders([tmp_path / "runs"]).search()
    assert list(found.runs) == ["runs/five/local/seed-2", "runs/five/local/seed-10", "runs/single"]
    assert found.groups() == {
        "runs/five": ["runs/five/local/seed-2", "runs/five/local/seed-10"],
        "runs": ["runs/single"],
    }
    assert found.runs_below("runs/five/local") == list(found.runs.values())[:2]
    assert found.runs_below("runs/fiv") == []


def test_folders_of_the_same_name_have_different_addresses(write: Write, tmp_path: Path) -> None:
    paths = [write(f"{place}/run", [[0.5]]) for place in ("a", "b")]
    assert WatchedFolders(paths).search().runs == {"run": paths[0], "run-2": paths[1]}


def test_neither_links_nor_the_folders_of_a_run_nor_hidden_ones_are_entered(
    write: Write, tmp_path: Path
) -> None:
    outside = write("outside/secret", [[0.5]])
    inside = write("runs/one", [[0.5]])
    (tmp_path / "runs/link").symlink_to(outside)
    write("runs/one/checkpoints/copy", [[0.5]])
    write("runs/.trash/old", [[0.5]])
    assert WatchedFolders([tmp_path / "runs"]).search().runs == {"runs/one": inside}


def test_the_sites_of_a_run_are_found(write: Write, tmp_path: Path) -> None:
    run = write("up", [[0.5]])
    site = run / "sites" / "000"
    (site / "run").mkdir(parents=True)
    (site / "site.toml").touch()
    (site / "run" / "config.toml").touch()  # a part of the site, not a run
    found = WatchedFolders([run]).search()
    assert (list(found.runs), found.sites) == (["up"], {"up/sites/000": site})


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused(RunError):
        WatchedFolders([tmp_path / "file"])
