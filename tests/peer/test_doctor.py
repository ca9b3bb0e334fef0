"""`dispfl peer doctor` on real sites, with and without their nodes."""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from small_disk import SmallDisk
from tables import small_table
from typer.testing import CliRunner

from dispfl.cli.peer import app
from dispfl.core.memory import memory_limits
from dispfl.peer.deadlines import Deadlines
from dispfl.peer.doctor import examine as checks
from dispfl.peer.doctor.examine import (
    check_key,
    check_protection,
    check_run,
    check_training,
    disk_finding,
    examine,
)
from dispfl.peer.doctor.findings import Finding, Level, check_certificate, duration, size
from dispfl.peer.doctor.network import (
    Answers,
    _running_port,
    check_address,
    check_clock,
    check_member,
    check_network,
    names_of,
)
from dispfl.peer.local_federation import free_ports
from dispfl.peer.membership import identity
from dispfl.peer.membership.address import Address
from dispfl.peer.membership.identity import Identity
from dispfl.peer.membership.roster import Roster
from dispfl.peer.run_site import open_node
from dispfl.peer.setup.local_setup import local_setup
from dispfl.peer.setup.site_config import SiteConfig
from dispfl.peer.site import Site, SiteInfo
from dispfl.round.context import RunContext, StepResult
from dispfl.round.round import peer_step

PATIENCE = 60.0
MakeSite = Callable[..., Site]


@pytest.fixture
def make_site(tmp_path: Path) -> MakeSite:
    """`make_site("alice", rounds=3)`: create a site with a small table of its own."""

    def make(name: str, parent: Path = tmp_path, **settings: object) -> Site:
        data = {"path": "table.csv", "label": "y", "classes": ["x", "z"]}
        values = {"rounds": 100_000, "model": {"name": "mlp"}, "data": data, **settings}
        listen = f"127.0.0.1:{free_ports(1)[0]}"
        config = SiteConfig.from_values(values).to_toml()
        site = Site.create(parent / name, SiteInfo(name=name, listen=listen), config)
        (site.folder / "table.csv").write_text(small_table(8))
        return site

    return make


def accept_each_other(*sites: Site) -> None:
    for site in sites:
        site.members.accept_all([other.invite() for other in sites if other is not site])


@contextlib.asynccontextmanager
async def running(site: Site) -> AsyncIterator[list[str]]:
    """Run a site's node in this process; yields the names of its events."""
    events: list[str] = []
    async with open_node(
        site, local_setup(site), Deadlines(), lambda event, _: events.append(event)
    ) as (node, saving):
        task = asyncio.create_task(
            node.run(*(saving.store.last() or (0, local_setup(site).initial_state())))
        )
        try:
            async with asyncio.timeout(PATIENCE):
                while "starting" not in events:
                    await asyncio.sleep(0.02)
            yield events
        finally:
            task.cancel()
            await asyncio.wait([task])


async def findings(site: Site) -> dict[str, Finding]:
    """Examine a site as another process does; the findings by topic."""
    return {
        finding.topic: finding
        for finding in await asyncio.to_thread(lambda: list(examine(site.folder)))
    }


async def findings_of_a_process(site: Site) -> dict[str, Finding]:
    """The same in a process of its own: nodes that train in this one draw from the same global
    generator."""
    command = [
        sys.executable,
        "-c",
        "from dispfl.cli import main; main()",
        "peer",
        "doctor",
        str(site.folder),
        "--json",
    ]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    found = [
        Finding(**{**finding, "level": Level(finding["level"])})
        for finding in json.loads(printed)["findings"]
    ]
    return {finding.topic: finding for finding in found}


def test_a_new_site_is_sound_and_lacks_only_members(make_site: MakeSite) -> None:
    found = asyncio.run(findings(alice := make_site("alice")))
    assert {topic: finding.level for topic, finding in found.items()} == {
        **dict.fromkeys(
            [
                "key",
                "certificate",
                "settings",
                "run",
                "training",
                "memory",
                "disk",
                "address",
                "port",
            ],
            "ok",
        ),
        "members": "warning",
    }
    assert found["settings"].text == "14 training and 2 test samples, 4,738 weights"
    assert found["run"].text == "not started yet"
    assert found["port"].text == f"{alice.info.listen} is free; the node can listen on it"
    assert not alice.run_folder.exists()  # nothing was left behind


