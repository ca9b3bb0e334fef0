"""A real site that trains with differential privacy: fresh noise in every attempt, and nothing
spent is forgotten."""

import asyncio
import io
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from messages import refused
from tables import small_table

from dispfl import extras
from dispfl.errors import ConfigError, RunError
from dispfl.methods.base import PeerState
from dispfl.peer.deadlines import Deadlines
from dispfl.peer.doctor.examine import examine
from dispfl.peer.local_federation import free_ports
from dispfl.peer.run_site import TrainingThread, open_node, run_node, run_site
from dispfl.peer.setup.local_setup import LocalSetup, local_setup
from dispfl.peer.setup.site_config import SiteConfig
from dispfl.peer.site import Site, SiteInfo
from dispfl.peer.state.log import event_logger
from dispfl.peer.state.store import PrivateRounds
from dispfl.privacy.accountant import StepsTaken, spent_epsilon
from dispfl.round.context import PeerTask, StepResult
from dispfl.runs.directory import SECRET_KEY, read_metrics, read_summary


@pytest.fixture
def make_site(tmp_path: Path) -> Callable[..., Site]:
    def make(rounds: int, settings: Mapping[str, object] | None = None, **privacy: float) -> Site:
        values = {
            "rounds": rounds,
            "model": {"name": "mlp"},
            "data": {"path": "table.csv", "label": "y", "classes": ["x", "z"]},
            "train": {"epochs": 1, "batch_size": 8},
            "privacy": privacy,
            **(settings or {}),
        }
        [port] = free_ports(1)
        info = SiteInfo(name="alice", listen=f"127.0.0.1:{port}")
        site = Site.create(tmp_path / "alice", info, SiteConfig.from_values(values).to_toml())
        (site.folder / "table.csv").write_text(small_table(16))
        return site

    return make


def take_step(setup: LocalSetup, folder: Path, state: PeerState | None = None) -> StepResult:
    """One round, as a node that has just been started takes it."""
    run = replace(setup.run, secret_key=b"k" * 32)
    training = TrainingThread(run, 1, PrivateRounds(folder))
    try:
        return asyncio.run(training.step(PeerTask("alice", 0), state or setup.initial_state(), {}))
    finally:
        training.close()


def test_a_site_finishes_within_its_budget_and_writes_no_key(
    make_site: Callable[..., Site],
) -> None:
    site = make_site(3, epsilon=8.0)
    events: list[str] = []

    def log(event: str, fields: object) -> None:
        events.append(event)
        if event == "round":
            assert not (site.run_folder / SECRET_KEY).exists()

    asyncio.run(run_node(site, local_setup(site), Deadlines(min=0.1, startup=0.1), log))
    assert events.count("round") == 3
    spent = [record["epsilon"]["mean"] for record in read_metrics(site.run_folder)]
    assert 0 < spent[0] < spent[1] < spent[2] <= 8.0
    assert spent[2] > 7.5
    assert read_summary(site.run_folder) is not None
    assert not (site.run_folder / SECRET_KEY).exists()
    assert PrivateRounds(site.run_folder).begun.rounds == 3


def test_a_site_that_skips_rounds_spends_for_the_steps_that_it_takes(
    make_site: Callable[..., Site],
) -> None:
    """The noise is that of all rounds, so it ends below its budget."""
    site = make_site(12, {"schedule": "async"}, epsilon=8.0)
    setup = local_setup(site)
    log = event_logger("alice", to=io.StringIO())
    deadlines = Deadlines(min=0.1, startup=0.1)
    asyncio.run(run_node(site, setup, deadlines, log, at_round=9))
    records = read_metrics(site.run_folder)
    assert [record["round"] for record in records] == [9, 10, 11]
    plan = setup.run.privacy_plan("alice")
    assert PrivateRounds(site.run_folder).begun.rounds == 3
    assert records[-1]["epsilon"]["mean"] == plan.spent(3 * plan.steps_per_round)
    assert records[-1]["epsilon"]["mean"] < plan.spent(12 * plan.steps_per_round) <= 8.0


def test_a_round_that_is_repeated_after_a_crash_has_new_noise_and_is_counted_again(
    make_site: Callable[..., Site], tmp_path: Path
) -> None:
    setup = local_setup(make_site(10, noise_multiplier=2.0))
    first, again = take_step(setup, tmp_path), take_step(setup, tmp_path)
    assert not torch.equal(first.next_state.model.values, again.next_state.model.values)
    assert first.report.epsilon is not None
    assert again.report.epsilon is not None
    assert again.report.epsilon > first.report.epsilon
    assert PrivateRounds(tmp_path).begun.rounds == 2


