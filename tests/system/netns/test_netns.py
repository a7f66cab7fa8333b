"""A site over mTLS and slow links, each node in a network namespace of its own: same tokens, and no
strangers."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from edgeshard.domain.identity import Role
from tests.support.identities import trusting_both
from tests.system.netns.processes import wait_until

pytestmark = pytest.mark.netns

NEW_TOKENS = 24
LONG = 620
# (first word, step) of each prompt, and its length in tokens; the long one is more than one prefill
# step.
PROMPTS = {(1, 7): 1, (3, 11): 5, (90, 17): 33, (8, 29): LONG}
WIDTH_BYTES = 640 * 4
AGENTS = ("a", "b", "c")


def ids_of(first: int, step: int, length: int) -> list[int]:
    return [(first + index * step + index * index // 3) % 96 for index in range(length)]


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> list[tuple[list[int], list[int]]]:
    """Prompt ids and the greedy tokens of the unsplit model in float32, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    made = []
    for (first, step), length in PROMPTS.items():
        ids = ids_of(first, step, length)
        output = model.generate(
            torch.tensor([ids]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        for logits in output.logits:
            best = logits[0].topk(2).values
            assert best[0] - best[1] >= 2e-4, "two tokens are as good as equal: take another prompt"
        made.append((ids, output.sequences[0, len(ids) :].tolist()))
    return made


@pytest.mark.long
def test_slow_mtls_links_give_the_unsplit_models_tokens(
    site: Any, deployment: Any, reference: Any
) -> None:
    """All prompts at once, from a node of its own."""
    # Nodes measure their links by themselves once the site is quiet; that traffic must not be
    # counted here.
    wait_until(
        lambda: not any(node["unknown_links"] for node in site.ask("get", "nodes")),
        90,
        lambda: "links stay unknown",
    )
    before = {name: site.network.shaped(name) for name in AGENTS}
    running = []
    for ids, _ in reference:
        prompt = " ".join(f"w{token}" for token in ids)
        options = (
            "--prompt",
            prompt,
            "--max-tokens",
            str(NEW_TOKENS),
            "--temperature",
            "0",
            "-o",
            "json",
        )
        running.append(site.edgectl("generate", "wide", *options))
    for command, (ids, tokens) in zip(running, reference, strict=True):
        ended = command.wait(90)
        assert ended.exit_code == 0, ended.stderr
        answer = json.loads(ended.stdout)
        assert (answer["prompt_token_ids"], answer["token_ids"]) == (ids, tokens)
        assert answer["text"].split() == [f"w{token}" for token in tokens]
        assert [(stage["node"], stage["layers"]) for stage in answer["placement"]] == [
            ("a", "0:1"),
            ("b", "1:3"),
            ("c", "3:4"),
        ]
    activations = sum(len(ids) + NEW_TOKENS - 1 for ids, _ in reference) * WIDTH_BYTES
    for name in AGENTS:
        after = site.network.shaped(name)
        sent = after.sent_bytes - before[name].sent_bytes
        # The first two nodes pass activations on; the last sends tokens only.
        assert sent >= activations if name != "c" else 0 < sent < activations / 4, (
            name,
            sent,
            activations,
        )
        if name != "c":
            assert after.delayed > before[name].delayed, (
                f"nothing of {name} had to wait: the link is not slow"
            )


def test_every_node_is_known_by_its_own_address(site: Any, deployment: Any) -> None:
    nodes = {node["name"]: node["address"] for node in site.ask("get", "nodes")}
    assert nodes == site.agents
    for name, address in nodes.items():
        assert address.rpartition(":")[0] == site.network.address(name)
        assert {device["ifname"] for device in site.network.devices(name)} == {"lo", "eth0"}


@pytest.mark.parametrize(
    "trusts_the_site", [False, True], ids=["wrong-ca", "certificate-of-wrong-ca"]
)
def test_a_client_of_another_authority_is_refused(
    site: Any, deployment: Any, trusts_the_site: bool
) -> None:
    """It may change nothing either: the deployment it tries to delete continues."""
    before = site.state()
    assert [phase for _, phase, _ in before[1]] == ["ready"]
    tls = strangers_tls(site, f"client-{trusts_the_site}", trusts_the_site)
    ended = site.launcher.edgectl(
        "operator", site.coordinator, tls, "delete", "deployment", "wide"
    ).wait(90)
    assert (
        ended.stdout == ""
        and ended.stderr.startswith("error: ")
        and site.coordinator in ended.stderr
    )
    if trusts_the_site:
        # The coordinator hangs up after the client's side of the handshake is done; gRPC does not
        # say why.
        assert ended.exit_code in (4, 5), ended.stderr
    else:
        assert ended.exit_code == 4, ended.stderr
        assert "TLS" in ended.stderr and "--tls-ca" in ended.stderr
    assert site.state() == before


def test_a_client_without_tls_is_refused_before_it_dials(site: Any) -> None:
    ended = site.launcher.edgectl("stranger", site.coordinator, None, "get", "nodes").wait(90)
    assert (ended.exit_code, ended.stdout) == (4, "")
    assert "coordinator" in ended.stderr and "--tls-ca" in ended.stderr
    assert site.network.shaped("stranger").packets == 0


@pytest.fixture(scope="module")
def intruders(site: Any) -> dict[str, tuple[Any, Path]]:
    """Agents that must be refused, by their fault: process and ready file. All at once, torch is
    slow."""
    options = ("--name", "d", "--listen", f"{site.network.address('operator')}:0", "--threads", "1")
    coordinator = ("--coordinator", site.coordinator)
    wrong_ca, wrong_certificate = (
        strangers_tls(site, f"agent-{trusts}", trusts) for trusts in (False, True)
    )
    start = site.launcher.daemon
    return {
        "wrong-ca": start("operator", "edgeshard_agent", wrong_ca, *options, *coordinator),
        "certificate-of-wrong-ca": start(
            "operator", "edgeshard_agent", wrong_certificate, *options, *coordinator
        ),
        "no-tls": start(
            "operator",
            "edgeshard_agent",
            None,
            "--plaintext",
            *options,
            "--coordinator",
            "127.0.0.1:1",
        ),
    }


@pytest.mark.parametrize(
    "trusts_the_site", [False, True], ids=["wrong-ca", "certificate-of-wrong-ca"]
)
def test_an_agent_of_another_authority_never_registers(
    site: Any, intruders: Any, trusts_the_site: bool
) -> None:
    running, ready = intruders["certificate-of-wrong-ca" if trusts_the_site else "wrong-ca"]
    if trusts_the_site:
        # The coordinator hangs up and gRPC does not say why: the agent may keep trying, and is
        # turned down every time.
        running.wait_for(lambda said: said.count("coordinator_lost") >= 2 or "error: " in said, 90)
    else:
        ended = running.wait(90)
        assert ended.exit_code == 4, ended.stderr
        (error,) = errors_in(ended.stderr)
        assert site.coordinator in error and "TLS" in error and "--tls-ca" in error
    assert {node["name"] for node in site.ask("get", "nodes")} == set(AGENTS)
    running.stop()
    assert not ready.exists()


def test_listeners_answer_nobody_without_a_certificate(site: Any) -> None:
    """Past the library's own checks: bare gRPC clients against every listener. The same call
    succeeds with a certificate.
    """
    names = {site.coordinator: "coordinator.coordinator.site"}
    names |= {address: f"{name}.agent.site" for name, address in site.agents.items()}
    targets = tuple("=".join(pair) for pair in names.items())
    tls = site.tls["operator"]
    trust, pair = ("--trust", str(tls.ca)), ("--cert", str(tls.cert), "--key", str(tls.key))
    script = str(Path(__file__).with_name("bare_client.py"))
    plaintext, anonymous, member = (
        site.launcher.start("operator", script, *options, *targets)
        for options in ((), trust, (*trust, *pair))
    )
    for outsider in (plaintext, anonymous):
        ended = outsider.wait(90)
        answers = json.loads(ended.stdout)
        assert set(answers) == set(targets)
        assert {code for codes in answers.values() for code in codes} == {"UNAVAILABLE"}, answers
    answers = json.loads(member.wait(90).stdout)
    assert [codes[0] for codes in answers.values()] == ["OK"] * len(targets), (
        "the control: health answers members"
    )


def test_a_coordinator_beyond_loopback_without_tls_does_not_start(site: Any) -> None:
    listen = f"{site.network.address('operator')}:0"
    refused_listener(
        *site.launcher.daemon(
            "operator", "edgeshard_coordinator", None, "--plaintext", "--listen", listen
        )
    )


def test_an_agent_beyond_loopback_without_tls_does_not_start(intruders: Any) -> None:
    refused_listener(*intruders["no-tls"])


def refused_listener(running: Any, ready: Path) -> None:
    ended = running.wait(90)
    assert ended.exit_code == 4, ended.stderr
    (error,) = errors_in(ended.stderr)
    assert error.startswith("error: listen ") and "--tls-ca" in error
    assert not ready.exists()


def test_a_network_that_cannot_be_made_leaves_nothing(namespaces: ModuleType) -> None:
    network = namespaces.Network(("one", "two"), "no-such-rate")
    with pytest.raises(namespaces.Refused, match="no-such-rate"), network:
        pytest.fail("tc took a rate that is none")
    assert (
        not {network.namespace(host) for host in ("switch", "one", "two")} & namespaces.existing()
    )


def strangers_tls(site: Any, name: str, trusts_the_site: bool) -> Any:
    """A certificate of the other authority; its holder trusts the site's authority too, or only
    that one."""
    role, id = (Role.AGENT, "d") if name.startswith("agent") else (Role.OPERATOR, "operator")
    tls = site.other_authority.of(role, id)
    return trusting_both(tls, site.tls["operator"]) if trusts_the_site else tls


def errors_in(stderr: str) -> list[str]:
    """The lines meant for the operator, among logs and gRPC's own notes."""
    return [line for line in stderr.splitlines() if line.startswith("error: ")]
