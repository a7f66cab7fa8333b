"""The cases, as values: the request, the node, and the node's loss by place and step. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from edgeshard.domain.requests.generation import GenerateOptions
from tests.chaos.failpoints import OF_LOADS, OF_SAVES, Action, Place

STAGES = 3
SPARE = STAGES
"""Used if a fault hits the node that holds no stage when the case begins."""
COORDINATOR = -1
PROMPT = 96
NEW_TOKENS = 32
CHUNK = 32
"""Tokens of a chunk of a single prompt; see STEP_TOKENS of the site."""
BLOCK_TOKENS = 16
VOCABULARY = (3, 4096)
SEEDS = 50
SHORT_PROMPT = 16
DECODING = 5
PREFILLING = 2
WAITING = 1


class Dtype(StrEnum):
    FP32 = "fp32"
    BF16 = "bf16"
    INT4 = "int4"

    @property
    def fields(self) -> dict[str, object]:
        """The fields of a deployment's spec that select it."""
        if self is Dtype.INT4:
            return {"dtype": "bfloat16", "quantisation": {"*": "int4"}}
        return {"dtype": "float32" if self is Dtype.FP32 else "bfloat16"}


class Shape(StrEnum):
    """A small model whose layers keep different things; tests/chaos/shapes.py makes it."""

    HYBRID = "hybrid"
    """Qwen3.5's layers: linear attention with states of each request, and full attention."""
    NEMOTRON = "nemotron"
    """Layers of Mamba2, of attention, of only an MLP and of only experts: the last two keep
    nothing."""
    GEMMA4 = "gemma4"
    """Windowed and full attention, with other heads in each."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. `seed` draws the prompt, and the tokens if it is `sampled`."""

    seed: int
    prompt_tokens: int = PROMPT
    new_tokens: int = NEW_TOKENS
    sampled: bool = False
    logprobs: bool = False

    @property
    def prompt(self) -> tuple[int, ...]:
        chance = random.Random(self.seed)
        return tuple(chance.randrange(*VOCABULARY) for _ in range(self.prompt_tokens))

    @property
    def options(self) -> GenerateOptions:
        options = GenerateOptions(
            max_new_tokens=self.new_tokens, ignore_eos=True, logprobs=self.logprobs
        )
        if self.sampled:
            # A node that is new to a request must receive the tokens that penalties count. Below 0
            # they matter most often.
            options |= GenerateOptions(temperature=0.9, top_p=0.95, min_p=0.01, seed=self.seed)
            options |= GenerateOptions(
                presence_penalty=-1.5, frequency_penalty=0.4, logit_bias={300: 2.0, 301: -100.0}
            )
        return options


@dataclass(frozen=True, slots=True)
class Fault:
    """A failpoint in the process that holds stage `at` when the case begins, in the spare, or in
    the coordinator."""

    at: int
    place: Place
    position: int | None = None
    what: str = ""
    time: int = 1
    action: Action = Action.KILL

    @property
    def name(self) -> str:
        where = {SPARE: "spare", COORDINATOR: "coordinator"}.get(self.at, f"stage{self.at}")
        which = step_name(self.position) if self.position is not None else self.what
        again = f"x{self.time}" if self.time > 1 else ""
        verb = "" if self.action is Action.KILL else f"{self.action}-"
        return f"{verb}{where}.{self.place}" + (f".{which}{again}" if which else "")


class LinkKind(StrEnum):
    DEAF = "deaf"
    """The node of this stage cannot be reached any more, though it reaches all others."""
    STALL = "stall"
    STALL_UP = "stall_up"
    """The sender's data no longer arrives; the other direction passes."""
    STALL_DOWN = "stall_down"
    RESET = "reset"
    HALF_CLOSE = "half_close"
    SLICES = "slices"
    DELAY = "delay"
    NARROW = "narrow"
    FLIP = "flip"


SLOW_TO_NOTICE = frozenset({LinkKind.DEAF, LinkKind.STALL, LinkKind.STALL_UP})


@dataclass(frozen=True, slots=True)
class LinkFault:
    """A fault of the link from the previous stage's node into stage `to`, set when the client has
    `after_tokens` tokens. `detail` is of a flip: its byte."""

    to: int
    kind: LinkKind
    after_tokens: int
    detail: int = 0

    @property
    def name(self) -> str:
        detail = f".byte{self.detail}" if self.kind is LinkKind.FLIP else ""
        return f"link-to-{self.to}.{self.kind}{detail}.token{self.after_tokens}"


