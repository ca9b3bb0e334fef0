"""Shadow federations and canaries: on which samples peers train, what attackers see, and what is
found."""

import os
import shutil
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from messages import refused
from torch.utils.data import TensorDataset

from dispfl.config import compose
from dispfl.core.rng import stream
from dispfl.data.batches import DatasetSamples, ResidentSamples
from dispfl.data.datasets import load_dataset
from dispfl.errors import RunError
from dispfl.privacy.audit.run_audit import Audit
from dispfl.privacy.audit.shadow_runs import AllData, CanarySamples, find_candidates
from dispfl.privacy.steps import PrivateSteps, SecretStream
from dispfl.runs.directory import SECRET_KEY, read_metrics, read_split, read_summary
from dispfl.runs.execute import ExperimentRun
from dispfl.runs.grid import run_missing
from dispfl.runs.prepare import split_dataset

TINY = [
    "peers=4",
    "rounds=2",
    "model=mlp",
    "workers=1",
    "partition.samples_per_peer=24",
    "train.batch_size=8",
]
OVERFITTED = [*TINY, "method=local", "rounds=1", "train.epochs=20"]


def trained(path: Path, *overrides: str) -> Path:
    ExperimentRun.create(compose({}, overrides), path).run()
    return path


@pytest.fixture(scope="module")
def overfitted(tmp_path_factory: pytest.TempPathFactory) -> Audit:
    """An audit of peers that learned their 24 samples by heart, with everything trained."""
    audit = Audit(trained(tmp_path_factory.mktemp("audit") / "run", *OVERFITTED), 4, 12)
    run_missing(audit.runs)
    return audit


@pytest.fixture(scope="module")
def gossip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("audit") / "run", *TINY, "topology=full")


# Candidates


def rows_of(samples: ResidentSamples) -> list[bytes]:
    return [sample.numpy().tobytes() for sample in samples.inputs]


def test_every_member_has_a_partner_of_its_class_that_no_peer_trains_on() -> None:
    experiment = compose({}, TINY)
    data = load_dataset(experiment.data)
    split = split_dataset(experiment, data)
    candidates = find_candidates(experiment, data, split)
    train, _ = data.samples()
    assert isinstance(train, ResidentSamples)
    all_rows = torch.cat(split.train)
    trained_on = set(rows_of(ResidentSamples(train.inputs[all_rows], all_rows)))
    partners = []
    for pairs, rows in zip(candidates, split.train, strict=True):
        assert len(pairs) == 24
        assert pairs.members.labels.equal(pairs.outsiders.labels)
        assert sorted(pairs.members.labels.tolist()) == sorted(data.train_labels[rows].tolist())
        partners += rows_of(pairs.outsiders)
    assert trained_on.isdisjoint(partners)
    assert len(set(partners)) == 96


def test_where_peers_have_all_training_data_partners_are_their_test_samples() -> None:
    experiment = compose(
        {}, ["peers=4", "partition.samples_per_peer=all", "partition.test_samples_per_peer=20"]
    )
    data = load_dataset(experiment.data)
    split = split_dataset(experiment, data)
    _, test = data.samples()
    assert isinstance(test, ResidentSamples)
    for pairs, rows, tested in zip(
        find_candidates(experiment, data, split), split.train, split.test, strict=True
    ):
        allowed = set(rows_of(ResidentSamples(test.inputs[tested], tested)))
        assert 0 < len(pairs) <= 20
        assert allowed.issuperset(rows_of(pairs.outsiders))
        assert len(pairs) + len(pairs.always) == len(
            rows
        )  # members without a partner are in every training set


def test_where_a_column_divides_the_data_partners_come_from_the_peers_own_test_samples(
    tmp_path: Path,
) -> None:
    lines = [
        f"{k % 3},{k},{'yes' if k % 2 else 'no'},{'north' if k % 4 < 2 else 'south'}"
        for k in range(80)
    ]
    (tmp_path / "rows.csv").write_text("a,b,label,region\n" + "\n".join(lines) + "\n")
    overrides = [
        f"data.path={tmp_path / 'rows.csv'}",
        "data=custom",
        "partition=by_column",
        "partition.column=region",
    ]
    experiment = compose({}, [*overrides, "peers=2", "model=mlp", "partition.samples_per_peer=10"])
    data = load_dataset(experiment.data)
    split = split_dataset(experiment, data)
    _, test = data.samples()
    assert isinstance(test, ResidentSamples)
    for pairs, tested in zip(find_candidates(experiment, data, split), split.test, strict=True):
        assert len(pairs) > 0
        allowed = rows_of(ResidentSamples(test.inputs[tested], tested))
        assert set(rows_of(pairs.outsiders)) <= set(allowed)


