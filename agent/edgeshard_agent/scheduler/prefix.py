"""Keys of a prompt's KV blocks, each over all tokens up to its end, and the positions at which its
states are saved. Pure.

A block's keys and values depend on its own tokens and on every earlier token. So its key is a hash
of the previous key and its tokens. The chain begins with the client, so equal prompts of two
clients share nothing, and the speed of an answer does not tell a client what others asked. The hash
is cryptographic, because two prompts with one key would be answered from each other's KV.
(docs/papers/agent.md#kv-memory-in-pages)
"""

from __future__ import annotations

import hashlib
import struct

from edgeshard_agent.scheduler.sequence import Sequence


def extend_keys(sequence: Sequence, block_tokens: int, tokens: int) -> None:
    """Bring `sequence.keys` up to the full blocks within its first `tokens` tokens."""
    keys = sequence.keys
    key = keys[-1] if keys else hashlib.sha256(sequence.client.encode()).digest()
    for first in range(len(keys) * block_tokens, tokens - block_tokens + 1, block_tokens):
        block = sequence.tokens[first : first + block_tokens]
        key = hashlib.sha256(key + struct.pack(f"<{block_tokens}I", *block)).digest()
        keys.append(key)


def next_save(first: int, end: int, block_tokens: int, distance: int) -> int:
    """The position after `first` at which the states of a request with `end` tokens are saved next.

    That is each multiple of `distance`, itself one of `block_tokens`, and the end of the last block that a request with
    the same tokens can share.
    """
    last, regular = (end - 1) // block_tokens * block_tokens, (first // distance + 1) * distance
    return min(last, regular) if last > first else regular
