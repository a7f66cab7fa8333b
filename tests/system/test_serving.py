"""Many requests over real nodes: each gets the unsplit model's tokens, whichever clients join,
leave, stall or are preempted.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from edgeshard.domain.deployments.deployment import DeploymentPhase, DeploymentSpec
from edgeshard.domain.errors import ResourceExhaustedError, UnavailableError
from edgeshard.domain.requests.generation import (
    Finished,
    FinishReason,
    GenerationEvent,
    Started,
    Token,
)
from edgeshard.rpc.channel import KEEPALIVE_S
from tests.support.forms import in_form
from tests.support.site import MakeSpec, Site

pytestmark = pytest.mark.asyncio(loop_scope="module")
DEMO_MODEL = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"
TIE = 2e-4
"""Two logits of the reference that are closer are as good as equal."""
BLOCK_TOKENS = 16
LONG_S = 200.0
"""Time for repeated attempts if the machine was too busy for the event."""
CROWD, PAIR = "crowd", "pair"
TWO_NODES = "a=0:6,b=6:12"


class Unsplit:
    """The whole model in float32, by transformers."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)

    @torch.no_grad()
    def objections(self, answers: Sequence[Answer]) -> list[str]:
        """The tokens that are not the greedy ones after their predecessors. Attention is causal:
        padding is free."""
        rows = [[*answer.prompt, *answer.tokens] for answer in answers]
        width = max(len(row) for row in rows)
        logits = self._model(torch.tensor([row + [0] * (width - len(row)) for row in rows])).logits
        found = []
        for number, answer in enumerate(answers):
            begin = len(answer.prompt) - 1
            before = logits[number, begin : begin + len(answer.tokens)]
            chosen = before.gather(1, torch.tensor(answer.tokens, dtype=torch.int64)[:, None])[:, 0]
            worse = (before.max(dim=1).values - chosen >= TIE).nonzero()
            if len(worse):
                found.append(
                    f"answer {number}: token {int(worse[0])} of {len(answer.tokens)} is not the "
                    "reference's"
                )
        return found


@pytest.fixture(scope="module")
def unsplit() -> Unsplit:
    return Unsplit()


@dataclass
class Answer:
    """The part of an answer that a client has read so far. Fails when a token is not the one that
    comes next."""

    prompt: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None

    def add(self, event: GenerationEvent) -> None:
        if isinstance(event, Started):
            self.prompt = event.prompt_tokens
        elif isinstance(event, Token):
            assert event.position == len(self.prompt) + len(self.tokens), (
                "a token was lost or repeated"
            )
            self.tokens.append(event.token)
        elif isinstance(event, Finished):
            self.reason = event.reason


class Reader:
    """A client's request, read as far as the client likes."""

    def __init__(self, site: Site, deployment: str, prompt: Sequence[int], **options: Any) -> None:
        self.answer = Answer()
        self._events = site.client.generate(deployment, prompt, **{"ignore_eos": True, **options})

    async def read(self, tokens: int | None = None) -> Answer:
        """Until there are `tokens` tokens, or to the end."""
        async for event in self._events:
            self.answer.add(event)
            if tokens is not None and len(self.answer.tokens) >= tokens:
                break
        return self.answer

    async def leave(self) -> None:
        await self._events.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def crowd(site: Site, make_spec: MakeSpec) -> AsyncIterator[None]:
    """A deployment with 24 blocks of KV: two requests at their longest, and four may run."""
    pool = {"concurrency": 2, "max_context": 192, "kv_overcommit": True, "prefix_cache": True}
    async with deployed(site, make_spec(name=CROWD, **pool)):
        yield


@asynccontextmanager
async def deployed(site: Site, *specs: DeploymentSpec) -> AsyncIterator[None]:
    """These deployments, and after them no KV on any node."""
    for spec in specs:
        await site.client.deploy(spec)
    try:
        yield
        await site.kv_gone()
    finally:
        for spec in specs:
            await site.client.delete_deployment(spec.name)


async def positions_run(site: Site) -> int:
    """Positions that went through first stages so far, once every node has let go of all KV."""
    await site.kv_gone()
    return sum(stage.tokens_done for stage in (await site.client.node("a")).stages)


def story(chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(3, 4096) for _ in range(length)]


