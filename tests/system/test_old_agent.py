"""An agent of an older version serves in the site of a coordinator of this one: the protocol is the
same."""

from __future__ import annotations

import asyncio
import io
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from edgeshard import Client
from edgeshard.local.child_daemons import ChildDaemon
from tests.support.site import MakeSpec, Site

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / "edgeshard" / "demo_model"
OLD = "00251541"
"""The last commit before the modules of library and daemons moved into rooms."""
KERNELS = "agent/edgeshard_agent/ops/libedgeshard_ops.so"


@pytest.fixture(scope="module")
def forked() -> None:
    """Start every daemon without forking: a forked one has imported the modules of this tree."""


@pytest.fixture(scope="module")
def old_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack library and agent of the older version, with the kernels of this one, whose sources
    are the same."""
    archived = subprocess.run(
        ["git", "-C", str(ROOT), "archive", OLD, "edgeshard", "agent"],
        capture_output=True,
        check=False,
    )
    if archived.returncode:
        pytest.skip(f"the clone has no commit {OLD}: {archived.stderr.decode().strip()}")
    directory = tmp_path_factory.mktemp("old")
    with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as archive:
        archive.extractall(directory, filter="data")
    if (ROOT / KERNELS).exists():
        shutil.copy(ROOT / KERNELS, directory / KERNELS)
    return directory


@pytest.mark.long
@pytest.mark.asyncio
async def test_an_old_agent_and_a_new_one_share_a_deployment(
    old_tree: Path, tmp_path: Path, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Site(tmp_path, ["a"], models={"fairy-tales": DEMO_MODEL}) as site:
        client = site.client
        state = ("--state-dir", str(tmp_path / "old"))
        old = ChildDaemon(
            "old",
            "edgeshard_agent",
            [
                "--coordinator",
                site.address,
                "--name",
                "old",
                "--plaintext",
                "--threads",
                "1",
                *state,
            ],
            tmp_path,
            listen={"--listen": "127.0.0.1:0"},
        )
        monkeypatch.setenv("PYTHONPATH", f"{old_tree}:{old_tree / 'agent'}")
        try:
            await old.start()
            await old.wait_ready(60)
            assert (
                str(old_tree) in Path(f"/proc/{old.pid}/maps").read_text()
                or not (ROOT / KERNELS).exists()
            )
            await client.deploy(make_spec(name="alone", layers="a=0:12"))
            expected = await _tokens(client, "alone")
            for name, layers in (("old-last", "a=0:5,old=5:12"), ("old-first", "old=0:5,a=5:12")):
                await client.deploy(
                    make_spec(name=name, layers=layers, source=layers.partition("=")[0])
                )
                assert await _tokens(client, name) == expected
                await client.delete_deployment(name)
        finally:
            await old.stop()


async def _tokens(client: Client, deployment: str) -> tuple[int, ...]:
    async with asyncio.timeout(60):
        return (
            await client.complete(
                deployment, "Once upon a time", max_new_tokens=48, ignore_eos=True
            )
        ).token_ids
