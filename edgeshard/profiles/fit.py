"""From measured points to a cost anywhere, with the error it has on the points it was made from. Pure.

A layer's time is a line in pieces over the rows it computes (weights are read once, then arithmetic takes over), plus a
share for each pair of a query and a key it sees. Prefill with positions behind it has one more share for each row: it
takes the masked attention. Weights of the least squares are relative, so that a decode step counts as much as a long
prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.model import attended_pairs
from edgeshard.domain.profile import ComputeProfile, LayerKind, LayerProfile, LinkProfile, LinkSample, Sample

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative deviation of the fit from its samples."""

    median: float
    max: float


@dataclass(frozen=True, slots=True)
class PhaseFit:
    """Seconds by rows and attended pairs. `nodes` and `values` are the line in pieces, extended by its last slope."""

    nodes: Floats
    values: Floats
    pair_s: float
    masked_row_s: float
    error: FitError

    def seconds(self, rows: float, pairs: float, masked: bool = False) -> float:
        line = float(np.interp(rows, self.nodes, self.values))
        if rows > self.nodes[-1] and len(self.nodes) > 1:
            slope = (self.values[-1] - self.values[-2]) / (self.nodes[-1] - self.nodes[-2])
            line += max(0.0, float(slope)) * (rows - float(self.nodes[-1]))
        return line + self.pair_s * pairs + (self.masked_row_s * rows if masked else 0.0)


@dataclass(frozen=True, slots=True)
class LayerFit:
    """The cost of one layer. `batch` sequences of a prefill are packed into one step."""

    profile: LayerProfile
    prefill: PhaseFit
    decode: PhaseFit

    def prefill_s(self, tokens: float, context: float = 0.0, batch: float = 1.0) -> float:
        """Seconds for `batch` prompts of `tokens` tokens behind `context` positions each."""
        pairs = batch * attended_pairs(tokens, context, self.profile.window)
        return self.prefill.seconds(batch * tokens, pairs, context > 0)

    def decode_s(self, batch: float, context: float) -> float:
        """Seconds for one token of each of `batch` sequences with `context` positions behind them."""
        return self.decode.seconds(batch, batch * attended_pairs(1, context, self.profile.window))


@dataclass(frozen=True, slots=True)
class ProfileFit:
    """The cost of every sort of layer of one profile."""

    profile: ComputeProfile
    layers: tuple[LayerFit, ...]

    @property
    def step_overhead_s(self) -> float:
        return self.profile.step_overhead_s

    def of_kind(self, kind: LayerKind, parameters: int | None = None) -> tuple[LayerFit, ...]:
        """The fits of a kind, of layers of this size when it is given. Raises InvalidArgumentError for none."""
        found = tuple(
            fit
            for fit in self.layers
            if fit.profile.kind is kind and (parameters is None or fit.profile.parameters == parameters)
        )
        if not found:
            size = "" if parameters is None else f" of {parameters} parameters"
            raise InvalidArgumentError(f"the profile has no {kind}{size}; profile this model", field="profile")
        return found

    @property
    def error(self) -> FitError:
        """The worst of all layers and phases."""
        errors = [phase.error for fit in self.layers for phase in (fit.prefill, fit.decode)]
        return FitError(max(error.median for error in errors), max(error.max for error in errors))


def fit_profile(profile: ComputeProfile) -> ProfileFit:
    """Raises InvalidArgumentError for a profile without samples."""
    return ProfileFit(profile, tuple(fit_layer(layer) for layer in profile.layers))


def fit_layer(layer: LayerProfile) -> LayerFit:
    window = layer.window
    return LayerFit(
        layer,
        _fit_phase(layer.prefill, lambda s: attended_pairs(s.count, s.context, window), masks=True),
        _fit_phase(layer.decode, lambda s: s.count * attended_pairs(1, s.context, window), masks=False),
    )


