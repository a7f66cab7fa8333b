"""The same bits from compilers and processors: of functions between the linear layers by a small
driver in C++, and of all operators by the fingerprint of whole libraries."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from edgeshard_agent.ops import native
from edgeshard_agent.ops.fingerprint import bits_fingerprint

import hatch_build

ROOT = Path(__file__).resolve().parents[3]
DRIVER = Path(__file__).parent / "drivers" / "common_bits.cpp"
CLANG = (
    str(ROOT / ".venv-wheels" / "bin" / "python"),
    "-m",
    "ziglang",
    "c++",
    "-target",
    "x86_64-linux-gnu.2.28",
)
ARM = ("aarch64-linux-gnu-g++", "-static")
AVX2 = ("-mavx2", "-mfma")
# A change of an operator changes these on purpose: take them from a failed test then, of any
# compiler.
FINGERPRINT = "8f06a05b10881ff2"
ANGLES = "859507ab6048e359"
HASHES = {
    "angles": ANGLES,
    "exp": "00d4b79fce9b94d7",
    "tanh": "dea7bc9af40154a7",
    "erf": "c9aaa85b5f41d316",
    "softplus": "b697a80da8da7e83",
    "rows-fp32": "0eccecf82b89be5c",
    "rows-bf16": "edd5ce8f85f9305b",
    "routing": "c9cc11a41d8a186a",
    "unpacked": "9ae511b95ce487bd",
}
OWN_BITS = {"avx512bf16"} | ({"portable"} if platform.machine() == "x86_64" else set())
"""Kernels that round otherwise: products of bfloat16 by one instruction, and no fused operation."""

needs_avx2 = pytest.mark.skipif("avx2" not in native.kernel_names(), reason="this CPU has no AVX2")
needs_gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
needs_clang = pytest.mark.skipif(
    not Path(CLANG[0]).exists(), reason="the wheels' compiler is not installed"
)


def hashes(
    tmp_path: Path,
    compiler: tuple[str, ...],
    *flags: str,
    linker: tuple[str, ...] = ("g++",),
    emulator: tuple[str, ...] = (),
) -> dict[str, str]:
    """The driver's hashes by name, compiled as kernels are."""
    program, compiled = str(tmp_path / "driver"), str(tmp_path / "driver.o")
    how = (*hatch_build.FLAGS, "-w", *flags, f"-I{hatch_build.SOURCES}")
    cache = str(ROOT / ".venv-wheels" / "cache")
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}
    subprocess.run(
        (*compiler, *how, "-c", str(DRIVER), "-o", compiled), check=True, env=environment
    )
    subprocess.run((*linker, compiled, "-lm", "-o", program), check=True)
    printed = subprocess.run(
        (*emulator, program), check=True, capture_output=True, text=True
    ).stdout
    return dict(line.split() for line in printed.splitlines())


def test_kernels_have_the_common_fingerprint_or_bits_of_their_own() -> None:
    names = native.kernel_names()
    for name in names:
        native.use_kernels(name)
        assert (bits_fingerprint() == FINGERPRINT) == (name not in OWN_BITS), name
    if names:
        native.use_kernels(names[0])


@needs_avx2
@needs_gcc
def test_gcc_has_the_common_bits(tmp_path: Path) -> None:
    assert hashes(tmp_path, ("g++",), *AVX2) == HASHES


@needs_avx2
@needs_gcc
@needs_clang
def test_clang_has_the_common_bits(tmp_path: Path) -> None:
    assert hashes(tmp_path, CLANG, *AVX2) == HASHES


@pytest.mark.skipif(shutil.which(ARM[0]) is None, reason="no compiler for aarch64")
@pytest.mark.skipif(shutil.which("qemu-aarch64-static") is None, reason="no qemu-user-static")
def test_aarch64_has_the_common_bits(tmp_path: Path) -> None:
    emulator = ("qemu-aarch64-static", "-cpu", "cortex-a72")
    assert hashes(tmp_path, ARM, linker=ARM, emulator=emulator) == HASHES


@needs_gcc
def test_angles_need_no_fused_operation(tmp_path: Path) -> None:
    assert hashes(tmp_path, ("g++",), "-O1")["angles"] == ANGLES


@needs_avx2
@needs_gcc
def test_a_compiler_that_fuses_products_is_seen(tmp_path: Path) -> None:
    fused = hashes(tmp_path, ("g++",), *AVX2, "-ffp-contract=fast")
    different = {name for name, found in fused.items() if found != HASHES[name]}
    assert "rows-fp32" in different


FINGERPRINT_OF = """
import sys
from pathlib import Path
from edgeshard_agent.ops import native
from edgeshard_agent.ops.fingerprint import bits_fingerprint
native.LIBRARY = Path(sys.argv[1])
print(bits_fingerprint())
"""


def fingerprint_of(library: Path) -> str:
    command = (sys.executable, "-c", FINGERPRINT_OF, str(library))
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.long
@needs_avx2
@pytest.mark.parametrize(
    ("compiler", "fused", "is_common"),
    [
        pytest.param(("g++",), (), True, id="gcc", marks=needs_gcc),
        pytest.param(CLANG, (), True, id="clang", marks=needs_clang),
        pytest.param(("g++",), ("-ffp-contract=fast",), False, id="planted", marks=needs_gcc),
    ],
)
def test_libraries_of_all_compilers_have_one_fingerprint(
    compiler: tuple[str, ...],
    fused: tuple[str, ...],
    is_common: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A library that has only the kernels of AVX2, compiled once."""
    sets: Mapping[str, tuple[str, ...]] = {"portable": (*AVX2, *fused)}
    monkeypatch.setattr(hatch_build, "INSTRUCTION_SETS", {"x86_64": sets})
    library = tmp_path / "library.so"
    hatch_build.compile_library(compiler, "x86_64", library)
    assert (fingerprint_of(library) == FINGERPRINT) == is_common
