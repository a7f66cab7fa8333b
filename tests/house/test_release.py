"""The released files: archives whose bytes do not vary, notes, checksums, and a package of a tiny
wheel folder."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import stat
import subprocess
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from edgeshard_agent.settings import AgentSettings
from edgeshard_coordinator.settings import CoordinatorSettings

from edgeshard.process.config import load_settings
from tools.lock import LOCK, read_lock
from tools.release import release
from tools.release.archives import (
    CHECKSUMS,
    Entry,
    ReleaseError,
    checksums,
    version,
    write_ar,
    write_tar,
)
from tools.release.deb import make_deb
from tools.release.environment import lay_out
from tools.release.image import make_image
from tools.release.release import make_release, notes
from tools.release.wheel_folder import (
    Chosen,
    Target,
    own_wheel,
    parse_target,
    requirements_of,
    requirements_text,
)

ROOT = Path(__file__).resolve().parents[2]
TARGET = Target("x86_64", "3.11", "cpu")
EPOCH = 1_800_000_000
CHANGES = (
    "# Changelog\n\n## [Unreleased]\n\n- Next.\n\n## [0.2.0] - 2027-01-01\n\n- This.\n\n## "
    "[0.1.0]\n\n- Old.\n"
)


def write_wheel(folder: Path, name: str, files: dict[str, str], number: str = "1.0") -> Path:
    """A wheel of these files, as py3-none-any."""
    path = folder / f"{name}-{number}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.4\nName: {name}\nVersion: {number}\nLicense-Expression: MIT\n"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in (files | {f"{name}-{number}.dist-info/METADATA": metadata}).items():
            archive.writestr(inside, text)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A wheel folder of three small wheels."""
    made = tmp_path / "folder"
    made.mkdir()
    points = (
        "[console_scripts]\nedgectl = edgeshard.cli.main:main\nedgeshard-agent = "
        "edgeshard_agent.entry:main\n"
    )
    own = {
        "edgeshard/cli/main.py": "pass\n",
        f"edgeshard-{version()}.dist-info/entry_points.txt": points,
    }
    write_wheel(made, "edgeshard", own, version())
    entries = read_lock(LOCK.read_text())
    write_wheel(
        made,
        "structlog",
        {"structlog.py": "x = 1\n", "structlog-1.data/data/share/man/a.1": "manual"},
        entries["structlog"].version,
    )
    write_wheel(made, "pip", {"pip/__main__.py": "pass\n"}, entries["pip"].version)
    (made / "requirements.txt").write_text("structlog\n")
    return made


def test_a_tar_does_not_tell_when_and_by_whom_it_was_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    made = []
    for moment, mode in ((1_000_000, 0o600), (2_000_000, 0o644)):
        file.write_text("text")
        file.chmod(mode)
        os.utime(file, (moment, moment))
        entries = [Entry("b/c", file), Entry("a", link="b/c"), Entry("b/a" * 60, b"long")]
        out = io.BytesIO()
        write_tar(out, entries if moment == 1_000_000 else reversed(entries), EPOCH, "./")
        made.append(out.getvalue())
    assert made[0] == made[1]
    with tarfile.open(fileobj=io.BytesIO(made[0])) as archive:
        members = archive.getmembers()
    assert [member.name for member in members][:3] == ["./a", "./b", "./b/a" + "b"]
    assert {(member.uid, member.gid, member.uname, member.mtime) for member in members} == {
        (0, 0, "", EPOCH)
    }
    with pytest.raises(ReleaseError, match="comes twice"):
        write_tar(io.BytesIO(), [Entry("a", b""), Entry("a", b"")], EPOCH)


def test_notes_are_the_versions_section() -> None:
    assert notes(CHANGES, "0.2.0", draft=False) == "- This.\n"
    assert notes(CHANGES, "0.1.0", draft=True) == "- Old.\n"
    assert notes(CHANGES, "0.3.0", draft=True) == "- Next.\n"
    for absent in ("0.3.0", "0.20", "0.2"):
        with pytest.raises(ReleaseError, match=r"CHANGELOG\.md says nothing about"):
            notes(CHANGES, absent, draft=False)


def test_sha256sum_reads_the_checksums(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("b")
    (tmp_path / "a").write_text("a")
    (tmp_path / CHECKSUMS).write_text(checksums(tmp_path))
    (tmp_path / CHECKSUMS).write_text(checksums(tmp_path))  # not of itself
    check = ("sha256sum", "--check", "--strict", CHECKSUMS)
    done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "a: OK\nb: OK\n"
    (tmp_path / "b").write_text("c")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True).returncode == 1


