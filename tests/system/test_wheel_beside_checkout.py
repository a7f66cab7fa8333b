"""A node of a wheel and one of a checkout on one site: the same bits, and the tokens of a single
node."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from edgeshard_agent.ops import sources

from edgeshard import Client
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.requests.generation import Token
from tests.support.site import Site
from tools.build_wheels import wheel_here

DEMO_MODEL = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"
SPEC = {"model": "fairy-tales", "source": "a", "dtype": "bfloat16"}
TOKENS = 40


@pytest.fixture(scope="module")
def forked_daemons() -> None:
    """Daemons are started without forking: a forked one has imported the checkout."""


async def tokens_of(client: Client, name: str) -> list[int]:
    stream = client.generate(
        name, "Once upon a time", max_new_tokens=TOKENS, ignore_eos=True, temperature=1.0, seed=7
    )
    return [event.token async for event in stream if isinstance(event, Token)]


async def test_a_deployment_over_both_says_what_one_box_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = wheel_here(sources.digest())
    if wheel is None:
        pytest.skip("there is no wheel of these sources for this machine: make wheels")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "wheel")
    (tmp_path / "site").mkdir()
    async with Site(tmp_path / "site", ("a",)) as site:
        client = site.client
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "wheel"))
        await site.cluster.start_agent("b")
        facts = {str(node.name): node.facts for node in await client.nodes()}
        assert (
            "kernels clang " in facts["b"].software and sources.kernel_set() in facts["a"].software
        )
        assert facts["a"].bits_fingerprint == facts["b"].bits_fingerprint != ""
        await client.add_model(DEMO_MODEL, "fairy-tales")
        await client.deploy(parse_spec({**SPEC, "name": "alone", "layers": "a=0:12"}))
        await client.deploy(parse_spec({**SPEC, "name": "both", "layers": "a=0:5,b=5:12"}))
        alone, both = await tokens_of(client, "alone"), await tokens_of(client, "both")
        assert alone == both and len(alone) == TOKENS
