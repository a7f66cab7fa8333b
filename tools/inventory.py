"""An inventory of EdgeShard's parts: licences of everything in the lock, and a bill of materials of
an environment.

    python -m tools.inventory licences
        write docs/licences.md: `make licences`
    python -m tools.inventory sbom
        write dist/sbom.cdx.json (CycloneDX 1.6) of this environment: `make sbom`
    python -m tools.inventory check
        exits 1 if docs/licences.md does not fit the lock, or a licence is not allowed

`make check` runs the last.

A licence is the one that a package's own metadata declares: its expression, else its text, else its
classifiers. Metadata comes from installed packages. If a package is not installed (CUDA with
torch's CPU build), the old row is kept while the version is the same; otherwise pip queries the
index.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tomllib
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from typing import Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools.lock import LOCK, ROOT, Locked, read_lock, requirements

TABLE = ROOT / "docs" / "licences.md"
SBOM = ROOT / "dist" / "sbom.cdx.json"
RUN_TIME = "run time"
AGENT = "agent"
DISCOVERY = "discovery"
DEVELOPMENT = "development"
NVIDIA = "LicenseRef-NVIDIA-Proprietary"
UNKNOWN = "unknown"

# Licences that may be delivered with EdgeShard, which is under Apache-2.0. None of these reaches
# beyond a package's own files.
ALLOWED = {
    *(
        "0BSD",
        "Apache-2.0",
        "Apache-2.0 WITH LLVM-exception",
        "BSD",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
    ),
    *("CC0-1.0", "CNRI-Python", "ISC", "MIT", "MIT-0", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Zlib"),
}
# Texts and classifiers that are no licence expressions. "BSD" does not say which.
_MEANINGS = {
    "3-clause bsd license": "BSD-3-Clause",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd": "BSD",
    "bsd 2-clause license": "BSD-2-Clause",
    "bsd license": "BSD",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "nvidia proprietary software": NVIDIA,
    "python software foundation license": "PSF-2.0",
}
# Packages whose metadata declares nothing. This one has no files but its metadata, and stands for
# NVIDIA's own.
_UNDECLARED = {"cuda-toolkit": NVIDIA}

_INTRODUCTION = f"""\
# Check the licences of dependencies

`make licences` writes this page: the licence that each package of `constraints.lock` declares in its metadata. A wheel
has further licence files for what it bundles. `make check` refuses a licence that `tools/inventory.py` does not allow
for {RUN_TIME} and {AGENT}. `{NVIDIA}` is NVIDIA's own licence. It is not open source, and only
builds of torch for CUDA need those packages.

