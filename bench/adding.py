"""How long it takes to add a model on the coordinator's machine, and over the wire, beside only hashing it.

    python -m bench.adding DIR [--rounds 3]

Each round hashes the checkpoint in this process, adds it by links, and adds it as another machine would, each to a new
store, and prints seconds, the ratio to hashing, payload per second and the disk that the store took.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

from edgeshard.client import models
from edgeshard.local.cluster import LocalCluster
from edgeshard.storage.checkpoint import build_manifest, open_checkpoint


def disk_bytes(directory: Path) -> int:
    """Of the files that no other directory has a link to."""
    found = [path.stat() for path in directory.rglob("*") if path.is_file()]
    return sum(status.st_blocks * 512 for status in found if status.st_nlink == 1)


async def added(directory: Path, scratch: Path, here: bool, secure: bool) -> tuple[float, int]:
    """Seconds, and bytes of disk."""
    with tempfile.TemporaryDirectory(dir=scratch) as state:
        cluster = LocalCluster(Path(state), (), secure=secure)
        await cluster.start_coordinator()
        try:
            async with cluster.client() as client:
                await client.stored_models()
                began = time.perf_counter()
                await models.add_model(client._connection.open(), directory, "model", here=here)
                return time.perf_counter() - began, disk_bytes(Path(state))
        finally:
            await cluster.stop()


async def run(directory: Path, scratch: Path, rounds: int) -> None:
    size = sum(path.stat().st_size for path in directory.iterdir())  # noqa: ASYNC240
    print(f"{size / 1e9:.2f} GB, {os.cpu_count()} cores")
    for _ in range(rounds):
        began = time.perf_counter()
        build_manifest("model", open_checkpoint(directory))
        hashing = time.perf_counter() - began
        print(f"hashing {hashing:.2f} s, {size / hashing / 1e6:.0f} MB/s")
        for what, here, secure in (("linked", True, True), ("sent, TLS", False, True), ("sent, plain", False, False)):
            seconds, disk = await added(directory, scratch, here, secure)
            print(
                f"  {what}: {seconds:.2f} s, {seconds / hashing:.2f} of hashing, "
                f"{size / seconds / 1e6:.0f} MB/s, {disk / size:.2f} of its bytes on the disk"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", type=Path, default=Path("/tmp"), help="where the stores are made")
    arguments = parser.parse_args()
    asyncio.run(run(arguments.directory.resolve(), arguments.scratch, arguments.rounds))


if __name__ == "__main__":
    main()
