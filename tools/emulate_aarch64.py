"""Runs tests on an emulated aarch64 with the kernels that its wheel carries: for a machine of
another kind.

    python -m tools.emulate_aarch64 tests/agent/ops/test_linear.py -k int4
        pytest's arguments; `make aarch64`

qemu emulates one process, pytest, and .venv-aarch64 holds the files it sees. `root` has the Python
of this machine's Debian or Ubuntu for arm64 (apt fetches and dpkg unpacks it, nothing is
installed). `site` has packages by constraints.lock, and `agent` a copy with kernels. The CPU that
is emulated has neither SVE nor bfloat16, and times say nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import hatch_build
from tools import build_wheels
from tools.lock import LOCK, ROOT, LockError, read_lock, requirements
from tools.release.archives import ReleaseError
from tools.release.wheel_folder import choose, files_for, parse_target, run_pip

HOME = ROOT / ".venv-aarch64"
APT = HOME / "apt"
QEMU, CPU = "qemu-aarch64-static", "cortex-a76"
PACKAGES = ("python3", "libgomp1", "libstdc++6")
TESTERS = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis")
# torch reads this file and crashes if it describes another family, which is what older qemu shows
# it.
_FEATURES = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc "
    "dcpop asimddp"
)
_CORE = (
    f"processor: {{}}\nFeatures: {_FEATURES}\nCPU implementer: 0x41\nCPU architecture: 8\nCPU "
    "part: 0xd0b\n\n"
)


class EmulationError(Exception):
    """A requirement of the emulation is missing; the text names it."""


def main(arguments: list[str]) -> int:
    try:
        python = make_root(HOME / "root")
        make_site(HOME / "site", python.name.removeprefix("python"))
        make_agent(HOME / "agent")
    except (
        EmulationError,
        ReleaseError,
        LockError,
        build_wheels.WheelError,
        hatch_build.CompileError,
    ) as error:
        print(f"aarch64: {error}", file=sys.stderr)
        return 1
    roots = map(str, (ROOT, HOME / "agent", ROOT / "coordinator", HOME / "site"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(roots), "QEMU_CPU": CPU}
    command = (
        QEMU,
        "-L",
        str(HOME / "root"),
        str(python),
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        *arguments,
    )
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def make_root(root: Path) -> Path:
    """The emulated Python, in a directory with all that it loads. Raises EmulationError."""
    for program, package in ((QEMU, "qemu-user-static"), ("apt-get", "apt"), ("dpkg-deb", "dpkg")):
        if shutil.which(program) is None:
            raise EmulationError(
                f"{program} is missing: install the package {package} of Debian or Ubuntu"
            )
    if not root.exists():
        print("aarch64: fetching Python for arm64", flush=True)
        shutil.rmtree(APT, ignore_errors=True)
        staged = APT / "root"
        for folder in ("lists/partial", "cache/archives/partial", "debs"):
            (APT / folder).mkdir(parents=True)
        (APT / "status").touch()  # no package is there, so that all are named
        _apt("update")
        planned = _apt("install", "--simulate", "--no-install-recommends", *PACKAGES)
        _apt("download", *re.findall(r"^Inst (\S+)", planned, re.M))
        for file in sorted((APT / "debs").glob("*.deb")):
            subprocess.run(("dpkg-deb", "--extract", str(file), str(staged)), check=True)
        (staged / "proc").mkdir(exist_ok=True)
        (staged / "proc/cpuinfo").write_text(
            "".join(_CORE.format(core) for core in range(os.cpu_count() or 1))
        )
        staged.rename(root)
    return (root / "usr/bin/python3").resolve()


def make_site(site: Path, python: str) -> None:
    """The packages that the agent and its tests import, for aarch64 and this Python ("3.11").
    Raises ReleaseError."""
    text = LOCK.read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    index = os.environ.get("TORCH_INDEX_URL")
    target = parse_target(f"aarch64-py{python.replace('.', '')}-{'cpu' if index else 'cuda'}")
    wanted = [*map(str, requirements(project, "dependencies", "agent")), *TESTERS]
    stamp = site / "stamp"
    digest = hashlib.sha256(repr((text, target, wanted)).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return
    print(f"aarch64: fetching packages for {target.name} (4.6 GB with CUDA)", flush=True)
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    files, listed = choose(wanted, read_lock(text), target).values(), HOME / "requirements.txt"
    listed.write_text(
        "".join(f"{file.name}=={file.version} --hash=sha256:{file.sha256}\n" for file in files)
    )
    sources = ("--extra-index-url", index) if index else ()
    held = ("install", "--no-deps", "--no-compile", "--require-hashes", "--target", str(site))
    run_pip(*held, *sources, *files_for(target), "--requirement", str(listed))
    stamp.write_text(digest)


def make_agent(agent: Path) -> None:
    """Make a copy of the agent with the kernels of wheels for aarch64. Raises WheelError or
    CompileError."""
    build_wheels.install_tools()
    shutil.rmtree(agent, ignore_errors=True)
    shutil.copytree(ROOT / "agent", agent, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copyfile(build_wheels.library_for("aarch64"), agent / hatch_build.IN_THE_WHEEL)


def _apt(*arguments: str) -> str:
    """The output of apt about arm64, with lists of its own. Raises EmulationError."""
    own = {"": "", "::Lists": "lists", "::status": "status"}
    settings = [f"-oDir::State{name}={APT / path}" for name, path in own.items()] + [
        f"-oDir::Cache={APT / 'cache'}"
    ]
    settings += [
        "-oAPT::Architecture=arm64",
        "-oAPT::Architectures=arm64",
        "-oAPT::Sandbox::User=root",
    ]
    command = ["apt-get", "-q", *settings, *arguments]
    done = subprocess.run(
        command, cwd=APT / "debs", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise EmulationError(f"apt-get {arguments[0]} failed for arm64; what it says is above")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
