"""edgectl get: lists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from edgeshard.cli.commands.command_options import option, switch
from edgeshard.cli.completion import NounGroup
from edgeshard.cli.connect import ask
from edgeshard.cli.render.output import Output, OutputOption, show_list
from edgeshard.cli.render.watch import WatchOption, follow, show
from edgeshard.domain.errors import DataLossError

if TYPE_CHECKING:
    from edgeshard.client import Client

app = typer.Typer(
    cls=NounGroup,
    help="List nodes, models, deployments, events or audit entries.",
    no_args_is_help=True,
)


@app.command()
def nodes(
    context: typer.Context, watch: WatchOption = False, output: OutputOption = Output.TABLE
) -> None:
    """List the nodes of the site and the layers they hold."""
    from edgeshard.cli.render.views import NODE_COLUMNS

    ask(
        context,
        lambda client: show(client.nodes, output, NODE_COLUMNS, lambda node: node.name, watch),
        endless=watch,
    )


@app.command()
def models(
    context: typer.Context, watch: WatchOption = False, output: OutputOption = Output.TABLE
) -> None:
    """List the models in the coordinator's store."""
    from edgeshard.cli.render.views import MODEL_COLUMNS

    ask(
        context,
        lambda client: show(
            client.stored_models, output, MODEL_COLUMNS, lambda model: model.name, watch
        ),
        endless=watch,
    )


@app.command(short_help="List the deployments, their phase and placement.")
def deployments(
    context: typer.Context, watch: WatchOption = False, output: OutputOption = Output.TABLE
) -> None:
    """List the deployments: their phase and which node holds which layers."""
    from edgeshard.cli.render.views import DEPLOYMENT_COLUMNS

    ask(
        context,
        lambda client: show(
            client.deployments,
            output,
            DEPLOYMENT_COLUMNS,
            lambda deployment: deployment.spec.name,
            watch,
        ),
        endless=watch,
    )


@app.command(short_help="List events of nodes, deployments and links.")
def events(
    context: typer.Context,
    limit: Annotated[
        int,
        option(
            "N",
            "Show the N newest. With --watch, 0 shows only new ones.",
            "--limit",
            min=0,
            max=1000,
        ),
    ] = 50,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Keep printing events until Ctrl-C.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the site's events since the coordinator started, newest last: nodes that joined or left,
    phase changes of deployments and their causes, stalled links. The coordinator keeps the newest
    1,000 events.
    """
    from edgeshard.cli.render.views import EVENT_COLUMNS

    async def work(client: Client) -> None:
        if watch:
            await follow(
                client.events(limit, follow=True),
                output,
                EVENT_COLUMNS,
                lambda event: str(event.number),
            )
        else:
            site_events = [event async for event in client.events(limit)]
            show_list(site_events, output, EVENT_COLUMNS, lambda event: str(event.number))

    ask(context, work, endless=watch)


@app.command(short_help="List who changed the site or was refused.")
def audit(
    context: typer.Context,
    limit: Annotated[int, option("N", "Show the N newest.", "--limit", min=1, max=1000)] = 50,
    verify: Annotated[
        bool,
        switch(
            "--verify",
            "Check whether the audit log was changed, instead of listing it: compare its files "
            "with their seals, and "
            "exit with 1 if one does not match.",
        ),
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """List who changed the site and whose call was refused, newest last. At most half of the
    entries shown are refused calls, unless there are too few others to fill the list.
    """
    from edgeshard.cli.render.views import AUDIT_CHECK_COLUMNS, AUDIT_COLUMNS

    if not verify:
        show_list(
            ask(context, lambda client: client.audit(limit)),
            output,
            AUDIT_COLUMNS,
            lambda entry: entry.what,
        )
        return
    checks = ask(context, lambda client: client.check_audit())
    show_list(checks, output, AUDIT_CHECK_COLUMNS, lambda check: check.file)
    if broken := [check for check in checks if check.broken_at]:
        raise DataLossError(
            f"audit log broken at {broken[0].file}:{broken[0].broken_at}: {broken[0].why}",
            reason="SEAL",
        )
