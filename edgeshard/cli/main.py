"""edgectl: the operator's command line."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from edgeshard import WIRE_VERSION, __version__
from edgeshard.cli.connect import INTERRUPTED, Connect
from edgeshard.domain.errors import EdgeShardError
from edgeshard.rpc.environment import settle_grpc

_STYLE: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}


class Lazy(TyperCommand):
    """A command as the help lists it. `load` imports the real one.

    `place` is a module relative to this package, a colon, and its function or its `typer.Typer` of
    several commands. A `bare` command runs without arguments; the others print their help then.
    """

    def __init__(self, name: str, place: str, short_help: str, bare: bool = False) -> None:
        super().__init__(name, short_help=short_help)
        self.place = f"edgeshard.cli{place}"
        self._bare = bare

    def load(self) -> Any:
        module, _, attribute = self.place.partition(":")
        found = getattr(import_module(module), attribute)
        app = typer.Typer(**_STYLE)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=self.name)
        else:
            app.command(name=self.name, no_args_is_help=not self._bare, short_help=self.short_help)(found)
        return typer.main.get_group(app).commands[str(self.name)]


COMMANDS = (
    Lazy("serve", ".commands.site.serve:serve", "Answer over HTTP, from this machine."),
    Lazy("run", ".commands.requests.run:run", "Deploy a model if need be, and answer or chat."),
    Lazy("chat", ".commands.requests.chat:chat", "Talk with a model.", bare=True),
    Lazy("generate", ".commands.requests.generate:generate", "Generate text and print it token by token."),
    Lazy("ps", ".commands.deployments.get:deployments", "List the deployments: short for get deployments.", bare=True),
    Lazy("get", ".commands.deployments.get:app", "List nodes, models, deployments, events, audit."),
    Lazy("describe", ".commands.deployments.describe:app", "Show everything about one node, model or deployment."),
    Lazy("deploy", ".commands.deployments.deploy:deploy", "Place a model on the nodes and load it."),
    Lazy("apply", ".commands.deployments.apply:apply", "Make deployments as files say."),
    Lazy("replan", ".commands.deployments.replan:replan", "Move a deployment to the nodes that are there now."),
    Lazy("delete", ".commands.deployments.delete:app", "Remove a deployment, model, node or packed unit."),
    Lazy("plan", ".commands.deployments.plan:plan", "Choose nodes and layers, predict, explain."),
    Lazy(
        "profile",
        ".commands.deployments.profile:profile",
        "Have the nodes measure themselves and their links.",
        bare=True,
    ),
    Lazy("model", ".commands.deployments.model:app", "Put models into the coordinator's store."),
    Lazy(
        "dashboard",
        ".commands.site.dashboard:dashboard",
        "Print a link that opens the dashboard in a browser.",
        bare=True,
    ),
    Lazy("key", ".commands.site.key:app", "Make, list and revoke API keys for the HTTP gateway."),
    Lazy("top", ".commands.observing.top:top", "Watch nodes, stages and links at work.", bare=True),
    Lazy("trace", ".commands.observing.trace:trace", "Record where a deployment's time goes."),
    Lazy("bench", ".commands.requests.bench:bench", "Put a load on a deployment and time its answers.", bare=True),
    Lazy("doctor", ".commands.observing.doctor:doctor", "Look for what is wrong, and say what to do.", bare=True),
    Lazy("logs", ".commands.site.logs:logs", "Print the log of a daemon of this machine."),
    Lazy("debug", ".commands.observing.debug:app", "Dump what a site's processes know, and replay it."),
    Lazy("init", ".commands.site.certificate:init", "Make a site's authority."),
    Lazy("backup", ".commands.site.backup:backup", "Copy a site, except its models, into a file."),
    Lazy("restore", ".commands.site.backup:restore", "Restore a site from a backup."),
    Lazy(
        "set-coordinator",
        ".commands.site.set_coordinator:set_coordinator",
        "Change the coordinator's address on this machine.",
    ),
    Lazy("certificate", ".commands.site.certificate:certificate", "Make the files of a process."),
    Lazy("token", ".commands.site.token:app", "Make, list and revoke join tokens."),
    Lazy("join", ".commands.site.join:join", "Become part of a site, by a token."),
    Lazy("node", ".commands.site.node:app", "Take a node's certificate away."),
    Lazy("label", ".commands.site.label:app", "Set and remove labels of a node."),
    Lazy("config", ".commands.site.config:app", "Check and show settings of daemons, and list what there are."),
    Lazy("install", ".commands.site.install:app", "Lay out a daemon as a service of systemd."),
    Lazy("uninstall", ".commands.site.install:uninstall_app", "Remove EdgeShard from this machine, or one service."),
    Lazy(
        "upgrade",
        ".commands.site.programs:upgrade",
        "Put another version of EdgeShard in the place of this one.",
        bare=True,
    ),
    Lazy("lab", ".commands.site.lab:app", "Emulate nodes and links on this machine."),
    Lazy("demo", ".commands.site.demo:demo", "Watch three nodes on this machine tell a story.", bare=True),
)
"""In the order of the help. `version` follows."""
_GLOBAL_SWITCHES = ("--plaintext",)
_GLOBAL_OPTIONS = ("--coordinator", "--tls-ca", "--tls-cert", "--tls-key")


class RootGroup(TyperGroup):
    """Reports typed errors with their exit codes, and takes the global options in any place."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {**{str(command.name): command for command in COMMANDS}, **self.commands}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Only the called command is imported."""
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
    given = iter(args)
    for argument in given:
        if argument == "--":
            rest += [argument, *given]
        elif argument in _GLOBAL_OPTIONS:
            value = next(given, None)
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
    epilog="Exit codes: 0 ok, 1 failed, 2 usage, 3 not found, 4 denied, 5 unreachable, 6 timeout.",
    no_args_is_help=True,
    **(_STYLE | {"add_completion": True}),
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


def _setting(key: str, metavar: str, help: str) -> Any:
    """A global option, which a variable of the environment may give, too."""
    return typer.Option(metavar=metavar, envvar=f"EDGESHARD__CLIENT__{key}", help=help)


@app.callback()
def root(
    context: typer.Context,
    coordinator: Annotated[
        str | None,
        _setting(
            "COORDINATOR",
            "HOST:PORT",
            "The site's coordinator; by default the one that this user joined, or 127.0.0.1:7600.",
        ),
    ] = None,
    tls_ca: Annotated[Path | None, _setting("TLS_CA", "FILE", "PEM of the site's authority.")] = None,
    tls_cert: Annotated[Path | None, _setting("TLS_CERT", "FILE", "PEM of this client's certificate.")] = None,
    tls_key: Annotated[Path | None, _setting("TLS_KEY", "FILE", "PEM of this client's key.")] = None,
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
    """Run a command with this process's arguments. `edgeshard.cli.entry` is the entry point of `edgectl`."""
    settle_grpc()
    app(prog_name="edgectl")


if __name__ == "__main__":
    main()
