"""edgectl: the operator's command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from edgeshard import WIRE_VERSION, __version__
from edgeshard.cli import (
    apply,
    bench,
    certificate,
    chat,
    debug,
    delete,
    demo,
    deploy,
    describe,
    doctor,
    generate,
    get,
    install,
    join,
    key,
    lab,
    logs,
    model,
    node,
    plan,
    profile,
    replan,
    run,
    serve,
    token,
    top,
    trace,
)
from edgeshard.cli.connect import Connect
from edgeshard.domain.errors import EdgeShardError
from edgeshard.rpc.environment import settle_grpc

_ORDER = (
    *(
        "serve",
        "run",
        "chat",
        "generate",
        "ps",
        "get",
        "describe",
        "deploy",
        "apply",
        "replan",
        "delete",
        "plan",
        "profile",
    ),
    *("model", "key", "top", "trace", "bench", "doctor", "logs", "debug"),
    *("init", "certificate", "token", "join", "node", "install", "uninstall", "lab", "demo", "version"),
)
"""Of the commands in the help; others come behind them."""
_GLOBAL_SWITCHES = ("--plaintext",)
_GLOBAL_OPTIONS = ("--coordinator", "--tls-ca", "--tls-cert", "--tls-key")


class RootGroup(TyperGroup):
    """Reports typed errors with their exit codes, and takes the global options in any place."""

    def list_commands(self, ctx: Any) -> list[str]:
        """What is done most comes first."""
        order = {name: position for position, name in enumerate(_ORDER)}
        return sorted(super().list_commands(ctx), key=lambda name: order.get(name, len(order)))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, hoist_global_options(args))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UnicodeEncodeError:
            # A name or a text among the arguments; gRPC takes UTF-8 only.
            typer.echo("error: an argument is not UTF-8 text", err=True)
            raise typer.Exit(2) from None
        except EdgeShardError as error:
            typer.echo(f"error: {error.message}", err=True)
            if error.retry_after_s is not None:
                typer.echo(f"       a retry may succeed in {error.retry_after_s:g} s", err=True)
            raise typer.Exit(error.exit_code) from None


def hoist_global_options(args: list[str]) -> list[str]:
    """The arguments with the global options first, wherever they stood before a `--`."""
    front: list[str] = []
    rest: list[str] = []
    position = 0
    while position < len(args):
        argument = args[position]
        if argument == "--":
            rest += args[position:]
            break
        if argument in _GLOBAL_SWITCHES:
            front.append(argument)
        elif argument in _GLOBAL_OPTIONS and position + 1 < len(args):
            front += args[position : position + 2]
            position += 1
        elif argument in _GLOBAL_OPTIONS:
            # Hoisted, it would swallow the command as its value.
            raise typer.BadParameter(f"{argument} needs a value")
        elif argument.partition("=")[0] in _GLOBAL_OPTIONS:
            front.append(argument)
        else:
            rest.append(argument)
        position += 1
    return front + rest


app = typer.Typer(
    name="edgectl",
    cls=RootGroup,
    help="Run a large language model across the boxes you already own.",
    epilog="Exit codes: 0 ok, 1 failed, 2 usage, 3 not found, 4 denied, 5 unreachable, 6 timeout.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(name="init", no_args_is_help=True, short_help="Make a site's authority.")(certificate.init)
app.command(name="certificate", no_args_is_help=True, short_help="Make the files of a process.")(
    certificate.certificate
)
app.add_typer(token.app, name="token")
app.command(name="join", no_args_is_help=True, short_help="Become part of a site, by a token.")(join.join)
app.add_typer(key.app, name="key")
app.command(name="serve", no_args_is_help=True, short_help="Answer over HTTP, from this machine.")(serve.serve)
app.add_typer(node.app, name="node")
app.add_typer(get.app, name="get")
app.command(name="ps", short_help="List the deployments: short for get deployments.")(get.deployments)
app.add_typer(describe.app, name="describe")
app.command(name="profile", short_help="Have the boxes measure themselves and their links.")(profile.profile)
app.command(name="deploy", no_args_is_help=True, short_help="Place a model on the boxes and load it.")(deploy.deploy)
app.command(name="replan", no_args_is_help=True, short_help="Move a deployment to the boxes that are there now.")(
    replan.replan
)
app.command(name="plan", no_args_is_help=True, short_help="Choose boxes and layers, predict, explain.")(plan.plan)
app.add_typer(lab.app, name="lab")
app.command(name="apply", no_args_is_help=True, short_help="Make deployments as files say.")(apply.apply)
app.add_typer(delete.app, name="delete")
app.add_typer(model.app, name="model")
app.command(name="run", no_args_is_help=True, short_help="Deploy a model if need be, and answer or chat.")(run.run)
app.command(name="generate", no_args_is_help=True)(generate.generate)
app.command(name="chat", short_help="Talk with a model.")(chat.chat)
app.command(name="bench", short_help="Put a load on a deployment and time its answers.")(bench.bench)
app.command(name="trace", no_args_is_help=True, short_help="Record where a deployment's time goes.")(trace.trace)
app.command(name="logs", no_args_is_help=True, short_help="Print the log of a daemon of this machine.")(logs.logs)
app.command(name="top", short_help="Watch boxes, stages and links at work.")(top.top)
app.command(name="doctor", short_help="Look for what is wrong, and say what to do.")(doctor.doctor)
app.add_typer(debug.app, name="debug")
app.add_typer(install.app, name="install")
app.add_typer(install.uninstall_app, name="uninstall")
app.command(name="demo", short_help="Watch three boxes on this machine tell a story.")(demo.demo)


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    coordinator: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            envvar="EDGESHARD__CLIENT__COORDINATOR",
            help="The site's coordinator; by default the one that this user joined, or 127.0.0.1:7600.",
        ),
    ] = None,
    tls_ca: Annotated[
        Path | None,
        typer.Option(metavar="FILE", envvar="EDGESHARD__CLIENT__TLS_CA", help="PEM of the site's authority."),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(metavar="FILE", envvar="EDGESHARD__CLIENT__TLS_CERT", help="PEM of this client's certificate."),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", envvar="EDGESHARD__CLIENT__TLS_KEY", help="PEM of this client's key."),
    ] = None,
    plaintext: Annotated[
        bool,
        typer.Option(
            "--plaintext",
            envvar="EDGESHARD__CLIENT__PLAINTEXT",
            help="Without TLS: a site on this machine that has none.",
        ),
    ] = False,
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """The global options may stand before or after the command."""
    context.obj = Connect(coordinator, tls_ca, tls_cert, tls_key, plaintext or None)


@app.command()
def version() -> None:
    """Print the version of edgectl and of the wire it speaks."""
    typer.echo(f"edgectl {__version__} (wire version {WIRE_VERSION})")


def main() -> None:
    """Entry point of `edgectl`."""
    settle_grpc()
    app(prog_name="edgectl")


if __name__ == "__main__":
    main()
