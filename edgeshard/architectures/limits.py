"""The largest sizes that a config.json may state; they are checked before anything counts layers,
experts or bytes.

Each is several times the largest published models' value. It is also small enough that listing a
model's tensors takes seconds at most and products of sizes stay ordinary numbers.
"""

from __future__ import annotations

MAX_LAYERS = 1024
"""The largest published models have a few hundred blocks at the most."""
MAX_EXPERTS = 1024
"""Experts of one mixture layer; the largest published models have a few hundred."""
MAX_EXPERTS_IN_ALL = 1 << 15
"""Experts of all layers together: each has tensors of its own in most checkpoints."""
MAX_SIZE = 1 << 20
"""A width, a number of heads and any size without a limit of its own; the widest rows have some
hundred thousand."""
MAX_VOCABULARY = 1 << 22
"""The largest published ones have a quarter of a million tokens."""
CHUNK_MULTIPLE = 16
"""Chunks of positions within which layers attend are multiples of this: a chunk begins with a block
of the KV pool."""
MAX_CONTEXT = 1 << 27
"""Tokens of a context or of a window."""
