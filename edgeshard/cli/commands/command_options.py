"""Options that several commands share, and groups of options that a command takes as one value."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from inspect import Parameter
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from edgeshard.cli import completion
from edgeshard.domain.options import OptionField

_COMPLETED = {"NODE": completion.nodes, "MODEL": completion.models}
"""Sources of an option's values for the shell, by its metavar in the help."""


def option(metavar: str, help: str, *flags: str, **more: Any) -> Any:
    """An option with a value, for `Annotated`: `metavar` stands for the value in the help; `flags`
    are needed if they differ from the parameter's name. `more` are further arguments of
    `typer.Option`."""
    return typer.Option(*flags, metavar=metavar, help=help, **more)


def switch(flag: str, help: str) -> Any:
    """An option without a value, for `Annotated`; `--a/--no-a` is one that can be turned off."""
    return typer.Option(flag, help=help)


def argument(metavar: str, help: str, **more: Any) -> Any:
    """An argument, for `Annotated`."""
    return typer.Argument(metavar=metavar, help=help, **more)


def declared(item: OptionField, help: str = "", metavar: str = "", **more: Any) -> Any:
    """The option of a field, for `Annotated`; `help` and `metavar` if a command needs others."""
    placeholder = metavar or item.metavar
    return typer.Option(
        *item.flags,
        metavar=placeholder or None,
        help=help or item.option.help,
        autocompletion=_COMPLETED.get(placeholder),
        **more,
    )


def spec_file(help: str) -> Any:
    """An option that names a file of deployment specs."""
    return option("FILE", help, "--file", "-f", exists=True, dir_okay=False)


NodeName = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Name or id of the node.", autocompletion=completion.nodes),
]
ModelName = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the model.", autocompletion=completion.models)
]
DeploymentName = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="Name of the deployment.", autocompletion=completion.deployments
    ),
]


def wait_timeout(then: str) -> Any:
    """The limit of a wait, for `Annotated`; `then` is what continues after it, in words."""
    return option(
        "SECONDS", f"Wait at most SECONDS (default: no limit). Then exit with 6; {then}.", min=0
    )


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """Options of a command, each as a parameter of its function, and the one value that is made of
    the given ones."""

    parameters: Sequence[Parameter]
    value_of: Callable[[dict[str, Any]], Any]


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` the options of each group among its parameters, in that parameter's place.

    A group is a dataclass, whose fields are annotated as options are, or an `OptionGroup` in
    `Annotated`. The command gets the value made from the options.
    """
    own = inspect.signature(command, eval_str=True)
    groups = {
        item.name: group
        for item in own.parameters.values()
        if (group := _group_of(item.annotation))
    }

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        for name, group in groups.items():
            names = [parameter.name for parameter in group.parameters if parameter.name in options]
            options[name] = group.value_of({name: options.pop(name) for name in names})
        command(*arguments, **options)

    parameters: list[Parameter] = []
    for parameter in own.parameters.values():
        group = groups.get(parameter.name)
        parameters += [parameter] if group is None else group.parameters
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def _group_of(annotation: Any) -> OptionGroup | None:
    if get_origin(annotation) is Annotated:
        return next((item for item in get_args(annotation) if isinstance(item, OptionGroup)), None)
    if not is_dataclass(annotation):
        return None
    option_class: Any = annotation
    kinds = get_type_hints(option_class, include_extras=True)
    parameters = [
        named_only(item.name, kinds[item.name], item.default) for item in fields(option_class)
    ]
    return OptionGroup(parameters, lambda values: option_class(**values))


def named_only(name: str, kind: Any, default: Any = MISSING) -> Parameter:
    """An option as a parameter; it is required if it has no default."""
    return Parameter(
        name,
        Parameter.KEYWORD_ONLY,
        default=Parameter.empty if default is MISSING else default,
        annotation=kind,
    )
