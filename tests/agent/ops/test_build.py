"""The kernels' build: what happens where it cannot succeed."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from edgeshard_agent.ops import native

ROOT = Path(__file__).resolve().parents[3]


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


@pytest.mark.long
@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
def test_instruction_sets_that_the_compiler_does_not_know_are_left_out(
    hatch_build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = {**hatch_build.PORTABLE, "avx512bf16": ("-mno-such-instructions",)}
    monkeypatch.setattr(hatch_build, "INSTRUCTION_SETS", {hatch_build._machine(): sets})
    assert hatch_build.build() == ""
    library = ctypes.CDLL(str(hatch_build.LIBRARY))
    library.edgeshard_kernels.restype = ctypes.c_char_p
    assert [library.edgeshard_kernels(index) for index in range(2)] == [b"portable", None]
    built = hatch_build.LIBRARY.stat()
    assert hatch_build.build() == "" and hatch_build.LIBRARY.stat().st_ino == built.st_ino, "of the same sources"


@pytest.fixture
def foreign_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Puts a library made of this C source in the place of the kernels."""

    def put(source: str) -> None:
        (tmp_path / "other.c").write_text(source)
        library = tmp_path / "other.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "other.c"], check=True)
        monkeypatch.setattr(native, "LIBRARY", library)
        native.library.cache_clear()

    yield put
    native.library.cache_clear()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
@pytest.mark.parametrize(
    "source",
    ["int edgeshard_linear;", 'const char* edgeshard_sources(void) { return "0000"; }'],
    ids=["older", "other"],
)
def test_a_library_of_other_sources_is_not_called(
    source: str, foreign_library: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Its structs may be laid out otherwise: a call would read and write memory that is not meant."""
    foreign_library(source)
    with caplog.at_level(logging.WARNING):
        assert not native.native_available()
    assert "hatch_build.py" in caplog.text


@pytest.mark.skipif(not native.native_available(), reason="the native kernels are not built")
def test_a_forked_process_computes() -> None:
    """Its threads stayed behind in the parent; whoever waited for them would wait for ever."""
    program = """
import os, signal, torch
from edgeshard_agent.ops.linear import PackedLinear
torch.set_num_threads(2)
layer, x = PackedLinear.pack(torch.randn(256, 64), "fp32"), torch.randn(1, 64)
expected = layer(x)
child = os.fork()
if not child:
    signal.alarm(20)
    os._exit(0 if torch.equal(layer(x), expected) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


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
