"""How a config names a site's own data and model: keys that go together, and sentences for those that do not."""

import tomllib

import pytest
import tomli_w

from dispfl.config import compose
from dispfl.data.datasets import Data
from dispfl.data.own.settings import OwnData
from dispfl.errors import ConfigError
from dispfl.models.own import OwnModel
from dispfl.models.registry import Model


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose({}, words)
    return str(caught.value)


def test_a_path_alone_says_that_the_data_are_ones_own() -> None:
    assert compose({}, ["data.path=site.csv"]).data == OwnData(path="site.csv")
    assert compose({"data": {"path": "site.csv", "classes": [0, 1]}}).data == OwnData(
        path="site.csv", classes=("0", "1")
    )


def test_a_factory_alone_says_that_the_model_is_ones_own() -> None:
    made = compose({"model": {"factory": "mine:net"}})
    assert made.model == OwnModel(factory="mine:net")
    assert made.data == Data(augment=False)  # the demo's, of which nothing was said


def test_a_word_lies_over_the_file_and_a_name_drops_what_the_file_said() -> None:
    file = {"data": {"path": "site.csv", "label": "kind"}, "model": {"factory": "mine:net"}}
    assert compose(file, ["data.standardize=true"]).data == OwnData(path="site.csv", label="kind", standardize=True)
    assert compose(file, ["data=cifar10", "model=resnet18"]).data == Data(name="cifar10")
    assert compose(file, ["data=cifar10", "model=resnet18"]).model == Model(name="resnet18")


def test_written_as_toml_and_read_again_it_is_the_same() -> None:
    words = ["data.path=pets", "data.classes=cat,dog", "data.size=64", "data.test_share=0.3", "model.factory=a.b:c"]
    experiment = compose({}, words)
    assert compose(tomllib.loads(tomli_w.dumps(experiment.to_toml()))) == experiment


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["data=own"], "data.path is missing: name a CSV file, an NPZ file or a folder; or give data.factory."),
        (["model=own"], "model.factory is missing; give it a value."),
        (["data.label=kind"], "data.label goes with data.path or data.factory; give that too."),
        (
            ["data=cifar10", "data.path=site.csv"],
            "data.path and data.name=cifar10 exclude each other; leave one away.",
        ),
        (["model=cnn", "model.factory=a:b"], "model.factory and model.name=cnn exclude each other; leave one away."),
        (["data.path=a", "data.factory=a:b"], "data.path and data.factory exclude each other; leave one away."),
        (
            ["data.path=a", "data.test_path=b", "data.test_share=0.5"],
            "data.test_path and data.test_share exclude each other; leave one away.",
        ),
        (
            ["data.factory=a:b", "data.standardize=true"],
            "data.standardize does not apply: data.factory=a:b returns data as they are used. Leave it away.",
        ),
        (
            ["data.factory=mine.py"],
            "data.factory must be module:function, got 'mine.py'; for example mine:load for load() in mine.py.",
        ),
        (
            ["model.factory=mine:net()"],
            "model.factory must be module:function, got 'mine:net()'; for example mine:load for load() in mine.py.",
        ),
        (["data.path=a", "data.lable=b"], "Unknown key data.lable. Did you mean data.label?"),
        (["data.path=a", "data.size=2"], "data.size must be in [8, 4096], got 2."),
        (["data.path=a", "data.test_share=1"], "data.test_share must be in (0, 1), got 1."),
        (["data.path=a", "data.classes=cat"], "data.classes must be a list of at least two names, got 'cat'."),
        (["data.path=a", "data.classes=[1]"], "data.classes must be a list of at least two names, got ['1']."),
        (["data.path=a", "data.classes=a,b,a"], "data.classes names 'a' twice; give each class once."),
    ],
)
def test_a_config_that_cannot_be_is_one_sentence(words: list[str], sentence: str) -> None:
    assert refusal(*words) == sentence


def test_what_came_from_elsewhere_cannot_name_a_function_to_call() -> None:
    """An exported model's card is read as `Model`."""
    with pytest.raises(ConfigError, match=r"^Unknown key model\.factory\."):
        Model(name="cnn", factory="os:abort")
    with pytest.raises(ConfigError, match=r"^model\.name 'own' does not exist\."):
        Model(name="own")
