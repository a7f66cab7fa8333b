"""The process that tokenises long prompts (`edgeshard.chat.serving`). It has one tokenizer, and
reads it once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeshard.chat.serving import LOAD_LIMIT_S, Answer, limited_memory, limited_time, packed, serve
from edgeshard.domain.requests.generation import check_prompt_size
from edgeshard_agent.engine.tokenizer import Tokenizer


class LongTextWorker:
    """Answers what `edgeshard_agent.engine.long_texts` asks, as the tokenizer would in the head's
    own process."""

    def __init__(self) -> None:
        self._tokenizer: Tokenizer | None = None

    def answer(self, question: Mapping[str, Any], parts: Mapping[str, bytes]) -> Answer:
        """Raises EdgeShardError."""
        if self._tokenizer is None:
            with limited_time(LOAD_LIMIT_S):
                self._tokenizer = Tokenizer.load(Path(question["file"]), checked=True)
        text = parts["text"].decode("utf-8", "surrogatepass")
        with limited_memory(question["memory_bytes"]), limited_time(question["seconds"]):
            tokens = self._tokenizer.encode(text)
            # a list that no message can hold would only take memory at the other end
            check_prompt_size(tokens)
            return {}, packed(tokens)


if __name__ == "__main__":
    serve(LongTextWorker().answer)
