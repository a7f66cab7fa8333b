"""SIGHUP to daemons of a site: right settings are applied without a restart, and wrong ones change
nothing."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from edgeshard.client import Client
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.errors import ResourceExhaustedError
from edgeshard.local.child_daemons import ChildDaemon
from tests.support.site import Site
from tests.system.conftest import DEMO_MODEL

WAIT_S = 30.0


async def hung_up(daemon: ChildDaemon, says: str, times: int) -> str:
    """The newest line of its log about the outcome."""
    daemon.send_signal(signal.SIGHUP)
    async with asyncio.timeout(WAIT_S):
        while True:
            lines = [line for line in daemon.log_path.read_text().splitlines() if says in line]
            if len(lines) == times:
                return lines[-1]
            await asyncio.sleep(0.05)


async def words(client: Client) -> int:
    return len(
        (await client.complete("tales", "Once", max_new_tokens=4, ignore_eos=True)).token_ids
    )


@pytest.mark.asyncio
async def test_a_site_takes_up_what_needs_no_restart(tmp_path: Path) -> None:
    quotas, agent = tmp_path / "quotas.toml", tmp_path / "agent.toml"
    quotas.write_text("")
    agent.write_text("[agent]\nthreads = 1\n")
    site = Site(
        tmp_path,
        ["a"],
        models={"fairy-tales": DEMO_MODEL},
        agent_arguments=["--config", str(agent)],
        coordinator_arguments=["--quotas", str(quotas)],
    )
    async with site:
        client = site.client
        await client.deploy(
            parse_spec({"name": "tales", "model": "fairy-tales", "layers": "a=0:12"}), timeout_s=60
        )
        assert await words(client) == 4
        quotas.write_text('["*"]\ntokens_per_minute = 1\n')
        await hung_up(site.coordinator, "settings_reloaded", 1)
        assert await words(client) == 4, "a request is refused once its identity is in debt"
        with pytest.raises(ResourceExhaustedError):
            await words(client)
        quotas.write_text('["*"]\ntokens_a_minute = 1\n')
        assert "tokens_a_minute" in await hung_up(site.coordinator, "settings_not_reloaded", 1)
        with pytest.raises(ResourceExhaustedError):
            await words(client)
        quotas.write_text("")
        await hung_up(site.coordinator, "settings_reloaded", 2)
        assert await words(client) == 4
        agent.write_text('[agent]\nidle_spin_s = 0.5\ncache_limit = "1GiB"\n')
        said = await hung_up(site.agents["a"], "settings_reloaded", 1)
        assert "cache_limit" in said.partition("need_a_restart")[0]
        assert "idle_spin_s" in said.partition("need_a_restart")[2]
        assert await words(client) == 4
