"""The gateway of a real three-node site, by raw HTTP and by the clients that people have."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from edgeshard.client import GenerateOptions
from edgeshard.domain.audit import OK
from edgeshard.domain.identity import ApiKey
from edgeshard.domain.ids import ModelName
from edgeshard.gateway.request_metrics import FOR_ANY_KEY
from tests.support.chat_models import DEMO_MODEL
from tests.support.clients import CLIENTS, needs_clients, needs_node_clients, run
from tests.support.http import Http
from tests.support.site import Site

pytestmark = [pytest.mark.timing, pytest.mark.asyncio(loop_scope="module")]

PROMPT = "Once upon a time"
CHAT = [{"role": "user", "content": "Tell me of a king"}]
GREEDY: dict[str, Any] = {"model": "tales", "temperature": 0}


async def test_a_completion_is_what_the_sdk_gets(site: Site, http: Http) -> None:
    expected = await site.client.complete("tales", PROMPT, max_new_tokens=24)
    answer = await http.post("/v1/completions", {**GREEDY, "prompt": PROMPT, "max_tokens": 24})
    assert answer.status == 200
    (choice,) = answer.json["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, "length")
    assert answer.json["usage"] == {"prompt_tokens": 4, "completion_tokens": 24, "total_tokens": 28}
    ids = list(expected.prompt_token_ids)
    by_tokens = await http.post("/v1/completions", {**GREEDY, "prompt": ids, "max_tokens": 24})
    assert by_tokens.json["choices"] == answer.json["choices"]


async def test_a_stream_says_what_the_whole_answer_says(http: Http) -> None:
    asked = {**GREEDY, "prompt": PROMPT, "max_tokens": 12}
    whole = (await http.post("/v1/completions", asked)).json
    events = await http.events(
        "/v1/completions", {**asked, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert (
        "".join(c["text"] for event in events for c in event["choices"])
        == whole["choices"][0]["text"]
    )
    assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events[:-1])
    assert [c["finish_reason"] for event in events for c in event["choices"]][-1] == "length"
    bare = await http.events("/v1/completions", {**asked, "stream": True})
    assert all(event["choices"] for event in bare) and "usage" not in bare[-1]


async def test_several_prompts_and_answers_come_in_order(site: Site, http: Http) -> None:
    prompts = ["The king", "The queen", "The wolf"]
    asked = {
        "model": "tales",
        "prompt": prompts,
        "n": 2,
        "max_tokens": 8,
        "seed": 5,
        "temperature": 1.0,
    }
    answer = (await http.post("/v1/completions", asked)).json
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    texts = [choice["text"] for choice in answer["choices"]]
    for place, prompt in enumerate(prompts):
        for number in (0, 1):
            alone = await site.client.complete(
                "tales", prompt, max_new_tokens=8, temperature=1.0, seed=5 + number
            )
            assert texts[2 * place + number] == alone.text
    assert answer["usage"]["completion_tokens"] == 48 and answer["usage"]["prompt_tokens"] < 15
    events = await http.events("/v1/completions", {**asked, "stream": True})
    for index, text in enumerate(texts):
        assert (
            "".join(c["text"] for e in events for c in e["choices"] if c["index"] == index) == text
        )


async def test_without_a_seed_answers_differ(http: Http) -> None:
    asked = {"model": "tales", "prompt": PROMPT, "n": 4, "max_tokens": 16, "temperature": 1.0}
    answer = (await http.post("/v1/completions", asked)).json
    assert len({choice["text"] for choice in answer["choices"]}) > 1


async def test_echo_scores_the_prompt(site: Site, http: Http) -> None:
    asked = {**GREEDY, "prompt": PROMPT, "max_tokens": 1, "echo": True, "logprobs": 2}
    (choice,) = (await http.post("/v1/completions", asked)).json["choices"]
    scores = choice["logprobs"]
    assert "".join(scores["tokens"]) == choice["text"] and choice["text"].startswith(PROMPT)
    assert scores["token_logprobs"][0] is None and all(
        value < 0 for value in scores["token_logprobs"][1:]
    )
    assert [len(top) for top in scores["top_logprobs"][1:]] == [2] * 4
    for place, (offset, token) in enumerate(
        zip(scores["text_offset"], scores["tokens"], strict=True)
    ):
        assert choice["text"][offset:].startswith(token), place
    # The score of a prompt's token is that of generating it there.
    ids = (await http.post("/tokenize", {"model": "tales", "prompt": PROMPT})).json["tokens"]
    before = await site.client.complete("tales", ids[:2], max_new_tokens=1, top_logprobs=20)
    scored = {item.token: item.logprob for item in before.top_logprobs[0]}
    assert scores["token_logprobs"][2] == pytest.approx(scored[ids[2]], abs=1e-4)
    only = {**asked, "prompt": ids, "max_tokens": 0}
    (alone,) = (await http.post("/v1/completions", only)).json["choices"]
    assert alone["logprobs"]["token_logprobs"] == pytest.approx(
        scores["token_logprobs"][:4], abs=1e-4, nan_ok=True
    )
    events = await http.events("/v1/completions", {**asked, "stream": True})
    streamed = [c["logprobs"] for event in events for c in event["choices"] if c["logprobs"]]
    assert [token for part in streamed for token in part["tokens"]] == scores["tokens"]


async def test_a_chat_answers_the_rendered_prompt(site: Site, http: Http) -> None:
    ids = (await http.post("/tokenize", {"model": "tales", "messages": CHAT})).json["tokens"]
    expected = await site.client.complete("tales", ids, max_new_tokens=20)
    answer = (
        await http.post("/v1/chat/completions", {**GREEDY, "messages": CHAT, "max_tokens": 20})
    ).json
    (choice,) = answer["choices"]
    assert (
        choice["message"]["content"] == expected.text and choice["message"]["role"] == "assistant"
    )
    assert answer["object"] == "chat.completion" and answer["usage"]["prompt_tokens"] == len(ids)
    asked = {**GREEDY, "messages": CHAT, "max_completion_tokens": 20, "stream": True}
    events = await http.events(
        "/v1/chat/completions", {**asked, "logprobs": True, "top_logprobs": 2}
    )
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == expected.text
    scores = [
        s
        for e in events
        if e["choices"][0]["logprobs"]
        for s in e["choices"][0]["logprobs"]["content"]
    ]
    assert "".join(score["token"] for score in scores) == expected.text
    assert all(
        len(score["top_logprobs"]) == 2 and bytes(score["bytes"]).decode() == score["token"]
        for score in scores
    )


async def test_an_answer_without_a_limit_fills_the_context(http: Http) -> None:
    long = [{"role": "user", "content": "the king and the queen " * 90}]
    answer = (
        await http.post("/v1/chat/completions", {**GREEDY, "messages": long, "ignore_eos": True})
    ).json
    assert (
        answer["usage"]["total_tokens"] == 512 and answer["choices"][0]["finish_reason"] == "length"
    )


async def test_ollama_fills_the_room_that_there_is(http: Http) -> None:
    asked = {"model": "tales", "prompt": PROMPT, "raw": True, "stream": False}
    answer = (
        await http.post(
            "/api/generate", {**asked, "options": {"num_predict": -1, "temperature": 0}}
        )
    ).json
    assert answer["eval_count"] > 128 or answer["done_reason"] == "stop"
    assert (
        answer["done_reason"] == "stop" or answer["prompt_eval_count"] + answer["eval_count"] == 512
    )


async def test_stop_strings_end_an_answer(http: Http) -> None:
    whole = (
        await http.post("/v1/completions", {**GREEDY, "prompt": PROMPT, "max_tokens": 30})
    ).json
    text = whole["choices"][0]["text"]
    stop = text.split()[5]
    cut = (
        await http.post(
            "/v1/completions", {**GREEDY, "prompt": PROMPT, "max_tokens": 30, "stop": [stop]}
        )
    ).json
    assert cut["choices"][0] == {
        "index": 0,
        "text": text[: text.index(stop)],
        "logprobs": None,
        "finish_reason": "stop",
    }


STOPPED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 8},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 8},
    "/v1/responses": {"input": "x", "max_output_tokens": 8},
}


@pytest.mark.parametrize("path", STOPPED)
async def test_a_stop_string_that_is_a_special_token_ends_an_answer(http: Http, path: str) -> None:
    likeliest = {"logit_bias": {"2": 100}, "ignore_eos": True}
    asked = {**GREEDY, **STOPPED[path], **likeliest}
    for stop, expected in ((["</s>", "king"], 1), ("<s>", 8)):
        usage = (await http.post(path, {**asked, "stop": stop})).json["usage"]
        assert usage.get("completion_tokens", usage.get("output_tokens")) == expected, stop


async def test_top_p_of_0_takes_the_likeliest_token(http: Http) -> None:
    sampled = {"model": "tales", "prompt": PROMPT, "max_tokens": 20, "top_p": 0, "temperature": 1.5}
    texts = [(await http.post("/v1/completions", body)).json["choices"][0]["text"] for body in (
        sampled, {**GREEDY, "prompt": PROMPT, "max_tokens": 20})]  # fmt: skip
    assert texts[0] == texts[1]


async def test_responses_say_the_same_whole_and_in_events(http: Http) -> None:
    asked = {**GREEDY, "input": CHAT[0]["content"], "max_output_tokens": 12}
    chat = (
        await http.post("/v1/chat/completions", {**GREEDY, "messages": CHAT, "max_tokens": 12})
    ).json
    whole = (await http.post("/v1/responses", asked)).json
    assert whole["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert (whole["status"], whole["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    streamed = await http.post("/v1/responses", {**asked, "stream": True})
    events = [
        json.loads(line[6:])
        for line in streamed.body.decode().split("\n")
        if line.startswith("data: ")
    ]
    names = [line[7:] for line in streamed.body.decode().split("\n") if line.startswith("event: ")]
    assert names == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == whole["output"][0]["content"][0]["text"]
    assert (
        events[-1]["type"] == "response.incomplete"
        and events[-1]["response"]["usage"] == whole["usage"]
    )


async def test_texts_and_tokens(http: Http) -> None:
    tokens = (await http.post("/tokenize", {"model": "tales", "prompt": "Once upon a time"})).json
    assert tokens["count"] == len(tokens["tokens"]) == 4 and tokens["max_model_len"] == 512
    text = (await http.post("/detokenize", {"model": "tales", "tokens": tokens["tokens"]})).json
    assert text == {"prompt": "Once upon a time"}


async def test_models_are_listed_by_deployment(site: Site, http: Http) -> None:
    listed = (await http.get("/v1/models")).json["data"]
    rows = {model["id"]: model for model in listed}
    assert [(m["root"], m["max_model_len"]) for m in rows.values()] == [
        ("fairy-tales", 512),
        ("handy", 256),
    ]
    assert (await http.get("/v1/models/tales")).json == rows["tales"]
    assert (await http.get("/v1/models/fairy-tales")).json == rows["tales"]
    stored = {model.name: model for model in await site.client.stored_models()}
    tags, loaded = [(await http.get(path)).json["models"] for path in ("/api/tags", "/api/ps")]
    assert [tag["name"] for tag in tags] == [tag["name"] for tag in loaded] == list(rows)
    for tag in loaded:
        assert (tag["expires_at"][:4], tag["context_length"]) == (
            "9999",
            rows[tag["name"]]["max_model_len"],
        )
    for tag in tags:
        manifest = (
            site.cluster.directory
            / "coordinator"
            / "models"
            / "manifests"
            / f"{tag['digest']}.json"
        )
        at = datetime.fromisoformat(tag["modified_at"]).timestamp()
        assert at == pytest.approx(manifest.stat().st_mtime, abs=1e-3), (
            "when it was added, not when it was asked"
        )
        assert rows[tag["name"]]["created"] == int(at)
        assert (await http.post("/api/show", {"model": tag["name"]})).json["modified_at"] == tag[
            "modified_at"
        ]
    for tag in (*tags, *loaded):
        model = stored[ModelName(rows[tag["name"]]["root"])]
        assert (tag["size"], tag["digest"]) == (model.stored_bytes, model.manifest_digest)
        assert tag["details"]["family"] == "llama"
        assert tag["details"]["parameter_size"] == f"{model.parameter_count / 1e6:.2f}M"
    missing = await http.get("/v1/models/none")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


COMPLETION: dict[str, Any] = {"model": "tales", "prompt": "x", "max_tokens": 1}
TALK: dict[str, Any] = {"model": "tales", "messages": CHAT, "max_tokens": 1}
PRIVATE = "Rumpelstiltskin"
REFUSED: dict[str, tuple[str, Any, str | None, str]] = {
    "unknown field": (
        "/v1/completions",
        {**COMPLETION, "foo": PRIVATE},
        "foo",
        "unsupported_parameter",
    ),
    "penalty": (
        "/v1/completions",
        {**COMPLETION, "presence_penalty": 2.5},
        "presence_penalty",
        "invalid_value",
    ),
    "no id": (
        "/v1/chat/completions",
        {**TALK, "logit_bias": {"king": 1}},
        "logit_bias",
        "invalid_value",
    ),
    "bias": (
        "/v1/completions",
        {**COMPLETION, "logit_bias": {"5": -101}},
        "logit_bias",
        "invalid_argument",
    ),
    "biased token": (
        "/v1/completions",
        {**COMPLETION, "logit_bias": {"999999": 1}},
        "logit_bias",
        "token_out_of_range",
    ),
    "biases": (
        "/v1/chat/completions",
        {**TALK, "logit_bias": dict.fromkeys(map(str, range(301)), 1)},
        "logit_bias",
        "invalid_value",
    ),
    "no token id": (
        "/v1/completions",
        {**COMPLETION, "logit_bias": {"9999999999": 1}},
        "logit_bias",
        "invalid_value",
    ),
    "stop strings": (
        "/v1/completions",
        {**COMPLETION, "stop": ["x"] * 17},
        "stop",
        "invalid_value",
    ),
    "answers": (
        "/v1/completions",
        {**COMPLETION, "prompt": ["king"] * 129, "n": 2},
        "n",
        "invalid_value",
    ),
    "wrong type": (
        "/v1/completions",
        {**COMPLETION, "max_tokens": PRIVATE},
        "max_tokens",
        "invalid_value",
    ),
    "number as text": ("/v1/completions", {**COMPLETION, "n": "2"}, "n", "invalid_value"),
    "out of bounds": (
        "/v1/chat/completions",
        {**TALK, "temperature": -1},
        "temperature",
        "invalid_value",
    ),
    "missing": (
        "/v1/chat/completions",
        {"model": "tales"},
        "messages",
        "missing_required_parameter",
    ),
    "too many answers": ("/v1/chat/completions", {**TALK, "n": 17}, "n", "invalid_value"),
    "two limits": (
        "/v1/chat/completions",
        {**TALK, "max_completion_tokens": 2},
        "max_completion_tokens",
        "invalid_value",
    ),
    "too long": (
        "/v1/completions",
        {**COMPLETION, "prompt": "king " * 600},
        "prompt",
        "context_length_exceeded",
    ),
    "picture": (
        "/v1/chat/completions",
        {
            **TALK,
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PRIVATE}}]}
            ],
        },
        "messages[0].content[0].type",
        "invalid_messages",
    ),
    "no tools": (
        "/v1/chat/completions",
        {**TALK, "tool_choice": "required"},
        "tool_choice",
        "invalid_argument",
    ),
    "token": (
        "/v1/completions",
        {**COMPLETION, "prompt": [999999]},
        "prompt",
        "token_out_of_range",
    ),
    "not JSON": ("/v1/completions", b'{"prompt": ' + PRIVATE.encode(), None, "invalid_json"),
    "deep": ("/v1/completions", b'{"model":' + b"[" * 20_000, None, "invalid_json"),
    "many parts": ("/v1/completions", b'{"model":' + b"[" * 100_000, "body", "too_many_parts"),
    "memory": (
        "/v1/responses",
        {"model": "tales", "input": "x", "previous_response_id": PRIVATE},
        "previous_response_id",
        "unsupported_value",
    ),
    "embeddings": (
        "/v1/embeddings",
        {"model": "tales", "input": "x"},
        None,
        "unsupported_endpoint",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_not_done_is_refused_by_name(http: Http, name: str) -> None:
    path, body, param, code = REFUSED[name]
    answer = await http.post(path, body)
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, param, code), (
        answer.body
    )
    assert answer.error["type"] == "invalid_request_error"
    assert PRIVATE not in answer.body.decode()


async def test_values_that_mean_what_happens_anyway_are_taken(http: Http) -> None:
    neutral = {
        "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "logprobs": None,
        "stop": None, "stream": False, "user": "me", "seed": 3, "top_p": 1,
    }  # fmt: skip
    text = await http.post(
        "/v1/completions", {**COMPLETION, **neutral, "best_of": 1, "suffix": None, "echo": False}
    )
    assert text.status == 200, text.body
    chat = {
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "tools": [],
    }
    talk = await http.post(
        "/v1/chat/completions", {**TALK, **neutral, **chat, "response_format": {"type": "text"}}
    )
    assert talk.status == 200, talk.body


async def test_penalties_biases_and_min_p_do_what_they_do_in_the_sdk(
    site: Site, http: Http
) -> None:
    sampled: GenerateOptions = {"temperature": 0.75, "seed": 7, "max_new_tokens": 60}
    penalties: GenerateOptions = {"presence_penalty": 1.5, "frequency_penalty": 1.5, "min_p": 0.02}
    plain = await site.client.complete("tales", PROMPT, **sampled)
    first = plain.token_ids[0]
    penalised = await site.client.complete("tales", PROMPT, **(sampled | penalties))
    banned: GenerateOptions = {"logit_bias": {first: -100}}
    biased = await site.client.complete("tales", PROMPT, **(sampled | penalties | banned))
    assert len({plain.text, penalised.text, biased.text}) == 3 and first not in biased.token_ids
    options = {"temperature": 0.75, "seed": 7, **penalties}
    body = {
        **GREEDY,
        **options,
        "prompt": PROMPT,
        "max_tokens": 60,
        "logit_bias": {str(first): -100},
    }
    assert (await http.post("/v1/completions", body)).json["choices"][0]["text"] == biased.text
    events = await http.events("/v1/completions", {**body, "stream": True})
    assert "".join(event["choices"][0]["text"] for event in events) == biased.text
    raw = {"model": "tales", "prompt": PROMPT, "raw": True, "stream": False}
    answer = await http.post("/api/generate", {**raw, "options": {**options, "num_predict": 60}})
    assert answer.json["response"] == penalised.text
    chat = await http.post(
        "/v1/chat/completions", {**TALK, "max_tokens": 9, **options, "logit_bias": {"300": 1.5}}
    )
    answered = await http.post(
        "/v1/responses", {"model": "tales", "input": "x", "max_output_tokens": 9, **options}
    )
    assert (chat.status, answered.status) == (200, 200)


COLORS = {"set_lamp": ["red", "green"], "set_door": ["black", "white"]}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"color": {"$ref": "#/$defs/color"}, "on": {"type": "boolean"}},
                "required": ["color", "on"],
                "$defs": {"color": {"enum": colors}},
            },
        },
    }
    for name, colors in COLORS.items()
]
ASK_TOOLS: dict[str, Any] = {"model": "handy", "messages": CHAT, "tools": TOOLS, "max_tokens": 60}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "set_door"}}]
)
async def test_a_call_that_is_asked_for_is_made(http: Http, choice: Any) -> None:
    (answer,) = (
        await http.post("/v1/chat/completions", {**ASK_TOOLS, "tool_choice": choice})
    ).json["choices"]
    assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] in (
        ["set_lamp", "set_door"] if choice == "required" else ["set_door"]
    )
    arguments = json.loads(call["function"]["arguments"])
    assert (
        arguments.keys() == {"color", "on"}
        and arguments["color"] in COLORS[call["function"]["name"]]
    )
    events = await http.events(
        "/v1/chat/completions", {**ASK_TOOLS, "tool_choice": choice, "stream": True}
    )
    deltas = [
        c["delta"]["tool_calls"][0]
        for e in events
        for c in e["choices"]
        if "tool_calls" in c["delta"]
    ]
    assert [delta["index"] for delta in deltas] == [0] and json.loads(
        deltas[0]["function"]["arguments"]
    )
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    back = [
        *CHAT,
        answer["message"],
        {"role": "tool", "tool_call_id": call["id"], "content": "done"},
    ]
    assert (await http.post("/v1/chat/completions", {**ASK_TOOLS, "messages": back})).status == 200
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    asked = {
        "model": "handy",
        "input": "x",
        "tools": flat,
        "tool_choice": "required",
        "max_output_tokens": 60,
    }
    (item,) = (await http.post("/v1/responses", asked)).json["output"]
    assert item["type"] == "function_call" and json.loads(item["arguments"]).keys() == {
        "color",
        "on",
    }


async def test_answers_have_the_form_that_is_asked_for(http: Http) -> None:
    schema = TOOLS[0]["function"]["parameters"]
    formed = {
        "type": "json_schema",
        "json_schema": {"name": "lamp", "schema": schema, "strict": True},
    }
    forms: list[tuple[dict[str, Any], Any]] = [
        ({"response_format": formed}, lambda text: json.loads(text).keys() == {"color", "on"}),
        (
            {"guided_json": {**schema, "additionalProperties": False}},
            lambda text: json.loads(text)["color"] in ("red", "green"),
        ),
        ({"guided_regex": "[a-c]{3}x"}, lambda text: re.fullmatch("[a-c]{3}x", text)),
        ({"guided_grammar": 'start: "yes" | "no"'}, lambda text: text in ("yes", "no")),
    ]
    for form, holds in forms:
        (choice,) = (
            await http.post("/v1/chat/completions", {**TALK, "max_tokens": 60, **form})
        ).json["choices"]
        assert choice["finish_reason"] == "stop" and holds(choice["message"]["content"]), choice
    asked = {**COMPLETION, "max_tokens": 60, "response_format": formed}
    (text,) = (await http.post("/v1/completions", asked)).json["choices"]
    assert json.loads(text["text"]).keys() == {"color", "on"}
    asked = {
        "model": "tales",
        "input": "x",
        "max_output_tokens": 60,
        "text": {"format": {"type": "json_schema", "name": "lamp", "schema": schema}},
    }
    (item,) = (await http.post("/v1/responses", asked)).json["output"]
    assert json.loads(item["content"][0]["text"]).keys() == {"color", "on"}
    talk = {
        "model": "tales",
        "messages": CHAT,
        "format": schema,
        "stream": False,
        "options": {"num_predict": 60},
    }
    assert json.loads((await http.post("/api/chat", talk)).json["message"]["content"]).keys() == {
        "color",
        "on",
    }
    wrong = await http.post("/v1/chat/completions", {**TALK, "guided_regex": "("})
    assert (wrong.status, wrong.error["param"]) == (400, "guided_regex")
    both = await http.post("/v1/chat/completions", {**TALK, "guided_regex": "a", "guided_json": {}})
    assert (both.status, both.error["param"]) == (400, "guided_regex")


LONG = "king " * 600
OVERFLOWS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "tales", "prompt": LONG},
    "/v1/chat/completions": {
        "model": "tales",
        "messages": [{"role": "user", "content": LONG}],
        "stream": True,
    },
    "/v1/responses": {"model": "tales", "input": LONG},
    "/api/chat": {"model": "tales", "messages": [{"role": "user", "content": LONG}]},
}


@pytest.mark.parametrize("path", OVERFLOWS)
async def test_what_the_context_has_no_room_for_is_said_as_openai_says_it(
    http: Http, path: str
) -> None:
    answer = await http.post(path, OVERFLOWS[path])
    assert answer.status == 400
    said = answer.json["error"] if path.startswith("/api/") else answer.error["message"]
    assert said.startswith("This model's maximum context length is 512 tokens. ")
    assert "context_length_exceeded" in said and "shorten it" in said


async def test_a_request_for_more_than_is_left_gets_the_rest(http: Http) -> None:
    wanted = {"model": "tales", "prompt": [5] * 500, "max_tokens": 4096, "ignore_eos": True}
    answer = (await http.post("/v1/completions", wanted)).json
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 12


async def test_other_errors_have_the_same_form(http: Http) -> None:
    unknown = await http.post("/v1/completions", {**COMPLETION, "model": "none"})
    assert (unknown.status, unknown.error["code"], unknown.error["param"]) == (
        404,
        "model_not_found",
        "model",
    )
    for method, path in (
        ("GET", "/v1/nothing"),
        ("POST", "/v1/audio/speech"),
        ("GET", "/nothing"),
        ("DELETE", "/v2"),
    ):
        nowhere = await http.send(method, path, None)
        assert (nowhere.status, nowhere.error["code"]) == (404, "unknown_url")
    for method, path in (
        ("POST", "/api/embed"),
        ("DELETE", "/api/delete"),
        ("HEAD", "/api/blobs/x"),
    ):
        nowhere = await http.send(method, path, None)
        assert nowhere.status == 404 and nowhere.headers["content-type"] == "application/json"
        assert method == "HEAD" or nowhere.json == {"error": f"{path} does not exist here"}
    wrong = await http.get("/v1/completions")
    assert wrong.status == 405 and wrong.error["type"] == "invalid_request_error"
    assert "POST" in wrong.headers["allow"]


async def test_every_answer_names_its_request(http: Http) -> None:
    answer = await http.get("/v1/models", {"x-request-id": "abc-123"})
    assert answer.headers["x-request-id"] == "abc-123"
    made = [
        (await http.get(path)).headers["x-request-id"]
        for path in ("/health", "/v1/nothing", "/v1/models")
    ]
    assert len(set(made)) == 3
    odd = await http.get("/health", {"x-request-id": "a b\tc"})
    assert odd.headers["x-request-id"] != "a b\tc"


LEAVING: dict[str, dict[str, Any]] = {
    "/v1/completions": {**GREEDY, "prompt": PROMPT, "max_tokens": 480, "ignore_eos": True},
    "/v1/chat/completions": {**GREEDY, "messages": CHAT, "max_tokens": 480, "ignore_eos": True},
    "/v1/responses": {**GREEDY, "input": "x", "max_output_tokens": 480, "ignore_eos": True},
    "/api/chat": {
        "model": "tales",
        "messages": CHAT,
        "options": {"num_predict": 480},
        "stream": False,
    },
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", LEAVING)
async def test_a_client_that_leaves_cancels_its_request(
    site: Site, http: Http, path: str, stream: bool
) -> None:
    async def runs() -> bool:
        return (await site.client.deployment("tales")).active_requests > 0

    where = http.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(where[0], int(where[1]))
    body = json.dumps({**LEAVING[path], "stream": stream}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {http.key}\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await site.until(runs)
    if stream:
        await reader.readuntil(b"\r\n\r\n")
    writer.close()
    began = asyncio.get_running_loop().time()

    async def is_over() -> bool:
        return not await runs()

    await site.until(is_over)
    # A full answer would take 3 s on a quiet machine: it ended because its client had left.
    assert asyncio.get_running_loop().time() - began < 30
    await site.kv_gone()
    metrics = (await http.get("/metrics")).body.decode()
    if not stream:
        assert f'method="POST",route="{path}",status="499"' in metrics


async def test_keys_decide_who_comes_in(site: Site, http: Http) -> None:
    nobody = Http(http.url)
    for path in ("/health", "/version", "/"):
        assert (await nobody.get(path)).status == 200
    refused = await nobody.post("/v1/completions", COMPLETION)
    assert (refused.status, refused.error["code"]) == (401, "no_api_key")
    assert refused.headers["www-authenticate"] == "Bearer"
    key, text = await site.client.create_key("narrow", ["other"])
    assert (
        key == ApiKey("narrow", ("other",), None, None, key.key_id, key.created_at, metrics=False)
        and key in await site.client.keys()
    )
    narrow = Http(http.url, text)
    scope = await narrow.post("/v1/chat/completions", TALK)
    assert (scope.status, scope.error["code"], scope.error["param"]) == (403, "key_scope", "model")
    assert (await narrow.get("/v1/models")).json["data"] == []
    assert (await narrow.get("/metrics")).status == 403
    assert (
        await Http(http.url, text[:-1] + ("A" if text[-1] != "A" else "B")).get("/v1/models")
    ).status == 401
    await site.client.revoke_key("narrow")
    gone = await narrow.get("/v1/models")
    assert (gone.status, gone.error["code"]) == (401, "invalid_api_key")
    entries = {
        (entry.who, entry.what, entry.target, entry.result)
        for entry in await site.client.audit(100)
    }
    assert ("nobody", "POST /v1/completions", "", "NO_API_KEY") in entries
    assert {(what, target) for _, what, target, result in entries if result == OK} >= {
        ("CreateKey", "narrow"),
        ("RevokeKey", "narrow"),
    }


@pytest.mark.parametrize("at_terminal", [False, True])
async def test_people_are_told_how_a_key_is_used(site: Site, at_terminal: bool) -> None:
    ours, theirs = pty.openpty()
    plain = {
        "EDGESHARD__CLIENT__PLAINTEXT": "true",
        "EDGESHARD__CLIENT__COORDINATOR": site.cluster.address,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "edgeshard.cli.main", "key", "create",
        f"reader-{at_terminal}".lower(), stdout=asyncio.subprocess.PIPE,
        stderr=theirs if at_terminal else asyncio.subprocess.PIPE,
        env={**os.environ, **plain},
    )  # fmt: skip
    os.close(theirs)
    said, told = await asyncio.wait_for(process.communicate(), 60)
    hint = os.read(ours, 1 << 16).decode() if at_terminal else told.decode()
    os.close(ours)
    key = said.decode().strip()
    assert (
        process.returncode == 0
        and (await Http(site.cluster.coordinator.gateway, key).get("/v1/models")).status == 200
    )
    assert ("curl URL/v1/models -H 'Authorization: Bearer KEY'" in hint) is at_terminal
    assert ('OpenAI(base_url="URL/v1", api_key="KEY")' in hint) is at_terminal
    assert key not in hint, "stdout goes to a file, and the key nowhere else"


async def test_a_key_is_held_to_its_own_limits(site: Site, http: Http) -> None:
    _, text = await site.client.create_key("small", tokens_per_minute=60, requests=1)
    small = Http(http.url, text)
    asked = {**COMPLETION, "max_tokens": 100, "ignore_eos": True}
    first = await small.post("/v1/completions", asked)
    assert first.status == 200
    second = await small.post("/v1/completions", asked)
    assert (second.status, second.error["code"], second.error["type"]) == (
        429,
        "rate_limit_exceeded",
        "rate_limit_error",
    )
    assert (
        1 <= int(second.headers["retry-after"]) <= 60 and second.headers["x-should-retry"] == "true"
    )
    _, text = await site.client.create_key("one", requests=1)
    one = Http(http.url, text)
    async with one.opened(
        "POST", "/v1/completions", {**asked, "max_tokens": 400, "stream": True}
    ) as stream:
        assert stream.status == 200
        third = await one.post("/v1/completions", COMPLETION)
        assert (third.status, third.error["param"]) == (429, "requests")
    assert (await http.post("/v1/completions", COMPLETION)).status == 200


async def test_revoking_a_key_ends_its_stream(site: Site, http: Http) -> None:
    _, text = await site.client.create_key("short")
    asked = {**COMPLETION, "max_tokens": 480, "ignore_eos": True, "stream": True}
    async with Http(http.url, text).opened("POST", "/v1/completions", asked) as stream:
        parts = stream.parts()
        await anext(parts)
        await site.client.revoke_key("short")
        rest = b"".join([part async for part in parts]).decode()
    assert '"code":"revoked"' in rest and rest.endswith("data: [DONE]\n\n")


async def test_pages_of_other_sites_are_refused(http: Http) -> None:
    for headers in (
        {"host": "evil.example"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
    ):
        answer = await http.get("/health", headers)
        assert (answer.status, answer.error["code"]) == (403, "foreign_host")
    assert (await http.get("/health", {"origin": "http://localhost:3000"})).status == 200


async def test_nothing_of_a_request_is_in_the_logs(site: Site, http: Http) -> None:
    secret = "Zanzibar quokka"
    await http.post("/v1/completions", {**COMPLETION, "prompt": secret, secret: 1})
    await http.post(
        "/v1/chat/completions", {**TALK, "messages": [{"role": "user", "content": secret}]}
    )
    assert http.key is not None
    key = http.key.split("-", 2)[2].encode()  # after its id, which is no secret
    for path in site.cluster.directory.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert secret.encode() not in data and key not in data, path


async def test_metrics_count_requests(site: Site, http: Http) -> None:
    _, key = await site.client.create_key("prometheus", metrics=True)
    text = (await Http(http.url, key).get("/metrics")).body.decode()
    assert (
        'edgeshard_http_requests_total{method="POST",route="/v1/completions",status="200"}' in text
    )
    assert 'edgeshard_http_tokens_total{kind="generated"}' in text
    assert "vllm:generation_tokens_total" in text, "the site's own, too"
    kinds = [
        line.split()[2].removesuffix("_total")
        for line in text.splitlines()
        if line.startswith("# TYPE ")
    ]
    assert set(kinds) > FOR_ANY_KEY, "each of them is there"
    await site.client.revoke_key("prometheus")


async def test_no_key_reads_the_lengths_of_others(site: Site, http: Http) -> None:
    """The /metrics page of a key changes with the number of requests, and not with their numbers of
    tokens."""
    _, key = await site.client.create_key("curious")
    seen = []
    for words, new_tokens in (("Once", 3), ("Once upon a time there was a", 17)):
        body = {
            **COMPLETION,
            "prompt": words,
            "max_tokens": new_tokens,
            "ignore_eos": True,
            "stream": False,
        }
        assert (await http.post("/v1/completions", body)).status == 200
        text = (await Http(http.url, key).get("/metrics")).body.decode()
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        counts = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
        assert counts['edgeshard_requests_total{deployment="tales",replica="",role="key"}'] >= 1
        assert not any(
            "_sum" in name or "token_latency" in name or "stage" in name for name in counts
        )
        seen.append(counts)
    grown = {name: value - seen[0].get(name, 0.0) for name, value in seen[1].items()}
    assert {value for name, value in grown.items() if "http" not in name} <= {0.0, 1.0}
    await site.client.revoke_key("curious")


@needs_clients
@pytest.mark.parametrize(
    "name",
    [
        "openai",
        "ollama",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("instructor", "langchain", "litellm", "llm")
        ),
        pytest.param("pydantic_ai", marks=pytest.mark.long),
    ],
)
async def test_a_client_that_people_have_works(http: Http, name: str) -> None:
    assert http.key is not None
    script = Path(__file__).parent / "clients" / f"{name}_client.py"
    assert (
        (await run(CLIENTS / "bin" / "python", script, http.url, http.key)).rstrip().endswith("ok")
    )


@needs_node_clients
@pytest.mark.long
@pytest.mark.parametrize("name", ["ai", "openai"])
async def test_a_client_for_node_works(http: Http, tmp_path: Path, name: str) -> None:
    assert http.key is not None
    # Node looks for packages next to the script.
    script = tmp_path / f"{name}_client.mjs"
    script.write_bytes((Path(__file__).parent / "clients" / script.name).read_bytes())
    (tmp_path / "node_modules").symlink_to(CLIENTS / "node" / "node_modules")
    assert (await run("node", script, http.url, http.key)).rstrip().endswith("ok")


async def test_curl_works(http: Http) -> None:
    key = f"Authorization: Bearer {http.key}"
    body = (
        '{"model": "tales", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": '
        '4, "stream": true}'
    )
    said = await run("curl", "-sN", f"{http.url}/v1/chat/completions", "-H", key, "-d", body)
    assert said.endswith("data: [DONE]\n\n") and said.count("data: ") >= 4


@pytest.mark.long
@needs_clients
async def test_lm_eval_finds_the_scores_of_the_unsplit_model(http: Http) -> None:
    assert http.key is not None
    text = Path(__file__).resolve().parents[1] / "data" / "fairy-tales.valid.txt"
    script = Path(__file__).parent / "clients" / "lm_eval_client.py"
    said = json.loads(
        (
            await run(CLIENTS / "bin" / "python", script, http.url, http.key, DEMO_MODEL, text)
        ).splitlines()[-1]
    )
    assert len(said) == 4
    for item in said:
        assert item["score"] == pytest.approx(_unsplit_score(item["text"]), abs=1e-3)


def _unsplit_score(text: str) -> float:
    """The model's score of a text after its first token, whole and in one process."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.inference_mode():
        logits = model(torch.tensor([[tokenizer.bos_token_id, *ids]])).logits[0, :-1]
    return float(logits.log_softmax(-1)[range(len(ids)), ids].sum())
