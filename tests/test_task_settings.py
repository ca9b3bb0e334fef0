"""Tasks from the command line: their settings, the unit of targets, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from messages import refused
from PIL import Image
from torch.nn import functional

from dispfl.config import compose
from dispfl.core.metric import METRICS, mean_iou, r2
from dispfl.core.task import TargetUnit, Task
from dispfl.data.contract import DataContract
from dispfl.data.custom import load_custom
from dispfl.data.datasets import CustomData, load_dataset
from dispfl.data.labelled import InputFormat
from dispfl.errors import ConfigError, DataError, PartitionError
from dispfl.export.personal import site_model
from dispfl.peer.local_federation import free_ports
from dispfl.peer.run_site import run_site
from dispfl.peer.setup.local_setup import local_setup
from dispfl.peer.setup.site_config import SiteConfig
from dispfl.peer.site import Site, SiteInfo
from dispfl.privacy.steps import Privacy
from dispfl.runs.prepare import prepare

ROWS = [(k % 7, k % 11, 1000 + 100 * (k % 7), k % 2) for k in range(60)]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    lines = "".join(f"{','.join(map(str, row))}\n" for row in ROWS)
    path.write_text(f"a,b,price,new\n{lines}")
    return path


def test_each_task_has_its_loss_its_metrics_and_a_partition_that_fits() -> None:
    regression = compose({}, ["task=regression", "data.path=rows.csv"])
    assert regression.metric == ("rmse", "mae", "r2")
    assert regression.partition.name == "iid"
    segmentation = compose({"task": "segmentation"}, ["data.path=shapes"])
    assert segmentation.metric == ("mean_iou", "accuracy")
    assert segmentation.model.name == "unet"
    assert compose({}, ["task=multilabel", "metric=multilabel_accuracy"]).metric == (
        "multilabel_accuracy",
    )
    assert compose({}, []).partition.name == "dirichlet"
    again = compose(regression.to_toml())
    assert again == regression
    with refused(ConfigError, key="metric"):
        compose({}, ["loss=mine:huber"])
    with refused(ConfigError, key="loss"):
        compose({}, ["loss=huber", "metric=mae"])
    with refused(ConfigError, key="attack"):
        compose({}, ["task=regression", "attack=label-flip", "byzantine=0.2"])
    with refused(ConfigError, key="task"):
        load_dataset("fashion-sample", task="regression")


def test_targets_are_learned_standardized_and_measured_in_their_unit() -> None:
    unit = TargetUnit((100.0,), (10.0,))
    task = Task.of(name="regression").with_unit(unit)
    labels = torch.tensor([[100.0], [120.0]])  # 0 and 2 for the network
    outputs = torch.tensor([[1.0], [2.0]])  # 110 and 120
    assert float(task.loss(outputs, labels)) == pytest.approx(0.5)
    assert task.metric(outputs, labels) == pytest.approx(50**0.5)
    assert task.metrics[1](outputs, labels) == pytest.approx(5)
    assert [metric.name for metric in task.metrics] == ["rmse", "mae", "r2"]


def test_r2_and_mean_iou_by_hand() -> None:
    labels = torch.tensor([[1.0], [3.0]])
    assert r2(torch.tensor([[1.0], [2.0]]), labels) == pytest.approx(0.5)  # 1 - 1 / 2
    assert r2(torch.tensor([2.0, 2.0]), labels) == 0
    actual = torch.tensor([[[0, 0, 1, -100]]])
    predicted = functional.one_hot(torch.tensor([[[0, 1, 1, 2]]]), 4).permute(0, 3, 1, 2).float()
    assert mean_iou(predicted, actual) == pytest.approx((1 / 2 + 1 / 2) / 2)
    assert METRICS["accuracy"](predicted, actual) == pytest.approx(2 / 3)


def test_the_unit_is_that_of_the_training_data_and_stays_with_the_model(table: Path) -> None:
    settings = CustomData(path=str(table), label="price")
    data = load_custom(settings, "regression")
    assert data.classes == ("price",)
    assert data.columns == ("a", "b", "new")
    assert data.unit is not None
    prices = data.train_labels[:, 0].double()
    assert data.unit.mean == pytest.approx([float(prices.mean())])
    assert data.unit.std == pytest.approx([float(prices.std(correction=0))])

    inputs = InputFormat.from_json(InputFormat.of(data).to_json())
    table.write_text("a,b,new,price\n" + "".join(f"{k},1,0,{k}\n" for k in range(40)))
    changed = load_custom(settings, "regression", inputs=inputs)
    assert changed.unit == data.unit
    with refused(DataError):
        load_custom(settings.model_copy(update={"label": "a"}), "regression", inputs=inputs)
    with refused(ConfigError, key="data.target_mean"):
        CustomData(path=str(table), target_std=(2,))
    with refused(ConfigError, key="data.target_mean"):
        load_custom(
            CustomData(path=str(table), target_mean=(1,), target_std=(2,)), "classification"
        )
    with refused(ConfigError, key="data.target_mean"):
        two = CustomData(path=str(table), label="price", target_mean=(1, 2), target_std=(1, 2))
        load_custom(two, "regression")


def test_several_targets_and_labels_of_a_table(table: Path) -> None:
    both = load_custom(CustomData(path=str(table), label=("price", "b")), "regression")
    assert both.classes == ("price", "b")
    assert both.columns == ("a", "new")
    assert both.train_labels.shape[1] == 2
    with refused(ConfigError, key="data.label"):
        load_custom(CustomData(path=str(table), label=("price", "b")))
    with refused(ConfigError, key="data.label"):
        load_custom(CustomData(path=str(table)), "multilabel")
    with refused(DataError):
        load_custom(CustomData(path=str(table), label=("new", "b")), "multilabel")
    labels = load_custom(CustomData(path=str(table), label=("new",)), "multilabel")
    assert labels.train_labels.dtype == torch.uint8


def test_partitions_by_class_are_refused_and_others_divide_any_labels(table: Path) -> None:
    words = ["task=regression", f"data.path={table}", "data.label=price", "model=mlp", "peers=3"]
    few = ["partition.test_samples_per_peer=4", "partition.validation=0.2"]
    with refused(PartitionError):
        prepare(compose({}, [*words, "partition=dirichlet"]))
    for partition in (["partition=iid"], ["partition=iid", "partition.sizes=lognormal"]):
        smaller = ["partition.min_samples=2"] if len(partition) > 1 else []
        _, split, context = prepare(compose({}, [*words, *few, *partition, *smaller]))
        rows = torch.cat([*split.train, *split.validation])
        assert len(set(rows.tolist())) == len(rows)
        assert len(context.data.peers) == 3


def test_a_loss_of_ones_own_is_imported_and_needs_its_metric(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(table.parent)
    Path("own_losses.py").write_text(
        "from torch.nn import functional\n"
        "def huber(outputs, labels):\n    return functional.huber_loss(outputs, labels)\n"
    )
    words = ["task=regression", f"data.path={table}", "data.label=price", "model=mlp", "peers=2"]
    run = compose({}, [*words, "loss=own_losses:huber", "metric=mae", "rounds=1"]).run()
    assert 0 < run.scores["mae"][0] < 2000


def test_privacy_needs_a_declared_unit(table: Path) -> None:
    words = ["task=regression", f"data.path={table}", "data.label=price", "model=mlp", "peers=2"]
    private = compose({}, words).model_copy(update={"privacy": Privacy(epsilon=8)})
    with refused(ConfigError, key="data.target_mean"):
        prepare(private)


def write_masks(folder: Path, side: int = 8) -> None:
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for number in range(12):
        pixels = rng.integers(0, 255, (side, side, 3), np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
        mask = (pixels[..., 0] > 127).astype(np.uint8)
        mask[0, 0] = 255
        Image.fromarray(mask).save(folder / "masks" / f"{number}.png")


def test_masks_belong_to_images_of_the_same_name(tmp_path: Path) -> None:
    write_masks(tmp_path / "shapes")
    settings = CustomData(path=str(tmp_path / "shapes"), size=8)
    data = load_custom(settings, "segmentation")
    assert data.classes == ("0", "1")
    assert set(data.train_labels.unique().tolist()) == {-100, 0, 1}
    assert (data.train_labels[:, 0, 0] == -100).all()
    inputs, labels = next(data.samples()[0].batches(1))
    red = inputs[0, 0] > 0  # 127.5 is 0
    assert torch.equal(red.flatten()[1:], labels[0].flatten()[1:].bool())
    with refused(ConfigError, key="data.augment"):
        data.samples(augment=True)
    with refused(ConfigError, key="model"):
        words = ["task=segmentation", f"data.path={settings.path}", "data.size=8", "model=cnn"]
        prepare(compose({}, [*words, "peers=2"]))
    (tmp_path / "shapes/masks/3.png").unlink()
    with refused(DataError):
        load_custom(settings, "segmentation")


def make_site(folder: Path, table: Path, **data: object) -> Site:
    settings = {
        "task": "regression",
        "data": {"path": "rows.csv", "label": "price", "standardize": True, **data},
        "model": "mlp",
        "rounds": 1,
        "train": {"epochs": 1},
    }
    where = SiteInfo(name="clinic", listen=f"127.0.0.1:{free_ports(1)[0]}")
    site = Site.create(folder, where, SiteConfig.from_values(settings).to_toml())
    (folder / "rows.csv").write_text(table.read_text())
    return site


def test_a_site_keeps_the_unit_in_its_contract_and_its_spec_says_whose_it_is(
    table: Path, tmp_path: Path
) -> None:
    site = make_site(tmp_path / "own", table)
    setup = local_setup(site)
    assert setup.spec["target_unit"] == "each site's own"
    assert setup.spec["task"] == "regression"
    run_site(site)
    contract = DataContract.load(site.run_folder)
    assert contract is not None
    assert contract.inputs.unit is not None
    card = site_model(site.folder).card
    assert (card.target_mean, card.target_std) == (
        contract.inputs.unit.mean,
        contract.inputs.unit.std,
    )

    # Other rows change neither the unit nor the scaling of a model that is trained.
    (site.folder / "rows.csv").write_text(table.read_text().replace(",1000,", ",9000,"))
    assert site_model(site.folder).card.target_mean == card.target_mean
    declared = make_site(tmp_path / "declared", table, target_mean=1300, target_std=200)
    assert local_setup(declared).spec["target_unit"] == "mean [1300.0], std [200.0]"