def test_samples_of_a_dataset_are_read_in_the_order_that_is_asked_for() -> None:
    x, y = torch.arange(10.0)[:, None], torch.arange(10)
    train = DatasetSamples(TensorDataset(x[:6], y[:6]))  # type: ignore[arg-type]
    test = DatasetSamples(TensorDataset(x[6:], y[6:]))  # type: ignore[arg-type]
    everything = AllData(train, test, y)
    assert everything.read(torch.tensor([7, 0, 9, 5])).labels.tolist() == [7, 0, 9, 5]
    assert everything.read(torch.tensor([7, 0, 9, 5])).inputs.squeeze(1).tolist() == [7, 0, 9, 5]
    assert len(everything.read(torch.tensor([], dtype=torch.int64))) == 0


def test_shadows_have_as_many_samples_of_each_class_and_every_sample_is_in_half_of_them(
    overfitted: Audit,
) -> None:
    pairs = overfitted.candidates["000"]
    classes = torch.bincount(pairs.members.labels)
    uses = torch.zeros(2 * len(pairs), dtype=torch.int64)
    for number in range(4):
        coins = overfitted.coins(number, "000")
        chosen = pairs.chosen(coins)
        assert torch.bincount(chosen.labels).equal(classes)
        expected = set()
        for member, outsider, coin in zip(
            rows_of(pairs.members), rows_of(pairs.outsiders), coins, strict=True
        ):
            expected.add(member if coin else outsider)
        assert set(rows_of(chosen)) == expected
        uses += torch.cat([coins, ~coins])
    assert uses.tolist() == [2] * 2 * len(pairs)


# Canaries


def test_canaries_that_are_left_out_count_but_are_in_no_batch() -> None:
    samples = ResidentSamples(torch.arange(6.0)[:, None], torch.arange(6))
    present = torch.tensor([True, False, True, False, False, False])
    half = CanarySamples(samples, present)
    assert len(half) == 6
    assert sorted(
        y for _, labels in half.batches(4, rng=stream(0, "test")) for y in labels.tolist()
    ) == [0, 2]
    [(x, y)] = half.take(torch.tensor([1, 3])).batches(2)
    assert (tuple(x.shape), tuple(y.shape)) == ((0, 1), (0,))
    private = PrivateSteps(SecretStream(b"k"), ("000", 0), 1.0, 1.0, 1.0, 6.0)
    [(_, labels)] = private.batches(half, 1)
    assert sorted(labels.tolist()) == [0, 2]


def test_canaries_have_wrong_labels_and_leave_the_number_of_samples_as_it_is(
    overfitted: Audit,
) -> None:
    for peer, pairs in overfitted.candidates.items():
        samples, coins = overfitted._canaries_of(peer)
        assert rows_of(samples) == rows_of(pairs.outsiders)[:12]
        assert not (samples.labels == pairs.outsiders.labels[:12]).any()
        data = pairs.with_canaries(samples, coins)
        assert len(data) == 24 == len(overfitted.context.data.peers[peer].train)
        assert int(data.present.sum()) == 12 + int(coins.sum())


# What attackers see


def test_a_neighbour_has_the_senders_weights_where_both_hold_them_and_its_own_elsewhere(
    gossip: Path,
) -> None:
    audit = Audit(gossip, 0, 0)
    federation = audit._federation()
    states = federation.before_last_round
    network = federation.received("002")
    assert network is not None
    received = torch.cat([p.detach().reshape(-1) for p in network.parameters()])
    w_j, m_j = states["002"].model.unpack()
    w_k, m_k = states["000"].model.unpack()
    requested = states["000"].next_mask.unpack()
    assert received[requested & m_j].equal(w_j[requested & m_j])
    assert received[requested & ~m_j].equal(w_k[requested & ~m_j])
    assert not received[~requested].any()
    assert int((requested & m_j & ~m_k).sum()) > 0  # what it has just regrown


def test_a_method_that_sends_nothing_is_attacked_at_its_personal_models_only(
    overfitted: Audit, gossip: Path
) -> None:
    assert [attack.view for attack in overfitted.result().membership] == ["personal model"]
    views = [attack.view for attack in Audit(gossip, 0, 0).result().membership]
    assert views == ["personal model", "what a neighbour received"]


# What is found