| part | installed |
| --- | --- |
| {RUN_TIME} | always, with the coordinator's extra |
| {AGENT} | on nodes, in addition |
| {DISCOVERY} | only with this extra; not delivered with EdgeShard |
| {DEVELOPMENT} | to build and test; not delivered with EdgeShard |
"""  # noqa: E501
_PARTS = (RUN_TIME, AGENT, DISCOVERY, DEVELOPMENT)


@dataclass(frozen=True)
class Row:
    """A package of docs/licences.md."""

    name: str
    version: str
    licence: str
    use: str


@dataclass(frozen=True)
class Installed:
    """A package of an environment. `version` has the label of a build, such as "2.13.0+cpu"."""

    name: str
    version: str
    licence: str


class InventoryError(Exception):
    """An inventory cannot be made; the text gives the remedy."""


def licence_of(name: str, metadata: Mapping[str, Any]) -> str:
    """The declared licence, as an SPDX expression if the metadata has one or a text that is known
    to mean one.

    `metadata` has the keys of core metadata in JSON (PEP 566).
    """
    classifiers = metadata.get("classifier", ())
    names = [
        item.rpartition(" :: ")[2]
        for item in classifiers
        if item.startswith("License :: OSI Approved :: ")
    ]
    for candidates in (
        [metadata.get("license_expression", "")],
        [metadata.get("license", "")],
        names,
    ):
        meant = [_meaning(candidate) for candidate in candidates]
        if meant and all(meant):
            return " AND ".join(sorted(meant))
    return _UNDECLARED.get(name, UNKNOWN)


def _meaning(text: str) -> str:
    known = _MEANINGS.get(text.strip().lower())
    if known:
        return known
    try:
        return str(canonicalize_license_expression(text))
    except InvalidLicenseExpression:
        return ""


def allowed(licence: str, name: str) -> bool:
    """Whether a package may be delivered: all licences of one alternative are allowed."""
    if licence == NVIDIA:
        return name.startswith(("nvidia-", "cuda-"))
    alternatives = (
        licence.split(" OR ") if "(" not in licence else [licence.replace(" OR ", " AND ")]
    )
    parts = [alternative.split(" AND ") for alternative in alternatives]
    return any(all(part.strip("() ") in ALLOWED for part in alternative) for alternative in parts)


def uses(project: dict[str, Any], entries: Mapping[str, Locked]) -> dict[str, str]:
    """The use of each package of the lock, derived from the requirement in pyproject.toml that
    leads to it."""
    required: dict[str, set[str]] = {}
    for entry in entries.values():
        for parent in entry.via:
            required.setdefault(parent, set()).add(entry.name)
    found = dict.fromkeys(entries, DEVELOPMENT)
    for use, sections in (
        (DISCOVERY, ("discovery",)),
        (AGENT, ("agent",)),
        (
            RUN_TIME,
            ("dependencies", "coordinator", "drawings", "gateway", "models", "rules", "top"),
        ),
    ):
        reached: set[str] = set()
        following = {
            str(canonicalize_name(wanted.name)) for wanted in requirements(project, *sections)
        }
        while following:
            reached |= following
            following = {child for name in following for child in required.get(name, ())} - reached
        found |= dict.fromkeys(reached & entries.keys(), use)
    return found


def installed() -> dict[str, Installed]:
    """The packages of the environment that this runs in, by normalised name; EdgeShard itself is
    left out."""
    found = {}
    for distribution in distributions():
        name = str(canonicalize_name(distribution.name))
        found[name] = Installed(
            name, distribution.version, licence_of(name, distribution.metadata.json)
        )
    found.pop("edgeshard", None)
    return found


def is_locked(package: Installed, entries: Mapping[str, Locked]) -> bool:
    entry = entries.get(package.name)
    return entry is not None and Version(package.version).public == Version(entry.version).public


def from_index(entries: Iterable[Locked]) -> dict[str, str]:
    """Licences of packages that are not installed, by the metadata that the index has of them; no
    wheel is fetched."""
    wanted = [f"{entry.name}=={entry.version}" for entry in entries]
    if not wanted:
        return {}
    look = (
        "--quiet",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--report",
        "-",
    )
    command = (
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        *look,
        *wanted,
    )
    done = subprocess.run(command, stdout=subprocess.PIPE)
    if done.returncode:
        raise InventoryError(
            f"no metadata of {', '.join(wanted)}: run this on Linux with an index, pip's words are "
            "above"
        )
    found = {}
    for item in json.loads(done.stdout)["install"]:
        name = str(canonicalize_name(item["metadata"]["name"]))
        found[name] = licence_of(name, item["metadata"])
    return found


def make_table(project: dict[str, Any], entries: Mapping[str, Locked], old: str) -> str:
    use = uses(project, entries)
    here = {name: package for name, package in installed().items() if is_locked(package, entries)}
    kept = {
        row.name: row.licence
        for row in read_table(old)
        if row.version == entries.get(row.name, row).version
    }
    kept = {name: licence for name, licence in kept.items() if name in entries}
    known = kept | {name: package.licence for name, package in here.items()}
    known |= from_index(entry for entry in entries.values() if entry.name not in known)
    table = _INTRODUCTION
    for part in _PARTS:
        table += (
            f"\n## {part.capitalize()}\n\n| package | version | licence |\n| --- | --- | --- |\n"
        )
        for name, entry in sorted(entries.items()):
            if use[name] == part:
                table += f"| {name} | {entry.version} | {known[name]} |\n"
    return table


def read_table(text: str) -> list[Row]:
    """The packages of the page, by name."""
    rows: list[Row] = []
    for section in text.split("\n## ")[1:]:
        part, _, table = section.partition("\n")
        lines = [line for line in table.splitlines() if line.startswith("| ")][2:]
        cells = ((cell.strip() for cell in line.strip("|").split("|")) for line in lines)
        rows += [Row(name, version, licence, part.lower()) for name, version, licence in cells]
    return sorted(rows, key=lambda row: row.name)


def problems(
    project: dict[str, Any],
    entries: Mapping[str, Locked],
    text: str,
    packages: Mapping[str, Installed],
) -> list[str]:
    """The faults of docs/licences.md, by the lock and by the packages installed at the lock's
    versions."""
    use = uses(project, entries)
    rows = read_table(text)
    found = []
    if [(row.name, row.version, row.use) for row in rows] != [
        (name, entry.version, use[name]) for name, entry in sorted(entries.items())
    ]:
        found.append("docs/licences.md does not fit constraints.lock; run `make licences`")
    for row in rows:
        package = packages.get(row.name)
        if package and is_locked(package, entries) and package.licence != row.licence:
            found.append(
                f"docs/licences.md: {row.name} declares {package.licence}, not {row.licence}; run "
                "`make licences`"
            )
        if row.use not in (DISCOVERY, DEVELOPMENT) and not allowed(row.licence, row.name):
            found.append(
                f"{row.name} ({row.use}) is under {row.licence!r}, which tools/inventory.py does "
                "not allow: "
                "do without the package, or allow the licence there and give the reason in "
                "docs/decisions/libraries.md"
            )
    return found


def make_sbom(
    project: dict[str, Any],
    entries: Mapping[str, Locked],
    packages: Mapping[str, Installed],
    now: datetime.datetime,
) -> dict[str, Any]:
    """A CycloneDX 1.6 document. Raises InventoryError if packages differ from the lock."""
    strangers = [
        f"{package.name} {package.version}"
        for package in packages.values()
        if not is_locked(package, entries)
    ]
    if strangers:
        raise InventoryError(
            "the environment holds what is not in constraints.lock: "
            f"{', '.join(sorted(strangers))}. "
            "Remove .venv, run `make setup`, and this again"
        )
    use = uses(project, entries)
    references = {name: _purl(name, package.version) for name, package in packages.items()}
    named = project["project"]
    own = _purl(named["name"], named["version"])
    own_component = {
        "type": "application",
        "bom-ref": own,
        "name": named["name"],
        "version": named["version"],
        "purl": own,
    }
    dependencies: dict[str, list[str]] = {
        own: [],
        **{reference: [] for reference in references.values()},
    }
    for name, reference in references.items():
        for parent in entries[name].via:
            above = own if parent == "pyproject.toml" else references.get(parent)
            if above:
                dependencies[above].append(reference)
    content = json.dumps([own, sorted(references.values()), now.isoformat()])
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        # The digest of its content, so that two documents of one environment and time are the same.
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}",
        "version": 1,
        "metadata": {
            "timestamp": now.isoformat(timespec="seconds"),
            "tools": {
                "components": [
                    {
                        "type": "application",
                        "name": "tools/inventory.py",
                        "version": named["version"],
                    }
                ]
            },
            "component": own_component | {"licenses": _licences(named["license"])},
        },
        "components": [
            _component(package, references[name], entries[name], use[name])
            for name, package in sorted(packages.items())
        ],
        "dependencies": [
            {"ref": name, "dependsOn": sorted(below)}
            for name, below in sorted(dependencies.items())
        ],
    }


def _component(package: Installed, reference: str, entry: Locked, use: str) -> dict[str, Any]:
    hashes = [{"alg": "SHA-256", "content": item.removeprefix("sha256:")} for item in entry.hashes]
    component = {
        "type": "library",
        "bom-ref": reference,
        "name": package.name,
        "version": package.version,
        "scope": {
            RUN_TIME: "required",
            AGENT: "optional",
            DISCOVERY: "excluded",
            DEVELOPMENT: "excluded",
        }[use],
        "purl": reference,
        # The files that the lock allows; an environment does not record which of them was
        # installed.
        "externalReferences": [
            {
                "type": "distribution",
                "url": reference,
                "comment": "one of the files of this version",
                "hashes": hashes,
            }
        ],
    }
    return (
        component
        if package.licence == UNKNOWN
        else component | {"licenses": _licences(package.licence)}
    )


def _purl(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version.replace('+', '%2B')}"


def _licences(licence: str) -> list[dict[str, Any]]:
    try:
        return [{"expression": str(canonicalize_license_expression(licence))}]
    except InvalidLicenseExpression:
        return [{"license": {"name": licence}}]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="inventory", description="Licences and a bill of materials."
    )
    parser.add_argument("what", choices=("licences", "sbom", "check"))
    what = parser.parse_args(arguments).what
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    entries = read_lock(LOCK.read_text())
    found: list[str] = []
    try:
        if what == "sbom":
            SBOM.parent.mkdir(exist_ok=True)
            bill = make_sbom(project, entries, installed(), datetime.datetime.now(datetime.UTC))
            SBOM.write_text(json.dumps(bill, indent=2) + "\n")
            print(f"{len(bill['components'])} packages in {SBOM.relative_to(ROOT)}")
        else:
            if what == "licences":
                TABLE.write_text(
                    make_table(project, entries, TABLE.read_text() if TABLE.exists() else "")
                )
            found = problems(project, entries, TABLE.read_text(), installed())
    except InventoryError as error:
        found = [str(error)]
    for problem in found:
        print(f"inventory: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
