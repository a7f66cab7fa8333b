"""Keys of a prompt's KV blocks, by all that came before them. Pure.

A block's keys and values depend on its own tokens and on every token in front of them, so its key is a hash of the key
before it and its tokens. The chain begins with the client: equal prompts of two clients have nothing in common, so that
nobody can learn from how fast an answer comes what others asked. The hash is a strong one: whoever found two prompts of
one key would be answered from the other's KV.
"""

from __future__ import annotations

import hashlib
import struct

from edgeshard_agent.engine.sequence import Sequence


def extend_keys(sequence: Sequence, block_tokens: int, tokens: int) -> None:
    """Bring `sequence.keys` up to the full blocks within its first `tokens` tokens."""
    keys = sequence.keys
    key = keys[-1] if keys else hashlib.sha256(sequence.client.encode()).digest()
    for first in range(len(keys) * block_tokens, tokens - block_tokens + 1, block_tokens):
        block = sequence.tokens[first : first + block_tokens]
        key = hashlib.sha256(key + struct.pack(f"<{block_tokens}I", *block)).digest()
        keys.append(key)
