"""A deployment with a draft, by real processes: the same answers, guesses that were right, and an
operator sees it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from edgeshard_agent.ops.native import native_available

from edgeshard.cli.render.views import deployment_fields
from edgeshard.domain.deployments.placement import Speculation
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.nodes.device import StageGuesses
from tests.support.load import answered
from tests.support.site import MakeSpec, Site

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        not native_available(), reason="torch's operators do not promise equal bits"
    ),
]

DRAFT = Path(__file__).resolve().parents[2] / "bench" / "draft_model"
ASKED: Sequence[dict[str, Any]] = [
    {"prompt": "Once upon a time there was a king who", "temperature": 0.0},
    {"prompt": "The old woman said to the fox", "temperature": 0.8, "seed": 5},
    {"prompt": "In a wood there lived a", "temperature": 0.6, "seed": 6, "repetition_penalty": 1.1},
]


async def answers(site: Site) -> list[list[tuple[int, float]]]:
    """Tokens and log-probabilities, one request after the other."""
    found = []
    for options in ASKED:
        stream = await answered(
            site.client, "tales", max_new_tokens=60, logprobs=True, ignore_eos=True, **options
        )
        found.append([(token.token, token.logprob) for token in stream.tokens])
    return found


@pytest.mark.parametrize("layers", ["a=0:12", "a=0:5,b=5:12"], ids=["one node", "two nodes"])
async def test_a_draft_changes_no_answer(site: Site, make_spec: MakeSpec, layers: str) -> None:
    if "small-tales" not in [model.name for model in await site.client.stored_models()]:
        await site.client.add_model(DRAFT, "small-tales")
    options = {"dtype": "bfloat16", "layers": layers, "concurrency": 1}
    await site.client.deploy(make_spec(speculation="off", **options))
    plain = await answers(site)
    await site.client.delete_deployment("tales")
    deployment = await site.client.deploy(make_spec(draft="auto", **options))
    try:
        assert deployment.spec.draft == "small-tales"
        draft = deployment.placement.draft
        assert deployment.placement.speculation is Speculation.GUESSES and draft is not None
        shown = deployment_fields(deployment)["Draft"]
        assert shown.startswith("small-tales on a, ") and "not used" not in shown
        assert await answers(site) == plain

        async def counted() -> StageGuesses | None:
            stages = (await site.client.deployment("tales")).stages
            return next(
                (stage.guesses for stage in stages if stage.guesses and stage.guesses.right > 20),
                None,
            )

        await site.until(counted)
    finally:
        await site.client.delete_deployment("tales")


async def test_a_draft_that_does_not_fit_is_refused(site: Site, make_spec: MakeSpec) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await site.client.deploy(make_spec(draft="fairy-tales"))
    assert (caught.value.field, caught.value.reason) == ("draft", "DRAFT_NOT_SMALLER")
