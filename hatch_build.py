"""Compiles the CPU kernels of the agent when EdgeShard is installed.

They are plain C++ without dependencies (`agent/edgeshard_agent/ops/kernels`), compiled once for each instruction set of
this machine's family; the library chooses when it is loaded. Without a compiler the installation succeeds all the same,
and the agent computes with torch's own operators.

    python hatch_build.py     compiles them into the checkout, if they are out of date
"""

from __future__ import annotations

import ctypes
import os
import platform
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ModuleNotFoundError:  # compiling alone needs nothing that must be installed first
    BuildHookInterface = object  # type: ignore[misc, assignment]

ROOT = Path(__file__).resolve().parent
OPS = ROOT / "agent" / "edgeshard_agent" / "ops"
SOURCES = OPS / "kernels"
LIBRARY = OPS / "libedgeshard_ops.so"
IN_THE_WHEEL = "edgeshard_agent/ops/libedgeshard_ops.so"

# What decides about bits, and the rest.
DECIDING = ("-O3", "-fno-math-errno")
FLAGS = (*DECIDING, "-std=c++17", "-fPIC", "-Wno-psabi", "-Wno-ignored-attributes")
# Nothing is fused but what the sources fuse (fma16 in vectors.h), so that compilers agree on every bit; GCC cannot be
# told that for these instruction sets.
EXACT, FUSED = "-ffp-contract=off", "-ffp-contract=fast"
FUSED_BY_GCC: dict[str, tuple[str, ...]] = {"x86_64": ()}
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni")))
# Instruction sets by the kernels' name, for each family of machines; PORTABLE for those that are not named.
PORTABLE: dict[str, tuple[str, ...]] = {"portable": ()}
INSTRUCTION_SETS = {"x86_64": {**PORTABLE, "avx2": _AVX2, "avx512": _AVX512, "avx512bf16": (*_AVX512, "-mavx512bf16")}}
# What a build of wheels gives the hook: a library that it has compiled, and the wheel's platform.
READY_LIBRARY, READY_PLATFORM = "EDGESHARD_KERNELS", "EDGESHARD_PLATFORM"
_NO_COMPILER = (
    "no C++ compiler found: the agent will compute with torch's operators, which are several times slower. "
    "Install one (on Debian: g++) and install EdgeShard again (in a checkout: make setup)."
)


class CompileError(Exception):
    """The kernels do not compile; the text says why."""


class BuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled library to the wheel; an editable installation finds it in the checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        library, system = os.environ.get(READY_LIBRARY), os.environ.get(READY_PLATFORM)
        if (library is None) != (system is None):
            raise ValueError(f"set both {READY_LIBRARY} and {READY_PLATFORM}, or neither")
        if library is None or system is None:
            problem = build()
            if problem:
                self.app.display_warning(problem)
                return
            library = str(LIBRARY)
            system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        if version != "editable":
            build_data["force_include"][library] = IN_THE_WHEEL
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{system}"  # no Python interface is compiled in


def build() -> str:
    """Bring the library up to date. Returns what is wrong where there is none afterwards, or ''."""
    if _is_up_to_date():
        return ""
    problem = _make()
    if problem:
        LIBRARY.unlink(missing_ok=True)  # it belongs to other sources
    return problem


def _make() -> str:
    compiler = _compiler()
    if not compiler:
        return _NO_COMPILER
    # A running agent keeps the file it has mapped: the new one takes its place as a whole.
    staged = LIBRARY.with_suffix(".new")
    try:
        compile_library(compiler.split(), _machine(), staged)
    except OSError as error:
        return f"the C++ compiler does not run: {error}. {_NO_COMPILER}"
    except CompileError as error:
        return str(error)
    staged.replace(LIBRARY)
    return ""


def _machine() -> str:
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def _compiler() -> str:
    return os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), "")


def _is_up_to_date() -> bool:
    if not LIBRARY.exists():
        return False
    if Path(__file__).stat().st_mtime > LIBRARY.stat().st_mtime:
        return False
    try:
        sources = ctypes.CDLL(str(LIBRARY)).edgeshard_sources
    except (OSError, AttributeError):  # of another machine that shares the checkout, or older than the function
        return False
    sources.restype = ctypes.c_char_p
    return bool(sources() == _digest().encode())


def _digest() -> str:
    digest: str = runpy.run_path(str(OPS / "sources.py"))["digest"]()
    return digest


def compile_library(command: Sequence[str], machine: str, linked: Path) -> tuple[str, ...]:
    """Compile the kernels for a machine's family ("x86_64", "aarch64") into one library.

    `command` is the compiler and the options that it needs besides FLAGS and those of an instruction set. Returns the
    instruction sets that it has: a compiler too old for one leaves it out. Raises CompileError, with what the compiler
    says, where there is none, and OSError where the compiler does not run.
    """
    sets = INSTRUCTION_SETS.get(machine, PORTABLE)
    fused = FUSED_BY_GCC.get(machine, tuple(PORTABLE)) if _is_gcc(command) else ()
    with tempfile.TemporaryDirectory() as directory:
        running: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}
        for name, flags in sets.items():
            made = str(Path(directory) / f"{name}.o")
            how = (*FLAGS, FUSED if name in fused else EXACT, *flags, f"-DES_ISA=kernels_{name}")
            one = (*command, *how, "-c", str(SOURCES / "kernels.cpp"), "-o", made)
            running[name] = made, subprocess.Popen(one, stderr=subprocess.PIPE)
        errors = {name: process.communicate()[1].decode(errors="replace") for name, (_, process) in running.items()}
        built = tuple(name for name, (_, process) in running.items() if process.returncode == 0)
        if "portable" not in built:
            said = errors["portable"]
            raise CompileError(f"the kernels do not compile, and the agent will be several times slower:\n{said}")
        # The portable one first: of functions that several have, the linker takes the first, which runs on any CPU.
        objects = [running[name][0] for name in built]
        shared = [str(SOURCES / name) for name in ("library.cpp", "blocks.cpp", "checksum.cpp")]
        deciding = " ".join((*DECIDING, EXACT, *(f"({name}: {FUSED})" for name in fused)))
        told = (f'-DES_SOURCES="{_digest()}"', f'-DES_FLAGS="{deciding}"')
        with_sets = [f"-DES_WITH_{name.upper()}" for name in built]
        how = (*FLAGS, EXACT, *with_sets, *told)
        link = (*command, *how, "-shared", *shared, *objects, "-pthread", "-o", str(linked))
        result = subprocess.run(link, capture_output=True, check=False)
    if result.returncode != 0:
        said = result.stderr.decode(errors="replace")
        raise CompileError(f"the kernels do not link, and the agent will be several times slower:\n{said}")
    return built


def _is_gcc(command: Sequence[str]) -> bool:
    told = subprocess.run((*command, "--version"), capture_output=True, check=False)
    return b"clang" not in told.stdout


if __name__ == "__main__":
    if not _is_up_to_date() and _compiler():
        print("compiling kernels, about a minute", flush=True)
    found = build()
    if found:
        print(f"warning: {found}", file=sys.stderr)
