"""The help of each command: a summary, options that say what they do, examples that run, and exit
codes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from edgeshard_agent.settings import AgentSettings
from edgeshard_coordinator.settings import CoordinatorSettings

from edgeshard.cli.main import Lazy, app, hoist_global_options
from edgeshard.cli.usage import USAGES, CommandUsage, complete
from edgeshard.domain.errors import EXIT_CODES, EdgeShardError

ROOT = typer.main.get_command(app)
FILES = (
    "tales.toml",
    "nodes.toml",
    "lab.toml",
    "agent.toml",
    "site.toml",
    "site.json",
    "site.backup",
)


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Each command that can be run, by its words; a group that runs without a command is one,
    too."""
    for name, listed in group.commands.items():
        command = listed.load() if isinstance(listed, Lazy) else listed
        words = (*path, name)
        if not hasattr(command, "commands") or command.invoke_without_command:
            yield " ".join(words), command
        if hasattr(command, "commands"):
            yield from _commands(command, words)


COMMANDS = dict(_commands(ROOT))


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_summary_examples_and_exit_codes(name: str) -> None:
    command = COMMANDS[name]
    help_text = command.get_help(typer.Context(command, info_name=f"edgectl {name}"))
    assert command.help and command.help[0].isupper()
    assert "\n\n" not in command.help, "one paragraph"
    examples = help_text.partition("Examples:\n")[2].partition("Exit codes:")[0].split("\n")
    assert len([line for line in examples if line.strip().startswith("edgectl ")]) >= 2
    assert "Exit codes: 0 " in help_text


@pytest.mark.parametrize("name", COMMANDS)
def test_each_option_says_what_it_does(name: str) -> None:
    for param in COMMANDS[name].params:
        assert getattr(param, "help", None), f"{name} {param.name}"
        assert param.help[0].isupper() and param.help.rstrip().endswith("."), (
            f"{name} {param.name}: {param.help}"
        )


@pytest.mark.parametrize("line", [line for usage in USAGES.values() for line in usage.examples])
def test_the_examples_are_valid_command_lines(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in FILES:
        (tmp_path / name).touch()
    words = shlex.split(line.partition(" < ")[0])
    if words == ["--version"]:
        return
    words = [
        word for word in hoist_global_options(words) if word not in ("--coordinator", "mill:7600")
    ]
    if line.startswith("set-coordinator"):
        words.insert(1, "mill:7600")
    name = max((name for name in COMMANDS if words[: len(name.split())] == name.split()), key=len)
    COMMANDS[name].make_context(name, words[len(name.split()) :])


def test_the_table_has_no_command_that_does_not_exist() -> None:
    assert set(USAGES) == set(COMMANDS)


def test_the_examples_are_of_their_command() -> None:
    for name, usage in USAGES.items():
        assert len(set(usage.examples)) >= 2
        assert all(line.startswith((name, "--version")) for line in usage.examples), name


def test_a_command_without_examples_cannot_be_loaded() -> None:
    with pytest.raises(KeyError, match="new"):
        complete(COMMANDS["version"], ("new",))


def test_the_exit_codes_are_those_of_the_errors() -> None:
    def below(kind: type[EdgeShardError]) -> Iterator[type[EdgeShardError]]:
        yield kind
        for inner in kind.__subclasses__():
            yield from below(inner)

    assert {kind.exit_code for kind in below(EdgeShardError)} <= set(EXIT_CODES)
    assert CommandUsage(("a", "b")).failed == EXIT_CODES[1]


@pytest.mark.parametrize("kind", [AgentSettings, CoordinatorSettings])
def test_the_daemons_have_examples_and_a_line_for_each_setting(kind: Any) -> None:
    assert kind.summary.endswith(".") and len(kind.examples) >= 2
    known = {"--config", *("--" + name.replace("_", "-") for name in kind.model_fields)}
    for line in kind.examples:
        assert {word for word in line.split() if word.startswith("--")} <= known
    assert all(info.description for info in kind.model_fields.values())
