"""The scripted site of the client's tests, and edgectl run against it."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from edgeshard.cli.main import app

_SITE = Path(__file__).parents[1] / "client" / "conftest.py"
_spec = importlib.util.spec_from_file_location("edgeshard_scripted_site", _SITE)
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _module
_spec.loader.exec_module(_module)
site = _module.site

Edgectl = Callable[..., Any]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tester's own EDGESHARD__ settings must not reach the commands under test."""
    for key in [key for key in os.environ if key.startswith("EDGESHARD__")]:
        monkeypatch.delenv(key)


@pytest.fixture
def edgectl(site: Any) -> Edgectl:
    """Runs edgectl in this process against the scripted site; the result has exit_code, stdout and stderr."""

    def invoke(*arguments: str, stdin: str | None = None) -> Any:
        return CliRunner().invoke(app, ["--coordinator", site.address, *arguments], input=stdin)

    return invoke
