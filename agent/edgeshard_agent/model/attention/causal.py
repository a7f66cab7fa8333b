"""torch's causal bias for flash attention, imported when it is needed.

Its module imports torch's compiler: a second, and 80 MB that a node on the CPU's kernels never uses.
"""

from __future__ import annotations

import torch


def causal_lower_right(queries: int, keys: int) -> torch.Tensor:
    """Says of scores [queries, keys] that the queries are the last of the positions."""
    from torch.nn.attention import bias

    made: torch.Tensor = bias.causal_lower_right(queries, keys)
    return made


def prepare_causal(device: str) -> None:
    """Have the import behind us before the first step, where chunks will need it."""
    if torch.device(device).type != "cpu":
        causal_lower_right(1, 1)
