"""`dispfl privacy`: the price of a budget, before anything is trained."""

import json
from dataclasses import replace
from pathlib import Path

from messages import refused
from typer.testing import CliRunner

from dispfl import FedAvg
from dispfl.cli import app
from dispfl.config import compose
from dispfl.data.datasets import load_dataset
from dispfl.errors import ConfigError
from dispfl.privacy.accountant import spent_epsilon
from dispfl.runs.async_clock import steps_in_run
from dispfl.runs.prepare import prepare
from dispfl.topology import peer_names


def test_the_printed_noise_keeps_the_budget_for_all_rounds() -> None:
    arguments = [
        "privacy",
        "--epsilon",
        "4",
        "--delta",
        "1e-6",
        "rounds=10",
        "train.batch_size=16",
        "--json",
    ]
    cost = json.loads(CliRunner().invoke(app, arguments).output)
    assert (
        cost["steps_per_round"] == 5 * 6 + 1
    )  # 96 samples; the gradient of the mask search is one more
    assert cost["rounds"] == 10
    assert 3.9 < cost["epsilon"] <= 4
    assert spent_epsilon(16 / 96, cost["noise_multiplier"], 310, 1e-6) == cost["epsilon"]


def test_a_server_plans_for_the_peer_that_it_selects_most_often() -> None:
    arguments = [
        "privacy",
        "--epsilon",
        "4",
        "method=fedavg",
        "method.cohort=2",
        "peers=10",
        "rounds=20",
    ]
    cost = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    method, names = FedAvg(cohort=2), peer_names(10)
    picked = [peer for t in range(20) for peer in method.pick(0, t, names)]
    assert cost["rounds"] == max(map(picked.count, names)) < 12
    assert (
        f"{cost['rounds']} of {cost['rounds']} rounds: the server selects no peer more often"
        " in 20" in (CliRunner().invoke(app, arguments).output)
    )


def test_a_budget_with_too_little_noise_lasts_for_fewer_rounds() -> None:
    result = CliRunner().invoke(
        app, ["privacy", "--epsilon", "8", "privacy.noise_multiplier=3", "rounds=50"]
    )
    assert "of 50 rounds" in result.output
    assert "lasts for             50" not in result.output


def test_the_plan_is_that_of_the_samples_that_a_peer_trains_on(tmp_path: Path) -> None:
    def samples(*arguments: str) -> int:
        result = CliRunner().invoke(
            app, ["privacy", "--epsilon", "8", "--json", *arguments], catch_exceptions=False
        )
        return int(json.loads(result.output)["samples"])

    assert samples("partition.validation=0.5") == 48
    assert (
        samples("partition.sizes=lognormal", "partition.min_samples=7", "partition.size_sigma=3")
        == 7
    )
    rows = "".join(f"{k},{'ab'[k % 2]}\n" for k in range(100))
    (tmp_path / "own.csv").write_text(f"x,label\n{rows}")
    own = (
        f"data.path={tmp_path / 'own.csv'}",
        "model=mlp",
        "partition=iid",
        "peers=4",
        "train.batch_size=4",
    )
    assert samples(*own) == len(load_dataset(compose({}, own).data).train_labels) // 4


def test_where_nobody_waits_the_noise_is_that_of_the_run_for_each_peer_s_own_steps() -> None:
    """A budget lasts for the steps of each peer: those of a fast one need more noise."""
    arguments = [
        "schedule=async",
        "classes.fast={share=0.25, speed=4e9}",
        "classes.slow={speed=1e9}",
    ]
    arguments += ["rounds=4", "peers=4", "topology.degree=2", "privacy.epsilon=4"]
    result = CliRunner().invoke(app, ["privacy", *arguments], catch_exceptions=False)
    cost = json.loads(CliRunner().invoke(app, ["privacy", "--json", *arguments]).output)

    _, _, context = prepare(compose({}, arguments))
    context = replace(context, step_counts=steps_in_run(context))
    fast = context.privacy_plan("000").noise_multiplier
    slow = context.privacy_plan("003").noise_multiplier
    assert fast > 1.5 * slow
    assert cost["noise_multiplier"] == fast
    assert cost["rounds"] == cost["training_rounds"] == context.step_counts["000"] > 8
    assert f"with noise {slow:.4g}" in result.output


def test_a_method_that_cannot_be_private_gets_no_plan() -> None:
    with refused(ConfigError, key="method"):
        CliRunner().invoke(
            app, ["privacy", "--epsilon", "8", "method=fedfomo"], catch_exceptions=False
        )


def test_without_a_budget_there_is_a_sentence() -> None:
    with refused(ConfigError):
        CliRunner().invoke(app, ["privacy"], catch_exceptions=False)
