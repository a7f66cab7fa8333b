"""The first hour: mistakes are named with a remedy, and hidden actions are reported."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import edgeshard_agent
import pytest
from typer.testing import CliRunner

from edgeshard.cli.commands.site import join
from edgeshard.cli.commands.site.demo import Narrator, has_kernels
from edgeshard.cli.main import app
from edgeshard.domain.deployments.deployment import DeploymentPhase
from edgeshard.domain.errors import FailedPreconditionError
from edgeshard.domain.identity import Principal, Role
from edgeshard.local.user_files import write_client_settings
from edgeshard.proto.v1 import admin_pb2
from tests.support.identities import Identities

pytestmark = pytest.mark.timing

LIBRARY = "libedgeshard_ops.so"


def test_a_deployment_needs_no_source(edgectl: Any, site: Any) -> None:
    assert edgectl("deploy", "tales", "--model", "fairy-tales").exit_code == 0
    (request,) = site.sent(admin_pb2.DeployRequest)
    assert request.spec.source == ""


def test_all_mistakes_are_said_at_once(edgectl: Any, site: Any) -> None:
    result = edgectl(
        "deploy",
        "../x",
        "--concurrency",
        "0",
        "--mode",
        "fast",
        "--layers",
        "a=4",
        "--reserve",
        "a",
    )
    assert (result.exit_code, site.requests) == (2, [])
    for mistake in (
        "--model is missing",
        "NAME '../x'",
        "--concurrency: ",
        "--mode: ",
        "'a=4'",
        "--reserve 'a'",
    ):
        assert result.stderr.count(mistake) == 1, (mistake, result.stderr)
    nothing = edgectl("deploy", "--concurrency", "2")
    assert "NAME is missing" in nothing.stderr and "--model is missing" in nothing.stderr


@pytest.mark.parametrize(
    ("command", "either"),
    [
        (["deploy", "x", "--model", "m", "--source", "a"], ["--quantise", "--quantize"]),
        (
            ["deploy", "x", "--model", "m", "--quantise", "int8"],
            ["--head-quantisation", "--head-quantization"],
        ),
        (["profile", "--model", "fairy-tales"], ["--quantise", "--quantize"]),
    ],
)
def test_both_spellings_are_taken(
    edgectl: Any, site: Any, command: list[str], either: list[str]
) -> None:
    for spelling in either:
        assert edgectl(*command, spelling, "int4").exit_code == 0
    first, second = (
        bytes(str(request), "utf-8")
        for request in site.requests
        if hasattr(request, "operation_id")
    )
    assert b"int4" in first and b"int4" in second


def test_a_url_is_named_as_the_mistake() -> None:
    result = CliRunner().invoke(app, ["get", "nodes", "--coordinator", "http://127.0.0.1:7600/"])
    assert result.exit_code == 2
    assert "is a URL; give HOST:PORT without http://, such as 127.0.0.1:7600" in result.stderr


def test_no_coordinator_says_how_to_start_or_name_one(free_port: int) -> None:
    result = CliRunner().invoke(app, ["get", "nodes", "--coordinator", f"127.0.0.1:{free_port}"])
    assert result.exit_code == 5
    for words in (
        "no coordinator listens there",
        "edgectl serve",
        "edgeshard-coordinator",
        "--coordinator",
    ):
        assert words in result.stderr


def test_a_site_that_is_gone_is_said_with_the_file_that_names_it(
    free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EDGESHARD__CLIENT__PLAINTEXT")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    files = Identities(tmp_path / "site", "mill").of(Role.OPERATOR, "admin")
    gone = f"127.0.0.1:{free_port}"
    write_client_settings(gone, files.key.parent)
    silent = CliRunner().invoke(app, ["get", "nodes"])
    files.cert.unlink()
    deleted = CliRunner().invoke(app, ["get", "nodes"])
    assert (silent.exit_code, deleted.exit_code) == (5, 2)
    for said in (silent.stderr, deleted.stderr):
        for words in (
            str(tmp_path / "config/edgeshard/client.toml"),
            "edgectl join TOKEN --force",
            "--coordinator",
        ):
            assert words in said
    named = CliRunner().invoke(app, ["get", "nodes", "--coordinator", gone, "--plaintext"])
    assert named.exit_code == 5 and "client.toml" not in named.stderr, (
        "nobody named it but the caller"
    )


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["serve", "demo"], "edgectl serve needs the agent, coordinator and gateway extras"),
        (["demo"], "edgectl demo needs the agent and coordinator extras"),
        (["demo", "--serve"], "needs the agent, coordinator and gateway extras"),
    ],
)
def test_all_that_is_not_installed_is_said_before_anything_starts(
    command: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeshard.process.extras.find_spec", lambda name: None)
    monkeypatch.setattr("edgeshard.local.child_daemons.ChildDaemon.start", None)
    result = CliRunner().invoke(app, command)
    assert (result.exit_code, says in result.stderr) == (1, True), result.stderr


def test_a_token_is_not_used_up_where_the_agent_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "edgeshard.process.extras.find_spec", lambda name: None if name == "torch" else name
    )
    monkeypatch.setattr("edgeshard.cli.commands.site.join._enrol_once", None)
    token: Any = SimpleNamespace(principal=Principal("mill", Role.AGENT, "b"))
    with pytest.raises(FailedPreconditionError, match="edgectl join needs the agent extra"):
        join._join_here(token, None, None, {})


@pytest.mark.parametrize("listens", [True, False])
def test_a_request_that_is_out_of_time_says_so(site: Any, free_port: int, listens: bool) -> None:
    site.hold_after(1)
    target = site.address if listens else f"127.0.0.1:{free_port}"
    seconds = "0.4" if listens else "0"
    command = ["generate", "tales", "--prompt", "x", "--timeout", seconds, "--coordinator", target]
    result = CliRunner().invoke(app, command)
    assert (result.exit_code, f"did not finish within {seconds} s" in result.stderr) == (6, True), (
        result.stderr
    )


def test_ctrl_c_in_deploy_says_what_goes_on_and_how_to_end_it(site: Any) -> None:
    site.states = [site.deployment_in(DeploymentPhase.LOADING)]
    deploy = ["--coordinator", site.address, "deploy", "tales", "--model", "fairy-tales"]
    # If the tests run in the background, their parent had them ignore SIGINT.
    listening = ["env", "--default-signal=INT", sys.executable, "-m", "edgeshard.cli.main", *deploy]
    with subprocess.Popen(listening, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        try:
            assert process.stderr.readline() == b"tales: loading\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
            said = process.stderr.read().decode()
        finally:
            process.kill()
    assert (
        "tales continues to load" in said
        and "edgectl delete deployment tales" in said
        and "Traceback" not in said
    )


def test_the_demo_has_no_colours_where_none_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        "edgeshard.cli.commands.site.demo.typer.echo", lambda text, **_: said.append(text)
    )
    for wanted, coloured in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", wanted)
        said.clear()
        Narrator(0.0).say("hello")
        assert ("\x1b[" in "".join(said)) is coloured


def test_the_demo_says_that_it_runs_without_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert has_kernels() == any(
        (Path(place) / "ops" / LIBRARY).exists() for place in edgeshard_agent.__path__
    )
    for directory in ("bare", "whole"):
        (tmp_path / directory / "ops").mkdir(parents=True)
    (tmp_path / "whole" / "ops" / LIBRARY).touch()
    for directory, has in (("bare", False), ("whole", True)):
        found = SimpleNamespace(submodule_search_locations=[str(tmp_path / directory)])
        monkeypatch.setattr("importlib.util.find_spec", lambda _, found=found: found)
        assert has_kernels() is has
