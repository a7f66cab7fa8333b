"""The keys of a deployment's spec as options of a command, by reflection on `DeploymentSpec`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Annotated, Any, get_args, get_origin

from edgeshard.cli.commands.command_options import OptionGroup, declared, named_only
from edgeshard.domain.deployments.deployment import AUTO_REPLICAS, EVERY_NODE, DeploymentSpec
from edgeshard.domain.deployments.placement import parse_layers
from edgeshard.domain.deployments.rules import parse_rules
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.models.dtypes import MODEL_FORMATS
from edgeshard.domain.options import OptionField, option_fields

KEYS = {item.name: item for item in option_fields(DeploymentSpec)}


def flag_of(key: str) -> str:
    """The option of a key, or its argument."""
    return KEYS[key].flags[0] if KEYS[key].flags else key.upper()


def spec_option(key: str, help: str = "", metavar: str = "") -> Any:
    """The option of a key for a command's own parameter, in `Annotated`."""
    return declared(KEYS[key], help, metavar, min=KEYS[key].option.low)


def quantise_option(default: str) -> Any:
    """The format of the weights on all nodes, for `Annotated`; `default` is the one that is used
    without it."""
    text = (
        "Quantise the weights to int8 or int4. stored: use them as they are stored. Default: "
        f"{default}."
    )
    return spec_option("quantisation", text, "FORMAT")


def spec_options(*keys: str, **helps: str) -> OptionGroup:
    """The options of these keys, or of all, as one parameter of a command: the given options, by
    key, as they were written.

    `helps` are further keys with texts that a command needs in place of their own.
    """
    items = [
        item for item in KEYS.values() if item.flags and (not keys or item.name in (*keys, *helps))
    ]
    return OptionGroup(
        [_parameter(item, helps.get(item.name, "")) for item in items],
        lambda values: {
            key: value for key, value in values.items() if value is not None and value is not False
        },
    )


def _parameter(item: OptionField, help: str) -> Parameter:
    """Its value is None or False if it is not given: the spec has the default, and holds the
    bounds."""
    if item.kind is bool:
        return named_only(item.name, Annotated[bool, declared(item, help)], False)
    kind: Any = str
    if get_origin(item.kind) is dict or item.kind == tuple[str, ...] or item.metavar == "RULE":
        kind = list[str]
    elif item.metavar not in _READERS:
        kind = next(
            (number for number in (int, float) if number in (item.kind, *get_args(item.kind))), str
        )
    return named_only(item.name, Annotated[kind | None, declared(item, help)], None)


def read_texts(texts: Mapping[str, Any]) -> tuple[dict[str, Any], list[InvalidArgumentError]]:
    """The spec's values of options from their texts, and the mistakes in some."""
    values: dict[str, Any] = {}
    mistakes: list[InvalidArgumentError] = []
    for key, value in texts.items():
        reader = _READERS.get(KEYS[key].metavar)
        try:
            values[key] = value if reader is None else reader(value, key)
        except InvalidArgumentError as error:
            mistakes.append(error)
    return values, mistakes


def pairs(items: Sequence[str], key: str) -> list[tuple[str, str]]:
    """`NODE=VALUE`, repeated. Raises InvalidArgumentError for one that is not."""
    node_values = [(node, value) for node, _, value in (item.partition("=") for item in items)]
    for item, (node, value) in zip(items, node_values, strict=True):
        if not node or not value:
            option = key.replace("_", "-")
            raise InvalidArgumentError(f"--{option} {item!r} is not NODE=VALUE", field=key)
    return node_values


def _quantisation(items: Sequence[str], key: str) -> dict[str, str]:
    """A format for every node that is not named, `NODE=FORMAT` for one."""
    formats: dict[str, str] = {}
    for item in items:
        node, equals, text = item.rpartition("=")
        is_unknown = text not in ("none", "stored", *MODEL_FORMATS) or (
            equals and (not node or text == "none")
        )
        if is_unknown or (node or "*") in formats:
            raise InvalidArgumentError(
                f"--quantise {item!r}: give none, int8, int4 or stored once, and NODE=FORMAT once "
                "for a node",
                field=key,
            )
        formats[node or EVERY_NODE] = text
    return formats


def _size(text: str, key: str) -> int:
    # brings gRPC along, which help and planning do without
    from edgeshard.process.config import (
        parse_bytes,
    )

    return parse_bytes(text, key)


def _count_or_auto(text: str, key: str) -> int:
    """A whole number, or `AUTO_REPLICAS` for "auto"."""
    if text == "auto":
        return AUTO_REPLICAS
    if not text.isdecimal():
        raise InvalidArgumentError(f"--{key} {text!r}: give a number, or auto", field=key)
    return int(text)


_READERS: dict[str, Callable[[Any, str], Any]] = {
    "SIZE": _size,
    "NODE=SIZE": lambda items, key: {
        node: _size(size, f"{key}.{node}") for node, size in pairs(items, key)
    },
    "FORMAT|NODE=FORMAT": _quantisation,
    "RULE": lambda texts, _: parse_rules(texts),
    "N|auto": _count_or_auto,
    "a=0:4,b=4:9": lambda text, _: parse_layers(text),
}
"""Readers of options that are written in another form than the spec's value, by their metavar in
the help."""
