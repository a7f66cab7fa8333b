"""The imports of the bare library: nothing heavy, so that help and version are quick on any
machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from edgeshard.cli.main import COMMANDS, Lazy

HEAVY = ("torch", "transformers", "ortools", "fastapi", "grpc", "google.protobuf", "numpy")
OWN_AT_START = {
    "edgeshard",
    "edgeshard.cli",
    "edgeshard.cli.connect",
    "edgeshard.cli.main",
    "edgeshard.cli.usage",
} | {*("edgeshard.domain", "edgeshard.domain.errors", "edgeshard.rpc", "edgeshard.rpc.environment")}
"""Modules of EdgeShard that the list of commands needs."""

PROGRAM = """
import json, sys
try:
    {statement}
except SystemExit as end:
    assert not end.code, end.code
print("MODULES", json.dumps(sorted(sys.modules)))
"""


def modules_after(statement: str) -> tuple[set[str], str]:
    program = PROGRAM.format(statement=statement)
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    text, _, modules = output.stdout.partition("MODULES")
    return set(json.loads(modules)), text


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["version"],
        ["deploy", "--help"],
        ["get", "nodes", "--help"],
        ["demo", "--help"],
        ["profile", "--help"],
        ["trace", "--help"],
    ],
)
def test_help_and_version_load_nothing_heavy(arguments: list[str]) -> None:
    modules, text = modules_after(f"import edgeshard.cli.main as m; m.app({arguments!r})")
    assert not modules & set(HEAVY)
    assert text.strip()


@pytest.mark.parametrize("arguments", [["--help"], ["version"]])
def test_the_list_of_commands_imports_none_of_them(arguments: list[str]) -> None:
    modules, _ = modules_after(f"import edgeshard.cli.main as m; m.app({arguments!r})")
    assert {name for name in modules if name.partition(".")[0] == "edgeshard"} == OWN_AT_START
    assert not modules & {"rich", "yaml"}


def test_a_command_imports_no_other() -> None:
    modules, _ = modules_after("import edgeshard.cli.main as m; m.app(['get', 'nodes', '--help'])")
    commands = {command.place.partition(":")[0] for command in COMMANDS}
    assert modules & commands == {"edgeshard.cli.commands.deployments.get"}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_list_says_what_the_command_itself_says(command: Lazy) -> None:
    assert command.load().get_short_help_str(200) == command.get_short_help_str(200)


def test_import_edgeshard_loads_nothing_heavy() -> None:
    assert not modules_after("import edgeshard; edgeshard.WIRE_VERSION")[0] & set(HEAVY)


def test_the_errors_of_the_sdk_are_there_without_anything_heavy() -> None:
    modules, _ = modules_after(
        "from edgeshard import errors; assert issubclass(errors.NotFoundError, Exception)"
    )
    assert not modules & set(HEAVY)


def test_the_client_is_there_on_first_use_without_torch() -> None:
    modules, _ = modules_after(
        "from edgeshard import Client, SyncClient; assert Client and SyncClient"
    )
    assert "grpc" in modules and not modules & {"torch", "transformers", "ortools", "fastapi"}


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    import edgeshard

    with pytest.raises(AttributeError, match="Clinet"):
        edgeshard.Clinet  # noqa: B018


def test_help_fits_in_80_columns_and_names_every_command() -> None:
    _, text = modules_after("import edgeshard.cli.main as m; m.app(['--help'])")
    assert max(map(len, text.splitlines())) <= 80
    commands = {
        line.split()[0]
        for line in text.partition("Commands:")[2].splitlines()
        if line.startswith("  ")
    }
    assert {
        "get",
        "describe",
        "deploy",
        "delete",
        "model",
        "generate",
        "version",
        "demo",
        "plan",
        "profile",
    } <= commands


def test_a_client_loads_what_reads_certificates_only_where_it_has_one() -> None:
    modules, _ = modules_after("import edgeshard.client, edgeshard.client.connection")
    assert not {name for name in modules if name.partition(".")[0] == "cryptography"}
