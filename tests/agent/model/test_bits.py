"""A token's logits, keys and values are the same bit for bit however the work was cut, batched or
repeated.

That is what recovery (replay), preemption (recompute), migration (another cut) and speculation
(verification) rest on. It is promised for families in our own blocks on the CPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.weights import StageWeights
from edgeshard_agent.ops.native import native_available
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeshard.architectures import ARCHITECTURES, architecture_named, expected_tensors
from edgeshard.architectures.record import Fused
from edgeshard.domain.models.dtypes import DType, KvFormat, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan
from tests.support.forms import in_form, one_in

pytestmark = pytest.mark.skipif(
    not native_available(), reason="torch's operators do not promise it"
)

LAYERS = 4
VOCAB = 97
BLOCK_TOKENS = 16
LONGEST, SHORT = 560, 40
REQUESTS = 16
KV_BLOCKS = 160
SCHEMES = ["float32", "bfloat16", "int8", "int4", "float32, KV int4", "int4, KV int4"]

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "dtype": "bfloat16",
}
_GEMMA2 = _LLAMA | {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "sliding_window": 70,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
}
_GEMMA4 = _GEMMA2 | {
    "model_type": "gemma4_text",
    "architectures": ["Gemma4ForCausalLM"],
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": None,
}
_HYBRID = _LLAMA | {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
    },
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_SLIDING = {"sliding_window": 70, "layer_types": ["sliding_attention", "full_attention"] * 2}
_BY_TYPE = {
    "rope_parameters": dict.fromkeys(
        ("sliding_attention", "full_attention"), _LLAMA["rope_parameters"]
    )
}
CONFIGS = {
    "llama": _LLAMA,
    "ministral3": _LLAMA
    | {
        "rope_parameters": {
            **{
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            **{"original_max_position_embeddings": 40, "llama_4_scaling_beta": 0.4},
        }
    },
    "mistral": _LLAMA | {"sliding_window": 70, "head_dim": 32},
    "qwen3": _LLAMA | {"tie_word_embeddings": True, "head_dim": 80, "num_key_value_heads": 1},
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA2
    | _BY_TYPE
    | {
        "model_type": "gemma3_text",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    "gemma4": _GEMMA4,
    "gemma4 with experts": _GEMMA4
    | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
    "qwen3_5": _HYBRID,
    "qwen3_next": _HYBRID | _EXPERTS | {"model_type": "qwen3_next", "mlp_only_layers": [1]},
    "qwen3_5_moe": _HYBRID | _EXPERTS | {"model_type": "qwen3_5_moe_text"},
    "qwen3_moe": _LLAMA | _EXPERTS,
    "qwen3_vl_moe": _LLAMA
    | _EXPERTS
    | {"model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 48},
    "qwen2_moe": _LLAMA | _EXPERTS,
    "mixtral": _LLAMA | _EXPERTS,
    "gpt_oss": _LLAMA | _EXPERTS | _SLIDING | {"attention_bias": True, "swiglu_limit": 1.5},
    "minimax_m2": _LLAMA | _EXPERTS,
    "granitemoe": _LLAMA | _EXPERTS | {"residual_multiplier": 0.4},
    "glm4_moe": _LLAMA
    | _EXPERTS
    | {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
    },
    "glm4v_moe": _LLAMA | _EXPERTS | {"model_type": "glm4v_moe_text", "n_routed_experts": 8},
    "dots1": _LLAMA
    | _EXPERTS
    | {"n_routed_experts": 8, "n_shared_experts": 2, "sliding_window": 70},
    "granitemoeshared": _LLAMA
    | _EXPERTS
    | {"residual_multiplier": 0.4, "shared_intermediate_size": 48},
    "gemma": _LLAMA,
    "exaone": _LLAMA,
    "granite": _LLAMA | {"residual_multiplier": 0.4, "attention_multiplier": 0.2},
    "olmo2": _LLAMA,
    "olmo3": _LLAMA | _SLIDING | _BY_TYPE,
    "exaone4": _LLAMA | _SLIDING,
    "phi3": _LLAMA,
    "qwen2": _LLAMA,
    "qwen2_vl": _LLAMA,
    "qwen2_5_vl": _LLAMA,
    "qwen3_vl": _LLAMA | {"model_type": "qwen3_vl_text"},
    "seed_oss": _LLAMA | {"attention_bias": True},
    "smollm3": _LLAMA | {"no_rope_layers": [1, 1, 1, 0]},
}
CONFIGS = {
    name: config if "_" in config["model_type"] else config | {"model_type": name}
    for name, config in CONFIGS.items()
}


class RandomWeights:
    """A model's tensors from a seed, by their names in a checkpoint."""

    def __init__(self, config: dict[str, Any]) -> None:
        generator = torch.Generator().manual_seed(5)
        self._tensors: dict[str, torch.Tensor] = {}
        for name, tensor in expected_tensors(config).items():
            values = torch.randn(tensor.shape, generator=generator) * 0.15
            if len(tensor.shape) == 1:
                values += 1
            self._tensors[name if name == "lm_head.weight" else f"model.{name}"] = values.bfloat16()

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def sequences() -> list[np.ndarray]:
    generator = np.random.default_rng(3)
    return [generator.integers(0, VOCAB, LONGEST) for _ in range(REQUESTS)]


