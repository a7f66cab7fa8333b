"""The process that renders chat templates and tokenises for the coordinator
(`edgeshard.chat.serving`)."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeshard.chat.chat_model import ChatModel
from edgeshard.chat.messages import TEXTS
from edgeshard.chat.serving import (
    LOAD_LIMIT_S,
    TOKENISE_LIMIT_S,
    Answer,
    limited_memory,
    limited_time,
    packed,
    serve,
    unpacked,
)
from edgeshard.domain.errors import InternalError
from edgeshard.domain.requests.conversation import ChatPrompt, Conversation
from edgeshard.forms import OWN

RENDER_LIMIT_S = 0.5
"""Limit of processor time for one prompt; the longest real ones take some hundredths of it."""
RENDER_LIMIT_BYTES = 384 << 20
"""Bytes by which the process may grow during a rendering."""
TOKENISE_LIMIT_BYTES = 1 << 30
"""The same for a prompt's tokens: the library takes 130 for each byte of text, so 8 MiB of them."""
MODELS_KEPT = 4
"""Models kept with their tokenizers, each up to some hundred MB."""


class ChatWorker:
    """Answers questions about models, the newest of which it keeps."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, ChatModel] = OrderedDict()

    def answer(self, question: Mapping[str, Any], parts: Mapping[str, bytes]) -> Answer:
        """Raises EdgeShardError."""
        with limited_time(LOAD_LIMIT_S):
            model = self._model(question["model"], question["files"])
        match question["do"]:
            case "prompt":
                texts = {name: _text(parts[name]) for name in TEXTS}
                with limited_memory(RENDER_LIMIT_BYTES), limited_time(RENDER_LIMIT_S):
                    conversation = Conversation(
                        **texts, generation_prompt=question["generation_prompt"]
                    )
                    text, answer_format = model.render(conversation)
                tokens = _tokens(model, text, question["max_context"], "messages", special=False)
                return OWN.write(ChatPrompt, ChatPrompt((), answer_format, model.defaults)), packed(
                    tokens
                )
            case "tokenize":
                text = _text(parts["text"])
                return {}, packed(
                    _tokens(
                        model, text, question["max_context"], "prompt", special=question["special"]
                    )
                )
            case "detokenize":
                with limited_time(TOKENISE_LIMIT_S):
                    return {}, model.detokenize(unpacked(parts["tokens"])).encode()
            case "texts":
                with limited_time(TOKENISE_LIMIT_S):
                    return {}, json.dumps(model.texts(unpacked(parts["tokens"]))).encode()
            case "vocabulary":
                with limited_time(LOAD_LIMIT_S):
                    return {}, model.vocabulary.encode()
        raise InternalError(f"the chat worker cannot {question['do']}")

    def _model(self, digest: str, paths: Mapping[str, str]) -> ChatModel:
        model = self._models.pop(digest, None)
        if model is None:
            model = ChatModel.from_files(
                {name: Path(path).read_bytes() for name, path in paths.items()}
            )
        self._models[digest] = model
        while len(self._models) > MODELS_KEPT:
            self._models.popitem(last=False)
        return model


def _tokens(
    model: ChatModel, text: str, max_context: int, field: str, *, special: bool
) -> tuple[int, ...]:
    with limited_memory(TOKENISE_LIMIT_BYTES), limited_time(TOKENISE_LIMIT_S):
        model.check_fits(text, max_context, field)
        return model.tokenize(text, special)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


if __name__ == "__main__":
    serve(ChatWorker().answer)
