"""Libraries of kernels for one instruction set, compiled by a chosen compiler, and programs that
examine them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import hatch_build
from tests.support.hot_loops import Loop, innermost_loops
from tools import build_wheels
from tools.lock import LockError

REFERENCE = Path(__file__).resolve().parents[1] / "agent" / "ops" / "linear_reference.cpp"
NAME = "portable"
"""The name of the kernels in a library of one instruction set: they replace the kernels that run
anywhere."""


def gcc() -> tuple[str, ...] | None:
    """The command of GCC; None if it is not installed."""
    return ("g++",) if shutil.which("g++") else None


def clang(machine: str) -> tuple[str, ...] | None:
    """The command of the wheels' compiler, with symbols kept; None if it is not installed and
    cannot be."""
    try:
        build_wheels.install_tools()
    except (build_wheels.WheelError, LockError, OSError):
        return None
    return tuple(word for word in build_wheels.compiler_for(machine) if word != "-Wl,-s")


def compile_alone(
    command: Sequence[str], machine: str, flags: tuple[str, ...], library: Path
) -> None:
    """Compile the kernels for the instruction set of `flags`, and no others, into `library`.

    Raises hatch_build.CompileError.
    """
    cache = str(build_wheels.HOME / "cache")
    caches = {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}
    with mock.patch.dict(os.environ, caches), only(machine, {NAME: flags}):
        hatch_build.compile_library(command, machine, library)


@contextmanager
def only(machine: str, sets: dict[str, tuple[str, ...]]) -> Iterator[None]:
    """Have the build compile these instruction sets for the machine."""
    with mock.patch.dict(hatch_build.INSTRUCTION_SETS, {machine: sets}):
        yield


def loops_of(library: Path, objdump: str) -> dict[str, list[Loop]]:
    """The innermost loops of every function of the library."""
    command = (objdump, "-d", "-C", "--no-show-raw-insn", str(library))
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return innermost_loops(text)


def compile_reference(command: Sequence[str], program: Path) -> None:
    """Compile the program that compares linear layers with scalar code."""
    options = ("-O2", "-std=c++17", "-ffp-contract=off", "-I", str(hatch_build.SOURCES))
    subprocess.run(
        (*command, *options, str(REFERENCE), "-o", str(program), "-ldl"), check=True, timeout=120
    )


def differences(
    program: Sequence[str], library: Path, kernels: str, schemes: Sequence[str] = (), *, fused: bool
) -> tuple[dict[str, int], dict[str, str]]:
    """The outputs that differ from scalar code, and the hash of all outputs, by the scheme of the
    layers.

    `program` is the command of the compiled reference, with an emulator before it if it needs one.
    """
    command = (*program, str(library), kernels, "fused" if fused else "separate", *schemes)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode in (0, 1), ended.stderr
    rows = [line.split() for line in ended.stdout.splitlines()]
    return {row[0]: int(row[1]) for row in rows}, {row[0]: row[3] for row in rows}


def names_of(program: Sequence[str], library: Path) -> list[str]:
    """The names of the library's kernels that the CPU (or the emulated one) runs, the best
    first."""
    ended = subprocess.run(
        (*program, str(library)), capture_output=True, text=True, timeout=60, check=True
    )
    return ended.stdout.split()
