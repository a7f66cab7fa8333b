"""Fields that several request bodies share, and the ways in which a field is treated.

A body's class declares the treatment of each of its fields. The tables of docs/http-fields.md are
made from these classes.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.options import option_fields
from edgeshard.domain.requests.conversation import GenerationDefaults
from edgeshard.domain.requests.generation import (
    LOGIT_BIAS_LIMIT_TOKENS,
    STOP_LIMIT_BYTES,
    STOP_LIMIT_STRINGS,
    STOP_LIMIT_TOKENS,
    Generation,
    Guide,
    GuideKind,
    Sampling,
)
from edgeshard.gateway.errors import Refused
from edgeshard.gateway.routes.schemas import check_schema, closed, without_nulls

MOST_CHOICES = 16
"""The most answers for one prompt."""
MOST_PROMPTS = 256
MAX_TOOLS = 1024
MOST_ANSWERS = 256
"""The most answers of a body: each is a request to the engine."""


FirstFault = Field(fail_fast=True)
"""The mark of a list that one fault refuses: a body has room for a million of them."""


TokenId = Annotated[int, Field(ge=0, lt=2**32)]
Items = Annotated[list[dict[str, Any]], FirstFault]
"""Messages, tools and the like, whose own form is checked when they are used."""
Tools = Annotated[Items, Field(max_length=MAX_TOOLS)]


class Treatment(StrEnum):
    """The use of a field of a body. A field without a mark is accepted."""

    ACCEPTED = "accepted"
    """It has its meaning. A value that is not listed is refused."""
    CLAMPED = "clamped"
    """A value beyond what is possible counts as the nearest possible one."""
    IGNORED = "ignored"
    """Any value is taken and has no effect on the answer."""
    REFUSED = "refused"
    """Only an empty value is taken: null, an empty text, list or object."""


class RequestModel(BaseModel):
    """A body, or a part of one.

    An unknown field is refused, and a null is an absent field. No type is converted, but 4.0 is a
    whole number, as in JSON schemas.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )

    @model_validator(mode="before")
    @classmethod
    def _present_fields(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: _as_whole(value) for name, value in body.items() if value is not None}


def _as_whole(value: Any) -> Any:
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if is_whole else value


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)


def _refuse(value: Any) -> Any:
    if not _is_empty(value):
        raise Refused("is not supported here: leave it out")
    return value


def _only(*values: Any) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value is not None and value not in values:
            choices = " or ".join(json.dumps(item) for item in values)
            raise Refused(f"is not supported here: leave it out, or give {choices}")
        return value

    return check


def ignored(meaning: str) -> Any:
    """A field of any value; `meaning` is the reason why it has no effect on the answer."""
    return Annotated[Any, Treatment.IGNORED, Field(default=None, description=meaning)]


def never(meaning: str) -> Any:
    """A field that is refused unless it is empty; `meaning` is what it would do."""
    return Annotated[
        Any, Treatment.REFUSED, AfterValidator(_refuse), Field(default=None, description=meaning)
    ]


def only(kind: Any, *values: Any, meaning: str = "") -> Any:
    """A field of which these values are accepted: they mean what happens anyway."""
    schema_field = Field(
        default=None, description=meaning or None, json_schema_extra={"enum": [*values, None]}
    )
    return Annotated[kind | None, AfterValidator(_only(*values)), schema_field]


Taken = Annotated[Any, Treatment.IGNORED, Field(default=None)]
"""A field for its sender's accounts."""


_OPTIONS = {item.name: item for owner in (Sampling, Generation) for item in option_fields(owner)}


def bounded(name: str, *, low: int | None = None, description: str | None = None) -> Any:
    """A field with the bounds that an option of generation has, None if it is left out; `low` is
    the API's own."""
    item = _OPTIONS[name]
    bounds = item.option.constraints if low is None else item.option.constraints | {"ge": low}
    if item.kind is float:
        bounds["allow_inf_nan"] = False
    return Field(default=None, description=description, **bounds)


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    include_obfuscation: Taken = None


def check_stream_options(stream: bool | None, options: StreamOptions | None) -> None:
    """Raise Refused for options of a stream that is not requested."""
    if options is not None and not stream:
        raise Refused(
            "is for streams: set stream, or leave it out", "INVALID_VALUE", "stream_options"
        )


Stop = Annotated[
    str
    | Annotated[
        list[Annotated[str, Field(min_length=1, max_length=STOP_LIMIT_BYTES)]],
        Field(max_length=STOP_LIMIT_STRINGS),
        FirstFault,
    ]
    | None,
    Field(
        default=None,
        description=f"texts that end the answer, at most {STOP_LIMIT_STRINGS}; one may be a "
        "special token",
    ),
]


def _ids(biases: dict[str, float]) -> dict[str, float]:
    if not all(map(_is_id, biases)):
        raise Refused("takes token ids below 2**32, written as texts of digits", "INVALID_VALUE")
    return biases


def _is_id(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) <= 10 and int(name) < 2**32


Bias = Annotated[
    Annotated[dict[str, float], Field(max_length=LOGIT_BIAS_LIMIT_TOKENS), AfterValidator(_ids)]
    | None,
    Field(
        default=None,
        description=f"token ids with -100 to 100 for each, at most {LOGIT_BIAS_LIMIT_TOKENS}",
    ),
]


class ChoiceFields(RequestModel):
    """The choice of tokens, in words that all APIs have for it."""

    temperature: float | None = bounded("temperature")
    top_p: float | None = bounded("top_p")
    top_k: int | None = bounded("top_k", low=-1, description="0 or -1 is off")
    seed: int | None = bounded("seed", low=-(2**63))
    stop: Stop = None
    frequency_penalty: float | None = bounded("frequency_penalty")
    presence_penalty: float | None = bounded("presence_penalty")
    min_p: float | None = bounded("min_p")


