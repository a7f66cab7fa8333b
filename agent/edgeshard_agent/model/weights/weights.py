"""Weights of some layers without memory for keys and values: of a running stage, or kept for a
later one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from edgeshard.architectures import ModelShape, check_quantisation, expected_tensors, parse_config
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import StageFilling
from edgeshard_agent.model.adapters import build_modules
from edgeshard_agent.model.decoder import DecoderModules
from edgeshard_agent.model.modules import StageModules
from edgeshard_agent.model.weights.loader import TensorSource
from edgeshard_agent.model.weights.weight_loading import Filled, Packing, fill


def check_weights(shape: ModelShape, device: str, quantisation: Quantisation | None) -> None:
    """Raise UnsupportedModelError for a model, InvalidArgumentError for a device, that cannot run
    small integers."""
    if quantisation is None:
        return
    check_quantisation(shape, quantisation)
    if torch.device(device).type != "cpu":
        raise InvalidArgumentError(
            f"quantisation: weights of {quantisation} run on the CPU, not on {device}; remove this "
            "node from it",
            field="quantisation",
            reason="UNSUPPORTED_QUANTISATION",
        )


@dataclass(eq=False)
class StageWeights:
    """The modules of [layers.first, layers.end), filled."""

    shape: ModelShape
    layers: LayerRange
    modules: StageModules
    filled: Filled = field(default_factory=Filled)

    @classmethod
    def load(  # noqa: PLR0913 (one place where a deployment's facts meet)
        cls,
        source: TensorSource,
        config: Mapping[str, Any],
        layers: LayerRange,
        *,
        dtype: DType,
        device: str,
        quantisation: Quantisation | None = None,
        progress: Callable[[StageFilling], None] = lambda filling: None,
        reuse: Sequence[StageWeights] = (),
        packing: Packing | None = None,
    ) -> StageWeights:
        """Build and fill the modules of `layers`.

        `config` is the decoded config.json. `packing` defines where units are read from and how
        much may stay in memory; without it everything stays. `reuse` are weights of the same model
        that are in memory already: their tensors are shared, not read again. `progress` receives
        the progress of the weights. Raises UnsupportedModelError, DataLossError for a missing
        tensor, InvalidArgumentError for one of the wrong shape or for layers the model does not
        have, ResourceExhaustedError when memory is short.
        """
        shape = parse_config(config)
        check_weights(shape, device, quantisation)
        if not 0 <= layers.first < layers.end <= shape.layer_count:
            raise InvalidArgumentError(
                f"layers {layers} are not a range of the model's layers 0:{shape.layer_count}",
                field="layers",
            )
        modules = build_modules(config, layers, dtype, device, quantisation)
        shared = frozenset[str]().union(*(modules.share(weights.modules) for weights in reuse))
        expected = expected_tensors(config, layers)
        missing_tensors = {
            name: tensor for name, tensor in expected.items() if not modules.has(name, shared)
        }
        filled = fill(modules, config, source, missing_tensors, packing, progress)
        if filled.store is not None:
            assert isinstance(modules, DecoderModules)
            modules.store = filled.store
        return cls(shape, layers, modules, filled)

    def close(self) -> None:
        """Stop reading from the disk and give the slots back. Nothing can run in the modules any
        more."""
        for store in self.filled.stores:
            store.close()

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters on the device; a tied embedding counts once, what others share
        too."""
        return self.modules.parameter_bytes

    def shareable(self, layers: LayerRange) -> frozenset[int]:
        """Layers of these for which `load` with `reuse` reads nothing."""
        return frozenset(self.modules.shareable_blocks) & frozenset(range(layers.first, layers.end))

    def keep(self, layers: LayerRange) -> None:
        """Give back the memory of blocks of other layers. Nothing can run in the modules any
        more."""
        self.close()
        self.modules.drop_blocks(layers)
