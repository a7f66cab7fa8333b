"""transformers, for the families that run in its decoder layers: its classes, its configuration,
our attention in it.

The only module that imports transformers, which takes seconds and a hundred megabytes. Families on
our own blocks run without it.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from edgeshard.architectures import Decoder
from edgeshard.domain.errors import UnsupportedModelError
from edgeshard_agent.model.attention.attention import StepAttention
from edgeshard_agent.ops.attention import Scoring

_IMPLEMENTATION = "edgeshard"


def library_of(decoder: Decoder) -> Any:
    """transformers' module with the classes of the decoder's family."""
    name = decoder.architecture.library.module
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def library_config(decoder: Decoder) -> Any:
    """The transformers configuration object of the decoder, set to call our attention.

    Raises UnsupportedModelError when transformers refuses the configuration.
    """
    library = decoder.architecture.library
    module = importlib.import_module(
        f"transformers.models.{library.module}.configuration_{library.module}"
    )
    values = copy.deepcopy(dict(decoder.fields.values))
    values.pop("auto_map", None)  # names code of the checkpoint
    if values.get("head_dim", 0) is None:
        # Some layers read head_dim with a default that a null would defeat.
        del values["head_dim"]
    windows = decoder.architecture.windows
    if windows is not None and windows.sliding is not None:
        # Some classes fail if they have to derive it themselves.
        values["layer_types"] = list(windows.layer_types(decoder.fields, decoder.shape.layer_count))
    try:
        result = getattr(module, library.config_class).from_dict(values)
    except Exception as error:
        raise UnsupportedModelError(
            f"config.json: transformers refuses it: {error}",
            field="config.json",
            reason="CONFIG_REFUSED",
        ) from error
    ALL_ATTENTION_FUNCTIONS.register(_IMPLEMENTATION, _attention)
    result._attn_implementation = _IMPLEMENTATION
    result._experts_implementation = "eager"  # what None comes to, without a warning
    return result


def _attention(  # noqa: PLR0913 (the arguments are those transformers gives)
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    step: StepAttention,
    layer_window: int | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function transformers' layers call; `step` and `layer_window` reach it through
    their arguments.

    The window is the one in the family's record. The layer's own window, which not all families
    have, is ignored.

    Transformers' shape is [1, heads, T, head_dim], and values may be narrower than keys; the result
    is [1, T, heads, head_dim].
    """
    packed_query, packed_key, packed_value = (
        tensor[0].transpose(0, 1) for tensor in (query, key, value)
    )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scoring = Scoring(scale, layer_window or 0, softcap or 0.0, s_aux)
    width = value.shape[-1]
    if width < key.shape[-1]:  # the KV pool keeps both in one width
        packed_value = pad(packed_value, (0, key.shape[-1] - width))
    attended = step.attend(module.layer_idx, packed_query, packed_key, packed_value, scoring)
    return attended[..., :width].unsqueeze(0), None
