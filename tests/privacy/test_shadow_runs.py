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
    return [one.numpy().tobytes() for one in samples.inputs]


def test_every_member_has_a_partner_of_its_class_that_no_peer_trains_on() -> None:
    experiment = compose({}, TINY)
    data = load_dataset(experiment.data)
    split = experiment.split(data)
    candidates = find_candidates(experiment, data, split)
    train, _ = data.samples()
    assert isinstance(train, ResidentSamples)
    trained_on = {
        one for mine in split.train for one in rows_of(ResidentSamples(train.inputs[mine], mine))
    }
    partners = [one for own in candidates for one in rows_of(own.outsiders)]
    assert [len(own) for own in candidates] == [24] * 4
    assert trained_on.isdisjoint(partners)
    assert len(set(partners)) == 96
    for own, mine in zip(candidates, split.train, strict=True):
        assert own.members.labels.equal(own.outsiders.labels)
        assert sorted(own.members.labels.tolist()) == sorted(data.train_labels[mine].tolist())


def test_where_peers_have_all_training_data_partners_are_their_test_samples() -> None:
    experiment = compose(
        {}, ["peers=4", "partition.samples_per_peer=all", "partition.test_samples_per_peer=20"]
    )
    data = load_dataset(experiment.data)
    split = experiment.split(data)
    _, test = data.samples()
    assert isinstance(test, ResidentSamples)
    for own, mine, tested in zip(
        find_candidates(experiment, data, split), split.train, split.test, strict=True
    ):
        allowed = set(rows_of(ResidentSamples(test.inputs[tested], tested)))
        assert 0 < len(own) <= 20
        assert allowed.issuperset(rows_of(own.outsiders))
        assert len(own) + len(own.always) == len(
            mine
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
    split = experiment.split(data)
    _, test = data.samples()
    assert isinstance(test, ResidentSamples)
    for own, tested in zip(find_candidates(experiment, data, split), split.test, strict=True):
        assert len(own) > 0
        allowed = rows_of(ResidentSamples(test.inputs[tested], tested))
        assert set(rows_of(own.outsiders)) <= set(allowed)


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
    own = overfitted.candidates["000"]
    classes = torch.bincount(own.members.labels)
    seen = torch.zeros(2 * len(own), dtype=torch.int64)
    for number in range(4):
        coins = overfitted.coins(number, "000")
        chosen = own.chosen(coins)
        assert torch.bincount(chosen.labels).equal(classes)
        assert set(rows_of(chosen)) == {
            one for one, member in zip(rows_of(own.members), coins, strict=True) if member
        } | {one for one, member in zip(rows_of(own.outsiders), coins, strict=True) if not member}
        seen += torch.cat([coins, ~coins])
    assert seen.tolist() == [2] * 2 * len(own)


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
    for peer, own in overfitted.candidates.items():
        samples, coins = overfitted._canaries_of(peer)
        assert rows_of(samples) == rows_of(own.outsiders)[:12]
        assert not (samples.labels == own.outsiders.labels[:12]).any()
        data = own.with_canaries(samples, coins)
        assert len(data) == 24 == len(overfitted.context.peers[peer].train)
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
    found = torch.cat([p.detach().reshape(-1) for p in network.parameters()])
    (theirs, held), (own, mine) = states["002"].model.unpack(), states["000"].model.unpack()
    requested = states["000"].next_mask.unpack()
    assert found[requested & held].equal(theirs[requested & held])
    assert found[requested & ~held].equal(own[requested & ~held])
    assert not found[~requested].any()
    assert int((requested & held & ~mine).sum()) > 0  # what it has just regrown


def test_a_method_that_sends_nothing_is_attacked_at_its_personal_models_only(
    overfitted: Audit, gossip: Path
) -> None:
    assert [one.view for one in overfitted.result().membership] == ["personal model"]
    views = [one.view for one in Audit(gossip, 0, 0).result().membership]
    assert views == ["personal model", "what a neighbour received"]


# What is found


def test_peers_that_learned_their_samples_by_heart_give_them_away(overfitted: Audit) -> None:
    result = overfitted.result()
    [found] = result.membership
    assert found.auc.value > found.auc.low > 0.6
    assert result.pairs == 96
    assert found.tpr["0.001"] is None
    assert result.canaries is not None
    assert result.canaries.canaries == 48
    assert result.canaries.epsilon > 0.5
    assert result.accounted_epsilon is None


def test_samples_that_the_run_never_saw_are_not_found(overfitted: Audit, tmp_path: Path) -> None:
    """Both sides of every pair are outsiders: likelihood ratios of the same shadows must not tell
    them apart."""
    audit = Audit(overfitted.path, 0, 0)
    half = {}
    for peer, own in overfitted.candidates.items():
        order = torch.argsort(own.outsiders.labels, stable=True)
        first, second = order[0::2], order[1::2]
        length = min(len(first), len(second))
        half[peer] = replace(
            own,
            members=own.outsiders.take(first[:length]),
            outsiders=own.outsiders.take(second[:length]),
        )
    audit.__dict__["candidates"] = half
    [found] = audit.result().membership
    assert found.auc.low < 0.5 < found.auc.high


def test_without_shadows_the_confidence_alone_is_the_score(overfitted: Audit) -> None:
    audit = Audit(overfitted.path, 0, 0)
    assert audit.runs == []
    [found] = audit.result().membership
    assert found.auc.value > 0.6


def test_an_audit_that_is_killed_in_a_shadow_is_resumed_to_the_same_models(tmp_path: Path) -> None:
    def digests(path: Path) -> list[str]:
        summary = read_summary(path)
        assert summary is not None
        return list(summary["weights_sha256"])

    whole, cut = trained(tmp_path / "whole", *TINY, "rounds=8", "topology=full"), tmp_path / "cut"
    shutil.copytree(whole, cut)
    run_missing(Audit(whole, 2, 0).runs[:1])
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
    assert digests(whole / "audit" / "shadow-0") == digests(cut / "audit" / "shadow-0")
    assert set(digests(whole / "audit" / "shadow-0")).isdisjoint(digests(whole))


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
    other = replace(run, experiment=run.experiment.model_copy(update={"rounds": 7}))
    with pytest.raises(
        RunError,
        match=r"was trained with rounds=1, the audited run has 7. Delete .*audit to audit it",
    ):
        other.check()


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
