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

AllowStreaming = Annotated[
    bool, typer.Option("--allow-streaming", help="Nodes may read a part of their weights from disk in every step.")
]
Excluded = Annotated[
    list[str] | None,
    typer.Option(metavar="NODE", autocompletion=completion.nodes, help="Do not use it; may be repeated."),
]
HeadQuantisation = Annotated[
    str | None,
    typer.Option(
        "--head-quantisation",
        "--head-quantization",
        metavar="FORMAT",
        help="Of the LM head with --quantise: int8 (default), int4 or none.",
    ),
]
KvDtype = Annotated[str | None, typer.Option(metavar="DTYPE", help="Of the KV cache, or int4; else as --dtype.")]
Quantise = Annotated[
    str | None,
    typer.Option("--quantise", "--quantize", metavar="FORMAT", help="Weights as small integers: int8 or int4."),
]
Reserved = Annotated[list[str] | None, typer.Option(metavar="NODE=SIZE", help="Memory to leave free; may be repeated.")]
WaitTimeout = Annotated[float | None, typer.Option(min=0, metavar="SECONDS", help="Longest wait.")]
WeightsDtype = Annotated[str | None, typer.Option(metavar="DTYPE", help="float32, float16 or bfloat16 (default).")]


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
