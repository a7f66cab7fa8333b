"""The demo model over three agent processes, through the SDK: the unsplit model's tokens, and
nothing left over."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

from edgeshard.architectures import stage_tensors
from edgeshard.architectures.units import EMBEDDING_UNIT, HEAD_UNIT, layer_unit
from edgeshard.domain.deployments.deployment import Deployment
from edgeshard.domain.errors import (
    DeadlineError,
    EdgeShardError,
    InvalidArgumentError,
    NotFoundError,
)
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.requests.generation import Finished, FinishReason, Token
from tests.support.site import Site
from tests.support.sizes import parameter_bytes

HUGE_PAGE = 2 << 20
DEMO_MODEL = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPTS = [
    "Once upon a time",
    "The old king had three sons",
    "In a wood there lived a fox who",
    '"Why," said',
]


@pytest.fixture(scope="module")
def reference() -> dict[str, tuple[list[int], list[int]]]:
    """Prompt ids and 64 greedy tokens of the unsplit model in float32, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    made = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**ids, max_new_tokens=64, do_sample=False, pad_token_id=0)
        prompt_ids = ids.input_ids[0].tolist()
        made[prompt] = (prompt_ids, output[0, len(prompt_ids) :].tolist())
    return made


async def test_every_request_gets_the_unsplit_models_tokens(
    site: Site, tales: Deployment, reference: dict[str, tuple[list[int], list[int]]]
) -> None:
    """All at once, so that their steps interleave in the ring."""
    answers = await asyncio.gather(
        *(site.client.complete("tales", p, max_new_tokens=64) for p in PROMPTS)
    )
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert (list(answer.prompt_token_ids), list(answer.token_ids)) == reference[prompt]
    assert len(answers[0].token_ids) == 64 and 2 not in answers[0].token_ids
    assert answers[0].finish_reason is FinishReason.LENGTH


async def test_seeded_sampling_repeats_itself_whoever_else_is_there(
    site: Site, tales: Deployment
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0.9, "top_p": 0.95, "seed": 11}
    alone = await site.client.complete("tales", PROMPTS[0], **options)
    crowd = await asyncio.gather(
        site.client.complete("tales", PROMPTS[0], **options),
        *(
            site.client.complete("tales", PROMPTS[1], **{**options, "seed": seed})
            for seed in range(3)
        ),
    )
    assert crowd[0].token_ids == alone.token_ids
    assert len({answer.token_ids for answer in crowd[1:]}) > 1


async def test_text_stop_strings_and_logprobs(site: Site, tales: Deployment) -> None:
    whole = await site.client.complete("tales", PROMPTS[0], max_new_tokens=40)
    word = whole.text.split()[6]
    stopped = await site.client.complete("tales", PROMPTS[0], max_new_tokens=40, stop=(word,))
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.text == whole.text[: whole.text.index(word)]
    tokens = [
        event
        async for event in site.client.generate(
            "tales", PROMPTS[0], max_new_tokens=5, logprobs=True, top_logprobs=3
        )
        if isinstance(event, Token)
    ]
    for token in tokens:
        assert token.top[0].token == token.token and token.top[0].logprob == pytest.approx(
            token.logprob
        )
        assert [t.logprob for t in token.top] == sorted(
            (t.logprob for t in token.top), reverse=True
        )
        assert [timing.stage for timing in token.timings] == [0, 1, 2]


async def test_each_node_holds_its_tensors_and_no_others(site: Site, tales: Deployment) -> None:
    """Packed: what a node fetched of a tensor is deleted once its unit is packed."""
    from edgeshard.domain.ids import ModelName
    from edgeshard.storage.checkpoint import build_manifest, open_checkpoint

    manifest = build_manifest(ModelName("fairy-tales"), open_checkpoint(DEMO_MODEL))
    for stage in tales.placement.stages:
        tensors = stage_tensors(manifest, stage.layers)
        wanted: set[str] = set()
        # the head's, and the last stage's for guides
        if stage.index == 0 or stage.layers.end == 12:
            files = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
            wanted = {file.sha256 for file in manifest.files if file.name in files}
        blobs = site.cluster.directory / stage.node_name / "cache" / "blobs"
        held = {
            hashlib.sha256(path.read_bytes()).hexdigest()
            for path in blobs.rglob("*")
            if path.is_file()
        }
        assert held == wanted
        units = {layer_unit(layer) for layer in range(stage.layers.first, stage.layers.end)}
        if stage.index == 0:
            units.add(EMBEDDING_UNIT)
        if stage.layers.end == 12:
            units.add(HEAD_UNIT)
        assert {unit.unit for unit in await site.client.packed_units(stage.node_name)} == units
        node = await site.client.node(stage.node_name)
        (status,) = node.stages
        assert (
            status.parameter_bytes
            == parameter_bytes(tensors, DType.FLOAT32)
            == stage.parameter_bytes
        )
        assert status.layers == stage.layers


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="this system does not tell")
async def test_each_node_says_for_how_much_it_asked_huge_pages(
    site: Site, tales: Deployment
) -> None:
    """Requested for all weights and KV blocks; the kernel decides their number."""

    async def said() -> bool:
        nodes = {node.name: node.huge_pages for node in await site.client.nodes()}
        for stage in tales.placement.stages:
            pages = nodes[stage.node_name]
            if pages is None or not pages.held_bytes <= pages.wanted_bytes:
                return False
            if pages.wanted_bytes < stage.parameter_bytes + stage.kv_bytes // HUGE_PAGE * HUGE_PAGE:
                return False
        return True

    await site.until(said)


