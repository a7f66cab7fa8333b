"""Guided answers, proved and timed: `python -m bench.guides`.

The demo model runs over three nodes of this machine. It answers 200 random schemas with two seeds
each. Every complete answer must parse, and satisfy its schema by a check that is written by hand.
Then the time per token with and without a guide, in turns, for one stream and for four. Then each
node is killed in the middle of an answer: the same text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.sites import demo_site
from bench.sizes import sized
from edgeshard.client import Client, Guide, GuideKind
from edgeshard.domain.deployments.deployment import DeploymentPhase, parse_spec
from edgeshard.domain.requests.generation import FinishReason
from tests.support.site import Site

NAME = "tales"
PROMPT = "Once upon a time there was a king who had three sons"
NEW_TOKENS = sized(400, 40)
STREAMS = 4
WORDS = ("name", "age", "colour", "house", "wife", "gold", "horse", "wish", "three", "end")
SPEC = {
    "name": NAME,
    "model": NAME,
    "source": "a",
    "dtype": "float32",
    "layers": "a=0:4,b=4:9,c=9:12",
}
SPEC["speculation"] = "off"  # a step is a token


@dataclass(frozen=True, slots=True)
class Kind:
    """A schema, and whether a value is of it."""

    schema: dict[str, Any]
    holds: Callable[[Any], bool]


def any_kind(chance: random.Random, depth: int = 0) -> Kind:
    makers = [_text, _pattern, _integer, _number, _enum, _either, _plain]
    if depth < 3:
        makers += [_object, _object, _array]
    return chance.choice(makers)(chance, depth)


def _text(chance: random.Random, depth: int) -> Kind:
    least = chance.randrange(3)
    most = least + chance.randrange(1, 12)
    schema = {"type": "string", "minLength": least, "maxLength": most}
    return Kind(schema, lambda value: isinstance(value, str) and least <= len(value) <= most)


def _pattern(chance: random.Random, depth: int) -> Kind:
    pattern = chance.choice(
        ["[a-z]{2,9}", "[A-Z][a-z]{1,7} [A-Z][a-z]{1,7}", "(yes|no|never)!?", "[0-9]{4}-[01][0-9]"]
    )
    return Kind(
        {"type": "string", "pattern": f"^{pattern}$"},
        lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None,
    )


def _integer(chance: random.Random, depth: int) -> Kind:
    low = chance.randrange(-500, 500)
    high = low + chance.randrange(1000)
    schema = {"type": "integer", "minimum": low, "maximum": high}
    return Kind(schema, lambda value: type(value) is int and low <= value <= high)


def _number(chance: random.Random, depth: int) -> Kind:
    low, high = -chance.randrange(100), chance.randrange(1, 100)
    schema = {"type": "number", "minimum": low, "maximum": high}
    return Kind(schema, lambda value: type(value) in (int, float) and low <= value <= high)


def _enum(chance: random.Random, depth: int) -> Kind:
    values: list[Any] = chance.sample(
        [*WORDS, 1, 2.5, None, True, 'it\'s "so"', "\n"], chance.randrange(1, 6)
    )
    return Kind(
        {"enum": values}, lambda value: any(type(value) is type(v) and value == v for v in values)
    )


def _plain(chance: random.Random, depth: int) -> Kind:
    if chance.random() < 0.5:
        return Kind({"type": "boolean"}, lambda value: isinstance(value, bool))
    return Kind({"type": "null"}, lambda value: value is None)


def _either(chance: random.Random, depth: int) -> Kind:
    kinds = [any_kind(chance, depth + 2) for _ in range(chance.randrange(2, 4))]
    return Kind(
        {"anyOf": [kind.schema for kind in kinds]},
        lambda value: any(kind.holds(value) for kind in kinds),
    )


def _array(chance: random.Random, depth: int) -> Kind:
    item, least = any_kind(chance, depth + 1), chance.randrange(3)
    most = least + chance.randrange(4)
    return Kind(
        {"type": "array", "items": item.schema, "minItems": least, "maxItems": most},
        lambda value: (
            isinstance(value, list) and least <= len(value) <= most and all(map(item.holds, value))
        ),
    )


def _object(chance: random.Random, depth: int) -> Kind:
    names = chance.sample(WORDS, chance.randrange(1, 5))
    kinds = {name: any_kind(chance, depth + 1) for name in names}
    needed = [name for name in names if chance.random() < 0.7]
    schema = {
        "type": "object",
        "properties": {name: kind.schema for name, kind in kinds.items()},
        "required": needed,
        "additionalProperties": False,
    }
    return Kind(
        schema,
        lambda value: (
            isinstance(value, dict)
            and set(needed) <= set(value) <= set(names)
            and all(kinds[name].holds(part) for name, part in value.items())
        ),
    )


def guide_of(schema: dict[str, Any]) -> Guide:
    return Guide(GuideKind.JSON_SCHEMA, json.dumps(schema))


async def prove(client: Client, count: int) -> dict[str, Any]:
    """Check that every complete answer satisfies its schema."""
    places = asyncio.Semaphore(STREAMS)
    wrong = list[str]()
    ended = 0
    cut = 0

    async def ask(number: int, seed: int) -> None:
        nonlocal ended, cut
        kind = any_kind(random.Random(number))
        async with places:
            answer = await client.complete(
                NAME,
                PROMPT,
                guide=guide_of(kind.schema),
                max_new_tokens=NEW_TOKENS,
                temperature=1.0,
                seed=seed,
            )
        if answer.finish_reason is not FinishReason.STOP:
            cut += 1
            return
        ended += 1
        try:
            if kind.holds(json.loads(answer.text)):
                return
        except ValueError:
            pass
        wrong.append(
            f"schema {number}, seed {seed}: {json.dumps(kind.schema)} gave {answer.text!r}"
        )

    await asyncio.gather(*(ask(number, seed) for number in range(count) for seed in (1, 2)))
    return {
        "schemas": count,
        "answers": 2 * count,
        "ended": ended,
        "cut_by_length": cut,
        "wrong": wrong,
    }


LONG = guide_of({"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 100})
"""An answer to this does not end before the requested maximum of tokens."""


async def cost(client: Client, rounds: int, streams: int) -> dict[str, Any]:
    """Milliseconds per token and stream, without and with a guide, in turns."""
    found: dict[bool, list[float]] = {False: [], True: []}

    async def ask(guide: Guide | None) -> float:
        answer = await client.complete(
            NAME,
            PROMPT,
            guide=guide,
            max_new_tokens=200,
            ignore_eos=guide is None,
            temperature=0.8,
            seed=1,
        )
        assert len(answer.token_ids) == 200
        return 1000 * answer.inter_token_latency_s

    await ask(LONG)  # begins the processes of matchers
    for _ in range(rounds):
        for guided in (False, True):
            took = await asyncio.gather(*(ask(LONG if guided else None) for _ in range(streams)))
            found[guided].append(statistics.median(took))
    plain, guided_ms = statistics.median(found[False]), statistics.median(found[True])
    ratios = [guided / plain for plain, guided in zip(found[False], found[True], strict=True)]
    return {
        "streams": streams,
        "rounds": rounds,
        "plain_ms": round(plain, 3),
        "guided_ms": round(guided_ms, 3),
        "up_percent": round(100 * (statistics.median(ratios) - 1), 1),
    }


async def kill(site: Site) -> dict[str, Any]:
    """The answers of a run in which a node was killed, and of a run without a kill."""
    client = site.client
    asked: Any = {
        "guide": LONG,
        "max_new_tokens": 120,
        "temperature": 0.8,
        "seed": 3,
        "timeout_s": 60,
    }
    undisturbed = await client.complete(NAME, PROMPT, **asked)
    same = {}
    for index in sized((2, 1, 0), (1,)):
        victim = (await client.deployment(NAME)).placement.stages[index].node_name
        running = asyncio.create_task(client.complete(NAME, PROMPT, **asked))
        await asyncio.sleep(undisturbed.total_s / 2)
        await site.agents[victim].kill()
        same[f"stage {index}"] = (await running).text == undisturbed.text
        await site.cluster.start_agent(victim)
        while (await client.deployment(NAME)).phase is not DeploymentPhase.READY:  # noqa: ASYNC110 (it has no event)
            await asyncio.sleep(0.1)
    return same


async def measure(schemas: int, rounds: int) -> dict[str, Any]:
    async with demo_site(("a", "b", "c", "d"), NAME) as site:
        client = site.client
        await client.deploy(parse_spec({**SPEC, "concurrency": STREAMS}), timeout_s=180.0)
        return {
            "proof": await prove(client, schemas),
            "cost": [await cost(client, rounds, streams) for streams in (1, STREAMS)],
            "killed": await kill(site),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments.schemas, arguments.rounds))
    print(json.dumps(found, indent=2))
    sys.exit(bool(found["proof"]["wrong"]) or not all(found["killed"].values()))


if __name__ == "__main__":
    main()