def test_targets() -> None:
    assert parse_target("aarch64-py313-cuda") == Target("aarch64", "3.13", "cuda")
    assert parse_target(TARGET.name) == TARGET
    for wrong in ("x86_64-py311", "x86_64-py310-cpu", "arm64-py311-cpu", "x86_64-py311-cpu "):
        with pytest.raises(ReleaseError, match=r"must be PLATFORM-PYTHON-ACCELERATOR"):
            parse_target(wrong)
    assert (
        TARGET.platforms[0] == "manylinux_2_31_x86_64"
        and "manylinux2014_x86_64" in TARGET.platforms
    )


def test_own_wheel_is_of_the_platform_and_the_version(tmp_path: Path) -> None:
    fitting = tmp_path / f"edgeshard-{version()}-py3-none-manylinux_2_28_x86_64.whl"
    assert own_wheel(TARGET, fitting) == fitting
    for other in (
        f"edgeshard-{version()}-py3-none-manylinux_2_28_aarch64.whl",
        f"edgeshard-{version()}-py3-none-manylinux_2_36_x86_64.whl",
        "edgeshard-9.9-py3-none-manylinux_2_28_x86_64.whl",
    ):
        with pytest.raises(ReleaseError, match="has 0 wheels of EdgeShard"):
            own_wheel(TARGET, tmp_path / other)


def test_requirements_hold_for_the_target_and_not_for_this_machine() -> None:
    metadata = [
        "always",
        "arm; platform_machine == 'aarch64'",
        "older; python_version < '3.13'",
        "windows; sys_platform == 'win32'",
        "extra-one; extra == 'one'",
    ]
    arm = Target("aarch64", "3.13", "cuda")
    assert [wanted.name for wanted in requirements_of(metadata, (), TARGET)] == ["always", "older"]
    assert [wanted.name for wanted in requirements_of(metadata, ("one",), arm)] == [
        "always",
        "arm",
        "extra-one",
    ]


def test_requirements_have_one_hash_each(tmp_path: Path) -> None:
    wheel = tmp_path / "edgeshard-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    text = requirements_text(
        wheel, [Chosen("torch", "2.13.0+cpu", "ab", ()), Chosen("anyio", "4.0", "cd", ())]
    )
    assert text.splitlines()[0::2] == [
        "anyio==4.0 \\",
        f"edgeshard[all]=={version()} \\",
        "torch==2.13.0+cpu \\",
    ]
    assert text.splitlines()[3] == f"    --hash=sha256:{hashlib.sha256(b'wheel').hexdigest()}"


def test_an_environment_starts_its_programs(folder: Path, tmp_path: Path) -> None:
    """Prepared for its place, here an existing directory: its Python finds its packages, and no
    pip."""
    home = tmp_path / "place"
    entries = lay_out(folder, TARGET, str(home), tmp_path / "scratch")
    with (tmp_path / "tar").open("wb") as out:
        write_tar(out, entries, EPOCH)
    with tarfile.open(tmp_path / "tar") as archive:
        # Not the directories above it: root would give /tmp the mode that they have in a package.
        inner = [member for member in archive if Path("/", member.name).is_relative_to(home)]
        archive.extractall("/", inner, filter="tar")
    assert stat.S_IMODE((home / "bin" / "edgectl").stat().st_mode) == 0o755
    assert (home / "bin" / "edgectl").read_text().startswith(f"#!{home}/bin/python\nimport sys\n")
    inside = home / "lib" / "python3.11" / "site-packages"
    assert (inside / "structlog.py").exists() and not (inside / "pip").exists()
    assert not list(home.rglob("*.1")), "manuals are left out"
    assert (home / "bin" / "python").readlink() == Path("/usr/bin/python3.11")


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg here")
def test_dpkg_reads_the_package(folder: Path, tmp_path: Path) -> None:
    made = make_deb(folder, TARGET, tmp_path)
    asked = ("Package", "Architecture", "Depends")
    done = subprocess.run(
        ["dpkg-deb", "--field", made, *asked], capture_output=True, text=True, check=True
    )
    assert done.stdout == (
        "Package: edgeshard\nArchitecture: amd64\n"
        "Depends: libc6 (>= 2.31), libstdc++6, passwd, python3 (>= 3.11), python3 (<< 3.12)\n"
    )
    listed = subprocess.run(
        ["dpkg-deb", "--contents", made], capture_output=True, text=True, check=True
    ).stdout
    assert "./usr/bin/edgectl -> /opt/edgeshard/deb/bin/edgectl\n" in listed
    assert "./usr/lib/systemd/system/edgeshard-agent.service\n" in listed
    units = subprocess.run(
        ["dpkg-deb", "--fsys-tarfile", made], capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(units)) as archive:
        unit = archive.extractfile("./usr/lib/systemd/system/edgeshard-agent.service")
        assert (
            unit is not None and b"ExecStart=/opt/edgeshard/deb/bin/edgeshard-agent " in unit.read()
        )


