"""Code that a config names is imported for folders which this user made, or trusts; nothing else.

`evil` modules leave a file behind when they are imported. `forget` is what another process of the
same user starts with.
"""

import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from messages import refused
from program import Dispfl, dispfl

from dispfl.config import compose
from dispfl.errors import ConfigError
from dispfl.peer.local_federation import free_ports
from dispfl.peer.peer import Peer
from dispfl.runs.execute import ExperimentRun, run_experiment
from dispfl.runs.run import Run
from dispfl.trust import FOLDER_ID, _accepted, named_code

__all__ = ["dispfl"]

TINY = [
    "peers=4",
    "rounds=1",
    "topology=full",
    "partition.samples_per_peer=20",
    "partition.test_samples_per_peer=10",
    "train.epochs=1",
]
LEAVES_A_FILE = "from pathlib import Path\n\nPath('imported').touch()\n"
METHOD = "from dispfl.methods.local import Local\n\n\nclass Mine(Local):\n    pass\n"
NET = (
    "from torch import nn\n\n\ndef net(shape, classes):\n    return nn.Linear(shape[0], classes)\n"
)

CODE: dict[str, tuple[str, Any]] = {
    "method": ("method", {"name": "evil:Evil"}),
    "topology": ("topology", {"name": "evil:Evil"}),
    "partition": ("partition", {"name": "evil:Evil"}),
    "model.factory": ("model", {"name": "custom", "factory": "evil:net"}),
    "data.factory": ("data", {"name": "custom", "factory": "evil:load"}),
    "metric": ("metric", ["accuracy", "evil:score"]),
}
"""The tables of a config that name code, by the key that a refusal names."""


@pytest.fixture(autouse=True)
def forget() -> Callable[[], None]:
    """Nothing is left of what this process has accepted before."""
    _accepted.clear()
    return _accepted.clear


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a module that leaves a file behind when it is imported."""
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "evil.py").write_text(LEAVES_A_FILE)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with built-in components."""
    path = tmp_path_factory.mktemp("runs") / "finished"
    ExperimentRun.create(compose({}, TINY), path).run()
    return path


@pytest.fixture
def received(finished: Path, tmp_path: Path, here: Path) -> Callable[[str], Path]:
    """`received("model.factory")`: a run directory of somebody else whose config names code."""

    def copy(key: str) -> Path:
        path = tmp_path / "received"
        shutil.copytree(finished, path)
        table, value = CODE[key]
        change_config(path, {table: value})
        return path

    return copy


def change_config(path: Path, changes: dict[str, Any]) -> None:
    config = tomllib.loads((path / "config.toml").read_text())
    (path / "config.toml").write_text(tomli_w.dumps(config | changes))


COMMANDS: dict[str, Callable[[Path], list[str | Path]]] = {
    "export": lambda run: ["export", run, "--peer", "1", "--to", "model.safetensors"],
    "audit": lambda run: ["audit", run, "--shadows", "0", "--canaries", "0"],
    "run --resume": lambda run: ["run", "--resume", run],
    "up --resume": lambda run: ["up", "--resume", run],
}


@pytest.mark.parametrize("key", CODE)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_does_not_run_the_code_that_a_received_run_names(
    command: str, key: str, received: Callable[[str], Path], here: Path, dispfl: Dispfl
) -> None:
    ended = dispfl(*COMMANDS[command](received(key)))
    assert ended.code == 1
    assert f"dispfl: {key} is evil:" in ended.err
    assert "--trust" in ended.err
    assert not (here / "imported").exists()


@pytest.mark.parametrize("key", CODE)
@pytest.mark.parametrize("command", ["show", "report", "masks", "bound"])
def test_commands_that_only_read_import_nothing(
    command: str, key: str, received: Callable[[str], Path], here: Path, dispfl: Dispfl
) -> None:
    dispfl(command, received(key))
    assert not (here / "imported").exists()


