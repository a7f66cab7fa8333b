"""Tiny random checkpoints of every architecture, the unsplit model's logits for them, and a head
that drives stages."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.weights import StageWeights
from safetensors.torch import load_file, save_file

from bench.safetensors_directory import SafetensorsDirectory
from edgeshard.architectures import parse_config, read_config
from edgeshard.domain.ids import Digest, ModelName
from edgeshard.domain.models.dtypes import DType, KvFormat
from edgeshard.domain.models.model import LayerRange, ModelManifest, TensorInfo
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan
from tests.agent.model.families import VARIANTS, Variant

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()

LENGTHS = (21, 17, 13)
BLOCK_TOKENS = 16
KV_BLOCKS = 40
SLOTS = 8
DELTA_RULES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


@dataclass(frozen=True)
class Checkpoint:
    """A saved model, its manifest, and for each of its sequences the unsplit model's logits
    [length, vocab]."""

    path: Path
    config: dict[str, Any]
    manifest: ModelManifest
    sequences: tuple[np.ndarray, ...]
    reference: tuple[torch.Tensor, ...]
    slack: float
    """Twice what transformers' forms of the gated delta rule, a whole sequence and token by token,
    differ by."""
    stages: dict[tuple[LayerRange, DType], StageModel] = field(default_factory=dict)

    def stage(self, layers: LayerRange, dtype: DType = DType.FLOAT32) -> StageModel:
        """A stage shared by tests, its pool emptied."""
        if (layers, dtype) not in self.stages:
            self.stages[layers, dtype] = self.load(layers, dtype)
        stage = self.stages[layers, dtype]
        stage.execute(StepPlan(frees=tuple(stage.pool.requests)))
        return stage

    def load(
        self,
        layers: LayerRange,
        dtype: DType = DType.FLOAT32,
        kv_dtype: KvFormat | DType | None = None,
        guess_slots: int = 0,
    ) -> StageModel:
        return StageModel.with_kv(
            StageWeights.load(
                SafetensorsDirectory(self.path), self.config, layers, dtype=dtype, device="cpu"
            ),
            KvMemory(
                kv_dtype or dtype, KV_BLOCKS, BLOCK_TOKENS, slots=SLOTS, guess_slots=guess_slots
            ),
        )


def build(variant: Variant, path: Path, lengths: Sequence[int] = LENGTHS) -> Checkpoint:
    """With sequences of these lengths."""
    model = random_model(variant.library_config(), variant.auto)
    model.save_pretrained(path, max_shard_size="8KB" if variant.sharded else "1GB")
    assert variant.sharded == (path / "model.safetensors.index.json").exists()
    if variant.strip:
        tensors = load_file(path / "model.safetensors")
        save_file(
            {name.removeprefix(variant.strip): tensor for name, tensor in tensors.items()},
            path / "model.safetensors",
        )
    saved = json.loads((path / "config.json").read_text())
    if variant.joined:
        _join(path / "model.safetensors", saved)
    return saved_checkpoint(model, path, saved, lengths)


def random_model(config: Any, auto: str = "AutoModelForCausalLM") -> Any:
    """transformers' model of a config, in float32, with norms and biases that are not all alike."""
    torch.manual_seed(7)
    made: Any = getattr(transformers, auto)
    model = made.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    saved_names = model.state_dict().keys()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for name, buffer in model.named_buffers():
            if name in saved_names and buffer.is_floating_point():
                buffer.add_(torch.randn_like(buffer) * 0.2)
    return model


def saved_checkpoint(
    model: Any, path: Path, config: dict[str, Any], lengths: Sequence[int] = LENGTHS
) -> Checkpoint:
    """The checkpoint at `path`, read by `config`, with the logits of `model`, which was saved
    there."""
    source = SafetensorsDirectory(path)
    infos = tuple(_tensor_info(name, source.read(name)) for name in source.names())
    parsed = parse_config(config)
    manifest = ModelManifest(ModelName("tiny"), parsed.architecture, json.dumps(config), infos, ())
    generator = np.random.default_rng(3)
    sequences = tuple(generator.integers(0, parsed.vocab_size, length) for length in lengths)
    with torch.no_grad():
        reference = tuple(model(torch.from_numpy(ids)[None]).logits[0] for ids in sequences)
        pairs = zip(sequences, reference, strict=True) if parsed.architecture in DELTA_RULES else ()
        slack = 3 * max((_apart(model, *pair) for pair in pairs), default=0.0)
    return Checkpoint(path, config, manifest, sequences, reference, slack)


