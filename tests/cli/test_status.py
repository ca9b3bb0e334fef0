"""`dispfl peer status` on a narrow terminal."""

import io
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from dispfl.cli.status import _traffic, print_status
from dispfl.peer.membership.identity import Identity, readable_fingerprint
from dispfl.peer.peer import Peer
from dispfl.peer.site import Site, SiteInfo


def test_in_80_columns_every_member_is_one_line_and_every_fingerprint_two_that_can_be_read_out(
    tmp_path: Path,
) -> None:
    alice, bob = (
        Site.create(
            tmp_path / name, SiteInfo(name=name, listen=f"{host}:7600", federation="hospitals"), {}
        )
        for name, host in (
            ("alice", "alice.example.org"),
            ("bob-the-hospital", "bob.hospital.example.org"),
        )
    )
    alice.members.accept(bob.invite())
    carol = Identity.make("carol")
    known = {"name": "carol", "address": "carol.example.org:7602", "fingerprint": carol.fingerprint}
    (alice.folder / "run").mkdir()
    (alice.folder / "run" / "status.json").write_text(json.dumps({"known": [known]}))
    written = io.StringIO()
    narrow = Console(file=written, width=80, force_terminal=True, color_system=None)
    print_status(Peer(alice).status(), tmp_path / "alice", narrow)
    lines = [" ".join(line.split()) for line in written.getvalue().splitlines()]
    assert "bob-the-hospital accepted bob.hospital.example.org:7600 - 0" in lines
    for name, print_ in (
        ("bob-the-hospital", bob.identity.fingerprint),
        ("carol", carol.fingerprint),
    ):
        first, second = readable_fingerprint(print_)
        at = lines.index(f"{name} {first}")
        assert lines[at + 1] == second


def test_rounds_that_are_only_in_memory_are_shown_while_the_node_runs(tmp_path: Path) -> None:
    site = Site.create(tmp_path / "alice", SiteInfo(name="alice", listen="a.example.org:7600"), {})
    node = {
        "round": 7,
        "rounds": 20,
        "state": "training",
        "unsaved_rounds": 3,
        "save_problem": "No space left in run",
    }
    written = io.StringIO()
    status = replace(Peer(site).status(), running=True, node=node)
    print_status(status, tmp_path / "alice", Console(file=written, width=80, color_system=None))
    assert (
        "3 rounds are only in memory: No space left in run. Free some space, and do not stop"
        in written.getvalue()
    )


def test_what_others_announce_of_their_privacy_is_shown_where_anybody_does() -> None:
    def shown(**privacy: object) -> str:
        written = io.StringIO()
        peers = {"alice": {}, "bob": {"privacy": privacy or None}}
        Console(file=written, width=140).print(_traffic(peers))
        return written.getvalue()

    assert "privacy" not in shown()
    assert shown(epsilon=4.0, delta=1e-5, left=True).rstrip().endswith("epsilon 4, delta 1e-05")
    assert "epsilon 4, delta 1e-05, used up" in shown(epsilon=4.0, delta=1e-5, left=False)
    assert "noise without a budget, delta 1e-06" in shown(epsilon=None, delta=1e-6, left=True)


def test_distances_of_the_others_models_are_shown_where_a_robust_rule_measures_them() -> None:
    def shown(**bob: float) -> str:
        written = io.StringIO()
        Console(file=written, width=120).print(_traffic({"alice": {"distance": None}, "bob": bob}))
        return written.getvalue()

    assert "distance" not in shown()
    assert shown(distance=0.01234).splitlines()[0].split()[-1] == "distance"
    assert shown(distance=0.01234).splitlines()[-1].split()[-1] == "0.0123"