@pytest.mark.parametrize("key", CODE)
def test_in_python_a_received_run_is_loaded_without_its_code(
    key: str, received: Callable[[str], Path], here: Path
) -> None:
    run = Run.load(received(key))
    assert len(run.states) == len(run.accuracy) == 4
    with refused(ConfigError, key=key):
        run.model(0)
    assert not (here / "imported").exists()


def test_trust_runs_the_code_and_is_remembered(
    received: Callable[[str], Path], here: Path, dispfl: Dispfl, forget: Callable[[], None]
) -> None:
    (here / "trusted.py").write_text(METHOD + LEAVES_A_FILE)
    path = received("method")
    change_config(path, {"method": {"name": "trusted:Mine"}})
    export = COMMANDS["export"](path)
    assert dispfl(*export).code == 1
    assert dispfl(*export, "--trust").code == 0
    assert (here / "imported").exists()
    forget()
    assert dispfl(*export).code == 0


def test_code_inside_a_run_directory_is_never_imported(
    received: Callable[[str], Path], dispfl: Dispfl, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = received("method")
    (path / "inside.py").write_text(METHOD + LEAVES_A_FILE)
    change_config(path, {"method": {"name": "inside:Mine"}})
    monkeypatch.chdir(path)
    ended = dispfl("export", ".", "--peer", "1", "--to", "model.safetensors", "--trust")
    assert ended.code == 1
    assert "inside:Mine, a module inside ." in ended.err
    assert not (path / "imported").exists()


@pytest.fixture
def own(here: Path, dispfl: Dispfl, forget: Callable[[], None]) -> Path:
    """A run of this user with their own method, made by an earlier process."""
    (here / "mine_of_user.py").write_text(METHOD)
    sys.modules.pop("mine_of_user", None)  # that of another test
    ended = dispfl("run", *TINY, "method=mine_of_user:Mine", "--out", "own")
    assert ended.code == 0, ended.err
    forget()
    return here / "own"


def test_what_a_user_made_needs_no_trust(own: Path, dispfl: Dispfl) -> None:
    assert dispfl(*COMMANDS["export"](own)).code == 0
    assert dispfl(*COMMANDS["audit"](own)).code == 0
    assert dispfl("run", "--resume", own).code == 0
    assert Run.load(own).model(0) is not None


def test_a_copy_a_moved_folder_and_another_one_in_its_place_are_not_the_users_own(
    own: Path, dispfl: Dispfl
) -> None:
    copy = own.with_name("copy")
    shutil.copytree(own, copy)
    assert dispfl(*COMMANDS["export"](copy)).code == 1

    (copy / FOLDER_ID).unlink()
    shutil.rmtree(own)
    copy.rename(own)
    assert dispfl(*COMMANDS["export"](own)).code == 1


def test_a_config_that_names_other_code_is_not_the_users_own(own: Path, dispfl: Dispfl) -> None:
    change_config(own, {"metric": ["evil:score"]})
    ended = dispfl(*COMMANDS["export"](own))
    assert (ended.code, (own.parent / "imported").exists()) == (1, False)
    assert "metric is evil:score" in ended.err


def test_without_a_state_directory_only_this_process_remembers(
    here: Path, dispfl: Dispfl, forget: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "state").write_text("a file, no folder")
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "state"))
    (here / "mine_without_home.py").write_text(METHOD)
    words = ["run", *TINY, "method=mine_without_home:Mine", "--out", "own"]
    assert dispfl(*words).code == 0
    export = COMMANDS["export"](here / "own")
    assert dispfl(*export).code == 0
    forget()
    assert dispfl(*export).code == 1
    assert dispfl(*export, "--trust").code == 0


def test_a_run_that_another_machine_began_is_resumed_by_a_config_with_the_same_code(
    own: Path, forget: Callable[[], None]
) -> None:
    (own / FOLDER_ID).unlink()
    experiment = compose({}, [*TINY, "method=mine_of_user:Mine"])
    assert len(run_experiment(experiment, own, resume=True).metrics) == 1