def test_an_image_names_all_of_its_blobs(folder: Path, tmp_path: Path) -> None:
    base = tmp_path / "root.tar"
    with base.open("wb") as out:
        write_tar(out, [Entry("usr/bin/python3.11", b"")], EPOCH)
    made = make_image(folder, TARGET, base, tmp_path)
    with tarfile.open(made) as archive:
        contents = {
            member.name: file.read()
            for member in archive
            if (file := archive.extractfile(member)) is not None
        }
    blobs = {
        name.rpartition("/")[2]: data
        for name, data in contents.items()
        if name.startswith("blobs/")
    }
    assert all(hashlib.sha256(data).hexdigest() == name for name, data in blobs.items())

    def blob(descriptor: dict[str, Any]) -> bytes:
        data = blobs[descriptor["digest"].removeprefix("sha256:")]
        assert len(data) == descriptor["size"]
        return data

    manifest = json.loads(blob(json.loads(contents["index.json"])["manifests"][0]))
    config = json.loads(blob(manifest["config"]))
    with tarfile.open(fileobj=io.BytesIO(blob(manifest["layers"][1])), mode="r:gz") as layer:
        state = layer.getmember("var/lib/edgeshard")
        assert state.isdir() and state.uid == 10001
        assert state.mode == 0o700
    assert blob(manifest["layers"][0]) == base.read_bytes()
    assert config["rootfs"]["diff_ids"][0] == manifest["layers"][0]["digest"]
    assert config["architecture"] == "amd64" and config["config"]["User"] == "10001:10001"


@pytest.mark.long
def test_two_releases_of_one_commit_are_the_same(folder: Path, tmp_path: Path) -> None:
    made = []
    for turn in ("one", "two"):
        make_release([(TARGET, folder)], "- This.\n", tmp_path / turn)
        made.append((tmp_path / turn / CHECKSUMS).read_text())
        for path in folder.iterdir():  # fetched once more
            os.utime(path, (time.time() + 100, time.time() + 100))
    assert made[0] == made[1]
    names = [line.split()[1] for line in made[0].splitlines()]
    stem = f"edgeshard-{version()}"
    assert names == sorted(
        [
            "NOTES.md",
            f"{stem}-{TARGET.name}.cdx.json",
            f"{stem}-{TARGET.name}.tar",
            f"{stem}-py3-none-any.whl",
            f"edgeshard_{version()}+py311_amd64.deb",
        ]
    )
    bill = json.loads((tmp_path / "one" / f"{stem}-{TARGET.name}.cdx.json").read_text())
    assert {item["name"] for item in bill["components"]} == {"structlog", "pip"}


def test_a_dirty_tree_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = (
        ("init", "-q"),
        ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "-", "--allow-empty"),
    )
    for command in commands:
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    release.check_clean()
    (tmp_path / "new.py").write_text("")
    with pytest.raises(ReleaseError, match=r"1 files are not as committed, such as new.py"):
        release.check_clean()


def test_ar_members_begin_at_even_places(tmp_path: Path) -> None:
    write_ar(tmp_path / "ar", [("odd", b"abc"), ("even", b"abcd")], EPOCH)
    data = (tmp_path / "ar").read_bytes()
    assert data.startswith(
        b"!<arch>\nodd             1800000000  0     0     100644  3         `\nabc\neven "
    )
    assert len(data) == 8 + 2 * 60 + 4 + 4


def test_daemons_take_the_options_of_files_for_containers() -> None:
    commands: list[list[str]] = []
    compose = yaml.safe_load((ROOT / "deploy/containers/compose.yaml").read_text())
    commands += [service["command"] for service in compose["services"].values()]
    for name in ("coordinator", "agent"):
        for document in yaml.safe_load_all(
            (ROOT / f"deploy/k3s/{name}.yaml")
            .read_text()
            .replace("NODE", "box")
            .replace("$(ADDRESS)", "10.0.0.5")
        ):
            pod = document["spec"].get("template")
            commands += (
                [container["command"] for container in pod["spec"]["containers"]] if pod else []
            )
    assert len(commands) == 5
    for program, *options in commands:
        kind = AgentSettings if program == "edgeshard-agent" else CoordinatorSettings
        settings = load_settings(kind, program, options)
        assert settings.listen in ("0.0.0.0:7600", "0.0.0.0:7610") and settings.tls_key == Path(
            "/pki/key.pem"
        )
