"""Five sites from nothing to a running federation, by exactly the commands of the documentation.

Each node is a process of its own, and so is the relay; all other commands run in this one, on a
terminal. Operators have folders of their own, files reach the others by mail, and a fingerprint is
confirmed if its owner has read it out before.
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from forked_program import ForkedProgram
from program import Dispfl, dispfl
from real_peers import until

from dispfl.peer.local_federation import free_ports
from dispfl.peer.state.store import rounds_of

__all__ = ["dispfl"]  # a fixture
DEPLOY = (Path(__file__).parents[3] / "docs/deploy.md").read_text()
SITES = ("alice", "bob", "carol", "dave", "erin")
ADMINISTRATORS = ("ann", "ben", "cat")
RELAY = "relay"
PATIENCE = 240.0
"""Seconds after which a wait fails; generous for a loaded machine."""
FEDERATION = """
seed = 7
rounds = 3
smallest_density = 0.3
[data]
name = "custom"
label = "diagnosis"
classes = ["well", "ill"]
[model]
name = "mlp"
[method]
name = "dispfl"
density = 0.5
[train]
epochs = 1
"""
PATIENTS = [f"{45 + k},125,well\n{60 + k},145,ill\n" for k in range(20)]
TABLE = "age,pressure,diagnosis\n" + "".join(PATIENTS)


@dataclass
class World:
    """The operators and administrators, each with a folder."""

    folder: Path
    dispfl: Dispfl
    ports: dict[str, int] = field(default_factory=dict)
    shown: str = ""
    """Everything that was printed."""
    read_out: str = ""
    """Everything that was printed where it was created, without spaces: fingerprints among it."""
    nodes: dict[str, ForkedProgram] = field(default_factory=dict)
    relay_address: str = ""
    """What the relay has printed."""

    def type(self, person: str, command: str) -> None:
        """Type one command."""
        address = f"127.0.0.1:{self.ports.get(person, 0)}"
        command = command.replace("0.0.0.0:7600", address)
        command = command.replace(f"{person}.example.org:7600", address)
        command = command.replace("/mnt/share", str(self.folder / "share"))
        command = re.sub("wss://relay.example.org:443#sha256=[^']*", self.relay_address, command)
        command, _, target = command.partition(" > ")
        program, *words = shlex.split(command)
        if program in ("mkdir", "cp"):
            subprocess.run([program, *words], cwd=self.folder / person, check=True)
            if program == "cp":
                self.wait_for_members(person, count=len(words) - 1)
            return
        assert program == "dispfl"
        if words[0] == "relay":
            self.start_relay(person, words)
            return
        if words[:2] == ["peer", "run"]:
            self.nodes[person] = self.start(person, words)
            return
        output = self.answer(person, words)
        if target:
            (self.folder / person / target).write_text(output)
        self.send_by_mail(person)

    def start_relay(self, person: str, words: list[str]) -> None:
        """Start the relay on a port of this machine, and note what it prints."""
        address = f"127.0.0.1:{self.ports[person]}"
        there = {"0.0.0.0:443": address, "relay.example.org:443": address}
        self.nodes[person] = self.start(person, [there.get(word, word) for word in words])
        log = self.folder / person / "log.txt"
        until(lambda: "listening" in log.read_text(), log.read_text, pause=0.05)
        [self.relay_address] = re.findall(r"Sites reach this relay at: (\S+)", log.read_text())

    def wait_for_members(self, person: str, count: int) -> None:
        """Wait until the relay has read the invites, which it does every two seconds."""
        log = self.folder / person / "log.txt"
        until(lambda: f" members={count}" in log.read_text(), log.read_text, pause=0.05)

    def start(self, person: str, words: list[str]) -> ForkedProgram:
        folder = self.folder / person
        return ForkedProgram(words, folder, folder / "log.txt")

    def answer(self, person: str, words: list[str]) -> str:
        """Run a command on a terminal, and answer its question with yes if every fingerprint that
        it shows was read out before."""
        terminal, slave = os.openpty()
        stdin = sys.stdin
        try:
            with os.fdopen(slave) as sys.stdin, contextlib.chdir(self.folder / person):
                os.write(terminal, b"y\n")
                ended = self.dispfl(*words)
        finally:
            sys.stdin = stdin
            os.close(terminal)
        output = ended.err + ended.out
        assert ended.code == 0, f"{person}$ {shlex.join(words)}\n{output}"
        before_answer = output.rpartition("[y/N]")[0]
        for fingerprint in re.findall(r"((?:[0-9a-f]{4} ?){8})", before_answer):
            assert fingerprint.replace(" ", "") in self.read_out, fingerprint
        self.shown += output
        self.read_out += output.replace(" ", "")
        return output

    def send_by_mail(self, sender: str) -> None:
        """Send what others need: public keys, invites and the roster."""
        folder = self.folder / sender
        for pattern in ("*.pub", "site/*.invite", "*.roster"):
            for file in folder.glob(pattern):
                for receiver in (*SITES, *ADMINISTRATORS, RELAY):
                    if receiver != sender and (self.folder / receiver).is_dir():
                        shutil.copy(file, self.folder / receiver / file.name)

    def wait(self) -> None:
        """Wait until all nodes have finished the federation, together."""
        for person, node in self.nodes.items():
            log = self.folder / person / "log.txt"
            assert node.wait(PATIENCE) == 0, log.read_text()
            rounds = rounds_of(self.folder / person / "site" / "run")
            assert sorted(rounds) == [0, 1, 2]
            assert rounds[2]["received"] == [name for name in SITES if name != person]


@pytest.fixture
def world(tmp_path: Path, dispfl: Dispfl) -> Iterator[World]:
    """Everybody with an empty folder, except for the agreed settings and each site's data."""
    for person in (*SITES, *ADMINISTRATORS):
        (tmp_path / person).mkdir()
    for person in (*SITES, "ann"):
        (tmp_path / person / "federation.toml").write_text(FEDERATION)
    for person in SITES:
        (tmp_path / person / "patients.csv").write_text(TABLE)
    world = World(tmp_path, dispfl, dict(zip(SITES, free_ports(5), strict=True)))
    yield world
    for node in world.nodes.values():
        node.kill()


