"""edgectl model list --found: the models on this disk, and the context for which each fits the
site."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import typer

from edgeshard.cli.connect import ask
from edgeshard.cli.render.output import Column, Output, human_bytes, show_list, show_text
from edgeshard.domain.errors import EdgeShardError

if TYPE_CHECKING:
    from edgeshard.domain.nodes.device import Node
    from edgeshard.importing.stores.inventory import InventoryModel
    from edgeshard.planning.inputs.shapes import ModelSpec

_STEP_TOKENS = 16
_LEAST_TOKENS = 512
_NOMINAL_RATE = 1e9
"""Rate of memory, links and operations, per second."""


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A row: `fits` is None without a site, and for a model that cannot be added; `context` is in
    tokens."""

    model: str
    program: str
    size_bytes: int
    type: str
    fits: bool | None = None
    context: int | None = None
    note: str = ""


COLUMNS: list[Column[ListedModel]] = [
    Column("MODEL", lambda row: row.model),
    Column("PROGRAM", lambda row: row.program),
    Column("SIZE", lambda row: human_bytes(row.size_bytes) if row.size_bytes else "-", right=True),
    Column("TYPE", lambda row: row.type or "-"),
    Column("FITS", lambda row: "-" if row.fits is None else "yes" if row.fits else "no"),
    Column("CONTEXT", lambda row: "-" if row.context is None else str(row.context), right=True),
    Column("NOTE", lambda row: row.note),
]


def show_local(context: typer.Context, output: Output) -> None:
    """Print the models of this disk, and notes on stderr for what cannot be read."""
    from edgeshard.importing.stores.inventory import local_models

    inventory = local_models()
    for problem in inventory.problems:
        show_text(f"note: {problem}", err=True)
    nodes: list[Node] = []
    if inventory.models:
        try:
            nodes = [node for node in ask(context, lambda client: client.nodes()) if node.placeable]
        except EdgeShardError as error:
            show_text(
                f"note: no site answers, so it is not known what fits: {error.message}", err=True
            )
        else:
            if not nodes:
                show_text("note: the site has no connected nodes, so nothing fits yet", err=True)
    rows = [_row(model, nodes) for model in inventory.models]
    show_list(rows, output, COLUMNS, lambda row: row.model)


def _row(model: InventoryModel, nodes: Sequence[Node]) -> ListedModel:
    row = ListedModel(model.text, model.program, model.size_bytes, model.type, note=model.problem)
    if model.problem:
        return row
    from edgeshard.importing.blocks import Width
    from edgeshard.importing.outlook import config_of
    from edgeshard.planning.inputs.shapes import model_from_config

    try:
        spec = model_from_config(model.source.name, config_of(model.source, Width.INT8))
        if not nodes:
            return row
        context = fitting_context(spec, nodes)
    except EdgeShardError as error:
        return replace(row, note=error.message)
    return replace(row, fits=context is not None, context=context)


def fitting_context(model: ModelSpec, nodes: Sequence[Node]) -> int | None:
    """The longest context in tokens for which one request fits the nodes' free memory; None if no
    request fits.

    Only memory counts: figures of time, which the planner needs too, are the same for all nodes and
    links. Raises as `plan` does.
    """
    from edgeshard.domain.models.dtypes import DType
    from edgeshard.planning.inputs.catalogue import DeviceSpec
    from edgeshard.planning.inputs.devices import Cluster, ClusterNode, Link
    from edgeshard.planning.inputs.problem import PlanProblem
    from edgeshard.planning.inputs.site_cluster import LOADING_ITEMSIZE
    from edgeshard.planning.inputs.workspace import largest_step_tokens
    from edgeshard.planning.search.plan import plan

    largest_first = sorted(nodes, key=lambda node: -node.free_bytes)
    cluster_nodes = []
    for node in largest_first:
        device = DeviceSpec(
            kind=node.facts.kind,
            memory_bytes=float(node.free_bytes),
            system_bytes=0.0,
            bandwidth_bytes_per_s=_NOMINAL_RATE,
            flops=dict.fromkeys(DType, _NOMINAL_RATE),
            unified=node.facts.unified_memory,
            source="memory only",
        )
        cluster_nodes.append(ClusterNode(node.name, device, node.name))
    cluster = Cluster(tuple(cluster_nodes), Link(_NOMINAL_RATE), source=largest_first[0].name)
    on_cpus = all(node.facts.kind == "cpu" for node in nodes)
    longest = model.shape.max_context
    least = min(_LEAST_TOKENS, longest)
    problem = PlanProblem(
        model,
        cluster,
        prompt_tokens=max(1, least - 1),
        new_tokens=1,
        batch=1,
        concurrency=1,
        quantisation=model.shape.stored_as if on_cpus else None,
        loading_itemsize=LOADING_ITEMSIZE,
    )

    def fits(tokens: int) -> bool:
        steps = largest_step_tokens(tokens)
        changed = replace(problem, context_tokens=tokens, step_tokens=steps)
        return plan(changed, alternatives=0).feasible

    return largest_that_fits(least, longest, fits)


def largest_that_fits(least: int, longest: int, fits: Callable[[int], bool]) -> int | None:
    """The largest context, `longest` or a multiple of a KV block's tokens; None if not even `least`
    fits."""
    if fits(longest):
        return longest
    if not fits(least):
        return None
    low = least // _STEP_TOKENS
    high = -(-longest // _STEP_TOKENS)
    while low + 1 < high:
        middle = (low + high) // 2
        if fits(middle * _STEP_TOKENS):
            low = middle
        else:
            high = middle
    return max(least, low * _STEP_TOKENS)
