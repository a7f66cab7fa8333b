// A chart of lines over time, with a table of the same figures.
import { useEffect, useRef } from "./vendor/hooks.js";
import uPlot from "./vendor/uplot.js";
import { clock, day, moment } from "./format.js";
import { html } from "./html.js";
import { Table } from "./parts.js";

const HEIGHT = 170;
const COLOURS = 6;
const EVERY_S = 10;
const FONT = "12px system-ui";
const GAP = 8; // pixels between a label and the plot
const HALF_TIME = 32; // pixels of a time's label beyond the end of its axis

// `lines` are { name, values }, with null for unknown values; `show` makes a text of a figure.
export function Chart({ title, times, lines, show, most }) {
  const place = useRef(null);
  const plot = useRef(null);
  const key = lines.map(({ name }) => name).join("\n");
  useEffect(() => {
    // Both are gone from their references before the last of their events comes.
    const box = place.current;
    const made = (plot.current = drawn(box, lines, show, most));
    const resized = new ResizeObserver(() => made.setSize({ width: box.clientWidth, height: HEIGHT }));
    const repainted = () => made.redraw();
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    resized.observe(box);
    scheme.addEventListener("change", repainted);
    return () => {
      resized.disconnect();
      scheme.removeEventListener("change", repainted);
      made.destroy();
    };
  }, [key]);
  useEffect(() => plot.current.setData([times, ...lines.map(({ values }) => values)]));
  const columns = [
    { title: "Time", cell: ({ key: at }) => moment(1000 * at) },
    ...lines.map(({ name, values }) => ({ title: name, right: true, cell: ({ index }) => text(values[index], show) })),
  ];
  const tens = (at) => Math.floor(at / EVERY_S);
  const rows = times.map((at, index) => ({ key: at, index })).filter(({ key: at, index }) => tens(at) !== tens(times[index + 1])).reverse();
  return html`<figure class="chart"><figcaption>${title}</figcaption>
    <p class="lines">${lines.map(({ name, values }, index) => html`<span class=${`line-${index % COLOURS}`}>${name} <b>${text(values.at(-1), show)}</b></span>`)}</p>
    <div class="plot" aria-hidden="true" ref=${place}></div>
    ${times.length > 0 && html`<p class="quiet">${day(1000 * times.at(-1))}</p>`}
    <details><summary>${title} as a table</summary><${Table} label=${title} columns=${columns} rows=${rows} empty="Nothing yet." /></details></figure>`;
}

function text(value, show) {
  return value === null || value === undefined ? "–" : show(value);
}

function drawn(place, lines, show, most) {
  const figure = getComputedStyle(place);
  const axis = { stroke: () => figure.color, grid: { stroke: () => figure.borderTopColor, width: 1 }, ticks: { show: false }, font: FONT };
  const colour = (index) => () => getComputedStyle(place.parentElement.querySelectorAll(".lines span")[index] ?? place).color;
  const options = {
    width: place.clientWidth,
    height: HEIGHT,
    legend: { show: false },
    cursor: { show: false },
    scales: { y: { range: (_, low, high) => [0, most ?? (high > 0 ? 1.1 * high : 1)] } },
    padding: [10, HALF_TIME, 0, 0],
    axes: [{ ...axis, size: 22, space: 80, values: (_, ticks) => ticks.map((at) => clock(1000 * at)) }, { ...axis, size: widthOf, values: (_, ticks) => ticks.map(show) }],
    series: [{}, ...lines.map((_, index) => ({ stroke: colour(index), width: 1.5, dash: index < COLOURS ? undefined : [6, 4], points: { show: false } }))],
  };
  return new uPlot(options, [[], ...lines.map(() => [])], place);
}

// The width that an axis needs for its labels, and for the half of the first time below it.
function widthOf(plot, labels) {
  plot.ctx.save();
  plot.ctx.font = FONT;
  const widths = (labels ?? []).map((label) => plot.ctx.measureText(label).width);
  plot.ctx.restore();
  return Math.max(HALF_TIME, GAP + Math.ceil(Math.max(0, ...widths)));
}
