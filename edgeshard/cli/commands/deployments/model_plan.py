"""edgectl model add --dry-run: whether a model that is not in the store would fit, where, and how fast."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from edgeshard.cli.render.output import Output, human_bytes, show_text
from edgeshard.domain.models.dtypes import DType, weights_text

if TYPE_CHECKING:
    from edgeshard.importing.blocks import Width


def dry_run(
    context: typer.Context, model: str, width: Width, cluster: Path | None, source: str | None, output: Output
) -> None:
    """Plan a model by only its config.json, on the site or on the nodes of a file; exits 1 if it does not fit."""
    from edgeshard.cli.commands.deployments.plan_inputs import Asked, planned_offline, unstored_problem
    from edgeshard.cli.render.plan_views import show_plan
    from edgeshard.importing.imported import notes_of
    from edgeshard.importing.model_sources import parse_source
    from edgeshard.importing.outlook import config_of, further_notes
    from edgeshard.planning.inputs.shapes import model_from_config

    where = parse_source(model)
    config = config_of(where, width)
    spec = model_from_config(where.name, config)
    stored_as, dtype = spec.shape.stored_as, DType.BFLOAT16
    weights = sum(block.weight_bytes(dtype, stored_as) for block in spec.blocks) + spec.head_bytes(dtype, stored_as)
    weights += spec.embedding_bytes(dtype, stored_as) - spec.shared_bytes(dtype, stored_as)
    show_text(
        f"note: {where.name} is a {spec.shape.architecture} of {spec.parameter_count / 1e6:,.0f} M parameters; as "
        f"{weights_text(dtype, stored_as)} its weights take {human_bytes(weights)}",
        err=True,
    )
    for note in notes_of(config) + further_notes(where, config):
        show_text(f"note: {note}", err=True)
    given = {} if source is None else {"source": source}
    asked = Asked(spec.name, None if cluster is None else stored_as, given)
    if cluster is not None:
        problem, _ = planned_offline(cluster, spec, asked)
    else:
        problem, notes = unstored_problem(context, spec, asked)
        for note in notes:
            show_text(f"note: {note}", err=True)
    if not show_plan(problem, None, False, output):
        raise typer.Exit(1)
