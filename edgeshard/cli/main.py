"""edgectl: the operator's command line."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from edgeshard import WIRE_VERSION, __version__
from edgeshard.cli import usage
from edgeshard.cli.connect import Connect
from edgeshard.domain.errors import INTERRUPTED, EdgeShardError
from edgeshard.rpc.environment import settle_grpc

_STYLE: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
}


class Lazy(TyperCommand):
    """A command as the help lists it. `load` imports the real one.

    `place` is a module relative to this package and, after a colon, its function or its
    `typer.Typer` of several commands. A `bare` command runs without arguments; the others print
    their help then.
    """

    def __init__(self, name: str, place: str, short_help: str, bare: bool = False) -> None:
        super().__init__(name, short_help=short_help)
        self.place = f"edgeshard.cli{place}"
        self._bare = bare

    def load(self) -> Any:
        module, _, attribute = self.place.partition(":")
        command = getattr(import_module(module), attribute)
        app = typer.Typer(**_STYLE)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=self.name)
        else:
            app.command(name=self.name, no_args_is_help=not self._bare, short_help=self.short_help)(
                command
            )
        return usage.complete(typer.main.get_group(app).commands[str(self.name)], (str(self.name),))


COMMANDS = (
    Lazy("serve", ".commands.site.serve:serve", "Serve a model over HTTP from this machine."),
    Lazy("run", ".commands.requests.run:run", "Deploy a model if needed, then answer or chat."),
    Lazy("chat", ".commands.requests.chat:chat", "Chat with a model.", bare=True),
    Lazy(
        "generate",
        ".commands.requests.generate:generate",
        "Generate text and print it token by token.",
    ),
    Lazy(
        "ps",
        ".commands.deployments.get:deployments",
        "List deployments (short for get deployments).",
        bare=True,
    ),
    Lazy(
        "get",
        ".commands.deployments.get:app",
        "List nodes, models, deployments, events or audit entries.",
    ),
    Lazy(
        "describe",
        ".commands.deployments.describe:app",
        "Show the details of a node, model or deployment.",
    ),
    Lazy(
        "deploy", ".commands.deployments.deploy:deploy", "Place a model on the nodes and load it."
    ),
    Lazy("apply", ".commands.deployments.apply:apply", "Make the deployments that files describe."),
    Lazy(
        "replan",
        ".commands.deployments.replan:replan",
        "Choose new nodes for a running deployment and move it there.",
    ),
    Lazy(
        "delete",
        ".commands.deployments.delete:app",
        "Remove a deployment, a model, a node, or weights on a node's disk.",
    ),
    Lazy("plan", ".commands.deployments.plan:plan", "Choose nodes and layers; predict the speed."),
    Lazy(
        "profile",
        ".commands.deployments.profile:profile",
        "Measure the speed of the nodes and of the links between them.",
        bare=True,
    ),
    Lazy("model", ".commands.deployments.model:app", "Add models to the coordinator's store."),
    Lazy(
        "dashboard",
        ".commands.site.dashboard:dashboard",
        "Print a link that opens the dashboard in a browser.",
        bare=True,
    ),
    Lazy("key", ".commands.site.key:app", "Manage API keys of the HTTP gateway."),
    Lazy("top", ".commands.observing.top:top", "Watch nodes, stages and links live.", bare=True),
    Lazy("trace", ".commands.observing.trace:trace", "Record where the time of a deployment goes."),
    Lazy(
        "bench",
        ".commands.requests.bench:bench",
        "Send test requests to a deployment and measure its latency.",
        bare=True,
    ),
    Lazy(
        "doctor",
        ".commands.observing.doctor:doctor",
        "Find faults of a site and print remedies.",
        bare=True,
    ),
    Lazy("logs", ".commands.site.logs:logs", "Print the log of a daemon on this machine."),
    Lazy(
        "debug",
        ".commands.observing.debug:app",
        "Dump the state of a site's processes and replay it.",
    ),
    Lazy(
        "init", ".commands.site.certificate:init", "Create a site: its authority and certificates."
    ),
    Lazy("backup", ".commands.site.backup:backup", "Back up a site, except its models, to a file."),
    Lazy("restore", ".commands.site.backup:restore", "Restore a site from a backup."),
    Lazy(
        "set-coordinator",
        ".commands.site.set_coordinator:set_coordinator",
        "Change the coordinator's address on this machine.",
    ),
    Lazy(
        "certificate",
        ".commands.site.certificate:certificate",
        "Make a certificate for a node, client or operator.",
    ),
    Lazy("token", ".commands.site.token:app", "Manage join tokens."),
    Lazy("join", ".commands.site.join:join", "Join a site with a token."),
    Lazy(
        "node", ".commands.site.node:app", "Revoke the certificates of a node, client or operator."
    ),
    Lazy("label", ".commands.site.label:app", "Set or remove labels of a node."),
    Lazy("config", ".commands.site.config:app", "Check, show and list the daemons' settings."),
    Lazy("install", ".commands.site.install:app", "Install a daemon as a systemd service."),
    Lazy(
        "uninstall",
        ".commands.site.install:uninstall_app",
        "Remove EdgeShard from this machine, or one service.",
    ),
    Lazy(
        "upgrade",
        ".commands.site.programs:upgrade",
        "Upgrade EdgeShard on this machine.",
        bare=True,
    ),
    Lazy("lab", ".commands.site.lab:app", "Emulate nodes and links on this machine."),
    Lazy("demo", ".commands.site.demo:demo", "Run a three-node demo on this machine.", bare=True),
)
"""In the order of the help. `version` follows."""
_GLOBAL_SWITCHES = ("--plaintext",)
_GLOBAL_OPTIONS = ("--coordinator", "--tls-ca", "--tls-cert", "--tls-key")


class RootGroup(TyperGroup):
    """Reports typed errors with their exit codes, and takes the global options in any place."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, command in self.commands.items():
            usage.complete(command, (name,))
        self.commands = {**{str(command.name): command for command in COMMANDS}, **self.commands}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Imports only the called command."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, Lazy) else command, rest

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, hoist_global_options(args))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UnicodeEncodeError:
            # A name or a text among the arguments; gRPC takes UTF-8 only.
            typer.echo("error: an argument is not UTF-8 text", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except EdgeShardError as error:
            from edgeshard.cli.render.output import show_text

            show_text(f"error: {error.message}", err=True)
            if error.retry_after_s is not None:
                show_text(f"       a retry may succeed in {error.retry_after_s:g} s", err=True)
            raise typer.Exit(error.exit_code) from None


def hoist_global_options(args: list[str]) -> list[str]:
    """The arguments with the global options first, wherever they stood before a `--`."""
    front: list[str] = []
    rest: list[str] = []
    arguments = iter(args)
    for argument in arguments:
        if argument == "--":
            rest += [argument, *arguments]
        elif argument in _GLOBAL_OPTIONS:
            value = next(arguments, None)
            if value is None:
                # Hoisted, it would swallow the command as its value.
                raise typer.BadParameter(f"{argument} needs a value")
            front += [argument, value]
        elif argument in _GLOBAL_SWITCHES or argument.partition("=")[0] in _GLOBAL_OPTIONS:
            front.append(argument)
        else:
            rest.append(argument)
    return front + rest


app = typer.Typer(
    name="edgectl",
    cls=RootGroup,
    help="Run a large language model across the machines you already own.",
    epilog=usage.epilog(usage.FIRST),
    no_args_is_help=True,
    **(_STYLE | {"add_completion": True}),
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        version()
        raise typer.Exit


def _setting(key: str, metavar: str, help: str) -> Any:
    """A global option, which an environment variable may also set."""
    return typer.Option(metavar=metavar, envvar=f"EDGESHARD__CLIENT__{key}", help=help)


@app.callback()
def root(
    context: typer.Context,
    coordinator: Annotated[
        str | None,
        _setting(
            "COORDINATOR",
            "HOST:PORT",
            "Connect to this coordinator (default: the site that this user joined, or "
            "127.0.0.1:7600).",
        ),
    ] = None,
    tls_ca: Annotated[
        Path | None,
        _setting(
            "TLS_CA", "FILE", "Read the certificate of the site's authority from this PEM file."
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        _setting("TLS_CERT", "FILE", "Read this client's certificate from this PEM file."),
    ] = None,
    tls_key: Annotated[
        Path | None,
        _setting("TLS_KEY", "FILE", "Read this client's private key from this PEM file."),
    ] = None,
    plaintext: Annotated[
        bool,
        typer.Option(
            "--plaintext",
            envvar="EDGESHARD__CLIENT__PLAINTEXT",
            help="Connect without TLS. Use it only for a site on this machine that runs without "
            "TLS.",
        ),
    ] = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Accept the global options before or after the command."""
    context.obj = Connect(coordinator, tls_ca, tls_cert, tls_key, plaintext or None)


@app.command()
def version() -> None:
    """Print the version of edgectl and of its wire protocol."""
    typer.echo(f"edgectl {__version__} (wire version {WIRE_VERSION})")


def main() -> None:
    """Run a command with this process's arguments. `edgeshard.cli.entry` is the entry point of
    `edgectl`."""
    settle_grpc()
    app(prog_name="edgectl")


if __name__ == "__main__":
    main()
