"""The log: one line per event, whatever its fields contain."""

import io
import json
import logging
import os
import warnings
from math import inf, nan

import pytest

from dispfl.peer.state.log import event_logger, logging_as_events, shortened


def test_a_value_with_spaces_and_line_breaks_is_quoted() -> None:
    out = io.StringIO()
    event_logger("alice", to=out)(
        "unreachable",
        {"peer": "bob", "detail": "cannot be reached\n00:00:00  alice  finished", "score": None},
    )
    [line] = out.getvalue().splitlines()
    assert line.endswith(
        r'alice  unreachable  peer=bob  detail="cannot be reached\n00:00:00  alice  finished"'
    )


def test_no_value_reaches_the_terminal_with_control_characters() -> None:
    out = io.StringIO()
    event_logger("alice", to=out)("refused", {"detail": "\x1b[2J\x9b31m\u202egnp\x7f"})
    [line] = out.getvalue().splitlines()
    assert line.endswith(r'detail="\u001b[2J\u009b31m\u202egnp\u007f"')


def test_a_text_of_another_site_is_shortened_and_stripped_of_control_characters() -> None:
    assert shortened("plain, Zürich") == "plain, Zürich"
    assert shortened("\x1b[2J\nfinished\u202e") == " [2J finished "
    assert shortened("x" * 64_000) == "x" * 300 + "... (64000 characters)"


def test_the_json_log_names_the_site() -> None:
    out = io.StringIO()
    event_logger("alice", as_json=True, to=out)("reconnected", {"peer": "bob"})
    found = json.loads(out.getvalue())
    assert (found["site"], found["event"], found["peer"]) == ("alice", "reconnected", "bob")


def test_json_has_no_numbers_that_other_programs_cannot_read() -> None:
    out = io.StringIO()
    event_logger("alice", as_json=True, to=out)(
        "round", {"score": nan, "each": [1.5, (inf, -inf)], "received": 2}
    )
    assert "NaN" not in out.getvalue()
    found = json.loads(out.getvalue())
    assert (found["score"], found["each"], found["received"]) == (None, [1.5, [None, None]], 2)


def test_a_log_on_a_full_disk_or_a_closed_pipe_does_not_end_the_node() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    for number in (os.open("/dev/full", os.O_WRONLY), writing):
        out = os.fdopen(number, "w")
        for as_json in (False, True):
            event_logger("alice", as_json, out)("round", {"round": 3})
        with pytest.raises(OSError, match=r"No space left|Broken pipe"):
            out.close()


def test_messages_of_logging_and_warnings_are_events_on_one_line_each() -> None:
    out = io.StringIO()
    with warnings.catch_warnings(), logging_as_events(event_logger("alice", as_json=True, to=out)):
        warnings.simplefilter("always")
        logging.getLogger("dispfl.data").warning("%d files cannot be read:\nx.png", 3)
        logging.getLogger("aiohttp").info("not written")
        try:
            raise ValueError("broken")
        except ValueError:
            logging.getLogger("dispfl.peer").exception("A request failed.")
        warnings.warn("The model has buffers.", stacklevel=1)
    logging.getLogger("dispfl.data").warning("afterwards")
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(event["event"], event["logger"]) for event in events] == [
        ("warning", "dispfl.data"),
        ("error", "dispfl.peer"),
        ("warning", "py.warnings"),
    ]
    assert events[0]["detail"] == "3 files cannot be read:\nx.png"
    assert events[1]["exception"] == "ValueError: broken"
    assert "The model has buffers." in events[2]["detail"]