@cache
def weights(name: str) -> RandomWeights:
    return RandomWeights(CONFIGS[name])


@cache
def stage(name: str, scheme: str, layers: LayerRange, kv_blocks: int = KV_BLOCKS) -> StageModel:
    kept, scheme = scheme.endswith("KV int4"), scheme.partition(",")[0]
    quantisation = Quantisation(scheme) if scheme.startswith("int") else None
    dtype = DType.BFLOAT16 if quantisation else DType(scheme)
    return StageModel.with_kv(
        StageWeights.load(
            weights(name),
            CONFIGS[name],
            layers,
            dtype=dtype,
            device="cpu",
            quantisation=quantisation,
        ),
        KvMemory(KvFormat.INT4 if kept else dtype, kv_blocks, BLOCK_TOKENS, slots=REQUESTS),
    )


@cache
def pipeline(name: str, scheme: str, cut: tuple[int, ...]) -> list[StageModel]:
    edges = [0, *cut, LAYERS]
    return [stage(name, scheme, LayerRange(*pair)) for pair in pairwise(edges)]


def advance(stages: Sequence[StageModel], plan: StepPlan, tokens: np.ndarray) -> torch.Tensor:
    """The logits [T, vocab] of a step."""
    value: Any = tokens
    for each in stages[:-1]:
        value = each.execute(plan, value).hidden
    return stages[-1].logits(plan, value)


def has_states(stages: Sequence[StageModel]) -> bool:
    return any(each.pool.states.slots for each in stages)


