"""The wheels that operators install: made of a ready library, the same each time, refused by name
if not portable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from edgeshard_agent.ops import native, sources

import hatch_build
from tools import build_wheels

ROOT = Path(__file__).resolve().parents[2]
MACHINE = "x86_64"
PLATFORM = "manylinux_2_28_x86_64"


def test_a_wheel_has_the_ready_library_and_is_the_same_each_time(tmp_path: Path) -> None:
    """The checkout's own library, which a running agent may have mapped, is neither read nor
    written."""
    ready = tmp_path / "ready.so"
    ready.write_bytes(b"a ready library")
    before = hatch_build.LIBRARY.stat() if hatch_build.LIBRARY.exists() else None
    wheels = []
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        wheels.append(build_wheels.build_wheel(MACHINE, ready, tmp_path / folder))
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    assert wheels[0].name.endswith(f"-py3-none-{PLATFORM}.whl")
    with zipfile.ZipFile(wheels[0]) as archive:
        assert archive.read(hatch_build.IN_THE_WHEEL) == b"a ready library"
        (tags,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        assert f"Tag: py3-none-{PLATFORM}" in archive.read(tags).decode().splitlines()
        assert {
            f"edgeshard_agent/ops/kernels/{path.name}" for path in hatch_build.SOURCES.iterdir()
        } <= set(archive.namelist()), (
            "the library is not called without the sources that it is compared with"
        )
    after = hatch_build.LIBRARY.stat() if hatch_build.LIBRARY.exists() else None
    assert before == after or (before and after and before.st_mtime_ns == after.st_mtime_ns)


def test_a_library_without_its_platform_is_refused(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path))
    environment = {**os.environ, hatch_build.READY_LIBRARY: "/nowhere/library.so"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0 and hatch_build.READY_PLATFORM in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[[str, str], bytes]:
    """A library of one C++ source that the machine's own compiler has made."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")

    def compile_source(source: str, option: str) -> bytes:
        (tmp_path / "some.cpp").write_text(source)
        made = tmp_path / "some.so"
        subprocess.run(
            ["g++", "-shared", "-fPIC", option, "-o", made, tmp_path / "some.cpp"],
            check=True,
            timeout=120,
        )
        return made.read_bytes()

    return compile_source


def test_what_other_machines_may_lack_is_named(compiled: Callable[[str, str], bytes]) -> None:
    throwing = (
        "#include <string>\nstd::string f(int x) { if (x) throw 1; return std::string(x, 97); }"
    )
    assert "GLIBCXX_3.4" in build_wheels.problems(compiled(throwing, "-O1"))
    too_new = """__asm__(".symver pow,pow@GLIBC_2.29");
        extern "C" double pow(double, double);
        double f(double x) { return pow(x, x); }"""
    if os.uname().machine == "x86_64":
        assert build_wheels.problems(compiled(too_new, "-lm")) == "its library asks for GLIBC_2.29"
    assert build_wheels.problems(compiled("int f(int x) { return x; }", "-nostdlib")) == ""


def _cross_compiler() -> tuple[str, ...]:
    if not build_wheels.PYTHON.exists():
        pytest.skip("the compiler of wheels is not installed: make wheels")
    return build_wheels.compiler_for("aarch64")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_kernels_are_compiled_for_aarch64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = _cross_compiler()
    for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):
        monkeypatch.setenv(name, str(build_wheels.HOME / "cache"))
    library = tmp_path / "library.so"
    assert hatch_build.compile_library(command, "aarch64", library) == ("portable", "dotprod")
    text = library.read_bytes()
    assert text[18:20] == (183).to_bytes(2, "little"), "ELF's number of aarch64"
    assert build_wheels.problems(text) == ""
    assert str(ROOT).encode() not in text, "a path of this machine would make other bytes elsewhere"


PROGRAM = """
import torch
from edgeshard_agent.ops import native, sources
from edgeshard_agent.ops.fingerprint import bits_fingerprint
torch.set_num_threads(1)
print(native.LIBRARY)
print(sources.kernel_set())
for name in native.kernel_names():
    native.use_kernels(name)
    print(name, bits_fingerprint())
"""


def _bits(path: str, folder: Path) -> tuple[Path, str, dict[str, str]]:
    """The path of the library, its origin, and the fingerprint of each instruction set."""
    environment = {**os.environ, "PYTHONPATH": path}
    command = (sys.executable, "-P", "-c", PROGRAM)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    library, kernel_set, *lines = done.stdout.splitlines()
    return Path(library), kernel_set, dict(line.split() for line in lines)


@pytest.mark.skipif(not native.native_available(), reason="the native kernels are not built")
def test_a_box_of_a_wheel_and_one_of_a_checkout_compute_the_same_bits(tmp_path: Path) -> None:
    wheel = build_wheels.wheel_here(sources.digest())
    if wheel is None:
        pytest.skip("there is no wheel of these sources for this machine: make wheels")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    library, kernel_set, theirs = _bits(str(tmp_path), tmp_path)
    assert library.is_relative_to(tmp_path) and kernel_set.startswith("clang ")
    _, ours_set, ours = _bits("", tmp_path)
    assert ours_set != kernel_set, "both are of one compiler"
    for name in set(theirs) & set(ours):
        assert theirs[name] == ours[name], name
