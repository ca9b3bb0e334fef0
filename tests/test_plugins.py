"""A user's own components from the command line: of an installed package by short name, and of a
module by reference.

The package in tests/plugin is installed by pip into a temporary folder, which is put on the Python
path; all commands are processes of their own. `python -P` leaves the current directory out of the
path, as the installed `dispfl` does.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import dispfl
from dispfl.errors import PartitionError
from dispfl.peer.local_federation import free_ports

SOURCES = Path(dispfl.__file__).parent.parent
PLUGIN = Path(__file__).parent / "plugin"
TINY = ["peers=4", "rounds=3", "train.epochs=1", "partition.samples_per_peer=20", "workers=1"]
SHORT = ["method=median", "topology=star", "partition=sorted", "model=linear", "data=points"]
MINE = {
    "method": "my_module:Mine",
    "topology": "my_module:Star",
    "partition": "my_module:SortedLabels",
    "model": "my_module:linear",
    "data": "my_module:points",
}
MY_MODULE = """
import os
from pathlib import Path

# a module may use others
from dispfl_plugin import MedianDisPFL, SortedLabels, Star, linear, points


class Mine(MedianDisPFL):
    def step(self, trainer, state, received):
        if trainer.t == 1 and trainer.peer == "002" and Path("crash").exists():
            os._exit(9)
        return super().step(trainer, state, received)


def not_a_method():
    pass
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended and what it printed."""

    code: int
    printed: str


Command = Callable[..., Ended]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip installed the package."""
    source, target = (
        tmp_path_factory.mktemp("source") / "plugin",
        tmp_path_factory.mktemp("installed"),
    )
    shutil.copytree(PLUGIN, source, ignore=shutil.ignore_patterns("__pycache__"))
    options = [
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        *options,
        "--target",
        str(target),
        str(source),
    ]
    subprocess.run(command, check=True, timeout=240)
    return target


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The current directory of the commands, with a module of the user's."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "my_module.py").write_text(MY_MODULE)
    return folder


