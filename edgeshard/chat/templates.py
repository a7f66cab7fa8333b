"""Chat templates: Jinja2 as transformers runs it, which is what their authors write for, in its
sandbox.

The sandbox keeps a template away from everything except its arguments. It does not bound time or
memory: a template may loop, double a string or raise a number to a power. So a stranger's template
is rendered in a process that can be ended (`edgeshard.chat.template_worker`); here are the limits
of its input and output.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgeshard.chat.template_forms import TemplateForm, form_of, reads_parts_only
from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError, UnsupportedModelError
from edgeshard.domain.requests.generation import PROMPT_LIMIT_BYTES, text_bytes

SOURCE_LIMIT_BYTES = 256 << 10
"""Limit of a template, in UTF-8; the longest published ones have 40 KB."""
FIELD = "chat_template"


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; a prompt has it without marks."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _RefusedError(TemplateError):
    """The error of `raise_exception` in a template."""


class ChatTemplate:
    """A template and the special tokens that it may name, such as `bos_token`, by their texts."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._compiled: Template | None = None
        self._form: TemplateForm | None = None

    @property
    def form(self) -> TemplateForm:
        """The form in which it reads messages. Raises UnsupportedModelError naming `chat_template`
        if it is none."""
        if self._form is None:
            self._compiled, form = self._compile()
            self._form = replace(form, content_parts=reads_parts_only(self._probe))
        return self._form

    def _probe(self, messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self.render(messages)
        except (InvalidArgumentError, UnsupportedModelError):
            return ""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text.

        Raises InvalidArgumentError naming `messages` if the template refuses them or the text is
        too long, and UnsupportedModelError naming `chat_template` if it is no template or fails.
        """
        values = {
            **self._special_tokens,
            **(variables or {}),
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        size = 0
        try:
            if self._compiled is None:
                self._compiled, _ = self._compile()
            for piece in self._compiled.generate(values):
                size += text_bytes(piece)
                if size > PROMPT_LIMIT_BYTES:
                    raise InvalidArgumentError(
                        f"messages: their prompt has more than {PROMPT_LIMIT_BYTES} bytes; shorten "
                        "them",
                        field="messages",
                        reason="PROMPT_TOO_LONG",
                    )
                pieces.append(piece)
        except EdgeShardError:
            raise
        except _RefusedError as error:
            raise InvalidArgumentError(
                f"messages: the model's chat template refuses them: {error.message}",
                field="messages",
                reason="TEMPLATE_REFUSES",
            ) from None
        except MemoryError:
            raise _broken("takes too much memory", "TEMPLATE_EXHAUSTED") from None
        except Exception as error:  # Its expressions may raise anything; they are no code of ours.
            raise _broken(
                f"fails on these messages: {type(error).__name__}: {str(error)[:500]}"
            ) from None
        return "".join(pieces)

    def _compile(self) -> tuple[Template, TemplateForm]:
        """Not when the model is loaded: Jinja computes constants while it compiles, which may take
        any time."""
        if text_bytes(self.source) > SOURCE_LIMIT_BYTES:
            raise _broken(f"has more than {SOURCE_LIMIT_BYTES} bytes")
        environment = _environment()
        try:
            tree = environment.parse(self.source)
            form = form_of(tree)
            code = environment.compile(tree)
        except TemplateSyntaxError as error:
            raise _broken(
                f"is not a valid template: line {error.lineno}: {error.message}"
            ) from None
        return Template.from_code(environment, code, environment.make_globals(None)), form


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without Jinja's escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise _RefusedError(str(message)[:500])


def _now(form: str) -> str:
    """The local time: some templates put the date into the prompt."""
    return datetime.now().astimezone().strftime(form)


def _broken(what: str, reason: str = "BAD_TEMPLATE") -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{FIELD} {what}; mend the model's chat_template.jinja and add it again",
        field=FIELD,
        reason=reason,
    )
