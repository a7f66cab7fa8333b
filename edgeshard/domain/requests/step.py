"""One step of a pipeline: a micro-batch of spans, the KV bookkeeping that precedes it, and its
result.

The head forms a `StepPlan`; every stage applies it in the same order. Only the head allocates KV
blocks and slots of states; stages check and obey.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.requests.generation import (
    Guide,
    PromptLogprobs,
    Sampling,
    StageTiming,
    TokenLogprob,
)

STEP_TOKENS = 512
"""Tokens a head puts into a step: its decodes, and chunks of prompts for the rest."""
MAX_STEP_TOKENS = 4 * STEP_TOKENS
"""Tokens a stage accepts in a step, and that a slice of a long prompt may have."""
DRAFT_TOKENS = 128
"""Tokens of a request that a draft reads before one step: it reads a longer text over several
steps."""
DRAFTED_REQUESTS = 4
"""Most requests that a draft drafts for at once: if more decode, they share a step's weights
already."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Consecutive tokens of a prompt; `position` is the first token's."""

    position: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive positions of one request: [first_position, first_position + token_count).

    `request` is the head's number for it, unique within (pipeline, epoch). `first_position` equal
    to the request's KV length appends. A smaller one truncates, which a request's first span in an
    epoch may do, and any as far as positions were drafted. A larger one is an error.

    `sample` is whether the token after the span's last position is to be sampled. Only the
    request's first span of the epoch has `sampling`, `seen_tokens`, `guide` and `answer_tokens`.
    `seen_tokens` are the token ids a repetition penalty counts as seen, `answer_tokens` its answer
    so far if its guide or a penalty uses it. `party` identifies the client that requested the
    guide; it is not 0 if the head accepts `pending` instead of a token.

    `targets` are tokens of the prompt whose log-probabilities are requested, each after a position
    of the span.

    The tokens of its last `guesses` positions are draft tokens. A token is drawn after one only if
    all draft tokens before equal the drawn ones, so a span brings one token more than accepted
    draft tokens. Only the stages that embed or sample receive the draft tokens (`GuessedTokens`).
    """

    request: int
    first_position: int
    token_count: int
    sample: bool = False
    sampling: Sampling | None = None
    seen_tokens: tuple[int, ...] = ()
    guide: Guide | None = None
    answer_tokens: tuple[int, ...] = ()
    party: int = 0
    targets: Targets | None = None
    guesses: int = 0

    @property
    def certain_position(self) -> int:
        """The position after the last one whose token is no draft token: the position of its first
        sampled token."""
        return self.end_position - self.guesses

    @property
    def end_position(self) -> int:
        """The position after the span's last one: its KV length afterwards, and the position of its
        last sampled token."""
        return self.first_position + self.token_count


GuessedTokens = Mapping[int, tuple[int, ...]]
"""The draft tokens of a step, by request."""


def guessed_tokens(spans: Iterable[Span], tokens: Sequence[int]) -> GuessedTokens:
    """The draft tokens of these spans; `tokens` has all their positions' tokens."""
    guessed, end = dict[int, tuple[int, ...]](), 0
    for span in spans:
        end += span.token_count
        if span.guesses:
            guessed[span.request] = tuple(tokens[end - span.guesses : end])
    return guessed


@dataclass(frozen=True, slots=True)
class KvGrant:
    """KV blocks appended to a request's table; `first_index` is the table's length before the
    grant.

    `filled` is the number of positions that the blocks hold already. It is 0, or all of them for
    blocks that other requests filled: these begin this request's table, which shares them and never
    writes to them. `swapped` blocks begin the table of a request that was swapped out, and get its
    swapped content. With the first grant a request also gets the `slot` of its states, if the model
    has any.
    """

    request: int
    first_index: int
    blocks: tuple[int, ...]
    filled: int = 0
    swapped: bool = False
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class StateCopy:
    """The states of a request after its first `position` positions, and another slot that keeps a
    copy of them."""

    request: int
    position: int
    slot: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of every stage in one step, applied in this order: saves, frees, swap-outs, grants,
    restores, spans.

    The spans are packed one after the other along the token axis, at most one for each request. A
    step without spans is legal: a cancel is one. The next `following` steps belong to the same
    sweep: a stage that streams weights waits for them, and reads each layer once for all. For a
    request in `swap_outs` a stage copies the content of its blocks and frees the blocks, until they
    are granted `swapped` or the request is freed.

    If the model has states, `saves` copy the states that requests have as the step begins into
    slots that no request has. A request that begins with `filled` blocks takes its states from such
    a slot, by `restores`. Repeating either changes nothing. A copy stays until its slot is saved to
    or granted.
    """

    frees: tuple[int, ...] = ()
    grants: tuple[KvGrant, ...] = ()
    spans: tuple[Span, ...] = ()
    following: int = 0
    swap_outs: tuple[int, ...] = ()
    saves: tuple[StateCopy, ...] = ()
    restores: tuple[StateCopy, ...] = ()

    @property
    def token_count(self) -> int:
        """Tokens over all spans: the T of the step's tensors."""
        return sum(span.token_count for span in self.spans)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token the last stage chose for `position` of a request.

    `logprob` is its natural-log probability under the model's unmodified distribution, over the
    tokens that its guide allows if there is one; 0 unless requested. `top` holds the most likely
    allowed tokens, best first, up to the requested number.
    """

    request: int
    position: int
    token: int
    logprob: float = 0.0
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class SpanLogprobs:
    """Log-probabilities of some of a span's targets."""

    request: int
    prompt_logprobs: PromptLogprobs


@dataclass(frozen=True, slots=True)
class GuideFailure:
    """A request's guide led to no token; `message` is the reason, and holds nothing of the
    answer."""

    request: int
    message: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """The last stage's answer to the head.

    Every span that samples has its token and the tokens after accepted draft tokens. Otherwise it
    has the reason why its guide has none, or is `pending` and follows with a later step's result.
    The answer also has the log-probabilities of the targets, in the order of their positions, and
    the times of the step. `forced` tokens spell the only text that a request's guide allows after
    its newest token. They are likely but not certain, since that text may be split into tokens in
    other ways."""

    tokens: tuple[SampledToken, ...] = ()
    timings: tuple[StageTiming, ...] = ()
    prompt_logprobs: tuple[SpanLogprobs, ...] = ()
    guide_failures: tuple[GuideFailure, ...] = ()
    pending: tuple[int, ...] = ()
    forced: GuessedTokens = field(default_factory=dict)

    @property
    def right_guesses(self) -> int:
        """Tokens that follow another one of their request, whose draft token was accepted."""
        return len(self.tokens) - len({token.request for token in self.tokens})


@dataclass(frozen=True, slots=True)
class Tensor:
    """Raw row-major little-endian elements."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """A step between two stages: hidden states [tokens, width], absent if the plan has no spans."""

    number: int
    plan: StepPlan
    hidden: Tensor | None
    timings: tuple[StageTiming, ...] = ()


@dataclass(frozen=True, slots=True)
class ReturnedStep:
    """A step that has been through every stage and returns to the head."""

    number: int
    result: StepResult


WireStep = ForwardStep | ReturnedStep
"""Steps that travel from stage to stage: onwards, and from the last one back to the head."""
