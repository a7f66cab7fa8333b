"""The words of a placement: its predicted figures, the way it was chosen, and the source of its
figures."""

from __future__ import annotations

from collections.abc import Sequence

from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.deployments.placement import LengthsFrom, Placement, Prediction
from edgeshard.planning.inputs.measured import doubtful, doubts_line
from edgeshard.planning.inputs.site_cluster import SiteCluster, listed, profile_command
from edgeshard.planning.report import explain
from edgeshard.planning.search.plan import PlanResult
from edgeshard_coordinator.core.values.candidate import Candidate


def prediction_of(result: PlanResult, lengths: LengthsFrom) -> Prediction:
    figures = result.prediction
    assert figures is not None
    return Prediction(
        time_to_first_token_s=figures.ttft_s,
        time_per_token_s=figures.time_per_token_s,
        throughput_tps=figures.throughput_tps,
        bottleneck=explain.bottleneck(result),
        gap=result.gap,
        objective=result.problem.goal.value,
        requests=figures.load.requests,
        prompt_tokens=result.problem.prompt_tokens,
        new_tokens=result.problem.new_tokens,
        lengths=lengths,
        request_s=figures.request_s,
        joules_per_token=figures.joules_per_token,
        together_tps=figures.together_tps,
    )


def placed_note(spec: DeploymentSpec, site: SiteCluster, result: PlanResult, requests: int) -> str:
    """The way in which the placement was chosen, and the sources of its figures; `requests` of full
    length fit the KV pool."""
    figures, problem = result.prediction, result.problem
    assert figures is not None
    parts = ["Placed by hand."] if spec.layers else []
    if requests < spec.concurrency:
        parts.append(
            f"Memory holds {requests} of the {spec.concurrency} requests at full length; others "
            "may wait."
        )
    limit = spec.max_time_per_token_s
    if limit is not None and figures.time_per_token_s > limit:
        parts.append(f"It does not meet max_time_per_token_s {limit:g}.")
    if site.estimated:
        parts.append(
            f"Not measured but estimated from data sheets: {listed(site.estimated)}; run "
            f"`{profile_command(spec.model, spec.dtype, problem.quantisation)}`."
        )
    if doubts := doubtful(problem):
        parts.append(f"Doubtful figures of {doubts_line(doubts)}.")
    if not spec.layers:
        parts.append(unused_links(site))
    if words := explain.describe_locality(result):
        parts.append(f"{words[0].upper()}{words[1:]}.")
    if spec.mode == "bubbles" and figures.load.micro_batches > 1:
        parts.append("The figures are for the mode no-bubbles.")
    return " ".join(part for part in parts if part)


def mixed_bits(placement: Placement, candidates: Sequence[Candidate]) -> str:
    """A note that the chosen nodes compute different bits; "" if all compute the same."""
    facts = {candidate.node_id: candidate.facts for candidate in candidates}
    prints = {stage.node_name: facts[stage.node_id].bits_fingerprint for stage in placement.stages}
    if len(set(prints.values())) < 2:
        return ""
    fingerprints = ", ".join(f"{name} {bits or 'none'}" for name, bits in sorted(prints.items()))
    note = (
        f"Bits fingerprints differ ({fingerprints}): if layers move to another node, an answer may "
        "continue "
        "with another token when two tokens are nearly equally likely."
    )
    own = sorted(
        {stage.node_name for stage in placement.stages if facts[stage.node_id].has_bf16_products}
    )
    return f"{note} {_own_bits(own)}" if own else note


def _own_bits(names: Sequence[str]) -> str:
    verb = "multiplies" if len(names) == 1 else "multiply"
    return (
        f"{listed(names)} {verb} bfloat16 by AVX512-BF16 instructions, which round otherwise than "
        "all other "
        "processors. `bf16_products = false` in the agent's settings gives the others' bits. The "
        "cost: an instruction "
        "that adds two products becomes two or more, in bf16 layers and in attention. Layers in "
        "int8 and int4 stay as "
        "fast. Profile the node again to see the cost in figures."
    )


def unused_links(site: SiteCluster) -> str:
    return f"Not used: {links_are(site.unmeasured)} not measured yet." if site.unmeasured else ""


def not_planned(spec: DeploymentSpec, why: str) -> str:
    text = (
        f"{'Not predicted' if spec.layers else 'Placed by memory, on as few nodes as hold it'}: "
        f"{why}."
    )
    if spec.max_time_per_token_s is not None:
        text += " It is unknown whether max_time_per_token_s is met."
    return text


def links_are(pairs: Sequence[tuple[str, str]]) -> str:
    names = [f"{sender} -> {receiver}" for sender, receiver in pairs]
    return f"the link {names[0]} is" if len(names) == 1 else f"the links {listed(names)} are"
