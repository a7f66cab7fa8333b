"""Small charts as SVG text, drawn by matplotlib: lines bars, and a simulation's timeline.

Light background, 720 pixels wide. Colours are Okabe and Ito's, which people with any colour vision
can distinguish. Lines also differ in their markers, and bars and steps are named in a legend. The
same values give the same text: ids have a fixed salt, and no date is written. Drawing needs the
extra `drawings`.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from edgeshard.domain.errors import FailedPreconditionError, extra_line, invalid
from edgeshard.planning.simulation.timing import Visit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 720
PALETTE = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#F0E442",
    "#999999",
)
_INK = "#222222"
_SOFT = "#5a5a5a"
_GRID = "#e3e3e3"
_PIXELS_PER_INCH = 96
_MARKERS = ("o", "s", "^", "D")
_LEGEND_ROW = 20
_ROW_HEIGHT = 26
_KINDS = ("prefill", "decode", "head", "send", "return", "read")
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "edgeshard",
    # part of matplotlib, so that widths are the same everywhere
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,  # points: 12 pixels
    "text.parse_math": False,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _SOFT,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": _GRID,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
    "ytick.major.size": 0,
    "hatch.color": "#ffffff",
    "hatch.linewidth": 1,
    "legend.frameon": False,
    "legend.borderaxespad": 0.2,
}
_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
_PLACES = re.compile(r'\b(?:d|x|y|width|height|transform)="[^"]*"')
_FRACTION = re.compile(r"-?\d+\.\d+")

Points = Sequence[tuple[float, float]]


def check_matplotlib() -> None:
    """Raise FailedPreconditionError if it is not installed."""
    if find_spec("matplotlib") is None:
        raise FailedPreconditionError(
            f"a picture needs the drawings extra: {extra_line('drawings')}", reason="MISSING_EXTRA"
        )


def line_chart(
    series: Mapping[str, Points],
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """Lines through points (x, y) by name. Raises InvalidArgumentError if there is nothing that can
    be shown."""
    points = [point for line in series.values() for point in line]
    if not points or not all(math.isfinite(value) for point in points for value in point):
        raise invalid("series", "must hold points, all of them finite")

    def draw(axes: Axes) -> None:
        for number, (name, line) in enumerate(series.items()):
            xs, ys = zip(*sorted(line), strict=True) if line else ((), ())
            colour, marker = _colour(number), _MARKERS[number % len(_MARKERS)]
            axes.plot(
                xs, ys, color=colour, marker=marker, markersize=5, label=name, gid=f"line-{number}"
            )
        _scale(axes, "x", [x for x, _ in points], log_x, from_zero=False)
        _scale(axes, "y", [y for _, y in points], log_y, from_zero=True)
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.grid(axis="y")

    return _drawn(draw, title, list(series))


def bar_chart(
    groups: Mapping[str, Mapping[str, float | None]], title: str, y_label: str, log_y: bool = False
) -> str:
    """Bars by group and by name within it, with their values above; None leaves the place of a bar
    empty."""
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    values = [value for bars in groups.values() for value in bars.values() if value is not None]
    if not values or not all(math.isfinite(value) for value in values):
        raise invalid("groups", "must hold values, all of them finite")
    width = 0.84 / len(names)
    small = WIDTH * width / len(groups) < 40
    titles: dict[str, str] = {}
    above: dict[str, Any] = {"xytext": (0, 2), "textcoords": "offset points"}

    def draw(axes: Axes) -> None:
        _scale(axes, "y", values, log_y, from_zero=True)
        for number, name in enumerate(names):
            for place, (group, bars) in enumerate(groups.items()):
                x, value = place + (number + 0.5) * width - 0.42, bars.get(name)
                gid = f"bar-{place}-{number}"
                if value is None:
                    axes.annotate("–", (x, axes.get_ylim()[0]), ha="center", color=_SOFT, **above)
                    continue
                titles[gid] = f"{group}, {name}: {value:g}"
                axes.bar(x, value, width * 0.94, color=_colour(number), gid=gid)
                axes.annotate(
                    _number(value), (x, value), ha="center", fontsize=7 if small else 8.5, **above
                )
            axes.bar(0, 0, 0, color=_colour(number), label=name)  # for the legend
        axes.set_xticks(range(len(groups)), list(groups), color=_INK)
        axes.set_xlim(-0.5, len(groups) - 0.5)
        axes.tick_params("x", length=0)
        axes.set_ylabel(y_label)
        axes.grid(axis="y")

    return _drawn(draw, title, names, titles)


def timeline(
    visits: Sequence[Visit],
    title: str,
    until_s: float | None = None,
    names: tuple[str, str] = ("micro-batch", "token"),
) -> str:
    """One row for each station in the order they are first used, one bar for each service, by
    micro-batch.

    Prefill is hatched, decode is plain, head work is outlined, frames on links are paler. `until_s`
    cuts the picture. `names` is what to call a visit's `micro_batch` and its `token`.
    """
    if not visits:
        raise invalid("visits", "is empty; there is nothing to show")
    until = until_s if until_s is not None else max(visit.end_s for visit in visits)
    drawn_visits = [visit for visit in visits if visit.start_s < until]
    if not drawn_visits:
        raise invalid("until_s", f"is {until}; no request begins before it")
    stations = list(dict.fromkeys(visit.station for visit in drawn_visits))
    batches = sorted({visit.micro_batch for visit in drawn_visits})
    kinds = [kind for kind in _KINDS if any(visit.kind == kind for visit in drawn_visits)]
    titles = {
        f"visit-{number}": _visit_words(visit, names) for number, visit in enumerate(drawn_visits)
    }

    def draw(axes: Axes) -> None:
        for number, visit in enumerate(drawn_visits):
            place = visit.start_s, stations.index(visit.station) - 0.38
            width = max(min(visit.end_s, until) - visit.start_s, until / WIDTH)
            colour = _colour(batches.index(visit.micro_batch))
            axes.add_patch(_service(place, width, colour, visit.kind, gid=f"visit-{number}"))
        for number, batch in enumerate(batches):
            axes.add_patch(
                _service((0, -2), 0, _colour(number), "decode", label=f"{names[0]} {batch}")
            )
        for kind in kinds:
            axes.add_patch(_service((0, -2), 0, _SOFT, kind, label=kind))
        axes.set_xlim(0, until)
        axes.set_ylim(len(stations) - 0.5, -0.5)
        axes.set_yticks(
            range(len(stations)), [name if len(name) < 32 else f"{name[:30]}…" for name in stations]
        )
        axes.tick_params("y", labelcolor=_INK)
        axes.xaxis.set_major_formatter(lambda value, _: _number(value))
        axes.set_xlabel("seconds")
        axes.grid(axis="x")

    legend = [*(f"{names[0]} {batch}" for batch in batches), *kinds]
    return _drawn(draw, title, legend, titles, _ROW_HEIGHT * len(stations) + 100)


def _visit_words(visit: Visit, names: tuple[str, str]) -> str:
    words = (
        f"{visit.station}: {visit.kind} of {names[1]} {visit.token}, {names[0]} "
        f"{visit.micro_batch}, "
    )
    if visit.kind == "read":  # reads of weights, which belong to no step
        words = f"{visit.station}: layer {visit.token}, "
    return f"{words}{visit.start_s:.6g} to {visit.end_s:.6g} s"


def _service(
    place: tuple[float, float], width: float, colour: str, kind: str, **options: Any
) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(
        place,
        width,
        0.76,
        facecolor=colour,
        edgecolor=_INK if kind == "head" else "#ffffff",
        linewidth=0.75 if kind == "head" else 0.3,
        alpha=0.45 if kind in ("send", "return") else None,
        hatch="////" if kind == "prefill" else None,
        **options,
    )


def _colour(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def _drawn(
    draw: Callable[[Axes], None],
    title: str,
    names: Sequence[str],
    titles: Mapping[str, str] | None = None,
    height: int = 400,
) -> str:
    """The drawing by `draw` on the axes, below the title and a legend of `names`."""
    check_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = max(1, min(len(names), int(92 // (max(map(len, names)) + 5))))
    legend = _LEGEND_ROW * math.ceil(len(names) / columns)
    size = WIDTH / _PIXELS_PER_INCH, (height + legend) / _PIXELS_PER_INCH
    with rc_context(_STYLE):
        figure = Figure(figsize=size, dpi=72, layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        options: dict[str, Any] = {"ncols": columns, "columnspacing": 1.5, "handlelength": 1.5}
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.02), **options)
        axes.set_title(title, loc="left", fontsize=11, pad=12 + 0.75 * legend)
        figure.draw_without_rendering()
        # The last digits of the layout's results change with the order of a hash table.
        place = [round(edge, 4) for edge in axes.get_position().bounds]
        figure.set_layout_engine("none")
        axes.set_position((place[0], place[1], place[2], place[3]))
        return _text(figure, title, titles or {})


def _text(figure: Figure, title: str, titles: Mapping[str, str]) -> str:
    """The picture, with what shows when the pointer is over a part of it."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={**_METADATA, "Title": title})
    text = out.getvalue()
    for gid, words in titles.items():
        text = text.replace(f'<g id="{gid}">', f'<g id="{gid}"><title>{escape(words)}</title>', 1)
    # A hundredth of a point is enough, and the same on every machine.
    return _PLACES.sub(lambda match: _FRACTION.sub(_rounded, match[0]), text)


