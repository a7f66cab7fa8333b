"""The process that renders chat templates and tokenises; it ends when a template takes too much.

Requests are lines of JSON on its standard input, each with the bytes of its `parts` behind it; answers are such lines
on its standard output, with the bytes behind a line that it says (`binary`). One is done after the other.
`edgeshard.chat.lane` is the other end. The argument is added to the process's niceness.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgeshard.chat.model import ChatModel
from edgeshard.domain.chat import Conversation
from edgeshard.domain.errors import EdgeShardError, InternalError

RENDER_LIMIT_S = 0.5
"""Of processor time for one prompt; the longest real ones take some hundredths of it."""
RENDER_LIMIT_BYTES = 384 << 20
"""That the process may grow by meanwhile."""
LOAD_LIMIT_S = 30.0
"""Of processor time for a model's files."""
TOKENISE_LIMIT_S = 10.0
"""Of processor time for a prompt's tokens, or their text; the longest prompts take some two seconds."""
MODELS_KEPT = 4
"""With their tokenizers, each up to some hundred MB."""
_TOKEN_TYPE = "I"
"""Of `array`, as the other end has it."""

Answer = tuple[dict[str, Any], bytes]


class Worker:
    """Answers requests about models, the newest of which it keeps."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, ChatModel] = OrderedDict()

    def answer(self, request: Mapping[str, Any], parts: Mapping[str, bytes]) -> Answer:
        """Raises EdgeShardError."""
        with limited_time(LOAD_LIMIT_S):
            model = self._model(request["model"], request["files"])
        match request["do"]:
            case "prompt":
                said = {name: _text(parts[name]) for name in ("messages", "tools", "variables")}
                with limited_memory(), limited_time(RENDER_LIMIT_S):
                    conversation = Conversation(**said, generation_prompt=request["generation_prompt"])
                    text, answer_format = model.render(conversation)
                with limited_time(TOKENISE_LIMIT_S):
                    model.check_fits(text, request["max_context"], "messages")
                    tokens = model.tokenize(text, special=False)
                return {"format": asdict(answer_format), "defaults": asdict(model.defaults)}, _packed(tokens)
            case "tokenize":
                text = _text(parts["text"])
                with limited_time(TOKENISE_LIMIT_S):
                    model.check_fits(text, request["max_context"], "prompt")
                    return {}, _packed(model.tokenize(text, request["special"]))
            case "detokenize":
                with limited_time(TOKENISE_LIMIT_S):
                    return {}, model.detokenize(_tokens(parts["tokens"])).encode()
            case "texts":
                with limited_time(TOKENISE_LIMIT_S):
                    return {}, json.dumps(model.texts(_tokens(parts["tokens"]))).encode()
        raise InternalError(f"the chat worker cannot {request['do']}")

    def _model(self, digest: str, paths: Mapping[str, str]) -> ChatModel:
        model = self._models.pop(digest, None)
        if model is None:
            model = ChatModel.from_files({name: Path(path).read_bytes() for name, path in paths.items()})
        self._models[digest] = model
        while len(self._models) > MODELS_KEPT:
            self._models.popitem(last=False)
        return model


@contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """End this process where what is inside takes more processor time.

    The kernel watches: one operation of a template can take forever, and nothing in the interpreter would interrupt it.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@contextmanager
def limited_memory() -> Iterator[None]:
    """What is inside gets MemoryError beyond `RENDER_LIMIT_BYTES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    # Where a service may not choose, its own limit holds.
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + RENDER_LIMIT_BYTES, hard))
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _packed(tokens: tuple[int, ...]) -> bytes:
    return array(_TOKEN_TYPE, tokens).tobytes()


def _tokens(data: bytes) -> array[int]:
    tokens = array(_TOKEN_TYPE)
    tokens.frombytes(data)
    return tokens


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def main() -> None:
    """Serve until standard input ends."""
    os.nice(int(sys.argv[1]))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    worker = Worker()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        parts = {name: sys.stdin.buffer.read(size) for name, size in request["parts"].items()}
        values, data = _answer(worker, request, parts)
        sys.stdout.buffer.write(json.dumps({**values, "binary": len(data)}).encode() + b"\n" + data)
        sys.stdout.buffer.flush()


def _answer(worker: Worker, request: Mapping[str, Any], parts: Mapping[str, bytes]) -> Answer:
    try:
        return worker.answer(request, parts)
    except EdgeShardError as error:
        failure = error
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # A panic of the tokenizer's library is no Exception.
        # Not its text: it could quote the messages.
        failure = InternalError(f"the model's tokenizer or chat template failed: {type(error).__name__}")
    said = {"code": int(failure.code), "message": failure.message, "field": failure.field, "reason": failure.reason}
    return {"error": said}, b""


if __name__ == "__main__":
    main()
