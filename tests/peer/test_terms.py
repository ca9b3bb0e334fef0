"""What sites must have in common: each difference is named, with both sides' values."""

from pathlib import Path
from typing import Any

import pytest

from dispfl.peer.plan import Plan
from dispfl.peer.share import share_of
from dispfl.peer.site import Site, Whereabouts
from dispfl.peer.terms import LONGEST, Meaning, Terms, difference


def terms_at(folder: Path, table: str, **data: Any) -> Terms:
    """The terms of a site with this CSV file."""
    plan = Plan(model={"name": "mlp"}, data={"path": "table.csv", "label": "y", **data}).to_toml()
    site = Site.create(folder, Whereabouts(name="alice", listen="127.0.0.1:7600"), plan)
    (folder / "table.csv").write_text(table)
    return share_of(site).terms


WELL_AND_ILL = "age,bmi,y\n" + "61,27,ill\n35,22,well\n" * 4


def test_sites_with_the_same_columns_and_classes_agree(tmp_path: Path) -> None:
    one = terms_at(tmp_path / "one", WELL_AND_ILL)
    other = terms_at(tmp_path / "other", "age,bmi,y\n" + "20,30,well\n21,31,ill\n" * 3)
    assert difference(one, other) is None
    assert (one["classes"], one["columns"], one["input_shape"]) == ('["ill","well"]', '["age","bmi"]', "[2]")


def test_columns_in_another_order_are_refused_although_the_models_fit(tmp_path: Path) -> None:
    one = terms_at(tmp_path / "one", WELL_AND_ILL)
    other = terms_at(tmp_path / "other", WELL_AND_ILL.replace("age,bmi", "bmi,age"))
    assert one["layout"] == other["layout"]
    assert difference(one, other) == (
        'columns is ["age","bmi"] here and ["bmi","age"] there. Every site needs the same columns in the same order.'
    )


def test_classes_in_another_order_are_refused(tmp_path: Path) -> None:
    one = terms_at(tmp_path / "one", WELL_AND_ILL)
    other = terms_at(tmp_path / "other", WELL_AND_ILL, classes=["well", "ill"])
    assert difference(one, other) == (
        'classes is ["ill","well"] here and ["well","ill"] there. '
        "List all of the federation's classes in data.classes, the same at every site."
    )


def test_a_site_whose_data_lack_a_class_agrees_once_all_list_them(tmp_path: Path) -> None:
    rare = WELL_AND_ILL + "70,19,dying\n" * 4
    one, other = (terms_at(tmp_path / name, table) for name, table in (("a", WELL_AND_ILL), ("b", rare)))
    assert str(difference(one, other)).startswith('classes is ["ill","well"] here and ["dying","ill","well"] there.')
    classes = ["well", "ill", "dying"]
    one, other = (
        terms_at(tmp_path / name, table, classes=classes) for name, table in (("c", WELL_AND_ILL), ("d", rare))
    )
    assert difference(one, other) is None


def test_pictures_of_another_size_are_refused_by_their_shape() -> None:
    one, other = (Meaning(("cat", "dog"), (3, side, side)).terms() for side in (32, 64))
    assert difference(one, other) == "input_shape is [3,32,32] here and [3,64,64] there."


def test_what_the_data_are_is_named_before_what_follows_from_it() -> None:
    one = {"classes": '["a"]', "layout": "10 weights", "first_weights": "00"}
    other = {"classes": '["a","b"]', "layout": "12 weights", "first_weights": "11"}
    assert str(difference(one, other)).startswith("classes is")


@pytest.mark.parametrize("place", [0, 40, 149])
def test_a_long_list_is_shown_where_it_differs(place: int) -> None:
    columns = [f"gene{k:03d}" for k in range(150)]
    others = [*columns[:place], "odd", *columns[place + 1 :]]
    one, other = (Meaning(("a", "b"), (150,), tuple(names)).terms() for names in (columns, others))
    sentence = difference(one, other)
    assert sentence is not None
    here, there = sentence.removeprefix("columns is ").partition(" there.")[0].split(" here and ")
    assert f'"gene{place:03d}"' in here
    assert '"odd"' in there
    assert max(len(here), len(there)) <= LONGEST + len("......")


def test_very_many_names_are_compared_by_their_digest() -> None:
    names = tuple(f"gene{k:05d}" for k in range(10_000))
    one, other = (Meaning(("a", "b"), (10_000,), columns).terms() for columns in (names, names[::-1]))
    assert len(one["columns"]) < 100
    sentence = difference(one, other)
    assert sentence is not None
    assert sentence.startswith("columns is 10000 names, ")
