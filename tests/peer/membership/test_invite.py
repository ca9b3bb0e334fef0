"""Invites: valid ones are read, also with line breaks; any damage is refused with a message."""

import base64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispfl.errors import ConfigError
from dispfl.peer.membership.address import Address
from dispfl.peer.membership.identity import Identity, der
from dispfl.peer.membership.invite import PREFIX, Invite, InviteError, _checksum

BOB = Identity.make("bob")
INVITE = Invite("hospitals", "bob", Address("bob.example.org", 7601), BOB.certificate)
TEXT = str(INVITE)


def sealed(*fields: bytes) -> str:
    """An invite with these fields and a correct checksum, as an attacker could create it."""
    content = b"".join(len(field).to_bytes(2, "big") + field for field in fields)
    return PREFIX + base64.urlsafe_b64encode(content + _checksum(content)).decode().rstrip("=")


def test_an_invite_survives_a_round_trip() -> None:
    assert Invite.read(TEXT) == INVITE
    assert Invite.read(TEXT).fingerprint == BOB.fingerprint
    assert sealed(b"hospitals", b"bob", b"bob.example.org:7601", der(BOB.certificate)) == TEXT


def test_line_breaks_and_spaces_are_ignored() -> None:
    broken = "\r\n  ".join(TEXT[i : i + 70] for i in range(0, len(TEXT), 70))
    assert Invite.read(f"\n\t{broken} \n") == INVITE


@pytest.mark.parametrize("address", ["[2001:db8::7]:7601", "192.0.2.7:1", "bob:65535"])
def test_every_kind_of_address_survives_a_round_trip(address: str) -> None:
    invite = Invite("hospitals", "bob", Address.parse(address), BOB.certificate)
    assert str(Invite.read(str(invite)).address) == address


LETTERS = st.sampled_from(
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=+/.é\x00"
)
PLACES = st.integers(0, len(TEXT) - 1)


@settings(max_examples=200)
@given(
    place=PLACES,
    letter=LETTERS,
    how=st.sampled_from(["replace", "insert", "drop", "truncate", "repeat"]),
)
def test_any_damage_is_refused_with_a_message(place: int, letter: str, how: str) -> None:
    damaged = {
        "replace": TEXT[:place] + letter + TEXT[place + 1 :],
        "insert": TEXT[:place] + letter + TEXT[place:],
        "drop": TEXT[:place] + TEXT[place + 1 :],
        "truncate": TEXT[:place],
        "repeat": TEXT[:place] + TEXT[max(0, place - 8) :] + letter,
    }[how]
    if damaged == TEXT:
        return
    with pytest.raises(InviteError, match=r"\.$"):
        Invite.read(damaged)


@pytest.mark.parametrize(
    "host", ["b", "bb", "bbb"]
)  # so that 0, 2 and 4 bits of the last character are unused
def test_another_last_character_is_refused_even_if_it_decodes_to_the_same_bytes(host: str) -> None:
    text = str(Invite("hospitals", "bob", Address(host, 7601), BOB.certificate))
    for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_":
        if letter != text[-1]:
            with pytest.raises(InviteError, match="checksum is wrong"):
                Invite.read(text[:-1] + letter)


@settings(max_examples=60)
@given(place=st.integers(0, len(TEXT) - 2 - len(PREFIX)))
def test_swapped_characters_are_refused(place: int) -> None:
    at = len(PREFIX) + place
    swapped = TEXT[:at] + TEXT[at + 1] + TEXT[at] + TEXT[at + 2 :]
    if swapped != TEXT:
        with pytest.raises(InviteError, match="damaged"):
            Invite.read(swapped)


ANY_FIELDS = st.lists(st.binary(max_size=50), max_size=6)


@settings(max_examples=100)
@given(
    st.one_of(
        st.text(st.characters(codec="latin-1")), ANY_FIELDS.map(lambda fields: sealed(*fields))
    )
)
def test_arbitrary_text_is_refused_with_the_same_error(text: str) -> None:
    with pytest.raises(InviteError):
        Invite.read(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "An invite begins with dispfl1-, got ''"),
        ("hello", "An invite begins with dispfl1-, got 'hello'"),
        (TEXT.replace("dispfl1", "dispfl2"), r"another version \(dispfl2\)"),
        (PREFIX + "A" * 20_000, "at most 16384 characters"),
        (sealed(b"hospitals", b"bob", b"bob:1"), "3 fields instead of 4"),
        (
            sealed(b"hospitals", b"bob", b"bob", der(BOB.certificate)),
            "An address is HOST:PORT, got 'bob'",
        ),
        (
            sealed(b"hospitals", b"alice", b"bob:1", der(BOB.certificate)),
            "is for alice, but its certificate names bob",
        ),
        (
            sealed(b"hospitals", b"\x1b[2Jbob", b"bob:1", der(BOB.certificate)),
            r"The name in an invite .* '\\x1b\[2Jbob'",
        ),
        (
            sealed(b"hos/als", b"bob", b"bob:1", der(BOB.certificate)),
            "The name of a federation must be",
        ),
        (
            sealed(b"hospitals", b"bob", b"0.0.0.0:1", der(BOB.certificate)),
            "The address 0.0.0.0:1 is not reachable",
        ),
        (
            sealed(b"hospitals", b"bob", b"bob:1", b"no certificate"),
            "This is not a site certificate",
        ),
    ],
)
def test_each_error_has_its_own_message(text: str, message: str) -> None:
    with pytest.raises(InviteError, match=message) as caught:
        Invite.read(text)
    assert str(caught.value).isprintable()  # it may come from anybody, and is shown on a terminal


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("alice.example.org:7600", "alice.example.org", 7600),
        ("[2001:DB8:0::7]:7600", "2001:db8::7", 7600),
        ("127.0.0.1:1", "127.0.0.1", 1),
        (" my_host:65535 ", "my_host", 65535),
    ],
)
def test_valid_addresses_are_parsed(text: str, host: str, port: int) -> None:
    assert Address.parse(text) == (host, port)
    assert Address.parse(str(Address.parse(text))) == (host, port)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alice", "HOST:PORT, got 'alice'"),
        (":7600", "HOST:PORT, got ':7600'"),
        ("alice:", "a number from 1 to 65535, got ''"),
        ("alice:0", "a number from 1 to 65535, got '0'"),
        ("alice:65536", "a number from 1 to 65535, got '65536'"),
        ("alice:7٦00", "a number from 1 to 65535"),
        ("2001:db8::7:7600", r"needs brackets, got '2001:db8::7:7600'; write \[2001:db8::7\]:PORT"),
        ("[2001:xyz]:7600", "is not an IPv6 address"),
        ("256.1.1.1:7600", "is not an IPv4 address"),
        ("al ice:7600", "is not a host name"),
        ("https://alice:7600", "https://alice in .* is not a host name"),
        ("user@alice:7600", "is not a host name"),
        ("alice/..:7600", "is not a host name"),
        (f"{'a' * 64}.org:7600", "is not a host name"),
    ],
)
def test_invalid_addresses_are_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Address.parse(text)
