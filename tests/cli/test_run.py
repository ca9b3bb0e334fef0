"""`dispfl run`, as a user types it."""

import json
import shutil
import struct
import subprocess
import sys
import threading
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from program import CommandResult, Dispfl

from dispfl import Run, StopRun
from dispfl.cli.run import output_folder
from dispfl.config import compose
from dispfl.engines.checkpoint import Checkpoints
from dispfl.runs.directory import RunDirectory, layout_of, read_config, read_metrics, read_summary
from dispfl.wire.codec import Codec

TINY = [
    "peers=4",
    "rounds=3",
    "topology.degree=2",
    "partition.samples_per_peer=20",
    "partition.test_samples_per_peer=10",
    "train.epochs=1",
    "eval_every=2",
]
PARAMETERS = 105_962  # of the small CNN, for 28x28 grey images


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, made by the installed program in a separate process; not to be changed."""
    folder = tmp_path_factory.mktemp("finished")
    program = Path(sys.executable).with_name("dispfl")
    done = subprocess.run([program, "run", *TINY], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "runs/dispfl-fashion-sample"


@pytest.fixture
def stopped(finished: Path, tmp_path: Path) -> Path:
    """A copy of that run as it was before its last round."""
    path = shutil.copytree(finished, tmp_path / "stopped")
    (path / "summary.json").unlink()
    shutil.rmtree(path / "checkpoints/round-000003")
    return path


def weights(path: Path) -> list[str]:
    summary = read_summary(path)
    assert summary is not None
    return list(summary["weights_sha256"])


def test_the_directory_has_the_documented_files(finished: Path) -> None:
    assert sorted(entry.name for entry in finished.iterdir() if not entry.name.startswith(".")) == [
        "checkpoints",
        "config.toml",
        "learning-curve.png",
        "metrics.jsonl",
        "report.html",
        "split.safetensors",
        "summary.json",
    ]


def test_the_summary_agrees_with_the_metrics(finished: Path) -> None:
    summary: dict[str, Any] = json.loads((finished / "summary.json").read_text())
    records = read_metrics(finished)
    assert (summary["method"], summary["rounds"], summary["peers"]) == ("dispfl", 3, 4)
    assert summary["metric"] == "accuracy"
    assert summary["scores"] == records[-1]["scores"]
    assert summary["test_loss"] == records[-1]["test_loss"]
    accuracy = summary["scores"]["accuracy"]
    assert accuracy.keys() == {"higher_is_better", "format", "mean", "std", "per_peer"}
    assert len(accuracy["per_peer"]) == 4
    assert accuracy["mean"] == pytest.approx(sum(accuracy["per_peer"]) / 4)
    for kind in ("paper", "wire"):
        each = [record["busiest"][f"{kind}_mb"] for record in records]
        assert summary["busiest"][f"{kind}_mb_per_round"] == pytest.approx(sum(each) / 3)
    assert summary["flops_per_peer_round"] == pytest.approx(
        sum(r["flops_per_peer"] for r in records) / 3
    )
    assert summary["seconds"] == pytest.approx(
        sum(record["seconds"] for record in records), abs=0.001
    )
    assert summary["peak_rss_mb"] > 100  # torch alone needs that
    assert [len(digest) for digest in summary["weights_sha256"]] == [64] * 4
    assert summary["versions"].keys() == {"dispfl", "python", "torch", "numpy", "machine", "system"}


def test_the_busiest_node_hears_two_models_of_half_the_weights(finished: Path) -> None:
    """Degree 2, density 0.5: 2 x kept x 4 bytes as the paper counts; on the wire only what both
    ends keep."""
    (kept,) = {
        step.next_state.model.mask.kept
        for step in Checkpoints(finished / "checkpoints").load(3).values()
    }
    assert (
        PARAMETERS / 2 - 12 < kept <= PARAMETERS / 2
    )  # each of 12 parameters keeps the integer part of its share
    for record in read_metrics(finished):
        assert record["busiest"]["paper_mb"] == pytest.approx(2 * kept * 4 / 1e6)


def test_the_last_rounds_traffic_is_the_size_of_real_messages(finished: Path) -> None:
    experiment, layout = compose(read_config(finished)), layout_of(finished)
    codec = Codec(layout, experiment.method.always_dense(layout, {0.5}), experiment.wire)
    states = {
        peer: step.state for peer, step in Checkpoints(finished / "checkpoints").load(2).items()
    }
    up, down = Counter[str](), Counter[str]()
    for receiver, senders in experiment.topology.online_neighbours(
        experiment.seed, 2, sorted(states)
    ).items():
        request = codec.encode_request(states[receiver].next_mask)
        for sender in senders:
            answer = codec.encode_answer(
                states[sender].model, states[receiver].next_mask, rng=torch.Generator()
            )
            for name, sent, received in ((receiver, request, answer), (sender, answer, request)):
                up[name] += len(sent)
                down[name] += len(received)
    record = read_metrics(finished)[-1]
    assert record["traffic"] == {peer: [up[peer], down[peer]] for peer in states}
    assert record["busiest"]["wire_mb"] == max(*up.values(), *down.values()) / 1e6


def test_with_eval_every_2_the_first_of_three_rounds_is_not_evaluated_and_the_last_is(
    finished: Path,
) -> None:
    records = read_metrics(finished)
    assert [record["round"] for record in records] == [0, 1, 2]
    assert [bool(record["scores"]) for record in records] == [False, True, True]
    assert [record["mixed"] is not None for record in records] == [False, True, True]
    assert all(record["train_loss"] and record["mask_change"] for record in records)


def test_the_written_config_reproduces_the_weights(
    dispfl: Dispfl, finished: Path, tmp_path: Path
) -> None:
    result = dispfl("run", finished / "config.toml", "--out", tmp_path / "again")
    assert result.code == 0
    assert weights(tmp_path / "again") == weights(finished)
    assert (tmp_path / "again/config.toml").read_text() == (finished / "config.toml").read_text()


def test_the_seed_changes_the_weights_and_the_number_of_workers_does_not(
    dispfl: Dispfl, finished: Path, tmp_path: Path
) -> None:
    for override in ("workers=1", "seed=1"):
        assert (
            dispfl("run", finished / "config.toml", override, "--out", tmp_path / override).code
            == 0
        )
    assert weights(tmp_path / "workers=1") == weights(finished)
    assert not set(weights(tmp_path / "seed=1")) & set(weights(finished))


def test_output_is_a_line_per_round_then_the_table_then_the_path(
    dispfl: Dispfl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("runs/local-fashion-sample", "runs/local-fashion-sample-2"):
        result = dispfl("run", *TINY, "method=local", "rounds=1")
        assert (result.code, result.err) == (0, "")
        lines = result.out.splitlines()
        assert lines[:3] == [
            (
                "Data: fashion-sample, dirichlet partition; 4 peers with 20 training and 10 test"
                " samples each."
            ),
            "Network: cnn, 105,962 weights.",
            "Method: Local; 1 round of 1 epoch in batches of 32.",
        ]
        assert lines[3].startswith("A round: nothing is sent, 4")
        assert lines[4].startswith("local round 1/1 · accuracy ")
        assert lines[-2:] == [f"Run directory: {path}", f"Report: {path}/report.html"]
        assert (tmp_path / path / "report.html").read_text().startswith("<!doctype html>")
        assert (tmp_path / path / "summary.json").exists()


def test_the_first_lines_say_what_a_round_moves_and_computes_as_it_then_does(
    dispfl: Dispfl, tmp_path: Path, finished: Path
) -> None:
    path = tmp_path / "run"
    lines = dispfl(
        "run", finished / "config.toml", "rounds=1", "method.density=[0.2,0.5]", "--out", path
    ).out.splitlines()
    [record] = read_metrics(path)
    kept = {
        step.next_state.model.mask.kept
        for step in Checkpoints(path / "checkpoints").load(1).values()
    }
    assert (
        lines[1]
        == f"Network: cnn, 105,962 weights, of which a peer keeps {min(kept):,} to {max(kept):,}."
    )
    assert lines[2] == "Method: Dis-PFL, random topology; 1 round of 1 epoch in batches of 32."
    assert (
        lines[3]
        == f"A round: {record['busiest']['wire_mb']:.2f} MB on the wire of the busiest node, "
        f"{record['flops_per_peer'] / 1e6:.2f} MFLOPs of training for a peer that trains."
    )


def test_a_server_is_described_with_its_cohort(dispfl: Dispfl, tmp_path: Path) -> None:
    out = dispfl(
        "run", *TINY, "rounds=1", "method=fedavg", "method.cohort=3", "--out", tmp_path / "run"
    ).out
    assert "Method: FedAvg, a server with 3 peers a round; 1 round of" in out


def test_processes_that_start_at_the_same_time_get_folders_of_their_own(tmp_path: Path) -> None:
    barrier, found = threading.Barrier(8), set()

    def start() -> None:
        barrier.wait()
        with output_folder(None, tmp_path / "runs/mine") as path:
            (path / "config.toml").touch()
            found.add(path.name)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"mine", *(f"mine-{number}" for number in range(2, 9))}


def test_a_folder_that_nothing_was_written_to_is_removed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), output_folder(None, tmp_path / "runs/mine"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_config_file_may_be_in_a_folder_named_like_a_setting(
    dispfl: Dispfl, tmp_path: Path
) -> None:
    file = tmp_path / "rounds=9" / "config.toml"
    file.parent.mkdir()
    file.write_text("rounds = 0\n")
    assert dispfl("run", file).err == "dispfl: rounds must be at least 1, got 0.\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["method.densty=0.2"], "Unknown key method.densty. Did you mean method.density?"),
        (["lr=1"], "Unknown key lr. Did you mean train.lr?"),
        (
            ["method.density=20"],
            "method.density must be in (0, 1], got 20. To keep 20% of the weights write 0.2.",
        ),
        (["rounds=1", "peers"], "Expected key=value, got 'peers'; for example method.density=0.2."),
        (["none.toml"], "The config file none.toml does not exist."),
        (
            ["model=[/b]"],
            "model '[/b]' does not exist. Known: cnn, mlp, resnet18, text, unet, vgg11.",
        ),
        (["--resume", "none"], "none is not a run directory: it has no config.toml."),
        (
            ["partition.samples_per_peer=9999"],
            "partition.samples_per_peer is 9999 but 4000 training samples give",
        ),
    ],
)
def test_a_refusal_is_one_sentence_on_stderr_and_creates_nothing(
    dispfl: Dispfl,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = dispfl("run", *arguments)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith(f"dispfl: {sentence}")
    assert len(result.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_existing_run_is_not_overwritten(dispfl: Dispfl, finished: Path) -> None:
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    result = dispfl("run", *TINY, "--out", finished)
    assert result.code == 1
    assert f"The run directory {finished} exists already." in result.err
    assert f"--resume {finished}" in result.err
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "rounds=9",
            (
                "was run with rounds=3, got 9 (the prune rate depends on it, unless method.horizon"
                " is set). Omit it, or start a new run."
            ),
        ),
        (
            "rounds=2",
            (
                "was run with rounds=3, got 2 (a run can only be extended). Omit it, or start a new"
                " run."
            ),
        ),
        (
            "method.density=0.2",
            "was run with method.density=0.5, got 0.2. Omit it, or start a new run.",
        ),
        ("seed=7", "was run with seed=0, got 7. Omit it, or start a new run."),
        ("topology=ring", "was run with topology.degree=2, got None. Omit it, or start a new run."),
    ],
)
def test_resuming_with_another_setting_names_it_and_both_values(
    dispfl: Dispfl, stopped: Path, override: str, sentence: str
) -> None:
    assert dispfl("run", "--resume", stopped, override) == CommandResult(
        1, "", f"dispfl: {stopped} {sentence}\n"
    )


def test_a_run_resumes_with_the_same_settings_and_another_number_of_workers(
    dispfl: Dispfl, stopped: Path, finished: Path
) -> None:
    result = dispfl("run", "--resume", stopped, *TINY, "workers=1")
    assert result.code == 0
    assert next(line for line in result.out.splitlines() if " round " in line).startswith(
        "dispfl round 3/3 "
    )
    assert weights(stopped) == weights(finished)


def test_after_a_resume_with_another_engine_the_config_names_it(
    dispfl: Dispfl, stopped: Path
) -> None:
    pytest.importorskip("ray")
    config = tomllib.loads((stopped / "config.toml").read_text())
    (stopped / "config.toml").write_text(tomli_w.dumps({**config, "engine": "ray", "workers": 7}))
    assert dispfl("run", "--resume", stopped, "engine=inprocess", "workers=1").code == 0
    assert tomllib.loads((stopped / "config.toml").read_text()) == {
        **config,
        "engine": "inprocess",
        "workers": 1,
    }


def test_a_run_that_a_callback_stopped_in_python_is_continued(
    dispfl: Dispfl, tmp_path: Path
) -> None:
    def stop(run: Run) -> None:
        raise StopRun("one round is enough")

    experiment = compose({}, [*TINY, "model=mlp"])
    experiment.run(tmp_path / "run", callbacks=[stop])
    assert dispfl("run", "--resume", tmp_path / "run").code == 0
    summary = read_summary(tmp_path / "run")
    assert summary is not None
    assert (summary["rounds"], summary.get("stopped")) == (3, None)


def test_resuming_a_finished_run_shows_its_result_and_changes_nothing(
    dispfl: Dispfl, finished: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    result = dispfl("run", "--resume", finished)
    assert result.code == 0
    assert result.out.splitlines()[0] == f"{finished} is already finished."
    assert f"Run directory: {finished}" in result.out
    assert {
        path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()
    } == before


def test_resuming_a_finished_run_draws_a_missing_curve(
    dispfl: Dispfl, finished: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(finished, tmp_path / "run")
    (path / "learning-curve.png").unlink()
    assert dispfl("run", "--resume", path).code == 0
    assert (path / "learning-curve.png").read_bytes() == (
        finished / "learning-curve.png"
    ).read_bytes()


def test_resume_and_out_together_are_refused(dispfl: Dispfl, stopped: Path) -> None:
    result = dispfl("run", "--resume", stopped, "--out", stopped)
    assert result == CommandResult(
        1, "", "dispfl: --resume continues in the run's own directory; omit --out.\n"
    )


def test_a_run_in_use_is_refused(dispfl: Dispfl, stopped: Path) -> None:
    busy = RunDirectory.open(stopped)
    result = dispfl("run", "--resume", stopped)
    busy.close()
    sentence = f"Another process is using {stopped}; wait for it or stop it first."
    assert result == CommandResult(1, "", f"dispfl: {sentence}\n")


def test_lost_metrics_are_one_sentence(dispfl: Dispfl, stopped: Path) -> None:
    (stopped / "metrics.jsonl").unlink()
    result = dispfl("run", "--resume", stopped)
    assert result.code == 1
    assert (
        result.err
        == f"dispfl: {stopped / 'metrics.jsonl'} has 0 lines, but 2 rounds are finished: lines were"
        " lost. Restore the file, or start the run again.\n"
    )


def test_a_path_in_square_brackets_is_printed_unchanged(dispfl: Dispfl, stopped: Path) -> None:
    path = stopped.parent / "[bold]a" / "b[" / "b]"
    path.parent.mkdir(parents=True)
    stopped.rename(path)
    result = dispfl("run", "--resume", path)
    assert result.code == 0
    assert f"Run directory: {path}" in result.out.splitlines()
    assert f"{path} is already finished." in dispfl("run", "--resume", path).out.splitlines()


def test_failing_peers_are_named_on_the_terminal_and_in_the_metrics(
    dispfl: Dispfl, tmp_path: Path
) -> None:
    overrides = ["train.lr=1e20", "train.clip_norm=0", "rounds=1"]
    result = dispfl("run", *TINY, *overrides, "--out", tmp_path / "run")
    assert result.code == 1  # nothing was learned
    (record,) = read_metrics(tmp_path / "run")
    assert list(record["failures"]) == ["000", "001", "002", "003"]
    output = " ".join(result.out.split())
    for peer, sentence in record["failures"].items():
        assert sentence.startswith(f"Peer {peer}, round 0: the ")
        assert sentence.endswith("A smaller train.lr (now 1e+20) or train.clip_norm usually helps.")
        assert (sentence in output) == (peer != "003")
    assert "... and 1 more peers; metrics.jsonl names them all." in output
    assert "4 peers failed" in output
    assert "4 steps failed; see metrics.jsonl for the peers and reasons." in output


def write_images(folder: Path, labels: list[int]) -> Path:
    """A data set in MNIST's layout: grey squares, brighter for higher labels; the same for training
    and test."""
    folder.mkdir()
    images = np.repeat(np.array(labels, np.uint8) * 25, 28 * 28)
    for name in ("train", "t10k"):
        header = struct.pack(">4I", 0x0803, len(labels), 28, 28)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(
            struct.pack(">2I", 0x0801, len(labels)) + bytes(labels)
        )
    return folder


def test_data_may_move_between_stop_and_resume_but_must_be_the_same(
    dispfl: Dispfl, tmp_path: Path
) -> None:
    labels = [k % 10 for k in range(100)]
    old, path = write_images(tmp_path / "it's here", labels), tmp_path / "run"
    assert dispfl("run", *TINY, "data=mnist", "--data-dir", old, "--out", path).code == 0
    assert tomllib.loads((path / "config.toml").read_text())["data"]["dir"] == str(old)
    expected = weights(path)
    (path / "summary.json").unlink()
    shutil.rmtree(path / "checkpoints/round-000003")

    other = write_images(tmp_path / "other", labels[::-1])
    result = dispfl("run", "--resume", path, "--data-dir", other)
    sentence = f"The data set mnist is not the one that {path} was run with: its labels differ."
    assert result == CommandResult(1, "", f"dispfl: {sentence}\n")
    moved = old.rename(tmp_path / "moved")
    result = dispfl("run", "--resume", path)
    assert result.code == 1
    assert result.err.startswith("dispfl: The files of mnist were not found: ")
    assert tomllib.loads((path / "config.toml").read_text())["data"]["dir"] == str(old)
    assert dispfl("run", "--resume", path, "--data-dir", moved).code == 0
    assert tomllib.loads((path / "config.toml").read_text())["data"]["dir"] == str(moved)
    assert weights(path) == expected
