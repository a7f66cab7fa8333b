"""Keys, nodes and join tokens on the dashboard of real sites: an operator's view and actions, and
the audit log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from edgeshard import Client
from edgeshard.domain.deployments.deployment import parse_spec
from tests.support.chat_models import DEMO_MODEL
from tests.support.http import Answer, Http
from tests.support.http_browser import Browser
from tests.support.membership import SecureSite
from tests.support.site import Site

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timing]

GATEWAY = ("--http-listen", "127.0.0.1:0")
SPEC = {"name": "tales", "model": "fairy-tales", "dtype": "float32", "concurrency": 2}
CHAT = {
    "model": "tales",
    "messages": [{"role": "user", "content": "Once"}],
    "max_tokens": 3,
    "temperature": 0,
}


# Over TLS, with nodes that join


@dataclass
class Secured:
    mill: SecureSite
    client: Client
    browser: Browser = field(init=False)

    async def done(self) -> list[tuple[str, str, str, str]]:
        """The entries of the audit log by anna: who, call, target, result."""
        entries = await self.client.audit(50)
        return [
            (one.who, one.what, one.target, one.result)
            for one in entries
            if one.who == "operator/anna"
        ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Secured]:
    """A coordinator without nodes, and anna's browser."""
    async with (
        SecureSite(tmp_path_factory.mktemp("secured"), *GATEWAY) as mill,
        mill.client_of(name="anna") as client,
    ):
        http = Http(mill.coordinator.gateway)
        secured = Secured(mill, client)
        secured.browser = await Browser.of(secured, http)
        yield secured


async def test_a_join_token_is_made_listed_and_revoked(secured: Secured) -> None:
    made = await secured.browser.post("/dashboard/do/join", {"name": "pi"})
    assert made.status == 200, made.body
    assert made.json["line"].startswith("edgectl join edgeshard2-")
    listed = await secured.browser.get("/dashboard/do/tokens")
    (token,) = listed.json["tokens"]
    assert (token["role"], token["name"], token["creator"]) == ("agent", "pi", "operator/anna")
    assert 3500 < token["expires_at"] - token["created_at"] <= 3600
    assert made.json["line"].partition("edgeshard2-")[2] not in listed.body.decode()
    for expected in (200, 404):
        answer = await secured.browser.post("/dashboard/do/revoke-token", {"token_id": token["id"]})
        assert answer.status == expected
    assert "edgectl token list" in answer.error["message"], "the remedy of the command line"
    assert (await secured.browser.get("/dashboard/do/tokens")).json["tokens"] == []
    found = await secured.done()
    assert ("operator/anna", "CreateToken", "pi", "ok") in found
    assert ("operator/anna", "RevokeToken", token["id"], "ok") in found


async def test_each_action_has_a_line_in_the_audit_log_and_no_secret(secured: Secured) -> None:
    made = await secured.browser.post("/dashboard/do/create-key", {"name": "shop", "requests": 2})
    text = made.json["text"]
    await secured.browser.post("/dashboard/do/revoke-key", {"name": "shop"})
    await secured.browser.post("/dashboard/do/remove-node", {"name": "pi", "typed": "pi"})
    await secured.browser.post("/dashboard/do/label", {"name": "pi", "changes": ["zone=hall1"]})
    expected = [("CreateKey", "shop", "ok"), ("RevokeKey", "shop", "ok")]
    expected += [("RemoveNode", "pi", "NOT_FOUND"), ("LabelNode", "pi", "NOT_FOUND")]
    assert [entry[1:] for entry in (await secured.done())[-4:]] == expected
    logs = [
        path.read_text()
        for path in secured.mill.directory.rglob("*")
        if path.suffix in (".log", ".jsonl")
    ]
    assert logs and not any(text in log for log in logs)


