"""Joining and leaving as people do it: edgectl in processes of its own, against a coordinator's
real process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import tomllib
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from edgeshard.client.joining import invitation_to_text
from edgeshard.domain.identity import Principal, Role
from edgeshard.local.user_files import AGENT_PORT, AGENT_PORTS
from edgeshard.rpc.tls_files import tls_files
from tests.support.identities import tls_options
from tests.support.membership import READY_S, SecureSite, edgectl

pytestmark = [pytest.mark.timing, pytest.mark.asyncio(loop_scope="module")]
Run = Callable[..., Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mill(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecureSite]:
    async with SecureSite(tmp_path_factory.mktemp("mill")) as site:
        yield site


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """The environment of a user who has joined nothing."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith("EDGESHARD__")
    }
    return clean | {
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }


@pytest.fixture
def run(home: dict[str, str]) -> Run:
    """edgectl of that user."""

    async def call(*arguments: str, stdin: bytes | None = None) -> tuple[int, str, str]:
        return await edgectl(*arguments, environment=home, stdin=stdin)

    return call


@pytest.fixture
def admin(mill: SecureSite, run: Run) -> Run:
    """edgectl of the site's operator."""

    async def call(*arguments: str) -> Any:
        options = [
            "--coordinator",
            mill.coordinator.address,
            *tls_options(mill.identities.of(Role.OPERATOR, "admin")),
        ]
        return await run(*options, *arguments)

    return call


async def serving(home: dict[str, str], line: str, *options: str) -> tuple[Any, str]:
    """The line of `token create` as a process, once its node serves, and its output until then."""
    words = line.split()
    assert words[:2] == ["edgectl", "join"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "edgeshard.cli.main",
        *words[1:],
        *options,
        env=home,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    said = b""
    async with asyncio.timeout(READY_S):
        while b"has joined site" not in said:
            came = await process.stderr.readline()
            assert came, said.decode()
            said += came
    return process, said.decode()


async def ended(process: Any) -> int:
    """With the signal of a supervisor."""
    process.send_signal(signal.SIGTERM)
    await asyncio.wait_for(process.communicate(), READY_S)
    return int(process.returncode)


@pytest.mark.long
async def test_an_agent_that_a_signal_ends_comes_back_where_it_was(
    mill: SecureSite, admin: Run, home: dict[str, str]
) -> None:
    async def told() -> Any:
        (node,) = json.loads((await admin("get", "nodes", "-o", "json"))[1])
        return node

    _, line, _ = await admin("token", "create", "--node", "killed")
    process, _ = await serving(home, line, "--listen", "127.0.0.1:0")
    before = await told()
    (agent,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(agent), signal.SIGKILL)
    said = b""
    async with asyncio.timeout(READY_S):
        while b"killed runs again" not in said:
            said += await process.stderr.readline()
    assert b"killed ended by signal 9: it starts again\n" in said
    after = await told()
    assert after["connected"] and (after["node_id"], after["address"]) == (
        before["node_id"],
        before["address"],
    )
    assert await ended(process) == 0
    assert (await admin("delete", "node", "killed"))[0] == 0


async def test_a_node_joins_by_one_line_and_leaves_by_one(
    mill: SecureSite, admin: Run, home: dict[str, str]
) -> None:
    code, line, said = await admin("token", "create", "--node", "b")
    assert code == 0 and "within 15m" in said
    assert len(line.removeprefix("edgectl join ").strip()) <= 120
    first, _ = await serving(home, line, "--listen", "127.0.0.1:0", "--memory", "1GiB")
    (node,) = json.loads((await admin("get", "nodes", "-o", "json"))[1])
    assert (node["name"], node["connected"], node["facts"]["memory_budget_bytes"]) == (
        "b",
        True,
        1 << 30,
    )
    assert await ended(first) == 0
    # The same line again, although the token was used: the node has its certificate. Another one
    # has its port.
    with ExitStack() as held:
        with suppress(OSError):  # a process of this machine has it
            held.enter_context(socket.create_server(("127.0.0.1", AGENT_PORT)))
        second, _ = await serving(home, line)
    (node,) = json.loads((await admin("get", "nodes", "-o", "json"))[1])
    assert AGENT_PORT < int(node["address"].rpartition(":")[2]) < AGENT_PORT + AGENT_PORTS
    assert (await admin("delete", "node", "b"))[:2] == (0, "node b deleted\n")
    assert await asyncio.wait_for(second.wait(), READY_S) == 4
    assert json.loads((await admin("get", "nodes", "-o", "json"))[1]) == []
    code, _, said = await admin("delete", "node", "b")
    assert code == 3 and "there is no node 'b'" in said


@pytest.mark.long
async def test_an_operator_joins_and_needs_no_options_any_more(
    mill: SecureSite, admin: Run, run: Run, tmp_path: Path
) -> None:
    code, _, said = await run("get", "nodes")
    assert code == 4 and "edgectl join TOKEN" in said
    _, token, _ = await admin("token", "create", "--role", "operator", "--name", "kim", "--quiet")
    code, _, said = await run("join", "-", stdin=token.encode())
    assert code == 0 and "operator kim of site mill" in said, said
    assert (await run("get", "nodes", "-o", "json"))[:2] == (0, "[]\n")
    for path in (tmp_path / "config").rglob("*"):
        assert not path.stat().st_mode & 0o077, path
    assert (await admin("node", "revoke", "kim", "--role", "operator"))[0] == 0
    code, _, said = await run("get", "nodes")
    assert code == 4 and "was revoked" in said


async def test_credentials_are_not_replaced_by_accident(
    mill: SecureSite, admin: Run, run: Run
) -> None:
    tokens = [
        (await admin("token", "create", "--role", "client", "--name", name, "-q"))[1].strip()
        for name in "xy"
    ]
    assert (await run("join", tokens[0]))[0] == 0
    code, _, said = await run("join", tokens[1])
    assert code == 1 and "--force" in said
    assert (await run("join", tokens[1], "--force"))[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((), 2, "--node"),
        (("--role", "coordinator", "--node", "b"), 2, "is none of agent, client, operator"),
        (("--node", "b", "--ttl", "soon"), 2, "ttl 'soon' is not a duration"),
        (("--node", "b", "--ttl", "1s"), 2, "from 10 seconds"),
        (("--node", "../b"), 2, "not a valid name"),
        (("--node", "b", "--host", "a b"), 2, "is not a host"),
    ],
)
async def test_tokens_that_cannot_be(
    admin: Run, arguments: tuple[str, ...], code: int, says: str
) -> None:
    ended, _, said = await admin("token", "create", *arguments)
    assert (ended, says in said) == (code, True), said


