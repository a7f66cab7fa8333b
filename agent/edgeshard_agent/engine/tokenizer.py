"""Text to tokens and back, by the model's own tokenizer.json."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as _Tokenizer

from edgeshard.domain.errors import DataLossError, InvalidArgumentError


class Tokenizer:
    """A model's tokenizer, without any code of the model's: tokenizer.json is data."""

    def __init__(self, tokenizer: _Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Raises DataLossError when the file is not a tokenizer."""
        try:
            return cls(_Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception
            raise DataLossError(f"tokenizer.json cannot be read: {error}", field="tokenizer.json") from None

    def encode(self, text: str) -> list[int]:
        """Token ids with the special tokens the model expects; raises InvalidArgumentError when there is none."""
        # The library's `encode` holds the interpreter's lock until it is done; its batch form does not.
        ids: list[int] = self._tokenizer.encode_batch([text])[0].ids
        if not ids:
            raise InvalidArgumentError("prompt has no tokens", field="prompt", reason="EMPTY_PROMPT")
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text without special tokens; an incomplete character is U+FFFD."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)