@dataclass(frozen=True, slots=True)
class Case:
    """`group` is its row in the table. With `crowd` eight requests run: five decode when two long
    prompts come, and one more, for which there is no room yet. Without a `shape` the demo model
    runs. A request with a `shape` begins from the cached part of its prompt, and log-probabilities
    are compared as well."""

    group: str
    dtype: Dtype
    faults: tuple[Fault, ...] = ()
    links: tuple[LinkFault, ...] = ()
    crowd: bool = False
    sampled: bool = False
    seed: int = 1
    shape: Shape | None = None

    @property
    def name(self) -> str:
        what = "+".join(
            [*(fault.name for fault in self.faults), *(link.name for link in self.links)]
        )
        return f"{self.group}/{self.dtype}/{what}/seed{self.seed}" + (
            "/sampled" if self.sampled else ""
        )

    @property
    def kills(self) -> int:
        return sum(fault.action is Action.KILL for fault in self.faults)


def step_name(position: int) -> str:
    """The name of the step of a single request that runs this position: a chunk of its prompt, or
    the token that it makes.
    """
    if position >= PROMPT:
        return f"token{position - PROMPT + 2}"
    return f"position{position}" if position % CHUNK else f"chunk{position // CHUNK}"


def asks(case: Case) -> tuple[tuple[Ask, ...], tuple[Ask, ...]]:
    """The requests of a case: those that come first, and those that come once the first are
    decoding."""
    if not case.crowd:
        return (Ask(case.seed, sampled=case.sampled, logprobs=case.shape is not None),), ()
    first = [Ask(100 * case.seed + n, SHORT_PROMPT, sampled=n % 2 == 1) for n in range(DECODING)]
    late = [Ask(100 * case.seed + DECODING + n) for n in range(PREFILLING + WAITING)]
    return tuple(first), tuple(late)


def steps() -> tuple[int, ...]:
    """A position in every step of a single request: the chunks of its prompt, the last of which
    makes the first token, and each further token."""
    return (*range(0, PROMPT, CHUNK), *range(PROMPT, PROMPT + NEW_TOKENS - 1))


def full(seed: int) -> list[Case]:
    nodes = [
        *every_step(),
        *seeded(seed),
        *sampler(),
        *crowd(),
        *twice(),
        *halted(),
        *saves(),
        *shaped(),
    ]
    return [*nodes, *links(seed)]


