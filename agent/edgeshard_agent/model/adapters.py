"""The modules of one stage, as its family's record says: our own blocks, or transformers' decoder layers.

Their module paths equal the canonical tensor names of `edgeshard.architectures`, blocks keyed by their global index.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from typing import Any

from edgeshard.architectures import Decoder, read_config
from edgeshard.architectures.record import Plugged
from edgeshard.domain.dtypes import DType, Quantisation
from edgeshard.domain.errors import UnsupportedModelError
from edgeshard.domain.model import LayerRange
from edgeshard_agent.model import attention, families
from edgeshard_agent.model.fused import FusedModules
from edgeshard_agent.model.modules import StageContext, StageModules
from edgeshard_agent.model.plugged import PluggedModules


def build_modules(
    config: Mapping[str, Any],
    layers: LayerRange,
    dtype: DType,
    device: str,
    quantisation: Quantisation | None = None,
) -> StageModules:
    """This stage's modules in evaluation mode, parameters still on the meta device.

    Raises UnsupportedModelError as `parse_config` does, and when transformers refuses the configuration.
    """
    attention.register()
    decoder = read_config(config)
    library = decoder.architecture.library.module
    context = StageContext(
        decoder,
        _library_config(decoder),
        importlib.import_module(f"transformers.models.{library}.modeling_{library}"),
        layers,
        dtype,
        device,
        quantisation,
    )
    modules: StageModules = _class_for(decoder)(context)
    return modules.eval().requires_grad_(False)


def _class_for(decoder: Decoder) -> Any:
    runs = decoder.architecture.runs
    if not isinstance(runs, Plugged):
        return FusedModules
    if not runs.modules:
        return PluggedModules
    return importlib.import_module(f"{families.__name__}.{runs.modules}").Modules


def _library_config(decoder: Decoder) -> Any:
    """The transformers configuration object of the decoder, set to call our attention."""
    library = decoder.architecture.library
    module = importlib.import_module(f"transformers.models.{library.module}.configuration_{library.module}")
    values = copy.deepcopy(dict(decoder.fields.values))
    if values.get("head_dim", 0) is None:
        # Some layers read head_dim with a default that a null would defeat.
        del values["head_dim"]
    windows = decoder.architecture.windows
    if windows is not None and windows.sliding is not None:
        # Some classes fail where they have to find out for themselves.
        values["layer_types"] = list(windows.layer_types(decoder.fields, decoder.shape.layer_count))
    try:
        result = getattr(module, library.config_class).from_dict(values)
    except Exception as error:
        raise UnsupportedModelError(
            f"config.json: transformers refuses it: {error}", field="config.json", reason="CONFIG_REFUSED"
        ) from error
    result._attn_implementation = attention.IMPLEMENTATION
    result._experts_implementation = "eager"  # what None comes to, without a warning
    return result
