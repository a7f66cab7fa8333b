"""Two real agents of one thread and one core each, deployments of the random Llama on them, and
client streams."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.engine_streams import Arrival, Stream
from bench.random_llama import CONFIG, write_checkpoint
from bench.sites import profiled
from bench.sizes import sized
from edgeshard.domain.deployments.deployment import parse_spec
from tests.support import load
from tests.support.load import answered
from tests.support.site import Site

NODES = ("a", "b")
MODEL = "llama-316m"
LAYERS = int(CONFIG["num_hidden_layers"])
CUT = sized(13, 4)
"""Layers of the first of two stages. The LM head, on the second, weighs as much as 1.4 layers while
every row is sampled from. Only the last row of a prompt is sampled from, so prompts are cut in the
middle."""
PROMPT_CUT = LAYERS // 2
_DEPLOY_S = 180.0


@dataclass(frozen=True, slots=True)
class Setup:
    """One deployment: how it is cut (`cut` layers on the first of two nodes), run and kept.

    With `micro_batches` 0 the head chooses how many are in flight.
    """

    stages: int
    mode: str = "no-bubbles"
    dtype: str = "bf16"
    micro_batches: int = 1
    concurrency: int = 16
    max_context: int = 512
    max_inter_token_latency_s: float | None = None
    cut: int = CUT

    @property
    def name(self) -> str:
        limit = "-limit" if self.max_inter_token_latency_s else ""
        parts = f"m{self.micro_batches}" if self.micro_batches else "auto"
        return f"{self.mode}-{self.dtype}-s{self.stages}-{parts}-c{self.max_context}{limit}"

    def in_flight(self, streams: int) -> int:
        """Micro-batches of `streams` streams."""
        return min(self.micro_batches, streams)

    def spec(self) -> dict[str, object]:
        first, second = NODES
        whole, halves = f"{first}=0:{LAYERS}", f"{first}=0:{self.cut},{second}={self.cut}:{LAYERS}"
        values: dict[str, object] = {
            "name": self.name,
            "model": MODEL,
            "source": NODES[0],
            "dtype": "bfloat16",
            "mode": self.mode,
            "micro_batches": self.micro_batches,
            "concurrency": self.concurrency,
            "max_context": self.max_context,
            "max_new_tokens": self.max_context,
            "layers": whole if self.stages == 1 else halves,
            "speculation": "off",  # a step is a token
        }
        if self.dtype != "bf16":
            values["quantisation"] = {"*": self.dtype}
        if self.max_inter_token_latency_s is not None:
            values["max_inter_token_latency_s"] = self.max_inter_token_latency_s
        return values


def prompt_of(number: int, tokens: int) -> list[int]:
    return [
        (7919 * number + 31 * position + position * position) % int(CONFIG["vocab_size"])
        for position in range(tokens)
    ]


class PinnedSite(Site):
    """Both nodes pinned, and the model in the store: `model`, or the random Llama in `scratch`."""

    def __init__(
        self,
        scratch: Path,
        agent_arguments: Sequence[str] = (),
        *,
        secure: bool = False,
        model: Path | None = None,
    ) -> None:
        self._random_model = scratch / "model" if model is None else None
        models = {MODEL: model or scratch / "model"}
        super().__init__(
            scratch,
            NODES,
            models=models,
            first_core=0,
            agent_arguments=agent_arguments,
            secure=secure,
        )

    async def start(self) -> None:
        if self._random_model is not None:
            write_checkpoint(self._random_model)
        await super().start()
        self.pin()

    def pin(self) -> None:
        """Each agent to a core of its own. Processes that it starts later are pinned with it."""
        for core, name in enumerate(NODES):
            pid = self.agents[name].pid
            assert pid is not None
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {core})

    async def profile(self) -> None:
        """Have both nodes measure themselves with the model. Raises the error of a node that could
        not."""
        await profiled(self.client, MODEL, quick=True)

    async def deploy(self, setup: Setup) -> None:
        await self.client.deploy(parse_spec(setup.spec()), timeout_s=_DEPLOY_S)
        self.pin()  # the threads that came with it

    async def delete(self, setup: Setup) -> None:
        await self.client.delete_deployment(setup.name, timeout_s=_DEPLOY_S)

    async def stream(self, setup: Setup, prompt: Sequence[int], new_tokens: int) -> Stream:
        """One request from its beginning to its end."""
        return seen(
            await answered(
                self.client, setup.name, prompt, max_new_tokens=new_tokens, ignore_eos=True
            )
        )

    async def warm_up(self, setup: Setup) -> None:
        """A short request: weights that were not read for a while are slow at first."""
        await self.stream(setup, prompt_of(0, 16), 4)

    async def streams(
        self, setup: Setup, count: int, prompt_tokens: int, new_tokens: int
    ) -> list[Stream]:
        """So many at once, each with a prompt of its own."""
        prompts = [prompt_of(number, prompt_tokens) for number in range(count)]
        return list(
            await asyncio.gather(*(self.stream(setup, prompt, new_tokens) for prompt in prompts))
        )

    def processor_s_by_process(self) -> dict[str, float]:
        """Processor time of every process so far, by name."""
        return {
            **{name: process_s(pid) for name, pid in self.pids().items()},
            "client": time.process_time(),
        }


def seen(stream: load.Stream) -> Stream:
    """An ended request as the figures take it."""
    tokens = zip(stream.times[1:], stream.tokens, strict=True)
    return Stream(stream.times[0], tuple(Arrival(at_s, token.timings) for at_s, token in tokens))


def process_s(pid: int) -> float:
    """Processor time of all threads, to the nanosecond: other counters of the kernel tick a hundred
    times a second, and some tokens have less."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return (
        sum(
            int((thread / "schedstat").read_text(encoding="ascii").split()[0]) for thread in threads
        )
        / 1e9
    )
