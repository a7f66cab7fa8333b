"""What a request's guide allows next: a matcher of llguidance for each, beside the compute thread.

A matcher's state is a function of the answer's tokens, so a request that begins anew somewhere else goes on from them.
The mask behind a token is computed while the next step travels; the compute thread waits only where it is not ready.

A guide is a stranger's text. Its size, the library's own budgets and the stack bound what it can cost; what it is
refused for ends its request alone. Nothing here imports torch.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError
from edgeshard.domain.generation import Guide, GuideKind
from edgeshard.storage.forms import TOKENIZER, check_small_file

if TYPE_CHECKING:
    from llguidance import JsonCompileOptions, LLMatcher, LLTokenizer

Banned = npt.NDArray[np.bool_]
"""[vocab] tokens that must not come next."""

STACK_BYTES = 256 << 20
"""Of a thread that reads guides, most of it never touched: the library recurses once for each rule that names the next,
and a text of the largest size has 16,000 of them."""
WAIT_S = 20.0
"""How long the compute thread waits for a mask: below what is taken for a hanging step."""
MESSAGE_CHARACTERS = 1000

# Half a second at most for a guide, some hundredths for a token; and 100 MB. The library's own are larger.
_INITIAL_FUEL = 500_000
_LEXER_STATES = 50_000

_JSON: JsonCompileOptions = {"whitespace_pattern": "[ ]?"}
"""Blank space without end is what a small model writes most readily. A schema's own `x-guidance` goes before."""

_stack_size = threading.Lock()


class GuideError(Exception):
    """Why a guide led to no token. Holds nothing of the answer."""


class GuideTokens:
    """A model's tokens as matchers know them, made when the first guide comes: of 150,000 tokens that takes a second
    and 100 MB. `read` gives the text of tokenizer.json."""

    def __init__(self, read: Callable[[], bytes], vocab_size: int, eos_tokens: frozenset[int]) -> None:
        self._read = read
        self._vocab_size = vocab_size
        self._eos_tokens = sorted(eos_tokens)
        self._lock = threading.Lock()
        self._tokens: LLTokenizer | None = None

    @classmethod
    def of_file(cls, path: Path, vocab_size: int, eos_tokens: frozenset[int]) -> GuideTokens:
        return cls(path.read_bytes, vocab_size, eos_tokens)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def is_end(self, token: int) -> bool:
        return token in self._eos_tokens

    def get(self) -> LLTokenizer:
        """Raises GuideError where the tokenizer is of a kind that the library does not know."""
        from llguidance import LLTokenizer

        with self._lock:
            if self._tokens is None:
                try:
                    data = self._read()
                    # An object of JSON, as the form says: the library takes any other text for a file's name.
                    check_small_file(TOKENIZER, data)
                    self._tokens = LLTokenizer(data.decode(), n_vocab=self._vocab_size, eos_token=self._eos_tokens)
                except (OSError, EdgeShardError) as error:
                    raise GuideError(f"tokenizer.json cannot be read: {type(error).__name__}") from None
                except BaseException as error:
                    raise _translated(error, "the model's tokenizer cannot be used with guides") from None
            return self._tokens


def check_guide(guide: Guide) -> None:
    """Raise InvalidArgumentError naming `guide` for one that the library refuses, with its reason.

    To be called on a thread of `guide_thread`.
    """
    from llguidance import LLMatcher

    try:
        message = LLMatcher.validate_grammar(_grammar(guide), None, limits=_limits())
    except GuideError as error:
        message = str(error)
    except BaseException as error:
        message = str(_translated(error, "it cannot be read"))
    if message:
        raise InvalidArgumentError(
            f"guide: the {guide.kind} is refused: {message[:MESSAGE_CHARACTERS].strip()}",
            field="guide",
            reason="GUIDE_INVALID",
        )


def guide_thread(name: str) -> ThreadPoolExecutor:
    """One thread with a stack for guides."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    with _stack_size:
        before = threading.stack_size(STACK_BYTES)
        try:
            executor.submit(lambda: None).result()
        finally:
            threading.stack_size(before)
    return executor


class Guided:
    """One request's matcher. `banned` and `advance` take turns, and are called by one thread."""

    def __init__(self, tokens: GuideTokens, guide: Guide, answer: Sequence[int], threads: GuideThreads) -> None:
        self._tokens = tokens
        self._threads = threads
        self._matcher: LLMatcher | None = None
        self._mask: Future[Banned] = threads.builds.submit(self._begin, guide, list(answer))

    def banned(self) -> Banned:
        """For the position behind the answer so far. Raises GuideError where there is no token for it."""
        try:
            return self._mask.result(WAIT_S)
        except FutureTimeoutError:
            raise GuideError(f"it took more than {WAIT_S:g} s for one token: make it simpler") from None

    def advance(self, token: int) -> None:
        """The answer has one token more: compute what may follow it."""
        if not self._tokens.is_end(token):
            self._mask = self._threads.masks.submit(self._consume, token)

    def close(self) -> None:
        self._mask.cancel()

    def _begin(self, guide: Guide, answer: list[int]) -> Banned:
        from llguidance import LLMatcher

        try:
            matcher = self._matcher = LLMatcher(self._tokens.get(), _grammar(guide), log_level=0, limits=_limits())
            if not matcher.is_error() and answer:
                matcher.consume_tokens(answer)
        except GuideError:
            raise
        except BaseException as error:
            raise _translated(error, "it cannot be read") from None
        return self._computed(matcher)

    def _consume(self, token: int) -> Banned:
        matcher = self._matcher
        assert matcher is not None
        matcher.consume_token(token)
        return self._computed(matcher)

    def _computed(self, matcher: LLMatcher) -> Banned:
        try:
            bits = matcher.compute_bitmask()
            failed = matcher.get_error()
        except BaseException as error:
            raise _translated(error, "the library failed") from None
        allowed = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[: self._tokens.vocab_size]
        if failed:
            # Its first line: those behind may tell of the answer.
            raise GuideError(f"no token can follow: {failed.splitlines()[0][:MESSAGE_CHARACTERS]}")
        if not allowed.any():
            raise GuideError("no token can follow")
        banned: Banned = allowed == 0
        return banned


class GuideThreads:
    """Where matchers work. New guides have a thread of their own: no mask waits for them."""

    def __init__(self) -> None:
        self.builds = guide_thread("guide-builds")
        self.masks = guide_thread("guide-masks")

    def close(self) -> None:
        for executor in (self.builds, self.masks):
            executor.shutdown(wait=False, cancel_futures=True)


def _grammar(guide: Guide) -> str:
    from llguidance import LLMatcher

    match guide.kind:
        case GuideKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', _JSON)
        case GuideKind.JSON_SCHEMA:
            try:
                # The library pastes the text into a document of its own.
                json.loads(guide.text)
            except (ValueError, RecursionError) as error:
                raise GuideError(f"it is not JSON: {error}") from None
            return LLMatcher.grammar_from_json_schema(guide.text, _JSON)
        case GuideKind.REGEX:
            return LLMatcher.grammar_from_regex(guide.text)
        case GuideKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(guide.text)


def _limits() -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=_INITIAL_FUEL,
        max_lexer_states=_LEXER_STATES,
        verbose_errors=False,  # they hold the answer
    )


def _translated(error: BaseException, what: str) -> GuideError:
    """An error of the library; whatever else ends a task or the process goes on.

    A panic's class is no Exception and cannot be imported.
    """
    if isinstance(error, Exception):
        return GuideError(f"{what}: {error}")
    if any(kind.__name__ == "PanicException" for kind in type(error).__mro__):
        return GuideError(f"{what}: the library failed")
    raise error
