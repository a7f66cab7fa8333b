"""An error of a tokenizer's library, also a panic of its Rust code, becomes an answer and does not
end a task."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from edgeshard_agent.engine.pipeline_head import Epoch, Head, HeadLimits
from edgeshard_agent.engine.tokenizer import Tokenizer
from edgeshard_agent.scheduler.batching import Batching
from edgeshard_agent.scheduler.chunking import Chunking
from edgeshard_agent.scheduler.kv_blocks import BlockAllocator
from edgeshard_agent.scheduler.scheduler import HeadStep, Limits, Scheduler

from edgeshard.domain.deployments.placement import Mode
from edgeshard.domain.errors import DataLossError, EdgeShardError, InternalError
from edgeshard.domain.ids import RequestId
from edgeshard.domain.requests.generation import Generation, Token
from edgeshard.domain.requests.head import HeadEvent, RequestAccepted, RequestEnd, StartRequest
from edgeshard.domain.requests.step import ReturnedStep, SampledToken, StepResult
from tests.support.tokenizers import PANICS, write_tokenizer

pytestmark = pytest.mark.timing


class Rig:
    """A head with a real tokenizer; `answer` gives the stages' result of the oldest step."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.out: list[HeadEvent] = []
        self.steps: list[HeadStep] = []
        self.failures: list[EdgeShardError] = []
        batching = Batching(Mode.NO_BUBBLES, 3, 4, 1)
        self.scheduler = Scheduler(
            BlockAllocator(16, 16), Limits(64, 8), batching, Chunking(64), frozenset()
        )
        epoch = Epoch(
            self.scheduler, self.steps.append, self.out.append, None, self.failures.append
        )
        self.head = Head(epoch, tokenizer, HeadLimits(4, 64, 64))

    async def ask(self, name: str, prompt: str, **options: Any) -> None:
        await self.head.start_request(
            StartRequest(RequestId(name), Generation(prompt, 3, **options))
        )

    async def answer(self, token: int) -> None:
        """Every request whose token is due gets this one."""
        step = self.steps.pop(0)
        tokens = [
            SampledToken(s.request, s.end_position, token) for s in step.plan.spans if s.sample
        ]
        self.head.on_return(ReturnedStep(step.number, StepResult(tuple(tokens))))
        await asyncio.sleep(0)

    def of(self, name: str) -> list[HeadEvent]:
        return [output for output in self.out if output.request_id == name]


def test_a_tokenizer_that_panics_while_it_is_read_is_a_damaged_file(tmp_path: Path) -> None:
    with pytest.raises(DataLossError) as caught:
        Tokenizer.load(write_tokenizer(tmp_path / "tokenizer.json", **PANICS["load"]))
    assert caught.value.field == "tokenizer.json"


@pytest.mark.parametrize(
    ("parts", "prompt"),
    [
        (PANICS["encode"], "01"),
        ({"model": {"type": "WordLevel", "vocab": {"0": 0}, "unk_token": "[UNK]"}}, "secret"),
    ],
    ids=["a panic", "a plain exception"],
)
async def test_a_tokenizer_that_fails_on_a_prompt_refuses_it(
    tmp_path: Path, parts: dict[str, Any], prompt: str
) -> None:
    rig = Rig(Tokenizer.load(write_tokenizer(tmp_path / "tokenizer.json", **parts)))
    await rig.ask("r", prompt)
    (refused,) = rig.out
    assert isinstance(refused.event, InternalError)
    assert (refused.event.field, refused.event.reason) == ("prompt", "TOKENIZER_FAILED")
    assert prompt not in refused.event.message
    assert rig.head.is_idle and not rig.failures


@pytest.mark.parametrize("stop", [(), ("end",)], ids=["as it comes", "with a stop string"])
async def test_a_tokenizer_that_fails_on_a_token_ends_its_request_and_no_other(
    tmp_path: Path, stop: tuple[str, ...]
) -> None:
    rig = Rig(Tokenizer.load(write_tokenizer(tmp_path / "tokenizer.json", **PANICS["decode"])))
    await rig.ask("one", "00", stop_strings=stop)
    await rig.ask("other", "00")
    while not any(isinstance(output.event, Token) for output in rig.of("other")):
        await rig.answer(1)
    step = rig.steps.pop(0)
    numbers = {rig.scheduler._running[span.request].request_id: span for span in step.plan.spans}
    sampled = [
        SampledToken(span.request, span.end_position, 2 if name == "one" else 1)
        for name, span in numbers.items()
    ]
    rig.head.on_return(ReturnedStep(step.number, StepResult(tuple(sampled))))
    await asyncio.sleep(0)
    while not rig.head.is_idle:
        await rig.answer(1)
    first = next(
        output for output in rig.of("one") if isinstance(output.event, EdgeShardError | RequestEnd)
    )
    assert isinstance(first.event, EdgeShardError) and first.event.field == "tokenizer.json"
    texts = [output.event.text for output in rig.of("other") if isinstance(output.event, Token)]
    assert texts == ["1", "1", "1"] and isinstance(rig.of("other")[-1].event, RequestEnd)
    assert not rig.failures, "the pipeline goes on"


async def test_a_prompt_whose_end_has_no_text_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    rig = Rig(Tokenizer.load(write_tokenizer(tmp_path / "tokenizer.json", **PANICS["decode"])))
    await rig.ask("r", "02")
    await asyncio.sleep(0)
    while not rig.head.is_idle:
        await rig.answer(1)
    assert isinstance(rig.out[0].event, EdgeShardError)
    assert not any(isinstance(output.event, Token) for output in rig.out[:2])
    await rig.ask("next", "00")
    assert isinstance(rig.of("next")[0].event, RequestAccepted) and not rig.failures


@pytest.mark.parametrize(
    "end", [KeyboardInterrupt, SystemExit, asyncio.CancelledError], ids=lambda end: end.__name__
)
@pytest.mark.parametrize("call", ["encode", "decode"])
def test_what_ends_a_process_or_a_task_is_not_taken_for_a_fault(
    tmp_path: Path, end: type[BaseException], call: str
) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "tokenizer.json"))

    class Ending:
        def encode_batch_fast(self, texts: list[str]) -> None:
            raise end

        def decode(self, ids: list[int], skip_special_tokens: bool) -> None:
            raise end

    tokenizer._tokenizer = Ending()  # type: ignore[assignment]
    with pytest.raises(end):
        tokenizer.encode("0") if call == "encode" else tokenizer.decode([0])