@dataclass(frozen=True)
class Visit:
    """A client: its request, its arrival, and the number of tokens after which it leaves (None: it
    reads to the end).
    """

    prompt: list[int]
    options: dict[str, Any]
    comes_at_s: float
    goes_after: int | None = None
    cancels: bool = False

    async def make(self, site: Site, name: str) -> Answer:
        await asyncio.sleep(self.comes_at_s)
        while True:
            try:
                return await self._ask(site, name)
            except ResourceExhaustedError as full:
                assert full.retry_after_s
                await asyncio.sleep(full.retry_after_s)

    async def _ask(self, site: Site, name: str) -> Answer:
        reader = Reader(site, CROWD, self.prompt, request_id=name, **self.options)
        if self.goes_after is None:
            return await reader.read()
        await reader.read(self.goes_after)
        if self.cancels:
            await site.client.cancel(name)
            return await reader.read()
        await reader.leave()
        return reader.answer


def visits(chance: random.Random, count: int) -> list[Visit]:
    """Within a second: every fifth leaves or cancels, every fourth samples, half begin alike."""
    beginnings = [story(chance, 4 * BLOCK_TOKENS) for _ in range(2)]
    made = []
    for number in range(count):
        prompt = [
            *(chance.choice(beginnings) if number % 2 else []),
            *story(chance, chance.randint(1, 60)),
        ]
        options: dict[str, Any] = {"max_new_tokens": chance.randint(1, 192 - len(prompt))}
        if number % 4 == 3:
            options |= {"temperature": 0.9, "top_p": 0.95, "seed": number, "max_new_tokens": 24}
        goes_after = chance.randint(1, options["max_new_tokens"]) if number % 5 == 4 else None
        made.append(
            Visit(prompt, options, chance.uniform(0.0, 1.0), goes_after, cancels=number % 2 == 0)
        )
    return made


async def test_random_arrivals_all_get_the_unsplit_models_tokens(
    site: Site, crowd: None, unsplit: Unsplit
) -> None:
    """They join, leave, cancel, retry when refused, begin alike, are preempted; sampled ones get
    the same tokens as by themselves.
    """
    all_visits = visits(random.Random(3), in_form(15, 30))
    alone = {
        number: (await Reader(site, CROWD, visit.prompt, **visit.options).read()).tokens
        for number, visit in enumerate(all_visits)
        if "seed" in visit.options
    }
    answers = await asyncio.gather(
        *(visit.make(site, f"visit-{n}") for n, visit in enumerate(all_visits))
    )
    for visit, answer in zip(all_visits, answers, strict=True):
        assert list(answer.prompt) == visit.prompt
        if visit.goes_after is None:
            assert (answer.reason, len(answer.tokens)) == (
                FinishReason.LENGTH,
                visit.options["max_new_tokens"],
            )
        else:
            assert len(answer.tokens) >= visit.goes_after
    for number, tokens in alone.items():
        assert answers[number].tokens == tokens[: len(answers[number].tokens)]
    assert not unsplit.objections(
        [answer for number, answer in enumerate(answers) if number not in alone]
    )
    await site.kv_gone()


async def test_requests_that_outgrow_the_pool_run_again_to_the_same_tokens(
    site: Site, crowd: None, unsplit: Unsplit
) -> None:
    """Four with 12 blocks each at their end, in a pool of 24: some positions had to be run more
    than once."""
    chance = random.Random(4)

    async def outgrew() -> bool:
        """False if they arrived so far apart that they did not all meet in the pool."""
        prompts = [story(chance, 40) for _ in range(4)]
        before = await positions_run(site)
        answers = await asyncio.gather(
            *(Reader(site, CROWD, p, max_new_tokens=150).read() for p in prompts)
        )
        ran = await positions_run(site) - before
        assert [len(answer.tokens) for answer in answers] == [150] * 4
        assert not unsplit.objections(answers)
        return ran > 4 * (40 + 150 - 1)

    await site.until(outgrew, LONG_S)


async def test_a_shared_beginning_is_run_once(site: Site, crowd: None, unsplit: Unsplit) -> None:
    beginning = story(random.Random(5), 4 * BLOCK_TOKENS)
    answers, run = [], [await positions_run(site)]
    for tail in ([7, 8, 9], [11, 12, 13]):
        answers.append(await Reader(site, CROWD, [*beginning, *tail], max_new_tokens=20).read())
        run.append(await positions_run(site))
    assert [run[1] - run[0], run[2] - run[1]] == [len(beginning) + 3 + 19, 3 + 19]
    assert not unsplit.objections(answers)