async def test_a_new_key_opens_its_models_and_is_shown_once(secured: Secured) -> None:
    body = {"name": "desk", "models": ["tales"], "tokens_per_minute": 1000, "requests": 2}
    made = await secured.browser.post("/dashboard/do/create-key", body)
    key = made.json["text"]
    assert (await Http(secured.mill.coordinator.gateway, key).get("/v1/models")).status == 200
    listed = await secured.browser.get("/dashboard/do/keys")
    (found,) = [one for one in listed.json["keys"] if one["name"] == "desk"]
    assert {name: found[name] for name in body} == body and key not in listed.body.decode()
    assert found["usage"]["requests"] == 0 and found["usage"]["requests_at_once"] == 2
    again = await secured.browser.post("/dashboard/do/create-key", body)
    assert (again.status, again.error["param"]) == (409, "name")
    assert "revoke it first" in again.error["message"]
    assert (await secured.browser.post("/dashboard/do/revoke-key", {"name": "desk"})).status == 200
    assert (await Http(secured.mill.coordinator.gateway, key).get("/v1/models")).status == 401


WRONG: list[tuple[str, Any, str]] = [
    ("create-key", {}, "name"),
    ("create-key", {"name": "not a name"}, "name"),
    ("create-key", {"name": "x", "models": "tales"}, "models"),
    ("create-key", {"name": "x", "models": ["m"] * 65}, "models"),
    ("create-key", {"name": "x", "models": ["not a name"]}, "models"),
    ("create-key", {"name": "x", "requests": 0}, "requests"),
    ("create-key", {"name": "x", "requests": 1.5}, "requests"),
    ("create-key", {"name": "x", "tokens_per_minute": True}, "tokens_per_minute"),
    ("create-key", {"name": "x", "tokens_per_minute": 10**12}, "tokens_per_minute"),
    ("create-key", {"name": "x", "metrics": "yes"}, "metrics"),
    ("revoke-key", {"name": ["x"]}, "name"),
    ("revoke-token", {"token_id": 3}, "token_id"),
    ("label", {"name": "pi"}, "changes"),
    ("label", {"name": "pi", "changes": ["zone"]}, "changes"),
    ("label", {"name": "pi", "changes": ["zone=not a value"]}, "changes"),
    ("label", {"name": "pi", "changes": [f"k{number}=v" for number in range(65)]}, "changes"),
    ("remove-node", {"name": "pi"}, "typed"),
    ("remove-node", {"name": "pi", "typed": "pie"}, "typed"),
    ("join", {"name": ""}, "name"),
    ("join", {"name": {"a": 1}}, "name"),
]


@pytest.mark.parametrize(("what", "body", "field"), WRONG)
async def test_a_value_out_of_its_bounds_is_refused_by_its_name(
    secured: Secured, what: str, body: Any, field: str
) -> None:
    before = await secured.client.keys(), await secured.client.open_tokens()
    answer = await secured.browser.post(f"/dashboard/do/{what}", body)
    assert (answer.status, answer.error["param"]) == (400, field), answer.body
    assert (await secured.client.keys(), await secured.client.open_tokens()) == before


async def test_an_api_key_does_none_of_it(secured: Secured) -> None:
    _, text = await secured.client.create_key("reader")
    reader = Browser(Http(secured.mill.coordinator.gateway))
    assert (await reader.enter({"key": text})).status == 200
    answers: list[Answer] = [
        await reader.get(f"/dashboard/do/{what}?name=pi") for what in ("keys", "tokens", "unused")
    ]
    for what in ("create-key", "revoke-key", "label", "remove-node", "revoke-token"):
        answers.append(await reader.post(f"/dashboard/do/{what}", {"name": "reader"}))
    assert {(answer.status, answer.error["code"]) for answer in answers} == {(403, "session_kind")}


