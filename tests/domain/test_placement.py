"""Layers placed by hand, as texts."""

from __future__ import annotations

import pytest

from edgeshard.domain.deployments.placement import parse_layers
from edgeshard.domain.errors import PlacementError
from edgeshard.domain.models.model import LayerRange


def test_a_layer_of_thousands_of_digits_is_a_placement_that_cannot_be() -> None:
    """Python converts no number of more than 4,300 digits, and raises an error of its own."""
    with pytest.raises(PlacementError) as caught:
        parse_layers("a=0:4,b=4:" + "9" * 5000)
    assert caught.value.field == "layers" and len(caught.value.message) < 2100
    assert parse_layers("a=0:999999999")[0].layers == LayerRange(0, 999_999_999)