def _rounded(match: re.Match[str]) -> str:
    return f"{float(match[0]):.2f}".rstrip("0").rstrip(".")


def _scale(axes: Axes, name: str, values: Sequence[float], log: bool, from_zero: bool) -> None:
    """One axis, "x" or "y", for these values."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis = axes.xaxis if name == "x" else axes.yaxis
    low, high = min(values), max(values)
    if log:
        if low <= 0:
            raise invalid(name, f"holds {low:g}; a logarithmic axis shows only what is above 0")
        low, high = (low * 0.5, high * 1.25) if from_zero or low == high else (low, high)
        axes.set(**{f"{name}scale": "log"})
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1000 else (1,)))
        axis.set_minor_locator(NullLocator())
    elif from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
        room = 0.06 * (high - low or 1.0)
        low, high = low - room * (low < 0), high + room
    if low < high:
        margin = 0.0 if log or from_zero else 0.02 * (high - low)
        axes.set(**{f"{name}lim": (low - margin, high + margin)})
    axis.set_major_formatter(lambda value, _: _number(value))


def _number(value: float) -> str:
    """At most three significant digits, without an exponent if it stays short."""
    if value == 0:
        return "0"
    if 1e-4 <= abs(value) < 1e6:
        digits = max(0, 2 - math.floor(math.log10(abs(value))))
        text = f"{value:,.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{value:.2g}"
