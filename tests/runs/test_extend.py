"""A finished run is extended to more rounds, and nothing tells it from a run that had been started
with so many."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refused
from program import Dispfl, dispfl
from torch import nn

from dispfl import DisPFL, FedAvg, Federation, Method, Train
from dispfl.config import compose
from dispfl.errors import ConfigError, RunError
from dispfl.runs.directory import read_config, read_metrics, read_summary
from dispfl.runs.execute import ExperimentRun, run_experiment
from dispfl.runs.grid import GridCallbacks, RunState, methods_grid, run_missing
from dispfl.runs.loop import RunObserver

__all__ = ["dispfl"]  # a fixture

TINY = [
    "peers=3",
    "topology.degree=2",
    "partition.samples_per_peer=8",
    "partition.test_samples_per_peer=4",
    "train.epochs=1",
    "workers=1",
]
Outcome = tuple[list[str], list[dict[str, Any]]]
"""The digest of everyone's weights, and all rounds' metrics without their seconds."""


def result(path: Path) -> Outcome:
    summary, timed = read_summary(path), ("seconds", "peer_seconds")
    assert summary is not None
    records = [
        {key: value for key, value in record.items() if key not in timed}
        for record in read_metrics(path)
    ]
    return summary["weights_sha256"], records


@pytest.mark.parametrize(
    "settings",
    [
        ["method=fedavg", "method.cohort=2"],
        ["method=fedavg-ft", "method.tune_epochs=1", "method.tune_every=2"],
        ["method=dpsgd", "eval_every=2"],
        ["method=subfedavg", "eval_every=2"],
        [
            "method=local",
            "eval_every=2",
            "train.schedule=step",
            "train.lr_step=2",
            "train.warmup=1",
        ],
        ["method.horizon=4", "eval_every=2", "train.momentum=0.9", "train.keep_moments=true"],
        ["method.horizon=2", "method.structure=channels", "eval_every=2"],
    ],
    ids=" ".join,
)
def test_three_rounds_extended_to_five_are_a_run_of_five(
    tmp_path: Path, settings: list[str]
) -> None:
    """With eval_every=2 the third round is evaluated only while it is the last: it is repeated
    without that."""
    run_experiment(compose({}, [*TINY, *settings, "rounds=5"]), tmp_path / "whole")
    run_experiment(compose({}, [*TINY, *settings, "rounds=3"]), tmp_path / "run")
    assert len(result(tmp_path / "run")[1]) == 3
    ExperimentRun.resume(tmp_path / "run", ["rounds=5"]).run()
    assert result(tmp_path / "run") == result(tmp_path / "whole")
    assert (tmp_path / "run/config.toml").read_text() == (
        tmp_path / "whole/config.toml"
    ).read_text()


def test_a_stop_at_any_round_of_an_extension_loses_nothing(tmp_path: Path) -> None:
    settings = [*TINY, "method=dpsgd", "eval_every=2"]
    run_experiment(compose({}, [*settings, "rounds=6"]), tmp_path / "whole")
    run_experiment(compose({}, [*settings, "rounds=3"]), tmp_path / "finished")

    def stop(record: Any) -> None:
        raise KeyboardInterrupt

    for moment in ("before any round", "after each round"):
        path = shutil.copytree(tmp_path / "finished", tmp_path / moment)
        ExperimentRun.resume(path, ["rounds=6"]).directory.close()
        assert (read_config(path)["rounds"], read_summary(path)) == (6, None)
        while read_summary(path) is None:
            resumed = ExperimentRun.resume(path)
            if moment == "after each round" and len(read_metrics(path)) < 6:
                with pytest.raises(KeyboardInterrupt):
                    resumed.run(RunObserver(round=stop))
            else:
                resumed.run()
        assert result(path) == result(tmp_path / "whole")


@pytest.mark.parametrize("method", ["local", "dpsgd"])
def test_a_run_stopped_in_its_last_round_and_then_extended_is_the_longer_run(
    tmp_path: Path, method: str
) -> None:
    """The steps that were finished had been evaluated, because theirs was the last round."""
    settings = [*TINY, f"method={method}", "eval_every=3"]
    run_experiment(compose({}, [*settings, "rounds=3"]), tmp_path / "whole")
    steps = []

    def stop() -> None:
        steps.append(1)
        if len(steps) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ExperimentRun.create(compose({}, [*settings, "rounds=1"]), tmp_path / "run").run(
            RunObserver(step=stop)
        )
    ExperimentRun.resume(tmp_path / "run", ["rounds=3"]).run()
    assert result(tmp_path / "run") == result(tmp_path / "whole")


def test_the_last_round_is_not_given_up_where_the_one_before_it_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = [*TINY, "method=local", "eval_every=2"]
    run_experiment(compose({}, [*settings, "rounds=5"]), tmp_path / "whole")
    run_experiment(compose({}, [*settings, "rounds=3"]), tmp_path / "run")
    (tmp_path / "run/checkpoints/round-000002/part-000.safetensors").write_bytes(b"torn")
    rounds = []
    ExperimentRun.resume(tmp_path / "run", ["rounds=5"]).run(
        RunObserver(round=lambda m: rounds.append(m["round"]))
    )
    assert rounds == [3, 4]
    assert "round-000002.damaged" in caplog.text
    assert result(tmp_path / "run")[0] == result(tmp_path / "whole")[0]


def test_the_last_round_is_not_given_up_where_it_is_the_only_checkpoint(tmp_path: Path) -> None:
    """An earlier resume, or a person, may have moved the damaged one before it away."""
    settings = [*TINY, "method=local", "eval_every=2"]
    run_experiment(compose({}, [*settings, "rounds=5"]), tmp_path / "whole")
    run_experiment(compose({}, [*settings, "rounds=3"]), tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/round-000002")
    rounds = []
    ExperimentRun.resume(tmp_path / "run", ["rounds=5"]).run(
        RunObserver(round=lambda metrics: rounds.append(metrics["round"]))
    )
    assert rounds == [3, 4]
    assert result(tmp_path / "run")[0] == result(tmp_path / "whole")[0]


def test_a_run_stopped_between_the_two_steps_of_an_extension_is_that_of_before(
    tmp_path: Path,
) -> None:
    """The summary goes first, then the config is replaced."""
    path = tmp_path / "run"
    run_experiment(compose({}, [*TINY, "method=local", "rounds=2"]), path)
    before = result(path)
    (path / "summary.json").unlink()
    ExperimentRun.resume(path).run()
    assert result(path) == before


@pytest.mark.parametrize(
    ("settings", "rounds", "sentence"),
    [
        (
            [],
            5,
            (
                r"rounds=2, got 5 \(the prune rate depends on it, unless method.horizon is set\)\."
                r" Omit it, or"
            ),
        ),
        (
            ["method=local", "train.schedule=cosine"],
            5,
            r"\(the learning rate of train.schedule=cosine depends on it\)",
        ),
        (["method=local"], 1, r"rounds=2, got 1 \(a run can only be extended\)"),
    ],
)
def test_a_run_with_a_schedule_over_all_rounds_is_not_extended(
    tmp_path: Path, settings: list[str], rounds: int, sentence: str
) -> None:
    run_experiment(compose({}, [*TINY, *settings, "rounds=2"]), tmp_path / "run")
    before = result(tmp_path / "run")
    with pytest.raises(RunError, match=sentence):
        ExperimentRun.resume(tmp_path / "run", [f"rounds={rounds}"])
    assert result(tmp_path / "run") == before


def edit_rounds(path: Path, before: int, after: int) -> None:
    """Change the number of rounds in a run's config, as a user does in an editor."""
    config = path / "config.toml"
    text = config.read_text()
    assert f"rounds = {before}\n" in text
    config.write_text(text.replace(f"rounds = {before}\n", f"rounds = {after}\n"))


