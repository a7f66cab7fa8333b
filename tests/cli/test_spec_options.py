"""A field of a deployment's spec is all that its option needs: flag, key of a file, JSON and row of
the documents."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgeshard.cli.commands.spec_options import KEYS
from edgeshard.domain.deployments.deployment import DeploymentSpec, parse_spec
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.options import option_fields

ROOT = Path(__file__).resolve().parents[2]
FIELDS = """
    patience_s: float = option(
        2.5, "Wait so long for a node.", above=0, high=60, alias="patience_limit"
    )
    rooms: tuple[str, ...] = option((), "Only nodes of this room.", metavar="ROOM")
    spare_bytes: int = option(0, "Memory to spare.", metavar="SIZE", low=0)
    eager: bool = option(False, "Begin at once.")
"""
PROGRAM = """
import importlib.util, json, pathlib, sys

name, fields, toml = "edgeshard.domain.deployments.deployment", *sys.argv[1:]
found = importlib.util.find_spec(name)
source = pathlib.Path(found.origin).read_text()
place = "    @property\\n    def effective_kv_dtype"
assert source.count(place) == 1
module = importlib.util.module_from_spec(found)
sys.modules[name] = module
exec(compile(source.replace(place, fields + "\\n" + place), found.origin, "exec"), module.__dict__)

from typer.testing import CliRunner
from edgeshard.cli.commands.deployments.deploy import spec_of
from edgeshard.cli.main import app
from edgeshard.cli.render.output import plain
from edgeshard.domain.errors import InvalidArgumentError
from tools.draw_architecture import key_table

def spec(file=None, **options):
    try:
        return plain(spec_of(file, options))
    except InvalidArgumentError as error:
        return error.message

named = {"name": "t", "model": "m"}
texts = {"patience_s": 3.0, "rooms": ["attic"], "spare_bytes": "2GiB", "eager": True}
print(json.dumps({
    "help": CliRunner().invoke(app, ["deploy", "--help"]).stdout,
    "default": spec(**named),
    "options": spec(**named, **texts),
    "wrong": spec(**named, patience_s=61.0),
    "file": spec(pathlib.Path(toml)),
    "table": key_table(module.DeploymentSpec),
}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The outcome of a process whose spec has four fields more, and nothing else that knows
    them."""
    toml = tmp_path_factory.mktemp("spec") / "spec.toml"
    toml.write_text(
        'name = "t"\nmodel = "m"\npatience_s = 7.5\nrooms = ["cellar"]\nspare_bytes = 5\neager = '
        "true\n"
    )
    command = [sys.executable, "-c", PROGRAM, FIELDS, str(toml)]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(ended.stdout)


def test_one_field_gives_a_flag_with_help_and_alias(found: Any) -> None:
    shown = " ".join(found["help"].split())
    assert "--patience, --patience-limit SECONDS Wait so long for a node." in shown
    assert "--rooms ROOM Only nodes of this room." in shown
    assert "--spare-bytes SIZE Memory to spare." in shown and "--eager Begin at once." in shown


def test_one_field_gives_a_value_from_options_files_and_its_default_as_json(found: Any) -> None:
    def values(name: str) -> list[Any]:
        return [found[name][key] for key in ("patience_s", "rooms", "spare_bytes", "eager")]

    assert values("default") == [2.5, [], 0, False]
    assert values("options") == [3.0, ["attic"], 2 << 30, True]
    assert values("file") == [7.5, ["cellar"], 5, True]


def test_one_field_holds_its_bounds_under_the_name_of_its_flag(found: Any) -> None:
    assert found["wrong"] == "--patience: input should be less than or equal to 60"


def test_one_field_gives_a_row_of_the_documents(found: Any) -> None:
    assert (
        "| `patience_s` | `--patience SECONDS` | `2.5` | Wait so long for a node. |"
        in found["table"]
    )
    assert "| `eager` | `--eager` | `false` | Begin at once. |" in found["table"]


@pytest.mark.parametrize("name", [name for name, item in KEYS.items() if item.option.constraints])
def test_a_value_out_of_bounds_is_refused_by_its_key(name: str) -> None:
    option = KEYS[name].option
    wrong: list[Any] = (
        [option.low - 1] if option.low is not None else [option.above, float("nan"), float("inf")]
    )
    wrong += [option.high + 1] if option.high is not None else []
    for value in wrong:
        with pytest.raises(InvalidArgumentError) as refused:
            parse_spec({"name": "t", "model": "m", name: value})
        assert refused.value.field == name and refused.value.message.startswith(f"{name}: ")


def test_memory_to_leave_free_is_not_below_0() -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        parse_spec({"name": "t", "model": "m", "reserve": {"a": -1}})
    assert refused.value.field == "reserve.a"


def test_every_field_is_an_option_with_help() -> None:
    assert [item.name for item in option_fields(DeploymentSpec)] == list(
        DeploymentSpec.__match_args__
    )
    assert all(re.fullmatch(r"\w.*\.", item.option.help) for item in option_fields(DeploymentSpec))
