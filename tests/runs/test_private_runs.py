"""Private runs: what is spent, what is secret, what is refused."""

import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dispfl import (
    DPSGD,
    DisPFL,
    Ditto,
    FedAvg,
    FedAvgFT,
    Federation,
    FedFOMO,
    GossipMethod,
    Local,
    Ring,
    Run,
    SubFedAvg,
    Train,
)
from dispfl.core.packed import PackedModel
from dispfl.core.train import Trainer
from dispfl.errors import ConfigError, RunError
from dispfl.methods.base import Method, PeerState
from dispfl.privacy.steps import KEY_BYTES, Privacy
from dispfl.runs.directory import SECRET_KEY

BUDGET = Privacy(epsilon=8.0)


class StoppedError(KeyboardInterrupt):
    pass


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def data(k: int, n: int = 40) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(k))
    return x, x[:, :3].argmax(1)


def federation(
    method: Method | None = None, privacy: Privacy | None = BUDGET, **more: Any
) -> Federation:
    return Federation(
        more.pop("model", net),
        [(data(k), data(100 + k)) for k in range(4)],
        method or DisPFL(),
        more.pop("topology", Ring()),
        train=more.pop("train", Train(batch_size=10, epochs=1)),
        privacy=privacy,
        workers=1,
        **{"rounds": 1, **more},
    )


def digests(run: Any) -> list[str]:
    return list(run.summary["weights_sha256"])


@pytest.mark.parametrize(
    "method",
    [DisPFL(), DisPFL(structure="channels"), DPSGD(), FedAvg(cohort=2), Ditto(cohort=2), Local()],
)
def test_a_method_trains_within_its_budget_and_tells_neither_loss_nor_sample_counts(
    method: Method,
) -> None:
    run = federation(method, rounds=3).run()
    last = run.metrics[-1]
    assert last["train_loss"] is None
    assert 0 < max(last["epsilon"]["per_peer"]) <= 8.0
    passed = {samples for state in run.metrics for samples in [state["flops_per_peer"]]}
    assert len(passed) == 1  # the same in every round: batches are counted with their expected size


def test_the_budget_lasts_to_the_last_round_and_pays_for_the_gradient_of_the_mask_search() -> None:
    spent = [record["epsilon"]["mean"] for record in federation(DisPFL(), rounds=3).run().metrics]
    assert spent == sorted(spent)
    assert 7.9 < spent[-1] <= 8.0
    fixed = Privacy(noise_multiplier=2.0)
    searching, random = (
        federation(DisPFL(regrow=regrow), fixed, rounds=1).run().metrics[-1]["epsilon"]["mean"]  # type: ignore[arg-type]
        for regrow in ("gradient", "random")
    )
    assert searching > random


def test_two_runs_with_the_same_seed_have_different_noise() -> None:
    one, other = (digests(federation(rounds=1).run()) for _ in range(2))
    assert set(one).isdisjoint(other)


def test_a_peer_that_is_not_in_the_cohort_spends_nothing() -> None:
    [record] = federation(FedAvg(cohort=1), rounds=1).run().metrics
    assert sorted(value > 0 for value in record["epsilon"]["per_peer"]) == [
        False,
        False,
        False,
        True,
    ]


def test_a_server_plans_for_the_peer_that_it_selects_most_often() -> None:
    spent = federation(FedAvg(cohort=1), rounds=12).run().metrics[-1]["epsilon"]["per_peer"]
    assert 7.9 < max(spent) <= 8.0
    assert min(spent) < 7.0  # it is selected less often


def test_an_unseen_peer_plans_for_its_one_step() -> None:
    context = federation(unseen_peers=[(data(8), data(9))])._context
    few, many = (context.changed(rounds=rounds).joined_by("new-000") for rounds in (1, 50))
    assert many.privacy_plan("new-000") == few.privacy_plan("new-000")


def test_a_peer_without_budget_keeps_its_model_serves_it_and_says_so() -> None:
    # Noise for two rounds of four steps and the gradient's, in a run of five.
    two_rounds = (
        federation(privacy=Privacy(noise_multiplier=3.0), rounds=2)
        .run()
        .metrics[-1]["epsilon"]["mean"]
    )
    run = federation(
        privacy=Privacy(noise_multiplier=3.0, epsilon=two_rounds + 1e-6), rounds=5
    ).run()
    spent = [record["epsilon"]["mean"] for record in run.metrics]
    assert spent[1] == pytest.approx(two_rounds)
    assert spent[1:] == [spent[1]] * 4
    assert not run.metrics[1]["failures"]
    for record in run.metrics[2:]:
        assert len(record["failures"]) == 4
        assert "It no longer trains, and goes on sending its model." in record["failures"]["000"]
        assert record["busiest"]["paper_mb"] > 0


