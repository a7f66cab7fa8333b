"""Every form of a target that HTTP allows leads to the same route and the same rights."""

from __future__ import annotations

from typing import Any

import pytest

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.gateway.access.middleware import canonical


def scope_of(target: str, method: str = "GET", host: bytes = b"a.example") -> dict[str, Any]:
    raw = target.encode()
    return {
        "type": "http",
        "method": method,
        "path": target,
        "raw_path": raw,
        "headers": [(b"host", host)],
    }


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/", "/"),
        ("/v1/models/", "/v1/models"),
        ("//v1//models//", "/v1/models"),
        ("http://127.0.0.1:80/v1/models", "/v1/models"),
        ("HTTPS://[::1]:80/v1/models/", "/v1/models"),
        ("http://127.0.0.1", "/"),
        ("*", "*"),
    ],
)
def test_a_path_has_one_form(target: str, path: str) -> None:
    assert canonical(scope_of(target))["path"] == path


def test_the_authority_of_a_target_takes_the_place_of_host() -> None:
    scope = scope_of("http://evil.example/health", host=b"127.0.0.1")
    assert canonical(scope)["headers"] == [(b"host", b"evil.example")]
    assert scope["headers"] == [(b"host", b"127.0.0.1")], "the connection's own scope stays"
    for authority in ("", "a@b", "a b", "a%2fb"):
        with pytest.raises(InvalidArgumentError, match="authority"):
            canonical(scope_of(f"http://{authority}/"))


def test_head_is_read_as_get() -> None:
    assert canonical(scope_of("/health", "HEAD"))["method"] == "GET"
    assert canonical(scope_of("/health", "POST"))["method"] == "POST"
