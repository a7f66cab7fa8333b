"""Shared parts of several packages' tests."""

from __future__ import annotations

import gc
import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import hypothesis
import pytest

from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.nodes.profile import (
    ComputeProfile,
    LayerKind,
    LayerProfile,
    MemoryProfile,
    Sample,
    StepOverhead,
    config_hash,
)
from edgeshard.planning.inputs.shapes import model_from_config
from tests.support import forms
from tests.support.nursery import forking_daemons

# Sites of tests use plaintext unless a test sets otherwise, and this user's own site is not read.
for section in ("CLIENT", "AGENT", "COORDINATOR"):
    os.environ[f"EDGESHARD__{section}__PLAINTEXT"] = "true"
# no directory can be there
os.environ["XDG_CONFIG_HOME"] = os.environ["XDG_STATE_HOME"] = os.devnull
# The processes of tests outnumber the cores: threads that wait for the other part of an operator
# take them from all.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ("tests.support.stores",)

ROOT = Path(__file__).parent
LONG_ROOMS = ("simulator", "chaos", "system", "house", "planning")
"""Their files take up to minutes each."""
MEMORY_LIMITS = resource.getrlimit(resource.RLIMIT_AS)
TIMING_ROOMS = ("chaos", "system")
"""All their tests use processes and clocks."""

# A failure in `make test` fails again the next time; the long form uses other examples each time.
# Examples have no time limit, so that a machine with other work fails none of them.
hypothesis.settings.register_profile("same", derandomize=True, max_examples=50, deadline=None)
hypothesis.settings.register_profile("other", deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        help="the long forms too, and other random examples each time",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before a test module is imported, whose own settings start from these."""
    # A shell that begins the tests in the background has them ignore it, and whatever they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    forms.LONG = config.getoption("--long")
    os.environ.setdefault(forms.DAY, str(int(time.time() // 86_400)))
    hypothesis.settings.load_profile("other" if forms.LONG else "same")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long forms only if asked for; long files first, so that at the end no core waits for the last
    of them."""
    rooms = {room: place for place, room in enumerate(LONG_ROOMS)}
    for item in items:
        if _room(item) in TIMING_ROOMS or _reads_clock(item):
            item.add_marker(pytest.mark.timing)
    left_out = set(_others_of_families(items))
    if not forms.LONG:
        left_out |= {item for item in items if item.get_closest_marker("long")}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: rooms.get(_room(item), len(rooms)))


def pytest_collection_finish() -> None:
    """Collected tests stay until the end: the garbage collector need not look at a million objects
    again."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """A limit of memory that a test leaves to its process would fail others, long after it."""
    yield
    if (left := resource.getrlimit(resource.RLIMIT_AS)) != MEMORY_LIMITS:
        resource.setrlimit(resource.RLIMIT_AS, MEMORY_LIMITS)
        pytest.fail(f"{item.nodeid} leaves its process a limit of memory: {left}")


def _others_of_families(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """The cases that tests with `one_in(n)` leave out: in the quick form all but one in n, and in
    the long form of the others all but the day's (`forms.DAYS`). Which ones differs from test to
    test, so that together they see every case of a fixture that they share."""
    seen: Counter[str] = Counter()
    for item in items:
        if (marker := item.get_closest_marker("one_in")) is not None:
            test = item.nodeid.partition("[")[0]
            number = seen[test] + crc32(test.encode())
            seen[test] += 1
            if number % marker.args[0] and not (forms.LONG and forms.is_turn(forms.DAYS, number)):
                yield item


def _reads_clock(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and hasattr(item.module, "time")


def _room(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT.parent).parts[1]


@pytest.fixture(scope="module")
def forked_daemons() -> Iterator[None]:
    """A module's `LocalCluster`s have their daemons from the nursery."""
    with forking_daemons():
        yield


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 4-layer Llama in float32 whose logits are far enough apart to compare tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=95,
    )
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def planted_profile(
    config: Mapping[str, Any],
    block_s: float,
    dtype: DType = DType.BFLOAT16,
    fingerprint: str = "f" * 16,
    quantisation: Quantisation | None = None,
) -> ComputeProfile:
    """A profile for any model: a block takes `block_s` for one sequence and hardly more for
    several, everything else next to nothing.
    """

    def layer(kind: LayerKind, parameters: int, layers: int, each_s: float) -> LayerProfile:
        prefill = tuple(
            Sample(n, c, each_s * (1 + n / 64), 0.01, 9) for n in (1, 64, 256) for c in (0, 64)
        )
        decode = tuple(
            Sample(n, c, each_s * (1 + n / 16), 0.02, 9) for n in (1, 4, 8) for c in (64, 256)
        )
        return LayerProfile(kind, parameters, layers, 0, 1 << 24, prefill, decode)

    model = model_from_config("planted", config)
    kind = LayerKind.MOE_BLOCK if model.blocks[0].experts else LayerKind.BLOCK
    return ComputeProfile(
        fingerprint=fingerprint,
        model_hash=config_hash(config),
        dtype=dtype,
        device="cpu",
        threads=1,
        layers=(
            layer(LayerKind.EMBEDDING, model.embedding_parameters, 1, 1e-6),
            layer(kind, model.blocks[0].parameters, model.layer_count, block_s),
            layer(LayerKind.HEAD, model.head_parameters, 1, 1e-5),
        ),
        overhead=StepOverhead(1e-4, 1e-9, 0.05),
        memory=MemoryProfile(8 << 30, 6 << 30, 300 << 20, False),
        quantisation=quantisation,
    )


@pytest.fixture(scope="session")
def make_profile() -> Callable[..., ComputeProfile]:
    return planted_profile


@pytest.fixture
def tiny_config() -> dict[str, Any]:
    """The config.json of a Llama of six small layers."""
    return {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
