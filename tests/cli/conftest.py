"""The scripted site of the client's tests, and edgectl run against it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from edgeshard.cli.main import app
from tests.support.scripted_site import site

__all__ = ["site"]

Edgectl = Callable[..., Any]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tester's own EDGESHARD__ settings must not reach the commands under test."""
    for key in [key for key in os.environ if key.startswith("EDGESHARD__")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("EDGESHARD__CLIENT__PLAINTEXT", "true")


@pytest.fixture
def edgectl(site: Any) -> Edgectl:
    """Runs edgectl in this process against the scripted site; the result has exit_code, stdout and
    stderr."""

    def invoke(*arguments: str, stdin: str | None = None) -> Any:
        return CliRunner().invoke(app, ["--coordinator", site.address, *arguments], input=stdin)

    return invoke


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port of loopback without a listener, which no other process can take meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]
