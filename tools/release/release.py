"""Everything that is handed out of one version, in one folder with checksums: `make release`.

    python -m tools.release.release --target x86_64-py311-cpu    into dist/release-VERSION

It contains the wheels of dist/wheels and, for each target, a bundle, a Debian package and a
CycloneDX bill of materials; also notes from CHANGELOG.md, and SHA256SUMS. Two runs on one commit
make the same bytes: all times are the commit's (SOURCE_DATE_EPOCH otherwise). Changes that are not
committed are refused, and so is a version without a section in CHANGELOG.md; `--draft` takes both,
for trying.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from packaging.utils import canonicalize_name

from tools.inventory import Installed, InventoryError, licence_of, make_sbom
from tools.lock import LOCK, ROOT, read_lock
from tools.release.archives import (
    CHECKSUMS,
    ReleaseError,
    checksums,
    size_text,
    source_epoch,
    version,
)
from tools.release.bundle import make_bundle
from tools.release.deb import make_deb
from tools.release.wheel_folder import Target, add_options, headers_of, make_folders

NOTES = "NOTES.md"


def notes(changelog: str, number: str, *, draft: bool) -> str:
    """The section of a version, without its heading. Raises ReleaseError if there is none, or an
    empty one."""
    for name in (number, "Unreleased") if draft else (number,):
        section = re.search(
            rf"^## \[{re.escape(name)}\][^\n]*\n(.*?)(?=^## |\Z)", changelog, re.M | re.S
        )
        if section and section[1].strip():
            return section[1].strip() + "\n"
    raise ReleaseError(
        f"CHANGELOG.md says nothing about {number}: give [Unreleased] its name and a date, ## "
        f"[{number}] - YYYY-MM-DD"
    )


def check_clean() -> None:
    """Raises ReleaseError for changes that no commit has."""
    command = ("git", "status", "--porcelain")
    changed = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    if changed:
        raise ReleaseError(
            f"{len(changed)} files are not as committed, such as {changed[0][3:]}: commit them "
            "first"
        )


def packages_of(folder: Path) -> dict[str, Installed]:
    """The packages in a wheel folder besides EdgeShard, from the metadata of its wheels."""
    found = {}
    for wheel in folder.glob("*.whl"):
        headers = headers_of(wheel)
        name = str(canonicalize_name(str(headers["Name"])))
        metadata = {
            "license_expression": headers.get("License-Expression", ""),
            "license": headers.get("License", ""),
            "classifier": headers.get_all("Classifier", []),
        }
        found[name] = Installed(name, str(headers["Version"]), licence_of(name, metadata))
    found.pop("edgeshard", None)
    return found


def write_sbom(folder: Path, target: Target, into: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    when = datetime.datetime.fromtimestamp(source_epoch(), datetime.UTC)
    bill = make_sbom(project, read_lock(LOCK.read_text()), packages_of(folder), when)
    (into / f"edgeshard-{version()}-{target.name}.cdx.json").write_text(
        json.dumps(bill, indent=2) + "\n"
    )


def make_release(folders: Sequence[tuple[Target, Path]], text: str, into: Path) -> None:
    """Fill `into`, replacing its content. `text` are the notes."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    for target, folder in folders:
        for wheel in folder.glob("edgeshard-*.whl"):
            shutil.copyfile(wheel, into / wheel.name)
        make_bundle(folder, target, into)
        write_sbom(folder, target, into)
        make_deb(folder, target, into)
    (into / NOTES).write_text(text)
    (into / CHECKSUMS).write_text(checksums(into))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="release", description="Make everything that is handed out of a version."
    )
    add_options(parser)
    parser.add_argument(
        "--draft", action="store_true", help="take changes that are not committed, and [Unreleased]"
    )
    options = parser.parse_args(arguments)
    into = ROOT / "dist" / f"release-{version()}"
    try:
        if not options.draft:
            check_clean()
        text = notes((ROOT / "CHANGELOG.md").read_text(), version(), draft=options.draft)
        os.environ["SOURCE_DATE_EPOCH"] = str(source_epoch())
        make_release(make_folders(options), text, into)
    except (ReleaseError, InventoryError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    for path in sorted(into.iterdir()):
        print(f"{path.relative_to(ROOT)}: {size_text(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
