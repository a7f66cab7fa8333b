"""How much faster one stream is with guessed tokens: texts that repeat, one that does not, and JSON
by three schemas.

Two real agents, with a thread each, hold the demo model, the small mixture and a hybrid. Each model
is whole on one of them and in halves on both, with guesses and without. The mixture was measured
before. The hybrid is random, of Qwen3.5's shape: an answer of one word, by a bias, is the best text
that there is, and a sampled one the worst. So it is for the random Llama of 316 M parameters, which
`--models large` names; `streamed` is the demo model on a node that reads a part of it from its disk
in each step. One client sends one request at a time. Runs with guesses and without take turns, and
a row has the medians. Times go from an answer's first token to its last. Processor time is the
agents' time in user code. Answers must be equal, token for token.

With `--draft` only the demo model runs, once without guesses and once with a draft's guesses too;
the times of both models' steps are added. With `--together` 8 and 16 new tales at once, prompts
included.

    python -m bench.speculation [--rounds 5] [--models hybrid,large,streamed] [--quick]
                                [--draft|--together] [-o FILE]

prints JSON: a row a model, number of boxes and task.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.draft_steps import DraftSteps
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.weights import StageWeights

from bench import hybrids
from bench.quantisation import MODEL as DEMO
from bench.random_llama import CONFIG, write_checkpoint
from bench.safetensors_directory import SafetensorsDirectory
from bench.sites import demo_site, profiled, write_rows
from bench.sizes import sized
from edgeshard import Client
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import StageGuesses
from edgeshard.domain.requests.generation import Finished, Guide, GuideKind, Sampling, Token
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan
from tests.support.site import Site

TALE = (
    "There was once a poor miller who had nothing but a mill, a cat and three sons. One day the "
    "king came to the mill "
    "and said: Give me your cat, and I will give you a golden ring. The miller gave him the cat, "
    "and the king gave him "
    "the golden ring."
)
TASKS = {
    "a story told again": (f"{TALE} {TALE} There was once a poor miller who had", 0.0),
    "a list that goes on": (
        "One fox, two foxes, three foxes, one fox, two foxes, three foxes, one fox, two",
        0.0,
    ),
    "an answer with quotes": (
        'The king asked: "Who has taken my golden ring?" The fox said: "You ask who has taken my '
        'golden ring." The '
        'king asked: "Who has taken my golden ring?" The cat said:',
        0.0,
    ),
    "a new fairy tale": ("Once upon a time there was a king who had a daughter", 0.8),
}
"""Prompts and temperatures."""


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_KING = _object(
    name={"enum": ["the old king", "the young king", "the fisherman"]},
    occupation={"type": "string", "maxLength": 16},
    number_of_children={"type": "integer", "minimum": 0, "maximum": 12},
)
SCHEMAS: dict[str, dict[str, Any]] = {
    "JSON: a record": _KING,
    "JSON: a list of records": {"type": "array", "items": _KING, "minItems": 4, "maxItems": 4},
    "JSON: a tale's card": _object(
        title={"type": "string", "maxLength": 40},
        characters={
            "type": "array",
            "items": {"enum": ["king", "queen", "fox", "miller"]},
            "minItems": 3,
            "maxItems": 5,
        },
        happy_ending={"type": "boolean"},
        first_sentence={"type": "string", "maxLength": 60},
    ),
}
"""Answers that are guided and greedy, after the prompt of a new fairy tale."""
TASKS |= dict.fromkeys(SCHEMAS, (TASKS["a new fairy tale"][0], 0.0))
DRAFTED = {
    "a new fairy tale": (TASKS["a new fairy tale"][0], 0.8),
    "a new fairy tale, at temperature 0.4": (TASKS["a new fairy tale"][0], 0.4),
    "another new fairy tale": (
        "In a wood there lived a fox who was very hungry, and one day he said to himself",
        0.8,
    ),
    "a story told again": TASKS["a story told again"],
}
ONE_WORD = "one word again and again"
TASKS[ONE_WORD] = TASKS["a list that goes on"]
NEW_TOKENS = sized(160, 24)
MEASURED = sized(
    tuple(task for task in TASKS if task != ONE_WORD), ("a story told again", "JSON: a record")
)
MIXTURE, DRAFT = (Path(__file__).parent / name for name in ("mixture_model", "draft_model"))
HYBRID_LAYERS = sized(12, 4)
HYBRID = hybrids.HYBRID | {
    "hidden_size": sized(512, 128),
    "intermediate_size": sized(1536, 256),
    "num_hidden_layers": HYBRID_LAYERS,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * (HYBRID_LAYERS // 4),
    "vocab_size": 4096,
}
RANDOM = {"hybrid": HYBRID, "large": CONFIG | {"vocab_size": max(4096, CONFIG["vocab_size"])}}
LARGE_LAYERS = CONFIG["num_hidden_layers"]
LAYERS = {
    "tales": {1: "a=0:12", 2: "a=0:6,b=6:12"},
    "mixture": {1: "a=0:8", 2: "a=0:4,b=4:8"},
    "hybrid": {
        1: f"a=0:{HYBRID_LAYERS}",
        2: f"a=0:{HYBRID_LAYERS // 2},b={HYBRID_LAYERS // 2}:{HYBRID_LAYERS}",
    },
    "large": {
        1: f"a=0:{LARGE_LAYERS}",
        2: f"a=0:{LARGE_LAYERS // 2},b={LARGE_LAYERS // 2}:{LARGE_LAYERS}",
    },
    "streamed": {1: ""},
}
"""By model and number of boxes; the planner places what streams."""
STREAMED = {"model": "tales", "dtype": "float32", "allow_streaming": True, "max_context": 320}
"""The demo model on a node that reads a part of it from its disk in each step."""
SMALL = {"off": "small", "auto": "small-too"}
"""Its nodes, each with room for one deployment."""
ASKED = {
    "tales": MEASURED,
    "mixture": [task for task in MEASURED if task not in SCHEMAS],
    "hybrid": sized((ONE_WORD, "a new fairy tale"), (ONE_WORD,)),
    "large": (ONE_WORD, "a new fairy tale"),
    "streamed": [task for task in MEASURED if task not in SCHEMAS],
}


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: tuple[int, ...]
    seconds: float
    processor_s: float

    @property
    def tps(self) -> float:
        return (len(self.tokens) - 1) / self.seconds


def name_of(model: str, boxes: int, speculation: str) -> str:
    return f"{model}-{speculation}-{boxes}"


async def answer(site: Site, deployment: str, task: str) -> Answer:
    prompt, temperature = {**TASKS, **DRAFTED}[task]
    agents = [psutil.Process(daemon.pid) for daemon in site.agents.values()]
    options: dict[str, Any] = {"temperature": temperature, "seed": 3, "ignore_eos": True}
    if (schema := SCHEMAS.get(task)) is not None:
        options |= {"ignore_eos": False, "guide": Guide(GuideKind.JSON_SCHEMA, json.dumps(schema))}
    if task == ONE_WORD:
        options |= {"logit_bias": {300: 90.0}}
    tokens: list[int] = []
    began_s = used_s = 0.0
    events = site.client.generate(deployment, prompt, max_new_tokens=NEW_TOKENS, **options)
    async with aclosing(events) as heard:
        async for event in heard:
            if isinstance(event, Token):
                if not tokens:
                    began_s = time.perf_counter()
                    used_s = sum(agent.cpu_times().user for agent in agents)
                tokens.append(event.token)
            elif isinstance(event, Finished):
                taken_s = time.perf_counter() - began_s
    return Answer(tuple(tokens), taken_s, sum(agent.cpu_times().user for agent in agents) - used_s)


async def guesses(site: Site, deployment: str) -> StageGuesses:
    """The head's count, as its node reports it from now on."""
    await site.reported(poll_s=0.05)
    found = (await site.client.deployment(deployment)).stages
    return next(stage.guesses for stage in found if stage.guesses is not None)