def _apart(model: Any, ids: np.ndarray, whole: torch.Tensor) -> float:
    """The distance between the logits of a sequence that runs token by token and of the whole
    sequence."""
    cache, apart = None, 0.0
    for token, logits in zip(ids, whole, strict=True):
        out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        apart = max(apart, (out.logits[0, -1] - logits).abs().max().item())
    return apart


def _join(file: Path, config: dict[str, Any]) -> None:
    """Store the experts of each layer in the joint tensors that the family's record allows."""
    experts = read_config(config).architecture.experts
    assert experts is not None
    tensors = load_file(file)
    if experts.transposed:  # they are joined already
        ends = tuple(joined.tensor for joined in experts.joined)
        found = [name for name in tensors if name.endswith(ends)]
        assert found, "nothing to transpose"
        tensors |= {name: tensors[name].transpose(1, 2).contiguous() for name in found}
        save_file(tensors, file)
        return
    for joined in experts.joined:
        names = [name for name in tensors if name.endswith(joined.parts[0].format(0))]
        assert names, "nothing to join"
        for name in names:
            prefix = name.removesuffix(joined.parts[0].format(0))
            parts: list[torch.Tensor] = []
            while f"{prefix}{joined.parts[0].format(len(parts))}" in tensors:
                own = [tensors.pop(f"{prefix}{part.format(len(parts))}") for part in joined.parts]
                parts.append(torch.cat(own))
            tensors[prefix + joined.tensor] = torch.stack(parts)
    save_file(tensors, file)


def _tensor_info(name: str, tensor: torch.Tensor) -> TensorInfo:
    return TensorInfo(
        name, DType(str(tensor.dtype).removeprefix("torch.")), tuple(tensor.shape), Digest("0" * 64)
    )


class TinyHead:
    """The head's work for a pipeline, with the sequences given in advance: blocks, lengths, steps.

    Blocks are handed out in a shuffled order unless `contiguous`. `step` returns the last stage's
    logits by request.
    """

    def __init__(
        self,
        stages: Sequence[StageModel],
        sequences: Sequence[np.ndarray],
        contiguous: bool = False,
    ) -> None:
        self.stages = stages
        self.sequences = sequences
        self.block_tokens = stages[0].pool.block_tokens
        self.free_blocks = list(range(stages[0].pool.blocks))
        if not contiguous:
            random.Random(5).shuffle(self.free_blocks)
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.has_states = any(stage.pool.states.slots for stage in stages)

    def plan(
        self, spans: Sequence[tuple[int, int]], restart: dict[int, int] | None = None
    ) -> StepPlan:
        grants, planned = [], []
        for request, count in spans:
            first = (restart or {}).get(request, self.lengths.get(request, 0))
            sampling = (
                Sampling() if request not in self.tables or request in (restart or {}) else None
            )
            table = self.tables.setdefault(request, [])
            needed = -(-(first + count) // self.block_tokens) - len(table)
            if needed > 0:
                blocks = tuple(self.free_blocks.pop(0) for _ in range(needed))
                slot = self._slot(request) if self.has_states and not table else None
                grants.append(KvGrant(request, len(table), blocks, slot=slot))
                table.extend(blocks)
            planned.append(Span(request, first, count, sample=True, sampling=sampling))
            self.lengths[request] = first + count
        return StepPlan(grants=tuple(grants), spans=tuple(planned))

    def _slot(self, request: int) -> int:
        """In another order than requests, so that the test cannot confuse the two."""
        return SLOTS - 1 - request

    def inputs(self, plan: StepPlan) -> np.ndarray:
        parts = [
            self.sequences[span.request][span.first_position : span.end_position]
            for span in plan.spans
        ]
        return np.concatenate(parts)

    def step(
        self, spans: Sequence[tuple[int, int]], restart: dict[int, int] | None = None
    ) -> dict[int, torch.Tensor]:
        plan = self.plan(spans, restart)
        value: Any = self.inputs(plan)
        for stage in self.stages[:-1]:
            value = stage.execute(plan, value).hidden
        logits = self.stages[-1].logits(plan, value)
        sizes = [span.token_count for span in plan.spans]
        return {
            span.request: part for span, part in zip(plan.spans, logits.split(sizes), strict=True)
        }


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """A variant's checkpoint by name, made on first use."""
    made: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in made:
            made[name] = build(VARIANTS[name], tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture
def checkpoint(variant: str, checkpoint_of: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoint_of(variant)


@pytest.fixture(scope="session")
def tiny_head() -> type[TinyHead]:
    return TinyHead


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `variant` runs for every variant, unless it names its own."""
    own = any(
        mark.name == "parametrize" and "variant" in str(mark.args[0])
        for mark in metafunc.definition.iter_markers()
    )
    if "variant" in metafunc.fixturenames and not own:
        metafunc.parametrize("variant", list(VARIANTS))
