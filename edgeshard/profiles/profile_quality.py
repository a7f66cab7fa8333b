"""Doubts about a profile: few points were measured, the node was busy or held stages, or no cost
fits the points. Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from edgeshard.domain.nodes.profile import ComputeProfile, Effort, LayerKind
from edgeshard.profiles.fit import ProfileFit

UNDISTURBED = 0.95
"""Share of a core that the profiler must have had."""
OTHERS = 0.05
"""Share of the cores that others may take: daemons of the system take 1 or 2 %."""
STEADY = 0.1
"""Typical spread of repeats on a node of its own: a few per cent, rarely twice that."""
MISSED = 0.1
"""Root mean square by which a fit may miss its points whatever they state. No layer is exactly
lines and shares: if attention overlaps with the reading of weights at some points and not at
others, it is 5 to 8 % off."""


def busy(profile: ComputeProfile) -> tuple[str, ...]:
    """Signs that the node did other work while it was measured, in words; empty for a quiet
    node."""
    return tuple(_busy(profile))


def may_improve(profile: ComputeProfile) -> bool:
    """Whether the node is to be measured again when it is quiet and holds no stage."""
    return profile.effort is Effort.FIRST or profile.beside_stages or bool(busy(profile))


def quality_warnings(fit: ProfileFit) -> tuple[str, ...]:
    """Reasons why a plan from this profile may be wrong, in words for an operator; empty for a
    sound one."""
    reasons = (
        ["few points, measured once while a deployment waited"]
        if fit.profile.effort is Effort.FIRST
        else []
    )
    signs = busy(fit.profile)
    reasons += ["measured while stages ran"] if fit.profile.beside_stages else []
    reasons += [f"busy while measured ({', '.join(signs)})"] if signs else []
    return (*reasons, *_missed(fit))


def _busy(profile: ComputeProfile) -> Iterator[str]:
    if profile.others_share > OTHERS:
        yield f"others took {profile.others_share:.0%} of its cores"
    if profile.processor_share < UNDISTURBED:
        yield f"{profile.processor_share:.0%} of a core was left"
    blocks = [
        layer for layer in profile.layers if layer.kind in (LayerKind.BLOCK, LayerKind.MOE_BLOCK)
    ]
    spreads = [sample.spread for layer in blocks for sample in (*layer.prefill, *layer.decode)]
    if spreads and statistics.median(spreads) > STEADY:
        yield f"repeats differ by {statistics.median(spreads):.0%}"


def _missed(fit: ProfileFit) -> Iterator[str]:
    for layer in fit.layers:
        # rows are looked up in microseconds, whatever the fit
        if layer.profile.kind is LayerKind.EMBEDDING:
            continue
        for name, phase in (("prefill", layer.prefill), ("decode", layer.decode)):
            error = phase.error
            if error.rms > max(MISSED, error.stated):
                yield (
                    f"the {name} fit of its {layer.profile.kind} misses the points by "
                    f"{error.rms:.0%}, "
                    f"and their repeats differ by {error.stated:.0%}"
                )
