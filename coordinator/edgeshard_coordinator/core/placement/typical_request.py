"""The typical request that a placement is planned for. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgeshard.domain.deployments.deployment import DEFAULT_TOKENS, DeploymentSpec, check_typical
from edgeshard.domain.deployments.placement import LengthsFrom
from edgeshard.domain.deployments.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Typical:
    """Tokens of a prompt and of an answer, and their origin; `GIVEN` only if both were."""

    prompt_tokens: int
    new_tokens: int
    source: LengthsFrom


def typical_request(spec: DeploymentSpec, max_context: int, traffic: Traffic) -> Typical:
    """The lengths of the spec, else the means of the traffic, else `DEFAULT_TOKENS`; never more than the deployment
    takes.

    Memory is reserved by the spec's limits, whatever is typical. Raises InvalidArgumentError naming the length for one
    that does not fit in `max_context` tokens.
    """
    check_typical(spec, max_context)
    if spec.prompt_tokens is not None and spec.new_tokens is not None:
        return Typical(spec.prompt_tokens, spec.new_tokens, LengthsFrom.GIVEN)
    prompt = new = min(DEFAULT_TOKENS, max(1, max_context // 2))
    if traffic.requests:
        prompt, new = math.floor(traffic.prompts.mean), math.floor(traffic.answers.mean)
    if spec.new_tokens is None:
        new = max(1, min(new, spec.most_new_tokens(max_context), max_context - (spec.prompt_tokens or 1)))
    else:
        new = spec.new_tokens
    prompt = spec.prompt_tokens or max(1, min(prompt, max_context - new))
    return Typical(prompt, new, LengthsFrom.SEEN if traffic.requests else LengthsFrom.DEFAULT)
