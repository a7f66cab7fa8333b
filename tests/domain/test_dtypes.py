"""How a model's weights are kept as small integers, in words and as a value."""

from __future__ import annotations

import pytest

from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.models.dtypes import (
    MODEL_FORMATS,
    DType,
    IntegerFormat,
    Quantisation,
    parse_quantisation,
    weights_text,
)

INT8, INT4 = MODEL_FORMATS


@pytest.mark.parametrize("blocks", MODEL_FORMATS)
@pytest.mark.parametrize("head", [None, "int8", "int4", "none"])
def test_every_pair_of_formats_has_a_name(blocks: IntegerFormat, head: str | None) -> None:
    quantisation = Quantisation.of(blocks, head)
    assert quantisation.blocks is blocks
    assert quantisation.head == {None: INT8, "int8": INT8, "int4": INT4, "none": None}[head]
    assert Quantisation.parse(str(quantisation)) is quantisation
    assert parse_quantisation(str(blocks), head) is quantisation
    assert weights_text(DType.BFLOAT16, quantisation) == f"{quantisation} with bfloat16"


def test_there_are_no_other_names() -> None:
    heads = ("int8", "int4", "none")
    rounded = {Quantisation.of(blocks, head) for blocks in MODEL_FORMATS for head in heads}
    assert rounded | {Quantisation.STORED} == set(Quantisation)
    assert parse_quantisation(None, None) is None


@pytest.mark.parametrize(
    ("blocks", "head", "field"),
    [
        ("int3", None, "quantise"),
        ("int2", None, "quantise"),
        ("int8", "int2", "head_quantisation"),
        ("int8", "int3", "head_quantisation"),
        (None, "int8", "head_quantisation"),
    ],
)
def test_a_wrong_option_is_named(blocks: str | None, head: str | None, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_quantisation(blocks, head)
    assert caught.value.field == field


SPEC = {"name": "d", "model": "m", "source": "a"}


def test_a_nodes_quantisation_has_the_specs_head() -> None:
    spec = parse_spec(SPEC | {"quantisation": {"*": "int4", "b": "int8"}})
    assert (spec.quantisation_of("a"), spec.quantisation_of("b")) == (
        Quantisation.INT4,
        Quantisation.INT8,
    )
    spec = parse_spec(SPEC | {"quantisation": {"b": "int8"}, "head_quantisation": "none"})
    assert (spec.quantisation_of("a"), spec.quantisation_of("b")) == (
        None,
        Quantisation.INT8_HEAD_WHOLE,
    )


@pytest.mark.parametrize(
    "values",
    [
        {"head_quantisation": "int4"},
        {"quantisation": {"*": "int8"}, "head_quantisation": "int3"},
    ],
)
def test_a_spec_with_a_wrong_head_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_spec(SPEC | values)
    assert caught.value.field == "head_quantisation"
