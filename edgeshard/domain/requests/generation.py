"""A request for text and its result.

One stream (`ListenerHello`) carries the tokens of all requests of a client, as a message costs more
than a token.

An option of generation is declared once, as a field of `Sampling` or `Generation`. The SDK's
keyword arguments, edgectl's options and the conversion to the wire follow from it by reflection.
`GenerateOptions` repeats its name and type for type checkers, which know no reflection; a test
compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypedDict

from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.errors import EdgeShardError, invalid
from edgeshard.domain.ids import DeploymentName, RequestId
from edgeshard.domain.options import check_bounds, option

# A request travels in one message, and so do its prompt's tokens when they return, with up to 5
# bytes each. Both stay far below gRPC's limit (`edgeshard.rpc.channel.MESSAGE_LIMIT_BYTES`), with
# all other fields of the message.
PROMPT_LIMIT_BYTES = 4 << 20
"""Limit of a prompt as text, in UTF-8."""
PROMPT_LIMIT_TOKENS = 1 << 20
STOP_LIMIT_STRINGS = 16
STOP_LIMIT_BYTES = 1024
"""Limit of one stop string, in UTF-8. Up to this much text may be held back until the next token
decides."""
STOP_LIMIT_TOKENS = 1024
"""Each new token is compared with all of them."""
LOGIT_BIAS_LIMIT_TOKENS, MOST_LOGIT_BIAS = 300, 100
"""As OpenAI's."""
GUIDE_LIMIT_BYTES = 128 << 10
"""Limit of a guide's text, in UTF-8."""
PROMPT_LOGPROBS_LIMIT = 1 << 20
"""Most log-probabilities of one prompt, including the likeliest tokens': head and coordinator keep
some 100 bytes of each until the client has them."""
PROMPT_LOGPROBS_POSITIONS = 256
"""Most positions of a prompt whose log-probabilities are in one event, and are computed at a
time."""


Prompt = str | tuple[int, ...]
"""Text, or its token ids."""
Biases = tuple[tuple[int, float], ...]
"""Tokens with the values added to their logits, in order of id."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.

    The random draw at position p is a function of only (seed, p), so a replay on another node draws
    the same. Penalties are a function of the tokens before p.
    """

    temperature: float = option(
        0.0,
        "Set the randomness of sampling; 0 always takes the likeliest token.",
        metavar="T",
        low=0,
        high=100,
    )
    top_k: int = option(
        0, "Draw from the K likeliest tokens; 0: off.", metavar="K", low=0, high=2**32 - 1
    )
    top_p: float = option(
        1.0,
        "Draw from the likeliest tokens whose probabilities sum to P; 0 takes the likeliest, 1 is "
        "off.",
        metavar="P",
        low=0,
        high=1,
    )
    min_p: float = option(
        0.0,
        "Drop tokens less likely than P times the likeliest; 0: off.",
        metavar="P",
        low=0,
        high=1,
    )
    repetition_penalty: float = option(
        1.0,
        "If above 1, avoid tokens that the prompt or answer contains; 1: off.",
        metavar="X",
        above=0,
        high=1_000_000,
    )
    presence_penalty: float = option(
        0.0,
        "If above 0, avoid tokens that the answer already contains; 0: off.",
        metavar="X",
        low=-2,
        high=2,
    )
    frequency_penalty: float = option(
        0.0,
        "If above 0, avoid tokens the more often the answer contains them; 0: off.",
        metavar="X",
        low=-2,
        high=2,
    )
    logit_bias: Biases = option(
        (),
        "Make the token ID likelier (up to 100) or less likely (down to -100); repeatable.",
        metavar="ID=BIAS",
    )
    seed: int = option(
        0, "Seed the sampling; the same seed draws the same text.", low=0, high=2**64 - 1
    )
    logprobs: bool = option(False, "Report each token's log-probability.")
    top_logprobs: int = option(
        0, "Report the log-probabilities of the N likeliest tokens, too.", low=0, high=20
    )

    @property
    def counts_answer(self) -> bool:
        """Whether it matters how often the answer has a token."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    def validate(self) -> None:
        """Raise InvalidArgumentError naming the first field out of range."""
        check_bounds(self)
        count = len(self.logit_bias)
        rule = f"has {count} tokens; at most {LOGIT_BIAS_LIMIT_TOKENS} are taken"
        _require(count <= LOGIT_BIAS_LIMIT_TOKENS, "logit_bias", rule)
        rule = f"has a value that is not from -{MOST_LOGIT_BIAS} to {MOST_LOGIT_BIAS}"
        _require(
            all(abs(bias) <= MOST_LOGIT_BIAS for _, bias in self.logit_bias), "logit_bias", rule
        )


class GuideKind(StrEnum):
    """Kinds of a guide's text."""

    JSON_OBJECT = "json_object"
    """Any JSON object; no text."""
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    """In the syntax of Rust's regex crate; the whole answer matches."""
    GRAMMAR = "grammar"
    """A context-free grammar in Lark's syntax, as llguidance extends it."""


