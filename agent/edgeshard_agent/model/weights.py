"""Weights of some layers without memory for keys and values: what a stage runs, or what is kept for one to come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgeshard.architectures import ModelShape, expected_tensors, parse_config
from edgeshard.domain.dtypes import DType, Quantisation
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.model import LayerRange
from edgeshard_agent.model.adapters import build_modules
from edgeshard_agent.model.loader import TensorSource, load_parameters
from edgeshard_agent.model.modules import StageModules


class StageWeights:
    """The modules of [layers.first, layers.end), filled."""

    def __init__(self, shape: ModelShape, layers: LayerRange, modules: StageModules) -> None:
        self.shape = shape
        self.layers = layers
        self.modules = modules

    @classmethod
    def load(
        cls,
        source: TensorSource,
        config: Mapping[str, Any],
        layers: LayerRange,
        *,
        dtype: DType,
        device: str,
        quantisation: Quantisation | None = None,
        progress: Callable[[int], None] | None = None,
        reuse: Sequence[StageWeights] = (),
    ) -> StageWeights:
        """`reuse` are weights of the same model that are in memory already: what they have is shared, not read again.

        Raises as `StageModel.load` does.
        """
        shape = parse_config(config)
        if not 0 <= layers.first < layers.end <= shape.layer_count:
            raise InvalidArgumentError(
                f"layers {layers} are not a range of the model's layers 0:{shape.layer_count}", field="layers"
            )
        modules = build_modules(config, layers, dtype, device, quantisation)
        shared = frozenset[str]().union(*(modules.share(held.modules) for held in reuse))
        expected = expected_tensors(config, layers)
        wanted = {name: tensor for name, tensor in expected.items() if not modules.has(name, shared)}
        load_parameters(modules, source, wanted, progress)
        return cls(shape, layers, modules)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters on the device; a tied embedding counts once, what others share too."""
        return self.modules.parameter_bytes

    def shareable(self, layers: LayerRange) -> frozenset[int]:
        """Layers of these for which `load` with `reuse` reads nothing."""
        return frozenset(self.modules.shareable_blocks) & frozenset(range(layers.first, layers.end))

    def keep(self, layers: LayerRange) -> None:
        """Give back the memory of blocks of other layers. Nothing can run in the modules any more."""
        self.modules.drop_blocks(layers)