def test_pending_sites_are_named_where_there_is_no_member(make_site: MakeSite) -> None:
    alice = make_site("alice")
    alice.members.accept(make_site("bob").invite(), confirmed=False)
    advice = asyncio.run(findings(alice))["members"].advice
    command = f"dispfl peer confirm {alice.folder} bob"
    assert advice == f"Compare fingerprints by phone: {command}"


def test_members_are_checked_both_ways_whether_the_own_node_runs_or_not(
    make_site: MakeSite,
) -> None:
    alice, bob = make_site("alice"), make_site("bob")
    accept_each_other(alice, bob)

    async def story() -> None:
        found = await findings(alice)
        assert (found["members"].level, found["bob"].level) == (Level.FAILURE, Level.WARNING)
        assert found["bob"].text == f"cannot be reached at {bob.info.listen}: connection refused"
        async with running(
            bob
        ) as bobs_events:  # waits for alice in its first round, and tries to reach it
            found = await findings(alice)
            assert found["bob"].text == f"reached at {bob.info.listen}, and it reaches us"
            assert found["clock"].text == "within 5 s of bob"
            assert found["spec"].text == "the same as at bob"
            protection = found.pop("byzantine")
            assert protection.level == Level.WARNING
            assert protection.text == (
                "clip is off: of 1 neighbour it withstands none, only of 3 or more"
            )
            assert {finding.level for finding in found.values()} == {Level.OK}
            assert "round" not in bobs_events  # it still waits
            async with running(alice) as events:
                async with asyncio.timeout(PATIENCE):
                    while "round" not in events:
                        await asyncio.sleep(0.05)
                    while (
                        not ((alice.status() or {}).get("peers") or {})
                        .get("bob", {})
                        .get("last_request")
                    ):
                        await asyncio.sleep(0.05)
                found = await findings_of_a_process(alice)
        assert (
            found["port"].text
            == f"{alice.info.listen} is in use by this site's own node, which runs"
        )
        assert found["bob"].text.startswith(
            f"reached at {bob.info.listen}, and its last request came "
        )
        assert found["run"].text.endswith("of 100000 rounds are saved")
        assert found.pop("byzantine").level == Level.WARNING
        assert {finding.level for finding in found.values()} == {Level.OK}

    asyncio.run(story())


def test_every_setting_that_differs_is_named_with_the_member(make_site: MakeSite) -> None:
    alice, bob = make_site("alice"), make_site("bob", rounds=7, seed=3)
    accept_each_other(alice, bob)

    async def story() -> Finding:
        async with running(bob):
            return (await findings(alice))["spec"]

    found = asyncio.run(story())
    assert found.level == Level.FAILURE
    assert (
        found.text
        == "alice cannot take part with bob: rounds is 7 at bob and 100000 at alice; seed is 3 at"
        " bob and 0 at alice."
    )


def test_a_member_that_has_not_accepted_us_is_a_matter_of_fingerprints(make_site: MakeSite) -> None:
    alice, bob = make_site("alice"), make_site("bob")
    alice.members.accept(bob.invite())

    async def story() -> Finding:
        async with running(bob):
            return (await findings(alice))["bob"]

    assert (
        asyncio.run(story()).advice == "Has bob accepted our invite? Compare fingerprints by phone."
    )


def test_a_key_that_others_can_read_is_a_failure_and_ends_the_checks(make_site: MakeSite) -> None:
    alice = make_site("alice")
    (alice.folder / "identity/key.pem").chmod(0o644)
    found = list(examine(alice.folder))
    assert [(finding.topic, finding.level) for finding in found] == [("key", Level.FAILURE)]
    assert "chmod 600" in found[0].text


def test_a_port_that_another_program_uses_is_a_failure(make_site: MakeSite) -> None:
    alice = make_site("alice")
    where = alice.info.listen_address
    assert where is not None
    with socket.create_server(tuple(where)):
        found = asyncio.run(findings(alice))["port"]
    assert found.level == Level.FAILURE
    assert found.text == f"cannot listen on {alice.info.listen}: address already in use"


