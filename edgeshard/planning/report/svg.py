"""Small charts as SVG text: lines, grouped bars, and a simulation's timeline. Pure; no plotting library.

Light background, 720 wide, text at 12. Colours are Okabe and Ito's, which people with any colour vision tell apart;
lines also differ in their markers, and bars and steps are named in a legend.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from edgeshard.planning.inputs.fields import invalid
from edgeshard.planning.simulation.timing import Visit

WIDTH = 720
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442", "#999999")
_INK, _SOFT, _GRID, _PAPER = "#222222", "#5a5a5a", "#e3e3e3", "#ffffff"
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 20, 46, 52
_LEGEND_ROW = 20
_SQUARE = 1
_KINDS = ("prefill", "decode", "head", "send", "return", "read")

Points = Sequence[tuple[float, float]]


@dataclass(slots=True)
class _Canvas:
    """Elements of one picture."""

    height: int
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, anchor: str = "start", size: int = 12, colour: str = _INK) -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
        self.parts.append(f"<text {place}>{escape(words)}</text>")

    def vertical_text(self, x: float, y: float, words: str) -> None:
        place = f'transform="translate({x:.1f} {y:.1f}) rotate(-90)" text-anchor="middle" font-size="12" fill="{_INK}"'
        self.parts.append(f"<text {place}>{escape(words)}</text>")

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str = _GRID) -> None:
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="1"/>'
        )

    def node(
        self, x: float, y: float, width: float, height: float, colour: str, title: str = "", more: str = ""
    ) -> None:
        shape = f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{colour}"{more}'
        self.parts.append(f"{shape}><title>{escape(title)}</title></rect>" if title else f"{shape}/>")

    def marker(self, x: float, y: float, number: int, colour: str) -> None:
        shapes = (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"',
            f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"',
            f'<path d="M{x:.1f} {y - 5:.1f}l5 9h-10z"',
            f'<path d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5-5z"',
        )
        self.parts.append(f'{shapes[number % len(shapes)]} fill="{colour}"/>')

    def done(self, title: str) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" '
            f'height="{self.height}" role="img" font-family="Helvetica, Arial, sans-serif">'
        )
        ground = f'<rect width="{WIDTH}" height="{self.height}" fill="{_PAPER}"/>'
        return "\n".join([head, f"<title>{escape(title)}</title>", ground, *self.parts, "</svg>", ""])


@dataclass(frozen=True, slots=True)
class _Axis:
    """From values to places in the picture."""

    low: float
    high: float
    begin: float
    end: float
    log: bool
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        low, high, at = (
            (math.log10(x) for x in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        return self.begin + (at - low) / (high - low) * (self.end - self.begin)


def line_chart(
    series: Mapping[str, Points],
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    height: int = 400,
) -> str:
    """Lines through points (x, y) by name. Raises InvalidArgumentError where there is nothing that can be shown."""
    points = [point for line in series.values() for point in line]
    if not points or not all(math.isfinite(value) for point in points for value in point):
        raise invalid("series", "must hold points, all of them finite")
    rows = _legend_rows(list(series))
    canvas = _Canvas(height + _LEGEND_ROW * len(rows))
    left, right, top, bottom = _LEFT, WIDTH - _RIGHT, _TOP + _LEGEND_ROW * len(rows), canvas.height - _BOTTOM
    x_axis = _axis([x for x, _ in points], left, right, log_x, "x", from_zero=False)
    y_axis = _axis([y for _, y in points], bottom, top, log_y, "y", from_zero=True)
    canvas.text(left, 24, title, size=15)
    _legend(canvas, rows, lines=True)
    _frame(canvas, y_axis, y_label)
    for tick in x_axis.ticks:
        x = x_axis.place(tick)
        canvas.line(x, bottom, x, bottom + 5, _SOFT)
        canvas.text(x, bottom + 19, _number(tick), "middle", colour=_SOFT)
    canvas.text((left + right) / 2, canvas.height - 10, x_label, "middle")
    for number, line in enumerate(series.values()):
        colour = PALETTE[number % len(PALETTE)]
        places = [(x_axis.place(x), y_axis.place(y)) for x, y in sorted(line)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        canvas.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in places:
            canvas.marker(x, y, number, colour)
    return canvas.done(title)


def bar_chart(
    groups: Mapping[str, Mapping[str, float | None]],
    title: str,
    y_label: str,
    log_y: bool = False,
    height: int = 400,
) -> str:
    """Bars by group and by name within it, with their values above; None leaves the place of a bar empty."""
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    values = [value for bars in groups.values() for value in bars.values() if value is not None]
    if not values or not all(math.isfinite(value) for value in values):
        raise invalid("groups", "must hold values, all of them finite")
    rows = _legend_rows(names)
    canvas = _Canvas(height + _LEGEND_ROW * len(rows))
    left, right, top, bottom = _LEFT, WIDTH - _RIGHT, _TOP + _LEGEND_ROW * len(rows), canvas.height - _BOTTOM
    axis = _axis(values, bottom, top + 10, log_y, "values", from_zero=True)
    canvas.text(left, 24, title, size=15)
    _legend(canvas, rows)
    _frame(canvas, axis, y_label)
    each = (right - left) / len(groups)
    width = each * 0.84 / len(names)
    for place, (group, bars) in enumerate(groups.items()):
        start = left + each * place + each * 0.08
        canvas.text(start + each * 0.42, bottom + 19, group, "middle")
        for number, name in enumerate(names):
            value, x = bars.get(name), start + number * width
            if value is None:
                canvas.text(x + width / 2, bottom - 4, "–", "middle", colour=_SOFT)
                continue
            y = axis.place(value)
            canvas.node(x + 1, y, width - 2, bottom - y, PALETTE[number % len(PALETTE)], f"{group}, {name}: {value:g}")
            canvas.text(x + width / 2, y - 4, _number(value), "middle", size=11 if width > 34 else 9)
    return canvas.done(title)


def timeline(
    visits: Sequence[Visit],
    title: str,
    until_s: float | None = None,
    row_height: int = 26,
    names: tuple[str, str] = ("micro-batch", "token"),
) -> str:
    """One row for each station in the order they are first used, one bar for each service, by micro-batch.

    Prefill is hatched, decode is plain, head work is outlined, frames on links are paler. `until_s` cuts the picture.
    `names` is what to call a visit's `micro_batch` and its `token`.
    """
    if not visits:
        raise invalid("visits", "is empty; there is nothing to show")
    until = until_s if until_s is not None else max(visit.end_s for visit in visits)
    shown = [visit for visit in visits if visit.start_s < until]
    if not shown:
        raise invalid("until_s", f"is {until}; nothing begins before it")
    stations = list(dict.fromkeys(visit.station for visit in shown))
    batches = sorted({visit.micro_batch for visit in shown})
    kinds = [kind for kind in _KINDS if any(visit.kind == kind for visit in shown)]
    rows = _legend_rows([f"{names[0]} {number}" for number in batches])
    top = _TOP + _LEGEND_ROW * (len(rows) + 1)
    canvas = _Canvas(top + row_height * len(stations) + _BOTTOM)
    left = min(220, 24 + max(7 * len(name) for name in stations))
    axis = _axis([0.0, until], left, WIDTH - _RIGHT, False, "until_s", from_zero=True, exact=True)
    bottom = canvas.height - _BOTTOM
    canvas.parts.append(_HATCH)
    canvas.text(12, 24, title, size=15)
    _legend(canvas, rows, 12)
    _kinds_legend(canvas, kinds, _TOP + _LEGEND_ROW * len(rows))
    for tick in axis.ticks:
        canvas.line(axis.place(tick), top, axis.place(tick), bottom)
        canvas.text(axis.place(tick), bottom + 18, _number(tick), "middle", colour=_SOFT)
    canvas.text((left + WIDTH - _RIGHT) / 2, canvas.height - 10, "seconds", "middle")
    for place, name in enumerate(stations):
        y = top + row_height * place
        canvas.line(12, y + row_height, WIDTH - _RIGHT, y + row_height)
        canvas.text(left - 8, y + row_height * 0.5 + 4, name if len(name) < 32 else f"{name[:30]}…", "end")
    for visit in shown:
        x, end = axis.place(visit.start_s), axis.place(min(visit.end_s, until))
        y = top + row_height * stations.index(visit.station) + 3
        colour = PALETTE[batches.index(visit.micro_batch) % len(PALETTE)]
        words = f"{visit.station}: {visit.kind} of {names[1]} {visit.token}, {names[0]} {visit.micro_batch}, "
        if visit.kind == "read":  # of weights, which belong to no step
            words = f"{visit.station}: layer {visit.token}, "
        words += f"{visit.start_s:.6g} to {visit.end_s:.6g} s"
        _service(canvas, (x, y, max(end - x, 1.0), row_height - 6), colour, visit.kind, words)
    return canvas.done(title)


_HATCH = (
    '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="1.6" height="5" fill="#ffffff" fill-opacity="0.75"/></pattern></defs>'
)


def _service(canvas: _Canvas, place: tuple[float, float, float, float], colour: str, kind: str, words: str) -> None:
    x, y, width, height = place
    more = ' fill-opacity="0.45"' if kind in ("send", "return") else ""
    if kind == "head":
        more += f' stroke="{_INK}" stroke-width="1"'
    elif width > 2:
        more += ' stroke="#ffffff" stroke-width="0.4"'
    canvas.node(x, y, width, height, colour, words, more)
    if kind == "prefill":
        canvas.node(x, y, width, height, "url(#hatch)", more=' pointer-events="none"')


def _kinds_legend(canvas: _Canvas, kinds: Sequence[str], y: float) -> None:
    x = 12.0
    for kind in kinds:
        _service(canvas, (x, y - 9, 22, 12), _SOFT, kind, "")
        canvas.text(x + 28, y + 1, kind)
        x += 28 + 7 * len(kind) + 22


def _axis(
    values: Sequence[float], begin: float, end: float, log: bool, name: str, from_zero: bool, exact: bool = False
) -> _Axis:
    low, high = min(values), max(values)
    if log:
        if low <= 0:
            raise invalid(name, f"holds {low:g}; a logarithmic axis shows only what is above 0")
        low, high = (low * 0.5, high * 1.25) if from_zero or low == high else (low, high)
        return _Axis(low, high, begin, end, True, _log_ticks(low, high))
    low = min(low, 0.0) if from_zero else low
    if low == high:
        high = low + 1.0
    step = _step(high - low)
    top = high if exact or not from_zero else math.ceil(high / step - 1e-9) * step
    low = low if not from_zero or low >= 0 else math.floor(low / step) * step
    first = math.ceil(low / step - 1e-9)
    ticks = tuple(n * step for n in range(first, math.floor(top / step + 1e-9) + 1))
    return _Axis(low, top, begin, end, False, ticks)


def _step(span: float) -> float:
    """1, 2 or 5 times a power of ten, for five to ten ticks."""
    power = 10.0 ** math.floor(math.log10(span / 5))
    return next(factor * power for factor in (1, 2, 5, 10) if span / (factor * power) <= 8)


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if math.log10(high / low) < 3 else (1,)
    return tuple(f * 10.0**n for n in decades for f in factors if low * 0.999 <= f * 10.0**n <= high * 1.001)


def _number(value: float) -> str:
    """At most three digits that matter, without an exponent where it stays short."""
    if value == 0:
        return "0"
    if 1e-4 <= abs(value) < 1e6:
        digits = max(0, 2 - math.floor(math.log10(abs(value))))
        text = f"{value:,.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{value:.2g}"


def _frame(canvas: _Canvas, axis: _Axis, label: str) -> None:
    for tick in axis.ticks:
        y = axis.place(tick)
        canvas.line(_LEFT, y, WIDTH - _RIGHT, y)
        canvas.text(_LEFT - 8, y + 4, _number(tick), "end", colour=_SOFT)
    canvas.line(_LEFT, axis.begin, WIDTH - _RIGHT, axis.begin, _SOFT)
    canvas.vertical_text(18, (axis.begin + axis.end) / 2, label)


def _legend_rows(names: Sequence[str]) -> list[list[tuple[int, str, float]]]:
    """(number, name, x) by row, wrapped to the picture's width."""
    rows: list[list[tuple[int, str, float]]] = [[]]
    x = 0.0
    for number, name in enumerate(names):
        width = 22 + 7 * len(name) + 18
        if rows[-1] and x + width > WIDTH - _LEFT - _RIGHT:
            rows.append([])
            x = 0.0
        rows[-1].append((number, name, x))
        x += width
    return rows


def _legend(
    canvas: _Canvas, rows: Sequence[Sequence[tuple[int, str, float]]], left: float = _LEFT, lines: bool = False
) -> None:
    for row, entries in enumerate(rows):
        y = _TOP + _LEGEND_ROW * row
        for number, name, x in entries:
            canvas.marker(left + x + 6, y - 4, number if lines else _SQUARE, PALETTE[number % len(PALETTE)])
            canvas.text(left + x + 18, y, name)
