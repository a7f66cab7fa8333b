"""The columns and fields of nodes, models, deployments and placements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from edgeshard.cli.render.kernel_views import COMPILE_AGAIN, kernel_problem, kernel_text
from edgeshard.cli.render.output import (
    Column,
    gap_text,
    human_bytes,
    human_count,
    human_seconds,
    time_text,
)
from edgeshard.domain.audit import AuditCheck, AuditEntry
from edgeshard.domain.control.site import SiteEvent
from edgeshard.domain.deployments.deployment import NO_DRAFT, Deployment
from edgeshard.domain.deployments.guesses import ExpectedGuesses
from edgeshard.domain.deployments.placement import (
    LengthsFrom,
    PlacedStage,
    Placement,
    Prediction,
    Speculation,
)
from edgeshard.domain.deployments.traffic import Loss, Outlook
from edgeshard.domain.models.packed_units import PackedUnit
from edgeshard.domain.nodes.device import Node, StagePhase, StageStatus
from edgeshard.domain.nodes.labels import labels_text
from edgeshard.views import node_status

if TYPE_CHECKING:
    from edgeshard.client import StoredModel

from collections.abc import Callable
from typing import Any

from edgeshard.domain.nodes.device import StageExperts, StageGuesses, StageStreaming, StageSwap

Part = TypeVar("Part")

NODE_COLUMNS: list[Column[Node]] = [
    Column("NAME", lambda node: node.name),
    Column("STATUS", lambda node: node_status(node)),
    Column("DEVICE", lambda node: node.facts.kind),
    Column("CORES", lambda node: str(node.facts.cores), right=True),
    Column("BUDGET", lambda node: human_bytes(node.facts.memory_budget_bytes), right=True),
    Column("FREE", lambda node: human_bytes(node.free_bytes), right=True),
    Column("UNKNOWN", lambda node: unknown_text(node)),
    Column(
        "STAGES", lambda node: ",".join(f"{s.deployment}/{s.layers}" for s in node.stages) or "-"
    ),
    Column("ADDRESS", lambda node: node.address, wide=True),
    Column("SEEN", lambda node: f"{node.heartbeat_age_s:.1f} s ago", wide=True),
    Column("MODEL", lambda node: node.facts.model, wide=True),
    Column("SOFTWARE", lambda node: node.facts.software, wide=True),
    Column("LABELS", lambda node: labels_text(node.labels) or "-", wide=True),
    Column("ID", lambda node: node.node_id, wide=True),
]

MODEL_COLUMNS: list[Column[StoredModel]] = [
    Column("NAME", lambda model: model.name),
    Column("ARCHITECTURE", lambda model: model.architecture),
    Column("LAYERS", lambda model: str(model.layer_count), right=True),
    Column("PARAMETERS", lambda model: human_count(model.parameter_count), right=True),
    Column("SIZE", lambda model: human_bytes(model.stored_bytes), right=True),
    Column("DTYPE", lambda model: model.dtype.value),
    Column("CONTEXT", lambda model: str(model.max_context), right=True),
    Column("AS", lambda model: weights_form(model)),
    Column("DIGEST", lambda model: model.manifest_digest, wide=True),
]

DEPLOYMENT_COLUMNS: list[Column[Deployment]] = [
    Column("NAME", lambda deployment: deployment.spec.name),
    Column("PHASE", lambda deployment: deployment.phase.value),
    Column("MODEL", lambda deployment: deployment.spec.model),
    Column("PLACEMENT", lambda deployment: layers_text(deployment.placement)),
    Column("REQUESTS", lambda deployment: str(deployment.active_requests), right=True),
    Column("EPOCH", lambda deployment: str(deployment.epoch), wide=True, right=True),
    Column("DTYPE", lambda deployment: deployment.spec.dtype.value, wide=True),
    Column(
        "CONTEXT",
        lambda deployment: str(deployment.spec.max_context or "model's"),
        wide=True,
        right=True,
    ),
    Column(
        "CONCURRENCY", lambda deployment: str(deployment.spec.concurrency), wide=True, right=True
    ),
    Column(
        "WEIGHTS",
        lambda deployment: human_bytes(_total(deployment, "parameter_bytes")),
        wide=True,
        right=True,
    ),
    Column(
        "KV CACHE",
        lambda deployment: human_bytes(_total(deployment, "kv_bytes")),
        wide=True,
        right=True,
    ),
]

AUDIT_COLUMNS: list[Column[AuditEntry]] = [
    Column("TIME", lambda entry: time_text(entry.time)),
    Column("WHO", lambda entry: entry.who),
    Column("WHAT", lambda entry: entry.what),
    Column("TARGET", lambda entry: entry.target),
    Column("RESULT", lambda entry: entry.result),
    Column("OMITTED", lambda entry: str(entry.suppressed or ""), right=True),
    Column("ADDRESS", lambda entry: entry.address, wide=True),
]

AUDIT_CHECK_COLUMNS: list[Column[AuditCheck]] = [
    Column("FILE", lambda check: check.file),
    Column("LINES", lambda check: str(check.lines), right=True),
    Column("SEALED", lambda check: str(check.sealed), right=True),
    Column("BROKEN AT", lambda check: str(check.broken_at or ""), right=True),
    Column("WHY", lambda check: check.why),
]

EVENT_COLUMNS: list[Column[SiteEvent]] = [
    Column("TIME", lambda event: time_text(event.time)),
    Column("", lambda event: "!" if event.warning else ""),
    Column("WHAT", lambda event: f"{event.subject} {event.name} {event.what}"),
    Column("DETAIL", lambda event: event.detail),
]

PLACED_COLUMNS: list[Column[PlacedStage]] = [
    Column("NODE", lambda stage: stage.node_name),
    Column("LAYERS", lambda stage: str(stage.layers)),
    Column("WEIGHTS", lambda stage: human_bytes(stage.parameter_bytes), right=True),
    Column("KV CACHE", lambda stage: human_bytes(stage.kv_bytes), right=True),
    Column("WORKSPACE", lambda stage: human_bytes(stage.workspace_bytes), right=True, wide=True),
    Column(
        "STREAMS",
        lambda stage: human_bytes(stage.streamed_bytes) if stage.streamed_bytes else "-",
        right=True,
        wide=True,
    ),
    Column("ADDRESS", lambda stage: stage.address),
]

STAGE_COLUMNS: list[Column[StageStatus]] = [
    Column("DEPLOYMENT", lambda stage: stage.deployment),
    Column("LAYERS", lambda stage: str(stage.layers)),
    Column("PHASE", lambda stage: stage.phase.value),
    Column("WEIGHTS", lambda stage: human_bytes(stage.parameter_bytes), right=True),
    Column("KV IN USE", lambda stage: _kv_text(stage), right=True),
    Column("STEPS", lambda stage: str(stage.steps_done), right=True),
]


PACKED_COLUMNS: list[Column[PackedUnit]] = [
    Column("ID", lambda unit: unit.id),
    Column("MODEL", lambda unit: unit.model_name or unit.model),
    Column("UNIT", lambda unit: unit.unit),
    Column("FORM", lambda unit: unit.form),
    Column("SIZE", lambda unit: human_bytes(unit.size_bytes), right=True),
    Column("IN USE", lambda unit: "yes" if unit.in_use else "no"),
]


def packed_text(units: Sequence[PackedUnit]) -> str:
    """The number of packed units of a node, and how much of them is in use."""
    if not units:
        return "none"
    used = [unit for unit in units if unit.in_use]
    return (
        f"{len(units)} unit{'s' * (len(units) != 1)}, "
        f"{human_bytes(sum(unit.size_bytes for unit in units))}; "
        f"{human_bytes(sum(unit.size_bytes for unit in used))} in use"
    )


@dataclass(frozen=True, slots=True)
class StagePart(Generic[Part]):
    """A stage's status, or a part of it, and the stage's node."""

    node: str
    part: Part


RUNNING_COLUMNS: list[Column[StagePart[StageStatus]]] = [
    Column("NODE", lambda stage: stage.node),
    Column("PHASE", lambda stage: stage_text(stage.part)),
    Column("STEPS", lambda stage: str(stage.part.steps_done), right=True),
    Column("TOKENS", lambda stage: str(stage.part.tokens_done), right=True),
    Column("IDLE", lambda stage: percent(1.0 - stage.part.busy_share), right=True),
    Column("QUEUE", lambda stage: str(stage.part.steps_waiting), right=True),
    Column("KV IN USE", lambda stage: _kv_text(stage.part), right=True),
]


LOSS_COLUMNS: list[Column[Loss]] = [
    Column("IF LOST", lambda loss: loss.node),
    Column(
        "PAUSE", lambda loss: human_seconds(loss.pause.total_s) if loss.pause else "", right=True
    ),
    Column(
        "TO LOAD", lambda loss: human_seconds(loss.pause.load_s) if loss.pause else "", right=True
    ),
    Column("THEN", lambda loss: _loss_text(loss)),
]


def _loss_text(loss: Loss) -> str:
    successors = ", ".join(f"{stage.node}={stage.layers}" for stage in loss.taken_by)
    return " ".join(
        part
        for part in (successors, "in memory already" if loss.warm and successors else "", loss.note)
        if part
    )


def stage_text(stage: StageStatus) -> str:
    """Its phase; while it loads also its progress:
    `packing 1.2 GiB of 3.4 GiB, about 12 s left`."""
    filling = stage.filling
    if stage.phase is not StagePhase.LOADING or (filling is None and not stage.total_bytes):
        return stage.phase.value
    if filling is None:
        return f"fetching {human_bytes(stage.fetched_bytes)} of {human_bytes(stage.total_bytes)}"
    left = f", about {rough_seconds(filling.left_s)} left" if filling.left_s else ""
    return (
        f"{filling.work.value} {human_bytes(filling.done_bytes)} of "
        f"{human_bytes(filling.total_bytes)}{left}"
    )


def rough_seconds(seconds: float) -> str:
    """Text of an estimate: whole seconds, above two minutes whole minutes."""
    return f"{math.ceil(seconds)} s" if seconds < 120 else f"{round(seconds / 60)} min"


def running_stages(deployment: Deployment) -> list[StagePart[StageStatus]]:
    """The stages that their nodes hold now, in the order of the pipeline."""
    nodes = {placed.index: str(placed.node_name) for placed in deployment.placement.stages}
    statuses = sorted(deployment.stages, key=lambda status: status.stage)
    return [StagePart(nodes[status.stage], status) for status in statuses if status.stage in nodes]


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def unknown_text(node: Node) -> str:
    """Missing measurements that a plan would need, and those taken while the node held stages.
    While a node starts, earlier ones may be outdated."""
    if node.starting:
        return "all"
    counts = ((node.unknown_profiles, "profile"), (node.unknown_links, "link"))
    parts = [_counted(count, what) for count, what in counts if count]
    if node.profiles_beside_stages:
        parts.append(
            f"{_counted(node.profiles_beside_stages, 'profile')} measured while stages ran"
        )
    return ", ".join(parts) or "-"


def _counted(count: int, what: str) -> str:
    return what if count == 1 else f"{count} {what}s"


_NOT_YET = "unknown so far"
"""Text for an accelerator whose node starts for the first time."""
_NO_BITS = "not promised to be those of other nodes"
_STARTING = " (starting: it imports the compute libraries)"


def layers_text(placement: Placement) -> str:
    """The placement as `--layers` takes it: `a=0:4,b=4:9`."""
    return ",".join(f"{stage.node_name}={stage.layers}" for stage in placement.stages)


def node_fields(node: Node) -> dict[str, str]:
    facts, status = node.facts, node_status(node)
    pages = node.huge_pages
    huge = {}
    kernels = {} if facts.kernels is None else {"Kernels": kernel_text(facts.kernels)}
    if facts.kernels is not None and (problem := kernel_problem(facts.kernels)):
        kernels["Warning"] = f"{problem}; {COMPILE_AGAIN}"
    if pages is not None and pages.wanted_bytes:
        huge = {
            "Huge pages": f"{human_bytes(pages.held_bytes)} of {human_bytes(pages.wanted_bytes)}"
        }
    quota = (
        ""
        if node.condition is None or not node.condition.cpu_quota
        else f" ({node.condition.cpu_quota:g} by quota)"
    )
    twin = (
        {"Twin": f"{node.twin_address} has the same identity and is refused"}
        if node.twin_address
        else {}
    )
    shared = " shared with the GPU" if facts.unified_memory else ""
    return {
        "Name": node.name,
        "Id": node.node_id,
        **twin,
        "Status": f"{status}{_STARTING if status == 'starting' else ''}, "
        f"last heartbeat {node.heartbeat_age_s:.1f} s ago",
        "Address": node.address,
        "Device": f"{facts.kind}, {facts.model or _NOT_YET}, {facts.cores} cores{quota}",
        "Memory": f"{human_bytes(facts.memory_total_bytes)}{shared}"
        if facts.memory_total_bytes
        else _NOT_YET,
        "Budget": f"{human_bytes(facts.memory_budget_bytes)} for stages, "
        f"{human_bytes(node.free_bytes)} free",
        **huge,
        "Software": facts.software,
        **kernels,
        "Bits": facts.bits_fingerprint or _NO_BITS,
        "Wire version": str(node.wire_version),
        "Labels": labels_text(node.labels) or "-",
    }


def weights_form(model: StoredModel) -> str:
    """How the store has a model's weights: as a copy, a link, the file itself, or one that was lost
    since."""
    if any(file.changed for file in model.weights_files):
        return "lost"
    if any(file.in_place for file in model.weights_files):
        return "file"
    return "link" if model.weights_files else "copy"


def _weights_files(model: StoredModel) -> dict[str, str]:
    """A row for each file outside of the store that has weights."""
    rows = {}
    for number, file in enumerate(model.weights_files, 1):
        how = "read in place from" if file.in_place else "linked from"
        changed = "; it has changed or disappeared since" if file.changed else ""
        rows[f"Weights {number}"] = f"{human_bytes(file.size_bytes)} {how} {file.path}{changed}"
    return rows or {"Weights": "in the coordinator's store"}


def model_fields(model: StoredModel) -> dict[str, str]:
    further = {}
    if model.further is not None:
        size, count = human_bytes(model.further.size_bytes), model.further.tensor_count
        further["Further"] = (
            f"{size} that predict further tokens ({count} tensors), neither stored nor run"
        )
    return {
        "Name": model.name,
        "Architecture": model.architecture,
        "Layers": str(model.layer_count),
        "Parameters": f"{human_count(model.parameter_count)} ({model.parameter_count})",
        "Size": f"{human_bytes(model.stored_bytes)} in {model.dtype.value}",
        "Context": f"{model.max_context} tokens",
        **_weights_files(model),
        **further,
        "Digest": model.manifest_digest,
    }


def deployment_fields(deployment: Deployment) -> dict[str, str]:
    spec, placement = deployment.spec, deployment.placement
    fields = {"Name": spec.name, "Phase": deployment.phase.value}
    if deployment.failure is not None:
        fields["Reason"] = f"{deployment.failure.reason}: {deployment.failure.message}"
    if spec.replica:
        fields["Replica"] = (
            f"{spec.replica} of {spec.replicas}; clients use the name {spec.served_name}"
        )
    return fields | {
        "Model": spec.model,
        "Source": spec.source,
        "Privacy": spec.privacy,
        "Dtype": f"{spec.dtype.value}, KV cache {spec.effective_kv_dtype.value}",
        "Context": f"{spec.max_context} tokens" if spec.max_context else "the model's own limit",
        "New tokens": f"at most {spec.max_new_tokens}"
        if spec.max_new_tokens
        else "as many as the context holds",
        "Concurrency": f"{spec.concurrency} requests, {_requests_text(deployment)}",
        "KV pool": f"{placement.kv_blocks} blocks of {placement.kv_block_tokens} tokens"
        + (f", {placement.saved_states} saved states" if placement.saved_states else "")
        + (
            f", {placement.used_guess_slots} states after draft tokens"
            if placement.used_guess_slots
            else ""
        ),
        "Speculation": speculation_text(placement.speculation, placement.guesses),
        **draft_fields(deployment),
        "Epoch": str(deployment.epoch),
        **prediction_fields(placement),
        **traffic_fields(deployment),
    }


def speculation_text(speculation: Speculation, guesses: ExpectedGuesses | None) -> str:
    """Whether tokens are drafted, or why not; and the worth to a single request, if draft tokens
    were counted."""
    words = _SPECULATION[speculation]
    if speculation is not Speculation.GUESSES:
        return words
    if guesses is None:
        return f"{words}; none were seen yet for this model"
    right = percent(guesses.right)
    if guesses.times is None:
        return f"{words}: {right} of those seen were right; what rows cost here is not measured"
    if not guesses.most:
        return f"{words}: none pays here; {right} of those seen were right"
    many = f"up to {guesses.most} in a step" if guesses.most > 1 else "one in a step"
    faster = (
        f"a single request gets {guesses.times:.1f} times the tokens/s if {right} are "
        "accepted, the observed share"
    )
    return f"{words}: {many}; {faster}"


_SPECULATION = {
    Speculation.GUESSES: "draft tokens are used, and no answer changes",
    Speculation.OFF: "off",
    Speculation.STATES: "off: no memory for the states after draft tokens, or a node runs an older "
    "version (states)",
    Speculation.EXPERTS: "off: the cost of experts per draft token is not measured (experts)",
    Speculation.PROMISE: "off: max_inter_token_latency is set (promise)",
    Speculation.BITS: "off: a node, the model or its dtype does not guarantee equal bits (bits)",
}


def draft_fields(deployment: Deployment) -> dict[str, str]:
    """The smaller model that drafts tokens; empty if none was requested."""
    spec, placement = deployment.spec, deployment.placement
    if spec.draft == NO_DRAFT:
        return {}
    draft = placement.draft
    if draft is None:
        return {"Draft": "none: no model of the store suits"}
    used = "" if placement.speculation is Speculation.GUESSES else ", not used"
    sizes = (
        f"{human_bytes(draft.parameter_bytes)} of weights and {human_bytes(draft.kv_bytes)} of KV"
    )
    return {"Draft": f"{draft.model} on {placement.head.node_name}, {sizes}{used}"}


def traffic_fields(deployment: Deployment) -> dict[str, str]:
    """Requests that it served, how its placement does for them, and a better placement."""
    traffic, outlook = deployment.traffic, deployment.outlook
    if not traffic.requests:
        return {"Traffic": "none yet"}
    spans = [
        f"{what} of {round(lengths.mean)} tokens on average, half up to {lengths.up_to(0.5)}, 9 of "
        "10 up to "
        f"{lengths.up_to(0.9)}"
        for what, lengths in (("prompts", traffic.prompts), ("answers", traffic.answers))
    ]
    many = f"{traffic.requests} request{'s' if traffic.requests > 1 else ''}"
    if traffic.at_once > 1:
        many += f", {traffic.at_once:.1f} at once on average"
    fields = {"Traffic": f"{many}: {'; '.join(spans)}"}
    if outlook is None:
        return fields
    if outlook.expected is not None:
        fields["Expected"] = (
            f"{_expected_text(outlook.expected)} for {lengths_text(outlook.expected)}"
        )
    if outlook.better is not None:
        fields["Better"] = _better_text(deployment, outlook, outlook.better)
    return fields | ({"Not weighed": outlook.note} if outlook.note else {})


def _better_text(deployment: Deployment, outlook: Outlook, better: Prediction) -> str:
    layers = ",".join(f"{stage.node}={stage.layers}" for stage in outlook.layers)
    gain = f"{100 * outlook.gain:.0f} % {'more' if better.objective == 'throughput' else 'less'}"
    spec = deployment.spec
    lengths_given = (spec.prompt_tokens, spec.new_tokens) != (None, None)
    if not spec.layers and not lengths_given:
        return (
            f"{layers}: {_expected_text(better)}, {gain}; `edgectl replan {spec.name}` moves it "
            "there"
        )
    how = "delete it and deploy it again"
    if spec.layers:
        how += " without layers"
    if lengths_given:
        how += f" with --prompt-tokens {better.prompt_tokens} --new-tokens {better.new_tokens}"
    return f"{layers}: {_expected_text(better)}, {gain}; {how}"


def _expected_text(prediction: Prediction) -> str:
    """The figure that the objective is about."""
    match prediction.objective:
        case "throughput":
            return f"{prediction.throughput_tps:.2f} tokens/s"
        case "ttft":
            return f"first token after {human_seconds(prediction.time_to_first_token_s)}"
        case "latency":
            return f"{human_seconds(prediction.time_per_token_s)} per token"
        case "energy":
            return f"{prediction.cost:.2f} J per token"
        case _:
            return f"{human_seconds(prediction.request_s)} a request"


def _energy_text(prediction: Prediction) -> str:
    return (
        ""
        if prediction.joules_per_token is None
        else f", {prediction.joules_per_token:.2f} J per token"
    )


def lengths_text(prediction: Prediction) -> str:
    """`8 requests at once of 812 tokens in and 96 out`."""
    many = f"{prediction.requests} requests at once" if prediction.requests > 1 else "one request"
    return f"{many} of {prediction.prompt_tokens} tokens in and {prediction.new_tokens} out"


_LENGTHS_FROM = {
    LengthsFrom.GIVEN: "as given",
    LengthsFrom.SEEN: "as its traffic was",
    LengthsFrom.DEFAULT: "the default: no lengths were given and no traffic was seen",
}


def prediction_fields(placement: Placement) -> dict[str, str]:
    """The planner's prediction of a placement, and notes on its choice."""
    fields = {}
    predicted = placement.predicted
    if predicted is not None:
        fields = {
            "Predicted": f"{human_seconds(predicted.time_per_token_s)} per token, "
            f"{predicted.throughput_tps:.2f} "
            "tokens/s, first token after "
            f"{human_seconds(predicted.time_to_first_token_s)}{_energy_text(predicted)}",
            "Planned for": f"{predicted.objective}, {lengths_text(predicted)} "
            f"({_LENGTHS_FROM[predicted.lengths]})",
            "Bottleneck": predicted.bottleneck,
            "Gap": "not known" if predicted.gap is None else gap_text(predicted.gap),
        }
    return fields | ({"Note": placement.note} if placement.note else {})