async def test_a_reader_that_stalls_holds_up_nobody_and_misses_nothing(
    site: Site, make_spec: MakeSpec, unsplit: Unsplit
) -> None:
    """Its tokens wait between it and the coordinator; its memory on the nodes does not wait for
    it."""
    chance = random.Random(6)
    prompts = [story(chance, 12) for _ in range(4)]
    async with deployed(site, make_spec(name=PAIR, layers=TWO_NODES)):
        stalled = Reader(site, PAIR, prompts[0], max_new_tokens=300)
        await stalled.read(1)
        others = await asyncio.gather(
            *(Reader(site, PAIR, p, max_new_tokens=40).read() for p in prompts[1:])
        )
        await site.kv_gone()
        assert len(stalled.answer.tokens) == 1
        answer = await stalled.read()
    assert (answer.reason, len(answer.tokens)) == (FinishReason.LENGTH, 300)
    assert not unsplit.objections([answer, *others])


@pytest.mark.long
async def test_a_full_pool_makes_requests_wait_and_then_refuses_them(
    site: Site, make_spec: MakeSpec, unsplit: Unsplit
) -> None:
    """Two fill it, eight wait for their end, and one more is refused, with a hint that is true."""
    chance = random.Random(7)

    async def was_refused() -> bool:
        """False if a request that filled the pool had ended before the late one arrived."""
        fillers = [Reader(site, PAIR, story(chance, 10), max_new_tokens=230) for _ in range(2)]
        for filler in fillers:
            await filler.read(1)
        filling = [asyncio.create_task(filler.read()) for filler in fillers]
        waiters = [Reader(site, PAIR, story(chance, 240), max_new_tokens=4) for _ in range(8)]
        for waiter in waiters:
            await waiter.read(0)  # accepted
        late, refusal = story(chance, 10), None
        try:
            await Reader(site, PAIR, late, max_new_tokens=4).read()
        except ResourceExhaustedError as error:
            refusal = error
        waiting = [asyncio.create_task(waiter.read(1)) for waiter in waiters]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        # The coordinator receives the end that made room before a token of the admitted request.
        active = (await site.client.deployment(PAIR)).active_requests
        assert active < len(fillers) + len(waiters), "a request was let in before there was room"
        await asyncio.gather(*waiting)
        answers = await asyncio.gather(*filling, *(waiter.read() for waiter in waiters))
        if refusal is not None:
            assert refusal.retry_after_s
            await asyncio.sleep(refusal.retry_after_s)
        answers.append(await Reader(site, PAIR, late, max_new_tokens=4).read())
        assert [len(answer.tokens) for answer in answers] == [230] * 2 + [4] * 9
        assert not unsplit.objections(answers)
        return refusal is not None

    async with deployed(
        site, make_spec(name=PAIR, layers=TWO_NODES, concurrency=2, max_context=256)
    ):
        await site.until(was_refused, LONG_S)


async def test_a_stage_that_stands_still_for_a_while_stops_only_its_own_requests(
    site: Site, make_spec: MakeSpec, unsplit: Unsplit
) -> None:
    """Node b is halted under three streams; another deployment with the same head continues, and
    then the three do."""
    chance = random.Random(8)
    slow = make_spec(name=PAIR, layers=TWO_NODES)
    other = make_spec(name="other", layers="a=0:6,c=6:12")
    node = site.cluster.agents["b"]
    clock = asyncio.get_running_loop().time

    async def ready() -> bool:
        return (await site.client.deployment(PAIR)).phase is DeploymentPhase.READY

    async def stood_still_under_three() -> bool:
        """False if one had ended before the halt, or if this test itself stalled and the node
        counted as gone."""
        readers = [Reader(site, PAIR, story(chance, 10), max_new_tokens=200) for _ in range(3)]
        for reader in readers:
            await reader.read(5)
        began = clock()
        node.send_signal(signal.SIGSTOP)
        try:
            halt = asyncio.create_task(asyncio.sleep(0.5))
            meanwhile = await Reader(site, "other", story(chance, 10), max_new_tokens=6).read()
            await halt
            active = (await site.client.deployment(PAIR)).active_requests
        finally:
            node.send_signal(signal.SIGCONT)
        halted_s = clock() - began
        try:
            answers = [await reader.read() for reader in readers]
        except UnavailableError:
            if halted_s < KEEPALIVE_S:
                raise
            for reader in readers:
                await reader.leave()
            await site.until(ready)
            return False
        assert [len(answer.tokens) for answer in (*answers, meanwhile)] == [200, 200, 200, 6]
        assert not unsplit.objections([*answers, meanwhile])
        return active == 3

    async with deployed(site, slow, other):
        await site.until(stood_still_under_three, LONG_S)
