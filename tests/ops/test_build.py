"""The kernels' build: what happens where it cannot succeed."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from edgeshard_agent.ops import native

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def hatch_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The build hook, with a library of other sources in the place where it puts its own."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "LIBRARY", tmp_path / "library.so")
    module.LIBRARY.write_bytes(b"no library")
    return module


def test_without_a_compiler_it_says_what_to_install(hatch_build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert "g++" in hatch_build.build()
    assert not hatch_build.LIBRARY.exists()


@pytest.mark.parametrize(("compiler", "words"), [("/nowhere/c++", "does not run"), ("false", "do not compile")])
def test_a_compiler_that_fails_leaves_no_library(
    compiler: str, words: str, hatch_build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    assert words in hatch_build.build()
    assert not hatch_build.LIBRARY.exists()


@pytest.fixture
def without_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "absent.so")
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def test_a_missing_library_is_told_once(without_library: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not native.native_available()
        assert not native.native_available()
    assert len(caplog.records) == 1
    assert "g++" in caplog.text