async def measure(
    site: Site, model: str, boxes: int, task: str, rounds: int, way: str = "auto"
) -> dict[str, Any]:
    off, auto = name_of(model, boxes, "off"), name_of(model, boxes, way)
    for name in (off, auto):  # a first computation is slower
        await answer(site, name, task)
    before, load = await guesses(site, auto), os.getloadavg()[0]
    pairs = []
    for number in range(rounds):
        order = (off, auto) if number % 2 else (auto, off)
        pair = {name: await answer(site, name, task) for name in order}
        if pair[off].tokens != pair[auto].tokens:
            raise RuntimeError(f"{task} on {boxes}: the answers differ")
        pairs.append((pair[off], pair[auto]))
    after = await guesses(site, auto)
    return {
        "model": model,
        "boxes": boxes,
        "task": task,
        "off_tps": median(plain.tps for plain, _ in pairs),
        "auto_tps": median(guessed.tps for _, guessed in pairs),
        "times": median(guessed.tps / plain.tps for plain, guessed in pairs),
        "processor_times": median(
            guessed.processor_s / max(plain.processor_s, 0.01) for plain, guessed in pairs
        ),
        "guessed_a_token": (after.guessed - before.guessed) / rounds / len(pairs[0][0].tokens),
        "right": (after.right - before.right) / max(1, after.guessed - before.guessed),
        "load": load,
    }