# With nodes


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(
    tmp_path_factory: pytest.TempPathFactory, forked_daemons: None
) -> AsyncIterator[Site]:
    """Nodes a, b and c; the deployment tales uses a and b."""
    directory = tmp_path_factory.mktemp("site")
    async with Site(
        directory, models={"fairy-tales": DEMO_MODEL}, coordinator_arguments=GATEWAY
    ) as site:
        await site.client.deploy(parse_spec({**SPEC, "layers": "a=0:6,b=6:12"}))
        yield site


@pytest_asyncio.fixture(loop_scope="module")
async def browser(site: Site) -> Browser:
    return await Browser.of(site, Http(site.cluster.coordinator.gateway))


async def test_usage_of_a_key_is_counted(site: Site, browser: Browser) -> None:
    _, key = await site.client.create_key("counted", tokens_per_minute=5000)
    used = (await Http(browser.http.url, key).post("/v1/chat/completions", CHAT)).json["usage"]
    (found,) = (await browser.get("/dashboard/do/keys")).json["keys"]
    assert found["usage"] == {
        "requests": 1,
        "running": 0,
        "prompt_tokens": used["prompt_tokens"],
        "new_tokens": used["completion_tokens"],
        "tokens_per_minute": 5000,
    }


async def test_labels_are_set_and_removed(site: Site, browser: Browser) -> None:
    set_both = {"name": "c", "changes": ["zone=hall1", "gpu=no"]}
    assert (await browser.post("/dashboard/do/label", set_both)).json == {
        "labels": {"gpu": "no", "zone": "hall1"}
    }
    answer = await browser.post("/dashboard/do/label", {"name": "c", "changes": ["gpu-"]})
    assert answer.json == {"labels": {"zone": "hall1"}}
    assert dict((await site.client.node("c")).labels) == {"zone": "hall1"}


async def test_the_cause_why_a_node_is_unused(site: Site, browser: Browser) -> None:
    causes = (await browser.get("/dashboard/do/unused?name=c")).json["causes"]
    assert (
        "by hand" in causes["tales"]["why"]
        and causes["tales"]["line"] == "edgectl describe deployment tales"
    )
    assert (await browser.get("/dashboard/do/unused?name=a")).json == {"causes": {}}
    missing = await browser.get("/dashboard/do/unused?name=nowhere")
    assert (missing.status, missing.error["code"]) == (404, "not_found")
    await site.client.deploy(parse_spec({**SPEC, "name": "planned", "exclude": ["a", "b"]}))
    for node in ("a", "b"):
        causes = (await browser.get(f"/dashboard/do/unused?name={node}")).json["causes"]
        assert f"--exclude {node}" in causes["planned"]["why"]
    await site.client.delete_deployment("planned")


async def test_a_plan_names_the_cause(site: Site, browser: Browser) -> None:
    """The demo model fits one node, and the planner takes as few as it needs."""
    placed = await site.client.deploy(parse_spec({**SPEC, "name": "planned"}))
    used = {stage.node_name for stage in placed.placement.stages}
    (node, *_) = {"a", "b", "c"} - used
    cause = (await browser.get(f"/dashboard/do/unused?name={node}")).json["causes"]["planned"]
    assert next(iter(used)) in cause["why"] and cause["line"].startswith(
        "edgectl replan planned"
    ), cause
    await site.client.delete_deployment("planned")


async def test_a_removed_node_leaves_and_its_layers_move(site: Site, browser: Browser) -> None:
    placed = await site.client.deploy(parse_spec({**SPEC, "name": "moving", "exclude": ["a"]}))
    removed = str(placed.placement.stages[0].node_name)
    body = {"name": removed, "typed": removed}
    assert (await browser.post("/dashboard/do/remove-node", body)).status == 200
    assert removed not in {node.name for node in await site.client.nodes()}

    async def has_moved() -> bool:
        found = await site.client.deployment("moving")
        return found.phase == "ready" and all(
            stage.node_name != removed for stage in found.placement.stages
        )

    await site.until(has_moved)
    again = await browser.post("/dashboard/do/remove-node", body)
    assert (again.status, again.error["code"]) == (404, "not_found")
