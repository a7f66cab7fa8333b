"""What an operator asks and does on the dashboard about models and deployments: the SDK's calls,
their answers as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgeshard.domain.deployments.deployment import DeploymentSpec, parse_spec
from edgeshard.domain.deployments.placement import ExplicitStage
from edgeshard.domain.deployments.traffic import Loss
from edgeshard.domain.errors import InvalidArgumentError, PlacementError, ResourceExhaustedError
from edgeshard.domain.ids import DeploymentName
from edgeshard.importing.blocks import Width
from edgeshard_coordinator.dashboard import member_actions
from edgeshard_coordinator.dashboard.operator import FORMS, Action, Named, Operator, Removal
from edgeshard_coordinator.dashboard.picture import (
    known,
    listing_picture,
    placement_picture,
    prediction_picture,
)

CONTEXTS = (131_072, 32_768, 8_192, 2_048)
"""Contexts in tokens that are tried if a model does not fit with its own."""


@dataclass(frozen=True, slots=True)
class NewModel:
    """The body that adds a model. `source` is a path in a folder or OWNER/NAME of the Hub. `name`
    is for the store; "" takes the source's. `width` is for weights that cannot be kept exactly."""

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
    """The largest of `fitting_specs` that can be placed now, and its plan. Raises as `plan` does
    for the smallest."""
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
    """The specs that `fits` tries, the largest first: fewer requests at once, then a shorter
    context."""
    default = parse_spec({"name": model, "model": model, "max_context": max_context})
    contexts = [max_context, *(tokens for tokens in CONTEXTS if tokens < max_context)]
    return [default, *(replace(default, max_context=tokens, concurrency=1) for tokens in contexts)]


async def plan(operator: Operator, form: Mapping[str, Any]) -> Any:
    return placement_picture(await operator.plan(_spec(form)))


async def deploy(operator: Operator, form: Mapping[str, Any]) -> Any:
    return {"name": (await operator.deploy(_spec(form), wait=False)).spec.name}


async def delete(operator: Operator, form: Mapping[str, Any]) -> Any:
    name = _text(form, "name")
    if _text(form, "typed") != name:
        raise InvalidArgumentError(
            "typed: the typed name differs from the deployment's name", field="typed"
        )
    await operator.delete_deployment(name, wait=False)
    return {}


async def replan(operator: Operator, form: Mapping[str, Any]) -> Any:
    """With `look` it only returns what a replan would do."""
    result = await operator.replan(
        _text(form, "name"), dry_run=form.get("look") is True, wait=False
    )
    return known(
        reason=result.reason.value,
        changed=result.changed,
        gain=result.gain,
        found=placement_picture(result.found),
        note=result.note or None,
    )


async def outlook(operator: Operator, form: Mapping[str, Any]) -> Any:
    """How a deployment does for the traffic it has seen, and what the death of each of its nodes
    would cost."""
    forecast = (await operator.deployment(_text(form, "name"), outlook=True)).outlook
    if forecast is None:
        return {}
    return known(
        expected=None if forecast.expected is None else prediction_picture(forecast.expected),
        better=None if forecast.better is None else prediction_picture(forecast.better),
        gain=forecast.gain,
        layers=_layers(forecast.layers),
        note=forecast.note or None,
        losses=[_loss(loss) for loss in forecast.losses],
    )


async def timeline(operator: Operator, form: Mapping[str, Any]) -> Any:
    return await operator.slice_of(DeploymentName(_text(form, "name")))


GET: Mapping[str, Action] = {"outlook": outlook, **member_actions.GET, "folders": folders}
POST: Mapping[str, Action] = {
    "plan": plan,
    "deploy": deploy,
    "delete": delete,
    "replan": replan,
    "timeline": timeline,
    **member_actions.POST,
    "fits": fits,
    "add-model": add_model,
    "cancel-addition": cancel_addition,
    "delete-model": delete_model,
}


def _text(form: Mapping[str, Any], field: str) -> str:
    value = form.get(field)
    if not isinstance(value, str) or not value:
        raise InvalidArgumentError(f"{field} is missing", field=field)
    return value


def _spec(form: Mapping[str, Any]) -> DeploymentSpec:
    spec = form.get("spec")
    if not isinstance(spec, dict):
        raise InvalidArgumentError("spec is missing", field="spec")
    return parse_spec(spec)


def _loss(loss: Loss) -> dict[str, Any]:
    return known(
        node=loss.node,
        pause_s=None if loss.pause is None else round(loss.pause.total_s, 2),
        taken_by=_layers(loss.taken_by),
        warm=loss.warm,
        note=loss.note or None,
    )


def _layers(stages: tuple[ExplicitStage, ...]) -> str:
    return ",".join(f"{stage.node}={stage.layers}" for stage in stages)
