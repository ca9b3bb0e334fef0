"""Whatever others send, as an address, an invite, a record, a sync message or a file, is read or
refused by name."""

import contextlib
import hashlib
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from messages import refused
from yarl import URL

from dispfl.errors import ConfigError, DispflError, MessageError, RunError
from dispfl.peer.membership import sync
from dispfl.peer.membership.address import Address
from dispfl.peer.membership.identity import Identity
from dispfl.peer.membership.invite import Invite, InviteError
from dispfl.peer.membership.list_file import from_bytes, to_bytes
from dispfl.peer.membership.member_list import Member, MemberList
from dispfl.peer.membership.records import MemberRecord
from dispfl.peer.membership.roster import Roster, RosterError
from dispfl.peer.membership.sync import Offer, SyncMessage

BOB = Identity.make("bob")

HOSTILE_TEXT = st.text(st.sampled_from("aZ09.-_:%[]/@ \n\t\x00é\u202e٣ßﬀ。"), max_size=20)
ZONES = HOSTILE_TEXT | st.sampled_from(
    ["eth0", "wlan0.100", "\n", "a" * 300, "a..b", ".", "25", "%25eth0"]
)
IPV6 = st.ip_addresses(v=6).map(str) | st.just("fe80::1")
LABELS = st.text(st.sampled_from("aZ0-_"), max_size=70) | st.sampled_from(
    ["xn--a", "a" * 63, "a" * 64]
)
HOSTS = (
    st.builds("[{}%{}]".format, IPV6, ZONES)
    | IPV6.map("[{}]".format)
    | st.ip_addresses(v=4).map(str)
    | st.lists(LABELS, max_size=6).map(".".join)
    | HOSTILE_TEXT
)
ADDRESSES = st.builds("{}:{}".format, HOSTS, st.integers(-1, 70_000)) | HOSTILE_TEXT
"""Addresses as a hostile member would announce them; about half of them are valid."""


@settings(max_examples=400)
@given(ADDRESSES)
@example("[fe80::1%\n]:7600")
@example(f"[fe80::1%{'a' * 300}]:7600")
@example("[fe80::1%a..b]:7600")
@example(f"{'a.' * 126}aa:1")
def test_every_address_that_is_accepted_can_be_a_url_and_be_resolved(text: str) -> None:
    try:
        address = Address.parse(text)
    except ConfigError as problem:
        refused = str(problem)
    else:
        refused = ""
    assert refused.isprintable()  # it names the text, without its control characters
    if refused:
        return
    URL.build(scheme="https", host=address.host, port=address.port, path="/v1/sync")
    address.host.encode("idna")  # as the resolver does
    assert str(address).isprintable()
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize("zone", ["eth0", "wlan0.100", "br-3f_2", "a" * 15])
def test_a_zone_is_the_name_of_an_interface(zone: str) -> None:
    assert Address.parse(f"[fe80::1%{zone}]:7600") == (f"fe80::1%{zone}", 7600)


@pytest.mark.parametrize("zone", ["\n", "a" * 16, "a b", "a..b", ".a", "a.", "ä", "25"])
def test_any_other_zone_is_refused(zone: str) -> None:
    with refused(ConfigError):
        Address.parse(f"[fe80::1%{zone}]:7600")


def unchecked(text: str) -> Address:
    """An address that is any text, as a hostile program has it."""
    hostile: type[Address] = type("Hostile", (Address,), {"__str__": lambda self: text})
    return hostile("bob", 1)


def signed_with(address: str) -> Any:
    """A record with a valid signature over an address that bob's own program would not announce."""
    return json.loads(
        json.dumps(MemberRecord.sign(BOB, "hospitals", unchecked(address), 0.5, 0, 1).to_json())
    )


@settings(max_examples=100)
@given(ADDRESSES)
@example("[fe80::1%\n]:7600")
def test_a_signed_record_with_an_address_that_cannot_be_used_is_refused(address: str) -> None:
    with contextlib.suppress(ConfigError):
        assume(str(Address.parse(address)) != address)
    with pytest.raises(MessageError) as refused:
        MemberRecord.read(signed_with(address))
    assert refused.value.refusal == "malformed"


JSONS: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | HOSTILE_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(HOSTILE_TEXT, inner, max_size=3),
    max_leaves=6,
)
RECORD: Any = MemberRecord.sign(
    BOB, "hospitals", Address("bob.example.org", 7601), 0.5, 0, 1
).to_json()


def paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside a JSON value."""
    keys = (
        value.keys()
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else ()
    )
    return [(*here, key) for key in keys] + [
        path for key in keys for path in paths(value[key], (*here, key))
    ]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of a JSON value with another value at a path."""
    copy = json.loads(json.dumps(value))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return copy


