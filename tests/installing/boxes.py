"""A box of an ordinary user, with a home, a path and folders of small real wheels."""

from __future__ import annotations

import ensurepip
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tools.release.archives import CHECKSUMS, checksums

PYTHON = "python3.13"
"""The name that the script looks for first; the one of these tests has it."""
INSTALLER = Path(__file__).resolve().parents[2] / "deploy" / "install.sh"
_PROGRAM = """\
import os, sys

def main():
    if sys.argv[1:] == ["--version"]:
        print("edgectl {version}")
    elif sys.argv[1] == "join":
        token = sys.stdin.readline().strip() if sys.argv[2] == "-" else sys.argv[2]
        print("joins by", token, "with", *sys.argv[3:])
"""


def make_wheel(folder: Path, version: str, *, padding: int = 0) -> Path:
    """A wheel named edgeshard whose edgectl prints its version, and has `padding` bytes of data
    that do not shrink."""
    path = folder / f"edgeshard-{version}-py3-none-any.whl"
    about = f"edgeshard-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("edgeshard/__init__.py", "")
        wheel.writestr("edgeshard/main.py", _PROGRAM.format(version=version))
        wheel.writestr("edgeshard/padding", os.urandom(padding))
        wheel.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: edgeshard\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{about}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(
            f"{about}/entry_points.txt", "[console_scripts]\nedgectl = edgeshard.main:main\n"
        )
        names = [*wheel.namelist(), f"{about}/RECORD"]
        wheel.writestr(f"{about}/RECORD", "".join(f"{name},,\n" for name in names))
    return path


def make_folder(folder: Path, version: str, *, padding: int = 0) -> Path:
    """A folder of wheels, as `make wheels` and its like lay one out: EdgeShard, pip, requirements,
    install.sh."""
    folder.mkdir(parents=True, exist_ok=True)
    make_wheel(folder, version, padding=padding)
    (bundled,) = (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")
    shutil.copy(bundled, folder)
    lines = []
    for wheel in sorted(folder.glob("*.whl")):
        name, number = wheel.name.split("-")[:2]
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        lines.append(f"{name}=={number} \\\n    --hash=sha256:{digest}\n")
    (folder / "requirements.txt").write_text("".join(lines))
    shutil.copy(INSTALLER, folder)
    (folder / CHECKSUMS).write_text(checksums(folder))
    return folder


@dataclass
class Box:
    """`home` is the user's; programs of `path` precede the system's."""

    directory: Path
    path: Path = field(init=False)
    home: Path = field(init=False)

    def __post_init__(self) -> None:
        self.path, self.home = self.directory / "path", self.directory / "home"
        for folder in (self.path, self.home):
            folder.mkdir()
        for name in ("python3", PYTHON):
            (self.path / name).symlink_to(Path(sys.executable).resolve())

    @property
    def prefix(self) -> Path:
        return self.home / ".local" / "share" / "edgeshard"

    @property
    def edgectl(self) -> Path:
        return self.home / ".local" / "bin" / "edgectl"

    def command(self, folder: Path, *arguments: str | Path) -> list[str]:
        # In a namespace that maps it to uid 1000, root is an ordinary user who owns the same files.
        user = ["unshare", "--user", "--map-user=1000"] if os.geteuid() == 0 else []
        return [*user, "sh", str(folder / INSTALLER.name), *map(str, arguments)]

    @property
    def environment(self) -> Mapping[str, str]:
        return {
            "HOME": str(self.home),
            "PATH": f"{self.path}:{self.edgectl.parent}:/usr/sbin:/usr/bin:/sbin:/bin",
        }

    def run(
        self, folder: Path, *arguments: str | Path, said: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run the script of a folder; `said` is typed to it."""
        command = self.command(folder, *arguments)
        return subprocess.run(
            command,
            env=self.environment,
            input=said,
            capture_output=True,
            text=True,
            timeout=250,
            cwd=self.directory,
            start_new_session=True,
        )

    def install(self, folder: Path, *arguments: str | Path, said: str = "") -> str:
        """Install from a folder; its output."""
        result = self.run(folder, "--wheels", folder, *arguments, said=said)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def version(self) -> str:
        """The output of the installed edgectl; raises if it does not run."""
        return subprocess.check_output([self.edgectl, "--version"], text=True, timeout=60).split()[
            -1
        ]

    def versions(self) -> list[str]:
        return sorted(path.name.split("-")[0] for path in (self.prefix / "versions").iterdir())

    def wrap(self, program: str, script: str) -> None:
        """Have another program in the place of one; REAL in its script is the one that it stands
        for."""
        real = Path(sys.executable).resolve() if program == PYTHON else shutil.which(program)
        (self.path / program).unlink(missing_ok=True)
        (self.path / program).write_text(f"#!/bin/sh\n{script}\n".replace("REAL", str(real)))
        (self.path / program).chmod(0o755)


def tree(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))
