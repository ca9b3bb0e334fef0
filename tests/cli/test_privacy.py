"""`dispfl privacy`: the price of a budget, before anything is trained."""

import json

import pytest
from typer.testing import CliRunner

from dispfl.cli import app
from dispfl.costs.privacy import spent_epsilon
from dispfl.errors import ConfigError


def test_the_printed_noise_keeps_the_budget_for_all_rounds() -> None:
    arguments = ["privacy", "--epsilon", "4", "--delta", "1e-6", "rounds=10", "train.batch_size=16", "--json"]
    found = json.loads(CliRunner().invoke(app, arguments).output)
    assert found["steps_per_round"] == 5 * 6 + 1  # 96 samples; the gradient of the mask search is one more
    assert found["rounds"] == 10
    assert found["epsilon_tight"] < found["epsilon"] <= 4
    assert spent_epsilon(16 / 96, found["noise_multiplier"], 310, 1e-6) == found["epsilon"]


def test_a_budget_with_too_little_noise_lasts_for_fewer_rounds() -> None:
    result = CliRunner().invoke(app, ["privacy", "--epsilon", "8", "privacy.noise_multiplier=3", "rounds=50"])
    assert "of 50 rounds" in result.output
    assert "lasts for             50" not in result.output


def test_without_a_budget_there_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="Give a budget"):
        CliRunner().invoke(app, ["privacy"], catch_exceptions=False)
