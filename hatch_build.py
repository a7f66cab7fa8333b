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
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent
OPS = ROOT / "agent" / "edgeshard_agent" / "ops"
SOURCES = OPS / "kernels"
LIBRARY = OPS / "libedgeshard_ops.so"
IN_THE_WHEEL = "edgeshard_agent/ops/libedgeshard_ops.so"

_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi")
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni")))
# Instruction sets by the kernels' name. A compiler too old for one leaves it out.
_X86 = {"avx2": _AVX2, "avx512": _AVX512, "avx512bf16": (*_AVX512, "-mavx512bf16")}
_NO_COMPILER = (
    "no C++ compiler found: the agent will compute with torch's operators, which are several times slower. "
    "Install one (on Debian: g++) and install EdgeShard again (in a checkout: make setup)."
)


class BuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled library to the wheel; an editable installation finds it in the checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        problem = build()
        if problem:
            self.app.display_warning(problem)
        elif version != "editable":
            build_data["force_include"][str(LIBRARY)] = IN_THE_WHEEL
            build_data["pure_python"] = False
            system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
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
    with tempfile.TemporaryDirectory() as directory:
        try:
            return _compile((*compiler.split(), *_FLAGS), Path(directory))
        except OSError as error:
            return f"the C++ compiler does not run: {error}. {_NO_COMPILER}"


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


def _compile(compile_command: tuple[str, ...], directory: Path) -> str:
    sets: dict[str, tuple[str, ...]] = {"portable": ()}
    if platform.machine().lower() in ("x86_64", "amd64"):
        sets |= _X86
    running: dict[str, subprocess.Popen[bytes]] = {}
    for name, flags in sets.items():
        command = (*compile_command, *flags, f"-DES_ISA=kernels_{name}", "-c", str(SOURCES / "kernels.cpp"))
        running[name] = subprocess.Popen((*command, "-o", str(directory / f"{name}.o")), stderr=subprocess.PIPE)
    errors = {name: process.communicate()[1].decode(errors="replace") for name, process in running.items()}
    built = [name for name, process in running.items() if process.returncode == 0]
    if "portable" not in built:
        return f"the kernels do not compile, and the agent will be several times slower:\n{errors['portable']}"
    linked = directory / LIBRARY.name
    objects = [str(directory / f"{name}.o") for name in built]
    shared = [str(SOURCES / name) for name in ("library.cpp", "blocks.cpp", "checksum.cpp")]
    with_sets = [f"-DES_WITH_{name.upper()}" for name in built]
    sources = f'-DES_SOURCES="{_digest()}"'
    link = (*compile_command, *with_sets, sources, "-shared", *shared, *objects, "-pthread", "-o", str(linked))
    result = subprocess.run(link, capture_output=True, check=False)
    if result.returncode != 0:
        return f"the kernels do not link, and the agent will be several times slower:\n{result.stderr.decode()}"
    # A running agent keeps the file it has mapped: the new one takes its place as a whole.
    staged = LIBRARY.with_suffix(".new")
    shutil.copyfile(linked, staged)
    staged.replace(LIBRARY)
    return ""


if __name__ == "__main__":
    if not _is_up_to_date() and _compiler():
        print("compiling kernels, about a minute", flush=True)
    found = build()
    if found:
        print(f"warning: {found}", file=sys.stderr)
