"""Experiments: defaults, a file over them, overrides over both, and a sentence for every invalid
setting."""

import string
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from hypothesis import given
from hypothesis import strategies as st
from messages import refused

from dispfl.config import compose, differing_keys, read_toml
from dispfl.core.train import Train
from dispfl.data.datasets import Data
from dispfl.data.partition import IID, Dirichlet, Pathological
from dispfl.errors import ConfigError
from dispfl.experiment import Experiment
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.local import Local
from dispfl.topology import Full, RandomRegular, Ring


def refusal(*overrides: str, config: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(config or {}, overrides)
    return str(caught.value)


def test_the_defaults_are_the_demo() -> None:
    demo = compose({})
    assert demo == Experiment()
    assert (demo.seed, demo.rounds, demo.peers) == (0, 16, 16)
    assert demo.method == DisPFL(density=0.5)
    assert demo.data.name == "fashion-sample"


def test_overrides_precede_the_file_and_the_file_the_defaults() -> None:
    config = {"rounds": 7, "train": {"lr": 0.3, "epochs": 2}}
    made = compose(config, ["train.lr=0.01"])
    assert (made.rounds, made.train.lr, made.train.epochs) == (7, 0.01, 2)
    assert made.train.batch_size == 32  # the demo's, which neither changes


def test_a_file_and_overrides_with_the_same_values_are_equal(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text('peers = 6\nmethod = "local"\n[topology]\nname = "ring"\noffline_prob = 0.25\n')
    overrides = ["peers=6", "method=local", "topology.name=ring", "topology.offline_prob=0.25"]
    assert compose(read_toml(file)) == compose({}, overrides)
    assert compose(read_toml(file)).topology == Ring(offline_prob=0.25)


def test_another_name_drops_the_keys_of_the_old_table() -> None:
    config = {
        "method": {"name": "dispfl", "density": 0.2},
        "partition": {"name": "dirichlet", "alpha": 0.1},
    }
    made = compose(config, ["method=local", "partition=pathological", "partition.classes=3"])
    assert made.method == Local()
    assert made.partition == Pathological(classes=3)  # neither alpha nor the demo's 100 samples


def test_the_same_name_keeps_the_tables_other_keys() -> None:
    made = compose(
        {"method": {"name": "dispfl", "density": 0.2}}, ["method=dispfl", "method.alpha_0=0.1"]
    )
    assert made.method == DisPFL(density=0.2, alpha_0=0.1)


def test_a_tables_name_applies_before_its_keys_in_any_order() -> None:
    overrides = ["topology.offline_prob=0.5", "topology=ring"]
    assert (
        compose({}, overrides).topology
        == compose({}, reversed(overrides)).topology
        == Ring(offline_prob=0.5)
    )


def test_the_last_of_two_overrides_of_a_key_applies() -> None:
    assert compose({}, ["rounds=3", "rounds=5"]).rounds == 5


@pytest.mark.parametrize(
    ("text", "density"),
    [
        ("0.2", 0.2),
        ("1", 1.0),
        ("0.2,0.5,1", (0.2, 0.5, 1.0)),
        ("[0.2, 0.5]", (0.2, 0.5)),
        (" 0.2 , 0.5 ", (0.2, 0.5)),
    ],
)
def test_a_list_may_be_written_with_commas_alone(text: str, density: object) -> None:
    made = compose({}, [f"method.density={text}"])
    assert isinstance(made.method, DisPFL)
    assert made.method.density == density


def test_three_densities_make_three_groups_of_peers_in_roster_order() -> None:
    made = compose({}, ["peers=6", "method.density=0.2,0.5,1"])
    assert made.method.densities(6) == [0.2, 0.2, 0.5, 0.5, 1.0, 1.0]


def test_text_needs_no_quotes_and_quoted_text_may_contain_a_comma() -> None:
    assert compose({}, ["data.dir=/somewhere/else"]).data.dir == "/somewhere/else"
    assert compose({}, ['data.dir="a,b"']).data.dir == "a,b"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("round=3", "Unknown key round. Did you mean rounds?"),
        ("method.densty=0.2", "Unknown key method.densty. Did you mean method.density?"),
        ("train.epoch=1", "Unknown key train.epoch. Did you mean train.epochs?"),
        ("density=0.2", "Unknown key density. Did you mean method.density?"),
        ("epochs=3", "Unknown key epochs. Did you mean train.epochs?"),
        ("degree=3", "Unknown key degree. Did you mean topology.degree?"),
        ("lr=0.1", "Unknown key lr. Did you mean train.lr?"),
        ("clients=9", "Unknown key clients. Did you mean peers?"),
        ("learning_rate=0.1", "Unknown key learning_rate. Did you mean train.lr?"),
        (
            "sparsity=0.8",
            "Unknown key sparsity. Did you mean method.density, which is 1 - sparsity?",
        ),
        ("offline_prob=0.1", "Unknown key offline_prob. Did you mean topology.offline_prob?"),
        ("alpha=0.1", "Unknown key alpha. Did you mean partition.alpha?"),
        ("metod.density=0.2", "Unknown key metod. Did you mean method?"),
    ],
)
def test_a_typo_gets_the_nearest_key(override: str, sentence: str) -> None:
    assert refusal(override) == sentence


