"""Builds the wheels that operators install, kernels compiled: dist/wheels, one for each family of
machines.

    python -m tools.build_wheels      `make wheels`

A compiler that makes both from one machine (clang, as ziglang packs it) stands in .venv-wheels, by
the lock tools/wheels.txt. All released wheels are built with it; a checkout uses its own compiler.
Compiled files are kept in .venv-wheels/kernels until sources, flags or compiler change. Two builds
of one commit are the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import hatch_build
from tools.lock import ROOT, WHEELS, LockError, find_uv

HOME = ROOT / ".venv-wheels"
PYTHON = HOME / "bin" / "python"
DIST = ROOT / "dist" / "wheels"
MACHINES = ("x86_64", "aarch64")
# Debian 10, Ubuntu 18.10 and JetPack 5 have this C library or a newer one, and torch's wheels ask
# for it.
GLIBC = (2, 28)

_SYMBOL = re.compile(rb"\b(GLIBCXX|CXXABI|GLIBC)_(\d+)\.(\d+)")


class WheelError(Exception):
    """A wheel cannot be built, or must not be released; the text gives the reason."""


def main() -> int:
    try:
        install_tools()
        DIST.mkdir(parents=True, exist_ok=True)
        for old in DIST.glob("edgeshard-*.whl"):
            old.unlink()
        for machine in MACHINES:
            wheel = build_wheel(machine, library_for(machine), DIST)
            check_wheel(wheel, machine)
            print(f"{wheel.relative_to(ROOT)}  {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
    except (LockError, WheelError, hatch_build.CompileError) as error:
        print(f"wheels: {error}", file=sys.stderr)
        return 1
    return 0


def install_tools() -> None:
    """Bring .venv-wheels to its lock, if it is not there yet. Raises WheelError."""
    lock, stamp = WHEELS.with_suffix(".txt"), HOME / "installed.txt"
    if stamp.exists() and stamp.read_bytes() == lock.read_bytes():
        return
    uv, environment = find_uv()
    print("wheels: installing the compiler of wheels into .venv-wheels", flush=True)
    shutil.rmtree(HOME, ignore_errors=True)
    subprocess.run(
        (str(uv), "venv", "--quiet", "--python", sys.executable, str(HOME)),
        env=environment,
        check=True,
    )
    held = ("--no-deps", "--require-hashes", "--only-binary", ":all:", "--python", str(PYTHON))
    install = (str(uv), "pip", "install", "--quiet", *held, "-r", str(lock))
    if subprocess.run(install, env=environment, check=False).returncode:
        raise WheelError(f"{lock.relative_to(ROOT)} cannot be installed; what uv says is above")
    shutil.copy(lock, stamp)


def compiler_for(machine: str) -> tuple[str, ...]:
    """The command that compiles for a family of machines, without the kernels' own flags."""
    target = f"{machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    # No path of this machine, no time and no name of a build comes into the file.
    alike = (
        f"-ffile-prefix-map={ROOT}=.",
        "-g0",
        "-Wl,-s",
        "-Wl,--build-id=none",
        "-Wno-unused-command-line-argument",
    )
    return (str(PYTHON), "-m", "ziglang", "c++", "-target", target, *alike)


def library_for(machine: str) -> Path:
    """The kernels compiled for a family of machines, once. Raises WheelError or CompileError."""
    decides = (
        *sorted(hatch_build.SOURCES.iterdir()),
        ROOT / "hatch_build.py",
        WHEELS.with_suffix(".txt"),
    )
    digest = hashlib.sha256(repr(compiler_for(machine)).encode())
    for path in decides:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    folder = HOME / "kernels"
    kept = folder / f"{machine}-{digest.hexdigest()[:16]}.so"
    if kept.exists():
        return kept
    print(f"wheels: compiling kernels for {machine}, some minutes", flush=True)
    folder.mkdir(exist_ok=True)
    for old in folder.glob(f"{machine}-*"):
        old.unlink()
    os.environ["ZIG_GLOBAL_CACHE_DIR"] = os.environ["ZIG_LOCAL_CACHE_DIR"] = str(HOME / "cache")
    made = kept.with_suffix(".new")
    built = hatch_build.compile_library(compiler_for(machine), machine, made)
    if missing := [name for name in hatch_build.family_sets(machine) if name not in built]:
        raise WheelError(f"the kernels of {', '.join(missing)} do not compile for {machine}")
    made.replace(kept)
    return kept


def build_wheel(machine: str, library: Path, folder: Path) -> Path:
    """EdgeShard's wheel with a ready library, which the checkout's own is not touched for. Raises
    WheelError."""
    environment = {
        **os.environ,
        "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH") or _last_commit(),
        hatch_build.READY_LIBRARY: str(library),
        hatch_build.READY_PLATFORM: platform_of(machine),
    }
    command = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder))
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    wheels = list(folder.glob(f"edgeshard-*-{platform_of(machine)}.whl"))
    if done.returncode or len(wheels) != 1:
        raise WheelError(f"no wheel for {machine}:\n{done.stdout}{done.stderr}")
    return wheels[0]


def wheel_here(digest: str) -> Path | None:
    """The wheel for this machine whose kernels are of the sources of this digest, if it was
    made."""
    for wheel in DIST.glob(f"edgeshard-*_{os.uname().machine}.whl"):
        with zipfile.ZipFile(wheel) as archive:
            if digest.encode() in archive.read(hatch_build.IN_THE_WHEEL):
                return wheel
    return None


def platform_of(machine: str) -> str:
    return f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"


def check_wheel(wheel: Path, machine: str) -> None:
    """Raise WheelError with the reason if the wheel would not run on every machine that its name
    promises."""
    with zipfile.ZipFile(wheel) as archive:
        found = problems(archive.read(hatch_build.IN_THE_WHEEL))
    if found:
        raise WheelError(f"{wheel.name}: {found}")
    show = (str(PYTHON), "-m", "auditwheel", "show", str(wheel))
    done = subprocess.run(show, capture_output=True, text=True)
    said = " ".join((done.stdout + done.stderr).split())
    if done.returncode or not _is_consistent(said, machine):
        raise WheelError(
            f"auditwheel does not find {wheel.name} consistent with {platform_of(machine)}: {said}"
        )


def problems(library: bytes) -> str:
    """The requirements of a library on other machines beyond the C library of GLIBC; "" for
    nothing."""
    asked = {
        (name.decode(), (int(major), int(minor))) for name, major, minor in _SYMBOL.findall(library)
    }
    above = sorted(f"{name}_{v[0]}.{v[1]}" for name, v in asked if name != "GLIBC" or v > GLIBC)
    return f"its library asks for {', '.join(above)}" if above else ""


def _is_consistent(said: str, machine: str) -> bool:
    found = re.search(
        rf'consistent with the following platform tag: "manylinux_(\d+)_(\d+)_{machine}"', said
    )
    return found is not None and (int(found[1]), int(found[2])) <= GLIBC


def _last_commit() -> str:
    """The time of the last commit, in seconds since 1970; a fixed time if there is no
    repository."""
    told = subprocess.run(
        ("git", "log", "-1", "--format=%ct"), cwd=ROOT, capture_output=True, text=True
    )
    return told.stdout.strip() or "1577836800"


if __name__ == "__main__":
    sys.exit(main())
