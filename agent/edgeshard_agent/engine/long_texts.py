"""Tokenizes prompts that may take much memory, in a process that ends if one takes too much."""

from __future__ import annotations

from pathlib import Path

from edgeshard.chat.lane import Lane, text_too_costly
from edgeshard.chat.serving import TOKENISE_LIMIT_S, unpacked

LEAST_BYTES, MOST_BYTES = 256 << 20, 1 << 30
"""For one text. The library takes 130 for each byte that it looks for tokens in: 2 MiB of them, and
8."""
_PART = 4
_NICENESS = 5
"""The steps of this node go before long texts."""


def text_memory_bytes(budget_bytes: int) -> int:
    """Bytes that the process may take for one text, on a node whose stages may use `budget_bytes`:
    a quarter of that, within the limits above and in addition to it."""
    return min(max(budget_bytes // _PART, LEAST_BYTES), MOST_BYTES)


class LongTexts:
    """Asks the process, which starts with the first text and ends with `close`.

    `file` is the tokenizer.json, whose form was found good. One text takes at most `memory_bytes`
    in addition to it, and `seconds` of processor time.
    """

    def __init__(self, file: Path, memory_bytes: int, seconds: float = TOKENISE_LIMIT_S) -> None:
        self._lane = Lane("edgeshard_agent.engine.long_text_worker", _NICENESS)
        self._question = {"file": str(file), "memory_bytes": memory_bytes, "seconds": seconds}

    async def encode(self, text: str) -> list[int]:
        """The token ids of a text. Raises as `Tokenizer.encode` does; InvalidArgumentError naming
        `prompt` if the text took too much time or memory. The next text begins in another process
        then."""
        parts = {"text": text.encode("utf-8", "surrogatepass")}
        _, data = await self._lane.ask("", self._question, parts, text_too_costly)
        return list(unpacked(data))

    async def close(self) -> None:
        """End the process. Calls that wait for it fail."""
        await self._lane.close()
