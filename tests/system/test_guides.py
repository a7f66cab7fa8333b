"""Guided answers and prompt log-probabilities over real nodes: right, and the same when a node is
lost in the middle."""

from __future__ import annotations

import asyncio
import json
import re
import statistics
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from edgeshard.client import GenerateOptions, Guide, GuideKind
from edgeshard.domain.deployments.deployment import DeploymentPhase, parse_spec
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.requests.generation import (
    Finished,
    FinishReason,
    PromptLogprobs,
    Started,
    Token,
)
from tests.support.load import Stream, answered
from tests.support.site import Site

pytestmark = pytest.mark.asyncio(loop_scope="module")
DEMO_MODEL = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"
PROMPT = "Once upon a time there was a king who had three sons"
SPEC = {
    "name": "tales",
    "model": "tales",
    "source": "a",
    "dtype": "float32",
    "layers": "a=0:4,b=4:9,c=9:12",
    "concurrency": 4,
    "prefix_cache": True,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """Three stages on four nodes, and the whole model on the fourth."""
    directory = tmp_path_factory.mktemp("guides")
    async with Site(directory, ("a", "b", "c", "d"), models={"tales": DEMO_MODEL}) as site:
        for spec in (SPEC, {**SPEC, "name": "whole", "source": "d", "layers": "d=0:12"}):
            # A node that a busy machine let stand still for 10 s is away until it is heard again.
            await site.until(lambda: _all_placeable(site), 180)
            await site.client.deploy(parse_spec(spec))
        yield site


def schema(value: dict[str, Any]) -> Guide:
    return Guide(GuideKind.JSON_SCHEMA, json.dumps(value))


PERSON = schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 199},
            "kind": {"enum": ["fox", "king", "witch"]},
            "friends": {
                "type": "array",
                "items": {"type": "string", "maxLength": 6},
                "minItems": 1,
                "maxItems": 3,
            },
        },
        "required": ["name", "age", "kind", "friends"],
        "additionalProperties": False,
    }
)


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "kind", "friends"]
        and 1 <= len(value["name"]) <= 12
        and isinstance(value["age"], int)
        and 0 <= value["age"] <= 199
        and value["kind"] in ("fox", "king", "witch")
        and 1 <= len(value["friends"]) <= 3
        and all(len(friend) <= 6 for friend in value["friends"])
    )


GUIDES: dict[str, tuple[Guide, Any]] = {
    "object": (PERSON, is_person),
    "either": (
        schema({"anyOf": [{"type": "boolean"}, {"const": "neither"}, {"type": "null"}]}),
        lambda text: json.loads(text) in (True, False, "neither", None),
    ),
    "pattern": (
        schema({"type": "string", "pattern": "^[a-z]{2,8}-[0-9]{2}$"}),
        lambda text: re.fullmatch("[a-z]{2,8}-[0-9]{2}", json.loads(text)),
    ),
    "regex": (
        Guide(GuideKind.REGEX, "(He|She) was (very )?[a-z]{3,8}\\."),
        re.compile("(He|She) was .*").fullmatch,
    ),
    "grammar": (
        Guide(GuideKind.GRAMMAR, 'start: sum\nsum: term ("+" term){1,3}\nterm: /[1-9][0-9]?/'),
        lambda text: all(0 < int(term) < 100 for term in text.split("+")),
    ),
}


@pytest.mark.parametrize("name", GUIDES)
async def test_an_answer_is_what_its_guide_says_wherever_the_last_stage_is(
    site: Site, name: str
) -> None:
    guide, is_right = GUIDES[name]
    penalties: GenerateOptions = {
        "presence_penalty": 0.6,
        "frequency_penalty": 0.3,
        "logit_bias": {300: -100.0, 301: 3.0},
    }
    sampled: tuple[GenerateOptions, ...] = (
        {},
        {"temperature": 0.9, "seed": 4},
        {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "seed": 5},
        {"temperature": 1.1, "min_p": 0.02, "seed": 6, **penalties},
    )
    asked: GenerateOptions = {"guide": guide, "max_new_tokens": 150, "logprobs": True}
    for options in sampled:
        answers = [
            await site.client.complete(where, PROMPT, **(options | asked))
            for where in ("tales", "whole")
        ]
        assert answers[0].text == answers[1].text and answers[0].token_ids == answers[1].token_ids
        assert answers[0].finish_reason is FinishReason.STOP and is_right(answers[0].text)
        assert all(-30 < logprob <= 0 for logprob in answers[0].logprobs)


async def test_a_guide_that_is_refused_or_fails_ends_its_own_request_alone(site: Site) -> None:
    """Before anything is computed, and as the last stage finds out."""
    epoch = (await site.client.deployment("tales")).epoch
    alone = await site.client.complete("tales", PROMPT, max_new_tokens=60, ignore_eos=True)
    other = asyncio.create_task(
        site.client.complete("tales", PROMPT, max_new_tokens=60, ignore_eos=True)
    )
    # more items than a row may have
    late = Guide(GuideKind.GRAMMAR, "start: " + "|".join(['"a"'] * 3000))
    for guide, why in (
        (Guide(GuideKind.REGEX, "(("), "unclosed group"),
        (schema({"not": {}}), "not"),
        (late, "max is"),
    ):
        with pytest.raises(InvalidArgumentError, match=why) as refused:
            await site.client.complete("tales", PROMPT, guide=guide)
        assert refused.value.field == "guide"
    assert (await other).token_ids == alone.token_ids
    assert (await site.client.deployment("tales")).epoch == epoch
    await site.kv_gone()


