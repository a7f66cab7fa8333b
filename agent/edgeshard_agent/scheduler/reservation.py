"""The KV memory that is reserved when a request is admitted: its text so far, and an answer of likely length. Pure.

An answer may be as long as its context, and few are. A request whose answer is longer than its reservation grows by
blocks, and takes them from the newest request if memory is short. (docs/papers/agent.md#kv-memory-in-pages)
"""

from __future__ import annotations

from math import ceil

from edgeshard.domain.deployments.deployment import DEFAULT_TOKENS
from edgeshard_agent.scheduler.sequence import Sequence

MAX_REMEMBERED_ANSWERS = 64
"""The weight of all earlier answers in the mean is that of 63 answers at most, so that it follows the newest ones."""


class Reservation:
    """Positions to reserve. `answer_tokens` is the likely length of an answer before any has ended.

    With `overcommit` nothing is reserved for answers.
    """

    def __init__(self, answer_tokens: float = DEFAULT_TOKENS, *, overcommit: bool = False) -> None:
        self._answer_tokens = float(answer_tokens)
        self._answers = 1
        self._overcommit = overcommit

    def positions(self, sequence: Sequence) -> int:
        """The positions to reserve for a request that is admitted: at most its longest text.

        A preempted answer has the same reserve again: its length so far does not predict how much follows.
        """
        answer_tokens = 1 if self._overcommit else max(1, ceil(self._answer_tokens))
        return min(sequence.longest, len(sequence.tokens) + answer_tokens)

    def ended(self, sequence: Sequence) -> None:
        """Learn the length of an answer that came to its end."""
        self._answers = min(self._answers + 1, MAX_REMEMBERED_ANSWERS)
        new_tokens = len(sequence.tokens) - sequence.prompt_count
        self._answer_tokens += (new_tokens - self._answer_tokens) / self._answers
