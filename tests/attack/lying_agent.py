"""A real agent that serves stages, and lies in its messages. For sites of one's own on loopback.

It runs in this process. The lies are planted in one place for each role: the maker of the head's
messages to the coordinator, or of the last stage's results to the head. No check of the agent's own
comes after that.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.requests.generation import StageTiming, TokenLogprob
from edgeshard.domain.requests.step import GuideFailure, ReturnedStep, SampledToken, StepResult
from edgeshard.process.config import load_settings
from edgeshard.process.logs import configure_logging
from edgeshard.proto.v1 import common_pb2, head_pb2
from edgeshard.rpc.tls import TlsFiles
from tests.support.identities import tls_options

MANY = 100_000
LONG_TEXT = "x" * 1_000_000
BEYOND = 400
"""Tokens added to a message."""
LONG_PROMPT = "a long prompt"
_TIMINGS = [common_pb2.StageTiming(stage=0, wait_s=1e-3, compute_s=1e-3)] * MANY
_TOP = [common_pb2.TokenLogprob(token=1, logprob=-1.0)] * MANY


Lie = Callable[[Any], Any]
"""Returns the message after a change, None if it does not fit."""


class Lies:
    """Changes messages, all of one request or result by the same lie; `told` counts the changes.

    No message changes until `begun`. `only` is the name of the one lie to use, if it is set.
    """

    def __init__(self, lies: Mapping[str, Lie], begins: Callable[[Any], bool]) -> None:
        """`begins` is whether a message is the first of a request or result."""
        self.told: Counter[str] = Counter()
        self.begun = False
        self.only = ""
        self._lies = lies
        self._begins = begins
        self._names = cycle(lies)
        self._name = next(self._names)

    def change(self, message: Any) -> Any:
        """The message after a lie; the message itself if the lie does not fit it."""
        if not self.begun:
            return message
        if self._begins(message):
            self._name = self.only or next(self._names)
        changed = self._lies[self._name](message)
        if changed is None:
            return message
        self.told[self._name] += 1
        return changed


# A head's, to the coordinator


def _long_prompt(message: head_pb2.AttachRequest) -> head_pb2.AttachRequest | None:
    if message.WhichOneof("message") != "accepted":
        return None
    message.accepted.prompt_tokens.extend([7] * 60_000)
    return message


def _of_token(change: Callable[[head_pb2.HeadToken], None]) -> Lie:
    """A lie about the first token of a message."""

    def lie(message: head_pb2.AttachRequest) -> head_pb2.AttachRequest | None:
        match message.WhichOneof("message"):
            case "token":
                change(message.token)
            case "tokens":
                change(message.tokens.tokens[0])
            case _:
                return None
        return message

    return lie


def _beyond(message: head_pb2.AttachRequest) -> head_pb2.AttachRequest | None:
    """More tokens than were requested, after each one."""
    if message.WhichOneof("message") != "token":
        return None
    token = message.token
    token.finish_reason = head_pb2.FINISH_REASON_UNSPECIFIED
    tokens = [token, *(head_pb2.HeadToken() for _ in range(BEYOND))]
    for number, each in enumerate(tokens[1:], token.position + 1):
        each.CopyFrom(token)
        each.position = number
    return head_pb2.AttachRequest(tokens=head_pb2.HeadTokens(tokens=tokens))


def _endless(message: head_pb2.AttachRequest) -> head_pb2.AttachRequest | None:
    """The head keeps the end of an answer to itself."""
    if message.WhichOneof("message") != "finished":
        return None
    return head_pb2.AttachRequest(beacon=head_pb2.HeadBeacon())


def _far(token: head_pb2.HeadToken) -> None:
    token.position = (1 << 32) - 1


def _no_number(token: head_pb2.HeadToken) -> None:
    token.logprob = math.nan


def _many_top(token: head_pb2.HeadToken) -> None:
    token.top.extend(_TOP)


def _many_timings(token: head_pb2.HeadToken) -> None:
    token.timings.extend(_TIMINGS)


def _long_text(token: head_pb2.HeadToken) -> None:
    token.text = LONG_TEXT


def _of_others(token: head_pb2.HeadToken) -> None:
    token.request_id = "of-others"


HEAD: Mapping[str, Lie] = {
    "many top": _of_token(_many_top),
    "many timings": _of_token(_many_timings),
    "a long text": _of_token(_long_text),
    LONG_PROMPT: _long_prompt,
    "tokens beyond the maximum": _beyond,
    "no end": _endless,
    "a far position": _of_token(_far),
    "no number": _of_token(_no_number),
    "a request of others": _of_token(_of_others),
}


def begins_request(message: head_pb2.AttachRequest) -> bool:
    """Whether a head's message is the first of a request."""
    return bool(message.WhichOneof("message") == "accepted")


