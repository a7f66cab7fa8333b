"""The sources of a stage's units, for tests that load one themselves."""

from __future__ import annotations

from typing import Any

from edgeshard_agent.store.packed_units import PackedUnits
from edgeshard_agent.store.unit_sources import UnitSources

from edgeshard.architectures import parse_config
from edgeshard.architectures.units import UnitForm, tensors_of_units
from edgeshard.domain.ids import Digest
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange


def chosen_sources(
    units: PackedUnits,
    model: Digest,
    config: dict[str, Any],
    layers: LayerRange,
    dtype: DType,
    quantisation: Quantisation | None = None,
) -> UnitSources:
    """Packed files if there are any."""
    form = UnitForm(model, dtype, quantisation, parse_config(config))
    sources = UnitSources(units, form, tensors_of_units(config, layers, quantisation))
    sources.choose()
    return sources
