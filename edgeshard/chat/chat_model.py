"""A model's small files for talking with it: its tokenizer, its chat template, its defaults for
generation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from edgeshard.chat.messages import parse_messages, parse_tools, parse_variables
from edgeshard.chat.parsing import CHANNEL_MARKERS
from edgeshard.chat.templates import ChatTemplate
from edgeshard.chat.tool_calls import SECTION_MARKERS
from edgeshard.domain.errors import (
    EdgeShardError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    UnsupportedModelError,
)
from edgeshard.domain.requests.conversation import (
    AnswerFormat,
    Conversation,
    GenerationDefaults,
    Marker,
    ToolFormat,
)
from edgeshard.domain.requests.generation import PROMPT_LIMIT_TOKENS, check_prompt_size, text_bytes
from edgeshard.storage.forms import (
    CHAT_TEMPLATE,
    GENERATION,
    TOKENIZER,
    TOKENIZER_SETTINGS,
    check_small_file,
    decode_text,
    defaults_of,
    parse_json_object,
    special_tokens_of,
    templates_of,
)

_THOUGHT = "thought\n"
"""Behind the token that Gemma begins reasoning with."""
_REASONING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    (f"<|channel>{_THOUGHT}", "<channel|>"),
)
"""The marks of reasoning in templates; a template must name the end, since some name nothing
else."""
_SHRINKING = 4
"""Bytes of a text for one of its normalised form: NFKC makes a letter of 1 byte of a mathematical
one of 4."""
_TAGS = (
    ("<tool_call>", "</tool_call>"),
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    ("<TOOLCALL>", "</TOOLCALL>"),
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("<|tool_call>", "<tool_call|>"),
    ("<|tool_call_start|>", "<|tool_call_end|>"),
    ("<seed:tool_call>", "</seed:tool_call>"),
    ("<|START_ACTION|>", "<|END_ACTION|>"),
)
"""What templates write around calls of tools."""
_LIST, _CHANNEL = "[TOOL_CALLS]", "<|channel|>"
_LIST_MARKERS = (_LIST, "[ARGS]", "[CALL_ID]")
_IN_TAGS = (*SECTION_MARKERS, '<|"|>')
"""Between such tags."""


class ChatModel:
    """The chat side of a model. Blocking, and slow for a large tokenizer: for a process or a thread
    of its own."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: Mapping[str, ChatTemplate],
        defaults: GenerationDefaults,
    ) -> None:
        self._tokenizer = tokenizer
        # How training cut and filled up its texts; a prompt is taken as it is.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._templates = templates
        self.defaults = defaults

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> ChatModel:
        """The model of the files that travel with it, by their names.

        Raises FailedPreconditionError for a model without a tokenizer, and as `check_small_file`
        and `ChatTemplate` do.
        """
        if TOKENIZER not in files:
            raise FailedPreconditionError(
                "the model was added without a tokenizer.json: send token ids, or put the file "
                "into its directory and "
                "add the model again",
                field=TOKENIZER,
                reason="NO_TOKENIZER",
            )
        for name, data in files.items():
            check_small_file(name, data)
        try:
            tokenizer = Tokenizer.from_buffer(files[TOKENIZER])
        except Exception as error:  # The library raises no other class.
            raise InvalidArgumentError(
                f"{TOKENIZER} cannot be read: {str(error)[:500]}", field=TOKENIZER
            ) from None
        settings = parse_json_object(
            decode_text(files.get(TOKENIZER_SETTINGS, b"{}"), TOKENIZER_SETTINGS), ""
        )
        sources = templates_of(settings)
        if CHAT_TEMPLATE in files:
            sources = {"default": decode_text(files[CHAT_TEMPLATE], CHAT_TEMPLATE)}
        tokens = special_tokens_of(settings)
        templates = {name: ChatTemplate(source, tokens) for name, source in sources.items()}
        defaults = defaults_of(
            parse_json_object(decode_text(files.get(GENERATION, b"{}"), GENERATION), GENERATION)
        )
        return cls(tokenizer, templates, defaults)

    def render(self, conversation: Conversation) -> tuple[str, AnswerFormat]:
        """The conversation as text, and how to read the answer to it.

        Raises InvalidArgumentError naming the field at fault, such as `messages[2].content`,
        FailedPreconditionError for a model without a template, and what `ChatTemplate.render`
        raises.
        """
        messages, tools = parse_messages(conversation.messages), parse_tools(conversation.tools)
        variables = parse_variables(conversation.variables)
        template = self._template(has_tools=bool(tools))
        tool_format, tags = self._tool_format(template.source)
        if tools and tool_format is ToolFormat.NONE:
            raise InvalidArgumentError(
                "tools: the model's chat template does not support tools; leave them out, or use a "
                "model "
                "that was trained to call tools",
                field="tools",
                reason="NO_TOOLS",
            )
        if "developer" not in template.source:
            messages = [
                {**item, "role": "system"} if item["role"] == "developer" else item
                for item in messages
            ]
        text = _rendered(template, messages, tools, conversation.generation_prompt, variables)
        # Half a surrogate pair, which a model may write as an escape of JSON, is no text.
        text = text.encode("utf-8", "replace").decode("utf-8")
        return text, self._answer_format(template.source, tool_format, tags, text)

    def check_fits(self, text: str, max_context: int, field: str) -> None:
        """Raise InvalidArgumentError naming `field` for a text that certainly has more than
        `max_context` tokens (0: unknown), before it costs anything."""
        size = text_bytes(text)
        if not max_context or size <= _SHRINKING * max_context:  # a token has a byte at least
            return
        if size > _SHRINKING * max_context * self._longest_token_bytes:
            raise InvalidArgumentError(
                f"{field}: a text of {size} bytes does not fit the deployment's context of "
                f"{max_context} tokens; "
                "shorten it",
                field=field,
                reason="CONTEXT_EXCEEDED",
            )

    @cached_property
    def _longest_token_bytes(self) -> int:
        """Longest token of the vocabulary as it is written; at least as long as the text that a
        token stands for."""
        return max(map(text_bytes, self._tokenizer.get_vocab(with_added_tokens=True)), default=0)

    def tokenize(self, text: str, special: bool = True) -> tuple[int, ...]:
        """Token ids; `special` adds those that the tokenizer puts around a text. Raises
        InvalidArgumentError."""
        check_prompt_size(text)
        try:
            # The fast form keeps no offsets.
            encoded = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0]
        except MemoryError:
            raise
        except Exception as error:
            # Not its text: it could quote the prompt.
            raise InternalError(
                f"the model's tokenizer failed on this text ({type(error).__name__})", field="text"
            ) from None
        ids = tuple(encoded.ids)
        check_prompt_size(ids)
        return ids

    @property
    def vocabulary(self) -> str:
        """The sha256 of all tokens with their ids: equal for tokenizers whose ids mean the same."""
        tokens = sorted(
            self._tokenizer.get_vocab(with_added_tokens=True).items(),
            key=lambda item: (item[1], item[0]),
        )
        return hashlib.sha256(json.dumps(tokens, separators=(",", ":")).encode()).hexdigest()

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each id within a text; U+FFFD for a part of a character. Raises as
        `detokenize`."""
        return [self._text(token) for token in ids]

    def _text(self, token: int) -> str:
        # Some decoders drop the space before the first word of a text: the second of two is not the
        # first.
        once, twice = self.detokenize((token,)), self.detokenize((token, token))
        return twice[len(once) :] if twice.startswith(once) else once

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, with special tokens as they are written. Raises
        InvalidArgumentError."""
        if len(ids) > PROMPT_LIMIT_TOKENS:
            raise InvalidArgumentError(
                f"tokens: at most {PROMPT_LIMIT_TOKENS} are accepted", field="tokens"
            )
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        if any(not 0 <= token < size for token in ids):
            raise InvalidArgumentError(f"tokens: an id is not from 0 to {size - 1}", field="tokens")
        try:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
        except Exception as error:
            raise InternalError(
                f"the model's tokenizer failed on these tokens ({type(error).__name__})",
                field="tokens",
            ) from None

    def _template(self, *, has_tools: bool) -> ChatTemplate:
        template = self._templates.get("tool_use") if has_tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise FailedPreconditionError(
                "the model has no chat template: use generate with a prompt of your own, or put a "
                f"{CHAT_TEMPLATE} "
                "into its directory and add the model again",
                field="chat_template",
                reason="NO_CHAT_TEMPLATE",
            )
        return template

    def _tool_format(self, source: str) -> tuple[ToolFormat, tuple[str, str]]:
        """The form in which a template writes calls of tools, and their tags if there are any; one
        that only names tools leaves it to the model."""
        if _CHANNEL in source:
            return ToolFormat.CHANNELS, ("", "")
        if "tools" not in source:
            return ToolFormat.NONE, ("", "")
        written = next((tags for tags in _TAGS if tags[0] in source), None)
        if written is None and _LIST in source:
            return ToolFormat.LISTED, ("", "")
        if written is None:
            # Some templates leave that to the model, LFM2's and Kimi K2's among them. The first
            # tags are in the vocabularies of many models that were not taught them.
            token_to_id = self._tokenizer.token_to_id
            written = next((tags for tags in _TAGS[1:] if token_to_id(tags[0]) is not None), None)
        return (ToolFormat.BARE, ("", "")) if written is None else (ToolFormat.TAGGED, written)

    def _answer_format(
        self, source: str, tools: ToolFormat, tags: tuple[str, str], prompt: str
    ) -> AnswerFormat:
        if tools is ToolFormat.CHANNELS:
            return AnswerFormat(tools, markers=tuple(self._markers(CHANNEL_MARKERS)))
        begin, end = next(((b, e) for b, e in _REASONING if e in source), ("", ""))
        around = {ToolFormat.LISTED: _LIST_MARKERS, ToolFormat.TAGGED: (*tags, *_IN_TAGS)}.get(
            tools, ()
        )
        markers = self._markers((begin.removesuffix(_THOUGHT), end, *around))
        in_reasoning = bool(begin) and prompt.rstrip().endswith(begin.rstrip())
        return AnswerFormat(tools, begin, end, in_reasoning, tuple(markers), *tags)

    def _markers(self, texts: Sequence[str]) -> Iterator[Marker]:
        """Those of them that are special tokens, which the text of an answer leaves out."""
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: number for number, token in added.items() if token.special}
        return (Marker(special[text], text) for text in dict.fromkeys(texts) if text in special)


def _rendered(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any],
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    """The prompt's text of messages in the first form that the template renders. Raises its first
    failure."""
    tried: list[list[dict[str, Any]]] = []
    failure: EdgeShardError | None = None
    for form in template.form.alternatives():
        changed = form.of(messages)
        if changed in tried:
            continue
        tried.append(changed)
        try:
            return template.render(changed, tools, add_generation_prompt, variables)
        except (InvalidArgumentError, UnsupportedModelError) as error:
            if error.reason not in ("TEMPLATE_REFUSES", "BAD_TEMPLATE"):
                raise
            failure = failure or error
    assert failure is not None
    raise failure