def quick(seed: int, share: int = 1) -> list[Case]:
    """Some of each group, chosen by `seed`. Only one `share`-th of them, and then only of one
    shape, since each shape is a model of its own.

    No node that is halted and no link that stalls, which take their seconds. No loss of a shape's
    node within a prompt: the case before it may have had the same prompt, which is then taken from
    its states and not read again.
    """
    chance = random.Random(seed)
    by_group: dict[str, list[Case]] = {}
    for case in full(seed):
        slow = any(fault.action is Action.HALT for fault in case.faults)
        slow = slow or any(link.kind in SLOW_TO_NOTICE for link in case.links)
        if not slow and not (case.group in set(Shape) and ".position" in case.name):
            by_group.setdefault(case.group, []).append(case)
    lots: dict[str, int] = {
        "every step": 12,
        "seeds": 8,
        "sampler": 3,
        "crowd": 5,
        "two failures": 6,
        "coordinator": 10,
        "links": 8,
    }
    shapes: dict[str, int] = {Shape.HYBRID: 6, Shape.NEMOTRON: 4, Shape.GEMMA4: 4}
    lots |= shapes if share == 1 else dict([list(shapes.items())[seed % len(shapes)]])
    return [
        case
        for group, count in lots.items()
        for case in _some(by_group[group], -(-count // share), chance)
    ]


def _some(cases: Sequence[Case], count: int, chance: random.Random) -> list[Case]:
    return sorted(chance.sample(cases, min(count, len(cases))), key=lambda case: case.name)


def every_step() -> Iterator[Case]:
    """Each stage in turn, in every step, before it computes and after it sent; the head also as it
    takes a result."""
    for stage in range(STAGES):
        places = [Place.BEFORE_COMPUTE, Place.AFTER_SEND]
        places += [Place.BEFORE_RETURN, Place.AFTER_RETURN] if stage == 0 else []
        for place in places:
            for position in steps():
                yield Case("every step", Dtype.FP32, (Fault(stage, place, position),))


def shaped() -> Iterator[Case]:
    """Each stage of each shape, in every step of a request that begins from the cached part of its
    prompt, alternately before it computes and after it sent."""
    kept = (PROMPT - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    for shape in Shape:
        for stage in range(STAGES):
            for number, position in enumerate((kept, *range(PROMPT, PROMPT + NEW_TOKENS - 1))):
                place = (Place.BEFORE_COMPUTE, Place.AFTER_SEND)[(stage + number) % 2]
                yield Case(shape, Dtype.FP32, (Fault(stage, place, position),), shape=shape)


def seeded(seed: int) -> Iterator[Case]:
    """Any stage, step, place and sampler, in the other dtypes."""
    for dtype in (Dtype.BF16, Dtype.INT4):
        chance = random.Random(f"{seed} {dtype}")
        for number in range(SEEDS):
            stage = chance.randrange(STAGES)
            places = [Place.BEFORE_COMPUTE, Place.AFTER_COMPUTE, Place.AFTER_SEND]
            places += [Place.AFTER_RETURN] if stage == 0 else []
            fault = Fault(stage, chance.choice(places), chance.choice(steps()))
            yield Case("seeds", dtype, (fault,), sampled=chance.random() < 0.5, seed=1 + number)


def sampler() -> Iterator[Case]:
    """Tokens that are drawn, not the likeliest."""
    for stage in range(STAGES):
        for position in (64, PROMPT, PROMPT + 7, PROMPT + 15, PROMPT + 23, PROMPT + NEW_TOKENS - 2):
            fault = Fault(stage, Place.AFTER_COMPUTE, position)
            yield Case("sampler", Dtype.FP32, (fault,), sampled=True, seed=7 + stage)


def crowd() -> Iterator[Case]:
    """Eight requests: a loss while the first or the second long prompt runs (positions that no
    short request has), and once they decode."""
    for stage in range(STAGES):
        for position, time in (
            (50, 1),
            (60, 1),
            (80, 1),
            (50, 2),
            (60, 2),
            (80, 2),
            (100, 1),
            (110, 2),
        ):
            for place in (Place.BEFORE_COMPUTE, Place.AFTER_SEND):
                yield Case(
                    "crowd",
                    Dtype.FP32,
                    (Fault(stage, place, position, time=time),),
                    crowd=True,
                    seed=1 + stage,
                )


def twice() -> Iterator[Case]:
    """A second loss: of the spare that is loading the lost layers, or of the head, as it runs the
    request once more or later. Lost nodes come back only after the second loss."""
    for stage in range(STAGES):
        first = Fault(stage, Place.BEFORE_COMPUTE, PROMPT + 9)
        for place in sorted(OF_LOADS):
            yield Case("two failures", Dtype.FP32, (first, Fault(SPARE, place)))
        if stage:
            for position, time in ((PROMPT + 5, 2), (PROMPT + 9, 1), (PROMPT + 20, 1)):
                head = Fault(0, Place.BEFORE_COMPUTE, position, time=time)
                yield Case(
                    "two failures", Dtype.FP32, (replace(first, place=Place.AFTER_SEND), head)
                )


def halted() -> Iterator[Case]:
    """A node that stands still with its connections open."""
    for stage in range(STAGES):
        for position in (32, PROMPT + 9):
            fault = Fault(stage, Place.BEFORE_COMPUTE, position, action=Action.HALT)
            yield Case("halted node", Dtype.FP32, (fault,))


RECOVERY = ("ready->waiting", "waiting->loading", "loading->activating", "activating->ready")
"""The changes of a deployment that loses a node and continues."""


def saves() -> Iterator[Case]:
    """The coordinator is lost as well, around the writing of each change that the loss of a node
    brings."""
    loss = Fault(1, Place.BEFORE_COMPUTE, PROMPT + 9)
    for change in RECOVERY:
        for place in sorted(OF_SAVES):
            yield Case("coordinator", Dtype.FP32, (loss, Fault(COORDINATOR, place, what=change)))


def links(seed: int) -> Iterator[Case]:
    """Network faults of a link into each stage (into stage 0 the ring closes), early and late."""
    chance = random.Random(f"{seed} links")
    for to in range(STAGES):
        for kind in LinkKind:
            if kind is LinkKind.FLIP:
                for _ in range(4):
                    # Tokens are smaller than the data between stages; the byte must still be
                    # passed.
                    byte = chance.randrange(2000 if to else 300)
                    fault = LinkFault(to, kind, chance.randrange(2, 24), byte)
                    yield Case("links", Dtype.FP32, links=(fault,), seed=1 + to)
            else:
                yield Case(
                    "links",
                    Dtype.FP32,
                    links=(LinkFault(to, kind, chance.randrange(2, 24)),),
                    seed=1 + to,
                )