def _fit_phase(samples: Sequence[Sample], pairs_of: Callable[[Sample], float], masks: bool) -> PhaseFit:
    if not samples:
        raise InvalidArgumentError("the profile has a layer without samples; measure again", field="samples")
    seconds = np.array([sample.seconds for sample in samples])
    rows = np.array([float(sample.count) for sample in samples])
    pairs = np.array([pairs_of(sample) for sample in samples])
    masked = rows * np.array([float(sample.context > 0) for sample in samples])
    nodes = np.unique(rows)
    hats = np.stack([np.interp(rows, nodes, unit) for unit in np.eye(len(nodes))], axis=1)
    contexts = {sample.context for sample in samples}
    # With one context the pairs add no information to the rows.
    shares = [pairs] if len(contexts) > 1 else []
    if masks and len(contexts - {0}) > 1:
        shares.append(masked)
    solution = _non_negative_shares(hats, shares, seconds)
    values, pair_s, masked_row_s = solution[: len(nodes)], 0.0, 0.0
    if shares:
        pair_s = float(solution[len(nodes)])
    if len(shares) > 1:
        masked_row_s = float(solution[len(nodes) + 1])
    predicted = hats @ values + pair_s * pairs + masked_row_s * masked
    deviation = np.abs(predicted - seconds) / seconds
    error = FitError(float(np.median(deviation)), float(np.max(deviation)))
    return PhaseFit(nodes, values, pair_s, masked_row_s, error)


def _non_negative_shares(hats: Floats, shares: list[Floats], seconds: Floats) -> Floats:
    """Relative least squares; a share below 0 is noise and is left out, the last one first."""
    kept = list(range(len(shares)))
    while True:
        design = np.column_stack([hats, *(shares[index] for index in kept)]) / seconds[:, None]
        scale = np.linalg.norm(design, axis=0)
        found = np.linalg.lstsq(design / scale, np.ones_like(seconds), rcond=None)[0] / scale
        negative = [position for position in range(len(kept)) if found[hats.shape[1] + position] < 0]
        if not negative:
            break
        del kept[negative[-1]]
    result = np.zeros(hats.shape[1] + len(shares))
    result[: hats.shape[1]] = np.maximum(found[: hats.shape[1]], 0.0)
    for position, index in enumerate(kept):
        result[hats.shape[1] + index] = found[hats.shape[1] + position]
    return result


OUTLIER_DEVIATIONS = 4.0
"""A sample that is this many typical deviations off the line is an outlier."""


def fit_link(samples: Sequence[LinkSample]) -> LinkProfile:
    """Latency and bandwidth by least squares, after a robust line has shown which samples are outliers.

    Raises InvalidArgumentError with fewer than two sizes. A link too fast for its samples to show a slope is given the
    rate of its largest payload, a lower bound. A line that meets zero bytes at or before zero seconds is noise: the
    latency is then the fastest of the smallest payloads, an upper bound, because no link is free.
    """
    sizes = np.array([float(sample.size_bytes) for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    distinct = np.unique(sizes)
    if len(distinct) < 2 or not np.all(np.isfinite(seconds)) or np.min(seconds) <= 0:
        raise InvalidArgumentError("a link needs positive times of two sizes or more; probe it again", field="samples")
    medians = np.array([np.median(seconds[sizes == size]) for size in distinct])
    pairs = list(combinations(range(len(distinct)), 2))
    slope = float(np.median([(medians[b] - medians[a]) / (distinct[b] - distinct[a]) for a, b in pairs]))
    intercept = float(np.median(medians - slope * distinct))
    # Relative to the time itself: a long transfer varies by more than a short one.
    deviation = np.abs(seconds - intercept - slope * sizes) / seconds
    kept = deviation <= OUTLIER_DEVIATIONS * max(float(np.median(deviation)), 0.02)
    if len(np.unique(sizes[kept])) < 2:
        kept = np.ones_like(kept)
    design = np.column_stack([np.ones(int(kept.sum())), sizes[kept]]) / seconds[kept][:, None]
    scale = np.linalg.norm(design, axis=0)
    intercept, slope = np.linalg.lstsq(design / scale, np.ones(int(kept.sum())), rcond=None)[0] / scale
    if slope <= 0:
        slope = float(medians[-1] / distinct[-1])
    latency = float(intercept if intercept > 0 else np.min(seconds[sizes == distinct[0]]))
    residual = np.abs(seconds[kept] - latency - slope * sizes[kept]) / seconds[kept]
    return LinkProfile(latency, 8.0 / float(slope), float(np.median(residual)), len(samples), int(distinct[-1]))
