"""Options that several commands share, and groups of options that a command takes as one value."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter
from typing import Annotated, Any, get_type_hints

import typer

from edgeshard.cli import completion


def option(metavar: str, help: str, *flags: str, **more: Any) -> Any:
    """An option with a value, for `Annotated`: `metavar` stands for the value in the help; `flags` where they are not
    the parameter's name. `more` is what `typer.Option` takes besides."""
    return typer.Option(*flags, metavar=metavar, help=help, **more)


def switch(flag: str, help: str) -> Any:
    """An option without a value, for `Annotated`; `--a/--no-a` is one that can be turned off."""
    return typer.Option(flag, help=help)


def argument(metavar: str, help: str, **more: Any) -> Any:
    """An argument, for `Annotated`."""
    return typer.Argument(metavar=metavar, help=help, **more)


def node_option(help: str) -> Any:
    """An option whose value is the name of a node."""
    return option("NODE", help, autocompletion=completion.nodes)


def model_option(help: str) -> Any:
    """An option whose value is the name of a model."""
    return option("MODEL", help, autocompletion=completion.models)


def quantise_option(help: str, metavar: str = "FORMAT") -> Any:
    """The option that says how weights are quantised, in both spellings."""
    return option(metavar, help, "--quantise", "--quantize")


def spec_file(help: str) -> Any:
    """An option that names a file of deployment specs."""
    return option("FILE", help, "--file", "-f", exists=True, dir_okay=False)


NodeName = Annotated[str, typer.Argument(metavar="NAME", autocompletion=completion.nodes)]
ModelName = Annotated[str, typer.Argument(metavar="NAME", autocompletion=completion.models)]
DeploymentName = Annotated[str, typer.Argument(metavar="NAME", autocompletion=completion.deployments)]
AllowStreaming = Annotated[
    bool, switch("--allow-streaming", "Nodes may read a part of their weights from disk in every step.")
]
Excluded = Annotated[list[str] | None, node_option("Do not use it; may be repeated.")]
HeadQuantisation = Annotated[
    str | None,
    option(
        "FORMAT",
        "Of the LM head with --quantise: int8 (default), int4 or none.",
        "--head-quantisation",
        "--head-quantization",
    ),
]
KvDtype = Annotated[str | None, option("DTYPE", "Of the KV cache, or int4; else as --dtype.")]
Quantise = Annotated[str | None, quantise_option("Weights as small integers: int8 or int4.")]
Reserved = Annotated[list[str] | None, option("NODE=SIZE", "Memory to leave free; may be repeated.")]
WaitTimeout = Annotated[float | None, option("SECONDS", "Longest wait.", min=0)]
WeightsDtype = Annotated[str | None, option("DTYPE", "float32, float16 or bfloat16 (default).")]


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` an option for each field of a parameter that is a dataclass, in that parameter's place.

    The fields are annotated as options are. The command gets the dataclass, made of the options' values.
    """
    own = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        item.name: item.annotation for item in own.parameters.values() if is_dataclass(item.annotation)
    }

    @functools.wraps(command)
    def run(**options: Any) -> None:
        for name, group in groups.items():
            options[name] = group(**{item.name: options.pop(item.name) for item in fields(group)})
        command(**options)

    parameters: list[Parameter] = []
    for parameter in own.parameters.values():
        group = groups.get(parameter.name)
        parameters += [parameter.replace(kind=Parameter.KEYWORD_ONLY)] if group is None else _parameters(group)
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def _parameters(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            item.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if item.default is MISSING else item.default,
            annotation=hints[item.name],
        )
        for item in fields(group)
    ]
