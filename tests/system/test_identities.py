"""Agents that were killed, and agents with a copy of another's state directory."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from edgeshard.domain.identity import Principal, Role
from edgeshard.local.child_daemons import ChildDaemon
from edgeshard.local.cluster import SITE
from tests.support.forms import in_form
from tests.support.site import Site

KILLS = in_form(3, 10)


def log_of(directory: Path, name: str) -> str:
    return (directory / f"{name}.log").read_text(encoding="utf-8")


@pytest.mark.timing
async def test_two_agents_with_one_identity_are_named(tmp_path: Path) -> None:
    async with Site(tmp_path, ["pi"], secure=True, agent_arguments=("--memory", "100MiB")) as site:
        cluster, client = site.cluster, site.client
        shutil.copytree(tmp_path / "pi", tmp_path / "copy")
        (before,) = await client.nodes()
        arguments = [
            "--coordinator",
            cluster.address,
            "--name",
            "pi",
            "--listen",
            "127.0.0.1:0",
            "--threads",
            "1",
        ]
        arguments += [
            "--state-dir",
            str(tmp_path / "copy"),
            *cluster._identity(Principal(SITE, Role.AGENT, "pi")),
        ]
        twin = ChildDaemon("twin", "edgeshard_agent", arguments, tmp_path)
        try:
            await twin.start()

            async def is_named() -> bool:
                (node,) = await client.nodes()
                return bool(node.twin_address)

            await site.until(is_named)
            await asyncio.sleep(2.0)
            (node,) = await client.nodes()
            assert node.connected and node.address == before.address, (
                "the first agent keeps its place"
            )
            assert log_of(tmp_path, "coordinator").count('"identity_in_use"') == 1
            assert log_of(tmp_path, "twin").count('"coordinator_lost"') == 1
            await cluster.agents["pi"].kill()
            await twin.wait_ready(60.0)
        finally:
            await twin.stop()


@pytest.mark.timing
async def test_an_agent_that_was_killed_returns_at_once(tmp_path: Path) -> None:
    async with Site(tmp_path, ["pi"], agent_arguments=("--memory", "100MiB")) as site:
        for _ in range(KILLS):
            await site.agents["pi"].kill()
            await site.cluster.start_agent("pi")
    assert "identity_in_use" not in log_of(tmp_path, "coordinator")
    assert "coordinator_lost" not in log_of(tmp_path, "pi")