def test_a_site_that_is_set_back_to_a_backup_does_not_repeat_its_noise(
    make_site: Callable[..., Site], tmp_path: Path
) -> None:
    """Two models with the same noise, of different neighbours' models, would reveal the gradients
    without it."""
    site, backup = make_site(2, noise_multiplier=2.0), tmp_path / "backup"

    def back_up(event: str, fields: Mapping[str, object]) -> None:
        if event == "round" and fields["round"] == 0:
            shutil.copytree(site.run_folder, backup)

    deadlines = Deadlines(min=0.1, startup=0.1)
    first = asyncio.run(run_node(site, local_setup(site), deadlines, back_up))
    shutil.rmtree(site.run_folder)
    backup.rename(site.run_folder)
    again = asyncio.run(run_node(site, local_setup(site), deadlines, event_logger("alice")))
    assert [record["round"] for record in read_metrics(site.run_folder)] == [0, 1]
    assert not torch.equal(first.model.values, again.model.values)


def privacy_finding(site: Site) -> tuple[str, str]:
    """What `dispfl peer doctor` says about a site's privacy."""
    [finding] = [finding for finding in examine(site.folder) if finding.topic == "privacy"]
    return finding.level, finding.text


def test_doctor_warns_of_a_budget_that_does_not_last_for_all_rounds(
    make_site: Callable[..., Site],
) -> None:
    site = make_site(5, noise_multiplier=2.0, epsilon=3.0)
    assert privacy_finding(site) == ("ok", "epsilon 0 is spent, with a budget of 3 (delta 1e-05)")
    quiet = event_logger("alice", to=io.StringIO())
    asyncio.run(run_node(site, local_setup(site), Deadlines(min=0.1, startup=0.1), quiet))
    begun = PrivateRounds(site.run_folder).begun.rounds
    assert 0 < begun < 5
    level, text = privacy_finding(site)
    assert level == "warning"
    assert text.endswith("not enough for another round, so this site no longer trains")


def test_a_restarted_site_shows_and_announces_what_it_has_spent_before_its_next_round(
    make_site: Callable[..., Site],
) -> None:
    site = make_site(2, noise_multiplier=2.0, epsilon=20.0)
    quiet = event_logger("alice", to=io.StringIO())
    asyncio.run(run_node(site, local_setup(site), Deadlines(min=0.1, startup=0.1), quiet))
    spent = (site.status() or {})["epsilon"]
    assert spent > 0

    async def restart(setup: LocalSetup) -> tuple[float | None, object]:
        async with open_node(Site.open(site.folder), setup, Deadlines(), quiet) as (node, _):
            return node.ctx.status.epsilon, node.ctx.about_us()["privacy"]

    assert asyncio.run(restart(local_setup(site))) == (
        spent,
        {"epsilon": 20.0, "delta": 1e-5, "left": True},
    )
    assert privacy_finding(site) == (
        "ok",
        f"epsilon {spent:.3g} is spent, with a budget of 20 (delta 1e-05)",
    )
    lowered = change_settings(site, ("epsilon = 20.0", f"epsilon = {spent}"))
    assert asyncio.run(restart(lowered)) == (
        spent,
        {"epsilon": spent, "delta": 1e-5, "left": False},
    )
    assert privacy_finding(site)[0] == "ok"  # the run is finished
    (site.run_folder / "privacy.json").write_text("{")
    assert "cannot be read" in privacy_finding(site)[1]
    assert asyncio.run(restart(lowered)) == (None, {"epsilon": spent, "delta": 1e-5, "left": True})


def test_a_history_that_is_older_than_the_checkpoint_stops_training(
    make_site: Callable[..., Site], tmp_path: Path
) -> None:
    setup = local_setup(make_site(10, noise_multiplier=2.0))
    first = take_step(setup, tmp_path)
    shutil.copy(tmp_path / "privacy.json", tmp_path / "older.json")
    second = take_step(setup, tmp_path, first.next_state)
    (tmp_path / "older.json").replace(tmp_path / "privacy.json")  # restored from a backup
    for _ in range(2):
        result = take_step(setup, tmp_path, second.next_state)
        steps = setup.run.privacy_plan("alice").steps_per_round
        assert f"counts {steps} steps" in (result.report.failure or "")
        assert f"the model has taken {2 * steps}" in (result.report.failure or "")
        assert torch.equal(result.next_state.model.values, second.next_state.model.values)
    (tmp_path / "privacy.json").unlink()
    assert "counts 0 steps" in (take_step(setup, tmp_path, second.next_state).report.failure or "")
    assert not (tmp_path / "privacy.json").exists()


def test_attempts_use_up_the_budget_and_then_the_site_keeps_its_model(
    make_site: Callable[..., Site], tmp_path: Path
) -> None:
    setup = local_setup(make_site(2, epsilon=4.0))
    results = [take_step(setup, tmp_path) for _ in range(3)]
    assert [result.report.failure is None for result in results] == [True, True, False]
    assert "It no longer trains" in (results[2].report.failure or "")
    assert PrivateRounds(tmp_path).begun.rounds == 2
    assert results[2].report.epsilon == results[1].report.epsilon
    assert torch.equal(results[2].next_state.model.values, setup.initial_state().model.values)