async def test_a_client_that_leaves_mid_stream_leaves_no_kv(site: Site, tales: Deployment) -> None:

    async def left_while_all_held_some() -> bool:
        """False if the request was over before every node had reported that it holds KV."""
        seen = 0
        async with aclosing(
            site.client.generate("tales", PROMPTS[0], max_new_tokens=400, ignore_eos=True)
        ) as stream:
            async for event in stream:
                seen += isinstance(event, Token)
                if seen >= 12 and all((await site.kv_bytes()).values()):
                    return not isinstance(event, Finished)
        return False

    await site.until(left_while_all_held_some)
    await site.kv_gone()


async def test_cancel_during_prefill_leaves_no_kv(site: Site, tales: Deployment) -> None:
    """Cancelled from another call as soon as the head has accepted it: its prompt is still in the
    stages."""
    prompt = [5 + i % 4000 for i in range(480)]

    async def cancelled() -> bool:
        """False if the request was over before its head received the cancel."""
        stream = site.client.generate(
            "tales", prompt, max_new_tokens=30, request_id="to-cancel", ignore_eos=True
        )
        await anext(stream)
        found = await site.client.cancel("to-cancel")
        *_, last = [event async for event in stream]
        assert isinstance(last, Finished) and (found or last.reason is FinishReason.LENGTH)
        return last.reason is FinishReason.CANCELLED

    await site.until(cancelled)
    await site.kv_gone()
    assert not await site.client.cancel("to-cancel"), "it is gone"


async def test_a_deadline_ends_the_request_everywhere(site: Site, tales: Deployment) -> None:
    with pytest.raises(DeadlineError):
        await site.client.complete(
            "tales", PROMPTS[0], max_new_tokens=450, ignore_eos=True, timeout_s=0.4
        )
    await site.kv_gone()


@pytest.mark.parametrize(
    ("options", "kind", "field"),
    [
        ({"model": "unknown"}, NotFoundError, "model"),
        ({"prompt": ""}, InvalidArgumentError, "prompt"),
        ({"prompt": []}, InvalidArgumentError, "prompt"),
        ({"prompt": [4096]}, InvalidArgumentError, "prompt"),
        ({"temperature": -0.1}, InvalidArgumentError, "temperature"),
        ({"temperature": float("nan")}, InvalidArgumentError, "temperature"),
        ({"top_p": 1.5}, InvalidArgumentError, "top_p"),
        ({"max_new_tokens": 0}, InvalidArgumentError, "max_new_tokens"),
        ({"max_new_tokens": 512, "clip_new_tokens": False}, InvalidArgumentError, "max_new_tokens"),
        ({"prompt": "x " * 600}, InvalidArgumentError, "prompt"),
        ({"top_logprobs": 21}, InvalidArgumentError, "top_logprobs"),
    ],
    ids=str,
)
async def test_a_wrong_request_is_refused_by_name(
    site: Site, tales: Deployment, options: dict[str, Any], kind: type[EdgeShardError], field: str
) -> None:
    before = await site.state()
    arguments = {"model": "tales", "prompt": PROMPTS[0], "max_new_tokens": 4, **options}
    with pytest.raises(kind) as refusal:
        await site.client.complete(arguments.pop("model"), arguments.pop("prompt"), **arguments)
    assert refusal.value.field == field
    assert await site.state() == before
    assert not any((await site.kv_bytes()).values())