def test_rounds_edited_in_a_finished_runs_config_extend_it_where_that_is_possible(
    tmp_path: Path, dispfl: Dispfl
) -> None:
    settings = [*TINY, "method=local"]
    run_experiment(compose({}, [*settings, "rounds=4"]), tmp_path / "whole")
    run_experiment(compose({}, [*settings, "rounds=2"]), tmp_path / "run")
    edit_rounds(tmp_path / "run", 2, 4)
    resumed = dispfl("run", "--resume", tmp_path / "run")
    assert resumed.code == 0, resumed.err
    assert result(tmp_path / "run") == result(tmp_path / "whole")


@pytest.mark.parametrize(("after", "reason"), [(5, "the prune rate depends on it"), (1, "only be")])
def test_rounds_edited_in_a_finished_runs_config_are_refused_where_they_do_not_fit(
    tmp_path: Path, dispfl: Dispfl, after: int, reason: str
) -> None:
    run_experiment(compose({}, [*TINY, "rounds=2"]), tmp_path / "run")
    before = result(tmp_path / "run")
    edit_rounds(tmp_path / "run", 2, after)
    resumed = dispfl("run", "--resume", tmp_path / "run")
    assert resumed.code == 1
    assert f"has run 2 rounds, and its config.toml now says rounds={after}" in " ".join(
        resumed.err.split()
    )
    assert reason in resumed.err
    assert result(tmp_path / "run") == before


