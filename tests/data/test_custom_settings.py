"""Settings of custom data and models: which keys go together, and the errors for those that do
not."""

import tomllib

import pytest
import tomli_w
from messages import refused

from dispfl.config import compose
from dispfl.data.datasets import CustomData, Data
from dispfl.errors import ConfigError
from dispfl.models.settings import CustomModel, Model


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose({}, arguments)
    return str(caught.value)


def test_a_path_alone_implies_custom_data() -> None:
    assert compose({}, ["data.path=site.csv"]).data == CustomData(path="site.csv")
    assert compose({"data": {"path": "site.csv", "classes": [0, 1]}}).data == CustomData(
        path="site.csv", classes=("0", "1")
    )


def test_a_factory_alone_implies_a_custom_model() -> None:
    experiment = compose({"model": {"factory": "mine:net"}})
    assert experiment.model == CustomModel(factory="mine:net")
    assert experiment.data == Data(augment=False)  # the default


def test_an_override_changes_one_key_and_a_name_replaces_the_table() -> None:
    file = {"data": {"path": "site.csv", "label": "kind"}, "model": {"factory": "mine:net"}}
    assert compose(file, ["data.standardize=true"]).data == CustomData(
        path="site.csv", label="kind", standardize=True
    )
    assert compose(file, ["data=cifar10", "model=resnet18"]).data == Data(name="cifar10")
    assert compose(file, ["data=cifar10", "model=resnet18"]).model == Model(name="resnet18")


def test_toml_round_trip_gives_the_same_experiment() -> None:
    arguments = [
        "data.path=pets",
        "data.classes=cat,dog",
        "data.size=64",
        "data.test_share=0.3",
        "model.factory=a.b:c",
    ]
    experiment = compose({}, arguments)
    assert compose(tomllib.loads(tomli_w.dumps(experiment.to_toml()))) == experiment


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["data=custom"],
            (
                "data.path is missing: name a CSV file, an NPZ file or a folder; or give data.hub"
                " or data.factory."
            ),
        ),
        (["model=custom"], "model.factory is missing; give it a value."),
        (
            ["data.label=kind"],
            "data.label requires data.path, data.hub or data.factory; set that too.",
        ),
        (
            ["data=cifar10", "data.path=site.csv"],
            "data.path and data.name=cifar10 exclude each other; omit one of them.",
        ),
        (
            ["model=cnn", "model.factory=a:b"],
            "model.factory and model.name=cnn exclude each other; omit one of them.",
        ),
        (
            ["data.path=a", "data.factory=a:b"],
            "data.path and data.factory exclude each other; omit one of them.",
        ),
        (
            ["data.path=a", "data.test_path=b", "data.test_share=0.5"],
            "data.test_path and data.test_share exclude each other; omit one of them.",
        ),
        (
            ["data.factory=a:b", "data.standardize=true"],
            (
                "data.standardize does not apply: data.factory=a:b returns data as they are used."
                " Omit it."
            ),
        ),
        (
            ["data.factory=mine.py"],
            (
                "data.factory must be module:function, got 'mine.py'; for example mine:load for"
                " load() in mine.py."
            ),
        ),
        (
            ["model.factory=mine:net()"],
            (
                "model.factory must be module:function, got 'mine:net()'; for example mine:load for"
                " load() in mine.py."
            ),
        ),
        (["data.path=a", "data.lable=b"], "Unknown key data.lable. Did you mean data.label?"),
        (["data.path=a", "data.size=2"], "data.size must be in [8, 4096], got 2."),
        (["data.path=a", "data.test_share=1"], "data.test_share must be in (0, 1), got 1."),
        (
            ["data.path=a", "data.classes=cat"],
            "data.classes must be a list of at least two names, got 'cat'.",
        ),
        (
            ["data.path=a", "data.classes=[1]"],
            "data.classes must be a list of at least two names, got ['1'].",
        ),
        (
            ["data.path=a", r'data.classes=["a", "\u001b[2J"]'],
            r"data.classes must be names that can be printed, got '\x1b[2J'.",
        ),
        (
            ["data.path=a", "data.classes=a,b,a"],
            "data.classes names 'a' twice; give each class once.",
        ),
    ],
)
def test_an_invalid_config_is_refused_with_one_sentence(
    arguments: list[str], sentence: str
) -> None:
    assert refusal(*arguments) == sentence


def test_an_untrusted_card_cannot_name_a_function() -> None:
    """An exported model's card is read as `Model`."""
    with refused(ConfigError, key="model.factory"):
        Model(name="cnn", factory="os:abort")  # type: ignore[call-arg]
    with refused(ConfigError, key="model.name"):
        Model(name="custom")
