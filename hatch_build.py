"""Compiles the CPU kernels of the agent when EdgeShard is installed.

They are plain C++ without dependencies (`agent/edgeshard_agent/ops/kernels`), compiled once for
each instruction set; the library chooses one when it is loaded. A checkout gets the sets that this
machine's processor runs, a wheel all sets of the machine's family. Without a compiler the
installation succeeds all the same, and the agent computes with torch's own operators.

    python hatch_build.py     compiles them into the checkout, if they are out of date

EDGESHARD_KERNEL_SETS=all compiles all sets into a checkout, for processors other than this one.
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
from concurrent.futures import ThreadPoolExecutor
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

# What decides about bits, and the rest. Only what the sources fuse (fma16 in vectors.h) is fused,
# so that compilers agree on every bit.
DECIDING = ("-O3", "-fno-math-errno", "-ffp-contract=off")
FLAGS = (*DECIDING, "-std=c++17", "-fPIC", "-Wno-psabi", "-Wno-ignored-attributes")
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni")))
# Instruction sets by the kernels' name, for each family of machines; PORTABLE for those that are
# not named. cpu.h lists the sets that a processor runs.
PORTABLE: dict[str, tuple[str, ...]] = {"portable": ()}
INSTRUCTION_SETS = {
    "x86_64": {
        **PORTABLE,
        "avx2": _AVX2,
        "avxvnni": (*_AVX2, "-mavxvnni"),
        "avx512": _AVX512,
        "avx512bf16": (*_AVX512, "-mavx512bf16"),
    },
    "aarch64": {**PORTABLE, "dotprod": ("-march=armv8.2-a+dotprod",)},
}
# The wheels' compiler takes a name of its own for a processor.
_BY_ZIGLANG = {"-march=armv8.2-a+dotprod": "-march=generic+v8_2a+dotprod"}
SETS_SWITCH, ALL_SETS = "EDGESHARD_KERNEL_SETS", "all"
# What a build of wheels gives the hook: a library that it has compiled, and the wheel's platform.
READY_LIBRARY, READY_PLATFORM = "EDGESHARD_KERNELS", "EDGESHARD_PLATFORM"
_PROBE = """#include "cpu.h"
#include <cstdio>
int main() {
    for (const char* name : runnable_sets()) std::puts(name);
}
"""
_NO_COMPILER = (
    "no C++ compiler found: the agent will compute with torch's operators, which are several times "
    "slower. "
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
            problem = build(all_sets=version != "editable")
            if problem:
                self.app.display_warning(problem)
                return
            library = str(LIBRARY)
            system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        if version != "editable":
            build_data["force_include"][library] = IN_THE_WHEEL
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{system}"  # no Python interface is compiled in


def build(all_sets: bool = False) -> str:
    """Bring the library up to date. Returns what is wrong if there is none afterwards, or ''.

    It has the instruction sets that this processor runs, or all of the machine's family with
    `all_sets` or if EDGESHARD_KERNEL_SETS is "all".
    """
    all_sets = all_sets or os.environ.get(SETS_SWITCH) == ALL_SETS
    if _is_up_to_date(all_sets):
        return ""
    problem = _make(all_sets)
    if problem:
        LIBRARY.unlink(missing_ok=True)  # it belongs to other sources
    return problem


def _make(all_sets: bool) -> str:
    compilers = _compilers()
    if not compilers:
        return _NO_COMPILER
    for compiler in compilers:
        problem = _make_by(compiler.split(), all_sets)
        if not problem:
            break
    return problem


def _make_by(command: Sequence[str], all_sets: bool) -> str:
    # A running agent keeps the file it has mapped: the new one takes its place as a whole.
    staged = LIBRARY.with_suffix(".new")
    try:
        names = (
            family_sets(_machine()) if all_sets else sets_to_compile(_machine(), _probe(command))
        )
        compile_library(command, _machine(), staged, names)
    except OSError as error:
        return f"the C++ compiler does not run: {error}. {_NO_COMPILER}"
    except CompileError as error:
        return str(error)
    staged.replace(LIBRARY)
    return ""


def family_sets(machine: str) -> tuple[str, ...]:
    """Names of all instruction sets of a machine's family ("x86_64", "aarch64")."""
    return tuple(INSTRUCTION_SETS.get(machine, PORTABLE))


def sets_to_compile(machine: str, runnable: Sequence[str]) -> tuple[str, ...]:
    """The sets for a processor that runs those in `runnable` (the best first): what it may need, no
    more than four.

    AVX-VNNI is left out if there is AVX-512, which has the same instruction for wider registers.
    """
    names = [name for name in family_sets(machine) if name in runnable]
    if "avx512" in names and "avxvnni" in names:
        names.remove("avxvnni")
    return tuple(names)


def _probe(command: Sequence[str]) -> tuple[str, ...]:
    """Names of the sets that this processor runs, the best first, by a small program of cpu.h; all
    if it fails."""
    with tempfile.TemporaryDirectory() as directory:
        source, program = Path(directory) / "probe.cpp", Path(directory) / "probe"
        source.write_text(_PROBE)
        compiled = subprocess.run(
            (*command, "-std=c++17", "-I", str(SOURCES), str(source), "-o", str(program)),
            capture_output=True,
            check=False,
        )
        if compiled.returncode:
            return family_sets(_machine())
        try:
            output = subprocess.run(
                (str(program),), capture_output=True, text=True, check=False
            ).stdout
        except OSError:  # of another machine's family
            output = ""
    return tuple(output.split()) or family_sets(_machine())