def test_the_smallest_density_of_real_sites_gets_its_own_hint() -> None:
    assert (
        refusal("smallest_density=0.3")
        == "Unknown key smallest_density. It is an option of real sites, dispfl peer init"
        " --smallest-density; in a simulation all densities are known: method.density=0.3,0.5."
    )


def test_a_typo_in_a_file_gets_the_nearest_key() -> None:
    assert refusal(config={"seeds": 1}) == "Unknown key seeds. Did you mean seed?"
    assert refusal(config={"train": {"l": 1}}) == "Unknown key train.l. Did you mean train.lr?"


def test_a_key_unlike_any_other_gets_the_keys_of_its_table() -> None:
    listed = (
        refusal("zzzzzz=1")
        .removeprefix("Unknown key zzzzzz. Known: ")
        .removesuffix(".")
        .split(", ")
    )
    assert listed == sorted(Experiment.model_fields)
    listed = (
        refusal("train.foo=1")
        .removeprefix("Unknown key train.foo. Known: ")
        .removesuffix(".")
        .split(", ")
    )
    assert listed == sorted(f"train.{field}" for field in Train.model_fields)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("method.density=0", "method.density must be in (0, 1], got 0."),
        ("method.density=-0.5", "method.density must be in (0, 1], got -0.5."),
        (
            "method.density=20",
            "method.density must be in (0, 1], got 20. To keep 20% of the weights write 0.2.",
        ),
        (
            "method.density=0.5,50",
            "method.density must be in (0, 1], got 50. To keep 50% of the weights write 0.5.",
        ),
        ("method.density=200", "method.density must be in (0, 1], got 200."),
        (
            "method.density=half",
            "method.density must be a number in (0, 1], a list of them, or fit, got 'half'.",
        ),
        (
            "method.density=true",
            "method.density must be a number in (0, 1], a list of them, or fit, got True.",
        ),
        (
            "method.density=[]",
            "method.density must be a number or a list of numbers in (0, 1], got an empty list.",
        ),
        (
            "method.density=",
            "method.density must be a number in (0, 1], a list of them, or fit, got ''.",
        ),
        (
            "classes.a={speed=1e9, availability=gap.csv}",
            "classes.a is {speed=1e9, availability=gap.csv}, which is no valid table; put texts in"
            " it in quotes, and all of it in single quotes for the shell:"
            " 'classes.night={speed=1e9, daily=\"22:00-06:00\"}'.",
        ),
        ("method.regrow=all", "method.regrow must be 'gradient' or 'random', got 'all'."),
        ("method=disfl", "method 'disfl' does not exist. Did you mean dispfl?"),
        ("method=3", "method must be a name or a table, got 3."),
        ("partition=dir", "partition 'dir' does not exist. Did you mean dirichlet?"),
        (
            "partition.samples_per_peer=0",
            'partition.samples_per_peer must be a whole number of at least 1, or "all", got 0.',
        ),
        ("topology=rings", "topology 'rings' does not exist. Did you mean ring?"),
        ("topology.offline_prob=1.5", "topology.offline_prob must be in [0, 1], got 1.5."),
        ("topology.degree=0", "topology.degree must be at least 1, got 0."),
        ("model=cn", "model 'cn' does not exist. Did you mean cnn?"),
        ("data=cifar1", "data 'cifar1' does not exist. Did you mean cifar10?"),
        ("data.augment=maybe", "data.augment must be true or false, got 'maybe'."),
        ("train.lr=0", "train.lr must be above 0, got 0."),
        ("train.lr=nan", "train.lr must be a finite number above 0, got nan."),
        ("train.lr_decay=1.1", "train.lr_decay must be in (0, 1], got 1.1."),
        ("rounds=0", "rounds must be at least 1, got 0."),
        ("rounds=many", "rounds must be a whole number of at least 1, got 'many'."),
        ("rounds=2.5", "rounds must be a whole number of at least 1, got 2.5."),
        ("seed=-1", "seed must be at least 0, got -1."),
        (
            "device=tpu",
            "device is 'tpu', which this machine or this build of torch does not have; use cpu.",
        ),
        ("engine=ray2", "engine must be 'inprocess' or 'ray', got 'ray2'."),
        ("rounds", "Expected key=value, got 'rounds'; for example method.density=0.2."),
        ("=3", "Expected key=value, got '=3'; for example method.density=0.2."),
    ],
)
def test_an_invalid_value_is_one_sentence(override: str, sentence: str) -> None:
    assert refusal(override) == sentence


