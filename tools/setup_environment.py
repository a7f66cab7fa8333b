"""Build `.venv`: what `make setup` runs. Needs only the standard library and Python 3.11 or newer.

    python3 tools/setup_environment.py runtime
        what runs EdgeShard: the package with its extras but those `APART`
    python3 tools/setup_environment.py
        and what a developer needs besides: linters, tests, benchmarks

If `.venv` already holds what pyproject.toml and constraints.lock require, it needs no network and
at most compiles the kernels. For each of the two levels, a stamp file in it keeps the hash of their
requirements. pip installs only wheels of the lock's versions, and refuses a file whose hash is not
in the lock. `TORCH_INDEX_URL` may name a package index for torch (and only torch); without it pip
uses its own configuration. If that is a CUDA build and the machine has no NVIDIA driver, uv
installs PyTorch's CPU build from the index that uv knows. `EDGESHARD_UNLOCKED=1` leaves the lock
aside: for a Python or a platform that it does not cover, and for trying other versions.

Prints one line for each step. The output of pip, uv and the compiler goes to `.venv/setup.log`;
after a failure the end of that file is printed, and its path.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
RUNTIME, DEVELOPER = "runtime", "developer"
APART = ("rules", "discovery")
"""The extras that `make serve` and `make demo` do without."""
STAMPS = {RUNTIME: VENV / ".runtime-stamp", DEVELOPER: VENV / ".setup-stamp"}
_PACKAGES = {RUNTIME: "the packages that run", DEVELOPER: "the packages for developers"}
LEVELS = (RUNTIME, DEVELOPER)
"""Each includes those before it."""
PYTHON = VENV / "bin" / "python"
UV = VENV / "bin" / "uv"
LOG = VENV / "setup.log"
SHOWN_LOG_LINES = 15
"""Lines of the log that are printed after a failure."""
# Python compiles a module when it is first imported. Compiling modules that are never imported
# takes a minute and 0.2 GB.
PIP_INSTALL = (str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--no-compile")
# The daemons' imports, done once here and not at the first start of three of them at once.
FIRST_IMPORT = (
    "import edgeshard.client, edgeshard_coordinator.daemon, edgeshard_agent.hosting.loading"
)
LOCK = ROOT / "constraints.lock"
# How pip is held to the lock. A source distribution would be built with whatever the index serves
# that day.
HELD = ("--require-hashes", "--only-binary", ":all:", "--constraint", str(LOCK))
OLDEST_PYTHON = (3, 11)
NVIDIA_DRIVER = Path("/dev/nvidiactl")
CUDA_SIZE = " (2.9 GB to fetch, 5.3 GB on disk)"
INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended."""
# The remedy if pip gave up a locked installation; pip's own error is printed above it.
UNLOCKED_HINT = """\
setup: the installation was held to constraints.lock. pip's error above decides what to do:
  hashes that do not match    this index serves another file than the one that was locked. Find out why before you trust
                              it: nobody but the package's author may change a file. An index that rebuilds wheels, or
                              another build of torch, needs a lock of its own: TORCH_INDEX_URL=... make lock
  versions not pinned         pyproject.toml asks for a package that the lock lacks: make lock
  no matching distribution    the index lacks the file, or this Python or platform is not one of the lock's
EDGESHARD_UNLOCKED=1 make setup installs without the lock, whatever the index serves."""  # noqa: E501


