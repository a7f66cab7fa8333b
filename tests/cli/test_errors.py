"""Exit codes and messages: one for each kind of error, and wrong usage."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
from typer.testing import CliRunner

from edgeshard.cli.main import app, hoist_global_options
from edgeshard.domain import errors

EXIT_CODES = {
    errors.InvalidArgumentError: 2,
    errors.NotFoundError: 3,
    errors.DeniedError: 4,
    errors.UnauthenticatedError: 4,
    errors.UnavailableError: 5,
    errors.DeadlineError: 6,
    errors.AlreadyExistsError: 1,
    errors.ResourceExhaustedError: 1,
    errors.FailedPreconditionError: 1,
    errors.AbortedError: 1,
    errors.InternalError: 1,
    errors.DataLossError: 1,
    errors.CancelledRequestError: 1,
}


def test_the_table_is_complete() -> None:
    assert set(EXIT_CODES) == set(errors.ERROR_BY_CODE.values())


@pytest.mark.parametrize("kind", EXIT_CODES, ids=lambda kind: kind.__name__)
def test_every_error_has_its_exit_code(
    edgectl: Any, site: Any, kind: type[errors.EdgeShardError]
) -> None:
    site.failures["Generate"] = kind("prompt is too long by 7 tokens", field="prompt")
    result = edgectl("generate", "tales", "--prompt", "x", "-o", "json")
    assert result.exit_code == EXIT_CODES[kind]
    assert result.stderr == "error: prompt is too long by 7 tokens\n"
    assert result.stdout == ""


def test_a_retry_hint_is_shown(edgectl: Any, site: Any) -> None:
    site.failures["Generate"] = errors.ResourceExhaustedError("no room", retry_after_s=2.5)
    assert "a retry may succeed in 2.5 s" in edgectl("generate", "tales", "--prompt", "x").stderr


def test_an_unreachable_coordinator_exits_5_quickly() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{taken.getsockname()[1]}"
        began = time.monotonic()
        result = CliRunner().invoke(
            app, ["get", "nodes"], env={"EDGESHARD__CLIENT__COORDINATOR": target}
        )
    assert result.exit_code == 5
    assert f"error: cannot reach {target}" in result.stderr
    assert time.monotonic() - began < 25, "a call that nothing answers takes 30 s"


def test_plaintext_beyond_loopback_exits_4() -> None:
    result = CliRunner().invoke(app, ["--coordinator", "192.0.2.1:7600", "get", "nodes"])
    assert result.exit_code == 4
    assert "--tls-ca" in result.stderr


def test_half_of_the_tls_options_exits_2() -> None:
    result = CliRunner().invoke(app, ["--tls-ca", "ca.pem", "get", "nodes"])
    assert result.exit_code == 2
    assert "--tls-cert is missing" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["get", "cows"],
        ["get", "nodes", "-o", "xml"],
        ["get", "nodes", "--frobnicate"],
        ["describe", "node"],
        ["generate", "tales"],
        ["generate", "tales", "--prompt", ""],
        ["generate", "tales", "--prompt", "x", "--max-tokens", "0"],
        ["generate", "tales", "--prompt", "x", "--temperature", "-1"],
        ["generate", "tales", "--prompt", "x", "--top-p", "2"],
        ["deploy", "tales"],
        ["deploy", "tales", "--model", "m", "--source", "a", "--layers", "a=4"],
        ["deploy", "tales", "--model", "m", "--source", "a", "--dtype", "int7"],
        ["deploy", "../tales", "--model", "m", "--source", "a"],
        ["deploy", "--file", "does-not-exist.toml"],
        ["demo", "--temperature", "-1"],
        ["demo", "--prompt", ""],
        ["generate", "tales", "--prompt", "\udcff"],
        ["generate", "tales", "--prompt", "x", "--stop", "\udcff"],
        ["describe", "node", "\udcff"],
        ["get", "nodes", "--coordinator"],
        ["demo", "--layers", "a=0-4"],
        ["get", "nodes", "--coordinator", "nowhere"],
    ],
)
def test_wrong_usage_exits_2_and_asks_nothing_of_the_site(
    edgectl: Any, site: Any, arguments: list[str]
) -> None:
    result = edgectl(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and result.stderr != ""
    assert site.requests == []


def test_global_options_may_stand_anywhere() -> None:
    hoisted = hoist_global_options(
        ["get", "nodes", "--coordinator", "x:1", "-o", "json", "--tls-ca=f", "--", "--tls-key"]
    )
    assert hoisted == [
        "--coordinator",
        "x:1",
        "--tls-ca=f",
        "get",
        "nodes",
        "-o",
        "json",
        "--",
        "--tls-key",
    ]


def test_a_global_option_after_the_command_wins(site: Any) -> None:
    arguments = [
        "--coordinator",
        "127.0.0.1:1",
        "get",
        "nodes",
        "-o",
        "name",
        "--coordinator",
        site.address,
    ]
    assert CliRunner().invoke(app, arguments).stdout == "a\nb\n"