def _machine() -> str:
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def _compilers() -> list[str]:
    """Commands of the compilers to try, in this order: that of CXX, or else those that are
    installed.

    Clang's kernels are the faster ones (docs/kernels.md). If it does not compile, because it lacks
    a C++ library for instance, the next is tried.
    """
    if chosen := os.environ.get("CXX"):
        return [chosen]
    return [name for name in ("clang++", "c++", "g++") if shutil.which(name)]


def _is_up_to_date(all_sets: bool) -> bool:
    if not LIBRARY.exists():
        return False
    if Path(__file__).stat().st_mtime > LIBRARY.stat().st_mtime:
        return False
    try:
        library = ctypes.CDLL(str(LIBRARY))
        sources, requested, runnable = _functions(library)
    except (
        OSError,
        AttributeError,
    ):
        # of another machine that shares the checkout, or older than a function
        return False
    if sources() != _digest().encode():
        return False
    names = family_sets(_machine()) if all_sets else sets_to_compile(_machine(), _names(runnable))
    return set(names) <= set(requested().decode().split())


def _functions(library: ctypes.CDLL) -> tuple[Any, Any, Any]:
    functions = (
        library.edgeshard_sources,
        library.edgeshard_requested_kernels,
        library.edgeshard_cpu_kernels,
    )
    for function in functions:
        function.restype = ctypes.c_char_p
    return functions


def _names(runnable: Any) -> tuple[str, ...]:
    names: list[str] = []
    while (name := runnable(len(names))) is not None:
        names.append(name.decode())
    return tuple(names)


def _digest() -> str:
    digest: str = runpy.run_path(str(OPS / "sources.py"))["digest"]()
    return digest


def compile_library(
    command: Sequence[str], machine: str, linked: Path, names: Sequence[str] = ()
) -> tuple[str, ...]:
    """Compile the kernels for a machine's family ("x86_64", "aarch64") into one library.

    `command` is the compiler and the options that it needs besides FLAGS and those of an
    instruction set; `names` are the sets to compile, all of the family if empty. Returns the
    instruction sets that the library has: a compiler too old for one leaves it out. Raises
    CompileError, with the compiler's output, if it has none, and OSError if the compiler does not
    run.
    """
    names = names or family_sets(machine)
    with tempfile.TemporaryDirectory() as directory:
        objects = {name: str(Path(directory) / f"{name}.o") for name in names}

        def compile_set(name: str) -> str | None:
            return compile_kernels(command, machine, name, objects[name])

        # As many at once as there are cores: each takes 400 MB.
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            errors = dict(zip(names, pool.map(compile_set, names), strict=True))
        if errors["portable"] is not None:
            text = errors["portable"]
            raise CompileError(
                f"the kernels do not compile, and the agent will be several times slower:\n{text}"
            )
        # The portable one first: of functions that several have, the linker takes the first, which
        # runs on any CPU.
        built = tuple(name for name in names if errors[name] is None)
        shared = [str(SOURCES / name) for name in ("library.cpp", "blocks.cpp", "checksum.cpp")]
        texts = {"SOURCES": _digest(), "FLAGS": " ".join(DECIDING), "REQUESTED": " ".join(names)}
        defined = [f'-DES_{name}="{text}"' for name, text in texts.items()]
        defined.append("-DES_COMPILED=" + " ".join(f"ES_KERNELS({name})" for name in built))
        linked_objects = [objects[name] for name in built]
        link = (
            *command,
            *FLAGS,
            *defined,
            "-shared",
            *shared,
            *linked_objects,
            "-pthread",
            "-o",
            str(linked),
        )
        result = subprocess.run(link, capture_output=True, check=False)
    if result.returncode != 0:
        text = result.stderr.decode(errors="replace")
        raise CompileError(
            f"the kernels do not link, and the agent will be several times slower:\n{text}"
        )
    return built


def compile_kernels(command: Sequence[str], machine: str, name: str, target: str) -> str | None:
    """Compile the kernels of one instruction set into the object file `target`.

    Returns the compiler's output if it fails, else None. Raises OSError if the compiler does not
    run.
    """
    own = INSTRUCTION_SETS.get(machine, PORTABLE)[name]
    if "ziglang" in command:
        own = tuple(_BY_ZIGLANG.get(option, option) for option in own)
    compile_one = (
        *command,
        *FLAGS,
        *own,
        f"-DES_ISA=kernels_{name}",
        "-c",
        str(SOURCES / "kernels.cpp"),
        "-o",
        target,
    )
    result = subprocess.run(compile_one, capture_output=True, check=False)
    return None if result.returncode == 0 else result.stderr.decode(errors="replace")


if __name__ == "__main__":
    if not _is_up_to_date(os.environ.get(SETS_SWITCH) == ALL_SETS) and _compilers():
        print("compiling kernels, about a minute", flush=True)
    found = build()
    if found:
        print(f"warning: {found}", file=sys.stderr)
