"""The kernels' build: what happens where it cannot succeed."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from edgeshard_agent.ops import native, sources
from edgeshard_agent.ops.fingerprint import bits_fingerprint

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


def test_without_a_compiler_it_says_what_to_install(
    hatch_build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert "g++" in hatch_build.build()
    assert not hatch_build.LIBRARY.exists()


@pytest.mark.parametrize(
    ("compiler", "words"), [("/nowhere/c++", "does not run"), ("false", "do not compile")]
)
def test_a_compiler_that_fails_leaves_no_library(
    compiler: str, words: str, hatch_build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    assert words in hatch_build.build()
    assert not hatch_build.LIBRARY.exists()


def test_a_compiler_that_fails_is_followed_by_the_next(
    hatch_build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clang may be installed without a C++ library."""
    commands: list[str] = []

    def compile_library(
        command: list[str], machine: str, linked: Path, names: tuple[str, ...]
    ) -> None:
        commands.append(command[0])
        if command[0] == "clang++":
            raise hatch_build.CompileError("no header <vector>")
        linked.write_bytes(b"a library")

    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(hatch_build.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(hatch_build, "_probe", lambda command: ("portable",))
    monkeypatch.setattr(hatch_build, "compile_library", compile_library)
    assert hatch_build.build() == ""
    assert commands == ["clang++", "c++"]
    assert hatch_build.LIBRARY.read_bytes() == b"a library"


@pytest.mark.long
@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
def test_instruction_sets_that_the_compiler_does_not_know_are_left_out(
    hatch_build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = {**hatch_build.PORTABLE, "avx512bf16": ("-mno-such-instructions",)}
    monkeypatch.setattr(hatch_build, "INSTRUCTION_SETS", {hatch_build._machine(): sets})
    monkeypatch.setenv("EDGESHARD_KERNEL_SETS", "all")
    assert hatch_build.build() == ""
    library = ctypes.CDLL(str(hatch_build.LIBRARY))
    library.edgeshard_kernels.restype = ctypes.c_char_p
    assert [library.edgeshard_kernels(index) for index in range(2)] == [b"portable", None]
    built = hatch_build.LIBRARY.stat()
    assert hatch_build.build() == "" and hatch_build.LIBRARY.stat().st_ino == built.st_ino, (
        "of the same sources"
    )


X86_64 = "x86_64"


@pytest.mark.parametrize(
    ("machine", "runnable", "expected"),
    [
        (X86_64, ["portable"], ["portable"]),
        (X86_64, ["avx2", "portable"], ["portable", "avx2"]),
        (X86_64, ["avxvnni", "avx2", "portable"], ["portable", "avx2", "avxvnni"]),
        (X86_64, ["avx512", "avx2", "portable"], ["portable", "avx2", "avx512"]),
        (
            X86_64,
            ["avx512bf16", "avx512", "avxvnni", "avx2", "portable"],
            ["portable", "avx2", "avx512", "avx512bf16"],
        ),
        ("aarch64", ["dotprod", "portable"], ["portable", "dotprod"]),
        ("riscv64", ["portable"], ["portable"]),
    ],
)
def test_a_checkout_gets_the_sets_that_its_processor_runs(
    machine: str, runnable: list[str], expected: list[str], hatch_build: ModuleType
) -> None:
    assert list(hatch_build.sets_to_compile(machine, runnable)) == expected


def test_a_wheel_has_every_set_of_its_family(hatch_build: ModuleType) -> None:
    assert set(hatch_build.family_sets("aarch64")) == {"portable", "dotprod"}
    assert set(hatch_build.family_sets(X86_64)) == {
        "portable",
        "avx2",
        "avxvnni",
        "avx512",
        "avx512bf16",
    }


LIBRARY_SOURCE = """
const char* edgeshard_sources(void) {{ return "{digest}"; }}
const char* edgeshard_requested_kernels(void) {{ return "portable dotprod"; }}
const char* edgeshard_cpu_kernels(int index) {{ \
return index == 0 ? "{best}" : index == 1 ? "portable" : 0; }}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
@pytest.mark.parametrize(("best", "is_complete"), [("dotprod", True), ("newer", False)])
def test_a_library_that_lacks_what_this_processor_runs_is_compiled_again(
    best: str, is_complete: bool, hatch_build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout may have been copied from another machine."""
    sets = {"portable": (), "dotprod": (), "newer": ()}
    monkeypatch.setattr(hatch_build, "INSTRUCTION_SETS", {hatch_build._machine(): sets})
    source = LIBRARY_SOURCE.format(digest=hatch_build._digest(), best=best)
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(hatch_build.LIBRARY)]
    subprocess.run(command, input=source, text=True, check=True)
    assert hatch_build._is_up_to_date(all_sets=False) == is_complete
    assert not hatch_build._is_up_to_date(all_sets=True), "a wheel has every set"


@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
def test_the_sets_of_this_processor_are_read_from_the_processor(hatch_build: ModuleType) -> None:
    runnable = hatch_build._probe(["c++"])
    assert runnable[-1] == "portable"
    assert runnable[0] == (native.best_kernel_name() or runnable[0])


CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"


@pytest.mark.skipif(
    not shutil.which(CROSS_COMPILER) or not shutil.which(EMULATOR), reason="no aarch64 here"
)
@pytest.mark.parametrize(
    ("cpu", "expected"), [("cortex-a76", ["dotprod", "portable"]), ("cortex-a72", ["portable"])]
)
def test_dot_products_are_chosen_on_cores_that_have_them(
    cpu: str, expected: list[str], hatch_build: ModuleType, tmp_path: Path
) -> None:
    """Under emulation: the first is the core of a Raspberry Pi 5, the second that of a Pi 4."""
    source, program = tmp_path / "probe.cpp", tmp_path / "probe"
    source.write_text(hatch_build._PROBE)
    options = ("-std=c++17", "-static", "-I", str(hatch_build.SOURCES))
    subprocess.run((CROSS_COMPILER, *options, str(source), "-o", str(program)), check=True)
    environment = {**os.environ, "QEMU_CPU": cpu}
    done = subprocess.run(
        (EMULATOR, str(program)), env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == expected


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("compiler", "machine", "name", "instruction", "absent"),
    [
        ("g++", X86_64, "avxvnni", "vpdpbusd", ("vpmaddubsw", "%zmm")),
        (CROSS_COMPILER, "aarch64", "dotprod", "sdot", ("\tmla\t", "\tsmlal")),
    ],
    ids=["avxvnni", "dotprod"],
)
def test_integer_products_take_one_instruction(
    compiler: str,
    machine: str,
    name: str,
    instruction: str,
    absent: tuple[str, ...],
    hatch_build: ModuleType,
    tmp_path: Path,
) -> None:
    """No processor with AVX-VNNI has run these kernels yet: what is compiled is checked instead."""
    if not shutil.which(compiler) or (machine == X86_64 and hatch_build._machine() != X86_64):
        pytest.skip(f"no {compiler} for {machine}")
    target = tmp_path / "kernels.o"
    assert hatch_build.compile_kernels([compiler], machine, name, str(target)) is None
    disassembler = compiler.replace("g++", "objdump")
    done = subprocess.run(
        (disassembler, "-dC", str(target)), capture_output=True, text=True, check=True
    )
    tiles = [
        text
        for text in done.stdout.split("\n\n")
        if re.search(r"run_tile<.*IntegerPolicy<[842]>", text[:300])
    ]
    assert len(tiles) >= 3, "tiles of int8, int4 and int2"
    for tile in tiles:
        assert instruction in tile, tile[:200]
        assert not any(word in tile for word in absent), tile[:200]


@pytest.fixture
def foreign_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], None]]:
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
    """Its structs may be laid out otherwise: a call would read and write memory that is not
    meant."""
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


def test_a_missing_library_is_told_once(
    without_library: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert not native.native_available()
        assert not native.native_available()
    assert len(caplog.records) == 1
    assert "g++" in caplog.text


@pytest.mark.skipif(len(native.kernel_names()) < 2, reason="this CPU runs one kind of kernels")
def test_the_environment_leaves_out_kernels_with_bits_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = native.kernel_names()
    monkeypatch.setattr(sources, "_BF16_KERNELS", names[0])
    assert sources.has_bf16_products()
    native.use_kernels(names[1])
    second = bits_fingerprint()
    native.use_kernels(names[0])
    monkeypatch.setenv(sources.BF16_SWITCH, "0")
    native.library.cache_clear()
    assert native.kernel_names() == names[1:] and not sources.has_bf16_products()
    assert bits_fingerprint() == second
    native.use_kernels(names[0])
