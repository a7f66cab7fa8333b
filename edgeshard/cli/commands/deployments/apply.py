"""edgectl apply: deployments from files, repeatable without effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeshard.cli.commands.command_options import option, spec_file, switch
from edgeshard.cli.commands.deployments.deploy import read_spec
from edgeshard.cli.connect import ask
from edgeshard.cli.render.loading import DeployReporter
from edgeshard.cli.render.output import (
    TABLES,
    Column,
    Output,
    OutputOption,
    plain,
    show_list,
    show_text,
    stderr_console,
)
from edgeshard.domain.deployments.deployment import AUTO_REPLICAS
from edgeshard.domain.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError

if TYPE_CHECKING:
    from edgeshard.client import Client
    from edgeshard.domain.deployments.deployment import Deployment, DeploymentSpec
    from edgeshard.domain.deployments.placement import Placement


@dataclass(frozen=True, slots=True)
class Difference:
    """A field of a spec that is one thing and wanted to be another."""

    field: str
    now: Any
    wanted: Any


@dataclass(frozen=True, slots=True)
class Change:
    """The action on a deployment, taken or planned: `created`, `unchanged`, `restored` if replicas
    of it were gone, `replaced`; `refused` in a dry run. The placement is the first pipeline's."""

    name: str
    action: str
    differences: tuple[Difference, ...] = ()
    placement: Placement | None = None


