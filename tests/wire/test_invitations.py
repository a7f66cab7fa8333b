"""A token as text: how people copy it, and their mistakes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.identity import Invitation, Principal, Role
from edgeshard.wire.invitations import invitation_from_text, invitation_to_text

INVITATION = Invitation(
    b"d" * 24, Principal("mill", Role.AGENT, "b"), "10.0.0.1:7600", "10.0.0.1:7601", b"s" * 16
)
V6 = "2001:db8:1111:2222:3333:4444:5555:6666"


def at(host: str, coordinator: int = 7600, enrolment: int = 7601) -> Invitation:
    shown = f"[{host}]" if ":" in host else host
    return replace(
        INVITATION, coordinator=f"{shown}:{coordinator}", enrolment=f"{shown}:{enrolment}"
    )


def test_it_is_one_word_and_comes_back() -> None:
    text = invitation_to_text(INVITATION)
    assert text.replace("-", "").replace("_", "").isalnum()
    assert invitation_from_text(f"  {text}\n") == INVITATION


@pytest.mark.parametrize(
    ("host", "names"),
    [("255.255.255.255", 29), (V6, 17), ("site.example.org", 17), ("h" * 25, 8), ("127.0.0.1", 29)],
)
def test_it_has_at_most_120_characters(host: str, names: int) -> None:
    """With site and id of this many characters together."""
    longest = replace(
        at(host, 65535, 65535), principal=Principal("mill", Role.OPERATOR, "b" * (names - 4))
    )
    assert len(invitation_to_text(longest)) <= 120
    assert invitation_from_text(invitation_to_text(longest)) == longest


_NAMES = st.from_regex(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True)
_HOSTS = st.one_of(
    st.ip_addresses().map(str),
    _NAMES,
    st.sampled_from(
        [
            "fe80::1%eth0",
            "::1",
            "::ffff:10.0.0.1",
            "h" * 253,
            "müllerei.example",
            "1.2.3",
            "010.0.0.1",
        ]
    ),
)


@given(
    _HOSTS,
    _HOSTS,
    _NAMES,
    _NAMES,
    st.sampled_from([Role.AGENT, Role.CLIENT, Role.OPERATOR]),
    st.binary(min_size=16, max_size=16),
)
def test_whatever_it_says_comes_back(
    first: str, second: str, site: str, id: str, role: Role, secret: bytes
) -> None:
    """The longest names make it longer, never wrong."""
    said = replace(
        INVITATION,
        coordinator=at(first).coordinator,
        enrolment=at(second).enrolment,
        principal=Principal(site, role, id),
        secret=secret,
    )
    assert invitation_from_text(invitation_to_text(said)) == said


def test_a_host_that_is_none() -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        invitation_to_text(at("ü" * 200))
    assert refusal.value.field == "host"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "edgeshard2-",
        "edgeshard2-AAAA",
        "edgeshard1-AAAA",
        "x",
        "edgeshard2-" + "A" * 20_000,
        "edgeshard2-_w",
    ],
)
def test_what_is_no_token(text: str) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        invitation_from_text(text)
    assert refusal.value.field == "token" and "AAAA" not in refusal.value.message


def test_a_part_of_one_is_none_and_is_not_shown() -> None:
    text = invitation_to_text(INVITATION)
    for end in range(len(text)):
        with pytest.raises(InvalidArgumentError) as refusal:
            invitation_from_text(text[:end])
        assert text[20:60] not in refusal.value.message
    with pytest.raises(InvalidArgumentError):
        invitation_from_text(text + "AAAA")


def test_it_does_not_show_its_secret() -> None:
    assert "sss" not in repr(INVITATION)
