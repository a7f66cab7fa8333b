"""The limits that `edgectl serve` takes: those that were given, else the largest context that fits
into memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edgeshard.cli.commands.site import serve
from edgeshard.cli.commands.site.serve import LIMITS, ServeOptions, largest_context
from edgeshard.cli.commands.spec_options import flag_of
from edgeshard.domain.deployments.deployment import DeploymentSpec, parse_spec
from edgeshard.domain.errors import ResourceExhaustedError

WEIGHT_BYTES = {"none": 16000, "int8": 8000, "int4": 4000}
OWN_CONTEXT = 131072


class Box:
    """A client of a site whose one node has `memory` bytes; a token of context takes one byte."""

    own = OWN_CONTEXT

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self.said: list[str] = []

    async def stored_model(self, name: str) -> Any:
        return SimpleNamespace(max_context=self.own)

    async def plan(self, spec: DeploymentSpec) -> None:
        weights = WEIGHT_BYTES[spec.quantisation.get("*", "none")]
        if weights + (spec.max_context or self.own) > self._memory:
            raise ResourceExhaustedError("memory is short", field="layers", reason="MEMORY_SHORT")

    def say(self, text: str) -> None:
        self.said.append(text)


async def chosen(
    monkeypatch: pytest.MonkeyPatch, memory: int, quantise: str = "auto", **limits: int
) -> Any:
    """The spec that `serve` chooses on a box, and the lines that it prints."""

    async def measure(*_: object) -> None:
        pass

    monkeypatch.setattr(serve, "measure", measure)
    box: Any = Box(memory)
    options = ServeOptions("m", None, "m", "m", quantise, limits)
    spec = await serve._chosen(box, options, "a", box)
    return spec, "\n".join(box.said)


async def test_the_models_own_context_is_taken_if_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, said = await chosen(monkeypatch, WEIGHT_BYTES["none"] + OWN_CONTEXT)
    assert (spec.max_context, spec.max_new_tokens, spec.quantisation) == (0, 0, {})
    assert "context" not in said


async def test_else_the_largest_that_fits_and_it_is_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, said = await chosen(monkeypatch, WEIGHT_BYTES["none"] + 10_000)
    assert (spec.max_context, spec.quantisation) == (10_000, {}), (
        "the widest weights leave a useful context"
    )
    assert f"own context of {OWN_CONTEXT} tokens" in said and "the context is 10000 tokens" in said
    spec, said = await chosen(monkeypatch, WEIGHT_BYTES["none"] + 100)
    assert (spec.max_context, spec.quantisation) == (12_096, {"*": "int4"}), (
        "int8 leaves 8096 tokens"
    )


async def test_half_of_a_short_context_is_useful(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model whose small integers save little."""
    monkeypatch.setattr(Box, "own", 4000)
    monkeypatch.setitem(WEIGHT_BYTES, "int8", 15_000)
    monkeypatch.setitem(WEIGHT_BYTES, "int4", 14_500)
    spec, _ = await chosen(monkeypatch, 16_000 + 2100)
    assert (spec.max_context, spec.quantisation) == (2096, {})
    spec, _ = await chosen(monkeypatch, 15_000 + 2100)
    assert (spec.max_context, spec.quantisation) == (2096, {"*": "int8"})


async def test_a_useful_context_is_worth_fewer_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, _ = await chosen(monkeypatch, WEIGHT_BYTES["int8"] + 8200)
    assert (spec.max_context, spec.quantisation) == (8192, {"*": "int8"}), "a multiple of a block"
    spec, _ = await chosen(monkeypatch, WEIGHT_BYTES["int4"] + 33)
    assert (spec.max_context, spec.quantisation) == (32, {"*": "int4"})
    spec, _ = await chosen(monkeypatch, WEIGHT_BYTES["none"] + 100, quantise="none")
    assert (spec.max_context, spec.quantisation) == (96, {})


@pytest.mark.parametrize(("memory", "limits"), [(100, {}), (20_000, {"max_context": 16_000})])
async def test_a_model_that_does_not_fit_or_a_context_that_was_given_is_refused(
    monkeypatch: pytest.MonkeyPatch, memory: int, limits: dict[str, int]
) -> None:
    with pytest.raises(ResourceExhaustedError):
        await chosen(monkeypatch, memory, quantise="none", **limits)


@pytest.mark.parametrize("right", [0, 16, 4080])
async def test_the_largest_context_is_found_in_few_tries(right: int) -> None:
    tries: list[int] = []

    async def fits(tokens: int) -> bool:
        tries.append(tokens)
        return tokens <= right

    assert await largest_context(4096, fits) == right
    assert len(tries) <= 8


def test_limits_are_those_of_deploy(edgectl: Any) -> None:
    for command in ("serve", "deploy"):
        told = edgectl(command, "--help").stdout
        assert all(flag_of(key) in told for key in LIMITS)


def test_limits_that_were_given_are_compared_with_those_of_a_deployment() -> None:
    spec = parse_spec({"name": "m", "model": "m", "max_context": 512})

    def agrees(**limits: int) -> bool:
        return ServeOptions("m", None, "m", "m", "auto", limits).agrees(spec)

    assert agrees() and agrees(max_context=512, concurrency=8)
    assert not agrees(max_context=256) and not agrees(max_new_tokens=9)
