"""The log: one line an event, whatever others have put into its facts."""

import io
import json

from dispfl.peer.log import teller


def test_a_value_with_spaces_is_quoted_and_nothing_in_it_ends_the_line() -> None:
    out = io.StringIO()
    teller("alice", to=out)(
        "gone", {"peer": "bob", "why": "cannot be reached\n00:00:00  alice  finished", "score": None}
    )
    [line] = out.getvalue().splitlines()
    assert line.endswith(r'alice  gone         peer=bob  why="cannot be reached\n00:00:00  alice  finished"')


def test_an_object_for_machines_names_the_site() -> None:
    out = io.StringIO()
    teller("alice", as_json=True, to=out)("back", {"peer": "bob"})
    found = json.loads(out.getvalue())
    assert (found["site"], found["event"], found["peer"]) == ("alice", "back", "bob")
