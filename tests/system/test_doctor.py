"""edgectl doctor on a real site, one of whose nodes has everything that is looked for."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bench.cgroups import part_of_a_core
from edgeshard.domain.control.commands import ProfileReport
from edgeshard.domain.identity import Principal, Role
from edgeshard.domain.nodes.profile import LinkProfile, MeasuredLink
from edgeshard.local.child_daemons import ChildDaemon
from edgeshard.proto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.tls_files import tls_files
from edgeshard.wire.control import report_to_wire
from tests.house.test_documents import free_port
from tests.support.ailing_agent import GROUP
from tests.support.identities import tls_options
from tests.support.site import Site

pytestmark = pytest.mark.asyncio(loop_scope="module")
ROOT = Path(__file__).resolve().parents[2]
OF_THE_NODE = {
    "clock-skew",
    "port-closed",
    "disk-slow",
    "disk-full",
    "memory-low",
    "swap-in-use",
    "cuda-unused",
    "version-skew",
    "huge-pages-off",
    "cpu-quota",
    "kernels-missing",
    "certificate-ends",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """With certificates; node a is sound, and b is not. There is no listener at the address that b
    reports."""
    directory = tmp_path_factory.mktemp("ailing")
    with part_of_a_core("doctor", 0.5) as group, pytest.MonkeyPatch.context() as environment:
        paths = os.pathsep.join(str(ROOT / part) for part in ("", "agent", "coordinator"))
        environment.setenv("PYTHONPATH", paths)
        if group is not None:
            environment.setenv(GROUP, str(group))
        async with Site(directory, ["a"], secure=True) as site:
            node = site.agents["b"] = ChildDaemon(
                "b",
                "tests.support.ailing_agent",
                [
                    *(
                        "--coordinator",
                        site.address,
                        "--name",
                        "b",
                        "--listen",
                        "127.0.0.1:0",
                        "--threads",
                        "1",
                    ),
                    *(
                        "--state-dir",
                        str(directory / "b"),
                        "--advertise",
                        f"127.0.0.1:{free_port(())}",
                    ),
                    *site.cluster._identity(Principal("here", Role.AGENT, "b")),
                ],
                directory,
            )
            await node.start()
            await node.wait_ready(60)
            await site.until(lambda: said(site.client))
            yield site


async def said(client: Any) -> bool:
    """Whether b has reported the speed of its disk, which it measures last."""
    return all(
        node.condition and node.condition.disk_write_bps
        for node in await client.nodes()
        if node.name == "b"
    )


async def doctor(*arguments: str) -> tuple[int | None, Any]:
    """Its exit code and its findings."""
    program = [sys.executable, "-m", "edgeshard.cli.main", "doctor", "-o", "json", *arguments]
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("EDGESHARD__")
    }
    process = await asyncio.create_subprocess_exec(
        *program, stdout=asyncio.subprocess.PIPE, env=environment
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, json.loads(output)


async def test_each_fault_of_a_node_is_found_by_its_name_and_none_of_a_sound_one(
    site: Site,
) -> None:
    admin = tls_options(tls_files(site.cluster.directory / "pki" / "operator-admin"))
    status, findings = await doctor("--coordinator", site.cluster.address, *admin)
    assert status == 1
    at = {where: {f["fault"] for f in findings if f["where"] == where} for where in ("a", "b")}
    assert at["b"] == OF_THE_NODE
    assert at["a"] <= {"swap-in-use", "disk-full", "memory-low", "disk-slow", "cpu-quota"}, (
        "faults of this machine"
    )
    assert all(finding["means"] and finding["do"] and finding["found"] for finding in findings)


async def test_a_slow_link_is_found(site: Site) -> None:
    """As the node at its beginning reports it."""
    admin = tls_options(tls_files(site.cluster.directory / "pki" / "operator-admin"))
    ids = {node.name: node.node_id for node in await site.client.nodes()}
    slow = MeasuredLink(ids["a"], ids["b"], LinkProfile(0.05, 5e6, 0.01, 9, 1 << 20))  # type: ignore[index]
    channel = open_channel(
        site.cluster.address, tls_files(site.cluster.directory / "pki" / "agent-a"), "coordinator"
    )
    report = report_to_wire(ProfileReport(ids["a"], links=(slow,)))  # type: ignore[index]
    await CoordinatorServiceStub(channel).ReportProfile(report, timeout=30)
    await channel.close()
    _, findings = await doctor("--coordinator", site.cluster.address, *admin)
    assert [finding["where"] for finding in findings if finding["fault"] == "link-slow"] == [
        "a -> b"
    ]


async def test_a_key_that_others_can_read_is_found(site: Site) -> None:
    files = tls_files(site.cluster.directory / "pki" / "operator-admin")
    files.key.chmod(0o644)
    try:
        status, findings = await doctor("--coordinator", site.cluster.address, *tls_options(files))
    finally:
        files.key.chmod(0o600)
    assert status == 1
    (found,) = [finding for finding in findings if finding["fault"] == "key-readable"]
    assert str(files.key) in found["found"] and "644" in found["found"]


async def test_a_coordinator_that_is_not_there_is_found(site: Site) -> None:
    _, findings = await doctor("--coordinator", f"127.0.0.1:{free_port(())}", "--plaintext")
    assert {"coordinator-unreachable", "port-closed"} <= {finding["fault"] for finding in findings}
