"""Text to tokens and back, by the model's own tokenizer.json."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as _Tokenizer

from edgeshard.domain.errors import DataLossError, InternalError, InvalidArgumentError
from edgeshard.domain.requests.generation import text_bytes
from edgeshard.storage.forms import TOKENIZER, check_small_file
from edgeshard.storage.growth import loaded_growth


class Tokenizer:
    """A model's tokenizer, without any code of the model's: tokenizer.json is data.

    `file` is its source. `growth` bounds the output for a byte of text
    (`edgeshard.storage.growth`). `longest_token_bytes` is the UTF-8 length of the vocabulary's
    longest entry as written there. It is at least the length of the text that the entry stands for.
    `special_tokens` are the ids of tokens that `decode` leaves out, by their texts.
    """

    def __init__(self, tokenizer: _Tokenizer, file: Path) -> None:
        self._tokenizer = tokenizer
        self.file = file
        # How training cut and filled up its texts; a prompt is taken as it is.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        added = tokenizer.get_added_tokens_decoder()
        self.special_tokens = {
            token.content: number for number, token in added.items() if token.special
        }
        self.growth = loaded_growth(tokenizer)
        self.longest_token_bytes = max(
            map(text_bytes, tokenizer.get_vocab(with_added_tokens=True)), default=0
        )

    @classmethod
    def load(cls, path: Path, *, checked: bool = False) -> Tokenizer:
        """Raises DataLossError when the file is not a tokenizer. `checked`: another process has
        found its form good, and this one may end."""
        try:
            data = path.read_bytes()
            if not checked:
                # The library trusts some of its numbers, and a failed allocation ends the process.
                check_small_file(TOKENIZER, data)
            return cls(_Tokenizer.from_buffer(data), path)
        except BaseException as error:
            if not _is_fault(error):
                raise
            raise DataLossError(
                f"tokenizer.json cannot be read: {error}", field="tokenizer.json"
            ) from None

    def encode(self, text: str) -> list[int]:
        """Token ids with the special tokens the model expects.

        Takes memory of 130 times the grown text, and seconds for megabytes. Raises
        InvalidArgumentError if the text has no token ids, InternalError if the library fails,
        MemoryError.
        """
        try:
            # `encode` would hold the interpreter's lock until it is done. The fast form keeps no
            # offsets.
            ids: list[int] = self._tokenizer.encode_batch_fast([text])[0].ids
        except BaseException as error:
            if not _is_fault(error):
                raise
            # Not its text: it could quote the prompt.
            raise InternalError(
                f"prompt: the model's tokenizer failed on this text ({type(error).__name__}); send "
                "token ids, or "
                "another text",
                field="prompt",
                reason="TOKENIZER_FAILED",
            ) from None
        if not ids:
            raise InvalidArgumentError(
                "prompt has no tokens", field="prompt", reason="EMPTY_PROMPT"
            )
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text without special tokens; an incomplete character is U+FFFD. Raises InternalError as
        `encode` does."""
        try:
            return self._tokenizer.decode(ids, skip_special_tokens=True)
        except BaseException as error:
            if not _is_fault(error):
                raise
            raise InternalError(
                "tokenizer.json: the model's tokenizer failed to make text of tokens "
                f"({type(error).__name__}); mend "
                "its decoder and add the model again",
                field="tokenizer.json",
                reason="TOKENIZER_FAILED",
            ) from None


def _is_fault(error: BaseException) -> bool:
    """Whether it is the library's own: bare Exceptions, and panics of its Rust code.

    A panic's class is no Exception and cannot be imported. Every other class that is no Exception
    ends a process or a task; lack of memory is the process's fault.
    """
    if isinstance(error, MemoryError):
        return False
    return isinstance(error, Exception) or any(
        kind.__name__ == "PanicException" for kind in type(error).__mro__
    )
