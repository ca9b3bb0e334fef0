"""Other data to evaluate models with: validation data, global test data, and peers that did not
take part."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refused
from torch import Tensor, nn

from dispfl import Federation, Full, Local, Train
from dispfl.config import compose
from dispfl.data.datasets import load_dataset
from dispfl.errors import ConfigError, PartitionError
from dispfl.methods.base import Method
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.dpsgd import DPSGD
from dispfl.methods.fedavg import FedAvg
from dispfl.methods.fedfomo import FedFOMO
from dispfl.registry import METHODS
from dispfl.report.comparison import compare
from dispfl.runs.directory import read_metrics, read_split, read_summary
from dispfl.runs.prepare import split_dataset
from dispfl.testing.rounds import tiny_context, tiny_network, tiny_peers

Points = Callable[[int, int], tuple[Tensor, Tensor]]
QUICK = Train(epochs=1, batch_size=8)
SMALL = [
    "peers=3",
    "rounds=2",
    "topology=full",
    "model=mlp",
    "partition.samples_per_peer=24",
    "partition.test_samples_per_peer=20",
    "train.epochs=1",
]


def accuracy(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        return float((model(data[0]).argmax(1) == data[1]).float().mean())


def run(changes: list[str], out: Path, *, resume: bool = False) -> dict[str, Any]:
    compose({}, [*SMALL, *changes]).run(out, resume=resume)
    summary = read_summary(out)
    assert summary is not None
    return summary


@pytest.mark.parametrize("method", [DisPFL(), FedAvg()], ids=["own models", "global model"])
def test_with_eval_train_every_model_is_scored_on_its_training_data_too(
    method: Method, points: Points, tmp_path: Path
) -> None:
    pairs = [(points(20, k), points(10, 100 + k)) for k in range(3)]
    federation = Federation(
        tiny_network, pairs, method, Full(), train=QUICK, eval_every=2, eval_train=True, rounds=2
    )
    found = federation.run(out=tmp_path / "run")
    assert found.metrics[0]["train_score"] is None  # a round without evaluation
    scores = [accuracy(found.model(k), train) for k, (train, _) in enumerate(pairs)]
    assert found.metrics[-1]["train_score"]["per_peer"] == pytest.approx(scores)
    assert found.summary["train_score"] == found.metrics[-1]["train_score"]
    row = compare([({"method": "m"}, tmp_path / "run")]).rows[0]
    tested = found.metrics[-1]["scores"]["accuracy"]["mean"]
    assert row.extra("train accuracy") == pytest.approx(sum(scores) / 3)
    assert row.extra("gap") == pytest.approx(sum(scores) / 3 - tested)


def test_without_eval_train_no_training_score_is_recorded(points: Points) -> None:
    found = Federation(
        tiny_network, [(points(20, 0), points(10, 1))], Local(), train=QUICK, rounds=1
    ).run()
    assert found.metrics[0]["train_score"] is None
    assert found.summary["train_score"] is None


@pytest.mark.parametrize("method", [DisPFL(), FedAvg()], ids=["own models", "global model"])
def test_every_model_is_scored_on_its_validation_data_and_on_the_global_test_data(
    method: Method, points: Points
) -> None:
    triples = [(points(20, k), points(15, 50 + k), points(10, 100 + k)) for k in range(3)]
    everywhere = points(40, 999)
    federation = Federation(
        tiny_network, triples, method, Full(), train=QUICK, global_test=everywhere, rounds=2
    )
    found = federation.run()
    last = found.metrics[-1]
    for k, (_, validation, test) in enumerate(triples):
        model = found.model(k)
        assert last["scores"]["accuracy"]["per_peer"][k] == pytest.approx(accuracy(model, test))
        assert last["validation"]["per_peer"][k] == pytest.approx(accuracy(model, validation))
        assert last["global_test"]["per_peer"][k] == pytest.approx(accuracy(model, everywhere))
    assert found.summary["validation"] == last["validation"]


def test_validation_data_are_not_trained_on_and_change_nothing_else(points: Points) -> None:
    pairs = [(points(20, k), points(10, 100 + k)) for k in range(2)]
    triples = [(train, points(15, 50 + k), test) for k, (train, test) in enumerate(pairs)]
    plain, validated = (
        Federation(tiny_network, peers, DisPFL(), Full(), train=QUICK, rounds=1).run()
        for peers in (pairs, triples)
    )
    assert plain.summary["weights_sha256"] == validated.summary["weights_sha256"]
    assert plain.metrics[0]["validation"] is None


def test_fedfomo_holds_back_a_tenth_of_the_training_data_even_with_validation_data(
    points: Points,
) -> None:
    """18 of 20 samples are trained on, so that a sweep may choose by the validation data."""
    pairs = [(points(20, k), points(10, 100 + k)) for k in range(2)]
    triples = [(train, points(15, 50 + k), test) for k, (train, test) in enumerate(pairs)]
    flops = [
        Federation(tiny_network, peers, method, Full(), train=QUICK, rounds=1)
        .run()
        .metrics[0]["flops_per_peer"]
        for peers, method in ((pairs, DPSGD()), (pairs, FedFOMO()), (triples, FedFOMO()))
    ]
    assert flops[1] * 20 == flops[0] * 18
    assert flops[2] == flops[1]


def test_an_experiment_holds_out_a_quarter_and_resumes_with_it(tmp_path: Path) -> None:
    changes = ["partition.validation=0.25", "partition.global_test_samples=50"]
    whole = run(changes, tmp_path / "whole")
    saved = read_split(tmp_path / "whole")
    assert saved is not None
    assert [len(rows) for rows in saved[0].train] == [18] * 3
    assert [len(rows) for rows in saved[0].validation] == [6] * 3
    assert len(whole["global_test"]["per_peer"]) == len(whole["validation"]["per_peer"]) == 3
    (tmp_path / "whole" / "summary.json").unlink()
    again = run(changes, tmp_path / "whole", resume=True)
    assert again["weights_sha256"] == whole["weights_sha256"]
    assert again["validation"] == whole["validation"]
    assert all(record["global_test"] for record in read_metrics(tmp_path / "whole"))


def test_more_global_test_samples_than_test_samples_are_refused(tmp_path: Path) -> None:
    with refused(PartitionError):
        run(["partition.global_test_samples=2001"], tmp_path / "run")


@pytest.mark.parametrize("method", METHODS)
def test_unseen_peers_are_personalized_after_the_run(method: str, tmp_path: Path) -> None:
    changes = [f"method={method}", "unseen_peers=2", "unseen_steps=5"]
    found = run(changes, tmp_path / "run")["unseen_peers"]
    assert (found["peers"], found["steps"], found["failures"]) == (2, 5, [])
    assert len(found["score"]["per_peer"]) == 2


def test_unseen_peers_take_no_part_and_share_no_training_sample(tmp_path: Path) -> None:
    run(["unseen_peers=2"], tmp_path / "run")
    saved = read_split(tmp_path / "run")
    assert saved is not None
    split, counts = saved
    assert split.unseen is not None
    rows = torch.cat([*split.train, *split.unseen.train])
    assert len(rows) == len(set(rows.tolist())) == 5 * 24
    assert (
        len(counts)
        == len(read_metrics(tmp_path / "run")[-1]["scores"]["accuracy"]["per_peer"])
        == 3
    )


def test_a_newcomer_does_not_change_the_densities_of_the_others() -> None:
    """Two groups of two peers; five peers would be groups of three and two."""
    data = tiny_peers(5)
    newcomer = data.pop("004")
    context = tiny_context(DisPFL(density=(0.2, 0.8)), data, unseen={"new-000": newcomer})
    joined = context.joined_by("new-000")
    low, high = context.announced["000"], context.announced["003"]
    assert low != high
    assert list(context.announced.values()) == [low, low, high, high]
    assert list(joined.announced.values()) == [low, low, high, high, high]
    assert {peer: joined.announced[peer] for peer in data} == context.announced


def test_the_samples_of_a_cost_estimate_are_those_that_unseen_peers_leave() -> None:
    experiment = compose(
        {},
        ["peers=6", "unseen_peers=2", "topology=full", "partition=iid", "partition.validation=0.1"],
    )
    split = split_dataset(experiment, load_dataset(experiment.data))
    assert {len(mine) for mine in split.train} == {450}  # of 4000 / 8, a tenth is held out
    assert experiment.training_samples == 450


@pytest.mark.parametrize(
    "method", [DisPFL(density=1.0), FedAvg(), DPSGD()], ids=lambda method: method.name
)
def test_a_newcomer_learns_from_the_others(method: Method, points: Points) -> None:
    """It has 4 samples of its own, and the others have solved the same task; alone it does
    worse."""
    peers = [(points(60, k), points(20, 100 + k)) for k in range(4)]
    newcomer = (points(4, 50), points(200, 51))

    def score(method: Method) -> float:
        federation = Federation(
            tiny_network,
            peers,
            method,
            Full(),
            train=Train(batch_size=8),
            unseen_peers=[newcomer],
            unseen_steps=5,
            rounds=6,
        )
        unseen = federation.run().summary["unseen_peers"]
        assert unseen is not None
        return float(unseen["score"]["mean"])

    assert score(method) > score(Local()) + 0.1


def test_a_wrong_number_of_parts_and_of_steps_is_refused(points: Points) -> None:
    pair = (points(4, 0), points(4, 1))
    with refused(ConfigError, key="unseen_peers"):
        Federation(tiny_network, [pair], Local(), Full(), unseen_peers=[pair * 2])
    with refused(ConfigError, key="unseen_steps"):
        Federation(tiny_network, [pair], Local(), Full(), unseen_peers=[pair], unseen_steps=0)
