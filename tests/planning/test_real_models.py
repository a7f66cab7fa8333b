"""docs/real-models.md equals the present output of `edgectl plan`, and its shapes belong to the
named models."""

from __future__ import annotations

import json

import pytest

from bench import real_models
from edgeshard.planning.inputs.shapes import model_from_config

PAGE = (real_models.ROOT / "docs" / real_models.PAGE).read_text()
PARAMETERS = dict(
    zip(real_models.MODELS, (3.2e9, 8.0e9, 20.9e9, 30.5e9, 70.6e9, 235e9), strict=True)
)
"""As their publishers say."""


def test_a_section_is_what_the_commands_say() -> None:
    """Else run `python -m bench.real_models`; its `--check`, of all sections, is run by
    tests/house/test_benches.py."""
    (site,) = (site for site in real_models.SITES if site.name == real_models.TYPED)
    section = real_models.without_comments(real_models.section(site, ""))
    assert section in real_models.without_comments(PAGE)


def test_the_words_around_the_tables_are_those_of_the_program() -> None:
    assert PAGE.startswith(real_models.INTRODUCTION) and PAGE.endswith(real_models.CONCLUSIONS)


@pytest.mark.parametrize("name", real_models.MODELS)
def test_a_shape_has_the_parameters_of_its_model(name: str) -> None:
    config = json.loads((real_models.EXAMPLES / name / "config.json").read_text())
    assert model_from_config(name, config).parameter_count == pytest.approx(
        PARAMETERS[name], rel=0.01
    )
