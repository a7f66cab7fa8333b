"""Tokens to text as they come: never half a character, never a piece of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
"""Token ids to text, special tokens left out."""

_CONTEXT_TOKENS = 6
_CHARACTER_BYTES = 4
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """The text of one request, token by token; pure apart from `decode`.

    A token's text can depend on its neighbours (a leading space, a character of several byte
    tokens). So a few tokens before it are decoded with it and the common part is cut off. `before`
    are the tokens with which the request began.
    """

    def __init__(
        self, decode: Decode, before: Sequence[int], stop_strings: Sequence[str] = ()
    ) -> None:
        self._decode = decode
        self._ids = _context(decode, before)
        self._read = len(self._ids)
        self._known = decode(self._ids) if self._ids else ""
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        self.stopped = False
        """Whether a stop string was completed; the text ends in front of it."""

    def push(self, token: int) -> str:
        """Text that is certain now; '' while a character or a possible stop string is
        incomplete."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT) or len(text) <= len(self._known):
            return ""
        fresh = self._fresh(text)
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._known = self._decode(self._ids)
        return self._release(fresh)

    def finish(self) -> str:
        """Text held back that no further token will complete."""
        if self.stopped:
            return ""
        text = self._decode(self._ids)
        released = self._release(self._fresh(text))
        rest = released + self._held
        self._held = ""
        self._known = text
        return rest

    def _fresh(self, text: str) -> str:
        """The text that `text`, the decoded `_ids`, adds to the known one."""
        if text.startswith(self._known):
            return text[len(self._known) :]
        # Bytes that make no character spoil the whole characters of bytes in front of them; those
        # are out already.
        return self._decode(self._ids[self._read :])

    def _release(self, fresh: str) -> str:
        self._held += fresh
        ends = [
            (index, stop) for stop in self._stop_strings if (index := self._held.find(stop)) >= 0
        ]
        if ends:
            self.stopped = True
            text, self._held = self._held[: min(ends)[0]], ""
            return text
        keep = max((_overlap(self._held, stop) for stop in self._stop_strings), default=0)
        text = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _context(decode: Decode, before: Sequence[int]) -> list[int]:
    """The last few tokens of `before`, beginning with a whole character: half a character would
    spoil all later bytes.
    """
    for first in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + _CHARACTER_BYTES):
        ids = list(before[-first:])
        if not decode(ids).startswith(_REPLACEMENT):
            return ids
    return list(before[-_CONTEXT_TOKENS:])