def test_an_interrupted_run_resumes_to_the_bit_and_a_finished_one_keeps_no_key(
    tmp_path: Path,
) -> None:
    def stop(run: Run) -> None:
        key = tmp_path / "cut" / SECRET_KEY
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        if len(run.metrics) == 2:
            raise StoppedError

    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
        (tmp_path / name / SECRET_KEY).write_bytes(b"k" * KEY_BYTES)
        (tmp_path / name / SECRET_KEY).chmod(0o600)
    whole = federation(rounds=4).run(out=tmp_path / "whole")
    with pytest.raises(StoppedError):
        federation(rounds=4).run(out=tmp_path / "cut", callbacks=[stop])
    resumed = federation(rounds=4).run(out=tmp_path / "cut", resume=True)
    assert digests(resumed) == digests(whole)
    assert [r["epsilon"] for r in resumed.metrics] == [r["epsilon"] for r in whole.metrics]
    assert not list(tmp_path.glob(f"*/{SECRET_KEY}"))
    for file in (tmp_path / "whole").rglob("*"):
        assert not file.is_file() or b"k" * KEY_BYTES not in file.read_bytes(), file


def test_a_copied_run_without_its_key_goes_on_with_a_new_one_and_counts_what_was_spent(
    tmp_path: Path,
) -> None:
    def stop(run: Run) -> None:
        if len(run.metrics) == 1:
            raise StoppedError

    with pytest.raises(StoppedError):
        federation(rounds=2).run(out=tmp_path / "run", callbacks=[stop])
    (tmp_path / "run" / SECRET_KEY).unlink()
    resumed = federation(rounds=2).run(out=tmp_path / "run", resume=True)
    whole = federation(rounds=2).run()
    assert resumed.metrics[-1]["epsilon"] == whole.metrics[-1]["epsilon"]


class Peeking(GossipMethod):
    """Evaluates its model on the training data, which is not accounted."""

    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        trainer.score(state.model.unpack()[0], trainer.train)
        return state


class Greedy(GossipMethod):
    """Takes more steps than it announces."""

    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        weights, mask = state.model.unpack()
        for _ in range(4):
            weights = trainer.learn(weights, mask)
        return state


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: federation(FedFOMO()), "privacy does not work with method.name=fedfomo"),
        (lambda: federation(SubFedAvg()), "privacy does not work with method.name=subfedavg"),
        (lambda: federation(FedAvgFT()), "privacy does not work with method.name=fedavg-ft"),
        (lambda: federation(DisPFL(affinity="head")), "method.affinity_held_back is 0.1"),
        (lambda: federation(Peeking()), "evaluates a model on them"),
        (lambda: federation(Greedy()), "takes more steps in a round than its `private_steps` says"),
        (lambda: federation(eval_train=True), "eval_train is true, but with privacy"),
        (lambda: federation(vmap_peers=2), "with privacy peers train one by one"),
        (lambda: federation(train=Train(noise_std=0.1)), "drawn from the public seed"),
        (
            lambda: federation(model=lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))),
            "without batch norm",
        ),
        (
            lambda: federation(privacy=Privacy(epsilon=0.01, noise_multiplier=0.5)),
            "does not last for one round",
        ),
        (lambda: federation(privacy=Privacy(epsilon=1, delta=0.5)), "privacy.delta must be below"),
        (
            lambda: federation(precision="bf16"),
            "precision is bf16, but with privacy gradients are float32",
        ),
        (
            lambda: federation(memory_format="channels_last"),
            "memory_format is channels_last, but with privacy",
        ),
        (
            lambda: federation(
                privacy=Privacy(epsilon=100, noise_multiplier=0.8),
                unseen_peers=[(data(8), data(9))],
                unseen_steps=100_000,
            ),
            "does not last for one round of 100001 steps",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The model has buffers")
def test_what_privacy_cannot_cover_is_refused_in_a_sentence(
    make: Callable[[], Federation], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make().run()


def test_a_key_that_cannot_be_read_is_a_sentence_and_leaves_the_run_free_to_be_resumed(
    tmp_path: Path,
) -> None:
    (tmp_path / "run" / SECRET_KEY).mkdir(parents=True)
    with pytest.raises(RunError, match=f"{SECRET_KEY} could not be written: Is a directory"):
        federation().run(tmp_path / "run")
    (tmp_path / "run" / SECRET_KEY).rmdir()
    assert len(federation().run(tmp_path / "run", resume=True).metrics) == 1