@dataclass(frozen=True, slots=True)
class Guide:
    """The form that an answer must have: only tokens that can still lead there are drawn."""

    kind: GuideKind
    text: str = ""

    def validate(self) -> None:
        """Raise InvalidArgumentError for a text that no guide has; the head checks its meaning."""
        if self.kind is GuideKind.JSON_OBJECT:
            _require(not self.text, "guide", "of kind json_object takes no text", "GUIDE_INVALID")
            return
        _require(bool(self.text.strip()), "guide", f"of kind {self.kind} is empty", "GUIDE_INVALID")
        size = text_bytes(self.text)
        rule = f"has {size} bytes of UTF-8; at most {GUIDE_LIMIT_BYTES} are taken: make it smaller"
        _require(size <= GUIDE_LIMIT_BYTES, "guide", rule, "GUIDE_TOO_LONG")


@dataclass(frozen=True, slots=True)
class Generation:
    """One request. `prompt` is text, or token ids already; `stop_tokens` and `stop_strings` end it
    early."""

    prompt: Prompt
    max_new_tokens: int = option(
        128,
        "Generate at most N tokens. Use 0 only with the prompt's log-probabilities.",
        low=0,
        high=2**31,
        alias="max_tokens",
    )
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: tuple[int, ...] = option((), "Tokens that end the answer.", flag=None)
    stop_strings: tuple[str, ...] = option(
        (),
        "End the answer at this text; repeatable.",
        metavar="TEXT",
        keyword="stop",
        alias="stop_strings",
    )
    ignore_eos: bool = option(False, "Continue after an end-of-text token.")
    priority: int = option(0, "Set the priority, -10 to 10; higher runs first.", low=-10, high=10)
    prompt_logprobs: bool = option(
        False, "Report the log-probabilities of the prompt's own tokens."
    )
    guide: Guide | None = option(None, "What the answer must be.", flag=None)
    clip_new_tokens: bool = option(
        True,
        "Generate fewer tokens if the context or the deployment's limit has no room for "
        "`max_new_tokens`; else refuse.",
        flag=None,
    )

    def validate(self) -> None:
        """Raise InvalidArgumentError naming the first field that is wrong whatever the model."""
        _require(
            len(self.prompt) > 0,
            "prompt",
            "is empty: give at least one character or token",
            "EMPTY_PROMPT",
        )
        check_prompt_size(self.prompt)
        check_bounds(self)
        _require(all(self.stop_strings), "stop", "must not hold an empty string")
        rule = f"holds more than {STOP_LIMIT_STRINGS} strings"
        _require(len(self.stop_strings) <= STOP_LIMIT_STRINGS, "stop", rule)
        longest = max(map(text_bytes, self.stop_strings), default=0)
        _require(
            longest <= STOP_LIMIT_BYTES,
            "stop",
            f"holds a string of more than {STOP_LIMIT_BYTES} bytes of UTF-8",
        )
        rule = f"holds more than {STOP_LIMIT_TOKENS} tokens"
        _require(len(self.stop_tokens) <= STOP_LIMIT_TOKENS, "stop_tokens", rule)
        some = self.max_new_tokens > 0 or self.prompt_logprobs
        _require(some, "max_new_tokens", "must be 1 or more without prompt_logprobs")
        if self.guide is not None:
            self.guide.validate()
            _require(
                not self.ignore_eos,
                "ignore_eos",
                "contradicts a guide, which determines the end of the answer",
            )
        self.sampling.validate()


