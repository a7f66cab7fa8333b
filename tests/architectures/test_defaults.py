"""A key that a config.json leaves out means the default of transformers' configuration class,
whatever the family."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest

from edgeshard.architectures import Decoder, expected_tensors, read_config
from edgeshard.architectures.record import Fused
from edgeshard.domain.errors import UnsupportedModelError
from edgeshard.importing.quantised import without_quantisation
from tests.agent.model.families import WITHOUT_A_CLASS
from tests.agent.model.published import LAYERS, published_config, published_names, shrunk

REFUSED = {"gemma-4-e2b", "gemma-4-e4b"}
ROTARY = (
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "rotary_dim",
    "rope_local_base_freq",
)


def small_config(name: str) -> dict[str, Any]:
    return without_quantisation(shrunk(published_config(name), LAYERS))


def first_of_families() -> list[str]:
    """One published config.json of each family."""
    names: dict[str, str] = {}
    for name in published_names():
        if name not in REFUSED:
            names.setdefault(read_config(small_config(name)).architecture.name, name)
    return [name for family, name in names.items() if family not in WITHOUT_A_CLASS]


def class_of(decoder: Decoder) -> Any:
    library = decoder.architecture.library
    module = importlib.import_module(
        f"transformers.models.{library.module}.configuration_{library.module}"
    )
    return getattr(module, library.config_class)


def reading(config: dict[str, Any]) -> Any:
    """All that EdgeShard makes of a config.json; None if it is refused."""
    try:
        decoder = read_config(config)
    except UnsupportedModelError:
        return None
    record = decoder.architecture
    fields = decoder.fields
    shape = decoder.shape
    runs = record.runs
    return {
        "shape": shape,
        "windows": decoder.windows(),
        "tensors": {name: tensor.shape for name, tensor in expected_tensors(config).items()},
        "ends": record.ends(fields, shape),
        "rotations": decoder.rotations()
        if isinstance(runs, Fused) and record.rope is not None
        else None,
        "styles": [runs.style(fields, shape, layer) for layer in range(LAYERS)]
        if isinstance(runs, Fused)
        else None,
        "chunks": [record.chunks(fields, layer) for layer in range(LAYERS)]
        if record.chunks
        else None,
    }


def changed(
    config: dict[str, Any], removed: tuple[str, ...], values: dict[str, Any]
) -> dict[str, Any]:
    """The config.json without these keys of the decoder, and with other values."""
    result = copy.deepcopy(config)
    decoder = result.get("text_config", result)
    for key in removed:
        decoder.pop(key, None)
    decoder |= copy.deepcopy(values)
    return result


@pytest.mark.parametrize("name", first_of_families())
def test_a_key_that_is_left_out_has_the_default_of_its_class(name: str) -> None:
    config = small_config(name)
    decoder = read_config(config)
    keys = set(config.get("text_config", config))
    made = class_of(decoder)
    # A value that the class computes from other keys is no default.
    defaults = {key: getattr(made, key, None) for key in made().to_dict()}
    other_names = {name for pair in made.attribute_map.items() if set(pair) & keys for name in pair}
    wrong = {}
    for key, value in defaults.items():
        if (
            not isinstance(value, bool | int | float | str)
            or key == "model_type"
            or key in other_names - keys
        ):
            continue
        without = reading(changed(config, (key,), {}))
        found = reading(changed(config, (key,), {key: value}))
        if without is not None and found is not None and without != found:
            wrong[key] = value
    assert not wrong


@pytest.mark.parametrize("name", first_of_families())
def test_a_rotary_embedding_that_is_left_out_is_that_of_its_class(name: str) -> None:
    config = small_config(name)
    decoder = read_config(config)
    if not isinstance(decoder.architecture.runs, Fused):
        return  # transformers' own module computes it, from the same file
    rotary = class_of(decoder)().rope_parameters
    without = reading(changed(config, (*ROTARY, "rope_parameters"), {}))
    found = reading(changed(config, ROTARY, {"rope_parameters": rotary}))
    assert without is not None and found is not None
    turns = []
    for fields in (without, found):
        rotations = fields["rotations"].items()
        turns.append({kind: (one.kind, one.theta, one.dims, one.growth) for kind, one in rotations})
    assert turns[0] == turns[1]