class SamplingFields(ChoiceFields):
    """The choice of tokens, in OpenAI's words, and with further options of this engine."""

    repetition_penalty: float | None = bounded("repetition_penalty")
    stop_token_ids: Annotated[list[TokenId], FirstFault] | None = Field(
        default=None, max_length=STOP_LIMIT_TOKENS
    )
    ignore_eos: bool | None = None
    priority: int | None = bounded("priority", description="a higher one goes first")
    logit_bias: Bias = None
    user: Taken = None
    metadata: Taken = None

    def samplings(
        self,
        count: int,
        defaults: GenerationDefaults = GenerationDefaults(),  # noqa: B008 - frozen
        *,
        logprobs: bool,
        top_logprobs: int,
    ) -> tuple[Sampling, ...]:
        """The sampling of each of `count` answers, which differ in their seeds. A field that is not
        given has the model's `defaults`, or OpenAI's."""
        field_values = {
            item.name: getattr(self, item.name, None) for item in option_fields(Sampling)
        }
        values: dict[str, Any] = {"temperature": 1.0, "top_k": 0} | defaults.given()
        values |= {name: value for name, value in field_values.items() if value is not None}
        own: dict[str, Any] = {
            "top_k": max(0, values["top_k"]),
            "logit_bias": tuple(
                sorted((int(token), bias) for token, bias in (self.logit_bias or {}).items())
            ),
            "logprobs": logprobs,
            "top_logprobs": top_logprobs,
        }
        seed = secrets.randbits(63) if self.seed is None else self.seed
        first = Sampling(**{**values, **own, "seed": seed % 2**64})
        return tuple(replace(first, seed=(seed + number) % 2**64) for number in range(count))

    def generation(self, prompt: str | tuple[int, ...], new_tokens: int, **more: Any) -> Generation:
        """A request to the engine, with these fields' end and place in the queue."""
        return Generation(
            prompt,
            new_tokens,
            stop_tokens=tuple(self.stop_token_ids or ()),
            stop_strings=self.stop_strings(),
            ignore_eos=bool(self.ignore_eos),
            priority=self.priority or 0,
            **more,
        )

    def stop_strings(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        if self.stop is None or self.stop == "":
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class JsonSchemaFormat(RequestModel):
    name: str | None = Field(default=None, max_length=256)
    description: Taken = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


def schema_guide(schema: dict[str, Any], open_objects: bool | None, field: str) -> Guide:
    """The guide of an answer by a JSON schema, closed except for `open_objects`. A null keyword is
    as if absent.

    Raises InvalidArgumentError naming `field` for a schema that is too large.
    """
    check_schema(schema, field)
    present: dict[str, Any] = without_nulls(schema)
    return Guide(GuideKind.JSON_SCHEMA, json.dumps(present if open_objects else closed(present)))


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def guide(self, open_objects: bool | None) -> Guide | None:
        """The guide that the format requests. Raises InvalidArgumentError for contradicting
        fields."""
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise InvalidArgumentError(
                "response_format: json_schema needs the type json_schema", field="response_format"
            )
        if self.json_schema is not None:
            return schema_guide(self.json_schema.schema_, open_objects, "response_format")
        return Guide(GuideKind.JSON_OBJECT) if self.type == "json_object" else None


_GUIDED = ("guided_json", "guided_regex", "guided_grammar")


class GuidedFields(SamplingFields):
    """The form that the answer must have, by one field at most."""

    guided_json: str | dict[str, Any] | None = Field(default=None, description="a JSON schema")
    guided_regex: str | None = None
    guided_grammar: str | None = Field(
        default=None, description="a context-free grammar, as Lark writes them"
    )
    open_objects: bool | None = Field(
        default=None,
        description="whether objects may have keys that a schema of an answer or a tool does not "
        "name",
    )

    def form(self) -> tuple[str, Guide | None]:
        """The name of the API's own field for the answer's form, and the guide that it requests."""
        return "", None

    def guide(self) -> Guide | None:
        """The guide of the answer. Raises InvalidArgumentError if several are given."""
        guides = self._guides()
        if len(guides) > 1:
            raise InvalidArgumentError(
                f"{guides[1][0]}: another field already sets the answer's format; leave one of "
                "them out",
                field=guides[1][0],
            )
        return guides[0][1] if guides else None

    def guide_field(self) -> str:
        """The name of the field that sets a guide."""
        names = (name for name in _GUIDED if getattr(self, name) is not None)
        return next(names, "response_format")

    def _guides(self) -> list[tuple[str, Guide]]:
        schema = self.guided_json
        if isinstance(schema, dict):
            check_schema(schema, "guided_json")
            schema = json.dumps(schema)
        texts = {
            "guided_json": (GuideKind.JSON_SCHEMA, schema),
            "guided_regex": (GuideKind.REGEX, self.guided_regex),
            "guided_grammar": (GuideKind.GRAMMAR, self.guided_grammar),
        }
        guides = [
            (name, Guide(kind, text)) for name, (kind, text) in texts.items() if text is not None
        ]
        name, guide = self.form()
        return guides if guide is None else [(name, guide), *guides]


class FormedFields(GuidedFields):
    response_format: ResponseFormat | None = None

    def form(self) -> tuple[str, Guide | None]:
        response_format = self.response_format
        return "response_format", None if response_format is None else response_format.guide(
            self.open_objects
        )
