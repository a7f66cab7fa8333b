"""The cases that `bench.engine` measures, in full and in short."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench.engine_site import PROMPT_CUT, Setup
from bench.sizes import sized

PROMPT_TOKENS, SHORT_PROMPT_TOKENS = sized((128, 32), (16, 16))
LONG_PROMPTS = sized((128, 1024, 4096), (16, 32, 64))
QUICK_LONG_PROMPT = LONG_PROMPTS[1]
LONG_CONTEXT = max(LONG_PROMPTS) + 256
LIMIT_S = 0.25
DECODING, PROMPTS = "decoding", "prompts"
"""The quantity that a case measures: tokens per second, or the time to the first one."""

WHOLE = Setup(1)
AUTO = Setup(2, micro_batches=0)
"""As users run it: the head chooses the number of micro-batches."""
SPLIT = Setup(2, micro_batches=2)
RING = Setup(2, micro_batches=1)
"""Only one micro-batch circulates: the time of a hop with this number of streams if nothing else
runs."""
BUBBLES = Setup(2, "bubbles", micro_batches=2)
SPLIT_4 = Setup(2, micro_batches=4)
BUBBLES_4 = Setup(2, "bubbles", micro_batches=4)
SEQUENTIAL = Setup(2, "sequential", concurrency=1, max_context=LONG_CONTEXT, cut=PROMPT_CUT)
LONG_WHOLE = Setup(1, concurrency=1, max_context=LONG_CONTEXT)
LONG_SPLIT = Setup(2, concurrency=1, max_context=LONG_CONTEXT, cut=PROMPT_CUT)


@dataclass(frozen=True, slots=True)
class Case:
    """Some streams at once on one deployment."""

    setup: Setup
    streams: int
    prompt_tokens: int = PROMPT_TOKENS
    section: str = DECODING


@dataclass(frozen=True, slots=True)
class Plan:
    """The extent of a run: `prompt_tokens` and `new_tokens` of every stream; llama.cpp compares at
    `streams` and after the longest prompt, transformers at `transformers_streams`.

    No further round begins that would probably end later than `decoding_s` seconds after the run's
    begin.
    """

    rounds: int
    prompt_tokens: int
    new_tokens: int
    cases: tuple[Case, ...]
    long_rounds: int
    long_cases: tuple[Case, ...]
    streams: tuple[int, ...]
    transformers_streams: tuple[int, ...]
    limit: bool
    decoding_s: float = math.inf

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt of a case."""
        return max(case.prompt_tokens for case in self.long_cases)


def quantised(stages: int) -> list[Setup]:
    return [Setup(stages, dtype=dtype, concurrency=8) for dtype in ("int8", "int4")]


FULL = Plan(
    rounds=5,
    prompt_tokens=PROMPT_TOKENS,
    new_tokens=64,
    cases=(
        *(Case(setup, streams) for streams in (1, 2, 4, 8, 16) for setup in (WHOLE, AUTO, SPLIT)),
        *(Case(RING, streams) for streams in (2, 4, 8)),
        *(Case(BUBBLES, streams) for streams in (8, 16)),
        *(Case(setup, 16) for setup in (SPLIT_4, BUBBLES_4)),
        Case(SEQUENTIAL, 1),
        *(
            Case(setup, streams)
            for stages in (1, 2)
            for setup in quantised(stages)
            for streams in (1, 8)
        ),
    ),
    long_rounds=3,
    long_cases=tuple(
        Case(s, 1, tokens, PROMPTS)
        for tokens in LONG_PROMPTS
        for s in (LONG_WHOLE, LONG_SPLIT, SEQUENTIAL)
    ),
    streams=(1, 8, 16),
    transformers_streams=(1, 8, 16),
    limit=True,
)
QUICK_STREAMS = sized((1, 8, 16), (1, 2, 4))
QUICK = Plan(
    rounds=sized(2, 1),
    prompt_tokens=SHORT_PROMPT_TOKENS,
    new_tokens=16,
    cases=(
        *(
            Case(setup, streams, SHORT_PROMPT_TOKENS)
            for streams in QUICK_STREAMS
            for setup in (WHOLE, AUTO, SPLIT)
        ),
        Case(RING, QUICK_STREAMS[1], SHORT_PROMPT_TOKENS),
        Case(BUBBLES, QUICK_STREAMS[2], SHORT_PROMPT_TOKENS),
        *(Case(setup, 1, SHORT_PROMPT_TOKENS) for setup in (SEQUENTIAL, *quantised(1))),
    ),
    long_rounds=1,
    long_cases=tuple(
        Case(setup, 1, QUICK_LONG_PROMPT, PROMPTS) for setup in (LONG_SPLIT, SEQUENTIAL)
    ),
    streams=QUICK_STREAMS,
    transformers_streams=QUICK_STREAMS[:2],  # 16 streams take half a minute without AVX-512
    limit=False,
    decoding_s=200.0,
)


def setups(cases: tuple[Case, ...]) -> list[Setup]:
    """Every deployment of the cases once."""
    return list(dict.fromkeys(case.setup for case in cases))