def apply(
    context: typer.Context,
    files: Annotated[
        list[Path],
        spec_file(
            "Read a spec, or several as [[deployment]], from a TOML or JSON file; repeatable."
        ),
    ],
    replace: Annotated[
        bool,
        switch(
            "--replace",
            "Delete a deployment that differs and deploy it again; its running requests end.",
        ),
    ] = False,
    wait: Annotated[
        bool, switch("--wait/--no-wait", "Wait until all deployments are ready.")
    ] = True,
    timeout: Annotated[
        float | None,
        option(
            "SECONDS",
            "Wait at most SECONDS for each deployment (default: no limit). Then exit with 6; "
            "deployments that were "
            "begun continue to load.",
            min=0,
        ),
    ] = None,
    dry_run: Annotated[
        bool, switch("--dry-run", "Print the changes and placements, and change nothing.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Make the site's deployments match the files. The command deploys missing deployments and
    replicas, and leaves those that already match. A deployment that no file names stays as it is. A
    key that a file leaves out takes its default, except source, which stays as it is. A running
    deployment cannot be changed. If one differs from its file, the command names the fields and
    fails. If you give --replace, the command deletes that deployment and deploys it again.
    """
    specs = specs_of(files)

    async def work(client: Client) -> list[Change]:
        # All are checked before any change.
        pairs = [(spec, await _current(client, spec)) for spec in specs]
        if not (dry_run or replace):
            for spec, current in pairs:
                _check(spec, current)
        if dry_run:
            return [await _would_apply(client, spec, current, replace) for spec, current in pairs]
        return [await _applied(client, spec, current, wait, timeout) for spec, current in pairs]

    changes = ask(context, work)
    show_list(changes, output, _COLUMNS, lambda change: change.name)
    if output in TABLES:
        for change in changes:
            for difference in change.differences:
                show_text(f"{change.name}: {_difference_text(difference)}", err=True)
    if any(change.action == REFUSED for change in changes):
        raise typer.Exit(1)


REFUSED = "refused"


def specs_of(files: list[Path]) -> list[DeploymentSpec]:
    """The specs of all files. Raises InvalidArgumentError naming the file and every field that is
    wrong in one."""
    from edgeshard.domain.deployments.deployment import parse_spec

    specs: dict[str, DeploymentSpec] = {}
    for file in files:
        values = read_spec(file)
        tables = values.pop("deployment", None)
        if tables is None:
            tables = [values]
        elif (
            values
            or not isinstance(tables, list)
            or not all(isinstance(table, dict) for table in tables)
        ):
            raise InvalidArgumentError(
                f"{file}: a file with [[deployment]] tables may contain nothing else",
                field="file",
                reason="INVALID_SPEC",
            )
        for table in tables:
            try:
                spec = parse_spec(table)
            except InvalidArgumentError as error:
                raise InvalidArgumentError(
                    f"{file}: {error.message}", field=error.field, reason=error.reason
                ) from None
            if spec.name in specs:
                raise InvalidArgumentError(
                    f"{file}: there are two deployments {spec.name}", field="name"
                )
            specs[spec.name] = spec
    return list(specs.values())


def differences(current: DeploymentSpec, target: DeploymentSpec) -> tuple[Difference, ...]:
    """The fields that differ. A source that is not given is whichever was chosen, and so is a
    number of replicas."""
    if current.replica:
        current = dataclasses.replace(current, name=current.served_name, replica=0, source="")
    if target.replicas == AUTO_REPLICAS:
        target = dataclasses.replace(target, replicas=current.replicas)
    if not target.source:
        target = dataclasses.replace(target, source=current.source)
    return tuple(
        Difference(name, plain(getattr(current, name)), plain(getattr(target, name)))
        for name in type(target).__match_args__
        if getattr(current, name) != getattr(target, name)
    )


async def _current(client: Client, spec: DeploymentSpec) -> tuple[Deployment, ...]:
    """The deployment, or the replicas of it that there are."""
    try:
        return await client.replicas(spec.name)
    except NotFoundError:
        return ()


def missing(current: Sequence[Deployment]) -> tuple[DeploymentSpec, ...]:
    """The specs of replicas that are gone, by those that are there."""
    if not current or not (spec := current[0].spec).replica:
        return ()
    there = {one.spec.name for one in current}
    numbered = dataclasses.replace(spec, name=spec.served_name, source="").numbered(spec.replicas)
    return tuple(one for one in numbered if one.name not in there)


def _check(spec: DeploymentSpec, current: Sequence[Deployment]) -> None:
    """Raise FailedPreconditionError naming the fields of a deployment that would have to change, or
    why it failed."""
    if not current:
        return
    spec_differences = differences(current[0].spec, spec)
    again = f"`edgectl delete deployment {spec.name}` first, or give --replace"
    if spec_differences:
        texts = "; ".join(map(_difference_text, spec_differences))
        raise FailedPreconditionError(
            f"deployment {spec.name} exists and cannot be changed: {texts}. {again}",
            field=spec_differences[0].field,
            reason="SPEC_DIFFERS",
        )
    for one in filter(_is_dead, current):
        why = f": {one.failure.message}" if one.failure is not None else ""
        raise FailedPreconditionError(
            f"deployment {one.spec.name} is {one.phase}{why}. {again}",
            field="name",
            reason="NOT_RUNNING",
        )


def _is_dead(deployment: Deployment) -> bool:
    return deployment.phase.value in ("failed", "deleting")


async def _would_apply(
    client: Client, spec: DeploymentSpec, current: Sequence[Deployment], replace: bool
) -> Change:
    if not current:
        return Change(spec.name, "created", placement=await client.plan(spec))
    spec_differences = differences(current[0].spec, spec)
    if spec_differences or any(map(_is_dead, current)):
        return Change(spec.name, "replaced" if replace else REFUSED, spec_differences)
    missing_specs = missing(current)
    for one in missing_specs[:1]:  # raises if there is no capacity for it
        await client.plan(one)
    return Change(
        spec.name, "restored" if missing_specs else "unchanged", placement=current[0].placement
    )


async def _applied(
    client: Client,
    spec: DeploymentSpec,
    current: Sequence[Deployment],
    wait: bool,
    timeout_s: float | None,
) -> Change:
    spec_differences = differences(current[0].spec, spec) if current else ()
    with stderr_console().status(f"applying {spec.name}") as status:
        reporter = DeployReporter(status)
        if current and not spec_differences and not any(map(_is_dead, current)):
            missing_specs = missing(current)
            for one in missing_specs:
                await client.deploy(one, wait, timeout_s, reporter.show)
            first = (
                await client.wait_ready(spec.name, timeout_s, reporter.show) if wait else current[0]
            )
            return Change(
                spec.name, "restored" if missing_specs else "unchanged", placement=first.placement
            )
        if current:
            await client.delete_deployment(spec.name, timeout_s=timeout_s)
        deployment = await client.deploy(spec, wait, timeout_s, reporter.show)
    return Change(
        spec.name, "replaced" if current else "created", spec_differences, deployment.placement
    )


def _difference_text(difference: Difference) -> str:
    return (
        f"{difference.field} is {_text(difference.now)} and would become {_text(difference.wanted)}"
    )


def _text(value: Any) -> str:
    return "not set" if value in (None, "", [], {}) else str(value)


def _placement_text(change: Change) -> str:
    from edgeshard.cli.render.views import layers_text

    return layers_text(change.placement) if change.placement is not None else "-"


_COLUMNS: list[Column[Change]] = [
    Column("NAME", lambda change: change.name),
    Column("ACTION", lambda change: change.action),
    Column(
        "DIFFERS IN",
        lambda change: ",".join(difference.field for difference in change.differences) or "-",
    ),
    Column("PLACEMENT", _placement_text),
]
