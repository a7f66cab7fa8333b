"""The options of a command that say what an answer must be."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

from edgeshard.cli.commands.options import option, switch
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.requests.generation import GUIDE_LIMIT_BYTES, Guide, GuideKind

_OPTIONS: dict[str, Any] = {
    "json": Annotated[bool, switch("--json", "The answer is a JSON object.")],
    "json_schema": Annotated[Path | None, option("FILE", "The answer is JSON of this schema.")],
    "regex": Annotated[str | None, option("REGEX", "The answer matches this expression.")],
    "grammar": Annotated[Path | None, option("FILE", "The answer is of this grammar, in Lark's syntax.")],
}


def guide_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command`, which takes the SDK's options by their keywords, the options that make a `guide`."""

    @functools.wraps(command)
    def run(*arguments: Any, **named: Any) -> None:
        guide = _guide_of({name: named.pop(name) for name in _OPTIONS if name in named})
        if guide is not None:
            named["guide"] = guide
        command(*arguments, **named)

    signature = inspect.signature(command)
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=False if name == "json" else None, annotation=annotation)
        for name, annotation in _OPTIONS.items()
    ]
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), *options]
    )
    return run


def _guide_of(given: dict[str, Any]) -> Guide | None:
    """Raises InvalidArgumentError naming the option for a second guide, or a file that cannot be read."""
    wanted = [name for name, value in given.items() if value not in (None, False)]
    if not wanted:
        return None
    name, flag = wanted[0], f"--{wanted[-1].replace('_', '-')}"
    if len(wanted) > 1:
        raise InvalidArgumentError(f"{flag}: an answer has one guide; leave out the others", field=flag)
    match name:
        case "json":
            return Guide(GuideKind.JSON_OBJECT)
        case "regex":
            return Guide(GuideKind.REGEX, given[name])
        case "json_schema":
            return _guide_of_file(GuideKind.JSON_SCHEMA, given[name], flag)
        case _:
            return _guide_of_file(GuideKind.GRAMMAR, given[name], flag)


def _guide_of_file(kind: GuideKind, path: Path, option: str) -> Guide:
    try:
        with path.open("rb") as file:
            # A byte more than a guide may have, so that a huge file named by mistake is refused by its size.
            return Guide(kind, file.read(GUIDE_LIMIT_BYTES + 1).decode())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidArgumentError(f"{option}: {path} cannot be read: {why}", field=option) from None
