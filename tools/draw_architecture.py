"""Draw what documents take from code: the phases of a deployment, who may import whom, keys,
options and models.

`make drawings` writes all; `--check`, which `make check` runs, writes nothing and fails if a
drawing differs from the code. Phases come from the coordinator's transitions table, import rules
from the layers in `.importlinter`, and keys from the fields of `DeploymentSpec`. Settings come from
the daemons, options from `edgectl plan`, and models from the cards of
`tests/architectures/cards.toml` and the registry's records of them. Fields of HTTP bodies come from
the gateway's classes.
"""

from __future__ import annotations

import configparser
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, replace
from enum import Enum
from pathlib import Path
from typing import Any

import typer
from edgeshard_agent.settings import AgentSettings
from edgeshard_coordinator.core.deployments.transitions import TRANSITIONS, Trigger
from edgeshard_coordinator.settings import CoordinatorSettings
from pydantic import BaseModel

from edgeshard.architectures.model_config import decoder_fields
from edgeshard.chat.messages import MESSAGE_FIELDS
from edgeshard.cli.commands.deployments.plan import plan
from edgeshard.domain.deployments.deployment import DeploymentPhase as Phase
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.errors import UnsupportedModelError
from edgeshard.domain.options import option_fields
from edgeshard.gateway.document import FieldRow, field_rows
from edgeshard.gateway.routes.body_fields import Treatment
from edgeshard.gateway.routes.chat_completions import ChatRequest
from edgeshard.gateway.routes.completions import CompletionRequest
from edgeshard.gateway.routes.ollama import ChatBody, GenerateBody, ShowBody
from edgeshard.gateway.routes.responses import ITEMS, ResponsesRequest
from edgeshard.gateway.routes.texts import DetokenizeRequest, TokenizeRequest
from edgeshard.importing.blocks import Width
from edgeshard.importing.model_sources import Source
from edgeshard.importing.outlook import config_of
from edgeshard.process.config import DaemonSettings, Given, settings_of

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "tests" / "architectures"
DOCUMENTS = {
    "phases": "ARCHITECTURE.md",
    "imports": "ARCHITECTURE.md",
    "keys": "docs/configure.md",
    "agent": "docs/configure.md",
    "coordinator": "docs/configure.md",
    "options": "docs/planning-reference.md",
    "cards": "docs/models.md",
    "openai": "docs/http-fields.md",
    "ollama": "docs/http-fields.md",
    "texts": "docs/http-fields.md",
    "messages": "docs/http-fields.md",
    "items": "docs/http-fields.md",
}
"""The file of each drawing."""


def phase_graph(transitions: Mapping[tuple[Phase, Trigger], Phase]) -> str:
    """A mermaid state diagram with one arrow for each row. A phase that nothing leaves is followed
    by the end."""
    arrows = [
        f"    {phase} --> {after}: {trigger}" for (phase, trigger), after in transitions.items()
    ]
    phases = dict.fromkeys([*(phase for phase, _ in transitions), *transitions.values()])
    last = [phase for phase in phases if all(phase is not before for before, _ in transitions)]
    lines = [
        "stateDiagram-v2",
        f"    [*] --> {Phase.LOADING}",
        *arrows,
        *(f"    {phase} --> [*]" for phase in last),
    ]
    return "```mermaid\n" + "\n".join(lines) + "\n```"


def import_layers(rules: str) -> str:
    """The layers of each container of the text of `.importlinter`, the highest first."""
    config = configparser.ConfigParser()
    config.read_string(rules)
    lines: list[str] = []
    for section in config.values():
        if section.get("type") == "layers" and "containers" in section:
            layers = [
                re.sub(r"\s*([|:])\s*", r" \1 ", layer.strip())
                for layer in section["layers"].strip().splitlines()
            ]
            text = f"{section['containers'].strip()}: {' > '.join(layers)}"
            lines += textwrap.wrap(text, 118, subsequent_indent="    ", break_on_hyphens=False)
    return "```text\n" + "\n".join(lines) + "\n```"


