"""Names under which a prompt, generated text, token ids or a secret could reach a log line or a
dump."""

from __future__ import annotations

PRIVATE_KEYS = frozenset(
    {
        "content",
        "emitted_tokens",
        "generation",
        "key",
        "message_text",
        "messages",
        "password",
        "prompt",
        "prompt_tokens",
        "secret",
        "stop_strings",
        "text",
        "token",
        "token_ids",
        "tokens",
    }
)
"""Logs drop them. A dump refuses types that have such a field, unless it is a number of them."""
