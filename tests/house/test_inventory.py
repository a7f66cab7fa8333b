"""Licences and the bill of materials: they fit the lock, nothing undeclared is delivered, and it
has its form."""

from __future__ import annotations

import datetime
import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tools import inventory
from tools.inventory import (
    AGENT,
    DEVELOPMENT,
    DISCOVERY,
    NVIDIA,
    RUN_TIME,
    UNKNOWN,
    Installed,
    InventoryError,
    allowed,
    is_locked,
    licence_of,
    make_sbom,
    make_table,
    problems,
    read_table,
    uses,
)
from tools.lock import Locked, read_lock

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs" / "licences.md").read_text()
NOW = datetime.datetime(2026, 11, 23, 12, tzinfo=datetime.UTC)


@pytest.fixture
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture
def entries() -> dict[str, Locked]:
    return read_lock((ROOT / "constraints.lock").read_text())


@pytest.fixture
def here(entries: dict[str, Locked]) -> dict[str, Installed]:
    """The packages of this environment at the lock's versions; it need not be made by
    `make setup`."""
    return {
        name: package
        for name, package in inventory.installed().items()
        if is_locked(package, entries)
    }


def test_the_table_fits_the_lock_and_what_is_installed(
    project: dict[str, Any], entries: dict[str, Locked]
) -> None:
    assert problems(project, entries, TABLE, inventory.installed()) == []
    assert [row.name for row in read_table(TABLE)] == sorted(entries)


def test_a_table_behind_the_lock_is_a_problem(
    project: dict[str, Any], entries: dict[str, Locked]
) -> None:
    entries["structlog"] = replace(entries["structlog"], version="99.0")
    assert problems(project, entries, TABLE, {}) == [
        "docs/licences.md does not fit constraints.lock; run `make licences`"
    ]


def test_a_licence_that_the_package_does_not_declare_is_a_problem(
    project: dict[str, Any], entries: dict[str, Locked], here: dict[str, Installed]
) -> None:
    changed = re.sub(r"(\| pytest \| \S+ \|) MIT \|", r"\1 BSD |", TABLE)
    (found,) = problems(project, entries, changed, here)
    assert found == "docs/licences.md: pytest declares MIT, not BSD; run `make licences`"


@pytest.mark.parametrize("licence", ["GPL-3.0-only", UNKNOWN, NVIDIA, "MIT AND LGPL-3.0-or-later"])
@pytest.mark.parametrize("name", ["structlog", "safetensors"])
def test_what_is_delivered_has_an_allowed_licence(
    licence: str, name: str, project: dict[str, Any], entries: dict[str, Locked]
) -> None:
    changed = re.sub(rf"(\| {name} \| \S+ \|)[^|]+\|", rf"\1 {licence} |", TABLE)
    assert changed != TABLE
    (found,) = problems(project, entries, changed, {})
    assert name in found and repr(licence) in found and "does not allow" in found


def test_what_only_develops_may_have_any_licence(
    project: dict[str, Any], entries: dict[str, Locked]
) -> None:
    assert (
        problems(
            project,
            entries,
            re.sub(r"(\| pytest \| \S+ \|)[^|]+\|", r"\1 GPL-3.0-only |", TABLE),
            {},
        )
        == []
    )


@pytest.mark.parametrize(
    ("licence", "name", "expected"),
    [
        ("MIT", "a", True),
        ("Apache-2.0 AND CNRI-Python", "a", True),
        ("Apache-2.0 AND Apache-2.0 WITH LLVM-exception", "a", True),
        ("GPL-2.0-only OR MIT", "a", True),
        ("GPL-2.0-only OR MIT AND LGPL-2.1-only", "a", False),
        # brackets are not read: too strict, never too lax
        (
            "(MIT OR GPL-2.0-only) AND BSD-3-Clause",
            "a",
            False,
        ),
        ("(MIT OR BSD-3-Clause) AND ISC", "a", True),
        ("", "a", False),
        (NVIDIA, "nvidia-cublas", True),
        (NVIDIA, "torch", False),
    ],
)
def test_an_expression_is_allowed_if_one_alternative_is(
    licence: str, name: str, expected: bool
) -> None:
    assert allowed(licence, name) == expected


@pytest.mark.parametrize(
    ("expression", "text", "classifiers", "expected"),
    [
        ("mit or apache-2.0", "GPL", (), "MIT OR Apache-2.0"),
        (None, "Apache 2.0", ("License :: OSI Approved :: BSD License",), "Apache-2.0"),
        (None, "MIT", (), "MIT"),
        (
            None,
            "Permission is hereby granted...",
            ("License :: OSI Approved :: MIT License",),
            "MIT",
        ),
        (
            None,
            None,
            ("License :: OSI Approved :: MIT License", "License :: OSI Approved :: BSD License"),
            "BSD AND MIT",
        ),
        (
            None,
            "GPLv3",
            ("License :: OSI Approved :: GNU General Public License v3 (GPLv3)",),
            UNKNOWN,
        ),
        (
            None,
            None,
            ("License :: OSI Approved :: MIT License", "License :: OSI Approved :: Of Tomorrow"),
            UNKNOWN,
        ),
        (None, None, ("License :: Other/Proprietary License",), UNKNOWN),
        (None, None, (), UNKNOWN),
    ],
)
def test_a_licence_is_read_from_what_the_metadata_declares(
    expression: str | None, text: str | None, classifiers: tuple[str, ...], expected: str
) -> None:
    declared = {"license_expression": expression, "license": text, "classifier": list(classifiers)}
    assert licence_of("a", {key: value for key, value in declared.items() if value}) == expected


