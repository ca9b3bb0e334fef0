"""The federation spec: each difference is named, with both values."""

import re
from pathlib import Path
from typing import Any

import pytest
from own_methods import PushSum

from dispfl.peer.setup.local_setup import local_setup
from dispfl.peer.setup.site_config import SiteConfig
from dispfl.peer.setup.spec import (
    MAX_CHARS,
    DataSchema,
    FederationSpec,
    federation_spec,
    is_changeable,
    spec_difference,
)
from dispfl.peer.site import Site, SiteInfo
from dispfl.testing.rounds import tiny_context


def setup_of(
    folder: Path, table: str, name: str = "alice", method: dict[str, Any] | None = None, **data: Any
) -> Any:
    """The setup of a site with this CSV file."""
    values = {
        "model": {"name": "mlp"},
        "data": {"path": "table.csv", "test_path": "table.csv", "label": "y", **data},
        "method": method or {},
    }
    config = SiteConfig.from_values(values).to_toml()
    site = Site.create(folder, SiteInfo(name=name, listen="127.0.0.1:7600"), config)
    (folder / "table.csv").write_text(table)
    return local_setup(site)


def spec_of(folder: Path, table: str, **data: Any) -> FederationSpec:
    """Its spec."""
    spec: FederationSpec = setup_of(folder, table, **data).spec
    return spec


@pytest.mark.parametrize(
    "other", [{"warm_up": False}, {"first_masks": "common"}, {"first_weights": "own"}]
)
def test_sites_agree_on_how_weights_regrow_and_how_peers_start(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    one, two = (
        spec_of(tmp_path / n, WELL_AND_ILL, method=m) for n, m in (("one", {}), ("two", other))
    )
    ((key, value),) = other.items()
    assert re.fullmatch(
        rf"method\.{key} is \w+ here and {str(value).lower()} there\.",
        str(spec_difference(one, two)),
    )
    assert one["first_weights"] == two["first_weights"]


def test_sites_agree_on_what_is_private_and_on_the_tensors_beside_a_model(tmp_path: Path) -> None:
    one = spec_of(tmp_path / "one", WELL_AND_ILL)
    two = spec_of(tmp_path / "two", WELL_AND_ILL, method={"private": "head"})
    assert spec_difference(one, two) == 'method.private is [] here and ["head"] there.'
    assert not is_changeable("method.private")

    context = tiny_context(PushSum())
    with_tensors = federation_spec("ours", context, context.layout, context.first_weights, 1.0)
    without = {key: value for key, value in with_tensors.items() if key != "tensors"}
    difference = spec_difference(with_tensors, without)
    assert difference == 'tensors is {"push_sum":"float32[]"} here and not given there.'
    assert not is_changeable("tensors")


def test_sites_with_own_first_weights_start_from_different_ones_and_agree_on_the_spec(
    tmp_path: Path,
) -> None:
    method = {"first_weights": "own", "first_masks": "common"}
    one, other = (
        setup_of(tmp_path / name, WELL_AND_ILL, name, method) for name in ("alice", "bob")
    )
    assert spec_difference(one.spec, other.spec) is None
    first, second = one.initial_state(), other.initial_state()
    assert first.model.mask.bits.equal(second.model.mask.bits)
    assert not first.model.values.equal(second.model.values)


WELL_AND_ILL = "age,bmi,y\n" + "61,27,ill\n35,22,well\n" * 4


def test_sites_with_the_same_columns_and_classes_have_the_same_spec(tmp_path: Path) -> None:
    one = spec_of(tmp_path / "one", WELL_AND_ILL)
    other = spec_of(tmp_path / "other", "age,bmi,y\n" + "20,30,well\n21,31,ill\n" * 3)
    assert spec_difference(one, other) is None
    assert (one["classes"], one["columns"], one["input_shape"]) == (
        '["ill","well"]',
        '["age","bmi"]',
        "[2]",
    )


def test_columns_in_another_order_are_refused_although_the_models_fit(tmp_path: Path) -> None:
    one = spec_of(tmp_path / "one", WELL_AND_ILL)
    other = spec_of(tmp_path / "other", WELL_AND_ILL.replace("age,bmi", "bmi,age"))
    assert one["layout"] == other["layout"]
    assert (
        spec_difference(one, other)
        == 'columns is ["age","bmi"] here and ["bmi","age"] there. Every site needs the same'
        " columns in the same order."
    )


def test_classes_in_another_order_are_refused(tmp_path: Path) -> None:
    one = spec_of(tmp_path / "one", WELL_AND_ILL)
    other = spec_of(tmp_path / "other", WELL_AND_ILL, classes=["well", "ill"])
    assert (
        spec_difference(one, other) == 'classes is ["ill","well"] here and ["well","ill"] there. '
        "List all of the federation's classes in data.classes, the same at every site."
    )


def test_a_site_without_samples_of_a_class_agrees_if_all_sites_list_the_classes(
    tmp_path: Path,
) -> None:
    rare = WELL_AND_ILL + "70,19,dying\n" * 4
    one, other = (
        spec_of(tmp_path / name, table) for name, table in (("a", WELL_AND_ILL), ("b", rare))
    )
    assert str(spec_difference(one, other)).startswith(
        'classes is ["ill","well"] here and ["dying","ill","well"] there.'
    )
    classes = ["well", "ill", "dying"]
    one, other = (
        spec_of(tmp_path / name, table, classes=classes)
        for name, table in (("c", WELL_AND_ILL), ("d", rare))
    )
    assert spec_difference(one, other) is None


def test_images_of_another_size_are_refused() -> None:
    one, other = (DataSchema(("cat", "dog"), (3, side, side)).spec() for side in (32, 64))
    assert spec_difference(one, other) == "input_shape is [3,32,32] here and [3,64,64] there."


def test_derived_entries_are_compared_last() -> None:
    one = {"classes": '["a"]', "layout": "10 weights", "first_weights": "00"}
    other = {"classes": '["a","b"]', "layout": "12 weights", "first_weights": "11"}
    assert str(spec_difference(one, other)).startswith("classes is")


@pytest.mark.parametrize("place", [0, 40, 149])
def test_a_long_entry_is_shown_where_it_differs(place: int) -> None:
    columns = [f"gene{k:03d}" for k in range(150)]
    others = [*columns[:place], "odd", *columns[place + 1 :]]
    one, other = (
        DataSchema(("a", "b"), (150,), tuple(names)).spec() for names in (columns, others)
    )
    message = spec_difference(one, other)
    assert message is not None
    here, there = message.removeprefix("columns is ").partition(" there.")[0].split(" here and ")
    assert f'"gene{place:03d}"' in here
    assert '"odd"' in there
    assert max(len(here), len(there)) <= MAX_CHARS + len("......")


def test_very_many_names_are_compared_by_their_digest() -> None:
    names = tuple(f"gene{k:05d}" for k in range(10_000))
    one, other = (
        DataSchema(("a", "b"), (10_000,), columns).spec() for columns in (names, names[::-1])
    )
    assert len(one["columns"]) < 100
    message = spec_difference(one, other)
    assert message is not None
    assert message.startswith("columns is 10000 names, ")
