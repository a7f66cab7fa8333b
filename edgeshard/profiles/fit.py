"""The cost of a layer or a link anywhere, fitted to measured points, with its error on these
points. Pure.

A layer's time is a line in pieces over the rows it computes (weights are read once, then arithmetic
dominates), plus a share for each pair of a query and a key it sees. Prefill after earlier positions
has one more share for each row: it takes the masked attention. The line's first value, its steps
from point to point and the shares are fitted together. None is negative: more rows and positions
never cost less, even if the points are noisy. The weights of the least squares are relative: a
decode step counts as much as a long prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.models.model import attended_pairs
from edgeshard.domain.nodes.profile import (
    ComputeProfile,
    LayerKind,
    LayerProfile,
    LinkProfile,
    LinkSample,
    Sample,
)

Floats = npt.NDArray[np.float64]

_ROUNDING = 1e-12


def non_negative(design: Floats, target: Floats) -> Floats:
    """The x >= 0 of least |design x - wanted|; `design` [N, K] has no column of zeros, `target` is
    [N].

    Lawson and Hanson's active sets (Solving Least Squares Problems, 1974, chapter 23): columns join
    one by one, the steepest first, and leave where the solution would turn negative.
    """
    scale = np.linalg.norm(design, axis=0)
    columns = design / scale
    count = columns.shape[1]
    solution, free = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(3 * count):
        gradient = columns.T @ (target - columns @ solution)
        gradient[free] = -np.inf
        entering = int(np.argmax(gradient))
        if gradient[entering] <= _ROUNDING * np.linalg.norm(target):
            break
        free[entering] = True
        while True:
            tried = np.zeros(count)
            tried[free] = np.linalg.lstsq(columns[:, free], target, rcond=None)[0]
            falling = np.flatnonzero(free & (tried <= 0))
            if not len(falling):
                break
            # As far towards it as nothing turns negative; what reaches 0 first leaves.
            shares = solution[falling] / np.maximum(solution[falling] - tried[falling], _ROUNDING)
            solution = solution + float(np.min(shares)) * (tried - solution)
            free[falling[np.argmin(shares)]] = False
            free &= solution > 0
            solution[~free] = 0.0
        solution = tried
    result: Floats = solution / scale
    return result


REWEIGHTED = 3
"""Rounds in which deviations are taken relative to the fit. Relative to the points, low ones would
count for more."""
NORMAL_DEVIATION = 1.4826
"""Standard deviation of normal noise over its median absolute deviation, which a spread is."""
TAIL = 8.0
"""The slope beyond the last point is a line's through the points from 1/8 of its rows on: two noisy
neighbours are a poor measure of a slope."""


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative deviation of the fit from its samples: median, largest and root mean square.

    `stated` is the deviation that the samples' own spread explains, as a root mean square too.
    """

    median: float
    max: float
    rms: float
    stated: float


@dataclass(frozen=True, slots=True)
class PhaseFit:
    """Seconds by rows and attended pairs: the line in pieces through (nodes, values), and `tail_s`
    a row beyond it."""

    nodes: Floats
    values: Floats
    tail_s: float
    pair_s: float
    masked_row_s: float
    error: FitError

    def seconds(self, rows: float, pairs: float, masked: bool = False) -> float:
        """Seconds of `rows` rows and `pairs` attended pairs; rows after earlier positions are
        `masked`."""
        line = float(np.interp(rows, self.nodes, self.values))
        line += self.tail_s * max(0.0, rows - float(self.nodes[-1]))
        return line + self.pair_s * pairs + (self.masked_row_s * rows if masked else 0.0)


@dataclass(frozen=True, slots=True)
class LayerFit:
    """The cost of one layer. `batch` sequences of a prefill are packed into one step."""

    profile: LayerProfile
    prefill: PhaseFit
    decode: PhaseFit

    def prefill_s(self, tokens: float, context: float = 0.0, batch: float = 1.0) -> float:
        """Seconds for `batch` prompts of `tokens` tokens after `context` positions each."""
        pairs = batch * attended_pairs(tokens, context, self.profile.window)
        return self.prefill.seconds(batch * tokens, pairs, context > 0)

    def decode_s(self, batch: float, context: float) -> float:
        """Seconds for one token of each of `batch` sequences after `context` positions."""
        return self.decode.seconds(batch, batch * attended_pairs(1, context, self.profile.window))


@dataclass(frozen=True, slots=True)
class ProfileFit:
    """The cost of every sort of layer of one profile."""

    profile: ComputeProfile
    layers: tuple[LayerFit, ...]

    def of_kind(self, kind: LayerKind, parameters: int | None = None) -> tuple[LayerFit, ...]:
        """The fits of a kind, of layers of this size when it is given. Raises InvalidArgumentError
        for none."""
        fits = tuple(
            fit
            for fit in self.layers
            if fit.profile.kind is kind
            and (parameters is None or fit.profile.parameters == parameters)
        )
        if not fits:
            size = "" if parameters is None else f" of {parameters} parameters"
            raise InvalidArgumentError(
                f"the profile has no {kind}{size}; profile this model", field="profile"
            )
        return fits


def fit_profile(profile: ComputeProfile) -> ProfileFit:
    """The cost of every layer of a profile. Raises InvalidArgumentError for one without samples."""
    return ProfileFit(profile, tuple(fit_layer(layer) for layer in profile.layers))


