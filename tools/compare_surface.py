"""Compare the surface of two trees, as users and other programs see it: what the newer tree lost
and gained.

    python tools/compare_surface.py OLD_TREE NEW_TREE

A developer runs it after a change that is to keep behaviour. It compares, line by line:

    help      each command of edgectl with its options, as `--help` shows them, and `--help` of both
              daemons
    openapi   the HTTP gateway's routes, and each field of its forms
    metrics   the names of metrics, of the code and of docs/metrics.md, which a test holds to what
              daemons expose
    proto     messages, fields, enums and methods, with their numbers

Each tree is read by its own `.venv/bin/python`, or by this one if it has none. Exits with 1 if
something was lost; a changed text counts as lost and gained.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOMS = ("", "agent", "coordinator")
PACKAGES = ("edgeshard", "agent/edgeshard_agent", "coordinator/edgeshard_coordinator")
DAEMONS = ("edgeshard-agent", "edgeshard-coordinator")
_METRIC = re.compile(r"edgeshard_(?!(?:agent|coordinator)\b)[a-z0-9_]+")


def words_of(text: object) -> str:
    return " ".join(str(text or "").split())


def help_lines() -> Iterator[str]:
    """The lines of the tree that this process imports; the next functions do the same."""
    import typer.main

    from edgeshard.cli.main import app

    yield from _command_lines(typer.main.get_command(app), ("edgectl",))
    for name in DAEMONS:
        out, sys.argv = io.StringIO(), [name, "--help"]
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            importlib.import_module(f"{name.replace('-', '_')}.entry").main()
        yield from (
            f"{name}: {words_of(line)}" for line in out.getvalue().splitlines() if line.strip()
        )


def _command_lines(command: Any, words: tuple[str, ...]) -> Iterator[str]:
    name = " ".join(words)
    yield f"{name}: {words_of(command.help)}"
    for param in command.params:
        named = ", ".join((*param.opts, *param.secondary_opts))
        kind = getattr(getattr(param, "type_descriptor", None), "annotation", None)
        needed = f"{getattr(kind, '__name__', '')}{' required' if param.required else ''}"
        # A default that is made by a function has no text that is the same in two processes.
        shown = (
            param.default if isinstance(param.default, str | int | float | bool | None) else "made"
        )
        meaning = words_of(getattr(param, "help", ""))
        yield words_of(
            f"{name} {named} {param.metavar or ''} {needed} default {shown!r}: {meaning}"
        )
    for inner, listed in getattr(command, "commands", {}).items():
        yield from _command_lines(
            listed.load() if hasattr(listed, "load") else listed, (*words, inner)
        )


def openapi_lines() -> Iterator[str]:
    import fastapi

    made, begin = list[Any](), fastapi.FastAPI.__init__

    def recorded(self: Any, *arguments: Any, **options: Any) -> None:
        made.append(self)
        begin(self, *arguments, **options)

    fastapi.FastAPI.__init__ = recorded  # type: ignore[method-assign]
    importlib.import_module("edgeshard.gateway.app").make_app(None, None)
    for app in made:
        yield from _leaves("", app.openapi())


def _leaves(name: str, value: object) -> Iterator[str]:
    """Each leaf of a JSON value under its path."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(f"{name} {key}", part)
    else:
        yield words_of(f"{name} = {value}")


def metric_lines() -> Iterator[str]:
    page = Path("docs/metrics.md")
    yield from re.findall(
        f"`({_METRIC.pattern})", page.read_text(encoding="utf-8") if page.exists() else ""
    )
    for path in (path for package in PACKAGES for path in Path(package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                name = node.args[0].value
                if isinstance(name, str) and _METRIC.fullmatch(name):
                    yield name


def proto_lines() -> Iterator[str]:
    package = importlib.import_module("edgeshard.proto")
    for module in pkgutil.walk_packages(package.__path__, "edgeshard.proto."):
        if not module.name.endswith("_pb2"):
            continue
        file = importlib.import_module(module.name).DESCRIPTOR
        for message in file.message_types_by_name.values():
            yield from _message_lines(message)
        for enum in file.enum_types_by_name.values():
            yield from _enum_lines(enum)
        for service in file.services_by_name.values():
            for method in service.methods:
                ends = f"{method.input_type.full_name} -> {method.output_type.full_name}"
                yield (
                    f"{method.full_name}: {ends}, streams {method.client_streaming} "
                    f"{method.server_streaming}"
                )


def _message_lines(message: Any) -> Iterator[str]:
    yield message.full_name
    for field in message.fields:
        named = field.message_type or field.enum_type
        kind = named.full_name if named else f"type {field.type}"
        of = field.containing_oneof.full_name if field.containing_oneof else ""
        yield f"{field.full_name} = {field.number} {kind} repeated={field.is_repeated} {of}".strip()
    for inner in message.nested_types:
        yield from _message_lines(inner)
    for enum in message.enum_types:
        yield from _enum_lines(enum)


def _enum_lines(enum: Any) -> Iterator[str]:
    return (f"{enum.full_name}.{value.name} = {value.number}" for value in enum.values)


def tell_surface() -> None:
    """Print the surface of the tree that this process runs in."""
    parts = {
        "help": help_lines,
        "openapi": openapi_lines,
        "metrics": metric_lines,
        "proto": proto_lines,
    }
    print(json.dumps({part: sorted(set(lines())) for part, lines in parts.items()}))


def surface(tree: Path) -> dict[str, set[str]]:
    """Lines of each part. Raises CalledProcessError if the tree's own code fails."""
    python = tree / ".venv/bin/python"
    paths = os.pathsep.join(str(tree / room) for room in ROOMS)
    environment = os.environ | {"PYTHONPATH": paths, "NO_COLOR": "1", "TERM": "dumb"}
    command = [
        str(python) if python.exists() else sys.executable,
        "-P",
        str(Path(__file__).resolve()),
        "--tell",
    ]
    ended = subprocess.run(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return {part: set(lines) for part, lines in json.loads(ended.stdout).items()}


def differences(old: Mapping[str, set[str]], new: Mapping[str, set[str]]) -> list[str]:
    """`- part line` for each line that was lost, `+ part line` for each that was gained."""
    found = []
    for part in old:
        both = [("-", line) for line in old[part] - new[part]] + [
            ("+", line) for line in new[part] - old[part]
        ]
        found += [
            f"{sign} {part} {line}"
            for sign, line in sorted(both, key=lambda item: (item[1], item[0]))
        ]
    return found


def main(arguments: list[str]) -> int:
    if arguments == ["--tell"]:
        tell_surface()
        return 0
    if len(arguments) != 2:
        print("usage: python tools/compare_surface.py OLD_TREE NEW_TREE", file=sys.stderr)
        return 2
    old, new = (surface(Path(tree).resolve()) for tree in arguments)
    found = differences(old, new)
    print("\n".join(found) if found else "nothing was lost or gained")
    lost = sum(line.startswith("-") for line in found)
    counts = ", ".join(f"{len(lines)} of {part}" for part, lines in new.items())
    print(f"{lost} lost, {len(found) - lost} gained; compared: {counts}", file=sys.stderr)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
