"""What an operator asks and does on the dashboard: the SDK's calls, their answers as JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from edgeshard.client.connection import Connection
from edgeshard.client.deployment_calls import DeploymentCalls
from edgeshard.client.site_calls import SiteCalls
from edgeshard.domain.clock import Clock
from edgeshard.domain.deployments.deployment import DeploymentSpec, parse_spec
from edgeshard.domain.deployments.loss import Loss
from edgeshard.domain.deployments.placement import ExplicitStage, Placement
from edgeshard.domain.errors import InvalidArgumentError, PlacementError, ResourceExhaustedError
from edgeshard.domain.identity import Role
from edgeshard.domain.ids import DeploymentName
from edgeshard.wire.invitations import invitation_to_text, line_without_edgeshard
from edgeshard_coordinator.dashboard.adding import OperatorAdding
from edgeshard_coordinator.dashboard.picture import known, listing_picture, prediction_picture

CONTEXTS = (32_768, 8_192, 2_048)
"""Contexts in tokens that are tried if a model does not fit with its own."""
DEFAULT_CONCURRENCY = 8


class Operator(SiteCalls, DeploymentCalls):
    """An operator's calls. `slice_of` gives the newest slice of a deployment's timeline; `adding` adds models."""

    def __init__(
        self,
        connection: Connection,
        timeout_s: float,
        clock: Clock,
        slice_of: Callable[[DeploymentName], Awaitable[Any]],
        adding: OperatorAdding,
    ) -> None:
        super().__init__(connection, timeout_s, clock)
        self.slice_of = slice_of
        self.list_folders = adding.models
        self.add_at_coordinator = adding.add
        self.cancel_addition = adding.cancel


async def plan(operator: Operator, asked: Mapping[str, Any]) -> Any:
    return _placement(await operator.plan(_spec(asked)))


async def deploy(operator: Operator, asked: Mapping[str, Any]) -> Any:
    return {"name": (await operator.deploy(_spec(asked), wait=False)).spec.name}


async def delete(operator: Operator, asked: Mapping[str, Any]) -> Any:
    name = _text(asked, "name")
    if _text(asked, "typed") != name:
        raise InvalidArgumentError("typed: it is not the deployment's name", field="typed")
    await operator.delete_deployment(name, wait=False)
    return {}


async def replan(operator: Operator, asked: Mapping[str, Any]) -> Any:
    """With `look` only asks what a replan would give."""
    found = await operator.replan(_text(asked, "name"), dry_run=asked.get("look") is True, wait=False)
    return known(
        reason=found.reason.value,
        changed=found.changed,
        gain=found.gain,
        found=_placement(found.found),
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


async def join(operator: Operator, asked: Mapping[str, Any]) -> Any:
    """The lines by which one more node joins, with EdgeShard and without. They are shown this once."""
    token = await operator.create_token(Role.AGENT, _text(asked, "name"), ttl_s=3600.0)
    return known(
        line=f"edgectl join {invitation_to_text(token.invitation)}", bare=line_without_edgeshard(token) or None
    )


async def folders(operator: Operator, asked: Mapping[str, Any]) -> Any:
    """The models of the folders that the coordinator may add models from."""
    return {"folders": [listing_picture(listing) for listing in await operator.list_folders()]}


async def add(operator: Operator, asked: Mapping[str, Any]) -> Any:
    """Have the coordinator add a model; the stream has its progress."""
    name = _text(asked, "name") if asked.get("name") else ""
    addition = await operator.add_at_coordinator(_text(asked, "source"), name, _text(asked, "width"))
    return {"number": addition.number, "name": addition.name}


async def cancel(operator: Operator, asked: Mapping[str, Any]) -> Any:
    """End an addition; answered when nothing of it is left."""
    number = asked.get("number")
    if type(number) is not int:
        raise InvalidArgumentError("number is missing: give that of an addition", field="number")
    return {"phase": (await operator.cancel_addition(number)).phase.value}


async def forget(operator: Operator, asked: Mapping[str, Any]) -> Any:
    """Delete a model of the store."""
    name = _text(asked, "name")
    if _text(asked, "typed") != name:
        raise InvalidArgumentError("typed: it is not the model's name", field="typed")
    await operator.delete_model(name)
    return {}


async def fits(operator: Operator, asked: Mapping[str, Any]) -> Any:
    """The largest of some contexts and numbers of requests with which a model fits the site now, and its plan.

    Raises as `plan` does for the smallest of them.
    """
    model, context = _text(asked, "model"), asked.get("context")
    if type(context) is not int or context < 1:
        raise InvalidArgumentError("context is missing: give the model's, in tokens", field="context")
    sizes = fitting_sizes(context)
    for size in sizes:
        spec = parse_spec({"name": "fits", "model": model, **size})
        try:
            placement = await operator.plan(spec)
        except (PlacementError, ResourceExhaustedError):
            if size is sizes[-1]:
                raise
        else:
            return {**size, **_placement(placement)}
    return {}


def fitting_sizes(context: int) -> list[dict[str, int]]:
    """The sizes that `fits` tries, from the largest: concurrency first gives way, then the context."""
    contexts = [context, *(smaller for smaller in CONTEXTS if smaller < context)]
    full = {"max_context": context, "concurrency": DEFAULT_CONCURRENCY}
    return [full, *({"max_context": tokens, "concurrency": 1} for tokens in contexts)]


async def timeline(operator: Operator, asked: Mapping[str, Any]) -> Any:
    return await operator.slice_of(DeploymentName(_text(asked, "name")))


Ask = Callable[[Operator, Mapping[str, Any]], Coroutine[Any, Any, Any]]
GET: Mapping[str, Ask] = {"outlook": outlook, "folders": folders}
POST: Mapping[str, Ask] = {
    "plan": plan,
    "deploy": deploy,
    "delete": delete,
    "replan": replan,
    "join": join,
    "fits": fits,
    "add": add,
    "cancel": cancel,
    "forget": forget,
    "timeline": timeline,
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


def _placement(placement: Placement) -> dict[str, Any]:
    return known(
        stages=[
            {
                "node": stage.node_name,
                "first": stage.layers.first,
                "end": stage.layers.end,
                "weights": stage.parameter_bytes,
                "kv": stage.kv_bytes,
                "streamed": stage.streamed_bytes,
            }
            for stage in placement.stages
        ],
        predicted=None if placement.predicted is None else prediction_picture(placement.predicted),
        note=placement.note or None,
    )


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