async def add_random(client: Client, name: str, config: dict[str, Any]) -> None:
    """A random model with the demo model's tokenizer."""
    with tempfile.TemporaryDirectory(prefix="edgeshard-bench-") as scratch:
        write_checkpoint(Path(scratch), config)
        shutil.copy(DEMO / "tokenizer.json", scratch)
        await client.add_model(Path(scratch), name)


@asynccontextmanager
async def site_of(models: Sequence[str]) -> AsyncIterator[Site]:
    """Nodes a and b, and the nodes of streamed models, with these models in the store and measured
    if guesses need it.
    """
    small = list(SMALL.values()) if "streamed" in models else []
    memory = dict.fromkeys(small, ("--memory", "96MiB"))
    async with demo_site(("a", "b", *small), "tales", threads=1, arguments_by_agent=memory) as site:
        client = site.client
        if "mixture" in models:
            await client.add_model(MIXTURE, "mixture")
            await profiled(client, "mixture", quick=True)
        if small:
            await profiled(client, "tales", dtype=DType.FLOAT32, quick=True)
        for name in RANDOM.keys() & set(models):
            await add_random(client, name, RANDOM[name])
        yield site


async def deploy_both(site: Site, model: str, boxes: int, **fields: Any) -> None:
    """Without guesses and with them."""
    for way in ("off", "auto"):
        if model == "streamed":
            placed = STREAMED | {
                "source": SMALL[way],
                "exclude": sorted(set(site.nodes) - {SMALL[way]}),
            }
        else:
            placed = {"model": model, "layers": LAYERS[model][boxes]}
        await site.client.deploy(
            parse_spec({"name": name_of(model, boxes, way), "speculation": way, **placed, **fields})
        )