def main(arguments: list[str]) -> int:
    levels = (RUNTIME,) if arguments == [RUNTIME] else LEVELS
    if sys.version_info < OLDEST_PYTHON:
        found = platform.python_version()
        return fail(
            f"Python {found} is too old: install 3.11 or newer, or run `make setup "
            "PYTHON=/path/to/python3.11`"
        )
    import tomllib  # absent from the Pythons refused above

    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    locked = not os.environ.get("EDGESHARD_UNLOCKED")
    lock = LOCK.read_text() if locked else ""
    wanted = {
        level: fingerprint(project, lock, *LEVELS[: LEVELS.index(level) + 1]) for level in levels
    }
    missing = [level for level in levels if not is_finished(level, wanted[level])]
    if missing and importlib.util.find_spec("ensurepip") is None:
        return fail(
            "this Python cannot create virtual environments: on Debian, apt-get install "
            "python3-venv"
        )
    began = time.monotonic()
    VENV.mkdir(exist_ok=True)
    LOG.write_bytes(b"")
    try:
        if not PYTHON.exists():
            say(f"making {VENV.name}; details are in {LOG.relative_to(ROOT)}")
            run(sys.executable, "-m", "venv", str(VENV))
        for level in missing:
            STAMPS[level].unlink(missing_ok=True)
            (install_locked if locked else install)(project, level)
            if level == RUNTIME:
                run(str(PYTHON), "-c", FIRST_IMPORT)
        # Compiles the kernels if they are out of date, and prints whether a compiler is missing.
        subprocess.run(
            (str(PYTHON), "hatch_build.py"), check=True, cwd=ROOT, stdin=subprocess.DEVNULL
        )
    except subprocess.CalledProcessError as error:
        return failed_command(error)
    say(f"done in {time.monotonic() - began:.0f} s" if missing else "nothing to install")
    # and newer than what make compares them with, so that make does not come here again
    for level in levels:
        STAMPS[level].write_text(wanted[level])
    return 0


def is_finished(level: str, wanted: str) -> bool:
    return STAMPS[level].exists() and STAMPS[level].read_text() == wanted and PYTHON.exists()


