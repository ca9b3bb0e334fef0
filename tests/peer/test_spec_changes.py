"""A federation whose settings are changed while it runs, and after it has finished."""

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from forked_program import ForkedProgram
from program import Dispfl, dispfl
from site_world import HOSTILE, LIMIT, ROUNDS, SiteWorld, time_of

from dispfl.peer.local_federation import free_ports
from dispfl.peer.membership.spec_change import FIRST_VERSION, SpecChange
from dispfl.peer.node import Node
from dispfl.peer.peer import Peer
from dispfl.peer.setup.spec import federation_spec
from dispfl.peer.setup.spec_versions import SpecVersion, SpecVersions
from dispfl.peer.site import Site
from dispfl.peer.state.store import PeerStore, SavingThread, rounds_of
from dispfl.runs.directory import read_config
from dispfl.testing.virtual_time import run

__all__ = ["dispfl"]  # a fixture

PATIENCE = 240.0
"""Seconds after which a process is stuck, generous for a loaded machine."""


class ChangingWorld(SiteWorld):
    """Honest sites on a virtual clock, whose rounds follow the versions of the spec."""

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed, folder)
        for name in self.names:
            self.sites[name].members.revoke(HOSTILE)

    def node(self, site: Site, store: PeerStore) -> tuple[Node, SavingThread]:
        node, saving = super().node(site, store)
        context = self.context

        def apply(version: SpecVersion, change: SpecChange) -> SpecVersion:
            changed = version.run.changed(**change.settings)
            spec = federation_spec("test", changed, context.layout, context.first_weights, 0.5)
            return SpecVersion(change.version, changed, spec)

        first = SpecVersion(FIRST_VERSION, context, self.spec)
        ctx = replace(node.ctx, versions=SpecVersions(first, site.spec_changes, apply))
        client = replace(node.client, ctx=ctx)
        return replace(node, ctx=ctx, client=client), saving

    def propose(self, name: str, rounds: int, from_round: int) -> SpecChange:
        changes = self.sites[name].spec_changes
        change = changes.next_change({"rounds": rounds}, from_round, 1)
        changes.confirm(change)
        return change

    def rounds_of(self, name: str) -> dict[int, list[str]]:
        """Whom a site has received from, by round."""
        records = rounds_of(self.sites[name].run_folder)
        return {t: record["received"] for t, record in records.items()}


@pytest.mark.parametrize("seed", range(4))
def test_rounds_are_added_while_nodes_run_and_every_operator_confirms(
    seed: int, tmp_path: Path
) -> None:
    world = ChangingWorld(seed, tmp_path)
    rng = random.Random(seed)

    async def story() -> None:
        for name in world.names:
            world.start(name)
        await asyncio.sleep(rng.uniform(1.0, 15.0))
        change = world.propose(world.names[0], ROUNDS + 5, ROUNDS)
        for name in world.names[1:]:
            await asyncio.sleep(rng.uniform(0.0, 60.0))  # perhaps after the last round
            world.sites[name].spec_changes.confirm(change)
            if world.running[name].done():
                world.start(name)
        await asyncio.gather(*world.running.values())

    with time_of(world):
        run(story(), LIMIT)
    assert set(world.ends.values()) == {"finished"}
    for name in world.names:
        rounds = world.rounds_of(name)
        assert max(rounds) == ROUNDS + 4, (name, rounds)
        assert any(rounds[t] for t in rounds if t >= ROUNDS), (name, rounds)


def test_a_proposal_that_an_operator_has_not_confirmed_keeps_no_node_from_finishing(
    tmp_path: Path,
) -> None:
    world = ChangingWorld(1, tmp_path)
    first, *others = world.names

    async def story() -> None:
        for name in world.names:
            world.start(name)
        await asyncio.sleep(2.0)
        change = world.propose(first, ROUNDS + 5, ROUNDS)
        await asyncio.gather(*(world.running[name] for name in others))
        assert not world.running[first].done()  # its operator waits for the others
        world.sites[first].spec_changes.withdraw(change)
        await world.running[first]

    with time_of(world):
        run(story(), LIMIT)
    for name in world.names:
        assert max(world.rounds_of(name)) == ROUNDS - 1