@settings(max_examples=200)
@given(path=st.sampled_from(paths(RECORD)), value=JSONS)
def test_a_record_with_any_value_at_any_place_is_refused_by_name(
    path: tuple[Any, ...], value: Any
) -> None:
    changed = replaced(RECORD, path, value)
    assume(json.dumps(changed) != json.dumps(RECORD))
    with pytest.raises(MessageError) as refused:
        MemberRecord.read(changed)
    assert refused.value.refusal in ("malformed", "signature", "certificate")


@settings(max_examples=100)
@given(ADDRESSES)
def test_an_invite_with_any_address_is_read_or_refused_as_an_invite(address: str) -> None:
    try:
        invite = Invite.read(str(Invite("hospitals", "bob", unchecked(address), BOB.certificate)))
    except InviteError:
        return
    except UnicodeEncodeError:  # such an invite cannot be written
        return
    URL.build(scheme="https", host=invite.address.host, port=invite.address.port)


@settings(max_examples=50)
@given(st.binary(max_size=200))
def test_no_other_exception_leaves_an_invite(content: bytes) -> None:
    with pytest.raises(DispflError):
        Invite.read("dispfl1-" + content.decode("latin-1"))


# sync messages


@settings(max_examples=200)
@given(
    st.binary(max_size=60)
    | JSONS.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(
        st.sampled_from(
            [
                "records",
                "state",
                "roster",
                "known",
                "after",
                "until",
                "roster_from",
                "next",
                "part",
                "size",
            ]
        ),
        JSONS | st.integers(0, 9) | st.lists(HOSTILE_TEXT, max_size=3),
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_sync_message_is_answered_or_refused_as_malformed(body: bytes) -> None:
    try:
        message = SyncMessage.read(body)
    except MessageError as problem:
        refusal = problem.refusal
    else:
        refusal = "malformed"
        answer = Offer([RECORD]).answer(message)
        assert len(answer) <= sync.MAX_BODY_BYTES
        SyncMessage.read(answer)
    assert refusal == "malformed"


# rosters

ANN = Ed25519PrivateKey.generate()
EMPTY = Roster("hospitals", 1, 1, {"ann": ANN.public_key().public_bytes_raw()})
ROSTER = EMPTY.with_members(
    [Invite("hospitals", "bob", Address("bob", 1), BOB.certificate)]
).signed_by(ANN)


@settings(max_examples=200)
@given(path=st.sampled_from(paths(ROSTER.to_json())), value=JSONS)
def test_a_roster_with_any_value_at_any_place_is_refused(path: tuple[Any, ...], value: Any) -> None:
    changed = replaced(ROSTER.to_json(), path, value)
    assume(json.dumps(changed) != json.dumps(ROSTER.to_json()))
    with pytest.raises(RosterError):
        Roster.read(json.dumps(changed)).verify()


@settings(max_examples=100)
@given(st.text(max_size=60) | JSONS.map(json.dumps))
def test_any_other_text_is_no_roster(text: str) -> None:
    with pytest.raises(RosterError):
        Roster.read(text)


# the members file

MEMBER = Member(
    "bob", Address("bob.example.org", 7601), BOB.certificate, record=MemberRecord.parse(RECORD)
)
FILE = to_bytes(MemberList(MemberRecord.parse(RECORD), {"bob": MEMBER}, ROSTER))


@settings(max_examples=200)
@given(st.binary(max_size=60) | st.tuples(st.integers(0, len(FILE) - 1), st.integers(1, 255)))
def test_any_damage_of_the_members_file_is_detected(how: bytes | tuple[int, int]) -> None:
    content = bytearray(FILE)
    if isinstance(how, tuple):
        content[how[0]] ^= how[1]
    else:
        content = bytearray(how)
    with pytest.raises((ValueError, RunError)):  # another version is a RunError
        from_bytes(bytes(content))


ENTRY = json.loads(FILE.splitlines()[2])
OTHER_LINES = [line for place, line in enumerate(FILE.splitlines()[1:]) if place != 1]


@settings(max_examples=200)
@given(path=st.sampled_from(paths(ENTRY)), value=JSONS)
def test_an_entry_of_the_members_file_with_any_value_at_any_place_ends_nothing(
    path: tuple[Any, ...], value: Any
) -> None:
    line = json.dumps(replaced(ENTRY, path, value)).encode()
    body = b"\n".join([*OTHER_LINES, line]) + b"\n"
    header = {"format": "dispfl members", "version": 2, "digest": hashlib.sha256(body).hexdigest()}
    found, problems = from_bytes(json.dumps(header).encode() + b"\n" + body)
    assert found.own is not None
    assert found.roster == ROSTER
    if "bob" not in found.members:
        assert found.unreadable == (line,)
        assert len(problems) == 1
    elif found.members["bob"].address is not None:
        URL.build(scheme="https", host=found.members["bob"].address.host, port=7600)
    assert from_bytes(to_bytes(found))[0] == found