def fingerprint(project: dict[str, Any], lock: str, *levels: str) -> str:
    """Changes if the set of packages to install changes; a new lint rule in pyproject.toml does not
    count."""
    names = ("version", "requires-python", "dependencies", "optional-dependencies", "scripts")
    parts = [requirements(project, *levels), {name: project["project"].get(name) for name in names}]
    parts += [project["tool"].get("hatch", {}), lock]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def install_locked(project: dict[str, Any], level: str) -> None:
    locked = (*PIP_INSTALL, *HELD)
    if level == RUNTIME:
        own_pip = locked_requirement("pip")
        # pip itself first: older ones do not take hashes from constraints.
        run(*PIP_INSTALL, "--quiet", "--require-hashes", "--no-deps", "--requirement", str(own_pip))
        with compiling():
            take_torch(project, *locked)
            take_packages(project, level, *locked)
        # Its build requirements are installed by now. Fetched for the occasion, it would be held to
        # no lock.
        run(*PIP_INSTALL, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    else:
        take_packages(project, level, *locked)
    run(str(PYTHON), "-m", "pip", "check")


def install(project: dict[str, Any], level: str) -> None:
    """Install the packages that pip resolves by itself."""
    if level == RUNTIME:
        (own,) = (text for text in requirements(project, RUNTIME) if text.startswith("pip>"))
        run(*PIP_INSTALL, "--quiet", "--upgrade", own)
        take_torch(project, *PIP_INSTALL)
        run(*PIP_INSTALL, "--editable", f"{ROOT}[all]")
    else:
        # Includes installed packages, so that they stay within their allowed versions.
        run(*PIP_INSTALL, *requirements(project, *LEVELS))


def take_packages(project: dict[str, Any], level: str, *pip: str) -> None:
    say(f"installing {_PACKAGES[level]} of constraints.lock")
    # As constraints, so that torch gets only the dependencies of its build: CUDA, or none.
    run(*pip, *requirements(project, level))


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """The kernels are compiled meanwhile, and are there at the end."""
    command = (sys.executable, "hatch_build.py")
    with (
        LOG.open("ab") as log,
        subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            yield
        except BaseException:
            process.terminate()
            raise


def take_torch(project: dict[str, Any], *pip: str) -> None:
    """First and by itself: the project's requirement then finds torch in place, and nothing else
    comes from its index.
    """
    index = os.environ.get("TORCH_INDEX_URL", "")
    if index:
        say(f"installing torch from {index}")
        run(*pip, "--no-deps", "--index-url", index, torch_requirement(project))
        return
    build, has_cuda = torch_build(project)
    if has_cuda and not NVIDIA_DRIVER.exists():
        say("installing PyTorch's CPU build: this machine has no NVIDIA driver")
        if take_cpu_torch(project, *pip):
            return
        say(
            "PyTorch's CPU build could not be fetched; taking the build that pip finds.\n"
            "       Ctrl-C stops that. TORCH_INDEX_URL names another index; the page\n"
            '       "Start Locally" of PyTorch has it if you choose Linux, Pip and CPU'
        )
    say(f"installing {build}{CUDA_SIZE if has_cuda else ''}")
    run(*pip, "--no-deps", build)


def take_cpu_torch(project: dict[str, Any], *pip: str) -> bool:
    """Install PyTorch's CPU build by uv, which knows its index; False if uv could not.

    So no file of the repository names a registry. The build is held to the lock's hashes if pip is.
    """
    developer: list[str] = project["dependency-groups"]["dev"]
    uv = next(text for text in developer if text.startswith("uv=="))
    chosen = [torch_requirement(project)]
    if "--require-hashes" in pip:
        chosen = ["--require-hashes", "--requirement", str(locked_requirement("torch"))]
    options = ("--python", str(PYTHON), "--no-deps", "--no-cache", "--only-binary", ":all:")
    try:
        run(*pip, uv)
        run(str(UV), "pip", "install", *options, "--torch-backend", "cpu", *chosen)
    except subprocess.CalledProcessError:
        return False
    return True


def torch_build(project: dict[str, Any]) -> tuple[str, bool]:
    """torch at the version that pip's configuration leads to, with its build's label if it has one
    ("2.13.0+cpu"), and whether that build brings CUDA with it.

    If held to the lock, pip prefers a file whose hash an index declares to one in a directory of
    wheels (`find-links`), whatever their versions. A site with CPU builds in such a directory would
    get CUDA.
    """
    look = (
        *PIP_INSTALL,
        "--quiet",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
        "--report",
        "-",
    )
    command = (*look, torch_requirement(project))
    with LOG.open("ab") as log:
        done = subprocess.run(
            command,
            check=True,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    (found,) = json.loads(done.stdout)["install"]
    needs = found["metadata"].get("requires_dist", [])
    return f"torch=={found['metadata']['version']}", any(
        text.startswith(("nvidia-", "cuda-")) for text in needs
    )


def locked_requirement(package: str) -> Path:
    """A requirements file with the lock's entry of this package: its version and hashes."""
    entry = re.search(rf"^{package}==.*\n(?: +--hash=.*\n)+", LOCK.read_text(), re.M)
    if entry is None:
        raise SystemExit(f"setup: constraints.lock has no entry of {package}: run `make lock`")
    path = VENV / f"{package}.lock"
    path.write_text(entry[0])
    return path


def requirements(project: dict[str, Any], *levels: str) -> list[str]:
    """The requirements of pyproject.toml in these levels, without the project itself."""
    named, groups = project["project"], project["dependency-groups"]
    sections: list[list[str]] = []
    if RUNTIME in levels:
        sections += [project["build-system"]["requires"], named["dependencies"]]
        extras = named["optional-dependencies"]
        sections += [*(extras[name] for name in extras if name not in APART), groups["checkout"]]
    if DEVELOPER in levels:
        sections += [*(named["optional-dependencies"][name] for name in APART), groups["dev"]]
    texts = {text: None for section in sections for text in section}  # in order, each once
    return [text for text in texts if not text.startswith(f"{named['name']}[")]


def torch_requirement(project: dict[str, Any]) -> str:
    requirements: list[str] = project["project"]["optional-dependencies"]["agent"]
    return next(text for text in requirements if text.startswith("torch="))


def run(*command: str) -> None:
    """Run a step; its output is appended to the log."""
    with LOG.open("ab") as log:
        log.write(f"$ {' '.join(command)}\n".encode())
        log.flush()
        subprocess.run(
            command,
            check=True,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def failed_command(error: subprocess.CalledProcessError) -> int:
    """Print the end of the log, what to do about a refused file, and the log's path."""
    lines = LOG.read_text(errors="replace").splitlines()
    print("\n".join(lines[-SHOWN_LOG_LINES:]), file=sys.stderr)
    if "--require-hashes" in error.cmd:
        print(UNLOCKED_HINT, file=sys.stderr)
    program = Path(error.cmd[0]).name
    return fail(f"{program} failed with status {error.returncode}; its whole output is in {LOG}")


def say(text: str) -> None:
    """Print a step before it begins, also if the output is a pipe."""
    print(f"setup: {text}", flush=True)


def fail(message: str) -> int:
    print(f"setup: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        fail("interrupted; the same command continues")
        sys.exit(INTERRUPTED)
