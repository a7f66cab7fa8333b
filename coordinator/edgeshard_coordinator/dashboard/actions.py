"""What an operator asks and does on the dashboard: the SDK's calls, their answers as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeshard.domain.deployments.deployment import DeploymentSpec, parse_spec
from edgeshard.domain.deployments.loss import Loss
from edgeshard.domain.deployments.placement import ExplicitStage
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import DeploymentName
from edgeshard_coordinator.dashboard import member_actions, model_actions
from edgeshard_coordinator.dashboard.operator import Action, Operator
from edgeshard_coordinator.dashboard.picture import known, placement_picture, prediction_picture


async def plan(operator: Operator, form: Mapping[str, Any]) -> Any:
    return placement_picture(await operator.plan(_spec(form)))


async def deploy(operator: Operator, form: Mapping[str, Any]) -> Any:
    return {"name": (await operator.deploy(_spec(form), wait=False)).spec.name}


async def delete(operator: Operator, form: Mapping[str, Any]) -> Any:
    name = _text(form, "name")
    if _text(form, "typed") != name:
        raise InvalidArgumentError("typed: the typed name differs from the deployment's name", field="typed")
    await operator.delete_deployment(name, wait=False)
    return {}


async def replan(operator: Operator, form: Mapping[str, Any]) -> Any:
    """With `look` it only returns what a replan would do."""
    result = await operator.replan(_text(form, "name"), dry_run=form.get("look") is True, wait=False)
    return known(
        reason=result.reason.value,
        changed=result.changed,
        gain=result.gain,
        found=placement_picture(result.found),
        note=result.note or None,
    )


async def outlook(operator: Operator, form: Mapping[str, Any]) -> Any:
    """How a deployment does for the traffic it has seen, and what the death of each of its nodes would cost."""
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


GET: Mapping[str, Action] = {"outlook": outlook, **member_actions.GET, **model_actions.GET}
POST: Mapping[str, Action] = {
    "plan": plan,
    "deploy": deploy,
    "delete": delete,
    "replan": replan,
    "timeline": timeline,
    **member_actions.POST,
    **model_actions.POST,
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
