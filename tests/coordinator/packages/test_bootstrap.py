"""The bootstrap program reads a token as the library does: it has to do without the library."""

from __future__ import annotations

import shlex
from dataclasses import replace
from itertools import product

import pytest
from edgeshard_coordinator.packages import bootstrap

from edgeshard.domain.identity import AUTHORITY_DIGEST_BYTES, SECRET_BYTES, Invitation, JoinToken, Principal, Role
from edgeshard.wire.invitations import invitation_to_text, line_without_edgeshard

SECRET = bytes(range(SECRET_BYTES))
HOSTS = ("10.0.0.2", "[2001:db8::1]", "site.example.org", "h", "h" * 253, "müllerei.example")


@pytest.mark.parametrize(("first", "second"), [*product(HOSTS, HOSTS)])
def test_a_token_is_read_as_by_the_library(first: str, second: str) -> None:
    for site, id, role in (("mill", "b", Role.AGENT), ("m" * 63, "b" * 63, Role.OPERATOR), ("m", "b", Role.CLIENT)):
        authority = bytes(AUTHORITY_DIGEST_BYTES - 1) + b"x"
        said = Invitation(authority, Principal(site, role, id), f"{first}:7600", f"{second}:7601", SECRET)
        token = bootstrap.Token(f" {invitation_to_text(said)}\n")
        assert (token.site, token.authority, token.secret) == (site, authority, SECRET)


@pytest.mark.parametrize("text", ["", "edgeshard2-", "edgeshard2-AA", "edgeshard1-AMCoAQ", "edgeshard2-!!!!"])
def test_what_is_no_token_ends_it(text: str) -> None:
    with pytest.raises(SystemExit) as end:
        bootstrap.Token(text)
    assert "the token is damaged" in str(end.value)


def test_the_line_is_one_of_a_shell_and_there_is_none_without_wheels() -> None:
    token = JoinToken((b"der",), Principal("mill", Role.AGENT, "b"), "a:1", "a:2", SECRET)
    assert line_without_edgeshard(token) == ""
    offered = replace(token, packages="a; rm -rf:7602", bootstrap_sha256="0" * 64)
    words = shlex.split(line_without_edgeshard(offered))
    assert words[:2] == ["python3", "-c"]
    assert words[3:] == ["a; rm -rf:7602", "0" * 64, invitation_to_text(token.invitation)]
    compile(words[2], "line", "exec")
    assert len(words[2]) < 320
