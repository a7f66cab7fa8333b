"""Processes killed by failpoints in steps that have guessed tokens: every client gets the same as
without a kill."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from edgeshard_agent.ops.native import native_available

from edgeshard.domain.deployments.placement import Speculation
from edgeshard.domain.nodes.device import StageGuesses
from edgeshard.domain.requests.generation import GenerateOptions
from tests.chaos.failpoints import Action, Failpoint, Place
from tests.chaos.matrix import VOCABULARY, Ask, Shape
from tests.chaos.shapes import layers_of, save
from tests.chaos.site import DEPLOYMENT, ChaosSite
from tests.chaos.trial import stream_of
from tests.support.checker import Reference, check, reference_of
from tests.support.forms import in_form, one_in
from tests.support.load import Stream

pytestmark = pytest.mark.skipif(
    not native_available(), reason="torch's operators do not promise the bits"
)


@dataclass(frozen=True, slots=True)
class Repeated(Ask):
    """A prompt that repeats, so that guesses follow; `narrow`, an answer of two words, since a
    random hybrid's does not."""

    narrow: bool = False

    @property
    def options(self) -> GenerateOptions:
        options: GenerateOptions = Ask.options.__get__(self)
        return (
            options | GenerateOptions(logit_bias={300: 90.0, 301: 90.0}) if self.narrow else options
        )

    @property
    def prompt(self) -> tuple[int, ...]:
        chance = random.Random(self.seed)
        return tuple(chance.randrange(*VOCABULARY) for _ in range(9)) * 6


ASKS = [
    Repeated(1, new_tokens=64, logprobs=True),
    Repeated(2, new_tokens=64, logprobs=True, sampled=True),
]
PLACES = [
    (2, Place.BEFORE_COMPUTE),
    (2, Place.AFTER_COMPUTE),
    (1, Place.AFTER_SEND),
    (0, Place.BEFORE_RETURN),
    (0, Place.AFTER_RETURN),
    (0, Place.AFTER_COMPUTE),
]


async def answer(site: ChaosSite, ask: Ask) -> Stream:
    stream = stream_of(ask)
    await asyncio.wait_for(stream.run(site.client), 90)
    assert stream.error is None
    return stream


async def guesses(site: ChaosSite) -> StageGuesses:
    """As the head reports it from now on."""
    await site.reported(timeout_s=30)
    (found,) = [
        stage.guesses
        for stage in (await site.client.deployment(DEPLOYMENT)).stages
        if stage.guesses
    ]
    return found


OF_DEMO = {"dtype": "bfloat16"}
OF_HYBRID = OF_DEMO | {"model": "hybrid", "layers": layers_of(Shape.HYBRID)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "options",
    [
        *one_in(
            4,
            [
                OF_DEMO,
                OF_DEMO | {"quantisation": {"*": "int4"}},
                OF_HYBRID,
                OF_HYBRID | {"prefix_cache": True},
            ],
        ),
    ],
    ids=lambda options: " ".join(str(options[key]) for key in options if key != "layers"),
)
async def test_whoever_is_killed_between_guesses_no_token_changes(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    async with ChaosSite(tmp_path) as site:
        if "model" in options:
            save(Shape.HYBRID, tmp_path / "hybrid")
            await site.client.add_model(tmp_path / "hybrid", "hybrid")
        asks = [replace(ask, narrow="model" in options) for ask in ASKS]
        await site.deploy(speculation="off", **options)
        wanted: list[Reference] = [reference_of((await answer(site, ask)).events) for ask in asks]
        deployment = await site.deploy(speculation="on", **options)
        assert deployment.placement.speculation is Speculation.GUESSES
        for ask, right in zip(asks, wanted, strict=True):
            assert not check((await answer(site, ask)).events, right, whole=True).problems
        counted = await guesses(site)
        assert counted.guessed > counted.right > 20
        seen = (await site.client.deployment(DEPLOYMENT)).placement.guesses
        assert seen is not None and seen.times is None, (
            "the coordinator heard of guesses; no row was measured"
        )
        assert seen.right == pytest.approx(counted.right / counted.guessed, rel=0.05), (
            "the latest request weighs more"
        )
        for number, (stage, place) in enumerate(PLACES[: in_form(3, len(PLACES))]):
            victim = (await site.stages())[stage]
            point = Failpoint(f"{number} {place}", place, time=3, action=Action.KILL, guesses=True)
            site.arm(victim, [point])
            verdict = check((await answer(site, asks[0])).events, wanted[0], whole=True)
            assert not verdict.problems, (place, verdict.problems)
            assert point.id in site.marks(), f"{place}: nobody was killed"
            await site.killed({point.id: Action.KILL})
            await site.restore()
