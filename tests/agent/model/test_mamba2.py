"""Mamba2's mixer by its definition in float64, and nemotron_h's, which has two forms in
transformers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from edgeshard_agent.model.mixers import SelectiveScan
from edgeshard_agent.ops.native import native_available
from edgeshard_agent.ops.recurrent import SpanStates
from torch import Tensor
from torch.nn.functional import linear, silu, softplus
from transformers import AutoModelForCausalLM

from bench.safetensors_directory import SafetensorsDirectory
from edgeshard.architectures import StateSize
from edgeshard.domain.models.model import LayerRange
from tests.agent.model.conftest import build
from tests.agent.model.families import LAYERS, VARIANTS, Variant, decoder_of, family_of

FAMILIES = {"nemotron_h", "bamba", "falcon_h1", "granitemoehybrid", "mamba2"}
ROWS = [name for name in VARIANTS if family_of(name) in FAMILIES]
CUTS: list[tuple[int, ...]] = [(27,), (1,) * 27, (9, 1, 1, 16), (13, 14)]
WHOLE = LayerRange(0, LAYERS)


@dataclass(frozen=True)
class Definition:
    """A layer's mixer in float64, of the tensors and the config.json that a checkpoint has."""

    weights: dict[str, Tensor]
    values: Mapping[str, Any]
    states: tuple[StateSize, ...]

    def run(self, hidden: Tensor) -> Tensor:
        """[T, width] from [T, width], token by token from the beginning of a request."""
        (before, channels), (heads, state_dim, head_dim) = (size.shape for size in self.states)
        inner = heads * head_dim
        weights = self.weights
        values = self.values
        group = (channels - inner) // 2
        scales = values.get("ssm_multipliers") or [1.0] * 5
        low, high = values.get("time_step_limit") or (0.0, math.inf)
        kernel = weights["conv1d.weight"].squeeze(1)
        bias = weights.get("conv1d.bias", torch.zeros(1))
        taps = [torch.zeros(channels, dtype=torch.float64)] * (before + 1)
        state, found = torch.zeros(heads, state_dim, head_dim, dtype=torch.float64), []
        for token in hidden.double():
            row = self._linear("in_proj", token * values.get("ssm_in_multiplier", 1.0))
            parts = row.split([inner, inner, group, group, heads])
            gate, x, b, c, step = (part * scale for part, scale in zip(parts, scales, strict=True))
            taps = [*taps[1:], torch.cat([x, b, c])]
            mixed = sum((tap * kernel[:, i] for i, tap in enumerate(taps)), start=bias)
            x, b, c = silu(mixed).split([inner, group, group])
            steps = softplus(step + weights["dt_bias"]).clamp(low, high)
            out = []
            for head, own in enumerate(x.view(heads, head_dim)):
                at = head // (heads // (group // state_dim))
                into, outof = (part.view(-1, state_dim)[at] for part in (b, c))
                decay = (-steps[head] * weights["A_log"][head].exp()).exp()
                state[head] = state[head] * decay + torch.outer(into, steps[head] * own)
                out.append(outof @ state[head] + weights["D"][head] * own)
            found.append(
                self._linear("out_proj", self._gated(torch.cat(out), gate, group // state_dim))
            )
        return torch.stack(found)

    def _linear(self, name: str, row: Tensor) -> Tensor:
        found: Tensor = linear(
            row, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        )
        return found

    def _gated(self, row: Tensor, gate: Tensor, groups: int) -> Tensor:
        if "norm.weight" not in self.weights:
            return row * silu(gate)
        gate_first = not self.values.get("mamba_norm_before_gate", False)
        eps = self.values.get("rms_norm_eps") or self.values["layer_norm_epsilon"]
        grouped = (row * silu(gate) if gate_first else row).view(groups, -1)
        roots: Tensor = (grouped.square().mean(-1, keepdim=True) + eps).sqrt()
        normed: Tensor = (grouped / roots).flatten() * self.weights["norm.weight"]
        return normed if gate_first else normed * silu(gate)


@pytest.mark.parametrize("variant", ROWS)
def test_the_mixer_is_its_definition_with_the_same_bits_in_any_chunks(
    variant: str, checkpoint: Any
) -> None:
    decoder, source = decoder_of(variant), SafetensorsDirectory(checkpoint.path)
    layer = next(index for index, states in enumerate(decoder.shape.states) if states)
    blocks: Any = checkpoint.stage(WHOLE)._modules.layers
    mixer = next(part for part in blocks[str(layer)].modules() if isinstance(part, SelectiveScan))
    path = re.compile(rf".*layers\.{layer}\.(?:mamba|mixer)\.(.+)")
    names = {
        found[1]: name for name in source.names() if (found := path.fullmatch(name)) is not None
    }
    weights = {name: source.read(full).double() for name, full in names.items()}
    hidden = torch.randn(27, 32, generator=torch.Generator().manual_seed(1))
    expected = Definition(weights, decoder.fields.values, decoder.shape.states[layer]).run(hidden)
    results = []
    for cut in CUTS:
        states = tuple(torch.zeros(3, *size.shape) for size in decoder.shape.states[layer])
        parts = []
        for chunk in hidden.split(list(cut)):
            edges = torch.tensor([0, len(chunk)], dtype=torch.int32)
            spans = SpanStates(torch.tensor([2], dtype=torch.int32), edges)
            parts.append(mixer.mix(chunk.unsqueeze(0), states, spans)[0])
        results.append(torch.cat(parts))
        torch.testing.assert_close(results[-1].double(), expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(found, results[0]) for found in results) or not native_available()


def _logits(model: Any, ids: Tensor, cached: bool) -> Tensor:
    """The logits of a whole sequence at once, or token by token with transformers' cache."""
    with torch.no_grad():
        if not cached:
            found: Tensor = model(ids, use_cache=False).logits[0]
            return found
        cache, rows = None, []
        for token in ids[0]:
            answer = model(token.view(1, 1), past_key_values=cache, use_cache=True)
            cache = answer.past_key_values
            rows.append(answer.logits[0])
        return torch.cat(rows)


@pytest.mark.parametrize("least", [0.001, 0.6])
def test_nemotron_h_has_no_shortest_step(
    least: float, tiny_head: Any, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """transformers' scan over a prompt has one, `time_step_min`, its form for single tokens and the
    model have none."""
    row = VARIANTS["nemotron_h-groups"]
    checkpoint = build(Variant(row.config_class, row.options | {"time_step_min": least}), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    stages = [checkpoint.load(LayerRange(0, 1)), checkpoint.load(LayerRange(1, LAYERS))]
    head = tiny_head(stages, checkpoint.sequences)
    ids = [torch.from_numpy(sequence)[None] for sequence in checkpoint.sequences]
    at_once, by_token = ([_logits(model, one, cached) for one in ids] for cached in (False, True))
    for part in model.modules():
        if hasattr(part, "time_step_limit"):
            part.time_step_limit = (0.0, math.inf)
    free = [_logits(model, one, cached=False) for one in ids]
    for request, sequence in enumerate(checkpoint.sequences):
        found = torch.cat(
            [head.step([(request, count)])[request] for count in (len(sequence) - 3, 1, 1, 1)]
        )
        own = (at_once[request] - by_token[request]).abs().max().item()
        error, far = ((found - form[request]).abs().max().item() for form in (free, at_once))
        tolerance = 1e-4 * max(1.0, free[request].std().item())
        record_property(
            f"request {request}", f"{error:.2g} without, {far:.2g} with the limit; own {own:.2g}"
        )
        assert error <= tolerance
        assert far <= max(tolerance, 2 * own)
        assert least < 0.1 or own > 100 * tolerance, "the limit makes no difference here"