@pytest.mark.parametrize("token", ["nonsense", "edgeshard2-AAAA"])
async def test_what_is_no_token_changes_nothing(run: Run, token: str, tmp_path: Path) -> None:
    code, _, said = await run("join", token)
    assert code == 2 and "edgectl token create" in said
    assert not (tmp_path / "config").exists() and not (tmp_path / "state").exists()


async def test_a_token_that_was_used_says_so(
    mill: SecureSite, admin: Run, run: Run, home: dict[str, str]
) -> None:
    async with mill.client_of() as operator:
        text = invitation_to_text((await operator.create_token(Role.CLIENT, "z")).invitation)
    assert (await run("join", text))[0] == 0
    elsewhere = home | {"XDG_CONFIG_HOME": home["XDG_CONFIG_HOME"] + "-elsewhere"}
    code, _, said = await edgectl("join", text, environment=elsewhere)
    assert code == 4 and "was used already" in said


async def test_a_token_is_listed_and_revoked(
    mill: SecureSite, admin: Run, run: Run, tmp_path: Path
) -> None:
    async with mill.client_of(name="eva") as operator:
        token = await operator.create_token(Role.AGENT, "listed")
        text = invitation_to_text(token.invitation)
    code, printed, _ = await admin("token", "list", "-o", "json")
    (found,) = (each for each in json.loads(printed) if each["token_id"] == token.token_id)
    named = found["role"], found["id"], found["creator"]
    assert code == 0 and named == ("agent", "listed", "operator/eva")
    assert found["expires_at"] == pytest.approx(found["created_at"] + 900.0)
    _, table, _ = await admin("token", "list")
    assert table.splitlines()[0].split() == ["ID", "ROLE", "NAME", "CREATED", "EXPIRES", "BY"]
    (row,) = (line for line in table.splitlines() if line.startswith(token.token_id))
    assert row.split()[1:3] == ["agent", "listed"] and row.endswith("operator/eva")
    for shown in (printed, table):
        assert (
            token.secret.hex() not in shown and text.removeprefix("edgeshard2-")[-20:] not in shown
        )
    assert (await admin("token", "revoke", token.token_id))[0] == 0
    code, _, said = await run("join", text)
    assert code == 4 and "the token is unknown here" in said
    assert not (tmp_path / "config").exists()
    for unknown in (token.token_id, text):
        code, _, said = await admin("token", "revoke", unknown)
        assert code == 3 and "edgectl token list" in said and text not in said
    async with mill.client_of() as operator:
        entries = await operator.audit()
    revoked = [entry.target for entry in entries if entry.what == "RevokeToken"]
    assert set(revoked) == {token.token_id}, "a token's text is not sent"


SERVICE = """
import os, sys
from pathlib import Path
from edgeshard.cli.commands.site import install, join
from edgeshard.process import installation
root = Path(sys.argv.pop(1))
install.MACHINE = root
install._RUNS_SYSTEMD = root
join._SERVICE_FILES = root / "etc/edgeshard/agent-pki"
installation.check_visible = lambda path: None  # the tests' own programs may lie anywhere
os.geteuid = lambda: 0
from edgeshard.cli.main import main
main()
"""


async def test_as_root_under_systemd_the_same_line_installs_a_service(
    mill: SecureSite, admin: Run, home: dict[str, str], tmp_path: Path
) -> None:
    """systemd is replaced by two scripts that record their arguments."""
    root, programs = tmp_path / "machine", tmp_path / "bin"
    for directory in (root, programs):
        directory.mkdir()
    for name in ("systemctl", "systemd-sysusers"):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/asked\n')
        (programs / name).chmod(0o755)
    _, token, _ = await admin("token", "create", "--node", "b", "-q")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVICE, str(root), "join", token.strip(), "--memory", "2GiB"),
        env=home | {"PATH": f"{programs}:{home['PATH']}"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await asyncio.wait_for(process.communicate(), READY_S)
    assert process.returncode == 0, said.decode()
    assert "node b runs as edgeshard-agent.service" in said.decode()
    config = tomllib.loads((root / "etc/edgeshard/agent.toml").read_text())["agent"]
    assert (config["name"], config["coordinator"], config["memory"]) == (
        "b",
        mill.coordinator.address,
        "2GiB",
    )
    assert config["listen"] == "127.0.0.1:7610"
    unit = (root / "etc/systemd/system/edgeshard-agent.service").read_text()
    assert (
        f"LoadCredential=key.pem:{root}/etc/edgeshard/agent-pki/key.pem" in unit
        and "--plaintext" not in unit
    )
    files = tls_files(root / "etc/edgeshard/agent-pki")
    files.check()
    assert files.principal() == Principal("mill", Role.AGENT, "b")
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[-2:] == ["systemctl enable edgeshard-agent", "systemctl restart edgeshard-agent"]
