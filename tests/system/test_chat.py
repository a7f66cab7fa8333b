"""Conversations with a site of real processes, through the SDK."""

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

from edgeshard.client import (
    Chat,
    ChatFinished,
    Client,
    Completion,
    ContentDelta,
    Prompt,
    ReasoningDelta,
    Started,
)
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.errors import (
    DeadlineError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnsupportedModelError,
)
from edgeshard.domain.requests.conversation import ChatReason
from tests.support.chat_models import demo_model_with
from tests.support.site import Site

pytestmark = pytest.mark.asyncio(loop_scope="module")
TELL = [
    {"role": "system", "content": "Once upon a time"},
    {"role": "user", "content": "there lived a king who"},
]
THINKING = (
    "{{ messages[0].content }}{% if tools %}{{ tools | tojson }}{% endif %}<think>\n{# "
    "</think> <tool_call> #}"
)
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
EXAMPLES = Path(__file__).resolve().parents[2] / "deploy" / "examples" / "sdk"
TALES = Path(__file__).resolve().parents[1] / "data" / "fairy-tales.valid.txt"
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    """The client of a site of one node with four models: the demo model as it is, one that thinks,
    one without a template, and one whose template never ends."""
    folder = tmp_path_factory.mktemp("chat")
    models = {
        "tales": demo_model_with(folder / "tales"),
        "thinks": demo_model_with(
            folder / "thinks", THINKING, {"do_sample": True, "temperature": 0.8, "top_k": 3}
        ),
        "silent": demo_model_with(folder / "silent", None),
        "endless": demo_model_with(folder / "endless", ENDLESS),
    }
    async with Site(folder, ("a",), models=models) as site:
        for name in models:
            await site.client.deploy(DeploymentSpec(name=name, model=name, source="a"))
        yield site.client


async def test_an_answer_is_what_the_rendered_prompt_brings(client: Client) -> None:
    plain = await client.complete(
        "tales", "Once upon a time\n\nthere lived a king who", max_new_tokens=24
    )
    answer = await client.complete_chat("tales", TELL, max_new_tokens=24)
    assert answer.content == plain.text and answer.prompt_tokens == len(plain.prompt_token_ids)
    assert (answer.completion_tokens, answer.reason, answer.reasoning) == (
        24,
        ChatReason.LENGTH,
        "",
    )
    assert len(repr(answer)) < 240 and str(answer) == answer.content
    events = [event async for event in client.chat("tales", TELL, max_new_tokens=24)]
    assert isinstance(events[0], Started) and isinstance(events[-1], ChatFinished)
    pieces = [event.text for event in events[1:-1] if isinstance(event, ContentDelta)]
    assert len(pieces) > 12 and "".join(pieces) == plain.text


async def test_what_a_template_marks_as_reasoning_comes_apart_and_defaults_of_the_model_count(
    client: Client,
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "seed": 3}
    events = [event async for event in client.chat("thinks", "Once", tools=[TOOL], **options)]
    thought = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    assert thought and not any(isinstance(event, ContentDelta) for event in events)
    prompt = await client.tokenize("thinks", f"Once{json.dumps([TOOL])}<think>\n", special=False)
    plain = await client.complete("thinks", prompt, temperature=0.8, top_k=3, **options)
    assert thought == plain.text
    greedy = await client.complete_chat("thinks", "Once", temperature=0.0, max_new_tokens=12)
    assert greedy.reasoning != thought


async def test_texts_become_tokens_and_back(client: Client) -> None:
    tokens = await client.tokenize("tales", "The old king")
    assert (
        tokens
        == (await client.complete("tales", "The old king", max_new_tokens=1)).prompt_token_ids
    )
    assert await client.detokenize("tales", tokens) == "The old king"


async def example(client: Client, name: str, *arguments: str, stdin: str = "") -> list[str]:
    """Lines of output of one of the programs that show the SDK."""
    environment = {
        **os.environ,
        "EDGESHARD__CLIENT__COORDINATOR": client.target,
        "EDGESHARD__CLIENT__PLAINTEXT": "true",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLES / f"{name}.py"), *arguments,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment,
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(stdin.encode()), 120)
    assert process.returncode == 0
    return output.decode().splitlines()


async def test_the_robot_does_what_is_safe_when_nothing_comes_in_time(client: Client) -> None:
    late, late_too = await example(
        client, "robot", "tales", "--deadline", "0.0005", stdin="wall ahead\nall clear\n"
    )
    assert late.startswith("stop") and "no answer within" in late and late_too.startswith("stop")
    (known,) = await example(client, "robot", "tales", "--deadline", "60", stdin="wall ahead\n")
    assert "the model says so" in known and known.split()[0] in ("forward", "left", "right", "stop")
    (away,) = await example(client, "robot", "nobody", stdin="wall ahead\n")
    assert away.startswith("stop") and "MODEL_NOT_SERVED" in away


