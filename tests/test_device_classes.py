"""Classes of devices: who is in which, and what their peers train, keep, pay and spend."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from messages import refused
from torch import Tensor, nn

from dispfl import DisPFL, FedAvg, Federation, Full, Privacy, Run, Train
from dispfl.config import compose
from dispfl.core.device_classes import DeviceClass, assign_classes
from dispfl.costs.estimate import CostInputs, estimate
from dispfl.errors import ConfigError
from dispfl.experiment import Simulation
from dispfl.peer.local_federation import create_run, setup_of_peer
from dispfl.report.peers import peers_section
from dispfl.report.results import read_results
from dispfl.report.runs import read_run
from dispfl.runs.directory import read_config

Points = Callable[[int, int], tuple[Tensor, Tensor]]
PHONES = {
    "phone": {"share": 0.5, "density": 0.25, "train": {"epochs": 1}},
    "board": {"train": {"steps": 7, "batch_size": 10, "lr": 0.05}},
}


def federation(points: Points, peers: int = 4, **settings: Any) -> Federation:
    data = [(points(20, k), points(10, 9 + k)) for k in range(peers)]
    made: dict[str, Any] = {
        "method": DisPFL(density=0.5),
        "topology": Full(),
        "rounds": 1,
        "train": Train(epochs=2, batch_size=5),
        **settings,
    }
    return Federation(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), data, **made)


def classes(**tables: dict[str, Any]) -> dict[str, DeviceClass]:
    return {name: DeviceClass(**table) for name, table in tables.items()}


def test_peers_are_divided_by_shares_in_roster_order_and_named_ones_first() -> None:
    roster = list("abcdefg")
    made = classes(phone={"share": 0.5}, hub={"peers": ("c",)}, board={"share": 0.5})
    assert assign_classes(made, roster) == {
        **dict.fromkeys("ab", "phone"),
        "c": "hub",
        "d": "phone",
        **dict.fromkeys("efg", "board"),
    }
    assert list(assign_classes(classes(x={}, y={"share": 0.25}), list("abcd")).values()) == [
        "x",
        "x",
        "x",
        "y",
    ]


@pytest.mark.parametrize("peers", [3, 7, 16])
def test_equal_shares_make_the_groups_of_a_list_of_densities(peers: int) -> None:
    thirds = classes(a={"share": 1 / 3}, b={"share": 1 / 3}, c={"share": 1 / 3})
    names = list(assign_classes(thirds, [f"{k:03}" for k in range(peers)]).values())
    assert names == ["abc"[k * 3 // peers] for k in range(peers)]


def test_each_class_has_its_density_epochs_steps_batches_and_flops(points: Points) -> None:
    context = federation(points, classes=PHONES)._context
    assert list(context.densities.values()) == [0.25, 0.25, 0.5, 0.5]
    phone = context.train_of("000")
    board = context.train_of("003")
    assert (phone.epochs, phone.steps, phone.batch_size, phone.lr) == (1, None, 5, 0.1)
    assert (board.steps, board.batch_size, board.lr) == (7, 10, 0.05)

    run = federation(points, classes=PHONES, method=DisPFL(density=0.5, regrow="random")).run()
    [record] = run.metrics
    samples = [20, 20, 70, 70]  # an epoch; 7 batches of 10
    kept = [int(state.model.mask.kept) for state in run.states.values()]
    assert kept[0] == kept[1] < kept[2] == kept[3]
    assert run.metrics.class_of == dict(
        zip(run.metrics.roster, ["phone", "phone", "board", "board"], strict=True)
    )
    assert record["flops_total"] > 3 * sum(n * k for n, k in zip(samples, kept, strict=True))
    assert [group["class"] for group in run.summary["groups"]] == ["board", "phone"]
    assert [group["density"] for group in run.summary["groups"]] == [0.5, 0.25]


def test_epochs_of_a_class_replace_the_steps_of_all() -> None:
    made: dict[str, Any] = {"x": {"train": {"epochs": 3}}}
    settings = Simulation(peers=2, train=Train(steps=9), classes=made)
    train = settings.classes["x"].train.applied_to(settings.train)
    assert (train.epochs, train.steps) == (3, None)


def test_one_class_with_the_settings_of_all_changes_no_bit(points: Points) -> None:
    plain = federation(points).run().summary["weights_sha256"]
    classed = federation(points, classes={"x": {"density": 0.5, "train": {"epochs": 2}}})
    assert classed.run().summary["weights_sha256"] == plain


def test_lists_of_training_settings_make_classes_of_equal_size(points: Points) -> None:
    by_list = federation(points, train={"epochs": [1, 3], "lr": [0.1, 0.2], "batch_size": 5})
    context = by_list._context
    assert [context.train_of(peer).epochs for peer in context.roster] == [1, 1, 3, 3]
    assert [context.train_of(peer).lr for peer in context.roster] == [0.1, 0.1, 0.2, 0.2]
    assert set(context.class_of.values()) == {"group-1", "group-2"}


def test_stacked_peers_of_several_classes_learn_the_same_as_one_by_one(points: Points) -> None:
    made = {"x": {"share": 0.5, "train": {"epochs": 1}}, "y": {}}
    alone = federation(points, classes=made, workers=1).run()
    stacked = federation(points, classes=made, workers=1, vmap_peers=4).run()
    for peer, state in alone.states.items():
        close = (state.model.values - stacked.states[peer].model.values).abs().max()
        assert close < 1e-4
    assert alone.metrics[0]["flops_total"] == stacked.metrics[0]["flops_total"]


def test_classes_are_saved_shown_in_frames_and_in_the_report(
    points: Points, tmp_path: Path
) -> None:
    run = federation(points, classes=PHONES).run(tmp_path / "run")
    assert read_config(tmp_path / "run")["classes"]["phone"]["train"] == {"epochs": 1}
    saved = Run.load(tmp_path / "run", model=run.network)
    assert saved.metrics.class_of == run.metrics.class_of
    assert read_run(tmp_path / "run").densities == {
        "000": 0.25,
        "001": 0.25,
        "002": 0.5,
        "003": 0.5,
    }
    html = str(peers_section(read_results([tmp_path / "run"])))
    assert "Dis-PFL by class of device" in html
    assert "phone" in html
    pytest.importorskip("pandas")
    frame = saved.metrics.frame(per_peer=True)
    assert list(frame["class"]) == ["phone", "phone", "board", "board"]


def test_a_privacy_budget_follows_the_steps_of_each_class(points: Points) -> None:
    pytest.importorskip("scipy")
    made = {"x": {"share": 0.5, "train": {"steps": 2}}, "y": {"train": {"steps": 8}}}
    context = federation(points, classes=made, privacy=Privacy(noise_multiplier=1.0))._context
    steps = [context.privacy_plan(peer).steps_per_round for peer in context.roster]
    assert steps == [3, 3, 9, 9]  # and the mask search


def test_costs_have_a_row_for_each_class() -> None:
    settings = compose({}, ["peers=4", "topology=full", f"classes={toml(PHONES)}"])
    costs = estimate(CostInputs.of(settings))
    phone, board = sorted(costs.groups, key=lambda group: group.density)
    assert (phone.name, phone.peers, board.name, board.peers) == ("phone", 2, "board", 2)
    assert costs.flops_per_peer == (2 * phone.flops + 2 * board.flops) / 4
    assert phone.flops != board.flops


def toml(value: Any) -> str:
    """An inline table, in which JSON's colons are equal signs."""
    return json.dumps(value).replace(":", "=")