# A last stage's, to the head


def _of_result(change: Callable[[StepResult], StepResult]) -> Lie:
    def lie(step: Any) -> ReturnedStep | None:
        return replace(step, result=change(step.result)) if is_result(step) else None

    return lie


def _of_sampled(**changes: Any) -> Lie:
    def change(result: StepResult) -> StepResult:
        return replace(result, tokens=tuple(replace(token, **changes) for token in result.tokens))

    return _of_result(change)


def _more_tokens(result: StepResult) -> StepResult:
    return replace(
        result, tokens=(*result.tokens, *(SampledToken(number, 5, 5) for number in range(MANY)))
    )


LAST_STAGE: Mapping[str, Lie] = {
    "many timings": _of_result(
        lambda result: replace(result, timings=(StageTiming(1, 1e-3, 1e-3),) * MANY)
    ),
    "many top": _of_sampled(top=(TokenLogprob(1, -1.0),) * (2 * MANY)),
    "more tokens": _of_result(_more_tokens),
    "a long failure": _of_result(
        lambda result: replace(result, guide_failures=(GuideFailure(1, LONG_TEXT),))
    ),
    "many pending": _of_result(lambda result: replace(result, pending=tuple(range(MANY)))),
    "an unknown token": _of_sampled(token=(1 << 32) - 1),
    "another position": _of_sampled(position=(1 << 32) - 1),
    "no number": _of_sampled(logprob=math.nan),
}


def is_result(step: Any) -> bool:
    """Whether a step is a last stage's result with tokens."""
    return isinstance(step, ReturnedStep) and bool(step.result.tokens)


def plant_in_head(lies: Lies) -> None:
    """Change the messages of this process's heads to the coordinator."""
    from edgeshard_agent.net import attach

    module: Any = attach
    make = module.head_message_to_wire
    module.head_message_to_wire = lambda message: lies.change(make(message))
    module.is_sendable = lambda message: True


def plant_in_last_stage(lies: Lies) -> None:
    """Change the messages of this process's last stages to the head."""
    from edgeshard_agent.engine import stage_runner

    module: Any = stage_runner
    make = module.encode_step
    module.encode_step = lambda pipeline, epoch, step, *sizes: make(
        pipeline, epoch, lies.change(step), *sizes
    )


@asynccontextmanager
async def agent(
    coordinator: str, name: str, files: TlsFiles, directory: Path
) -> AsyncIterator[asyncio.Task[None]]:
    """The agent's own daemon, in a task of this process."""
    from edgeshard_agent.daemon import serve
    from edgeshard_agent.settings import AgentSettings

    arguments = [
        "--coordinator",
        coordinator,
        "--name",
        name,
        "--state-dir",
        str(directory),
        "--threads",
        "1",
    ]
    arguments += ["--memory", "1GiB", *tls_options(files)]
    settings = load_settings(AgentSettings, "edgeshard-agent", arguments)
    configure_logging("error")
    serving = asyncio.create_task(serve(settings, lambda: settings))
    try:
        yield serving
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError, EdgeShardError):
            await serving