def test_all_code_of_a_config_is_found() -> None:
    config = {
        "method": "a:A",
        "topology": {"name": "b:B"},
        "partition": {"name": "iid"},
        "model": "c:net",
        "data": {"factory": "d:load"},
        "metric": ["accuracy", "e:one", "e:two"],
    }
    assert named_code(config) == (
        ("data.factory", "d:load"),
        ("method", "a:A"),
        ("metric", "e:one"),
        ("metric", "e:two"),
        ("model.factory", "c:net"),
        ("topology", "b:B"),
    )


# sites


@pytest.fixture
def init(here: Path) -> Callable[..., Peer]:
    """`init(config, "rounds=1")`: a new site with the config of a federation."""

    def create(config: dict[str, Any], *overrides: str, **options: Any) -> Peer:
        file = here / "federation.toml"
        file.write_text(tomli_w.dumps(config))
        return Peer.create(
            here / "site",
            name="alice",
            listen=f"127.0.0.1:{free_ports(1)[0]}",
            config=file,
            overrides=["rounds=1", *overrides],
            **options,
        )

    return create


@pytest.mark.parametrize("key", ["model.factory", "data.factory", "metric"])
def test_the_config_of_a_federation_cannot_name_code_of_its_own(
    key: str, init: Callable[..., Peer], here: Path, dispfl: Dispfl
) -> None:
    table, value = CODE[key]
    site = init({table: value}).folder
    for command in (["peer", "doctor", site], ["peer", "run", site, "--alone"]):
        ended = dispfl(*command)
        assert ended.code == 1
        text = " ".join((ended.out + ended.err).split())
        assert f"{key} is evil:" in text
        assert "--allow-module evil" in text
    assert not (here / "imported").exists()


@pytest.mark.parametrize("key", ["method", "topology"])
def test_a_new_site_does_not_import_the_components_of_its_config(
    key: str, init: Callable[..., Peer], here: Path
) -> None:
    table, value = CODE[key]
    with refused(ConfigError, key=key):
        init({table: value})
    assert not (here / "imported").exists()


def test_the_config_of_a_federation_cannot_allow_modules(init: Callable[..., Peer]) -> None:
    with refused(ConfigError, key="allow_modules"):
        init({"allow_modules": ["evil"], "model": {"factory": "evil:net"}})


def test_a_site_imports_from_its_own_folder_and_from_what_its_operator_allows(
    init: Callable[..., Peer], here: Path, forget: Callable[[], None]
) -> None:
    peer = init({"model": {"factory": "net_of_site:net"}})
    (peer.folder / "net_of_site.py").write_text(NET)
    forget()
    assert Peer.open(peer.folder).site.config().model.name == "custom"

    shutil.rmtree(peer.folder)
    allowed = init({"model": {"factory": "package.nets:net"}}, allow_modules=["package"])
    assert allowed.site.config().model.name == "custom"

    shutil.rmtree(peer.folder)
    named = init({}, "model.factory=somewhere:net")
    assert named.site.info.allow_modules == ("somewhere",)
    assert named.site.config().model.name == "custom"


def test_a_received_site_needs_trust(
    init: Callable[..., Peer], here: Path, tmp_path: Path, dispfl: Dispfl
) -> None:
    folder = init({"model": {"factory": "inside_site:net"}}).folder
    (folder / "inside_site.py").write_text(LEAVES_A_FILE + NET)
    received = tmp_path / "received"
    shutil.copytree(folder, received)
    ended = dispfl("peer", "run", received, "--alone")
    assert ended.code == 1
    assert "model.factory is inside_site:net" in ended.err
    assert not (here / "imported").exists()
    with refused(ConfigError, key="model.factory"):
        Peer.open(received).site.config()
    assert Peer.open(received, trust=True).site.config().model.name == "custom"
