"""The line that a site prints, on a box that has Python and nothing of EdgeShard, against a real
coordinator."""

from __future__ import annotations

import asyncio
import os
import platform
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from edgeshard.client.joining import enrol, invitation_to_text, line_without_edgeshard
from edgeshard.domain.identity import JoinToken, Role
from edgeshard.identity.authority import new_key
from tests.installing.boxes import INSTALLER, Box, make_folder, tree
from tests.support.membership import SecureSite

pytestmark = [pytest.mark.timing, pytest.mark.timeout(600)]

PYTHON = f"{sys.version_info[0]}{sys.version_info[1]}"
OTHER = "aarch64" if platform.machine() == "x86_64" else "x86_64"
HERE = f"{platform.machine()}-py{PYTHON}-cpu"


@asynccontextmanager
async def offering(
    directory: Path, folder: str = HERE
) -> AsyncIterator[tuple[SecureSite, JoinToken]]:
    wheels = directory / "wheels"
    make_folder(wheels / folder, "0.1.0", padding=1 << 20)
    async with SecureSite(directory, "--wheels", str(wheels)) as mill, mill.client_of() as admin:
        yield mill, await admin.create_token(Role.AGENT, "b")


async def typed(box: Box, line: str) -> subprocess.CompletedProcess[str]:
    user = ["unshare", "--user", "--map-user=1000"] if os.geteuid() == 0 else []
    command = [*user, "sh", "-c", line]
    return await asyncio.to_thread(
        subprocess.run,
        command,
        env=box.environment,
        capture_output=True,
        text=True,
        timeout=250,
        cwd=box.directory,
    )


def cache_of(box: Box) -> Path:
    # In its namespace the user is no root.
    return box.home / ".cache" / "edgeshard" / "wheels"


async def test_the_line_installs_and_joins(tmp_path: Path) -> None:
    async with offering(tmp_path) as (_, token):
        box = Box(tmp_path)
        result = await typed(box, f"{line_without_edgeshard(token)} --memory 2GiB")
        assert result.returncode == 0, result.stdout + result.stderr
        assert (
            f"joins by {invitation_to_text(token.invitation)} with --memory 2GiB" in result.stdout
        )
        assert box.version() == "0.1.0"
        assert (
            box.prefix / "current" / "install.sh"
        ).read_bytes() == INSTALLER.read_bytes()  # it can be removed
        assert not cache_of(box).exists()


async def test_a_download_goes_on_where_it_ended_and_is_checked(tmp_path: Path) -> None:
    async with offering(tmp_path) as (_, token):
        box, wheel = Box(tmp_path), "edgeshard-0.1.0-py3-none-any.whl"
        cache_of(box).mkdir(parents=True, mode=0o700)
        content = (tmp_path / "wheels" / HERE / wheel).read_bytes()
        (cache_of(box) / f"{wheel}.part").write_bytes(content[: len(content) // 2])
        (cache_of(box) / "install.sh").write_text("echo this is another; exit 1\n")
        (cache_of(box) / "pip-1-py3-none-any.whl").write_text("of another version")
        result = await typed(box, line_without_edgeshard(token))
        assert result.returncode == 0, result.stdout + result.stderr
        assert box.version() == "0.1.0"


async def test_nothing_is_run_that_the_line_does_not_name(tmp_path: Path) -> None:
    async with offering(tmp_path) as (_, token):
        box = Box(tmp_path)
        result = await typed(box, line_without_edgeshard(replace(token, bootstrap_sha256="0" * 64)))
        assert result.returncode == 1
        assert "not what the site offered" in result.stderr
        assert tree(box.home) == []


async def test_another_site_is_not_shown_the_token(tmp_path: Path) -> None:
    async with offering(tmp_path) as (mill, token):
        box = Box(tmp_path)
        (tmp_path / "other").mkdir()
        async with SecureSite(tmp_path / "other") as other, other.client_of() as admin:
            stranger = await admin.create_token(Role.AGENT, "b")
        result = await typed(
            box, line_without_edgeshard(replace(token, authorities=stranger.authorities))
        )
        assert result.returncode == 1
        assert "is not the site of the token" in result.stderr
        async with mill.client_of() as admin:
            assert not [entry for entry in await admin.audit() if entry.what == "ListWheels"]
        assert tree(box.home) == []


async def test_a_box_without_wheels_hears_so_before_any_download(tmp_path: Path) -> None:
    async with offering(tmp_path, f"{OTHER}-py{PYTHON}-cpu") as (_, token):
        box = Box(tmp_path)
        result = await typed(box, line_without_edgeshard(token))
        assert result.returncode == 1
        assert (
            f"this site has wheels for {OTHER} with Python 3.{PYTHON[1:]}, but this machine is"
            in result.stderr
        )
        assert tree(box.home) == []


async def test_a_used_token_fetches_nothing(tmp_path: Path) -> None:
    async with offering(tmp_path) as (_, token):
        await enrol(token.invitation, new_key())
        box = Box(tmp_path)
        result = await typed(box, line_without_edgeshard(token))
        assert result.returncode == 1
        assert "was used already" in result.stderr
        assert tree(box.home) == []