def test_an_address_of_this_machine_alone_is_a_failure_for_members_elsewhere(
    make_site: MakeSite,
) -> None:
    alice, bob, carol = make_site("alice"), make_site("bob"), make_site("carol")
    alice.members.accept(bob.invite())
    assert check_address(alice, alice.members.accepted()).level == Level.OK
    alice.members.accept(replace(carol.invite(), address=Address.parse("192.0.2.7:7600")))
    found = check_address(alice, alice.members.accepted())
    assert found.level == Level.FAILURE
    assert (
        found.text
        == f"others reach this site at {alice.info.listen}, which is this machine for each of them"
    )


def test_missing_data_and_a_folder_that_is_no_site_are_failures(
    make_site: MakeSite, tmp_path: Path
) -> None:
    alice = make_site("alice")
    (alice.folder / "table.csv").unlink()
    last = list(examine(alice.folder))[-1]
    assert (last.topic, last.level) == ("settings", Level.FAILURE)
    assert "table.csv" in last.text
    [only] = examine(tmp_path / "nowhere")
    assert (only.topic, only.level) == ("site", Level.FAILURE)


def test_a_full_disk_is_a_failure_with_the_missing_bytes(small_disk: SmallDisk) -> None:
    (small_disk.path / "site").mkdir()
    assert disk_finding(small_disk.path / "site", 1e6).level == Level.OK
    assert disk_finding(small_disk.path / "site", 3e6).level == Level.WARNING
    small_disk.fill()
    found = disk_finding(small_disk.path / "site", 3e6)
    assert (found.level, found.advice) == (Level.FAILURE, "Free 3 MB or more.")


def test_the_dates_of_a_certificate_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_certificate("bob", Identity.make("bob").certificate, "renew").level == Level.OK
    monkeypatch.setattr(identity, "_VALIDITY_YEARS", 0.1)
    assert (
        check_certificate("bob", Identity.make("bob").certificate, "renew").level == Level.WARNING
    )
    monkeypatch.setattr(identity, "_VALIDITY_YEARS", -0.001)
    found = check_certificate("bob", Identity.make("bob").certificate, "renew")
    assert found.level == Level.FAILURE
    assert found.text.endswith(", not now")


def test_the_clock_that_differs_from_most_others_is_the_wrong_one() -> None:
    assert check_clock({"bob": 0.4, "carol": -2.0}).level == Level.OK
    carols = check_clock({"bob": 0.4, "carol": -600.0})
    assert (carols.level, carols.text) == (
        Level.WARNING,
        "carol's is 10 min behind the others; ours is right",
    )
    assert carols.advice == "Tell carol to set its clock: timedatectl"
    ours = check_clock({"bob": 7200.0, "carol": 7201.0, "dave": 0.0, "erin": 7200.0})
    assert ours.text == "it is 2 h behind those of most members"
    assert ours.advice.startswith("Set this machine's clock")
    unanswered = check_clock({}, expired=["bob", "carol"])
    assert unanswered.level == Level.FAILURE
    assert unanswered.text.endswith("when the certificate of bob and carol is not valid")
    assert check_clock({"bob": 600.0}).level == Level.WARNING
    assert check_clock({"bob": 3 * 86_400.0}).level == Level.FAILURE
    assert check_clock({"bob": 3 * 86_400.0}).text == "it is 72 h behind bob's"
    assert check_clock({}).level == Level.WARNING


def test_numbers_are_written_for_people() -> None:
    assert [size(count) for count in (3e9, 123_456_789, 35_000_000, 1_200)] == [
        "3 GB",
        "123 MB",
        "35 MB",
        "1 kB",
    ]
    assert [duration(seconds) for seconds in (7200, 130, 31, 0.234)] == [
        "2 h",
        "2 min",
        "31 s",
        "0.23 s",
    ]
    assert names_of(["bob"]) == "bob"
    assert names_of(["carol", "alice", "bob"]) == "alice, bob and carol"
    assert names_of([f"{number}" for number in range(7)]) == "0, 1, 2, 3 and 3 more"
    meminfo = "MemTotal:       8000 kB\nMemFree: 1 kB\nMemAvailable:   5000 kB\n"
    assert memory_limits(meminfo, float("inf")) == (8_192_000, 5_120_000)
    assert memory_limits(meminfo, 2e6) == (2e6, 2e6)


