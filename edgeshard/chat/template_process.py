"""Chat templates and tokenizers of models, in processes of their own.

A template may take forever, and a tokenizer's library holds the interpreter for seconds while it
reads a large file: no daemon can have them in its own process. There are two, since no text can be
stopped halfway: a short one waits for short ones only. Each starts with its first question and ends
with its daemon.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeshard.chat.lane import Lane, text_too_costly
from edgeshard.chat.messages import TEXTS, check_sizes
from edgeshard.chat.serving import packed, unpacked
from edgeshard.domain.errors import EdgeShardError, UnsupportedModelError
from edgeshard.domain.ids import Digest
from edgeshard.domain.requests.conversation import ChatPrompt, Conversation
from edgeshard.domain.requests.generation import check_prompt_size
from edgeshard.forms import OWN

LONG_BYTES = 64 << 10
"""A question that is longer waits for its turn with such: one of these takes up to some hundredths
of a second."""
LONG_NICENESS = 5
"""The steps of nodes on this machine go before long texts."""
_WORKER = "edgeshard.chat.template_worker"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's small files by their names, and the digest by which the process remembers it.
    `max_context` is the number of positions that one request may have, 0 if unknown: a text that
    certainly needs more is refused."""

    digest: Digest
    paths: Mapping[str, Path]
    max_context: int = 0


def _exhausted() -> UnsupportedModelError:
    return UnsupportedModelError(
        "chat_template: rendering the prompt took too much time or memory and was stopped; shorten "
        "the messages, or "
        "mend the model's chat_template.jinja and add it again",
        field="chat_template",
        reason="TEMPLATE_EXHAUSTED",
    )


class ChatProcess:
    """Asks the processes, each one question after the other; who asks, by `identity`, gets a fair
    share of each.

    Every method raises ResourceExhaustedError if too much waits, and UnsupportedModelError if a
    model's template or tokenizer takes too much: `tokenize` InvalidArgumentError naming `prompt`
    instead.
    """

    def __init__(self) -> None:
        self._short, self._long = Lane(_WORKER), Lane(_WORKER, LONG_NICENESS)

    @property
    def pid(self) -> int | None:
        """The id of the process for short questions; None if there is none."""
        return self._short.pid

    async def prompt(
        self, model: ModelFiles, conversation: Conversation, identity: str = ""
    ) -> ChatPrompt:
        """The conversation as tokens, by the model's chat template.

        Raises InvalidArgumentError naming the field at fault, such as `messages[2].content`;
        FailedPreconditionError for a model without a template or a tokenizer; UnsupportedModelError
        for a template that fails or does not end.
        """
        check_sizes(conversation)
        parts = {name: _bytes(getattr(conversation, name)) for name in TEXTS}
        asks_answer = conversation.generation_prompt
        values, data = await self._ask(
            identity, model, "prompt", parts, generation_prompt=asks_answer
        )
        return replace(OWN.read(ChatPrompt, values), tokens=tuple(unpacked(data)))

    async def tokenize(
        self, model: ModelFiles, text: str, special: bool = True, identity: str = ""
    ) -> tuple[int, ...]:
        """The ids of a text; `special` adds those that the tokenizer puts around it."""
        check_prompt_size(text)
        parts = {"text": _bytes(text)}
        _, data = await self._ask(
            identity, model, "tokenize", parts, text_too_costly, special=special
        )
        return tuple(unpacked(data))

    async def detokenize(self, model: ModelFiles, tokens: Sequence[int], identity: str = "") -> str:
        """The text of ids, special tokens included. Raises InvalidArgumentError naming `tokens`."""
        _, data = await self._ask(identity, model, "detokenize", {"tokens": packed(tokens)})
        return data.decode()

    async def texts(
        self, model: ModelFiles, tokens: Sequence[int], identity: str = ""
    ) -> list[str]:
        """The text of each id within a text. Raises as `detokenize`."""
        _, data = await self._ask(identity, model, "texts", {"tokens": packed(tokens)})
        texts: list[str] = json.loads(data)
        return texts

    async def vocabulary(self, model: ModelFiles) -> str:
        """A digest of the model's tokens with their ids, which others with the same have, too.
        Raises FailedPreconditionError for a model without a tokenizer."""
        _, data = await self._ask("", model, "vocabulary", {})
        return data.decode()

    async def close(self) -> None:
        """End the processes. Questions that still wait for them fail, and so do later ones."""
        await self._short.close()
        await self._long.close()

    async def _ask(
        self,
        identity: str,
        model: ModelFiles,
        do: str,
        parts: Mapping[str, bytes],
        exhausted: Callable[[], EdgeShardError] = _exhausted,
        **values: Any,
    ) -> tuple[dict[str, Any], bytes]:
        lane = self._short if sum(map(len, parts.values())) <= LONG_BYTES else self._long
        question = {
            "do": do,
            "model": model.digest,
            "files": {name: str(path) for name, path in model.paths.items()},
            "max_context": model.max_context,
            **values,
        }
        return await lane.ask(identity, question, parts, exhausted)


def _bytes(text: str) -> bytes:
    """The text in UTF-8; the other end refuses text that is not valid (half of a surrogate
    pair)."""
    return text.encode("utf-8", "surrogatepass")