Kept = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values [length, KV heads, head dim] of each layer that keeps any."""


def kept(stages: Sequence[StageModel], request: int) -> Kept:
    found = []
    for each in stages:
        table = each.pool.table(request)
        slots = (
            torch.tensor(table.blocks).unsqueeze(1) * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)
        ).view(-1)
        for layer in range(each.layers.first, each.layers.end):
            if each.shape.kv and not each.shape.kv[layer].heads:
                continue
            found.append(each.pool.arena(layer).read(slots[: table.length]))
    return found


@cache
def reference(name: str, scheme: str) -> list[tuple[torch.Tensor, Kept]]:
    """Each sequence in one prefill, by itself, by one thread through one stage: its logits and its
    kept data. All sequences but the first are as long as schedules take them."""
    whole = pipeline(name, scheme, ())
    answers = []
    for number, every in enumerate(sequences()):
        tokens = every[: SHORT if number else LONGEST]
        blocks = tuple(range(-(-len(tokens) // BLOCK_TOKENS)))
        slot = 0 if has_states(whole) else None
        plan = StepPlan(
            grants=(KvGrant(0, 0, blocks, slot=slot),),
            spans=(Span(0, 0, len(tokens), sampling=Sampling()),),
        )
        answers.append((advance(whole, plan, tokens), kept(whole, 0)))
        whole[0].reset()
    return answers


class Schedule:
    """Random steps of up to 16 requests: decodes, chunks, drafts to verify, tokens taken back, and
    replays.

    A state cannot be taken back: requests that keep one are replayed instead.
    """

    def __init__(self, seed: int) -> None:
        self.has_states = False
        self.chance = random.Random(seed)
        self.cut = tuple(
            sorted(self.chance.sample(range(1, LAYERS), self.chance.randrange(LAYERS)))
        )
        self.requests = self.chance.choice((1, 2, 5, REQUESTS))
        self.lengths = dict.fromkeys(range(self.requests), 0)
        self.tables: dict[int, list[int]] = {request: [] for request in self.lengths}
        self.free = list(range(KV_BLOCKS))
        self.chance.shuffle(self.free)

    def steps(self, count: int) -> Iterator[StepPlan]:
        for _ in range(count):
            chosen = self.chance.sample(sorted(self.lengths), self.chance.randint(1, self.requests))
            frees: list[int] = []
            grants: list[KvGrant] = []
            spans = [
                span
                for request in chosen
                if (span := self._span(request, frees, grants)) is not None
            ]
            if spans:
                yield StepPlan(tuple(frees), tuple(grants), tuple(spans))

    def _span(self, request: int, frees: list[int], grants: list[KvGrant]) -> Span | None:
        chance, length = self.chance, self.lengths[request]
        # Only the first request grows long, so that a step has at most one long chunk.
        longest, most_replayed = (LONGEST, 500) if request == 0 else (SHORT, SHORT)
        kind = chance.choice(
            ("decode", "decode", "decode", "chunk", "draft", "take back", "replay")
        )
        first, new = length, 1
        if kind == "draft":
            new = chance.randint(2, 8)
        elif kind == "chunk" or not length:
            new = chance.randint(1, 150 if request == 0 else 20)
        elif kind == "take back" and not self.has_states:
            first, new = length - chance.randint(1, min(8, length)), chance.randint(1, 8)
        elif kind in ("replay", "take back") and length <= most_replayed:
            frees.append(request)
            self.free += self.tables[request]
            self.tables[request] = []
            first, new = 0, length + chance.randint(1, 3)
        if first + new > longest:
            return (
                None
                if not frees or frees[-1] != request
                else self._extended(request, 0, longest, grants)
            )
        return self._extended(request, first, new, grants)

    def _extended(self, request: int, first: int, count: int, grants: list[KvGrant]) -> Span:
        table = self.tables[request]
        needed = -(-(first + count) // BLOCK_TOKENS) - len(table)
        if needed > 0:
            taken = [self.free.pop(0) for _ in range(needed)]
            slot = request if self.has_states and not table else None
            grants.append(KvGrant(request, len(table), tuple(taken), slot=slot))
            table += taken
        sampling = Sampling() if first < self.lengths[request] or first == 0 else None
        self.lengths[request] = first + count
        return Span(request, first, count, True, sampling)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def check_schedule(name: str, scheme: str, seed: int, set_threads: Callable[[int], None]) -> None:
    wanted = reference(name, scheme)
    schedule = Schedule(seed)
    stages = pipeline(name, scheme, schedule.cut)
    schedule.has_states = has_states(stages)
    for each in stages:
        each.reset()
    tokens = sequences()
    for plan in schedule.steps(14):
        set_threads(schedule.chance.choice((1, 2)))
        packed = np.concatenate(
            [tokens[span.request][span.first_position : span.end_position] for span in plan.spans]
        )
        logits = advance(stages, plan, packed)
        sizes = [span.token_count for span in plan.spans]
        for span, found in zip(plan.spans, logits.split(sizes), strict=True):
            expected = wanted[span.request][0][span.first_position : span.end_position]
            assert torch.equal(found, expected), f"logits of {span} in a step of {len(sizes)}"
    for request, length in schedule.lengths.items():
        if not length:
            continue
        for layer, whole in zip(kept(stages, request), wanted[request][1], strict=True):
            for part, all_of_it in zip(layer, whole, strict=True):
                assert torch.equal(part, all_of_it[:length]), f"keys or values of request {request}"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.one_in(2)
def test_any_schedule_gives_the_bits_of_one_prefill(
    scheme: str, threads: Callable[[int], None]
) -> None:
    @settings(max_examples=in_form(20, 80), deadline=None)
    @given(st.integers(0, 1 << 30))
    def check(seed: int) -> None:
        check_schedule("llama", scheme, seed, threads)

    check()


OTHERS = sorted(set(CONFIGS) - {"llama"})


@pytest.mark.parametrize(
    ("name", "scheme"),
    # In float32 nothing is rounded away, so it sees the most.
    [
        *one_in(5, product(OTHERS, ["float32"])),
        *one_in(12, product(OTHERS, ("bfloat16", "int8", "int4", "int4, KV int4"))),
    ],
)
def test_any_schedule_of_other_families_does(
    name: str, scheme: str, threads: Callable[[int], None]
) -> None:
    for seed in range(in_form(1, 2)):
        check_schedule(name, scheme, seed, threads)


def test_no_family_in_our_own_blocks_is_left_out() -> None:
    assert {name.partition(" ")[0] for name in CONFIGS} == {
        name for name in ARCHITECTURES if isinstance(architecture_named(name).runs, Fused)
    }


# -- continuations ---------------------------------------------------------------------------------

PROMPTS = 60
EMITTED = 40


class Batch:
    """Sixty prompts of different lengths that are continued together."""

    def __init__(self, model: StageModel, sampled: bool) -> None:
        self.model = model
        generator = np.random.default_rng(8)
        self.tokens = [generator.integers(0, VOCAB, 3 + index).tolist() for index in range(PROMPTS)]
        self.samplings = [
            Sampling(temperature=0.9, seed=index) if sampled else Sampling()
            for index in range(PROMPTS)
        ]

    def prefill(self, request: int) -> None:
        """All of a request's tokens in one chunk, and the next one."""
        blocks = tuple(range(request * 10, request * 10 + 10))
        tokens = self.tokens[request]
        span = Span(request, 0, len(tokens), True, self.samplings[request])
        plan = StepPlan((request,), (KvGrant(request, 0, blocks),), (span,))
        self._take(self.model.execute(plan, np.array(tokens, dtype=np.int64)).result.tokens)

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            spans = tuple(
                Span(index, len(tokens) - 1, 1, True) for index, tokens in enumerate(self.tokens)
            )
            newest = np.array([tokens[-1] for tokens in self.tokens], dtype=np.int64)
            self._take(self.model.execute(StepPlan(spans=spans), newest).result.tokens)

    def _take(self, sampled: Sequence[Any]) -> None:
        for token in sampled:
            self.tokens[token.request].append(token.token)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.one_in(3)
def test_no_continuation_differs_after_a_replay(scheme: str, sampled: bool) -> None:
    model = stage("llama", scheme, LayerRange(0, LAYERS), PROMPTS * 10)
    model.reset()
    undisturbed, replayed = Batch(model, sampled), Batch(model, sampled)
    for batch in (undisturbed, replayed):
        for request in range(PROMPTS):
            batch.prefill(request)
        batch.decode(EMITTED - 1)
        if batch is replayed:
            for request in range(PROMPTS):
                batch.prefill(request)
        else:
            batch.decode(1)
        batch.decode(30)
    differing = [
        index for index in range(PROMPTS) if undisturbed.tokens[index] != replayed.tokens[index]
    ]
    assert differing == []
    assert len({tuple(tokens[-30:]) for tokens in undisturbed.tokens}) > PROMPTS // 2, (
        "continuations are all alike"
    )