def test_the_degree_must_be_below_the_number_of_peers() -> None:
    assert (
        refusal("peers=4", "topology.degree=4")
        == "topology.degree must be below the number of peers (4), got 4. Use at most 3, or more"
        " peers."
    )
    assert (
        refusal("peers=1", "topology.degree=1")
        == "topology.degree must be below the number of peers (1), got 1. Use topology=full, or"
        " more peers."
    )
    assert (
        refusal("topology.degree=4", config={"peers": 2})
        == "topology.degree must be below the number of peers (2), got 4. Use at most 1, or more"
        " peers."
    )
    assert compose({}, ["peers=4", "topology.degree=3"]).topology == RandomRegular(degree=3)


def test_the_default_degree_is_at_most_the_number_of_other_peers() -> None:
    assert (
        compose({}, ["peers=4"]).topology
        == compose({"peers": 4}).topology
        == RandomRegular(degree=3)
    )
    assert compose({"peers": 2}, ["peers=5"]).topology == RandomRegular(degree=4)
    assert compose({"topology": "ring"}, ["peers=6", "topology=random"]).topology == RandomRegular(
        degree=4
    )
    assert compose({}, ["peers=3", "topology.offline_prob=0.5"]).topology == RandomRegular(
        degree=2, offline_prob=0.5
    )
    assert compose({}, ["peers=1"]).topology == Full()
    assert Experiment(peers=4).to_toml()["topology"]["degree"] == 3
    assert compose({}, ["peers=16"]).topology == compose({}).topology == RandomRegular(degree=4)