def test_a_comparison_with_more_rounds_extends_its_runs(tmp_path: Path) -> None:
    arguments = ["local", "dispfl@method.horizon=3", *TINY]
    run_missing(methods_grid([*arguments, "rounds=2"], {}, 1, tmp_path))
    cells = methods_grid([*arguments, "rounds=3"], {}, 1, tmp_path)
    assert [cell.state for cell in cells] == [RunState.INTERRUPTED] * 2
    rounds: list[int] = []
    watched = RunObserver(round=lambda record: rounds.append(record["round"]))
    run_missing(cells, GridCallbacks(run=lambda cell: watched))
    assert rounds == [2, 2]
    assert [cell.state for cell in cells] == [RunState.DONE] * 2
    run_experiment(cells[1].experiment, tmp_path / "whole")
    assert result(cells[1].path) == result(tmp_path / "whole")


def test_the_horizon_of_all_rounds_is_the_default_and_masks_rest_after_it(tmp_path: Path) -> None:
    for name, settings in {
        "default": [],
        "all": ["method.horizon=4"],
        "short": ["method.horizon=2"],
    }.items():
        run_experiment(compose({}, [*TINY, *settings, "rounds=4"]), tmp_path / name)
    assert result(tmp_path / "default") == result(tmp_path / "all")
    changes = [record["mask_change"]["mean"] for record in read_metrics(tmp_path / "short")]
    assert changes[0] > changes[1] > 0
    assert changes[2:] == [0, 0]  # annealed over 2 rounds: 0.5, 0.25, then 0


def federation(method: Method, **options: Any) -> Federation:
    def points(which: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(12, 4, generator=torch.Generator().manual_seed(which))
        return inputs, inputs[:, :3].argmax(1)

    pairs = [(points(k), points(10 + k)) for k in range(3)]
    return Federation(
        lambda: nn.Linear(4, 3),
        pairs,
        method,
        train=Train(epochs=1, batch_size=4),
        workers=1,
        **options,
    )


@pytest.mark.parametrize(
    "method", [FedAvg(cohort=2), DisPFL(horizon=3)], ids=lambda method: method.name
)
def test_python_extends_a_run_too(tmp_path: Path, method: Method) -> None:
    federation(method, eval_every=2, rounds=5).run(tmp_path / "whole")
    federation(method, eval_every=2, rounds=3).run(tmp_path / "run")
    extended = federation(method, eval_every=2, rounds=5).run(tmp_path / "run", resume=True)
    assert len(extended.metrics) == 5
    assert result(tmp_path / "run") == result(tmp_path / "whole")
    assert read_config(tmp_path / "run") == read_config(tmp_path / "whole")


def test_python_refuses_what_the_command_line_refuses(tmp_path: Path) -> None:
    federation(DisPFL(), rounds=2).run(tmp_path / "run")
    with refused(ConfigError, key="rounds"):
        federation(DisPFL(), rounds=4).run(tmp_path / "run", resume=True)