async def test_the_summariser_reads_what_is_longer_than_the_context(
    client: Client, tmp_path: Path
) -> None:
    document = tmp_path / "tales.txt"
    document.write_text(TALES.read_text(encoding="utf-8")[:4000], encoding="utf-8")
    assert len(await client.tokenize("tales", document.read_text(encoding="utf-8"))) > 2 * 512
    assert "".join(await example(client, "summarise", "tales", str(document), "--words", "20"))


async def test_labels_are_objects_of_the_schema_in_the_order_of_the_texts(
    client: Client, tmp_path: Path
) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("The king wept.\n\nThe fox laughed.\n", encoding="utf-8")
    lines = [json.loads(line) for line in await example(client, "label", "tales", str(texts))]
    assert [line["text"] for line in lines] == ["The king wept.", "The fox laughed."]
    moods = {"glad", "sad", "angry", "calm"}
    assert all(line["mood"] in moods and isinstance(line["animals"], bool) for line in lines)


async def test_what_cannot_be_said_is_refused_by_name(client: Client) -> None:
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ([{"role": "poet", "content": "x"}], {}, InvalidArgumentError, "messages[0].role"),
        ([*TELL, {"role": "user", "content": [{"type": "image_url"}]}], {}, InvalidArgumentError,
         "messages[2].content[0].type"),
        ([], {}, InvalidArgumentError, "messages"),
        (7, {}, InvalidArgumentError, "messages"),
        (["x"], {}, InvalidArgumentError, "messages[0]"),
        (TELL, {"variables": {"messages": []}}, InvalidArgumentError, "variables.messages"),
        (TELL, {"max_length": 3}, InvalidArgumentError, "max_length"),
    ]  # fmt: skip
    for messages, more, kind, field in cases:
        with pytest.raises(kind) as caught:
            await client.complete_chat("tales", messages, **more)
        assert getattr(caught.value, "field", "") == field
    with pytest.raises(InvalidArgumentError, match="does not support tools"):
        await client.complete_chat("endless", TELL, tools=[TOOL])
    with pytest.raises(FailedPreconditionError, match="chat template"):
        await client.complete_chat("silent", TELL)
    with pytest.raises(NotFoundError):
        await client.complete_chat("nobody", TELL)


async def test_a_template_that_does_not_end_is_stopped_and_others_are_served(
    client: Client,
) -> None:
    endless = asyncio.create_task(client.complete_chat("endless", TELL))
    answer = await client.complete_chat("tales", TELL, max_new_tokens=4)
    with pytest.raises(InvalidArgumentError) as caught:
        await endless
    assert caught.value.reason == "TEMPLATE_EXHAUSTED" and answer.content
    assert not isinstance(caught.value, UnsupportedModelError)  # it came over the wire


async def test_a_deadline_bounds_prompt_and_answer_together(client: Client) -> None:
    with pytest.raises(DeadlineError):
        await client.complete_chat("tales", TELL, timeout_s=0.0005)


async def test_a_batch_keeps_its_order_and_each_has_its_own_result(client: Client) -> None:
    told: list[tuple[int, int]] = []
    requests: list[Prompt | Chat] = [
        Prompt("tales", "Once upon a time", {"max_new_tokens": 30}),
        Chat("tales", TELL, options={"max_new_tokens": 5}),
        Prompt("nobody", "x"),
        Chat("tales", [{"role": "user"}]),
        *(Prompt("tales", f"{n} kings", {"max_new_tokens": 2}) for n in range(40)),
    ]
    results = await client.batch(requests, 64, lambda *progress: told.append(progress))
    assert told == [(done, 44) for done in range(1, 45)]
    assert isinstance(results[0], Completion) and len(results[0].token_ids) == 30
    assert str(results[1]) == str(await client.complete_chat("tales", TELL, max_new_tokens=5))
    assert isinstance(results[2], NotFoundError)
    assert (
        isinstance(results[3], InvalidArgumentError) and results[3].field == "messages[0].content"
    )
    alone = await client.complete("tales", "39 kings", max_new_tokens=2)
    assert isinstance(results[-1], Completion) and results[-1].token_ids == alone.token_ids
    assert not [result for result in results[4:] if not isinstance(result, Completion)]