def placement_fields(placement: Placement) -> dict[str, str]:
    """The part of `deploy`'s output about a placement that follows its stages."""
    return prediction_fields(placement) | {
        "Speculation": speculation_text(placement.speculation, placement.guesses)
    }


def _requests_text(deployment: Deployment) -> str:
    waiting = sum(stage.requests_waiting for stage in deployment.stages)
    parts = max((stage.micro_batches for stage in deployment.stages), default=0)
    return (
        f"{deployment.active_requests} running"
        + (f" ({waiting} of them waiting)" if waiting else "")
        + (f" in {parts} micro-batches" if parts > 1 else "")
    )


def _kv_text(stage: StageStatus) -> str:
    return f"{human_bytes(stage.kv_bytes_in_use)} of {human_bytes(stage.kv_bytes_capacity)}"


def _total(deployment: Deployment, attribute: str) -> int:
    return sum(getattr(stage, attribute) for stage in deployment.placement.stages)


STREAMING_COLUMNS: list[Column[StagePart[StageStreaming]]] = [
    Column("NODE", lambda stage: stage.node),
    Column("IN MEMORY", lambda stage: human_bytes(stage.part.resident_bytes), right=True),
    Column("FROM DISK", lambda stage: human_bytes(stage.part.streamed_bytes), right=True),
    Column("READ", lambda stage: human_bytes(stage.part.read_bytes), right=True),
    Column("WAITED", lambda stage: human_seconds(stage.part.waited_s), right=True),
]
"""Weights: bytes that stay, bytes read in each sweep and so far, and seconds that steps waited for
them."""