def test_real_peers_of_up_have_the_settings_of_their_class(tmp_path: Path) -> None:
    overrides = ["peers=2", "rounds=1", "topology=full", "model=mlp"]
    overrides += ["classes.small={share=0.5,density=0.2,train={epochs=1}}", "classes.large={}"]
    create_run(compose({}, overrides), tmp_path / "up")
    small = setup_of_peer(tmp_path / "up", "000")
    large = setup_of_peer(tmp_path / "up", "001")
    assert (small.density, large.density, large.smallest_density) == (0.2, 0.5, 0.2)
    assert (small.run.train_of("000").epochs, large.run.train_of("001").epochs) == (1, 5)
    assert small.spec == large.spec


@pytest.mark.parametrize(
    "wrong",
    [
        {"a": {"share": 0.5}, "b": {"share": 0.4}},
        {"a": {"share": 1.0}, "b": {}},
        {"a": {}, "b": {}},
        {"a": {"peers": ["zzz"]}, "b": {}},
        {"a": {"peers": ["000"]}, "b": {"peers": ["000"]}, "c": {}},
        {"a": {}, "b": {"share": 0.01}},
        {"a": {"share": 0.5, "peers": ["000"]}, "b": {}},
        {"a": {"share": 1.5}},
        {"a": {"train": {"epochs": 0}}},
        {"a": {"train": {"momentum": 0.9}}},
        {"a": {"colour": 3}},
        {"a b": {}},
        {"a": 3},
        [1],
    ],
    ids=str,
)
def test_classes_that_do_not_fit_are_refused(points: Points, wrong: Any) -> None:
    with refused(ConfigError, key="classes"):
        federation(points, classes=wrong)._context.check()


def test_a_density_for_a_method_without_densities_is_refused(points: Points) -> None:
    with refused(ConfigError, key="classes"):
        federation(points, method=FedAvg(), classes={"a": {"density": 0.5}})


def test_lists_of_different_lengths_and_lists_beside_classes_are_refused(points: Points) -> None:
    with refused(ConfigError, key="train.epochs"):
        federation(points, train={"epochs": [1, 2], "lr": [0.1, 0.2, 0.3]})
    with refused(ConfigError, key="train"):
        federation(points, train={"epochs": [1, 2]}, classes={"a": {}})
