"""The result of a row of a step does not depend on the other rows, nor on how the step is carried
out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from edgeshard_agent.model import fused as fused_module
from edgeshard_agent.model.attention import attention as attention_module
from edgeshard_agent.model.attention import gathered as gathered_module
from edgeshard_agent.model.attention.gathered import Gather, gathered_attention
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.fused import FusedModules
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.weights import StageWeights
from edgeshard_agent.ops.attention import Scoring, SpanTables, attend
from edgeshard_agent.ops.fused_blocks import run_blocks
from edgeshard_agent.ops.kv_arena import RowArena
from edgeshard_agent.ops.native import native_available

from bench.safetensors_directory import SafetensorsDirectory
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange

WHOLE = LayerRange(0, 4)
ONE_CALL = ["llama-plain", "mistral-window", "qwen2-windows", "qwen3-tied"]
"""Variants whose steps of few tokens are one native call: it has all they consist of, and their
heads fill vectors."""

needs_native = pytest.mark.skipif(not native_available(), reason="the native kernels are not built")


def load(checkpoint: Any, dtype: DType, quantisation: Quantisation | None = None) -> StageModel:
    return StageModel.with_kv(
        StageWeights.load(
            SafetensorsDirectory(checkpoint.path),
            checkpoint.config,
            WHOLE,
            dtype=dtype,
            device="cpu",
            quantisation=quantisation,
        ),
        KvMemory(dtype, 40, 16, slots=16),
    )


def answers(
    stage: StageModel, checkpoint: Any, tiny_head: Any, steps: Any
) -> dict[int, torch.Tensor]:
    """The logits of each request's last step, after each prefill ran by itself."""
    stage.reset()
    head = tiny_head([stage], checkpoint.sequences)
    for request, count in enumerate((12, 5, 7)):
        head.step([(request, count)])
    found: dict[int, torch.Tensor] = {}
    for step in steps:
        found |= head.step(step)
    return found


@needs_native
@pytest.mark.parametrize(
    "variant", [*ONE_CALL, "qwen3_moe-sparse-step", "gemma3-text", "phi3-partial"]
)
@pytest.mark.parametrize("scheme", ["float32", "bfloat16", "int8", "int4"])
def test_a_row_has_the_same_bits_alone_and_in_company(
    checkpoint: Any, tiny_head: Any, scheme: str
) -> None:
    quantisation = Quantisation(scheme) if scheme.startswith("int") else None
    stage = load(checkpoint, DType.BFLOAT16 if quantisation else DType(scheme), quantisation)
    alone = answers(stage, checkpoint, tiny_head, [[(0, 1)], [(1, 1)], [(2, 4)]])
    together = answers(stage, checkpoint, tiny_head, [[(1, 1), (0, 1)]])
    mixed = answers(stage, checkpoint, tiny_head, [[(0, 1), (2, 4), (1, 1)]])
    for request in (0, 1):
        assert torch.equal(together[request], alone[request])
        assert torch.equal(mixed[request], alone[request]), "beside another request's chunk"
    assert torch.equal(mixed[2], alone[2]), "a chunk beside decodes"


@needs_native
@pytest.mark.parametrize("variant", ONE_CALL)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_a_prompt_has_the_same_bits_in_any_slices(
    checkpoint: Any, tiny_head: Any, dtype: DType
) -> None:
    stage = load(checkpoint, dtype)
    whole = tiny_head([stage], checkpoint.sequences).step([(0, 21)])[0]
    stage.reset()
    head = tiny_head([stage], checkpoint.sequences)
    steps = [[(0, 8)], [(1, 1), (0, 3)], [(0, 10), (1, 5)]]
    sliced = torch.cat([head.step(step)[0] for step in steps])
    assert torch.equal(sliced, whole)


@needs_native
@pytest.mark.parametrize("variant", ONE_CALL)
def test_steps_of_few_tokens_are_one_native_call_with_the_bits_of_many(
    checkpoint: Any, tiny_head: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = run_blocks

    def counted(blocks: Any, *arguments: Any) -> None:
        calls.append(len(blocks))
        real(blocks, *arguments)

    monkeypatch.setattr(fused_module, "run_blocks", counted)
    stage = load(checkpoint, DType.FLOAT32)
    steps = [[(0, 1), (2, 1)], [(2, 1), (0, 2), (1, 3)]]
    monkeypatch.setattr(attention_module, "MOST_NATIVE_ROWS", 7)
    fused = answers(stage, checkpoint, tiny_head, steps)
    assert calls == [len(WHOLE)] * 4, "of five steps, the first prompt has more rows"
    monkeypatch.setattr(FusedModules, "_native_blocks", lambda *_: [])
    single = answers(stage, checkpoint, tiny_head, steps)
    assert calls == [len(WHOLE)] * 4
    assert all(torch.equal(fused[request], single[request]) for request in range(3))


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("rows_at_a_time", [1, 2, 3])
def test_attention_for_accelerators_agrees_with_the_processors(
    window: int, softcap: float, rows_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered_module, "MOST_GATHERED_BYTES", rows_at_a_time * 12 * 2 * 16 * 4)
    generator = torch.Generator().manual_seed(3)
    tables = torch.tensor([[3, 0, 7], [9, 1, 0], [5, 2, 8]], dtype=torch.int32)
    lengths = torch.tensor([9, 4, 12], dtype=torch.int32)
    query = torch.randn(3, 6, 16, generator=generator)
    key, value = (torch.randn(3, 2, 16, generator=generator) for _ in range(2))
    past = [torch.randn(40, 2, 16, generator=generator) for _ in range(2)]
    arenas = [RowArena(40, 2, 16, torch.float32) for _ in range(2)]
    for arena in arenas:
        arena.write(torch.arange(40), *past)
    scoring = Scoring(0.3, window, softcap)
    spans = SpanTables(tables, lengths, torch.arange(4, dtype=torch.int32), 4)
    wanted = attend(query, key, value, arenas[0], spans, scoring)
    gather = Gather.of(tables, lengths, 4, window, torch.float32)
    found = gathered_attention(query, key, value, arenas[1], gather, scoring)
    torch.testing.assert_close(found, wanted)
    assert torch.equal(arenas[0].keys, arenas[1].keys) and torch.equal(
        arenas[0].values, arenas[1].values
    )