def key_table(owner: type) -> str:
    """A row for each option of a dataclass: its key in a file, its option of a command, its
    default, its help."""
    rows = [
        (
            f"`{item.name}`",
            _shown(item.flags, item.metavar),
            _default_text(item.default),
            item.option.help,
        )
        for item in option_fields(owner)
    ]
    return _table(("key", "option", "default", "meaning"), *rows)


def settings_table(kind: type[DaemonSettings]) -> str:
    """A row for each setting of a daemon, but those that a program passes to the daemon that it
    starts."""
    settings = settings_of(kind, Given({}, {}, {}, None, kind.section))
    rows = [
        (
            f"`{one.key}`",
            "required" if one.required else _default_text(one.default),
            "yes" if one.reloaded else "",
            one.meaning,
        )
        for one in settings
        if one.key not in ("parent", "ready_file")
    ]
    return _table(("key", "default", "reloaded", "meaning"), *rows)


def option_table(command: Callable[..., None]) -> str:
    """A row for each option of a command: its names, its help."""
    app = typer.Typer(add_completion=False)
    app.command()(command)
    items: Any = typer.main.get_command(app).params
    return _table(
        ("option", "meaning"),
        *((_shown(item.opts, item.metavar or ""), item.help) for item in items),
    )


def read_cards() -> list[dict[str, Any]]:
    """The models of cards.toml."""
    models: list[dict[str, Any]] = tomllib.loads(
        (MODELS / "cards.toml").read_text(encoding="utf-8")
    )["models"]
    return models


def refusal(card: Mapping[str, Any]) -> str:
    """Why a model does not run, in the words of `edgectl model add`; empty for one that does.

    Raises ValueError if its model_type runs, but no config.json is there to decide.
    """
    path = MODELS / "published" / f"{card.get('config')}.json"
    try:
        if path.exists():
            config_of(Source(path=path), Width.INT8)
            return ""
        decoder_fields({"model_type": card["model_type"]})
    except UnsupportedModelError as error:
        if path.exists() or error.field == "model_type":
            return error.message.removeprefix("config.json: ").rpartition(" is not supported: ")[2]
    raise ValueError(
        f"{card['original']}: {card['model_type']} runs, so published/ must have its config.json"
    )


def card_table(cards: Sequence[Mapping[str, Any]]) -> str:
    """A row for each model: its repository, how many cards are of it, its model_type, and whether
    it runs.

    A second table has the reasons of those that do not.
    """
    why = {card["original"]: refusal(card) for card in cards}
    reasons = list(dict.fromkeys(text for text in why.values() if text))
    count = sum(card["cards"] for card in cards)
    runs = sum(card["cards"] for card in cards if not why[card["original"]])
    rows = (
        (
            name,
            str(card["cards"]),
            card["model_type"],
            f"no ({reasons.index(why[name]) + 1})" if why[name] else "yes",
        )
        for name, card in ((card["original"], card) for card in cards)
    )
    table = _table(("model", "cards", "model_type", "runs"), *rows)
    legend = _table(
        ("no", "reason"), *((str(number), text) for number, text in enumerate(reasons, 1))
    )
    return f"\n{runs} of {count} cards run.\n{table}{legend}"


def field_table(**forms: type[BaseModel]) -> str:
    """A row for each field of an interface, whose bodies are `forms` by the names of their routes.

    Fields without an effect share a row if they have the same reason.
    """
    names: dict[tuple[str, str, str], list[str]] = {}
    for row in _rows_of(forms):
        is_shared = row.treatment is Treatment.IGNORED and row.meaning
        key = (
            (str(row.treatment), row.values, row.meaning)
            if is_shared
            else (f"`{row.name}`", "", "")
        )
        names.setdefault(key, []).append(row.name)
    first = {row.name: row for row in _rows_of(forms)}
    rows = (
        (", ".join(f"`{name}`" for name in group), *_cells(first[group[0]]))
        for group in names.values()
    )
    return _table(("field", "treatment", "values", "meaning"), *rows)


def _cells(row: FieldRow) -> tuple[str, str, str]:
    return str(row.treatment), row.values, row.meaning


