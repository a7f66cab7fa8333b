"""edgectl config: the content of a file of settings, a daemon's resulting settings, and all
available ones."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeshard.cli.commands.command_options import argument, option, switch
from edgeshard.cli.render.output import Column, Output, OutputOption, show_list, show_text
from edgeshard.domain.errors import InvalidArgumentError, NotFoundError
from edgeshard.process.installation import CONFIGURATION, config_path
from edgeshard.process.systemd_units import Daemon

if TYPE_CHECKING:
    from edgeshard.process.config import DaemonSettings, Setting

app = typer.Typer(help="Check, show and list the daemons' settings.", no_args_is_help=True)

DaemonName = Annotated[Daemon, argument("DAEMON", "Choose the daemon: agent or coordinator.")]


@app.command("check")
def check(
    files: Annotated[
        list[Path] | None,
        argument("FILE", "Check these files (default: the files of `edgectl install`)."),
    ] = None,
) -> None:
    """Check settings files for errors before you start or reload a daemon with them."""
    from edgeshard.process.config import problems

    faults = []
    for file in files or _installed():
        wrong = problems(file, {daemon.value: _kind(daemon) for daemon in Daemon})
        show_text(f"{file}: {len(wrong) or 'nothing'} wrong")
        faults += wrong
    if faults:
        raise InvalidArgumentError("\n       ".join(faults), field="config", reason="CONFIG_FILE")


@app.command("show")
def show(
    daemon: DaemonName,
    config: Annotated[
        Path | None, option("FILE", "Read this file as the daemon's --config.", "--config")
    ] = None,
    resolved: Annotated[bool, switch("--resolved", "Show defaults, too.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the settings that a daemon would use, and the source of each: a file, the environment or
    a default."""
    from edgeshard.process.config import given, settings_of

    kind = _kind(daemon)
    settings = settings_of(kind, given(kind, config, {}))
    rows = [one for one in settings if resolved or one.source != "default"]
    columns: list[Column[Setting]] = [
        Column("KEY", lambda one: one.key),
        Column("VALUE", lambda one: _text(one.value)),
        Column("FROM", lambda one: one.source),
    ]
    data = {one.key: {"value": one.value, "from": one.source} for one in rows}
    show_list(rows, output, columns, lambda one: one.key, data)


@app.command("docs")
def docs(daemon: DaemonName, output: OutputOption = Output.TABLE) -> None:
    """List all settings: the key in a file, its default, and whether a reload applies it to a
    running daemon (edgectl config check, then systemctl reload).
    """
    from edgeshard.process.config import Given, settings_of

    kind = _kind(daemon)
    settings = settings_of(kind, Given({}, {}, {}, None, kind.section))
    columns: list[Column[Setting]] = [
        Column("KEY", lambda one: one.key),
        Column("DEFAULT", lambda one: "required" if one.required else _text(one.default)),
        Column("RELOADED", lambda one: "yes" if one.reloaded else "-"),
        Column("OPTION", lambda one: one.option, wide=True),
        Column("VARIABLE", lambda one: one.variable, wide=True),
        Column("MEANING", lambda one: one.meaning),
    ]
    data = [_documented(one) for one in settings]
    show_list(settings, output, columns, lambda one: one.key, data)


def _documented(setting: Setting) -> dict[str, Any]:
    names = ("key", "option", "variable", "required", "reloaded", "meaning")
    return {name: getattr(setting, name) for name in names} | {"default": _text(setting.default)}


def _text(value: Any) -> str:
    if value is None or value in ((), [], {}, ""):
        return "-"
    if isinstance(value, Mapping):
        return ",".join(f"{key}={item}" for key, item in value.items())
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _kind(daemon: Daemon) -> type[DaemonSettings]:
    """A daemon's settings; the library does not know the daemons."""
    settings = import_module(f"edgeshard_{daemon}.settings")
    kind: type[DaemonSettings] = getattr(settings, f"{daemon.title()}Settings")
    return kind


def _installed() -> list[Path]:
    """The files that edgectl install lays out."""
    paths = [path for daemon in Daemon if (path := Path(config_path(daemon))).is_file()]
    if not paths:
        raise NotFoundError(f"there is no settings file in {CONFIGURATION}: name one", field="file")
    return paths
