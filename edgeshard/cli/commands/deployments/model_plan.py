"""edgectl model add --dry-run: whether a model that is not in the store would fit, where, and how fast."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from edgeshard.cli.connect import ask
from edgeshard.cli.render.output import Output, human_bytes
from edgeshard.domain.errors import UnavailableError
from edgeshard.domain.models.dtypes import DType, weights_text

if TYPE_CHECKING:
    from edgeshard.client import Client
    from edgeshard.domain.control.site import NodeDetails, Site
    from edgeshard.importing.blocks import Width
    from edgeshard.planning.inputs.problem import PlanProblem
    from edgeshard.planning.inputs.shapes import ModelSpec


def dry_run(
    context: typer.Context, model: str, width: Width, cluster: Path | None, source: str | None, output: Output
) -> None:
    """Plan a model by its config.json alone, on the site or on the nodes of a file; exits 1 where it does not fit."""
    from edgeshard.cli.render.plan_views import show_plan
    from edgeshard.importing.imported import notes_of
    from edgeshard.importing.outlook import config_of
    from edgeshard.importing.sources import parse_source
    from edgeshard.planning.inputs.shapes import model_from_config

    where = parse_source(model)
    config = config_of(where, width)
    spec = model_from_config(where.name, config)
    stored_as, dtype = spec.shape.stored_as, DType.BFLOAT16
    weights = sum(block.weight_bytes(dtype, stored_as) for block in spec.blocks) + spec.head_bytes(dtype, stored_as)
    weights += spec.embedding_parameters * dtype.itemsize - spec.shared_bytes(dtype, stored_as)
    typer.echo(
        f"note: {where.name} is a {spec.shape.architecture} of {spec.parameter_count / 1e6:,.0f} M parameters; as "
        f"{weights_text(dtype, stored_as)} its weights take {human_bytes(weights)}",
        err=True,
    )
    for note in notes_of(config):
        typer.echo(f"note: {note}", err=True)
    problem = _offline(spec, cluster, source) if cluster is not None else _online(context, spec, source)
    if not show_plan(problem, None, False, output):
        raise typer.Exit(1)


def _offline(spec: ModelSpec, cluster: Path, source: str | None) -> PlanProblem:
    from edgeshard.cli.commands.deployments.plan_inputs import Asked, planned_offline

    given = {} if source is None else {"source": source}
    problem, _ = planned_offline(cluster, spec, Asked(spec.name, spec.shape.stored_as, given))
    return problem


def _online(context: typer.Context, spec: ModelSpec, source: str | None) -> PlanProblem:
    from edgeshard.planning.inputs.site import site_cluster, site_problem

    site, details = ask(context, _fetch)
    there = [node for node in site.nodes if node.placeable]
    if not there:
        raise UnavailableError("no node of the site is there: start one, or plan a file of nodes with --cluster FILE")
    # Prompts come in at the largest node unless a source is named; a node without a data sheet goes by another model.
    source = source or max(there, key=lambda node: node.free_bytes).name
    others = {
        found.node.node_id: max(found.profiles, key=lambda profile: -profile.age_s).profile
        for found in details
        if found.profiles
    }
    cpus_only = all(node.facts.kind == "cpu" for node in there)
    quantisation = spec.shape.stored_as if cpus_only else None
    found = site_cluster(
        site.nodes,
        [stored.link for stored in site.links],
        {},
        model=spec.name,
        dtype=DType.BFLOAT16,
        quantisation=quantisation,
        source=source,
        others=others,
    )
    problem = site_problem(found, spec, dtype=DType.BFLOAT16, quantisation=quantisation)
    problem.check()
    estimated = ", ".join(sorted(found.estimated))
    typer.echo(f"note: estimated by data sheets or by other models' measurements: {estimated}", err=True)
    return problem


async def _fetch(client: Client) -> tuple[Site, list[NodeDetails]]:
    site = await client.site()
    return site, [await client.node_details(node.node_id) for node in site.nodes if node.placeable]
