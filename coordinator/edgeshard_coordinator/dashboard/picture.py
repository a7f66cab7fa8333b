"""The picture of a site that pages draw: its nodes, links, deployments and models as values of
JSON. Pure.

Sizes are in bytes, times in seconds. A figure that is not known is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import isfinite
from typing import Any

from edgeshard.domain.control.site import SiteEvent, StoredLink, StoredModel
from edgeshard.domain.deployments.deployment import Deployment
from edgeshard.domain.deployments.placement import Placement, Prediction
from edgeshard.domain.identity import shown_identity
from edgeshard.domain.ids import DeploymentName
from edgeshard.domain.nodes.device import Node, StagePhase, StageStatus
from edgeshard.domain.requests.trace import StageTrace, StepRecord, aligned, summarised
from edgeshard.metrics.histogram import Histogram
from edgeshard.views import Rates, node_status
from edgeshard_coordinator.additions.addition_state import Addition
from edgeshard_coordinator.additions.folders import FolderListing
from edgeshard_coordinator.control.requests.request_meter import DeploymentCounts
from edgeshard_coordinator.control.requests.running_request import RunningRequest

SILENT_S = 3.0
"""A node is shown as silent after this time without a heartbeat: it sends one every second."""
MOST_REQUESTS = 50
TRACED_STEPS, DRAWN_STEPS = 300, 48
"""The newest steps of a trace: the number that its figures cover, and the number that can be
distinguished in a drawing."""


def known(**figures: Any) -> dict[str, Any]:
    """The known figures. A figure that is not finite is left out: nodes report the parts of many,
    and JSON has none."""
    return {
        name: figure
        for name, figure in figures.items()
        if figure is not None and not (isinstance(figure, float) and not isfinite(figure))
    }


def nodes_picture(nodes: Iterable[Node]) -> dict[str, Any]:
    return {node.name: _node(node) for node in nodes}


def _node(node: Node) -> dict[str, Any]:
    facts = node.facts
    running = [stage for stage in node.stages if stage.phase is not StagePhase.STANDBY]
    return known(
        status=node_status(node),
        kind=facts.kind,
        model=facts.model,
        cores=facts.cores,
        total=facts.memory_total_bytes,
        budget=facts.memory_budget_bytes,
        free=node.free_bytes,
        weights=sum(stage.parameter_bytes for stage in node.stages),
        kv=sum(stage.kv_bytes_capacity for stage in node.stages),
        kv_used=sum(stage.kv_bytes_in_use for stage in node.stages),
        available=None if node.condition is None else node.condition.memory_available_bytes,
        load=round(min(1.0, sum(stage.busy_share for stage in running)), 2) if running else None,
        silent_s=round(node.heartbeat_age_s) if node.heartbeat_age_s > SILENT_S else None,
        measuring=node.measuring or None,
        twin=node.twin_address or None,
        unknown=(node.unknown_profiles + node.unknown_links) or None,
        labels=dict(node.labels) or None,
        standby=[
            f"{stage.deployment} {stage.layers}"
            for stage in node.stages
            if stage.phase is StagePhase.STANDBY
        ]
        or None,
    )


def links_picture(links: Iterable[StoredLink], names: Mapping[str, str]) -> dict[str, Any]:
    """Links by "FROM TO", the names of two nodes."""
    entries = {}
    for stored in links:
        link = stored.link
        if link.sender in names and link.receiver in names:
            entries[f"{names[link.sender]} {names[link.receiver]}"] = known(
                bps=link.profile.bandwidth_bps,
                latency_s=link.profile.latency_s,
            )
    return entries


def deployments_picture(
    deployments: Iterable[Deployment],
    rates: Rates,
    measured: Mapping[str, Mapping[str, Any]],
    recent: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """`measured` has the figures of `measured_picture` by deployment, `recent` the figures of
    `Recent.of`."""
    return {
        name: _deployment(one, rates, measured.get(name, {}), recent.get(name, {}))
        for one in deployments
        for name in (one.spec.name,)
    }


def _deployment(
    deployment: Deployment, rates: Rates, measured: Mapping[str, Any], recent: Mapping[str, Any]
) -> dict[str, Any]:
    placement, stages = deployment.placement, {stage.stage: stage for stage in deployment.stages}
    waiting = min(
        deployment.active_requests, sum(stage.requests_waiting for stage in deployment.stages)
    )
    last = max(deployment.stages, key=lambda stage: stage.stage, default=None)
    return known(
        model=deployment.spec.model,
        dtype=deployment.spec.dtype.value,
        phase=deployment.phase.value,
        epoch=int(deployment.epoch),
        failure=None if deployment.failure is None else deployment.failure.message,
        running=deployment.active_requests - waiting,
        waiting=waiting,
        served=deployment.traffic.requests,
        tokens_per_s=rates.of(last, "tokens_done") if last is not None else None,
        stages={
            str(placed.index): known(
                node=placed.node_name,
                first=placed.layers.first,
                end=placed.layers.end,
                planned=placed.parameter_bytes + placed.kv_bytes,
                **_stage(stages.get(placed.index), rates),
            )
            for placed in placement.stages
        },
        predicted=None if placement.predicted is None else prediction_picture(placement.predicted),
        measured=dict(measured) or None,
        recent=dict(recent) or None,
        suspects=[f"{hop.from_stage} {hop.to_stage} {hop.why}" for hop in deployment.suspects]
        or None,
        note=placement.note or None,
    )


def _stage(stage: StageStatus | None, rates: Rates) -> dict[str, Any]:
    if stage is None:
        return {}
    filling = stage.filling
    return known(
        phase=stage.phase.value,
        weights=stage.parameter_bytes,
        kv=stage.kv_bytes_capacity,
        kv_used=stage.kv_bytes_in_use,
        busy=round(stage.busy_share, 2),
        queue=stage.steps_waiting,
        tokens_per_s=rates.of(stage, "tokens_done"),
        steps_per_s=rates.of(stage, "steps_done"),
        fetched=stage.fetched_bytes if stage.phase is StagePhase.LOADING else None,
        to_fetch=stage.total_bytes if stage.phase is StagePhase.LOADING else None,
        filled=None if filling is None else filling.done_bytes,
        to_fill=None if filling is None else filling.total_bytes,
        work=None if filling is None else filling.work.value,
        left_s=None if filling is None or not filling.left_s else round(filling.left_s, 1),
        why=stage.failure_reason or None,
    )


def prediction_picture(plan: Prediction) -> dict[str, Any]:
    return known(
        first_token_s=plan.time_to_first_token_s,
        between_tokens_s=plan.time_per_token_s,
        tokens_per_s=plan.throughput_tps,
        requests=plan.requests,
        prompt_tokens=plan.prompt_tokens,
        new_tokens=plan.new_tokens,
        bottleneck=plan.bottleneck,
        gap=plan.gap,
        joules_per_token=plan.joules_per_token,
    )


def measured_picture(counts: DeploymentCounts) -> dict[str, Any]:
    """What the requests of a deployment saw since the coordinator began."""
    return known(
        begun=sum(counts.begun.values()),
        failed=sum(counts.failed.values()),
        first_token_s=_mean(counts.first_token),
        between_tokens_s=_mean(counts.between_tokens),
        pauses=counts.pauses.count or None,
        pause_s=_mean(counts.pauses),
        last_pause_s=None if counts.last_pause_s is None else round(counts.last_pause_s, 3),
    )


def _mean(histogram: Histogram) -> float | None:
    return round(histogram.sum / histogram.count, 4) if histogram.count else None


def placement_picture(placement: Placement) -> dict[str, Any]:
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


def models_picture(models: Iterable[StoredModel], formats: Mapping[str, str]) -> dict[str, Any]:
    """By name. `formats` are the formats of the stored weights, by name."""
    return {
        model.name: {
            "architecture": model.architecture,
            "layers": model.layer_count,
            "parameters": model.parameter_count,
            "size": model.stored_bytes,
            "format": formats[model.name],
            "context": model.max_context,
        }
        for model in models
    }


def additions_picture(additions: Iterable[Addition]) -> dict[str, Any]:
    """By number. The text of an error has its remedy."""
    return {
        str(addition.number): known(
            name=addition.name,
            source=addition.source,
            who=shown_identity(addition.who),
            phase=addition.phase.value,
            work=addition.work or None,
            done=addition.done_bytes,
            total=addition.total_bytes or None,
            notes=list(addition.notes) or None,
            error=None if addition.error is None else addition.error.message,
        )
        for addition in additions
    }


def listing_picture(listing: FolderListing) -> dict[str, Any]:
    """A folder of models."""
    models = [
        {"path": str(model.path), "name": model.name, "size": model.weight_bytes}
        for model in listing.models
    ]
    return known(
        folder=str(listing.folder),
        problem=listing.problem or None,
        cut=listing.is_cut or None,
        models=models,
    )


def events_picture(events: Sequence[SiteEvent]) -> dict[str, Any]:
    """By number."""
    return {
        str(event.number): known(
            time=event.time,
            subject=event.subject.value,
            name=event.name,
            what=event.what,
            detail=event.detail or None,
            warning=event.warning or None,
        )
        for event in events
    }


def requests_picture(
    requests: Iterable[RunningRequest], now: float, contexts: Mapping[DeploymentName, int]
) -> dict[str, Any]:
    """The `MOST_REQUESTS` oldest ones, by id: their client and progress, without text or tokens.

    `contexts` are the positions that a request to each deployment may have, 0 if unknown.
    """
    return {
        request.request_id: known(
            who=shown_identity(request.client) or None,
            deployment=request.deployment,
            state=_state_of(request),
            prompt=None if request.prompt_tokens is None else len(request.prompt_tokens),
            read=_read_of(request),
            new=len(request.emitted),
            limit=_limit_of(request, contexts.get(request.deployment, 0)),
            age_s=int(now - request.times.began_at),
        )
        for request in islice(requests, MOST_REQUESTS)
    }


def _state_of(request: RunningRequest) -> str:
    if request.attachment is None:
        return "parked"
    if not request.times.is_admitted:
        return "queued"
    return "writing" if request.emitted else "reading"


def _limit_of(request: RunningRequest, context: int) -> int | None:
    """The most new tokens of a request; None if it may fill its context, which few answers do."""
    raw_prompt = request.generation.prompt
    prompt = request.prompt_tokens or (() if isinstance(raw_prompt, str) else raw_prompt)
    most = request.generation.max_new_tokens
    return None if context and most >= context - len(prompt) else most


def _read_of(request: RunningRequest) -> int | None:
    """Tokens of its prompt that are read."""
    if request.prompt_tokens is None:
        return None
    prompt = len(request.prompt_tokens)
    return prompt if request.emitted else min(request.read, prompt)


def timeline_picture(traces: Sequence[StageTrace]) -> dict[str, Any]:
    """The newest steps of a trace, by stage: their figures, and bars of when each computed.

    A bar is [step, begins, lasts, tokens, tokens of prompts], in microseconds since the first bar;
    `span_us` is up to the end of the last one.
    """
    traces = aligned(
        [replace(trace, records=trace.records[-TRACED_STEPS:], reads=()) for trace in traces]
    )
    newest = max((trace.records[-1].step for trace in traces if trace.records), default=0)
    drawn = [
        [record for record in trace.records if record.step > newest - DRAWN_STEPS]
        for trace in traces
    ]
    from_s = min((record.began_s for records in drawn for record in records), default=0.0)
    until_s = max((record.ended_s for records in drawn for record in records), default=0.0)
    return {
        "span_us": round(1e6 * (until_s - from_s)),
        "stages": [
            {
                "node": one.node,
                "layers": str(one.layers),
                "steps": one.steps,
                "tokens_per_s": round(one.tokens_per_s, 1),
                "computing": round(one.share.computing, 3),
                "sending": round(one.share.sending, 3),
                "idle": round(one.share.idle, 3),
                "step_s": round(one.compute_s, 6),
                "wait_s": round(one.wait_s, 6),
                "bars": [_bar(record, from_s) for record in records],
            }
            for one, records in zip(summarised(traces), drawn, strict=True)
        ],
    }


def _bar(record: StepRecord, from_s: float) -> list[float]:
    """A step of a stage in the drawing; `from_s` is the time of the first bar."""
    begins_us = round(1e6 * (record.began_s - from_s))
    lasts_us = round(1e6 * (record.ended_s - record.began_s))
    return [record.step, begins_us, lasts_us, record.tokens, record.prompt_tokens]
