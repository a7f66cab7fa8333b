"""A virtual environment of a wheel folder, prepared for its final path, on a machine of any kind.

It equals the result of `python -m venv` and pip on that machine, without running its Python. So an
arm64 package can be made on an x86_64 machine, and two runs make the same files.
"""

from __future__ import annotations

import configparser
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tools.release.archives import Entry
from tools.release.wheel_folder import Target

FIRST_IMPORT = (
    "import edgeshard.client, edgeshard.cli.main, edgeshard_coordinator.daemon, "
    "edgeshard_agent.hosting.loading"
)
"""The modules that daemons import. Python then compiles it once, in a directory that it may
write."""
_DATA = re.compile(r"[^/]+\.data/(\w+)/(.+)")


def lay_out(folder: Path, target: Target, home: str, scratch: Path) -> list[Entry]:
    """The files of an environment at the absolute path `home`. Wheels are unpacked into `scratch`.

    pip is left out: who wants other packages there makes an environment of their own.
    """
    root = home.strip("/")
    found: dict[str, Entry] = {}
    for wheel in sorted(folder.glob("*.whl")):
        if wheel.name.startswith("pip-"):
            continue
        unpacked = scratch / wheel.stem
        for name, mode in _unpack(wheel, unpacked):
            match = _DATA.fullmatch(name)
            # the rest are manuals and headers
            if match is None or match[1] in (
                "purelib",
                "platlib",
            ):
                path = (
                    f"{root}/lib/python{target.python}/site-packages/{match[2] if match else name}"
                )
                found[path] = Entry(path, unpacked / name, mode)  # as with pip, the last one has it
        if wheel.name.startswith("edgeshard-"):
            scripts = _scripts(wheel)
            for script, text in scripts.items():
                found[f"{root}/bin/{script}"] = Entry(
                    f"{root}/bin/{script}", f"#!{home}/bin/python\n{text}".encode(), 0o755
                )
    config = f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {target.python}\n"
    return [
        *found.values(),
        Entry(f"{root}/pyvenv.cfg", config.encode()),
        Entry(f"{root}/bin/python", link=f"/usr/bin/python{target.python}"),
        Entry(f"{root}/bin/python3", link="python"),
    ]


def _unpack(wheel: Path, into: Path) -> Iterator[tuple[str, int]]:
    """The names of a wheel's files, unpacked, with their modes."""
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            if not info.is_dir():
                archive.extract(info, into)
                runs = (info.external_attr >> 16) & 0o111 and ".so" not in info.filename
                yield info.filename, 0o755 if runs else 0o644


def _scripts(wheel: Path) -> dict[str, str]:
    """Python texts that start the wheel's programs, by their names."""
    points = configparser.ConfigParser()
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (
            name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt")
        )
        points.read_string(archive.read(name).decode())
    programs = {}
    for script, point in points["console_scripts"].items():
        module, function = point.split(":")
        programs[script] = (
            f"import sys\n\nfrom {module} import {function}\n\nsys.exit({function}())\n"
        )
    return programs
