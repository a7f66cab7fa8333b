"""Build `.venv`: what `make setup` runs. Needs only the standard library and Python 3.11 or newer.

Needs no network, and at most compiles the kernels, when `.venv` already holds what pyproject.toml asks for: a stamp
file in it keeps the hash of the sections that say what is installed. `TORCH_INDEX_URL` may name a package index to take
torch (and only torch) from, such as the one with PyTorch's CPU builds; without it pip takes what its own configuration
resolves.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".setup-stamp"
PYTHON = VENV / "bin" / "python"
OLDEST_PYTHON = (3, 11)
# The first pip that installs dependency groups.
OLDEST_PIP = "25.1"


def main() -> int:
    if sys.version_info < OLDEST_PYTHON:
        found = platform.python_version()
        return fail(f"Python {found} is too old: install 3.11 or newer, or run `make setup PYTHON=/path/to/python3.11`")
    import tomllib  # absent from the Pythons refused above

    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = fingerprint(project)
    finished = STAMP.exists() and STAMP.read_text() == wanted and PYTHON.exists()
    if not finished and importlib.util.find_spec("ensurepip") is None:
        return fail("this Python cannot create virtual environments: on Debian, apt-get install python3-venv")
    if not PYTHON.exists():
        run(sys.executable, "-m", "venv", str(VENV))
    try:
        if not finished:
            STAMP.unlink(missing_ok=True)
            install(project)
        # Compiles the kernels where they are out of date, and says so, which pip would hide, where it cannot.
        run(str(PYTHON), "hatch_build.py")
    except subprocess.CalledProcessError as error:
        return fail(f"`{' '.join(error.cmd[1:])}` failed with status {error.returncode}; its output is above")
    STAMP.write_text(wanted)  # and newer than what make compares it with, so that make does not come here again
    return 0


def fingerprint(project: dict[str, Any]) -> str:
    """Changes when what is to be installed changes; a new lint rule in pyproject.toml does not count."""
    names = ("requires-python", "dependencies", "optional-dependencies", "scripts")
    parts = [project["build-system"], project["dependency-groups"], {n: project["project"].get(n) for n in names}]
    parts.append(project["tool"].get("hatch", {}))
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def install(project: dict[str, Any]) -> None:
    pip = (str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install")
    run(*pip, "--quiet", "--upgrade", f"pip>={OLDEST_PIP}")
    index = os.environ.get("TORCH_INDEX_URL")
    if index:
        # First and alone: the project's own requirement then finds torch in place, and nothing else comes from there.
        run(*pip, "--no-deps", "--index-url", index, torch_requirement(project))
    elif sys.platform == "linux" and not Path("/dev/nvidiactl").exists():
        print(
            "note: no NVIDIA driver here. If pip is about to fetch gigabytes of CUDA, stop it and set TORCH_INDEX_URL "
            "to the index of PyTorch's CPU wheels (PyTorch's own install page names it)."
        )
    run(*pip, "--editable", f"{ROOT}[all]", "--group", f"{ROOT / 'pyproject.toml'}:dev")


def torch_requirement(project: dict[str, Any]) -> str:
    requirements: list[str] = project["project"]["optional-dependencies"]["agent"]
    return next(text for text in requirements if text.startswith("torch="))


def run(*command: str) -> None:
    subprocess.run(command, check=True, cwd=ROOT, stdin=subprocess.DEVNULL)


def fail(message: str) -> int:
    print(f"setup: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