def commands(beginning: str, end: str) -> list[tuple[str, str]]:
    """Who types what, in a part of the page."""
    section = DEPLOY[DEPLOY.index(beginning) : DEPLOY.index(end)]
    people = "|".join((*SITES, *ADMINISTRATORS, RELAY))
    return re.findall(rf"^({people})\$ ((?:dispfl|mkdir|cp) .*)$", section, re.M)


def test_five_sites_by_roster_take_the_15_commands_of_the_page(world: World) -> None:
    typed = commands("## More than a few sites", "## As a service")
    assert len(typed) == 15
    for person in SITES:
        (world.folder / person / "federation.toml").unlink()  # it is in the roster
    for person, command in typed:
        world.type(person, command)
    world.wait()


def test_five_sites_by_hand_take_15_commands_and_20_with_the_doctor(world: World) -> None:
    """The page has them for three sites: each creates its folder, accepts the others, and runs."""
    page = commands("## 2. Create the sites", "## 5. Use the model")
    assert [command.split()[2] for person, command in page if person == "carol"] == [
        "init",
        "accept",
        "run",
    ]
    init, accept, run = (command for person, command in page if person == "carol")
    assert accept == "dispfl peer accept site alice.invite bob.invite"
    typed = []
    for site in SITES:
        typed.append((site, init.replace("carol", site)))
    for site in SITES:
        invites = [f"{other}.invite" for other in SITES if other != site]
        typed.append((site, f"dispfl peer accept site {' '.join(invites)}"))
    typed += [(site, run) for site in SITES]

    assert len(typed) == 15
    for person, command in typed:
        world.type(person, command)
    world.wait()


def test_two_sites_without_open_ports_by_the_relay_of_the_page(world: World) -> None:
    """The page has alice's commands; bob types the same, and both accept each other."""
    (world.folder / RELAY).mkdir()
    world.ports = {RELAY: free_ports(1)[0]}
    page = commands("## Without open ports", "### By an outbox")
    typed = []
    for person, command in page:
        typed.append((person, command))
        if " init " in command:
            typed.append(("bob", command.replace("alice", "bob")))
        if command.startswith("cp "):
            typed.append(("alice", "dispfl peer accept site bob.invite"))
            typed.append(("bob", "dispfl peer accept site alice.invite"))
            typed.append(("bob", "dispfl peer run site"))  # alice's doctor finds it
    kinds = [(person, *command.split()[:3]) for person, command in page]
    assert kinds == [
        ("relay", "mkdir", "members"),
        ("relay", "dispfl", "relay", "--listen"),
        ("alice", "dispfl", "peer", "init"),
        ("relay", "cp", "alice.invite", "bob.invite"),
        ("alice", "dispfl", "peer", "doctor"),
        ("alice", "dispfl", "peer", "run"),
        ("alice", "dispfl", "peer", "status"),
    ]
    for person, command in typed:
        if command.startswith("dispfl peer status"):
            for name in ("alice", "bob"):
                log = world.folder / name / "log.txt"
                assert world.nodes[name].wait(PATIENCE) == 0, log.read_text()
        world.type(person, command)
    for name, other in (("alice", "bob"), ("bob", "alice")):
        rounds = rounds_of(world.folder / name / "site" / "run")
        assert sorted(rounds) == [0, 1, 2]
        assert rounds[2]["received"] == [other]
    where = world.relay_address.partition("#")[0]
    assert f"relay        {where} connects this site" in world.shown
    assert f"by {where}" in world.shown


def test_two_sites_by_the_outboxes_of_the_page(world: World) -> None:
    """The page has alice's commands; bob types the same."""
    (world.folder / "share").mkdir()
    page = commands("### By an outbox", "## Clocks")
    assert [command.split()[:3] for _, command in page] == [
        ["mkdir", "/mnt/share/alice"],
        ["dispfl", "peer", "init"],
        ["dispfl", "peer", "accept"],
        ["dispfl", "peer", "run"],
    ]
    other_site = {"alice": "bob", "bob": "alice"}
    for _, command in page:
        world.type("alice", command)
        swapped = re.sub("alice|bob", lambda name: other_site[name[0]], command)
        world.type("bob", swapped)
    for name, other in other_site.items():
        assert world.nodes[name].wait(PATIENCE) == 0, (world.folder / name / "log.txt").read_text()
        rounds = rounds_of(world.folder / name / "site" / "run")
        assert [rounds[t]["received"] for t in (0, 1, 2)] == [[other]] * 3