# real processes


def write_table(file: Path, seed: str) -> None:
    rng = random.Random(seed)
    lines = ["a,b,y"]
    for _ in range(60):
        label = rng.choice("xz")
        lines.append(f"{rng.gauss(label == 'x', 1):.3f},{rng.gauss(0, 1):.3f},{label}")
    file.write_text("\n".join(lines) + "\n")


def make_sites(folder: Path, *names: str) -> dict[str, Peer]:
    peers = {}
    for name, port in zip(names, free_ports(len(names)), strict=True):
        write_table(folder / f"{name}.csv", name)
        data = {"path": str(folder / f"{name}.csv"), "label": "y", "classes": ["x", "z"]}
        config = {
            "rounds": 3,
            "data": data,
            "model": "mlp",
            "train": {"epochs": 1},
            "method": {"name": "dispfl", "robust": "none"},
        }
        peers[name] = Peer.create(
            folder / name,
            name=name,
            listen=f"127.0.0.1:{port}",
            federation="hearts",
            config=config,
        )
    for peer in peers.values():
        invites = [member.site.invite() for member in peers.values() if member is not peer]
        peer.site.members.accept_all(invites)
    return peers


def run_all(names: list[str], folder: Path) -> None:
    nodes = [ForkedProgram(["peer", "run", name], folder, folder / f"{name}.log") for name in names]
    for node in nodes:
        code = node.wait(PATIENCE)
        node.kill()
        assert code == 0, node.log.read_text()


def test_a_finished_federation_continues_after_every_operator_has_confirmed_more_rounds(
    tmp_path: Path, dispfl: Dispfl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def output_of(*words: str) -> str:
        ended = dispfl("peer", *words)
        assert ended.code == 0, ended.err
        return ended.out

    monkeypatch.chdir(tmp_path)
    names = ["alice", "bob", "carol"]
    make_sites(tmp_path, *names)
    run_all(names, tmp_path)

    changes = ["rounds=6", "train.lr=0.01", "--from-round", "3"]
    output_of("spec", "propose", "alice", *changes, "--out", "more.json")
    output_of("spec", "confirm", "bob", "more.json")
    shown_to_bob = output_of("spec", "show", "bob")
    assert "not yet by carol" in shown_to_bob.replace("alice, ", "")
    output_of("spec", "confirm", "carol", "more.json")
    run_all(names, tmp_path)

    for name in names:
        run_folder = tmp_path / name / "run"
        received = {t: record["received"] for t, record in rounds_of(run_folder).items()}
        others = [member for member in names if member != name]
        assert received == dict.fromkeys(range(6), others)
        config = read_config(run_folder)
        assert config["rounds"] == 6
        assert config["train"]["lr"] == 0.01
        shown = json.loads(output_of("spec", "show", name, "--json"))
        assert shown["version"] == 2
        assert shown["settings"]["rounds"] == 6


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["model.name=cnn"], "model.name cannot be changed"),
        (["seed=4"], "seed cannot be changed"),
        (["method.structure=channels"], "method.structure cannot be changed"),
        (["rounds=3"], "Nothing changes"),
        (["rounds=0"], "rounds"),
        (["train.lr=0.01"], "--from-round"),
        (["rounds=2"], "--from-round"),
        (["train.lr=0.01", "--from-round", "9"], "ends after 3 rounds"),
        (["rounds=1", "--from-round", "2"], "rounds would be 1"),
        (["topology=star-of-david", "--from-round", "2"], "topology"),
        (["topology=antigravity:run", "--from-round", "2"], "module antigravity is neither in"),
    ],
)
def test_a_change_that_no_site_could_follow_is_refused_with_the_reason(
    settings: list[str], sentence: str, tmp_path: Path, dispfl: Dispfl
) -> None:
    make_sites(tmp_path, "alice")
    refused = dispfl("peer", "spec", "propose", tmp_path / "alice", *settings)
    assert refused.code == 1, refused.out
    assert sentence in " ".join(refused.err.split())
    assert not (tmp_path / "alice" / "spec.json").exists()
