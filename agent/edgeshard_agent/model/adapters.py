"""The modules of one stage, as its family's record defines them: our own blocks, or transformers'
decoder layers.

Their module paths equal the canonical tensor names of `edgeshard.architectures`, blocks keyed by
their global index.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgeshard.architectures import read_config
from edgeshard.architectures.record import Fused
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard_agent.model import families
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

    Raises UnsupportedModelError as `parse_config` does, and when transformers refuses a
    configuration that it runs.
    """
    context = StageContext(read_config(config), layers, dtype, device, quantisation)
    runs = context.architecture.runs
    modules: StageModules
    modules = FusedModules(context) if isinstance(runs, Fused) else _plugged(context, runs.modules)
    return modules.eval().requires_grad_(False)


def _plugged(context: StageContext, own_modules: str) -> StageModules:
    # Imported here, because only these families need it: transformers takes seconds and a hundred
    # megabytes.
    from edgeshard_agent.model.library import library_config, library_of

    made_for: Any = PluggedModules
    if own_modules:
        made_for = importlib.import_module(f"{families.__name__}.{own_modules}").MODULES
    decoder = context.decoder
    modules: StageModules = made_for(
        replace(context, config=library_config(decoder), library=library_of(decoder))
    )
    return modules