def test_the_command_prints_80_columns_and_has_an_exit_code_and_json(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    alice, bob = make_site("alice"), make_site("bob")
    result = CliRunner().invoke(app, ["doctor", str(alice.folder)])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "no failures, 1 warning."
    alice.members.accept(bob.invite())
    result = CliRunner().invoke(app, ["doctor", str(alice.folder)])
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert max(len(line) for line in lines if str(alice.folder) not in line) <= 80
    assert lines[-1] == "1 failure, 3 warnings."
    assert lines[0] == "ok       key          readable by its owner alone"
    result = CliRunner().invoke(app, ["doctor", str(alice.folder), "--json"])
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["failures"], found["warnings"]) == (1, 3)
    assert found["findings"][0] == {
        "topic": "key",
        "level": "ok",
        "text": "readable by its owner alone",
        "advice": "",
    }


def test_a_key_of_another_user_is_a_warning(make_site: MakeSite) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    alice = make_site("alice")
    shutil.chown(alice.folder / "identity/key.pem", user=65534)
    findings = examine(alice.folder)
    assert next(findings).topic == "files"
    key = next(findings)
    assert (key.topic, key.level) == ("key", Level.WARNING)
    assert "sudo -u" in key.advice


def test_saved_rounds_are_read_and_damage_and_another_spec_are_named(make_site: MakeSite) -> None:
    alice = make_site("alice", rounds=2)

    async def two_rounds() -> None:
        setup = local_setup(alice)
        async with open_node(alice, setup, Deadlines(), lambda event, fields: None) as (node, _):
            await node.run(0, setup.initial_state())

    asyncio.run(two_rounds())
    assert asyncio.run(findings(alice))["run"].text == "2 of 2 rounds are saved, and can be read"
    part = alice.run_folder / "checkpoints/round-000002/part-000.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    found = asyncio.run(findings(alice))["run"]
    assert (found.level, found.text) == (
        Level.WARNING,
        f"The checkpoint {part} is damaged (it is truncated).",
    )
    assert part.exists()  # the doctor changes nothing
    settings = alice.folder / "site.toml"
    settings.write_text(settings.read_text().replace("rounds = 2", "rounds = 3"))
    found = asyncio.run(findings(alice))["run"]
    assert found.level == Level.FAILURE
    assert "rounds is 3 now and 2 then" in found.text


def test_a_folder_that_other_users_may_enter_is_a_warning(make_site: MakeSite) -> None:
    alice = make_site("alice")
    assert check_key(alice).level == Level.OK
    alice.folder.chmod(0o755)
    found = check_key(alice)
    assert (found.level, found.advice) == (Level.WARNING, f"Run: chmod 700 {alice.folder}")


def test_rounds_that_a_running_node_could_not_save_are_a_failure(make_site: MakeSite) -> None:
    alice = make_site("alice", rounds=2)
    setup = local_setup(alice)

    async def one_round() -> None:
        async with open_node(alice, setup, Deadlines(), lambda event, fields: None) as (node, _):
            await node.run(1, setup.initial_state())

    asyncio.run(one_round())
    status = {"save_problem": "No space left on device", "unsaved_rounds": 3}
    found = check_run(alice, setup, status, running=True)
    assert (found.level, found.text) == (
        Level.FAILURE,
        "3 rounds are only in memory: No space left on device",
    )
    assert "do not stop the node" in found.advice