def test_use_follows_what_leads_to_a_package(
    project: dict[str, Any], entries: dict[str, Locked]
) -> None:
    use = uses(project, entries)
    assert use["grpcio"] == use["cffi"] == use["psutil"] == RUN_TIME
    assert use["torch"] == use["nvidia-cublas"] == use["sympy"] == AGENT
    assert use["hatchling"] == use["pytest"] == use["mypy"] == DEVELOPMENT
    assert use["zeroconf"] == use["ifaddr"] == DISCOVERY
    extras = project["project"]["optional-dependencies"]
    assert set(extras) == {
        "agent",
        "coordinator",
        "discovery",
        "drawings",
        "gateway",
        "models",
        "rules",
        "top",
        "all",
    }, "a new extra needs a use in tools/inventory.py"


def test_rows_of_packages_that_are_not_installed_are_kept_and_the_others_asked_for(
    project: dict[str, Any], entries: dict[str, Locked], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def from_index(missing: Any) -> dict[str, str]:
        asked.extend(entry.name for entry in missing)
        return dict.fromkeys(asked, "MIT-0")

    monkeypatch.setattr(
        inventory, "installed", lambda: {"rich": Installed("rich", entries["rich"].version, "ISC")}
    )
    monkeypatch.setattr(inventory, "from_index", from_index)
    old = TABLE.replace(f"| triton | {entries['triton'].version} |", "| triton | 0.1 |")
    rows = {row.name: row for row in read_table(make_table(project, entries, old))}
    assert asked == ["triton"]
    assert rows["triton"].licence == "MIT-0" and rows["rich"].licence == "ISC"
    assert rows["nvidia-cublas"].licence == NVIDIA


def test_a_bill_of_materials_has_the_form_of_cyclonedx(
    project: dict[str, Any], entries: dict[str, Locked], here: dict[str, Installed]
) -> None:
    bill = json.loads(json.dumps(make_sbom(project, entries, here, NOW)))
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", bill["serialNumber"])
    assert bill["metadata"]["timestamp"] == "2026-11-23T12:00:00+00:00"
    own = bill["metadata"]["component"]
    assert (own["name"], own["version"], own["licenses"]) == (
        "edgeshard",
        project["project"]["version"],
        [{"expression": "Apache-2.0"}],
    )
    assert [component["name"] for component in bill["components"]] == sorted(here)
    for component in bill["components"]:
        entry = entries[component["name"]]
        assert re.fullmatch(r"pkg:pypi/[a-z0-9-]+@[\w.%]+", component["purl"])
        assert component["type"] == "library" and component["scope"] in {
            "required",
            "optional",
            "excluded",
        }
        (files,) = component["externalReferences"]
        assert files["type"] == "distribution"
        assert {f"sha256:{item['content']}" for item in files["hashes"]} == set(entry.hashes)
        assert {item["alg"] for item in files["hashes"]} == {"SHA-256"}
        (licence,) = component["licenses"]
        assert "expression" in licence or licence["license"]["name"]
    references = [component["bom-ref"] for component in [own, *bill["components"]]]
    assert len(set(references)) == len(references)
    graph = {row["ref"]: row["dependsOn"] for row in bill["dependencies"]}
    assert sorted(graph) == sorted(references)
    assert all(
        len(set(below)) == len(below) and set(below) <= set(references) for below in graph.values()
    )
    assert f"pkg:pypi/grpcio@{entries['grpcio'].version}" in graph[own["bom-ref"]]


def test_the_build_of_torch_is_named(project: dict[str, Any], entries: dict[str, Locked]) -> None:
    packages = {"torch": Installed("torch", f"{entries['torch'].version}+cpu", "MIT")}
    (component,) = make_sbom(project, entries, packages, NOW)["components"]
    assert component["version"].endswith("+cpu") and component["purl"].endswith("%2Bcpu")
    assert component["scope"] == "optional"


@pytest.mark.parametrize(
    "package", [Installed("attrs", "26.1.0", "MIT"), Installed("rich", "1.0", "MIT")]
)
def test_no_bill_is_made_of_what_is_not_locked(
    package: Installed, project: dict[str, Any], entries: dict[str, Locked]
) -> None:
    with pytest.raises(
        InventoryError, match=rf"{package.name} {re.escape(package.version)}\. Remove \.venv"
    ):
        make_sbom(project, entries, {package.name: package}, NOW)


def test_a_licence_that_no_expression_says_goes_in_by_its_name(
    project: dict[str, Any], entries: dict[str, Locked]
) -> None:
    packages = {"mpmath": Installed("mpmath", entries["mpmath"].version, "BSD")}
    (component,) = make_sbom(project, entries, packages, NOW)["components"]
    assert component["licenses"] == [{"license": {"name": "BSD"}}]
    packages = {"mpmath": Installed("mpmath", entries["mpmath"].version, UNKNOWN)}
    assert "licenses" not in make_sbom(project, entries, packages, NOW)["components"][0]