def test_more_densities_than_peers_are_refused() -> None:
    assert (
        refusal("peers=2", "topology=ring", "method.density=0.1,0.2,0.3")
        == "method.density lists 3 groups for 2 peers; give at most one per peer."
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_an_unavailable_device_is_refused() -> None:
    assert (
        refusal("device=cuda")
        == "device is 'cuda', which this machine or this build of torch does not have; use cpu."
    )


def test_a_table_that_is_a_number_in_the_file_is_refused_with_and_without_overrides() -> None:
    assert refusal(config={"train": 3}) == "train must be a table, got 3."
    assert refusal("train.lr=0.1", config={"train": 3}) == "train must be a table, got 3."


def test_a_missing_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_toml(tmp_path / "none.toml")
    assert str(caught.value) == f"The config file {tmp_path / 'none.toml'} does not exist."


@pytest.mark.parametrize("content", [b"rounds = \n", b"[train\n", b"rounds = 1\nrounds = 2\n"])
def test_a_file_that_is_not_toml_is_a_sentence_that_says_where(
    tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    with refused(ConfigError):
        read_toml(file)


def test_a_binary_file_and_a_folder_are_sentences(tmp_path: Path) -> None:
    file = tmp_path / "image.toml"
    file.write_bytes(b"\x89PNG\xff")
    for path in (file, tmp_path):
        with pytest.raises(ConfigError, match=rf"^The config file {path} cannot be read: .*\.$"):
            read_toml(path)


def test_differing_keys_are_dotted_and_come_with_both_values() -> None:
    one = compose({}, ["method.density=0.2", "rounds=3"])
    assert differing_keys(one, compose({}, ["method=local", "rounds=4"])) == {
        "method.name": ("dispfl", "local"),
        "method.density": (0.2, None),
        "method.alpha_0": (0.5, None),
        "method.regrow": ("gradient", None),
        "method.layers": ("erk", None),
        "method.warm_up": (True, None),
        "method.first_masks": ("own", None),
        "method.first_weights": ("shared", None),
        "method.structure": ("weights", None),
        "method.keep": ([], None),
        "method.affinity": ("none", None),
        "method.affinity_strength": (2.5, None),
        "method.affinity_chosen": (0.6, None),
        "method.affinity_held_back": (0.1, None),
        "method.robust": ("none", None),
        "method.byzantine": (0.2, None),
        "rounds": (3, 4),
    }
    assert differing_keys(one, one) == {}


@st.composite
def experiments(draw: st.DrawFn) -> Experiment:
    peers = draw(st.integers(2, 50))
    density = st.floats(0, 1, exclude_min=True)
    method = st.one_of(
        st.just(Local()),
        st.builds(DisPFL, density=density | st.lists(density, min_size=1, max_size=2)),
    )
    topology = st.one_of(
        st.builds(Ring, offline_prob=st.floats(0, 1), offline=st.sampled_from(["train", "skip"])),
        st.builds(RandomRegular, degree=st.integers(1, peers - 1)),
    )
    samples = st.integers(10, 10**6) | st.just("all")
    partition = st.one_of(
        st.builds(Dirichlet, alpha=st.floats(0.001, 10_000), samples_per_peer=samples),
        st.builds(Pathological, classes=st.integers(1, 10), samples_per_peer=samples),
        st.builds(IID, test_samples_per_peer=st.integers(1, 10**6)),
    )
    return Experiment(
        seed=draw(st.integers(0, 2**64)),
        peers=peers,
        workers=draw(st.integers(1, 64)),
        data=Data(dir=draw(st.none() | st.text(string.printable))),
        method=draw(method),
        topology=draw(topology),
        partition=draw(partition),
        train=Train(lr=draw(st.floats(0, 1e30, exclude_min=True))),
    )


@given(experiments())
def test_written_as_toml_and_read_again_an_experiment_is_the_same(experiment: Experiment) -> None:
    assert compose(tomllib.loads(tomli_w.dumps(experiment.to_toml()))) == experiment


def test_a_file_may_describe_custom_data_whose_path_is_an_override() -> None:
    described = compose(
        {"data": {"label": "kind", "classes": ["no", "yes"]}}, ["data.path=table.csv", "model=mlp"]
    ).data
    assert (described.name, described.label, str(described.path)) == ("custom", "kind", "table.csv")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ({}, ["method.structure=channels"]),
        ({}, ["method=dispfl", "method.structure=channels"]),
        ({"method": {"structure": "channels"}}, []),
        (compose({}, ["method.structure=channels"]).to_toml(), []),
    ],
)
def test_channels_have_their_own_defaults_however_they_are_chosen(
    config: dict[str, Any], overrides: list[str]
) -> None:
    assert compose(config, overrides).method == DisPFL(structure="channels")
    chosen = compose(config, [*overrides, "method.layers=erk"]).method
    assert chosen == DisPFL(structure="channels", layers="erk")


def test_layers_to_keep_are_one_name_or_several_and_need_channels() -> None:
    for value, names in {"conv1": ("conv1",), "0": ("0",), "conv1,fc": ("conv1", "fc")}.items():
        method = compose({}, ["method.structure=channels", f"method.keep={value}"]).method
        assert method.keep == names  # type: ignore[attr-defined]
    with refused(ConfigError, key="method.keep"):
        compose({}, ["method.keep=conv1"])