def test_time_and_memory_of_a_round_are_compared_with_deadlines_and_machine(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = make_site("alice")
    config, setup = alice.config(), local_setup(alice)
    _, result = checks.measure_round(setup)
    gigabytes = {"needed": 1.0, "total": 8.0, "available": 4.0}
    monkeypatch.setattr(
        checks,
        "memory",
        lambda: (gigabytes["total"] * 1e9, gigabytes["available"] * 1e9),
    )

    def found(seconds: float = 1.0, running: bool = False, **changes: float) -> dict[str, Level]:
        monkeypatch.setattr(checks, "measure_round", lambda _: (seconds, result))
        with monkeypatch.context() as patched:
            for name, value in changes.items():
                patched.setitem(gigabytes, name, value)
            peak = int(gigabytes["needed"] * 1e9 / 1024)
            patched.setattr("resource.getrusage", lambda _: SimpleNamespace(ru_maxrss=peak))
            return {
                each.topic: each.level
                for each in check_training(alice, setup, config, running=running)
            }

    assert found() == {"training": Level.OK, "memory": Level.OK, "disk": Level.OK}
    assert found(config.deadlines.min + 1)["training"] == Level.WARNING
    assert found(config.deadlines.max + 1)["training"] == Level.FAILURE
    assert found(available=0.5)["memory"] == Level.WARNING
    assert found(available=0.5, running=True)["memory"] == Level.OK  # the node has it already
    assert found(needed=9.0)["memory"] == Level.FAILURE


@pytest.mark.parametrize("privacy", [{}, {"noise_multiplier": 2.0}, {"epsilon": 8.0}])
@pytest.mark.parametrize(("fixed", "each"), [(5.0, 2.0), (0.01, 0.02)], ids=["slow", "fast"])
def test_the_time_of_a_round_is_that_of_its_batches(
    make_site: MakeSite,
    monkeypatch: pytest.MonkeyPatch,
    privacy: dict[str, float],
    fixed: float,
    each: float,
) -> None:
    """Two epochs of 14 samples in batches of 2 are 14 batches. Accounting, which takes 100 s here,
    is no part of it."""
    train = {"epochs": 2, "batch_size": 2}
    setup = local_setup(make_site("alice", rounds=10, train=train, privacy=privacy))
    clock, measured = 0.0, []

    def step(context: RunContext, *others: Any) -> StepResult:
        nonlocal clock
        result = peer_step(context, *others)
        measured.append(context.settings.train.steps)
        clock += fixed + each * (context.settings.train.steps or 0)
        return result

    @cache
    def account(*arguments: Any) -> float:
        nonlocal clock
        clock += 100
        return 1.0

    monkeypatch.setattr(checks, "peer_step", step)
    monkeypatch.setattr("time.perf_counter", lambda: clock)
    monkeypatch.setattr("dispfl.privacy.accountant.spent_epsilon", account)
    assert setup.run.settings.train.local_steps(len(setup.run.data.peers["alice"].train)) == 14
    assert checks.measure_round(setup)[0] == pytest.approx(fixed + 14 * each)
    assert measured == [1, 1, 3 if fixed > 1 else 14]


def test_a_batch_that_fails_is_a_failure(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = make_site("alice")
    config, setup = alice.config(), local_setup(alice)

    def fails(_: object) -> None:
        raise MemoryError("cannot allocate 9 GB")

    monkeypatch.setattr(checks, "measure_round", fails)
    [found] = check_training(alice, setup, config, running=False)
    assert (found.level, found.text) == (Level.FAILURE, "a batch failed: cannot allocate 9 GB")


def test_a_disk_that_cannot_be_written_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    assert disk_finding(tmp_path, 1.0).text == f"{tmp_path} cannot be written"


def test_addresses_are_checked_for_names_and_families(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = make_site("alice")
    four, six = (socket.AF_INET, "192.0.2.7"), (socket.AF_INET6, "2001:db8::7")

    def found(listen: str, *resolved: tuple[int, str]) -> Level:
        def getaddrinfo(
            *_: object, **__: object
        ) -> list[tuple[int, int, int, str, tuple[str, int]]]:
            if not resolved:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [(family, 1, 6, "", (ip, 7600)) for family, ip in resolved]

        monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
        site = replace(
            alice, info=SiteInfo(name="alice", listen=listen, advertise="alice.example.org:7600")
        )
        return check_address(site, []).level

    assert found("0.0.0.0:7600") == Level.WARNING  # the name does not resolve
    assert found("0.0.0.0:7600", four) == Level.OK
    assert found("0.0.0.0:7600", four, six) == Level.WARNING  # IPv4 only
    assert found("[::]:7600", four, six) == Level.OK
    assert found("[2001:db8::7]:7600", four) == Level.FAILURE  # IPv6 only


def test_a_running_node_that_does_not_listen_is_a_warning(make_site: MakeSite) -> None:
    alice = make_site("alice")
    where = alice.info.listen_address
    assert where is not None
    assert asyncio.run(_running_port(where)).level == Level.WARNING
    with socket.create_server(tuple(where)):
        assert asyncio.run(_running_port(where)).level == Level.OK


def test_members_that_cannot_be_reached_and_their_certificates_are_named(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = make_site("alice")
    monkeypatch.setattr(identity, "_VALIDITY_YEARS", 0.1)
    bob = make_site("bob")
    alice.members.accept(bob.invite())
    found = list(check_network(alice, local_setup(alice), alice.config(), {}, running=False))
    assert ("members", Level.FAILURE, "not one can be reached: bob") in [
        (f.topic, f.level, f.text) for f in found
    ]
    [certificate, reach] = [finding for finding in found if finding.topic == "bob"]
    assert certificate.level == Level.WARNING
    assert certificate.text.startswith("its certificate is valid ")
    assert reach.text == f"cannot be reached at {bob.info.listen}: connection refused"


def test_a_newer_roster_of_a_member_changes_nothing(make_site: MakeSite) -> None:
    alice, bob, carol, key = (
        make_site("alice"),
        make_site("bob"),
        make_site("carol"),
        Ed25519PrivateKey.generate(),
    )
    first = Roster("dispfl", 1, 1, {"ann": key.public_key().public_bytes_raw()})
    first = first.with_members([alice.invite(), bob.invite()]).signed_by(key)
    for site in (alice, bob):
        site.members.accept_roster(first, first.fingerprint)
        site.members.announce(site.identity, site.info.address, 0.5, 0)
    bob.members.merge_roster(first.with_members([carol.invite()]).signed_by(key).text)
    before = alice.members.path.read_bytes()
    setup = local_setup(alice)

    async def story() -> list[Finding]:
        async with running(bob):
            return await asyncio.to_thread(
                lambda: list(check_network(alice, setup, alice.config(), {}, running=True))
            )

    assert "reached" in next(
        finding.text for finding in asyncio.run(story()) if finding.topic == "bob"
    )
    assert alice.members.path.read_bytes() == before
    assert alice.members.names() == ["bob"]


def test_what_is_known_of_a_member_decides_what_to_do(make_site: MakeSite) -> None:
    alice, bob = make_site("alice"), make_site("bob")
    alice.members.accept(bob.invite())
    [member] = alice.members.accepted()
    reached = Answers(replied={"bob"})
    assert (
        check_member(replace(member, address=None, record=None), reached, {}, True).text
        == "its address is not known yet"
    )
    refusing = Answers({"bob": "bob does not know us"}, ahead={"bob": 0.0})
    found = check_member(member, refusing, {}, True)
    assert (found.level, found.text) == (Level.FAILURE, "it refuses us: bob does not know us")
    called = check_member(member, reached, {"last_request": time.time() - 120}, True)
    assert (called.level, called.text) == (
        Level.OK,
        f"reached at {bob.info.listen}, and its last request came 2 min ago",
    )
    assert check_member(member, reached, {}, True).level == Level.WARNING
    silent = check_member(member, Answers({"bob": "no response in time"}), {}, True)
    assert silent.advice.startswith("Does bob run?")


def test_a_network_that_fails_in_training_is_a_failure_and_the_json_is_whole(
    make_site: MakeSite,
) -> None:
    alice = make_site("alice", model={"factory": "mine:net"})
    (alice.folder / "mine.py").write_text(
        "from torch import nn\n\n\n"
        "class Net(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        if self.training:\n"
        "            raise ValueError('only in training')\n"
        "        return super().forward(x)\n\n\n"
        "def net(classes, shape):\n"
        "    return Net(2, 2)\n"
    )
    printed = CliRunner().invoke(app, ["doctor", str(alice.folder), "--json", "--trust"])
    assert printed.exit_code == 1
    [failed] = [
        finding
        for finding in json.loads(printed.stdout)["findings"]
        if finding["level"] == "failure"
    ]
    assert failed["topic"] == "training"
    assert "raised ValueError: only in training" in failed["text"]


def test_training_that_diverges_is_a_failure(make_site: MakeSite) -> None:
    found = list(examine(make_site("alice", train={"lr": 1e38}).folder))
    failed = [finding for finding in found if finding.level == Level.FAILURE]
    assert [finding.topic for finding in failed] == ["training"]
    assert "became infinite or nan" in failed[0].text


def test_a_rule_that_could_not_hold_in_the_last_round_is_a_warning(make_site: MakeSite) -> None:
    alice = make_site("alice")
    for name in ("bob", "carol", "dave", "erin"):
        alice.members.accept(make_site(name).invite())
    setup = local_setup(alice)
    (finding,) = check_protection(setup, {})
    assert (finding.level, finding.text) == (Level.OK, "clip withstands 1 of 4 neighbours")
    status = {"discarded": 2, "protection": "own weights kept: 2 of 4 models arrived"}
    (finding,) = check_protection(setup, status)
    assert (finding.level, finding.text) == (Level.WARNING, status["protection"])
