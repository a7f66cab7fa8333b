"""A Debian package of EdgeShard with all that it needs: `make deb`.

    python -m tools.release.deb --target x86_64-py311-cpu
        into dist/edgeshard_VERSION+py311_amd64.deb, of Debian 12

A package is for the releases of Debian and Ubuntu whose Python its target names: Debian 12 has
3.11, Ubuntu 24.04 has 3.12, Debian 13 has 3.13. Its environment is /opt/edgeshard/deb; units, users
and programs on the path are the system's. Installing it fetches nothing. It is written here and not
by debhelper for the reasons in
docs/decisions/installing.md#choice-one-wheel-folder-makes-all-packages.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import hashlib
import io
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from edgeshard.process import installation
from edgeshard.process.systemd_units import Daemon, unit_text
from tools.lock import ROOT
from tools.release.archives import Entry, source_epoch, version, write_ar, write_tar_gz
from tools.release.environment import lay_out
from tools.release.wheel_folder import Target, add_options, make_of_folders

HOME = "/opt/edgeshard/deb"
SCRIPTS = ROOT / "deploy" / "deb"
MAINTAINER = "EdgeShard <edgeshard@localhost>"
_TLS = f"{installation.CONFIGURATION}/tls"
_PROGRAMS = ("edgectl", *(daemon.unit for daemon in Daemon))


def package_name(target: Target) -> str:
    return "edgeshard" if target.accelerator == "cpu" else f"edgeshard-{target.accelerator}"


def package_version(target: Target) -> str:
    """A newer Python sorts after an older one, so that it replaces it when the system is
    upgraded."""
    return f"{version()}+py{target.python.replace('.', '')}"


def control(target: Target, installed_kib: int) -> str:
    """The package's control file."""
    name = package_name(target)
    major, minor = target.python.split(".")
    other = "edgeshard" if name != "edgeshard" else "edgeshard-cuda"
    build = (
        "for processors alone" if target.accelerator == "cpu" else "for NVIDIA GPUs and processors"
    )
    pythons = f"python3 (>= {target.python}), python3 (<< {major}.{int(minor) + 1})"
    return f"""\
Package: {name}
Version: {package_version(target)}
Architecture: {target.architecture}
Maintainer: {MAINTAINER}
Installed-Size: {installed_kib}
Depends: libc6 (>= 2.31), libstdc++6, passwd, {pythons}
Conflicts: {other}
Replaces: {other}
Section: science
Priority: optional
Description: run a large language model across the machines you already own
 A coordinator and an agent on every node compute a model together, each its
 layers. This package has the coordinator, the agent, edgectl and the Python
 packages that they need, PyTorch {build} among them.
"""


def system_entries(target: Target, epoch: int) -> list[Entry]:
    """The files of the package outside of its environment."""
    name = package_name(target)
    docs = f"usr/share/doc/{name}"
    when = datetime.datetime.fromtimestamp(epoch, datetime.UTC)
    changelog = (
        f"{name} ({package_version(target)}) unstable; urgency=medium\n\n"
        f"  * EdgeShard {version()}; CHANGELOG.md.gz beside this file says what is new.\n\n"
        f" -- {MAINTAINER}  {when:%a, %d %b %Y %H:%M:%S +0000}\n"
    )
    entries = [
        Entry(f"{docs}/changelog.gz", _gzip(changelog.encode())),
        Entry(f"{docs}/CHANGELOG.md.gz", _gzip((ROOT / "CHANGELOG.md").read_bytes())),
        Entry(f"{docs}/copyright", SCRIPTS / "copyright"),
        Entry(f"{docs}/licences.md.gz", _gzip((ROOT / "docs" / "licences.md").read_bytes())),
        Entry(f"usr/share/lintian/overrides/{name}", SCRIPTS / "lintian-overrides"),
        *(Entry(f"usr/bin/{program}", link=f"{HOME}/bin/{program}") for program in _PROGRAMS),
    ]
    for daemon in Daemon:
        text = unit_text(
            daemon, f"{HOME}/bin/{daemon.unit}", installation.config_path(daemon), _TLS
        )
        own = text.replace(f"Written by edgectl install {daemon}.", f"Of the package {name}.")
        entries.append(Entry(f"usr/lib/systemd/system/{daemon.unit}.service", own.encode()))
    return entries


def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, 9, mtime=0)


def sums(entries: Sequence[Entry]) -> str:
    """The md5sums file, by which `dpkg --verify` detects changes."""
    lines = []
    for entry in sorted(entries, key=lambda entry: entry.path):
        if entry.content is not None:
            data = (
                io.BytesIO(entry.content)
                if isinstance(entry.content, bytes)
                else entry.content.open("rb")
            )
            with data:
                lines.append(f"{hashlib.file_digest(data, 'md5').hexdigest()}  {entry.path}\n")
    return "".join(lines)


def installed_kib(entries: Sequence[Entry]) -> int:
    sizes = (
        len(entry.content) if isinstance(entry.content, bytes) else entry.content.stat().st_size
        for entry in entries
        if entry.content is not None
    )
    return sum(math.ceil(size / 1024) for size in sizes)


def make_deb(folder: Path, target: Target, into: Path) -> Path:
    """The package of a wheel folder, in the directory `into`."""
    epoch = source_epoch()
    name = f"{package_name(target)}_{package_version(target)}_{target.architecture}.deb"
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        entries = [
            *lay_out(folder, target, HOME, Path(scratch) / "wheels"),
            *system_entries(target, epoch),
        ]
        members = [
            Entry("control", control(target, installed_kib(entries)).encode()),
            Entry("md5sums", sums(entries).encode()),
            *(Entry(script, SCRIPTS / script, 0o755) for script in ("postinst", "prerm", "postrm")),
        ]
        archives = Path(scratch) / "control.tar.gz", Path(scratch) / "data.tar.gz"
        write_tar_gz(archives[0], members, epoch, "./")
        write_tar_gz(archives[1], entries, epoch, "./")
        parts: list[tuple[str, bytes | Path]] = [
            ("debian-binary", b"2.0\n"),
            *((path.name, path) for path in archives),
        ]
        write_ar(into / name, parts, epoch)
    return into / name


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="deb", description="Make Debian packages.")
    add_options(parser)
    return make_of_folders("deb", parser.parse_args(arguments), make_deb)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
