"""A model whose tokenizer makes gigabytes of a short prompt cannot be added, and cannot be loaded
if it was added before.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from edgeshard_agent.engine.tokenizer import Tokenizer

from edgeshard.chat.chat_model import ChatModel
from edgeshard.domain.errors import DataLossError, InvalidArgumentError
from edgeshard.storage.checkpoint import build_manifest, open_checkpoint
from edgeshard.storage.forms import TOKENIZER
from tests.attack import tokenizer_growth
from tests.support.tokenizers import write_tokenizer

NAMES = tuple(tokenizer_growth.chains())


@pytest.mark.parametrize("name", NAMES)
def test_it_is_not_added(make_checkpoint: Callable[..., Path], name: str) -> None:
    directory = make_checkpoint()
    write_tokenizer(directory / TOKENIZER, **tokenizer_growth.chains()[name])
    with pytest.raises(InvalidArgumentError) as refused:
        build_manifest("grows", open_checkpoint(directory))
    assert refused.value.reason == "TOKENIZER_GROWS" and refused.value.field == TOKENIZER


@pytest.mark.parametrize("name", NAMES)
def test_what_was_added_before_is_not_loaded(tmp_path: Path, name: str) -> None:
    path = write_tokenizer(tmp_path / TOKENIZER, **tokenizer_growth.chains()[name])
    with pytest.raises(DataLossError, match="times as long"):
        Tokenizer.load(path)
    with pytest.raises(InvalidArgumentError, match="times as long"):
        ChatModel.from_files({TOKENIZER: path.read_bytes()})


PROMPTS = """
import asyncio, json, resource, sys
from pathlib import Path
from edgeshard.domain.requests.generation import Generation
from edgeshard.domain.requests.head import RequestAdmitted, StartRequest
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import RequestId
from edgeshard.domain.deployments.placement import Mode
from edgeshard.storage import forms
from edgeshard_agent.engine.pipeline_head import Epoch, Head, HeadLimits
from edgeshard_agent.engine.tokenizer import Tokenizer
from edgeshard_agent.scheduler.batching import Batching
from edgeshard_agent.scheduler.kv_blocks import BlockAllocator
from edgeshard_agent.scheduler.chunking import Chunking
from edgeshard_agent.scheduler.scheduler import Limits, Scheduler

forms._check_growth = lambda values: None  # whatever is found some day that it does not see
tokenizer = Tokenizer.load(Path(sys.argv[1]))
batching = Batching(Mode.NO_BUBBLES, 3, 4, 1)
scheduler = Scheduler(BlockAllocator(16, 16), Limits(64, 8), batching, Chunking(64), frozenset())
said = []

async def main():
    epoch = Epoch(scheduler, lambda step: None, said.append)
    head = Head(epoch, tokenizer, HeadLimits(4, 64, 1 << 20))
    for number, prompt in enumerate(sys.argv[2:]):
        letter, _, count = prompt.partition("*")
        generation = Generation(letter * int(count), 3)
        await head.start_request(StartRequest(RequestId(f"r{number}"), generation))
    await head.close()

def megabytes(whose):
    return resource.getrusage(whose).ru_maxrss >> 10

before = megabytes(resource.RUSAGE_SELF)
asyncio.run(main())
answers = [output.event for output in said if not isinstance(output.event, RequestAdmitted)]
reasons = [answer.reason if isinstance(answer, EdgeShardError) else "taken" for answer in answers]
growth = megabytes(resource.RUSAGE_SELF) - before
print(json.dumps([reasons, growth, megabytes(resource.RUSAGE_CHILDREN)]))
"""


@pytest.mark.parametrize(
    ("doublings", "prompt"),
    [(40, f"0*{len(tokenizer_growth.PROMPT)}"), (6, f"0*{1 << 20}"), (6, f"0*{1 << 17}")],
    ids=["40 doublings", "8 GB", "1.1 GB"],
)
@pytest.mark.one_in(3)
def test_a_text_that_grows_ends_a_process_that_is_not_the_agents(
    tmp_path: Path, doublings: int, prompt: str
) -> None:
    """The file's bound allows adding models with up to six doublings. Their texts become 64 MiB and
    8 MiB, and the library takes 130 bytes for each byte."""
    path = write_tokenizer(tmp_path / TOKENIZER, **tokenizer_growth.chains(doublings)["replaced"])
    script = [sys.executable, "-c", PROMPTS, str(path), prompt, "1*4"]
    done = subprocess.run(script, capture_output=True, timeout=300, check=True, text=True)
    reasons, own, others = json.loads(done.stdout.splitlines()[-1])
    assert reasons == ["TEXT_TOO_COSTLY", "taken"]
    assert own < 100 and others < 450, f"{own} and {others} MB, of which a text may take 256"