@pytest.fixture(scope="module")
def command(installed: Path, here: Path) -> Command:
    """`command("run", ...)`: the command line in a process of its own."""
    path = os.pathsep.join(map(str, (SOURCES, installed)))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}

    def call(*words: str | Path) -> Ended:
        program = [sys.executable, "-P", "-c", "from dispfl.cli import main; main()"]
        ended = subprocess.run(
            [*program, *map(str, words)],
            cwd=here,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        return Ended(ended.returncode, ended.stdout)

    return call


@pytest.fixture(scope="module")
def by_name(command: Command, here: Path) -> Path:
    """A run in which all five components have short names."""
    ended = command("run", *SHORT, *TINY, "--out", "by-name")
    assert ended.code == 0, ended.printed
    return here / "by-name"


def summary(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return content


def config(run: Path) -> dict[str, Any]:
    return tomllib.loads((run / "config.toml").read_text())


def results(run: Path) -> tuple[Any, ...]:
    found = summary(run)
    return found["weights_sha256"], found["scores"], found["logged"]


def test_installed_components_run_by_short_name_and_the_config_finds_them_again(
    by_name: Path,
) -> None:
    written = config(by_name)
    assert [written[key]["name"] for key in ("method", "topology", "partition")] == [
        "median",
        "star",
        "sorted",
    ]
    assert written["model"] == {"name": "custom", "factory": "dispfl_plugin:linear"}
    assert written["data"]["factory"] == "dispfl_plugin:points"
    assert summary(by_name)["method"] == "MedianDisPFL"


def test_references_in_a_config_file_survive_a_crash_and_give_the_same_bits(
    command: Command, here: Path, by_name: Path
) -> None:
    tables = "".join(
        f'{key} = "{reference}"\n' for key, reference in MINE.items() if key != "partition"
    )
    file = here / "mine.toml"
    file.write_text(f"{tables}[partition]\nname = '{MINE['partition']}'\nsamples_per_peer = 20\n")
    (here / "crash").touch()
    assert command("run", file, *TINY, "--out", "by-reference").code == 9
    (here / "crash").unlink()
    resumed = command("run", "--resume", "by-reference")
    assert resumed.code == 0, resumed.printed
    run = here / "by-reference"
    assert config(run)["method"]["name"] == "my_module:Mine"
    assert (
        config(run)["topology"]["name"] == "star"
    )  # the installed package has a shorter name for it
    assert summary(run)["method"] == "Mine"
    assert results(run) == results(by_name)


def test_compare_takes_names_and_references_and_resumes(
    command: Command, here: Path, by_name: Path
) -> None:
    words = [
        "compare",
        "halfway",
        "my_module:Mine",
        "local",
        "method.share=0.25",
        *SHORT[1:],
        *TINY,
        "--out",
        "grid",
    ]
    (here / "crash").touch()
    assert command(*words).code == 9
    (here / "crash").unlink()
    ended = command(*words)
    assert ended.code == 0, ended.printed
    assert "3 runs: 1 done" in ended.printed
    assert config(here / "grid/halfway/seed-0")["method"] == {
        "name": "halfway",
        "private": [],
        "share": 0.25,
    }
    assert summary(here / "grid/halfway/seed-0")["method"] == "half"
    assert results(here / "grid/my_module.Mine/seed-0") == results(by_name)
    assert "my_module:Mine" in (here / "grid/comparison.md").read_text()


def test_sweep_takes_names_and_references(command: Command, here: Path) -> None:
    words = ["topology=ring,star,my_module:Star", "method=my_module:Mine", *SHORT[2:], *TINY]
    ended = command("sweep", *words, "--out", "sweep")
    assert ended.code == 0, ended.printed
    ring, star, mine = (
        results(here / f"sweep/topology={name}/seed-0")
        for name in ("ring", "star", "my_module:Star")
    )
    assert ring != star == mine


def test_ray_workers_find_a_module_of_the_current_directory(
    command: Command, here: Path, by_name: Path
) -> None:
    pytest.importorskip("ray")
    words = [f"{key}={reference}" for key, reference in MINE.items()]
    ended = command("run", *words, *TINY, "engine=ray", "workers=2", "--out", "ray")
    assert ended.code == 0, ended.printed
    assert results(here / "ray") == results(by_name)


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("method=medain", "method 'medain' does not exist. Did you mean median?"),
        ("topology=sta", "topology 'sta' does not exist. Did you mean star?"),
        ("partition=sort", "partition 'sort' does not exist. Did you mean sorted?"),
        ("model=liner", "model 'liner' does not exist. Did you mean linear?"),
        ("data=point", "data 'point' does not exist. Did you mean points?"),
        (
            "method=my_modul:Mine",
            (
                "method names the module my_modul, which is neither in HERE nor on PYTHONPATH. Did"
                " you mean my_module?"
            ),
        ),
        (
            "method=my_module:Mien",
            "method is my_module:Mien, but my_module has no Mien. Did you mean Mine?",
        ),
        (
            "method=my_module:not_a_method",
            (
                "method my_module:not_a_method must be a subclass of dispfl.GossipMethod or"
                " dispfl.ServerMethod, got a function. Known: Mine."
            ),
        ),
        (
            "method=broken",
            (
                "method names the module dispfl_plugin_that_is_missing, which is not installed"
                " completely."
            ),
        ),
        (
            "method=median method.densty=0.1",
            "Unknown key method.densty. Did you mean method.density?",
        ),
    ],
)
def test_a_typo_is_one_sentence_with_the_nearest_name(
    word: str, sentence: str, installed: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, to save time: `compose` is what all commands call."""
    from dispfl import registry
    from dispfl.config import compose
    from dispfl.errors import ConfigError

    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.chdir(here)
    registry._installed.cache_clear()
    try:
        with pytest.raises(ConfigError) as caught:
            compose({}, word.split())
    finally:
        registry._installed.cache_clear()
    assert str(caught.value) == sentence.replace("HERE", str(here))


@pytest.mark.parametrize("counts", [[[4, 0], [4, 0]], [[-1, 3], [1, 1]], [[1, 1]], [[1], [1]]])
def test_a_partition_that_gives_what_is_not_there_is_one_sentence(counts: list[list[int]]) -> None:
    class Generous(dispfl.Partition):
        def class_counts(self, supply: object, sizes: object, rng: object) -> Any:
            return counts

    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    with pytest.raises(PartitionError) as caught:
        Generous().split(labels, labels, 2, rng=torch.Generator())
    assert (
        str(caught.value)
        == "class_counts of partition Generous must return 2 x 2 numbers of at least 0 whose"
        f" column sums are at most [3, 3], got {counts}."
    )


def test_real_peers_run_the_components_of_a_module_like_a_simulation(
    command: Command, here: Path
) -> None:
    words = [f"{key}={reference}" for key, reference in MINE.items() if key != "topology"]
    settings = [*words, "topology=full", "peers=3", "rounds=2", "train.epochs=1"]
    ended = command("up", *settings, "--out", "up")
    assert ended.code == 0, ended.printed
    simulated = command("run", *settings, "--out", "simulated")
    assert simulated.code == 0, simulated.printed
    assert results(here / "up") == results(here / "simulated")
    assert list(summary(here / "up")["logged"]) == ["largest"]


def test_a_site_runs_components_of_a_package_and_of_a_module_in_its_own_folder(
    command: Command, here: Path
) -> None:
    made = command(
        *("peer", "init", "site", "method=median", "model=linear", "data=points", "rounds=2"),
        *("--name", "alice", "--listen", f"127.0.0.1:{free_ports(1)[0]}"),
    )
    assert made.code == 0, made.printed
    site = (here / "site" / "site.toml").read_text()
    assert re.search(r'name = "median"', site), site
    (here / "site" / "only_here.py").write_text((here / "my_module.py").read_text())
    (here / "site" / "site.toml").write_text(
        site.replace('name = "median"', 'name = "only_here:Mine"')
    )
    ended = command("peer", "run", "site", "--alone")
    assert ended.code == 0, ended.printed
    shown = command("show", "site", "--json")
    assert json.loads(shown.printed)["rounds"] == 2, shown.printed
