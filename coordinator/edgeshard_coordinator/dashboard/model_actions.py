"""What an operator does on the dashboard about models of the store: calls, and their answers as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgeshard.domain.deployments.deployment import DeploymentSpec, parse_spec
from edgeshard.domain.errors import PlacementError, ResourceExhaustedError
from edgeshard.importing.blocks import Width
from edgeshard_coordinator.dashboard.bodies import FORMS, Named, Removal
from edgeshard_coordinator.dashboard.operator import Action, Operator
from edgeshard_coordinator.dashboard.picture import listing_picture, placement_picture

CONTEXTS = (131_072, 32_768, 8_192, 2_048)
"""Contexts in tokens that are tried if a model does not fit with its own."""


@dataclass(frozen=True, slots=True)
class NewModel:
    """The body that adds a model. `source` is a path in a folder or OWNER/NAME of the Hub. `name` is for the store; ""
    takes the source's. `width` is for weights that cannot be kept exactly."""

    source: str
    name: str = ""
    width: str = Width.INT8.value


@dataclass(frozen=True, slots=True)
class AdditionNumber:
    """The body that cancels an addition."""

    number: int


async def folders(operator: Operator, form: Mapping[str, Any]) -> Any:
    """The models of the folders that the coordinator may add models from."""
    return {"folders": [listing_picture(listing) for listing in await operator.list_folders()]}


async def add_model(operator: Operator, form: Mapping[str, Any]) -> Any:
    """Have the coordinator add a model; the stream has its progress."""
    body = FORMS.read(NewModel, form)
    addition = await operator.add_at_coordinator(body.source, body.name, body.width)
    return {"number": addition.number, "name": addition.name}


async def cancel_addition(operator: Operator, form: Mapping[str, Any]) -> Any:
    """End an addition; answered when nothing of it is left."""
    addition = await operator.cancel_addition(FORMS.read(AdditionNumber, form).number)
    return {"phase": addition.phase.value}


async def delete_model(operator: Operator, form: Mapping[str, Any]) -> Any:
    await operator.delete_model(FORMS.read(Removal, form).name)
    return {}


async def fits(operator: Operator, form: Mapping[str, Any]) -> Any:
    """The largest of `fitting_specs` that can be placed now, and its plan. Raises as `plan` does for the smallest."""
    name = FORMS.read(Named, form).name
    stored = await operator.stored_model(name)
    specs = fitting_specs(name, stored.max_context)
    for spec in specs:
        try:
            placement = await operator.plan(spec)
        except (PlacementError, ResourceExhaustedError):
            if spec is specs[-1]:
                raise
        else:
            sizes = {"context": spec.max_context, "concurrency": spec.concurrency}
            return {**sizes, **placement_picture(placement)}
    raise AssertionError("there is at least one spec")


def fitting_specs(model: str, max_context: int) -> list[DeploymentSpec]:
    """The specs that `fits` tries, the largest first: fewer requests at once, then a shorter context."""
    default = parse_spec({"name": model, "model": model, "max_context": max_context})
    contexts = [max_context, *(tokens for tokens in CONTEXTS if tokens < max_context)]
    return [default, *(replace(default, max_context=tokens, concurrency=1) for tokens in contexts)]


GET: Mapping[str, Action] = {"folders": folders}
POST: Mapping[str, Action] = {
    "fits": fits,
    "add-model": add_model,
    "cancel-addition": cancel_addition,
    "delete-model": delete_model,
}
