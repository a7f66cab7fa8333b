"""The process of a stage's matchers.

A guide is a stranger's text, and the library's time and memory for one know no bound. So each
request to the process has limited processor time, and all together have limited memory. Beyond a
limit the process ends, and with it only the request that it worked on. Others' matchers begin again
in the next one, from the tokens of their answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from edgeshard.chat.serving import limited_time
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.requests.generation import Guide, GuideKind
from edgeshard.storage.forms import TOKENIZER, check_small_file
from edgeshard_agent.guides import guide_messages
from edgeshard_agent.guides.guide_messages import (
    ADVANCE_S,
    ANSWER,
    OPEN_S,
    Advance,
    Close,
    Message,
    Open,
    Setup,
    from_line,
)

SETUP_S = 120.0
"""Processor time."""
MEMORY_BYTES = 1 << 30
"""Limit of address space, in addition to what the tokens take."""
STACK_BYTES = 256 << 20
"""Hardly ever touched: the library recurses once for each rule that names the next, and a text of
the largest size has 16,000 of them."""
MESSAGE_CHARACTERS = 600
NOTHING = "no text satisfies it"
DEAR_S = 0.01
"""A request whose forced tokens took this long to find gets no more: a long text is cut again as a
whole each time."""
MANY_STATES = 50_000
"""States of a lexer, with 1 to 2 kB each; the library's own limit is five times as large."""

_JSON: Any = {"whitespace_pattern": "[ ]?"}
"""A small model tends to write endless white space. A schema's own `x-guidance` goes before."""


class RefusedError(Exception):
    """Why there is no mask."""


class Matchers:
    """The matchers of one stage's requests, by their numbers."""

    def __init__(self) -> None:
        self._tokens: LLTokenizer | None = None
        self._no_tokens = ""
        """Why there are none: every guide is refused with it."""
        self._matchers: dict[int, LLMatcher] = {}
        self._forced: dict[int, list[int] | None] = {}
        """The forced tokens that were found and not drawn yet; None if they are too expensive to
        find."""

    def answer(self, message: Message) -> guide_messages.Path | None:
        """The path that a message requests; None if it requests no path. Raises RefusedError."""
        match message:
            case Setup():
                with limited_time(SETUP_S):
                    self._set_up(message)
                return None
            case Open():
                with limited_time(OPEN_S):
                    return self._open(message)
            case Advance():
                with limited_time(ADVANCE_S):
                    matcher = self._matchers[message.request]
                    for token in message.tokens:
                        matcher.consume_token(token)
                    return self._path(matcher, message)
            case Close():
                self._matchers.pop(message.request, None)
                self._forced.pop(message.request, None)
                return None

    def _set_up(self, setup: Setup) -> None:
        try:
            self._tokens = _tokens(setup)
        except (OSError, InvalidArgumentError) as error:
            self._no_tokens = f"tokenizer.json cannot be read: {type(error).__name__}"
        except ValueError as error:
            self._no_tokens = (
                f"the model's tokenizer is of a kind that guides do not work with: {error}"
            )

    def _path(self, matcher: LLMatcher, message: Open | Advance) -> guide_messages.Path:
        """The masks for the next token and after forced ones; the matcher then returns to its
        former state."""
        masks = [_mask(matcher)]
        forced = self._next_forced(matcher, message)[: message.forced]
        for token in forced[:-1]:
            matcher.consume_token(token)
            masks.append(_mask(matcher))
        if len(masks) > 1:
            matcher.rollback(len(masks) - 1)
        return guide_messages.Path(tuple(masks), tuple(forced))

    def _next_forced(self, matcher: LLMatcher, message: Open | Advance) -> list[int]:
        forced_tokens = self._forced.get(message.request, [])
        if not message.forced or forced_tokens is None or matcher.is_stopped():
            return []
        drawn = list(message.tokens) if isinstance(message, Advance) else []
        rest = forced_tokens[len(drawn) :] if forced_tokens[: len(drawn)] == drawn else []
        if not rest:
            began_s = time.thread_time()
            rest = list(matcher.compute_ff_tokens())
            if time.thread_time() - began_s > DEAR_S:
                self._forced[message.request] = None
                return []
        self._forced[message.request] = rest
        return rest

    def _open(self, message: Open) -> guide_messages.Path:
        if self._tokens is None:
            raise RefusedError(self._no_tokens)
        # verbose ones hold the answer
        limits = LLParserLimits(max_lexer_states=MANY_STATES, verbose_errors=False)
        matcher = LLMatcher(self._tokens, _grammar(message.guide), log_level=0, limits=limits)
        if message.answer and not matcher.is_error():
            matcher.consume_tokens(list(message.answer))
        path = self._path(matcher, message)
        self._matchers[message.request] = matcher
        return path


def _tokens(setup: Setup) -> LLTokenizer:
    if not setup.tokenizer:
        return LLTokenizer("byte")
    data = Path(setup.tokenizer).read_bytes()
    # It must be a JSON object: the library takes any other text for a name.
    check_small_file(TOKENIZER, data)
    return LLTokenizer(data.decode(), n_vocab=setup.vocab_size, eos_token=list(setup.eos_tokens))


def _mask(matcher: LLMatcher) -> bytes:
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        why = matcher.get_error().removesuffix("<non-verbose/>").strip()
        raise RefusedError(NOTHING if why.startswith("NoExtension") else why or NOTHING)
    if not any(mask):
        raise RefusedError(NOTHING)
    return mask


def _grammar(guide: Guide) -> str:
    match guide.kind:
        case GuideKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', _JSON)
        case GuideKind.JSON_SCHEMA:
            try:
                # The library pastes the text into a document of its own.
                json.loads(guide.text)
            except (ValueError, RecursionError) as error:
                raise RefusedError(f"it is not JSON: {error}") from None
            return LLMatcher.grammar_from_json_schema(guide.text, _JSON)
        case GuideKind.REGEX:
            return LLMatcher.grammar_from_regex(guide.text)
        case GuideKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(guide.text)


def _limit_memory() -> None:
    with contextlib.suppress(OSError, ValueError):  # if there is no such file, or no such limit
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        now = pages * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, resource.RLIM_INFINITY))


def _serve(lines: IO[bytes], answers: IO[bytes]) -> None:
    matchers = Matchers()
    for line in lines:
        message, began_s = from_line(line), time.process_time()
        try:
            path = matchers.answer(message)
            if isinstance(message, Setup):
                _limit_memory()
            if path is None:
                continue
            is_path = True
            forced = len(path.forced)
            answer = path.to_bytes()
        except Exception as error:  # the library's own are plain ones
            is_path = False
            forced = 0
            answer = str(error)[:MESSAGE_CHARACTERS].encode("utf-8", "replace")
        # The time of the set-up is charged to no request.
        used_s = time.process_time() - began_s
        answers.write(ANSWER.pack(is_path, used_s, len(answer), forced) + answer)
        answers.flush()


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a dump would hold answers
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the library's prints are no answers
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(sys.stdin.buffer, answers))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