def test_peers_that_learned_their_samples_by_heart_give_them_away(overfitted: Audit) -> None:
    result = overfitted.result()
    [attack] = result.membership
    assert attack.auc.value > attack.auc.low > 0.6
    assert result.pairs == 96
    assert attack.tpr["0.001"] is None
    assert result.canaries is not None
    assert result.canaries.canaries == 48
    assert result.canaries.epsilon > 0.5
    assert result.accounted_epsilon is None


def test_samples_that_the_run_never_saw_are_not_found(overfitted: Audit, tmp_path: Path) -> None:
    """Both sides of every pair are outsiders: likelihood ratios of the same shadows must not tell
    them apart."""
    audit = Audit(overfitted.path, 0, 0)
    half = {}
    for peer, pairs in overfitted.candidates.items():
        order = torch.argsort(pairs.outsiders.labels, stable=True)
        first, second = order[0::2], order[1::2]
        length = min(len(first), len(second))
        half[peer] = replace(
            pairs,
            members=pairs.outsiders.take(first[:length]),
            outsiders=pairs.outsiders.take(second[:length]),
        )
    audit.__dict__["candidates"] = half
    [attack] = audit.result().membership
    assert attack.auc.low < 0.5 < attack.auc.high


def test_without_shadows_the_confidence_alone_is_the_score(overfitted: Audit) -> None:
    audit = Audit(overfitted.path, 0, 0)
    assert audit.runs == []
    [attack] = audit.result().membership
    assert attack.auc.value > 0.6


def test_an_audit_that_is_killed_in_a_shadow_is_resumed_to_the_same_models(tmp_path: Path) -> None:
    def digests(path: Path) -> list[str]:
        summary = read_summary(path)
        assert summary is not None
        return list(summary["weights_sha256"])

    complete = trained(tmp_path / "whole", *TINY, "rounds=8", "topology=full")
    cut = tmp_path / "cut"
    shutil.copytree(complete, cut)
    run_missing(Audit(complete, 2, 0).runs[:1])
    program = [sys.executable, "-c", "from dispfl.cli import main; main()", "audit", str(cut)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*program, "--shadows", "2", "--canaries", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "shadow-0 · round 1/8" in line:
                process.kill()
    assert process.returncode == -signal.SIGKILL
    resumed = Audit(cut, 2, 0).runs[:1]
    assert resumed[0].finished_rounds >= 1
    run_missing(resumed)
    assert digests(complete / "audit" / "shadow-0") == digests(cut / "audit" / "shadow-0")
    assert set(digests(complete / "audit" / "shadow-0")).isdisjoint(digests(complete))


def test_a_private_run_is_audited_with_its_own_noise_and_leaves_no_secrets(tmp_path: Path) -> None:
    path = trained(
        tmp_path / "run", *TINY, "privacy.noise_multiplier=1", "train.epochs=1", "topology=full"
    )
    audit = Audit(path, 2, 6)
    audit.make_folder()
    run_missing(audit.runs)
    result = audit.result()
    audit.write(result)
    spent = read_metrics(path)[-1]["epsilon"]["per_peer"]
    assert result.accounted_epsilon == max(spent)
    assert result.canaries is not None
    assert result.canaries.epsilon <= result.canaries.largest < max(spent)
    for (
        run
    ) in audit.runs:  # the same plan: the number of samples, and so the sampling rate and the noise
        assert read_metrics(run.path)[-1]["epsilon"]["per_peer"] == spent
    assert not list(path.rglob(SECRET_KEY))
    assert stat.S_IMODE((path / "audit").stat().st_mode) == 0o700
    saved = read_split(path)
    assert saved is not None
    assert not set(np.unique(torch.cat(saved[0].train))) & {
        int(word)
        for word in (path / "audit.json").read_text().replace(",", " ").split()
        if word.isdecimal()
    } - set(range(200))  # no row numbers


def test_shadows_of_other_settings_are_refused(overfitted: Audit) -> None:
    run = overfitted.runs[0]
    longer = replace(run, experiment=run.experiment.model_copy(update={"rounds": 7}))
    with refused(RunError):
        longer.check()


def test_training_that_forgets_its_noise_is_caught_by_canaries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SecretStream, "normal", lambda self, size, *names: torch.zeros(size))
    settings = [*OVERFITTED, "train.steps=40", "train.lr=1", "privacy.noise_multiplier=40"]
    audit = Audit(trained(tmp_path / "run", *settings), 0, 20)
    run_missing(audit.runs)
    result = audit.result()
    assert result.canaries is not None
    assert result.accounted_epsilon is not None
    assert result.canaries.epsilon > 1 > result.accounted_epsilon
