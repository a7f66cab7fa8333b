"""The router of a mixture of experts: which experts compute a token, and with which shares."""

from __future__ import annotations

import ctypes

import torch

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard_agent.ops import layouts, native

_MIN_SUM = 1e-20
"""Added to the sum of normalised shares, because sigmoids may all be 0. Any other sum stays the
same."""


def route(
    logits: torch.Tensor,
    count: int,
    correction: torch.Tensor | None = None,
    *,
    sigmoid: bool = False,
    normalised: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    kept_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts, shares), both [T, count], int64 and float32, the largest first, from logits [T,
    experts].

    The experts have the `count` largest scores, which are softmax or, if `sigmoid`, sigmoid of the
    logits in float32. `correction` [experts] is added to the scores for this choice only. If there
    are several `groups` of experts, the choice is among the `kept_groups` whose two best experts
    have the largest sum. The kernels choose the first of equal scores. Shares are the scores,
    divided by their sum if `normalised`, times `scale`. Raises InvalidArgumentError if the sizes do
    not fit.
    """
    rows, experts = logits.shape
    fits = 0 < count <= experts and experts % groups == 0 and kept_groups <= groups
    fits = fits and (groups == 1 or experts // groups > 1)
    if not fits or (correction is not None and correction.shape != (experts,)):
        raise InvalidArgumentError(
            f"{count} of {experts} experts in {kept_groups} of {groups} groups cannot be chosen: "
            "groups must divide "
            "the experts, and a correction must have a value for each",
            field="count",
        )
    takes = logits.is_cpu and logits.dtype in native.ELEMENTS and experts <= native.MAX_EXPERTS
    library = native.active() if takes else None
    if library is None:
        return _routed(logits, count, correction, sigmoid, normalised, scale, groups, kept_groups)
    logits = logits.contiguous()
    added = None if correction is None else correction.float().contiguous()
    choices = torch.empty((rows, count), dtype=torch.int64)
    shares = torch.empty((rows, count))
    call = layouts.RoutingStruct(
        logits=logits.data_ptr(),
        correction=None if added is None else added.data_ptr(),
        places=choices.data_ptr(),
        shares=shares.data_ptr(),
        scale=scale,
        rows=rows,
        experts=experts,
        chosen=count,
        groups=groups,
        kept_groups=kept_groups,
        sigmoid=sigmoid,
        normalised=normalised,
        element=native.ELEMENTS[logits.dtype],
    )
    library.edgeshard_route(ctypes.addressof(call), torch.get_num_threads())
    return choices, shares


def _routed(
    logits: torch.Tensor,
    count: int,
    correction: torch.Tensor | None,
    sigmoid: bool,
    normalised: bool,
    scale: float,
    groups: int,
    kept_groups: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = (
        torch.sigmoid(logits.float())
        if sigmoid
        else torch.softmax(logits, dim=-1, dtype=torch.float32)
    )
    ranked = scores if correction is None else scores + correction
    if groups > 1:
        by_group = ranked.view(len(ranked), groups, -1)
        best = by_group.topk(2, dim=-1).values.sum(-1).topk(kept_groups, dim=-1).indices
        left_out = torch.ones(by_group.shape[:2], dtype=torch.bool, device=logits.device).scatter_(
            1, best, False
        )
        ranked = by_group.masked_fill(left_out.unsqueeze(-1), float("-inf")).view(ranked.shape)
    choices = ranked.topk(count, dim=-1).indices
    shares = scores.gather(1, choices)
    if normalised:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + _MIN_SUM)
    return choices, shares * scale
