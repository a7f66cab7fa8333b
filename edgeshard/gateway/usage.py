"""The tokens used by the answers of one HTTP request."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgeshard.domain.requests.generation import Finished, Started


@dataclass(slots=True)
class TokenUsage:
    """The tokens of `per_prompt` answers to each prompt, in order; a prompt counts once."""

    per_prompt: int = 1
    new_tokens: int = 0
    _prompts: dict[int, int] = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompts.values())

    def started(self, answer: int, event: Started) -> None:
        self._prompts[answer // self.per_prompt] = len(event.prompt_tokens)

    def finished(self, event: Finished) -> None:
        self.new_tokens += event.new_token_count

    def record(self) -> dict[str, int]:
        """The counts as OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self.prompt_tokens + self.new_tokens,
        }
