"""How large a model may say it is. Whatever counts layers, experts or bytes by a config.json holds it against these.

Each is several times what the largest published models have, and small enough that listing a model's tensors takes
seconds at most and no product of sizes is anything but a plain number.
"""

from __future__ import annotations

MAX_LAYERS = 1024
"""The largest published models have a few hundred blocks at the most."""
MAX_EXPERTS = 1024
"""Of one mixture layer; the largest published models have a few hundred."""
MAX_EXPERTS_IN_ALL = 1 << 15
"""Of all layers together: each has tensors of its own in most checkpoints."""
MAX_SIZE = 1 << 20
"""Of a width, a number of heads and whatever has no limit of its own; the widest rows have some hundred thousand."""
MAX_VOCABULARY = 1 << 22
"""The largest published ones have a quarter of a million tokens."""
MAX_CONTEXT = 1 << 27
"""In tokens, as a window too."""