def fit_layer(layer: LayerProfile) -> LayerFit:
    """The cost of one sort of layer. Raises InvalidArgumentError for one without samples, or whose
    samples fit no line."""
    window = layer.window
    try:
        prefill = _fit_phase(
            layer.prefill, lambda s: attended_pairs(s.count, s.context, window), masks=True
        )
        decode = _fit_phase(
            layer.decode, lambda s: s.count * attended_pairs(1, s.context, window), masks=False
        )
    except (ArithmeticError, np.linalg.LinAlgError) as error:
        raise InvalidArgumentError(
            f"the samples of a layer fit no line: {error}", field="samples"
        ) from None
    return LayerFit(layer, prefill, decode)


def _fit_phase(
    samples: Sequence[Sample], pairs_of: Callable[[Sample], float], masks: bool
) -> PhaseFit:
    if not samples:
        raise InvalidArgumentError(
            "the profile has a layer without samples; measure again", field="samples"
        )
    seconds = np.array([sample.seconds for sample in samples])
    rows = np.array([float(sample.count) for sample in samples])
    pairs = np.array([pairs_of(sample) for sample in samples])
    masked = rows * np.array([float(sample.context > 0) for sample in samples])
    nodes = np.unique(rows)
    contexts = {sample.context for sample in samples}
    # With one context the pairs add no information to the rows.
    shares = [pairs] if len(contexts) > 1 else []
    if masks and len(contexts - {0}) > 1:
        shares.append(masked)
    steps = [np.clip((rows - low) / (high - low), 0.0, 1.0) for low, high in pairwise(nodes)]
    design = np.column_stack([np.ones_like(rows), *steps, *shares])
    coefficients = _relative(design, seconds)
    values = np.cumsum(coefficients[: len(nodes)])
    pair_s, masked_row_s = (*coefficients[len(nodes) :], 0.0, 0.0)[:2]
    error = _error(
        np.abs(design @ coefficients - seconds) / seconds,
        np.array([sample.spread for sample in samples]),
    )
    return PhaseFit(nodes, values, _tail(nodes, values), float(pair_s), float(masked_row_s), error)


def _error(deviation: Floats, spread: Floats) -> FitError:
    rms, stated = (
        float(np.sqrt(np.mean(values**2))) for values in (deviation, NORMAL_DEVIATION * spread)
    )
    return FitError(float(np.median(deviation)), float(np.max(deviation)), rms, stated)


def _relative(design: Floats, seconds: Floats) -> Floats:
    """Non-negative least squares of relative deviations."""
    scale = seconds
    for _ in range(REWEIGHTED):
        coefficients = non_negative(design / scale[:, None], seconds / scale)
        scale = np.maximum(design @ coefficients, seconds / 10)
    return coefficients


def _tail(nodes: Floats, values: Floats) -> float:
    """Seconds a row beyond the last point, without the reading of weights, which is in the line
    already."""
    last = nodes >= nodes[-1] / TAIL
    x, y = nodes[last], np.maximum(values[last], values[-1] / 100)
    if len(x) == 1 or values[-1] == 0:  # no time of the rows' own, if pairs explain everything
        return float(values[-1] / nodes[-1])
    return float(_relative(np.column_stack([np.ones_like(x), x]), y)[1])


OUTLIER_DEVIATIONS = 4.0
"""A sample that is this many typical deviations off the line is an outlier."""
LEAST_DEVIATION = 0.02
"""Deviation relative to a time. Samples may agree better by chance, and a slope that explains less
of the largest payload's time than this is noise: on a busy machine one gave loopback 12 Tb/s."""


def fit_link(samples: Sequence[LinkSample]) -> LinkProfile:
    """Latency and bandwidth by least squares, after a robust line has shown which samples are
    outliers.

    Raises InvalidArgumentError with fewer than two sizes. If a link is too fast for its samples to
    show a slope, it gets the rate of its largest payload, a lower bound. A line that meets zero
    bytes at or before zero seconds is noise. The latency is then the fastest of the smallest
    payloads, an upper bound, because no link is free.
    """
    sizes = np.array([float(sample.size_bytes) for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    distinct = np.unique(sizes)
    if len(distinct) < 2 or not np.all(np.isfinite(seconds)) or np.min(seconds) <= 0:
        raise InvalidArgumentError(
            "a link needs positive times of two sizes or more; probe it again", field="samples"
        )
    medians = np.array([np.median(seconds[sizes == size]) for size in distinct])
    pairs = list(combinations(range(len(distinct)), 2))
    slope = float(
        np.median([(medians[b] - medians[a]) / (distinct[b] - distinct[a]) for a, b in pairs])
    )
    intercept = float(np.median(medians - slope * distinct))
    # Relative to the time itself: a long transfer varies by more than a short one.
    deviation = np.abs(seconds - intercept - slope * sizes) / seconds
    inliers = deviation <= OUTLIER_DEVIATIONS * max(float(np.median(deviation)), LEAST_DEVIATION)
    if len(np.unique(sizes[inliers])) < 2:
        inliers = np.ones_like(inliers)
    design = (
        np.column_stack([np.ones(int(inliers.sum())), sizes[inliers]]) / seconds[inliers][:, None]
    )
    scale = np.linalg.norm(design, axis=0)
    intercept, slope = (
        np.linalg.lstsq(design / scale, np.ones(int(inliers.sum())), rcond=None)[0] / scale
    )
    if slope * distinct[-1] <= LEAST_DEVIATION * medians[-1]:
        slope = float(medians[-1] / distinct[-1])
    latency = float(intercept if intercept > 0 else np.min(seconds[sizes == distinct[0]]))
    residual = np.abs(seconds[inliers] - latency - slope * sizes[inliers]) / seconds[inliers]
    return LinkProfile(
        latency, 8.0 / float(slope), float(np.median(residual)), len(samples), int(distinct[-1])
    )