DEAR = Guide(GuideKind.GRAMMAR, "start: a\na: a a a | a a | /[a-zA-Z ,.]/")
"""A mask after some tokens takes a quarter of a second."""


async def unguided(site: Site) -> Stream:
    return await answered(site.client, "tales", PROMPT, max_new_tokens=400, ignore_eos=True)


@pytest.mark.long
async def test_a_guide_whose_masks_are_dear_holds_up_no_other_answer(site: Site) -> None:
    """Three at once, which end because of their processor time."""
    alone = await unguided(site)
    asked = [
        asyncio.create_task(
            site.client.complete(
                "tales", PROMPT, guide=DEAR, max_new_tokens=400, temperature=0.5, seed=seed
            )
        )
        for seed in range(3)
    ]
    beside = await unguided(site)
    ended = await asyncio.gather(*asked, return_exceptions=True)
    assert beside.ids == alone.ids
    assert all(
        isinstance(end, InvalidArgumentError) and end.reason == "GUIDE_FAILED" for end in ended
    ), ended
    assert (
        statistics.median(beside.gaps_s) < 4 * statistics.median(alone.gaps_s) + 0.02
        and max(beside.gaps_s) < 2
    )
    await site.kv_gone()


async def test_a_late_token_is_the_same_and_a_client_that_leaves_meanwhile_leaves_nothing(
    site: Site,
) -> None:
    dear: GenerateOptions = {"guide": DEAR, "max_new_tokens": 6, "temperature": 0.5, "seed": 1}
    lasting: GenerateOptions = {"max_new_tokens": 400}
    first, again = [await site.client.complete("tales", PROMPT, **dear) for _ in range(2)]
    whole = await site.client.complete("whole", PROMPT, **dear)
    assert first.token_ids == again.token_ids == whole.token_ids
    for wait_s in (0.0, 0.05, 0.3, 0.8):
        task = asyncio.create_task(site.client.complete("tales", PROMPT, **(dear | lasting)))
        await asyncio.sleep(wait_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await site.kv_gone()


TEXTS = [
    "Once upon a time there was",
    "The old king had three sons and " * 60,
    ("The old king had three sons and " * 60)[:700],
]


@pytest.fixture(scope="module")
def unsplit() -> dict[str, Any]:
    """For each text the log-probabilities of all tokens at each position, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    with torch.no_grad():
        return {
            text: model(**tokenizer(text, return_tensors="pt")).logits.log_softmax(-1)[0, :-1]
            for text in TEXTS
        }


async def test_prompt_logprobs_are_those_of_the_unsplit_model(
    site: Site, unsplit: dict[str, Any]
) -> None:
    """All at once, so that long prompts run in chunks; and again, when their KV could be shared."""
    for where, new in (("tales", 0), ("whole", 0), ("tales", 2)):
        options: Any = {"max_new_tokens": new, "prompt_logprobs": True, "top_logprobs": 3}
        asked = (site.client.complete(where, text, **options) for text in TEXTS)
        for text, answer in zip(TEXTS, await asyncio.gather(*asked), strict=True):
            tokens = torch.tensor(answer.prompt_token_ids[1:])
            expected = unsplit[text].gather(1, tokens[:, None])[:, 0]
            assert torch.allclose(torch.tensor(answer.prompt_logprobs), expected, atol=1e-3)
            found = torch.tensor(
                [[entry.logprob for entry in top] for top in answer.prompt_top_logprobs]
            )
            assert torch.allclose(found, unsplit[text].topk(3).values, atol=1e-3)
            assert len(answer.token_ids) == new and answer.finish_reason is FinishReason.LENGTH


async def test_no_new_tokens_are_asked_for_only_with_prompt_logprobs(site: Site) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        await site.client.complete("tales", PROMPT, max_new_tokens=0)
    assert refused.value.field == "max_new_tokens"


async def guided(site: Site, seen: list[Token]) -> tuple[str, list[float]]:
    """The text and the prompt's log-probabilities of one answer, each of which arrived once and in
    its place."""
    text = ""
    scores = list[float]()
    first = 0
    async for event in site.client.generate(
        "tales",
        PROMPT,
        guide=PERSON,
        prompt_logprobs=True,
        max_new_tokens=150,
        temperature=0.9,
        seed=3,
        timeout_s=60,
    ):
        match event:
            case Started():
                first = len(event.prompt_tokens)
            case PromptLogprobs():
                assert event.position == 1 + len(scores) and not seen
                scores += event.logprobs
            case Token():
                assert event.position == first + len(seen)
                seen.append(event)
                text += event.text
            case Finished():
                text += event.text
    return text, scores


async def test_a_node_that_dies_in_mid_answer_changes_nothing(site: Site) -> None:
    """The last stage, whose matchers are gone, one in the middle, and the head."""
    undisturbed, scores = await guided(site, [])
    assert is_person(undisturbed)
    for index in (2, 1, 0):
        victim = (await site.client.deployment("tales")).placement.stages[index].node_name
        seen: list[Token] = []
        running = asyncio.create_task(guided(site, seen))
        await site.until(lambda: len(seen) >= 5)  # noqa: B023
        await site.cluster.agents[victim].kill()
        text, again = await running
        assert text == undisturbed and again == pytest.approx(scores, abs=1e-4)
        await site.cluster.start_agent(victim)
        await site.until(lambda: _is_ready(site))


async def _all_placeable(site: Site) -> bool:
    return all(node.placeable for node in await site.client.nodes())


async def _is_ready(site: Site) -> bool:
    deployment = await site.client.deployment("tales")
    return await _all_placeable(site) and deployment.phase is DeploymentPhase.READY