def test_a_record_that_cannot_be_read_or_written_stops_training_and_nothing_else(
    make_site: Callable[..., Site], tmp_path: Path
) -> None:
    setup = local_setup(make_site(10, noise_multiplier=2.0))
    (tmp_path / "privacy.json").write_text(json.dumps({"version": 1}))
    failure = take_step(setup, tmp_path).report.failure or ""
    assert "it does not train" in failure
    assert "privacy.json, which counts the rounds of private training, cannot be read" in failure
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "privacy.json").mkdir()  # it cannot be replaced by a file
    assert "it does not train" in (take_step(setup, tmp_path / "gone").report.failure or "")


def change_settings(site: Site, *changes: tuple[str, str]) -> LocalSetup:
    """The setup after the operator has edited `site.toml`."""
    file = site.folder / "site.toml"
    text = file.read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    file.write_text(text)
    return local_setup(Site.open(site.folder))


def test_spent_epsilon_stays_spent_when_the_settings_change(
    make_site: Callable[..., Site], tmp_path: Path
) -> None:
    site = make_site(10, noise_multiplier=1.0)
    setup = local_setup(site)
    first = [take_step(setup, tmp_path).report.epsilon or 0 for _ in range(2)][-1]
    changed = change_settings(
        site, ("noise_multiplier = 1.0", "noise_multiplier = 2.0"), ("epochs = 1", "epochs = 2")
    )
    second = take_step(changed, tmp_path).report.epsilon or 0
    n = len(setup.run.data.peers["alice"].train)
    steps = [
        setup.run.privacy_plan("alice").steps_per_round,
        changed.run.privacy_plan("alice").steps_per_round,
    ]
    assert steps == [-(-n // 8) + 1, 2 * -(-n // 8) + 1]  # one is for the mask search
    assert PrivateRounds(tmp_path).begun.taken == (
        StepsTaken(8 / n, 1.0, 2 * steps[0]),
        StepsTaken(8 / n, 2.0, steps[1]),
    )
    assert first == spent_epsilon(8 / n, 1.0, 2 * steps[0], 1e-5)
    assert first < second < first + spent_epsilon(8 / n, 2.0, steps[1], 1e-5)
    back = change_settings(
        site, ("noise_multiplier = 2.0", "noise_multiplier = 1.0"), ("epochs = 2", "epochs = 1")
    )
    assert (take_step(back, tmp_path).report.epsilon or 0) > second
    assert [taken.steps for taken in PrivateRounds(tmp_path).begun.taken] == [
        steps[1],
        3 * steps[0],
    ]


def test_a_budget_that_earlier_settings_have_used_up_stays_used_up(
    make_site: Callable[..., Site], tmp_path: Path
) -> None:
    site = make_site(10, noise_multiplier=1.0)
    spent = [take_step(local_setup(site), tmp_path).report.epsilon or 0 for _ in range(2)][-1]
    limited = change_settings(
        site, ("noise_multiplier = 1.0", f"noise_multiplier = 4.0\nepsilon = {spent}")
    )
    result = take_step(limited, tmp_path)
    assert "does not last for another round" in (result.report.failure or "")
    assert result.report.exhausted
    assert result.report.epsilon == spent
    assert PrivateRounds(tmp_path).begun.rounds == 2


@pytest.mark.parametrize("private", [True, False])
def test_privacy_is_neither_added_to_a_run_nor_removed_from_it(
    make_site: Callable[..., Site], private: bool
) -> None:
    site = make_site(1, **({"noise_multiplier": 2.0} if private else {}))
    setup = local_setup(site)
    log = event_logger("alice")
    asyncio.run(run_node(site, setup, Deadlines(min=0.1, startup=0.1), log))
    change = (
        ("noise_multiplier = 2.0", "")
        if private
        else ("[privacy]", "[privacy]\nnoise_multiplier = 2.0")
    )
    changed = change_settings(site, change)
    sentence = (
        "with the table privacy, and now it is missing"
        if private
        else "without the table privacy, and now it"
    )
    with pytest.raises(RunError, match=sentence):
        asyncio.run(run_node(site, changed, Deadlines(min=0.1, startup=0.1), log))


@pytest.mark.parametrize(
    ("settings", "privacy", "sentence"),
    [
        ({"eval_train": True}, {"noise_multiplier": 2.0}, "eval_train is true, but with privacy"),
        (
            {"method": {"name": "dpsgd-ft"}},
            {"noise_multiplier": 2.0},
            "not work with method.name=dpsgd-ft",
        ),
        (
            {},
            {"noise_multiplier": 0.5, "epsilon": 1.0},
            "privacy.epsilon=1 does not last for one round",
        ),
    ],
)
def test_what_no_budget_covers_is_refused_before_the_first_round(
    make_site: Callable[..., Site],
    settings: Mapping[str, object],
    privacy: Mapping[str, float],
    sentence: str,
) -> None:
    site = make_site(10, settings, **privacy)
    with pytest.raises(ConfigError, match=sentence):
        run_site(site)
    assert not site.run_folder.exists()


def test_a_private_site_without_the_accountant_names_the_extra(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site(10, noise_multiplier=2.0)
    monkeypatch.setattr(extras, "find_spec", lambda package: None)
    with refused(ConfigError):
        local_setup(site)
