"""A site whose nodes are network namespaces: a coordinator, three agents and an operator, over mTLS
and slow links."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from edgeshard.rpc.tls import TlsFiles
from tests.support.identities import Identities
from tests.system.netns import namespaces as networks
from tests.system.netns import processes

AGENTS = ("a", "b", "c")
# Only one test uses the stranger's node; it counts the packets that leave it.
HOSTS = ("coordinator", *AGENTS, "operator", "stranger")
RATE = "20mbit"
LAYERS = "a=0:1,b=1:3,c=3:4"
MODEL = "wide"
WIDTH = 640
STARTUP_S = 60.0
COMMAND_S = 120.0


@dataclass
class Site:
    """The running site. `tls` holds each host's certificate, `other_authority` is one that the site
    does not trust."""

    network: Any
    launcher: Any
    tls: dict[str, TlsFiles]
    other_authority: Any
    coordinator: str
    agents: dict[str, str]

    def edgectl(self, *arguments: str) -> Any:
        """Start the operator's edgectl."""
        return self.launcher.edgectl("operator", self.coordinator, self.tls["operator"], *arguments)

    def ask(self, *arguments: str) -> Any:
        """Run the operator's edgectl, which must succeed; return its JSON output."""
        ended = self.edgectl(*arguments, "-o", "json").wait(COMMAND_S)
        assert ended.exit_code == 0, ended.stderr
        return json.loads(ended.stdout)

    def state(self) -> tuple[object, object]:
        """An operator's view, without values that change by themselves."""
        nodes = [
            (n["name"], n["node_id"], n["address"], n["connected"])
            for n in self.ask("get", "nodes")
        ]
        deployments = [
            (d["spec"]["name"], d["phase"], d["epoch"]) for d in self.ask("get", "deployments")
        ]
        return sorted(nodes), deployments


@dataclass
class Starting:
    """A site whose agents (process and ready file by name) may not have registered yet."""

    site: Site
    agents: dict[str, tuple[Any, Path]]


@pytest.fixture(scope="module")
def namespaces() -> ModuleType:
    """The helper module, on a machine on which it works; in CI, as root, it has to work."""
    reason = networks.why_impossible()
    if reason is not None:
        if os.geteuid() == 0 and os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return networks


@pytest.fixture(scope="module")
def starting(
    namespaces: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Starting]:
    """The coordinator serves and the agents load torch; everything ends with this fixture."""
    directory = tmp_path_factory.mktemp("netns")
    with namespaces.Network(HOSTS, RATE) as network:
        launcher = processes.Launcher(network, directory)
        try:
            yield _start(network, launcher, directory)
        finally:
            launcher.stop()


def _start(network: Any, launcher: Any, directory: Path) -> Starting:
    authority, other_authority = (Identities(directory / name) for name in ("site", "other"))
    tls = {host: authority.host(host) for host in HOSTS}
    listen = {host: ("--listen", f"{network.address(host)}:0") for host in HOSTS}
    running, ready = launcher.daemon(
        "coordinator", "edgeshard_coordinator", tls["coordinator"], *listen["coordinator"]
    )
    coordinator = processes.address_when_ready(running, ready, STARTUP_S)
    options = ("--coordinator", coordinator, "--threads", "1")
    agents = {
        name: launcher.daemon(
            name, "edgeshard_agent", tls[name], "--name", name, *listen[name], *options
        )
        for name in AGENTS
    }
    return Starting(Site(network, launcher, tls, other_authority, coordinator, {}), agents)


@pytest.fixture(scope="module")
def site(starting: Starting, checkpoint: Path) -> Site:
    """Every agent has registered; no model yet. The checkpoint is made while they start."""
    for name, daemon in starting.agents.items():
        starting.site.agents[name] = processes.address_when_ready(*daemon, STARTUP_S)
    return starting.site


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 4-layer Llama with a hidden state so wide that 512 tokens of it exceed one message.

    Its heads and MLPs are narrow, so that its weights are small. Its words are `w0` to `w95`, one
    token each.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    path = tmp_path_factory.mktemp("models") / MODEL
    LlamaForCausalLM(config).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(96)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def deployment(site: Site, checkpoint: Path) -> Any:
    """The model over the three nodes, as `edgectl deploy` reports it."""
    site.ask("model", "add", str(checkpoint), "--name", MODEL)
    limits = ("--max-context", "1024", "--max-new-tokens", "64", "--concurrency", "4")
    options = (
        "--model",
        MODEL,
        "--layers",
        LAYERS,
        "--dtype",
        "float32",
        *limits,
        "--timeout",
        "100",
    )
    return site.ask("deploy", MODEL, *options)