def text_bytes(text: str) -> int:
    """Bytes of a text in UTF-8; invalid text counts too."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def check_prompt_size(prompt: str | Sequence[int]) -> None:
    """Raise InvalidArgumentError naming `prompt` for one that no message of a request's life must
    hold."""
    if isinstance(prompt, str):
        size = text_bytes(prompt)
        limit = PROMPT_LIMIT_BYTES
        unit = "bytes of UTF-8"
    else:
        size = len(prompt)
        limit = PROMPT_LIMIT_TOKENS
        unit = "tokens"
    _require(
        size <= limit,
        "prompt",
        f"has {size} {unit}; at most {limit} are taken: shorten it",
        "PROMPT_TOO_LONG",
    )


class GenerateOptions(TypedDict, total=False):
    """The options of `Client.generate` and `complete`, as keyword arguments.

    The options of a `Generation` and its `Sampling`, which describe each with its default and
    bounds; here type checkers see them too. In addition `request_id`, chosen by the caller so that
    another process can `cancel`, and `timeout_s`, the bound of the whole request (None: no bound).
    """

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: str | Sequence[str]
    stop_tokens: Sequence[int]
    logprobs: bool
    top_logprobs: int
    ignore_eos: bool
    priority: int
    prompt_logprobs: bool
    guide: Guide | None
    clip_new_tokens: bool
    request_id: str
    timeout_s: float | None


def _require(condition: bool, field_name: str, rule: str, reason: str = "") -> None:
    if not condition:
        raise invalid(field_name, rule, reason)


class FinishReason(StrEnum):
    STOP = "stop"
    """End of sequence, a stop token or a stop string."""
    LENGTH = "length"
    """max_new_tokens reached."""
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class StageTiming:
    """The parts of one node's time in one step, in seconds."""

    stage: int
    wait_s: float
    compute_s: float


@dataclass(frozen=True, slots=True)
class Started:
    """The request was admitted; `prompt_tokens` is the tokenised prompt.

    `listened` is whether later events arrive over the client's listener, on the wire; the SDK hides
    the difference.
    """

    request_id: RequestId
    deployment: DeploymentName
    prompt_tokens: tuple[int, ...]
    placement: Placement
    listened: bool = False


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a run of the prompt's own tokens, at most `PROMPT_LOGPROBS_POSITIONS`.

    `position` is the first one's: 1 in the first event, since nothing precedes the prompt's first
    token. `top` has, for each of them, the likeliest tokens there, up to `top_logprobs`, best
    first.
    """

    position: int
    logprobs: tuple[float, ...]
    top: tuple[tuple[TokenLogprob, ...], ...]

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.position + len(self.logprobs)

    def behind(self, position: int) -> PromptLogprobs | None:
        """The part at `position` or later; None if there is none."""
        count = max(0, position - self.position)
        if count == 0:
            return self
        rest = PromptLogprobs(position, self.logprobs[count:], self.top[count:])
        return rest if rest.logprobs else None


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. `position` is absolute: the prompt's length for the first.

    `text` is the text that it completes: it is empty while a character or a possible stop string is
    incomplete. `logprob` is 0 unless the request asked for it. `at_s` is the time of its return to
    the head, in seconds of the head's own steady clock; 0 if it was not sent. Only differences
    between tokens of one head have a meaning.
    """

    position: int
    token: int
    text: str
    logprob: float = 0.0
    top: tuple[TokenLogprob, ...] = ()
    timings: tuple[StageTiming, ...] = ()
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a request; `text` is the rest that was held back."""

    reason: FinishReason
    text: str
    prompt_token_count: int
    new_token_count: int


@dataclass(frozen=True, slots=True)
class Listener:
    """The receiver of a request's tokens: the client's listener `id`, under the client's own
    `number` for the request."""

    id: str
    number: int


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A client's call. `model` is a deployment's name, or a model's when one deployment serves it.

    If `request_id` is '', the coordinator chooses it. Without a `listener` its tokens arrive by its
    own call. A client that lost its stream sends the request again with the tokens that it has
    (`emitted`), and gets the following ones. `scored` is the position after the last one whose
    prompt log-probability it has, 1 if it has none.
    """

    model: str
    generation: Generation
    request_id: str = ""
    listener: Listener | None = None
    emitted: tuple[int, ...] | None = None
    scored: int = 1


GenerationEvent = Started | PromptLogprobs | Token | Finished


UNREAD_TOKENS = 512
"""Tokens of a request that the coordinator sends beyond those that its client has read."""


@dataclass(frozen=True, slots=True)
class ListenerHello:
    """The first message of a listener's stream."""

    id: str


@dataclass(frozen=True, slots=True)
class TokensRead:
    """The application has read `count` tokens more of a request."""

    number: int
    count: int


ListenerMessage = ListenerHello | TokensRead


@dataclass(frozen=True, slots=True)
class Heard:
    """The content of one message, each with the request's number: tokens in order, and then ends.

    A request has finished, or has failed after it had started.
    """

    tokens: tuple[tuple[int, Token], ...] = ()
    ends: tuple[tuple[int, Finished | EdgeShardError], ...] = ()