def shared_table(**forms: type[BaseModel]) -> str:
    """A row for each field of several interfaces, with its treatment by each of them, empty if it
    has no such field.

    A field has a second row if an interface gives it other values or another meaning.
    """
    treatments: dict[tuple[str, str, str], dict[str, str]] = {}
    for route, form in forms.items():
        for row in field_rows(form):
            by_route = treatments.setdefault((row.name, row.values, row.meaning), {})
            by_route[route] = str(row.treatment)
    rows = (
        (f"`{name}`", *(by_route.get(route, "") for route in forms), values, meaning)
        for (name, values, meaning), by_route in sorted(
            treatments.items(), key=lambda item: item[0][0]
        )
    )
    return _table(("field", *forms, "values", "meaning"), *rows)


def _rows_of(forms: Mapping[str, type[BaseModel]]) -> list[FieldRow]:
    """The rows of an interface, whose bodies are `forms` by the names of their routes."""
    rows: dict[str, FieldRow] = {}
    routes: dict[str, list[str]] = {}
    for route, form in forms.items():
        for row in field_rows(form):
            rows.setdefault(row.name, row)
            routes.setdefault(row.name, []).append(route)
    for name, row in rows.items():
        named = dict.fromkeys(routes[name])
        if len(named) == 1 < len(forms):
            only = f"of {next(iter(named))} only"
            rows[name] = replace(row, meaning=f"{only}; {row.meaning}" if row.meaning else only)
    return list(rows.values())


def member_table(members: Mapping[str, str], other: str) -> str:
    """A row for each member of a list in a body, and one for all others."""
    rows = ((f"`{name}`", Treatment.ACCEPTED, meaning) for name, meaning in members.items())
    return _table(
        ("member", "treatment", "meaning"), *rows, ("any other", Treatment.IGNORED, other)
    )


def _shown(flags: Sequence[str], metavar: str) -> str:
    """An option by the first of its names, and what stands for its value."""
    return f"`{f'{flags[0]} {metavar}'.strip()}`" if flags else ""


def _table(*rows: Sequence[str]) -> str:
    """The first row is the head."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(
        ["", lines[0], "| " + " | ".join("---" for _ in rows[0]) + " |", *lines[1:], ""]
    )


def _default_text(default: Any) -> str:
    if default is MISSING:
        return "required"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, int | float):
        return f"`{default}`"
    return f"`{default.value if isinstance(default, Enum) else default}`" if default else "none"


def drawings() -> dict[str, str]:
    """Each drawing by the name that its marks in its document have."""
    rules = (ROOT / ".importlinter").read_text(encoding="utf-8")
    return {
        "phases": phase_graph(TRANSITIONS),
        "imports": import_layers(rules),
        "keys": key_table(DeploymentSpec),
        "agent": settings_table(AgentSettings),
        "coordinator": settings_table(CoordinatorSettings),
        "options": option_table(plan),
        "cards": card_table(read_cards()),
        "openai": shared_table(
            chat=ChatRequest, completions=CompletionRequest, responses=ResponsesRequest
        ),
        "ollama": field_table(chat=ChatBody, generate=GenerateBody, show=ShowBody),
        "texts": field_table(tokenize=TokenizeRequest, detokenize=DetokenizeRequest),
        "messages": member_table(MESSAGE_FIELDS, ""),
        "items": member_table(ITEMS, "the item is skipped"),
    }


def with_drawing(text: str, name: str, drawing: str) -> str:
    """The document with `drawing` between its two marks. Raises ValueError when it lacks one."""
    first, last = f"<!-- {name}: drawn by tools/draw_architecture.py -->", f"<!-- end of {name} -->"
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{DOCUMENTS[name]} must hold the lines {first} and {last}")
    return f"{before}{first}\n{drawing}\n{last}{after}"


def main() -> int:
    is_check, wrong = "--check" in sys.argv[1:], 0
    for name, drawing in drawings().items():
        document = ROOT / DOCUMENTS[name]
        text = document.read_text(encoding="utf-8")
        drawn = with_drawing(text, name, drawing)
        if drawn != text and is_check:
            print(
                f"{DOCUMENTS[name]} has other {name} than the code: run `make drawings`",
                file=sys.stderr,
            )
            wrong = 1
        elif drawn != text:
            document.write_text(drawn, encoding="utf-8")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
