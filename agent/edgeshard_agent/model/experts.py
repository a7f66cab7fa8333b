"""Experts of our own in transformers' decoder layers: gated MLPs in our kernels, each a unit that may be streamed."""

from __future__ import annotations

from typing import Any

from torch import nn

from edgeshard.architectures.record import Plugged
from edgeshard_agent.model.blocks import ExpertModules, GatedMlp, Gating, gating_of
from edgeshard_agent.model.modules import StageContext
from edgeshard_agent.model.projection import mlp_forms


def replace_experts(layer: nn.Module, context: StageContext, index: int) -> None:
    """Replace the experts of transformers' layer with this global index by ours, if it has any."""
    record, shape = context.architecture, context.shape
    runs = record.runs
    if not isinstance(runs, Plugged) or not runs.experts:
        return
    block = record.block(context.decoder.fields, shape, index)
    sizes = {record.place(name).parameter: record.matrix(name, size, shape.hidden_size) for name, size in block.items()}
    count = len({expert for name in block if (expert := record.expert_index(name)) is not None})
    if not count:
        return
    owner_path, _, leaf = runs.experts.rpartition(".")
    owner = layer.get_submodule(owner_path)
    hidden, inner = sizes[f"{runs.experts}.0.down_proj.weight"]
    bias = f"{runs.experts}.0.down_proj.bias" in sizes
    gated = not {f"{runs.experts}.0.gate_proj.weight", f"{runs.experts}.0.gate_up_proj.weight"}.isdisjoint(sizes)
    gating = _gating(getattr(owner, leaf), context, gated)
    forms = context.block_forms(index)
    kinds = [mlp_forms(forms, f"{runs.experts}.{expert}") for expert in range(count)]
    mlps = (GatedMlp(inner, hidden, gating, bias=bias, gated=gated, forms=kind) for kind in kinds)
    setattr(owner, leaf, ExpertModules(mlps))


def _gating(theirs: Any, context: StageContext, gated: bool) -> Gating:
    """The gating of transformers' experts; a family's own is called, whatever it clamps and in whatever order it has
    rows of gate and up. Without gates it is the activation."""
    if not gated:
        activation: Gating = theirs.act_fn
        return activation
    own = getattr(type(theirs), "_apply_gate", None)
    if own is not None and own.__module__ == type(theirs).__module__:
        gating: Gating = theirs._apply_gate
        return gating
    record = context.architecture
    return gating_of(context.decoder.fields.choice(record.activation, record.activations))
