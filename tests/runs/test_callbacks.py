"""Callbacks see the run so far as a copy, and may stop it; early stopping follows from the metrics
alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refused
from torch import Tensor, nn

from dispfl import ConfigError, EarlyStopping, Experiment, Federation, Full, Run, StopRun, Train
from dispfl.runs.run import RoundRecords

Points = Callable[[int, int], tuple[Tensor, Tensor]]
QUICK = Train(epochs=1, batch_size=8)


@pytest.fixture
def federation(net: Callable[[], nn.Module], points: Points) -> Callable[..., Federation]:
    """`federation(method, ...)`: three tiny peers that all receive from each other."""

    def make(method: Any = "dispfl", **changes: Any) -> Federation:
        peers = [(points(20, k), points(10, 1000 + k)) for k in range(3)]
        return Federation(net, peers, method, Full(), train=QUICK, workers=1, **changes)

    return make


def stop_after(rounds: int) -> Callable[[Run], None]:
    def stop(run: Run) -> None:
        if len(run.metrics) == rounds:
            raise StopRun(f"{rounds} rounds are enough")

    return stop


@pytest.mark.parametrize("method", ["dispfl", "fedavg", "dpsgd"])
def test_a_callback_sees_the_models_of_the_round(
    method: str, federation: Callable[..., Federation]
) -> None:
    inputs, seen = torch.ones(2, 4), list[Tensor]()
    run = federation(method, rounds=2).run(
        callbacks=[lambda run: seen.append(run.model(1)(inputs))]
    )
    assert len(seen) == 2
    assert not seen[0].equal(seen[1])
    assert seen[1].equal(run.model(1)(inputs))


def test_what_a_callback_changes_stays_with_it(federation: Callable[..., Federation]) -> None:
    def spoil(run: Run) -> None:
        run.states["000"].model.values.fill_(7.0)
        run.personal["001"].model.values.fill_(7.0)
        run.masks(0)["0.weight" if "0.weight" in run.masks(0) else next(iter(run.masks(0)))].fill_(
            False
        )
        run.metrics[-1]["scores"]["accuracy"]["mean"] = 7.0
        run.metrics[-1]["scores"]["accuracy"]["per_peer"][0] = 7.0
        assert isinstance(run.config, dict)
        run.config["seed"] = 7

    spoiled, untouched = federation(rounds=2).run(callbacks=[spoil]), federation(rounds=2).run()
    assert spoiled.summary["weights_sha256"] == untouched.summary["weights_sha256"]
    assert spoiled.accuracy == untouched.accuracy
    assert spoiled.config == untouched.config


@pytest.mark.parametrize("method", ["dispfl", "fedavg"])
def test_a_stopped_run_is_finished_and_may_be_continued_to_the_same_models(
    method: str, federation: Callable[..., Federation], tmp_path: Path
) -> None:
    fed = federation(method, eval_every=3, rounds=4)
    stopped = fed.run(tmp_path / "run", callbacks=[stop_after(2)])
    assert len(stopped.metrics) == 2
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["rounds"], summary["stopped"]) == (2, "2 rounds are enough")
    assert summary["weights_sha256"] == stopped.summary["weights_sha256"]
    assert repr(stopped).startswith(f"Run({method}, 3 peers, 2 of 4 rounds, in ")
    whole = federation(method, eval_every=3, rounds=4).run()
    continued = fed.run(tmp_path / "run", resume=True)
    assert continued.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert "stopped" not in json.loads((tmp_path / "run" / "summary.json").read_text())


def test_a_global_model_is_that_of_the_round_in_which_the_run_was_stopped(
    federation: Callable[..., Federation],
) -> None:
    """Round 1 is evaluated, round 2 is not: the models are still those after round 2."""
    inputs, seen = torch.ones(2, 4), list[Tensor]()

    def watch(run: Run) -> None:
        seen.append(run.model(0)(inputs))

    run = federation("fedavg", eval_every=2, rounds=5).run(callbacks=[watch, stop_after(3)])
    assert run.model(0)(inputs).equal(seen[2])
    assert not seen[1].equal(seen[2])


def test_all_callbacks_are_called_and_stopping_in_the_last_round_changes_nothing(
    federation: Callable[..., Federation],
) -> None:
    calls: list[int] = []
    run = federation(rounds=2).run(
        callbacks=[stop_after(2), lambda run: calls.append(len(run.metrics))]
    )
    assert calls == [1, 2]
    assert "stopped" not in run.summary


def test_an_interrupted_run_is_not_finished(
    federation: Callable[..., Federation], tmp_path: Path
) -> None:
    """A stopped run that is continued and then killed is unfinished again."""

    def interrupt(run: Run) -> None:
        raise KeyboardInterrupt

    fed = federation(rounds=3)
    fed.run(tmp_path / "run", callbacks=[stop_after(1)])
    with pytest.raises(KeyboardInterrupt):
        fed.run(tmp_path / "run", resume=True, callbacks=[interrupt])
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_run_that_is_killed_when_a_callback_stops_it_stops_there_when_it_is_resumed(
    federation: Callable[..., Federation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last round is saved, and its summary is not."""

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    fed = federation(rounds=4)
    with monkeypatch.context() as patch:
        patch.setattr("dispfl.runs.directory.RunDirectory.write_summary", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fed.run(tmp_path / "run", callbacks=[stop_after(2)])
    resumed = fed.run(tmp_path / "run", resume=True, callbacks=[stop_after(2)])
    assert (len(resumed.metrics), resumed.summary["stopped"]) == (2, "2 rounds are enough")


def records(name: str, *means: float | None) -> RoundRecords:
    """Rounds with the same mean on validation and on test data."""
    main = {"higher_is_better": name == "accuracy", "format": ".3f", "std": 0.0, "per_peer": []}
    return RoundRecords(
        [
            {
                "round": t,
                "metric": name,
                "scores": {} if mean is None else {name: main | {"mean": mean}},
            }
            | {"validation": None if mean is None else {"mean": mean}}
            for t, mean in enumerate(means)
        ],
        ["000"],
    )


@pytest.mark.parametrize(
    ("rule", "main", "means", "stops"),
    [
        (
            EarlyStopping(2),
            "accuracy",
            (0.5, 0.6, 0.6),
            False,
        ),  # one evaluation without improvement
        (EarlyStopping(2), "accuracy", (0.5, 0.6, 0.6, 0.5), True),
        (
            EarlyStopping(2),
            "accuracy",
            (0.5, 0.6, None, 0.6, None),
            False,
        ),  # rounds without evaluation do not count
        (EarlyStopping(2), "accuracy", (0.5, 0.6, None, 0.6, None, 0.6), True),
        (EarlyStopping(2, min_delta=0.2), "accuracy", (0.5, 0.6, 0.65), True),
        (
            EarlyStopping(2, min_delta=0.2),
            "accuracy",
            (0.5, 0.6, 0.75),
            False,
        ),  # 0.25 better than 0.5
        (EarlyStopping(2), "rmse", (0.5, 0.4, 0.3), False),  # a lower one is better
        (EarlyStopping(2), "rmse", (0.5, 0.6, 0.5), True),
        (
            EarlyStopping(2, "rmse"),
            "rmse",
            (0.5, 0.6, 0.5),
            True,
        ),  # on test data, because it is named
    ],
)
def test_early_stopping_counts_evaluations_without_improvement(
    rule: EarlyStopping,
    main: str,
    means: tuple[float | None, ...],
    stops: bool,
    net: Callable[[], nn.Module],
) -> None:
    run = Run({}, records(main, *means), {}, {}, net)
    if stops:
        with refused(StopRun):
            rule(run)
    else:
        rule(run)


def test_early_stopping_stops_a_run_and_a_resumed_run_in_the_same_round(
    federation: Callable[..., Federation], tmp_path: Path
) -> None:
    rule = EarlyStopping(patience=2, metric="train_loss", min_delta=100.0)  # no loss falls by that
    run = federation(rounds=9).run(callbacks=[rule])
    assert (len(run.metrics), run.summary["stopped"]) == (3, run.summary["stopped"])
    assert run.summary["stopped"].startswith("train_loss has not improved on ")

    def interrupt(run: Run) -> None:
        raise KeyboardInterrupt

    fed = federation(rounds=9)
    with pytest.raises(KeyboardInterrupt):
        fed.run(tmp_path / "run", callbacks=[rule, interrupt])
    assert len(fed.run(tmp_path / "run", callbacks=[rule], resume=True).metrics) == 3


def test_early_stopping_never_uses_test_data_unasked(
    federation: Callable[..., Federation], tmp_path: Path
) -> None:
    sentence = "EarlyStopping watches validation data, and these peers have none: give them"
    with pytest.raises(ConfigError, match=sentence):
        federation(rounds=2).run(callbacks=[EarlyStopping()], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=sentence):
        Experiment(peers=2, rounds=1).run(callbacks=[EarlyStopping()])


def test_early_stopping_watches_validation_data(
    net: Callable[[], nn.Module], points: Points
) -> None:
    """No mean can improve by 2, so the first evaluation stays the best."""
    peers = [(points(20, k), points(10, 500 + k), points(10, 1000 + k)) for k in range(3)]
    run = Federation(net, peers, train=QUICK, workers=1, rounds=9).run(
        callbacks=[EarlyStopping(2, min_delta=2.0)]
    )
    first = run.metrics[0]["validation"]["mean"]
    assert run.summary["stopped"] == f"validation has not improved on {first:.3f} in 2 evaluations"
    assert len(run.metrics) == 3


def test_a_metric_that_does_not_exist_and_a_callback_that_is_no_function_are_sentences(
    federation: Callable[..., Federation],
) -> None:
    with refused(ConfigError):
        federation(rounds=2).run(callbacks=[EarlyStopping(metric="acuracy")])
    for key in (
        "busiest",
        "failures",
        "seconds",
        "traffic",
    ):  # in the record, but no metric of the peers
        with pytest.raises(
            ConfigError,
            match=rf"EarlyStopping\(metric='{key}'\): there is no such metric; there are",
        ):
            federation(rounds=2).run(callbacks=[EarlyStopping(metric=key)])
    not_a_list: Any = EarlyStopping(metric="train_loss")
    no_function: Any = [3]
    for callbacks, got in ((no_function, r"\[3\]"), (not_a_list, "EarlyStopping")):
        sentence = f"callbacks must be a list of functions of the run, got {got}"
        with pytest.raises(ConfigError, match=sentence):
            federation().run(callbacks=callbacks)
