"""A dump of a site at work: it has nothing of what users wrote nor any secret, and it replays to
the state it holds."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from edgeshard_agent.core.node_state import machine as agent_machine
from edgeshard_coordinator.core.machine.apply import machine as coordinator_machine

from edgeshard.debugging.dump import site_document
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.errors import NotFoundError
from edgeshard.domain.identity import Role
from edgeshard.domain.ids import DeploymentName
from edgeshard.rpc.tls import TlsFiles
from tests.support.identities import Identities, tls_options
from tests.support.site import Site

DEMO_MODEL = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"
SPEC = {
    "name": "tales", "model": "fairy-tales", "source": "a", "dtype": "float32", "concurrency": 2,
    "layers": "a=0:6,b=6:12",
}  # fmt: skip
PROMPT = "Once upon a time Zyxomoravian quokkas met a king"
CANARY, SECRET = "Zyxomoravian", "hush-4711-quokka"

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Watched(Site):
    """A site with TLS whose daemons log at debug; `answer` and `tokens` are a request's result."""

    answer: str = ""
    tokens: tuple[int, ...] = ()

    @property
    def files(self) -> TlsFiles:
        return self.identities.of(Role.OPERATOR, "admin")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Watched]:
    directory = tmp_path_factory.mktemp("watched")
    identities = Identities(directory)
    debug = ["--log-level", "debug"]
    os.environ["SITE_PASSWORD"] = SECRET
    try:
        options: dict[str, Any] = {
            "identities": identities,
            "agent_arguments": debug,
            "coordinator_arguments": debug,
        }
        async with Watched(
            directory, ("a", "b"), models={"fairy-tales": DEMO_MODEL}, **options
        ) as watched:
            client = watched.client
            await client.deploy(parse_spec(SPEC))
            done = await client.complete("tales", PROMPT, max_new_tokens=24, ignore_eos=True)
            watched.answer, watched.tokens = done.text, done.prompt_token_ids + done.token_ids
            await client.trace("tales", 0.1)
            with pytest.raises(NotFoundError):
                await client.delete_deployment("none")
            yield watched
    finally:
        del os.environ["SITE_PASSWORD"]


async def taken(site: Watched) -> tuple[str, dict[str, Any]]:
    document = site_document(await site.client.dump(60.0), "now")
    return json.dumps(document), document


async def test_the_dump_replays_to_the_state_of_every_process(site: Watched) -> None:
    _, document = await taken(site)
    assert list(document["nodes"]) == ["a", "b"]
    state = coordinator_machine().state.decode(document["coordinator"]["state"])
    assert state.deployments[DeploymentName("tales")].phase == "ready"
    assert {node.name for node in state.nodes.values()} == {"a", "b"}
    machines: list[tuple[Any, Any]] = [(coordinator_machine(), document["coordinator"])]
    machines += [(agent_machine(), part) for part in document["nodes"].values()]
    for machine, part in machines:
        entries = part["ring"]["entries"]
        replay = machine.replay(part)
        assert not replay.differs and replay.events == len(entries) > 5
        # It is a test only if leaving something out shows.
        kinds = [entry["event"]["type"] for entry in entries]
        mark = kinds.index("StageLoaded" if "StageLoaded" in kinds else "DeployRequested")
        assert machine.replay({**part, "ring": {**part["ring"], "entries": entries[:mark]}}).differs


async def test_the_dump_says_what_runs_there(site: Watched) -> None:
    _, document = await taken(site)
    agent = document["nodes"]["b"]
    assert agent["versions"]["torch"] and document["coordinator"]["versions"]["edgeshard"]
    assert agent["settings"]["name"] == "b" and agent["settings"]["log_level"] == "debug"
    assert agent["process"]["uptime_s"] > 0 and "MainThread" in agent["process"]["threads"]
    refused = [entry for entry in document["coordinator"]["ring"]["entries"] if entry["refused"]]
    assert "DeleteRequested" in {entry["event"]["type"] for entry in refused}


async def test_neither_dump_nor_log_has_anything_of_users_or_secrets(site: Watched) -> None:
    text, _ = await taken(site)
    logs = "".join(path.read_text() for path in site.cluster.directory.glob("*.log"))
    lines = [json.loads(line) for line in logs.splitlines() if line.startswith("{")]
    issued = [line for line in lines if line["event"] == "action_issued"]
    assert {line["command"] for line in issued if line["kind"] == "SendCommand"} == {
        "PrepareStage",
        "ActivateHead",
    }
    assert {line["kind"] for line in issued} >= {
        "SaveDeployment",
        "LoadStage",
        "OpenHead",
        "SendResults",
    }
    assert all(
        (line["deployment"], line["epoch"]) == ("tales", 1) for line in issued if "command" in line
    )
    assert {line["kind"] for line in lines if line["event"] == "event_applied"} >= {
        "HeartbeatsReceived",
        "StageLoaded",
    }
    keys = [line for line in site.files.key.read_text().splitlines() if "-----" not in line]
    ids = [str(token) for token in site.tokens]
    runs = [
        separator.join(ids[i : i + 5])
        for i in range(0, len(ids) - 5, 5)
        for separator in (",", ", ")
    ]
    assert len(ids) > 30 and len(site.answer) > 7 and len(keys) > 1
    for item in (CANARY, site.answer, SECRET, *keys, *runs):
        assert item not in logs and item not in text and json.dumps(item)[1:-1] not in text
    assert "tls_key" in text and str(site.files.key) not in text


async def edgectl(site: Watched, *arguments: str) -> tuple[int | None, str, str]:
    options = ["--coordinator", site.cluster.address, *tls_options(site.files)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "edgeshard.cli.main", *options, "debug", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(120):
        stdout, stderr = await process.communicate()
    return process.returncode, stdout.decode(), stderr.decode()


async def test_edgectl_writes_a_file_for_its_owner_and_replays_it(
    site: Watched, tmp_path: Path
) -> None:
    path = tmp_path / "site.json"
    code, stdout, stderr = await edgectl(site, "dump", "-o", str(path))
    assert code == 0, stderr
    assert "of the coordinator and 2 nodes" in stdout and str(path) in stdout and not stderr
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    code, stdout, stderr = await edgectl(site, "replay", str(path))
    assert code == 0, stderr
    assert [line.split(":")[0] for line in stdout.splitlines()] == [
        "coordinator",
        "node a",
        "node b",
    ]
    assert stdout.count("the state is the same") == 3
    document = json.loads(path.read_text())
    document["nodes"]["b"]["state"]["slots"] = {}
    path.write_text(json.dumps(document))
    code, stdout, _ = await edgectl(site, "replay", str(path))
    assert code == 1 and "node b" in stdout and "differs: state.slots" in stdout


async def test_a_node_that_does_not_answer_is_named(site: Watched, tmp_path: Path) -> None:
    await site.cluster.agents["b"].kill()
    path = tmp_path / "site.json"
    code, stdout, stderr = await edgectl(site, "dump", "-o", str(path))
    assert code == 0 and "of the coordinator and 1 node" in stdout and "node b is missing" in stderr
    document = json.loads(path.read_text())
    assert document["nodes"]["b"]["failure"]["reason"] in ("NODE_AWAY", "NODE_LOST")
    code, stdout, _ = await edgectl(site, "replay", str(path))
    assert code == 0 and stdout.count("the state is the same") == 2
