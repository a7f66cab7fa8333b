"""Models without weights: a token is a function of everything before it, of the seed and of the
position.

The tables of KV memory are the product's own. Instead of keys and values, a position keeps the hash
of all tokens up to it, and nothing is ever cleared. A request that reads another's position
computes with the other's hash. The second model's requests also have states, the product's own: the
newest hash, from which they continue.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from edgeshard_agent.engine.compute_thread import step_hangs
from edgeshard_agent.hosting.around import ForHead, HeldWeights, LoadedModel, model_key, weights_key
from edgeshard_agent.model.attention.kv import KvMemory, KvPool, slots_behind
from edgeshard_agent.model.attention.states import States
from edgeshard_agent.model.attention.swap import SwapSpace
from edgeshard_agent.model.stage import StageOutput
from edgeshard_agent.scheduler.setup import swapping
from edgeshard_agent.scheduler.text import TextStream

from edgeshard.architectures import KvHeads, StateSize, expected_tensors, parse_config
from edgeshard.domain.control.commands import KeepStandby, PrepareStage
from edgeshard.domain.control.site import WeightsFile
from edgeshard.domain.errors import EdgeShardError, InternalError, NotFoundError
from edgeshard.domain.ids import Digest, ModelName
from edgeshard.domain.models.dtypes import KV_VECTOR, DType
from edgeshard.domain.models.model import LayerRange, ModelManifest, TensorInfo
from edgeshard.domain.requests.generation import FinishReason, Generation, Sampling
from edgeshard.domain.requests.step import (
    GuessedTokens,
    SampledToken,
    Span,
    StepPlan,
    StepResult,
    guessed_tokens,
)
from tests.simulator.loop import Process

if TYPE_CHECKING:
    from tests.simulator.watch import Watch

VOCABULARY = 97
END = 96
LAYERS = 6
MAX_CONTEXT = 128
LATENESS, MOST_LATE = 17, 4
"""3 tokens of 17 are late, by 1 to 3 steps."""
_FIRST_HASH = 17
_CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    # Narrower heads would not be computed by the kernels, and so get no draft tokens.
    "head_dim": KV_VECTOR,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_CONTEXT,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": END,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": _CONFIG,
    "hybrid": _CONFIG
    | {
        "model_type": "qwen3_5_text",
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 2,
        "linear_value_head_dim": 2,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
        },
    },
}


@lru_cache
def manifest(name: str) -> ModelManifest:
    config = _CONFIGS[name]
    tensors = tuple(
        TensorInfo(
            f"model.{t.name}".replace("model.lm_head", "lm_head"),
            DType.FLOAT32,
            t.shape,
            Digest("a" * 64),
        )
        for t in expected_tensors(config).values()
    )
    return ModelManifest(
        ModelName(name), str(config["model_type"]), json.dumps(config), tensors, ()
    )


class SimModels:
    """The model store: two models."""

    def get(self, name_or_digest: str) -> tuple[ModelManifest, Digest]:
        for found, digest in self.list():
            if name_or_digest in (found.name, digest):
                return found, digest
        raise NotFoundError(f"model {name_or_digest} is unknown", field="model")

    def list(self) -> tuple[tuple[ModelManifest, Digest], ...]:
        return tuple((found, found.digest()) for found in map(manifest, _CONFIGS))

    def weights_files(self, manifest: ModelManifest) -> tuple[WeightsFile, ...]:
        return ()

    def added_at(self, digest: Digest) -> float:
        return 0.0

    def file_path(self, digest: Digest) -> Path:
        raise AssertionError("models have no files here")

    def delete(self, name: str) -> None:
        raise AssertionError("nobody deletes models here")


def chained(before: int, token: int) -> int:
    return (before * 31 + token + 1) % 999983


def chosen(history: int, sampling: Sampling, position: int) -> int:
    """A third of the requests mostly repeat a token, so that tokens are guessed for them."""
    if sampling.seed % 3 == 1 and history % 8:
        return position % 5
    return (history * 7 + sampling.seed * 13 + position * 5) % VOCABULARY


class SimTokenizer:
    """A character for each of the first 64 tokens, half a character for the others but the end."""

    longest_token_bytes = 2
    special_tokens: ClassVar[dict[str, int]] = {}
    growth = 1.0
    file = Path()

    def encode(self, text: str) -> list[int]:
        return [ord(character) % 64 for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(_BYTES[token] for token in ids).decode("utf-8", "replace")


_BYTES = [
    *(bytes([48 + token]) for token in range(64)),
    *(b"\xc3" if token % 2 else bytes([0x80 + token % 64]) for token in range(64, END)),
    b"",
]


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a request without disturbances. `texts` is the text after each number of
    tokens."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    final_text: str
    reason: FinishReason


def answer(generation: Generation) -> Answer:
    tokenizer = SimTokenizer()
    prompt = generation.prompt
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    history = _FIRST_HASH
    text = TextStream(tokenizer.decode, ids, generation.stop_strings)
    said = ""
    for token in ids:
        history = chained(history, token)
    tokens: list[int] = []
    texts = [""]
    while True:
        token = chosen(history, generation.sampling, len(ids) + len(tokens))
        tokens.append(token)
        history = chained(history, token)
        said += "" if token == END or token in generation.stop_tokens else text.push(token)
        texts.append(said)
        if token == END or token in generation.stop_tokens or text.stopped:
            reason = FinishReason.STOP
        elif len(tokens) == generation.max_new_tokens:
            reason = FinishReason.LENGTH
        else:
            continue
        return Answer(tuple(ids), tuple(tokens), tuple(texts), text.finish(), reason)


class SimModel:
    """The replacement of `StageModel` for a stage: `watch` is called for a step that needs data
    which the stage has not, and for swaps.
    """

    def __init__(self, prepare: PrepareStage, watch: Watch) -> None:
        placement, layers = prepare.placement, prepare.placed.layers
        self.shape = parse_config(manifest(prepare.spec.model).config)
        self.layers = layers
        self.dtype = DType.FLOAT32
        self.parameter_bytes = prepare.placed.parameter_bytes
        self.streaming = self.experts = None  # nothing is read from the disk
        self.is_damaged = False
        memory = KvMemory(DType.FLOAT32, placement.kv_blocks, placement.kv_block_tokens)
        slots = placement.slots_of(prepare.spec.max_context) if self.shape.states else 0
        sizes = [[StateSize((1,), float32=True)]]
        states = States(slots, sizes, "cpu", guess_slots=placement.used_guess_slots)
        self.pool = KvPool(LayerRange(0, 1), memory, [KvHeads(1, 1)], "cpu", states=states)
        self.pool.swap = SwapSpace(swapping(prepare).blocks)
        self._kept: dict[int, list[int]] = {}
        self._watch, self._violate = watch, watch.violate
        self._slots = [-1] * (placement.kv_blocks * placement.kv_block_tokens)
        self._sampling: dict[int, Sampling] = {}
        self._late: list[tuple[SampledToken, int]] = []
        """Tokens that are not chosen yet, as it may be with a guide, and after how many steps they
        are."""
        self.released = False
        self.broken = False
        """Whether the next step fails."""

    def observe_reads(self, observer: object) -> None:
        """There are no reads."""

    def take_forced(self, most: int) -> None:
        """There are no guides."""

    @property
    def is_first(self) -> bool:
        return self.layers.first == 0

    @property
    def is_last(self) -> bool:
        return self.layers.end == LAYERS

    def reset(self) -> None:
        for request in self.pool.requests:
            self.pool.free(request)
        self._sampling.clear()
        self._late.clear()
        self._kept.clear()

    def release(self) -> None:
        self.released = True
        self.pool.release()

    def retire(self) -> SimWeights:
        self.release()
        return SimWeights(self.layers)

    def execute_sweep(
        self, steps: Sequence[tuple[StepPlan, Any]], told: Sequence[Callable[[], GuessedTokens]]
    ) -> list[StageOutput]:
        return [self.execute(*step, tell) for step, tell in zip(steps, told, strict=True)]

    def execute(
        self, plan: StepPlan, inputs: Any, tell: Callable[[], GuessedTokens]
    ) -> StageOutput:
        if self.released:
            self._violate("a step ran on a stage that was released")
        if self.broken:
            self.broken = False
            raise InternalError("a step failed", reason="STEP_FAILED")
        self._commit(plan)
        for request in plan.frees:
            self._sampling.pop(request, None)
        sampled, pending = self._come(plan.frees), list[int]()
        given = [] if inputs is None else inputs.tolist()
        at, rows = 0, list[list[float]]()
        guessed = guessed_tokens(plan.spans, given) if self.is_first else tell()
        for span in plan.spans:
            if span.sampling is not None:
                self._sampling[span.request] = span.sampling
            slots = self._slots_of(span.request, span.end_position)
            history = self._history(span, slots)
            for slot, kept in zip(
                slots[span.first_position :], self._states_behind(span), strict=True
            ):
                token, told = (
                    (given[at], None) if self.is_first else (int(given[at][0]), int(given[at][1]))
                )
                history = chained(history, token)
                if told is not None and told != history:
                    self._violate(
                        f"a stage of layers {self.layers} lacks KV that the stage before it has"
                    )
                self._slots[slot] = history
                rows.append([float(token), float(history), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
                at += 1
                for state in self.pool.states.of(kept):
                    state.fill_(history - _FIRST_HASH)
            sampled += self._drawn(span, slots, guessed.get(span.request, ()), pending)
        if self.is_last:
            return StageOutput(result=StepResult(tuple(sampled), pending=tuple(pending)))
        return StageOutput(torch.tensor(rows, dtype=torch.float32) if rows else None)

    def _drawn(
        self, span: Span, slots: Sequence[int], guesses: Sequence[int], pending: list[int]
    ) -> Iterator[SampledToken]:
        """The tokens after a span up to the first that is late, or whose guess is wrong or missing.
        After guesses, a late token is left for the next step."""
        if not span.sample:
            return
        for position, guess in zip_longest(
            range(span.certain_position, span.end_position + 1), guesses
        ):
            history = self._slots[slots[position - 1]]
            token = SampledToken(
                span.request, position, chosen(history, self._sampling[span.request], position)
            )
            if 0 < history % LATENESS < MOST_LATE:
                if position == span.certain_position:
                    self._late.append((token, history % LATENESS))
                    pending.append(span.request)
                return
            yield token
            if span.guesses:
                way = "right" if token.token == guess else "wrong" if guesses else "not told"
                self._watch.met["guess", "drawn", way] = 1
            if token.token != guess:
                return

    def _history(self, span: Span, slots: Sequence[int]) -> int:
        """The hash of all tokens before a span, from the states of its request or from its table's
        positions."""
        table = self.pool.table(span.request)
        for state in self.pool.states.of(table.source):
            if table.source != table.slot:
                self._watch.met["states", "behind a guess", "gone on from"] = 1
            return int(state) + _FIRST_HASH
        return self._slots[slots[span.first_position - 1]] if span.first_position else _FIRST_HASH

    def _states_behind(self, span: Span) -> list[int | None]:
        """The slot for the states after each position of a span, if requests have states."""
        if not self.pool.states.slots:
            return [None] * span.token_count
        return slots_behind(self.pool.table(span.request), span)

    def _come(self, frees: Sequence[int]) -> list[SampledToken]:
        """Late tokens that are chosen by now."""
        waiting = [(token, steps - 1) for token, steps in self._late if token.request not in frees]
        self._late = [(token, steps) for token, steps in waiting if steps]
        came = [token for token, steps in waiting if not steps]
        if came:
            self._watch.met["token", "late", "chosen"] = 1
        return came

    def _commit(self, plan: StepPlan) -> None:
        try:
            draft = self.pool.check(plan)
        except EdgeShardError as error:
            self._violate(f"a stage of layers {self.layers} refused a step: {error.message}")
            raise
        for request in self._kept.keys() & set(plan.frees):
            del self._kept[request]
        for request, table in draft.swap_outs.items():
            self._kept[request] = [
                self._slots[slot] for slot in self._slots_of(request, table.certain)
            ]
            self._watch.met["swap", "held", "put aside"] = 1
        self.pool.commit(draft)
        if draft.restores:
            self._watch.met["states", "saved", "taken up"] = 1
        for request in draft.swap_ins:
            for slot, history in zip(
                self._slots_of(request, 1 << 30), self._kept.pop(request), strict=False
            ):
                self._slots[slot] = history
            self._watch.met["swap", "kept aside", "taken back"] = 1
        told = self.pool.swapped
        counted = self.pool.swap.swapped_out - self.pool.swap.swapped_in
        self._watch.hold(
            self._kept.keys() == self.pool.swap.requests
            and counted >= len(self._kept)
            and (told is None or told.kept_bytes <= told.capacity_bytes),
            f"a stage of layers {self.layers} keeps KV aside that is not of the requests that were "
            "swapped out",
        )

    def _slots_of(self, request: int, end: int) -> list[int]:
        size = self.pool.block_tokens
        return [block * size + i for block in self.pool.table(request).blocks for i in range(size)][
            :end
        ]


class SimWeights:
    """The weights of a standby, or of a stage that runs no more."""

    def __init__(self, layers: LayerRange) -> None:
        self.layers = layers
        self.parameter_bytes = 1000 * len(layers)

    def keep(self, layers: LayerRange) -> None:
        """Those that both have."""
        first, end = max(self.layers.first, layers.first), min(self.layers.end, layers.end)
        self.layers = LayerRange(first, max(first, end))

    def shareable(self, layers: LayerRange) -> frozenset[int]:
        return frozenset(range(self.layers.first, self.layers.end)) & frozenset(
            range(layers.first, layers.end)
        )

    def release(self) -> None:
        pass


class SimPin:
    """In place of the pin on cached blobs."""

    def release(self) -> None:
        pass


def loaded(prepare: PrepareStage, watch: Watch) -> LoadedModel:
    model: Any = SimModel(prepare, watch)
    pin: Any = SimPin()
    tokenizer: Any = SimTokenizer()
    for_head = ForHead(tokenizer, frozenset({END})) if prepare.stage == 0 else None
    return LoadedModel(model_key(prepare), model, for_head, pin, 0.1)


def held(command: KeepStandby, layers: LayerRange) -> HeldWeights:
    """A standby."""
    weights: Any = SimWeights(layers)
    pin: Any = SimPin()
    tokenizer: Any = SimTokenizer()
    for_head = None if layers.first else ForHead(tokenizer, frozenset({END}))
    return HeldWeights(weights_key(command), weights, for_head, pin, 0.1)


class SimWorker:
    """In place of the compute thread: calls in order, each after some time."""

    def __init__(self, process: Process, seconds: Callable[[], float]) -> None:
        self._process = process
        self._seconds = seconds
        self._free_at = 0.0
        self.hangs = False

    def submit(self, function: Callable[..., object], /, *args: Any, **kwargs: Any) -> None:
        loop = self._process.loop
        self._free_at = max(self._free_at, loop.now) + self._seconds()
        loop.call_global(
            self._free_at, lambda: function(*args, **kwargs), context=self._process.context
        )

    submit_steps = submit

    async def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self.hangs:
            raise step_hangs()
        future = self._process.loop.create_future()

        def call() -> None:
            if future.done():
                return
            try:
                future.set_result(function(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        self.submit(call)
        return await future

    def running(self) -> None:
        """Calls take no time of their own."""

    def close(self) -> None:
        pass