EXPERT_COLUMNS: list[Column[StagePart[StageExperts]]] = [
    Column("NODE", lambda stage: stage.node),
    Column("EXPERTS", lambda stage: human_bytes(stage.part.total_bytes), right=True),
    Column("CACHED", lambda stage: human_bytes(stage.part.cached_bytes), right=True),
    Column("ROOM", lambda stage: human_bytes(stage.part.room_bytes), right=True),
    Column("HITS", lambda stage: str(stage.part.hits), right=True),
    Column("MISSES", lambda stage: str(stage.part.misses), right=True),
    Column("HIT RATE", lambda stage: percent(stage.part.hit_rate), right=True),
    Column("READ", lambda stage: human_bytes(stage.part.read_bytes), right=True),
    Column("WAITED", lambda stage: human_seconds(stage.part.waited_s), right=True),
]
"""Experts on the disk: bytes of all experts, bytes in memory and their limit, cache hits of steps,
and bytes read."""

SWAP_COLUMNS: list[Column[StagePart[StageSwap]]] = [
    Column("NODE", lambda stage: stage.node),
    Column("KV ASIDE", lambda stage: human_bytes(stage.part.kept_bytes), right=True),
    Column("OF AT MOST", lambda stage: human_bytes(stage.part.capacity_bytes), right=True),
    Column("SWAPPED OUT", lambda stage: str(stage.part.swapped_out), right=True),
    Column("BACK IN", lambda stage: str(stage.part.swapped_in), right=True),
]
"""Preempted requests: their swapped KV, and how many were swapped out and in."""

GUESS_COLUMNS: list[Column[StagePart[StageGuesses]]] = [
    Column("NODE", lambda stage: stage.node),
    Column("GUESSED", lambda stage: str(stage.part.guessed), right=True),
    Column("RIGHT", lambda stage: str(stage.part.right), right=True),
    Column("ROWS IN VAIN", lambda stage: str(stage.part.guessed - stage.part.right), right=True),
]
"""The head's draft tokens: how many were drafted, and accepted."""


def tier_tables(deployment: Deployment) -> list[tuple[Sequence[Any], Sequence[Column[Any]]]]:
    """Rows and columns of each table; without rows if no stage has that part."""
    return [
        (_parts(deployment, lambda status: status.streaming), STREAMING_COLUMNS),
        (_parts(deployment, lambda status: status.experts), EXPERT_COLUMNS),
        (_parts(deployment, lambda status: status.swap), SWAP_COLUMNS),
        (_parts(deployment, lambda status: status.guesses), GUESS_COLUMNS),
    ]


def _parts(
    deployment: Deployment, of: Callable[[StageStatus], Part | None]
) -> list[StagePart[Part]]:
    stages = running_stages(deployment)
    return [StagePart(stage.node, part) for stage in stages if (part := of(stage.part)) is not None]
