"""How this program was installed, and so what upgrades and removes it."""

from __future__ import annotations

import platform
import shlex
import shutil
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from edgeshard.domain.errors import FailedPreconditionError

PACKAGED = Path("/opt/edgeshard/deb")
"""The environment of the Debian packages and of the images."""
_DPKG = Path("/var/lib/dpkg/info")
_PACKAGES = ("edgeshard", "edgeshard-cuda")
_MARKER = ".edgeshard-prefix"
_STATE = "~/.config/edgeshard ~/.local/state/edgeshard ~/.cache/edgeshard"


@dataclass(frozen=True, slots=True)
class Scripted:
    """An installation by deploy/install.sh in `prefix`; `environment` is the version that runs
    now."""

    prefix: Path
    environment: Path

    @property
    def script(self) -> Path:
        """The script that this version was installed by, which also removes it."""
        return self.environment / "install.sh"

    def is_of(self, requirements_sha256: str) -> bool:
        """Whether this version was installed from requirements.txt with that SHA-256, and its
        services run it."""
        try:
            content = (self.environment / "requirements.txt").read_bytes()
            in_use = (self.prefix / ".in-use").read_text().strip()
        except OSError:
            return False
        return (
            sha256(content).hexdigest() == requirements_sha256
            and in_use == f"versions/{self.environment.name}"
        )

    def check(self) -> None:
        """Raise FailedPreconditionError if the script is missing."""
        if not self.script.is_file():
            raise FailedPreconditionError(
                f"{self.script} is missing: take install.sh from a folder of wheels and run "
                f"sh install.sh remove --prefix {self.prefix}",
                reason="NO_INSTALLER",
            )


@dataclass(frozen=True, slots=True)
class Managed:
    """An installation that other programs manage: `what` it is, and their commands in the shell's
    words."""

    what: str
    upgrade: str
    back: str
    remove: str
    purge: str

    def error(self, command: str) -> FailedPreconditionError:
        """The error of a command of edgectl that is not for this installation. It names the right
        `command`."""
        return FailedPreconditionError(
            f"EdgeShard was installed by {self.what}; nothing was changed. Run: {command}",
            reason="MANAGED",
        )


def distribution_of(
    environment: Path, code: Path, packaged: Path = PACKAGED, dpkg: Path = _DPKG
) -> Scripted | Managed:
    """How the program with this Python `environment` was installed. `code` is the directory of its
    package.

    `packaged` is the environment of a Debian package, `dpkg` the directory of dpkg's file lists.
    """
    prefix = environment.parent.parent
    if (prefix / _MARKER).is_file() and environment.parent.name == "versions":
        return Scripted(prefix, environment)
    if environment == packaged:
        return _packaged(dpkg)
    checkout = code.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / "deploy" / "install.sh").is_file():
        return _checkout(checkout, environment)
    return _by_pip(environment)


def this_distribution() -> Scripted | Managed:
    """How this program was installed."""
    return distribution_of(Path(sys.prefix).resolve(), Path(__file__).parents[1])


def program_words(name: str) -> str:
    """The shell's words for a program of this installation: its name if PATH leads to it, else its
    path."""
    distribution = this_distribution()
    environment = (
        distribution.prefix / "current" if isinstance(distribution, Scripted) else Path(sys.prefix)
    )
    path = environment / "bin" / name
    on_path = shutil.which(name)
    if not path.exists() or (on_path is not None and Path(on_path).resolve() == path.resolve()):
        return name
    return shlex.quote(str(path))


def _packaged(dpkg: Path) -> Managed:
    installed = [name for name in _PACKAGES if (dpkg / f"{name}.list").is_file()]
    if not installed:
        return Managed(
            "a container's image",
            upgrade="podman load -i NEW_IMAGE.oci.tar, and start the container from it",
            back="podman run with the image of the version before",
            remove="podman rm CONTAINER",
            purge="podman rm --volumes CONTAINER",
        )
    name = installed[0]
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    file = f"./{name}_VERSION+py3{sys.version_info[1]}_{machine}.deb"
    return Managed(
        f"the package {name}",
        upgrade=f"sudo apt-get install {file}",
        back=f"sudo apt-get install --allow-downgrades {file}",
        remove=f"sudo apt-get remove {name}",
        purge=f"sudo apt-get purge {name}",
    )


def _checkout(checkout: Path, environment: Path) -> Managed:
    at = shlex.quote(str(checkout))
    own = checkout in environment.parents
    remove = (
        f"rm -rf {shlex.quote(str(environment))}"
        if own
        else _pip(environment, "uninstall edgeshard")
    )
    return Managed(
        f"a checkout, {checkout}",
        upgrade=f"git -C {at} pull && make -C {at} setup",
        back=f"git -C {at} checkout VERSION && make -C {at} setup",
        remove=remove,
        purge=f"{remove} && rm -rf {_STATE}",
    )


def _by_pip(environment: Path) -> Managed:
    install = _pip(environment, "install --no-index --find-links FOLDER")
    remove = _pip(environment, "uninstall edgeshard")
    return Managed(
        f"pip, in {environment}",
        upgrade=f"{install} --upgrade 'edgeshard[all]'",
        back=f"{install} 'edgeshard[all]==VERSION'",
        remove=remove,
        purge=f"{remove} && rm -rf {_STATE}",
    )


def _pip(environment: Path, arguments: str) -> str:
    return f"{shlex.quote(str(environment / 'bin' / 'python'))} -m pip {arguments}"