async def run(rounds: int, models: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    async with site_of(models) as site:
        for model in models:
            for boxes in LAYERS[model]:
                await deploy_both(site, model, boxes, concurrency=1)
                for task in ASKED[model]:
                    rows.append(await measure(site, model, boxes, task, rounds))
    return rows


async def run_with_draft(rounds: int) -> list[dict[str, Any]]:
    async with demo_site(("a", "b"), "tales", threads=1) as site:
        client = site.client
        await client.add_model(DRAFT, "small-tales")
        rows = []
        for boxes, layers in LAYERS["tales"].items():
            for way, keys in (("off", {"speculation": "off"}), ("draft", {"draft": "small-tales"})):
                values = {
                    "name": name_of("tales", boxes, way),
                    "model": "tales",
                    "layers": layers,
                    **keys,
                }
                await client.deploy(parse_spec({**values, "concurrency": 1}))
            for task in sized(tuple(DRAFTED), ("a new fairy tale",)):
                rows.append(await measure(site, "tales", boxes, task, rounds, "draft"))
        return [*rows, step_times()]


async def run_together(rounds: int, models: Sequence[str]) -> list[dict[str, Any]]:
    """Rates of many new tales at once, for whom nothing is guessed while there are more than
    four."""
    rows = []
    async with site_of(models) as site:
        for model, boxes in [(name, count) for name in models for count in LAYERS[name]]:
            await deploy_both(site, model, boxes, concurrency=16, max_context=256)
            for streams in (8, 16):
                pairs = []
                for number in range(rounds + 1):
                    order = ("off", "auto") if number % 2 else ("auto", "off")
                    pair = {
                        way: await together(site.client, name_of(model, boxes, way), streams)
                        for way in order
                    }
                    pairs.append((pair["off"], pair["auto"]))
                of, on = zip(*pairs[1:], strict=True)
                times = median(there / here for here, there in pairs[1:])
                row = {"model": model, "boxes": boxes, "streams": streams, "off_tps": median(of)}
                rows.append(
                    row | {"auto_tps": median(on), "times": times, "load": os.getloadavg()[0]}
                )
            for way in ("off", "auto"):
                await site.client.delete_deployment(name_of(model, boxes, way))
    return rows


async def together(client: Client, deployment: str, streams: int) -> float:
    """Tokens a second of `streams` requests, each of which runs to its limit."""
    prompt, temperature = TASKS["a new fairy tale"]
    options: dict[str, Any] = {
        "temperature": temperature,
        "ignore_eos": True,
        "max_new_tokens": NEW_TOKENS,
    }
    began = time.perf_counter()
    await asyncio.gather(
        *(client.complete(deployment, prompt, seed=n, **options) for n in range(streams))
    )
    return streams * NEW_TOKENS / (time.perf_counter() - began)


def step_times() -> dict[str, Any]:
    """Milliseconds of a step of the demo model by its rows, and of one of the draft, on one thread,
    medians."""
    torch.set_num_threads(1)
    model, draft = whole_model(DEMO), DraftSteps(whole_model(DRAFT), 1)
    model.execute(
        StepPlan(grants=(KvGrant(1, 0, tuple(range(24))),), spans=(first_span(),)), token_ids(200)
    )
    draft.begin(0)
    with torch.inference_mode():
        for first in (0, 100):
            draft.logits(0, first, token_ids(100).tolist())

    def of_model(rows: int) -> object:
        span = Span(1, 200, rows, sample=True, sampling=Sampling(logprobs=True), guesses=rows - 1)
        return model.execute(StepPlan(spans=(span,)), token_ids(rows))

    steps: dict[str, Callable[[], object]] = {
        f"model_{rows}_ms": partial(of_model, rows) for rows in (1, 2, 4, 8)
    }
    steps["draft_ms"] = lambda: draft.logits(0, 200, [300])
    with torch.inference_mode():
        return {name: milliseconds(step) for name, step in steps.items()}


def milliseconds(step: Callable[[], object]) -> float:
    taken = []
    for _ in range(sized(60, 3)):
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    return round(1000 * median(taken[1:]), 3)


def first_span() -> Span:
    return Span(1, 0, 200, sampling=Sampling())


def token_ids(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(300, 300 + count, dtype=np.int64)


def whole_model(path: Path) -> StageModel:
    config = json.loads((path / "config.json").read_text())
    layers = LayerRange(0, config["num_hidden_layers"])
    weights = StageWeights.load(
        SafetensorsDirectory(path), config, layers, dtype=DType.BFLOAT16, device="cpu"
    )
    return StageModel.with_kv(weights, KvMemory(DType.BFLOAT16, 24, 16))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--models", default="tales,mixture,hybrid", help="those to measure, with commas between"
    )
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--draft", action="store_true", help="the rows with a draft, and no others")
    parser.add_argument(
        "--together", action="store_true", help="the rows of 8 and 16 streams, and no others"
    )
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    measured = run_together if options.together else run
    models = options.models.split(",")
    rows = asyncio.run(run_with_draft(rounds) if options.draft else measured(rounds, models))
    print(json.dumps(rows, indent=1))
    write_rows(options.output, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
