"""An untouched site measures its links: three real nodes, every direction, without a command."""

from __future__ import annotations

import asyncio
from itertools import permutations
from pathlib import Path

from tests.support.site import Site


async def test_links_are_measured_by_themselves(tmp_path: Path) -> None:
    async with Site(tmp_path) as running:
        async with asyncio.timeout(120):
            while True:
                site = await running.client.site()
                if len(site.links) == 6:
                    break
                await asyncio.sleep(0.1)
        ids = {node.node_id for node in site.nodes}
        assert {(stored.link.sender, stored.link.receiver) for stored in site.links} == set(
            permutations(ids, 2)
        )
        assert all(stored.link.profile.bandwidth_bps > 1e6 for stored in site.links)
