"""A model whose tokenizer makes gigabytes of a short prompt is not added, and not loaded where it was added before."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from edgeshard_agent.engine.tokenizer import Tokenizer

from edgeshard.chat.model import ChatModel
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


ENCODE = """
import resource, sys
from pathlib import Path
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard_agent.engine.tokenizer import Tokenizer
tokenizer = Tokenizer.load(Path(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    tokenizer.encode("0" * int(sys.argv[2]))
    print("taken")
except InvalidArgumentError as error:
    print(error.reason)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.parametrize(("size", "said"), [(1 << 10, "taken"), (1 << 20, "TEXT_GROWS")])
def test_what_grows_less_takes_only_short_texts(tmp_path: Path, size: int, said: str) -> None:
    """Six doublings are taken; a text of a megabyte would be one of 64, which is 8 GB of memory."""
    path = write_tokenizer(tmp_path / TOKENIZER, **tokenizer_growth.chains(6)["replaced"])
    script = [sys.executable, "-c", ENCODE, str(path), str(size)]
    done = subprocess.run(script, capture_output=True, timeout=60, check=True, text=True)
    answer, megabytes = done.stdout.split()
    assert answer == said and int(megabytes) < 200
