"""Components by name and by reference: what is found, what is written to configs, and what is
refused."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pytest

from dispfl import registry
from dispfl.config import compose
from dispfl.errors import ConfigError
from dispfl.experiment import Experiment
from dispfl.methods.base import GossipMethod, Method
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.dpsgd import DPSGD
from dispfl.methods.finetuned import FineTuned
from dispfl.registry import METHODS, PARTITIONS, REGISTRIES, TOPOLOGIES, Registry
from dispfl.topology import Ring

MODULE = """
from typing import Literal
import dispfl
from dispfl import GossipMethod, IID, Local, Ring

class Mine(Local):
    strength: float = 0.5

class Named(Local):
    name: Literal["called"] = "called"

class Incomplete(GossipMethod):
    pass

class Circle(Ring):
    pass

class Same(IID):
    pass

number = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a module of the user's; both are forgotten afterwards."""
    (tmp_path / "own_components.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_components", raising=False)
    return tmp_path


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The entry points of methods, as if packages had declared them."""
    declared: dict[str, str] = {}
    monkeypatch.setattr(
        registry, "_installed", lambda group: declared if group == "dispfl.methods" else {}
    )
    return declared


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose({}, overrides)
    return str(caught.value)


@pytest.mark.parametrize("components", REGISTRIES.values(), ids=lambda components: components.table)
def test_a_registry_is_a_mapping_from_names_to_classes_that_call_themselves_so(
    components: Registry,
) -> None:
    assert isinstance(components, Mapping)
    assert len(components) == len(list(components)) >= 4
    for name, kind in components.items():
        assert name in components
        assert kind.model_fields["name"].default == name
        assert components.find(name) is kind
        component = kind([[0, 1], [1, 0]]) if name == "file" else kind()
        assert components.name_of(component) == name
    assert "nothing" not in components
    assert components.get("nothing") is None
    with pytest.raises(KeyError):
        components["nothing"]


def test_a_class_without_a_name_is_called_by_its_own_name() -> None:
    class Plain(DisPFL):
        pass

    class Called(DisPFL):
        name: Literal["by me"] = "by me"  # type: ignore[assignment]

    class Tuned(FineTuned, DPSGD):
        pass

    class Below(Called):
        pass

    assert [kind().name for kind in (Plain, Called, Tuned, Below)] == [
        "Plain",
        "by me",
        "Tuned",
        "Below",
    ]
    assert Plain() == Plain(name="Plain")  # type: ignore[arg-type]
    assert Plain() != DisPFL()
    assert DisPFL().name == "dispfl"


@pytest.mark.usefixtures("here")
def test_a_reference_is_found_in_the_current_directory_and_written_to_the_config() -> None:
    made = compose(
        {
            "method": {"name": "own_components:Mine", "strength": 0.1},
            "partition": "own_components:Same",
        },
        ["topology=own_components:Circle", "topology.offline_prob=0.5"],
    )
    assert (made.method.name, made.topology.name, made.partition.name) == ("Mine", "Circle", "Same")
    written = made.to_toml()
    assert written["method"] == {
        "name": "own_components:Mine",
        "private": [],
        "strength": 0.1,
    }
    assert written["topology"]["name"] == "own_components:Circle"
    assert written["partition"]["name"] == "own_components:Same"
    assert compose(written) == made
    assert (
        compose(written, ["method=own_components:Mine"]).method == made.method
    )  # the same name keeps the settings
    assert compose(written, ["method=local"]).to_toml()["method"] == {
        "name": "local",
        "private": [],
    }


@pytest.mark.usefixtures("here")
def test_a_class_with_a_name_of_its_own_is_still_found_by_reference() -> None:
    made = compose({}, ["method=own_components:Named"])
    assert made.method.name == "called"
    assert made.to_toml()["method"] == {"name": "own_components:Named", "private": []}
    assert compose(made.to_toml()) == made


def test_a_site_has_modules_in_its_own_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = here / "site"
    site.mkdir()
    (site / "sites_components.py").write_text(MODULE)
    assert METHODS.find("sites_components:Mine", site).__module__ == "sites_components"
    assert METHODS.find("own_components:Mine", site).__module__ == "own_components"
    monkeypatch.delitem(sys.modules, "sites_components")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("method=dispf", "method 'dispf' does not exist. Did you mean dispfl?"),
        ("method=", "method '' does not exist. Known: "),
        (
            "method=own_component:Mine",
            (
                "method names the module own_component, which is neither in HERE nor on PYTHONPATH."
                " Did you mean own_components?"
            ),
        ),
        (
            "method=own_components.py:Mine",
            (
                "method names the module own_components.py, which is neither in HERE nor on"
                " PYTHONPATH. Did you mean own_components?"
            ),
        ),
        (
            "method=own_components:Mines",
            "method is own_components:Mines, but own_components has no Mines. Did you mean ",
        ),
        (
            "method=own_components:Circle",
            (
                "method own_components:Circle must be a subclass of dispfl.GossipMethod or"
                " dispfl.ServerMethod, got the class Circle. "
            ),
        ),
        (
            "topology=own_components:Mine",
            (
                "topology own_components:Mine must be a subclass of dispfl.Topology, got the class"
                " Mine. Known: Circle."
            ),
        ),
        (
            "partition=own_components:number",
            (
                "partition own_components:number must be a subclass of dispfl.Partition, got an"
                " int. Known: Same."
            ),
        ),
        (
            "method=own_components:Incomplete",
            "method own_components:Incomplete is incomplete: define step in Incomplete.",
        ),
        (
            "method=own/components:Mine",
            (
                "method must be a name or module:Class, got 'own/components:Mine'; for example"
                " mine:MyClass for the class MyClass in mine.py."
            ),
        ),
        ("model=cn", "model 'cn' does not exist. Did you mean cnn?"),
        ("data=cifar1", "data 'cifar1' does not exist. Did you mean cifar10?"),
        (
            "model=own components:net",
            (
                "model.factory must be module:function, got 'own components:net'; for example"
                " mine:load for load() in mine.py."
            ),
        ),
    ],
)
def test_what_does_not_exist_is_one_sentence(here: Path, override: str, sentence: str) -> None:
    said = refusal(override)
    assert said.startswith(sentence.replace("HERE", str(here)))
    assert "\n" not in said


def test_a_key_of_a_users_class_is_checked_like_any_other(here: Path) -> None:
    mine = "method=own_components:Mine"
    assert (
        refusal(mine, "method.strenght=1")
        == "Unknown key method.strenght. Did you mean method.strength?"
    )
    assert refusal(mine, "method.strength=much") == "method.strength must be a number, got 'much'."


@pytest.mark.usefixtures("here")
def test_models_and_data_sets_are_functions() -> None:
    made = compose({}, ["model=own_components:net", "data=own_components:load", "data.classes=a,b"])
    assert made.to_toml()["model"] == {"name": "custom", "factory": "own_components:net"}
    assert made.to_toml()["data"]["factory"] == "own_components:load"
    assert made.to_toml()["data"]["classes"] == ["a", "b"]
    assert compose(made.to_toml()) == made


def test_entry_points_add_short_names_below_the_built_in_ones(
    here: Path, entry_points: dict[str, str]
) -> None:
    sys.path.insert(0, str(here))
    entry_points |= {"mine": "own_components:Mine", "local": "own_components:Named"}
    assert compose({}, ["method=mine"]).to_toml()["method"] == {
        "name": "mine",
        "private": [],
        "strength": 0.5,
    }
    assert compose({}, ["method=own_components:Mine"]).to_toml()["method"]["name"] == "mine"
    assert compose({}, ["method=local"]).method.name == "local"
    assert list(METHODS)[-1] == "mine"
    assert len(METHODS) == len(list(METHODS)) == len(METHODS.built_in_classes()) + 1
    assert refusal("method=min") == "method 'min' does not exist. Did you mean mine?"


def test_a_package_that_does_not_load_is_only_noticed_by_who_uses_it(
    entry_points: dict[str, str],
) -> None:
    entry_points |= {"broken": "missing_package:Method"}
    assert "broken" in METHODS
    assert compose({}, ["method=dispfl"]).method == DisPFL()
    assert refusal("nonsense=1").startswith("Unknown key nonsense.")
    assert (
        refusal("method=broken")
        == "method names the module missing_package, which is not installed completely."
    )


def test_a_class_that_its_package_exports_elsewhere_has_its_short_name(
    entry_points: dict[str, str],
) -> None:
    entry_points |= {"ours": "dispfl:DPSGD"}  # defined in dispfl.methods.dpsgd

    class Other(GossipMethod):
        def step(self, trainer, state, received):  # type: ignore[no-untyped-def]
            return state

    assert METHODS["ours"] is DPSGD
    assert METHODS.name_of(DPSGD()) == "dpsgd"  # built-in names have priority
    assert METHODS.name_of(Other()).endswith("<locals>.Other")


def test_objects_are_taken_as_they_are() -> None:
    assert Experiment(method=DisPFL(density=0.3), topology=Ring()).method == DisPFL(density=0.3)
    assert issubclass(METHODS["dispfl"], Method)
    assert TOPOLOGIES["ring"] is Ring
    assert set(PARTITIONS) == {"dirichlet", "grouped", "pathological", "iid", "by_column"}


def test_listing_components_loads_neither_torch_nor_a_plug_in() -> None:
    code = (
        "import sys; from dispfl.registry import METHODS; print(len(METHODS), 'torch' in"
        " sys.modules)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert printed.stdout.split() == [str(len(METHODS)), "False"]
