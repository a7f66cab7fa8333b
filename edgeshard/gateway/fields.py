"""Fields that several request bodies share, and how a body is read.

What is not done here is refused by its name and never ignored; a value that means what happens anyway is taken.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from edgeshard.domain.errors import InvalidArgumentError, ResourceExhaustedError
from edgeshard.domain.generation import Sampling
from edgeshard.gateway.errors import Refused, refusal_of

MOST_BODY_BYTES = 32 << 20
"""Of a request: a batch of the longest prompts."""
MOST_CHOICES = 16
"""Answers for one prompt."""
MOST_PROMPTS = 256


class Asked(BaseModel):
    """A body, or a part of one: unknown fields are refused, and nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


AskedT = TypeVar("AskedT", bound=Asked)


async def read_body(request: Request, form: type[AskedT]) -> AskedT:
    """The body as `form`. Raises InvalidArgumentError naming the field, ResourceExhaustedError for a body that is too
    long."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY_BYTES:
            raise ResourceExhaustedError(
                f"the body has more than {MOST_BODY_BYTES} bytes", field="body", reason="BODY_TOO_LARGE"
            )
    try:
        return form.model_validate_json(bytes(body))
    except ValidationError as error:
        raise refusal_of(error) from None
    except RecursionError:
        raise InvalidArgumentError("the body is nested too deep", reason="INVALID_JSON") from None


def _only(*values: Any) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value not in (None, *values):
            shown = " or ".join(repr(item) for item in values) or "null"
            raise Refused(f"is not supported here: leave it out, or give {shown}")
        return value

    return check


Zero = Annotated[float | None, AfterValidator(_only(0)), Field(default=None, description="0, or left out")]
NoBias = Annotated[dict[str, float] | None, AfterValidator(_only({})), Field(default=None, description="left out")]
Taken = Annotated[Any, Field(default=None, description="taken, and not used")]
"""What describes a request to its sender's accounts and has no effect on the answer."""


def never(kind: Any) -> Any:
    """A field that is refused unless it is null."""
    return Annotated[kind | None, AfterValidator(_only()), Field(default=None, description="left out")]


def only(kind: Any, *values: Any) -> Any:
    """A field that takes what happens anyway."""
    return Annotated[kind | None, AfterValidator(_only(*values)), Field(default=None, description=f"one of {values}")]


class StreamOptions(Asked):
    include_usage: bool | None = None
    include_obfuscation: only(bool, False) = None  # type: ignore[valid-type]


Stop = Annotated[
    str | list[Annotated[str, Field(min_length=1, max_length=1024)]] | None,
    Field(default=None, description="text that ends the answer, at most 16"),
]


class SamplingFields(Asked):
    """How tokens are chosen, in OpenAI's words, and with what this engine has beside them."""

    temperature: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=-1, le=2**31, description="0 or -1 is off")
    repetition_penalty: float | None = Field(default=None, gt=0, le=1e6, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: Stop = None
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**32)]] | None = Field(default=None, max_length=1024)
    ignore_eos: bool | None = None
    priority: int | None = Field(default=None, ge=-10, le=10, description="a higher one goes first")
    frequency_penalty: Zero = None
    presence_penalty: Zero = None
    min_p: Zero = None
    logit_bias: NoBias = None
    user: Taken = None
    metadata: Taken = None

    def sampling(self, choice: int, seed: int, *, logprobs: bool, top_logprobs: int) -> Sampling:
        """Of answer number `choice`; each draws from a seed of its own."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(0, self.top_k or 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            seed=(seed + choice) % 2**64,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
        )

    def first_seed(self) -> int:
        """What was asked for, or chance."""
        return secrets.randbits(63) if self.seed is None else self.seed % 2**64

    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None or self.stop == "":
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
