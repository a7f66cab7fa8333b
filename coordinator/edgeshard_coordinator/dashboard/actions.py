"""What an operator asks and does on the dashboard: the SDK's calls, their answers as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeshard.domain.deployments.deployment import DeploymentSpec, parse_spec
from edgeshard.domain.deployments.placement import ExplicitStage
from edgeshard.domain.deployments.traffic import Loss
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import DeploymentName
from edgeshard_coordinator.dashboard import member_actions, model_actions
from edgeshard_coordinator.dashboard.operator import Action, Operator
from edgeshard_coordinator.dashboard.picture import known, placement_picture, prediction_picture


async def plan(operator: Operator, asked: Mapping[str, Any]) -> Any:
    return placement_picture(await operator.plan(_spec(asked)))


async def deploy(operator: Operator, asked: Mapping[str, Any]) -> Any:
    return {"name": (await operator.deploy(_spec(asked), wait=False)).spec.name}


async def delete(operator: Operator, asked: Mapping[str, Any]) -> Any:
    name = _text(asked, "name")
    if _text(asked, "typed") != name:
        raise InvalidArgumentError("typed: the typed name differs from the deployment's name", field="typed")
    await operator.delete_deployment(name, wait=False)
    return {}


async def replan(operator: Operator, asked: Mapping[str, Any]) -> Any:
    """With `look` it only returns what a replan would do."""
    found = await operator.replan(_text(asked, "name"), dry_run=asked.get("look") is True, wait=False)
    return known(
        reason=found.reason.value,
        changed=found.changed,
        gain=found.gain,
        found=placement_picture(found.found),
        note=found.note or None,
    )


async def outlook(operator: Operator, asked: Mapping[str, Any]) -> Any:
    """How a deployment does for the traffic it has seen, and what the death of each of its nodes would cost."""
    found = (await operator.deployment(_text(asked, "name"), outlook=True)).outlook
    if found is None:
        return {}
    return known(
        expected=None if found.expected is None else prediction_picture(found.expected),
        better=None if found.better is None else prediction_picture(found.better),
        gain=found.gain,
        layers=_layers(found.layers),
        note=found.note or None,
        losses=[_loss(loss) for loss in found.losses],
    )


async def timeline(operator: Operator, asked: Mapping[str, Any]) -> Any:
    return await operator.slice_of(DeploymentName(_text(asked, "name")))


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


def _text(asked: Mapping[str, Any], field: str) -> str:
    value = asked.get(field)
    if not isinstance(value, str) or not value:
        raise InvalidArgumentError(f"{field} is missing", field=field)
    return value


def _spec(asked: Mapping[str, Any]) -> DeploymentSpec:
    spec = asked.get("spec")
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
