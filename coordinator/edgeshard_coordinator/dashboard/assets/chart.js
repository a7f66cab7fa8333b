// A chart of lines over time, with a table of the same figures.
import { useEffect, useRef } from "./vendor/hooks.js";
import uPlot from "./vendor/uplot.js";
import { html } from "./html.js";
import { Table } from "./parts.js";

const HEIGHT = 170;
const COLOURS = 6;
const EVERY_S = 10;

// `lines` are { name, values }, with null where nothing is known; `show` makes a text of a figure.
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
    { title: "Time", cell: ({ key: at }) => clock(at) },
    ...lines.map(({ name, values }) => ({ title: name, right: true, cell: ({ index }) => text(values[index], show) })),
  ];
  const tens = (at) => Math.floor(at / EVERY_S);
  const rows = times.map((at, index) => ({ key: at, index })).filter(({ key: at, index }) => tens(at) !== tens(times[index + 1])).reverse();
  return html`<figure class="chart"><figcaption>${title}</figcaption>
    <p class="lines">${lines.map(({ name, values }, index) => html`<span class=${`line-${index % COLOURS}`}>${name} <b>${text(values.at(-1), show)}</b></span>`)}</p>
    <div class="plot" aria-hidden="true" ref=${place}></div>
    <details><summary>${title} as a table</summary><${Table} label=${title} columns=${columns} rows=${rows} empty="Nothing yet." /></details></figure>`;
}

function clock(at) {
  return new Date(1000 * at).toLocaleTimeString();
}

function text(value, show) {
  return value === null || value === undefined ? "–" : show(value);
}

function drawn(place, lines, show, most) {
  const figure = getComputedStyle(place);
  const axis = { stroke: () => figure.color, grid: { stroke: () => figure.borderTopColor, width: 1 }, ticks: { show: false }, font: "12px system-ui" };
  const colour = (index) => () => getComputedStyle(place.parentElement.querySelectorAll(".lines span")[index] ?? place).color;
  const options = {
    width: place.clientWidth,
    height: HEIGHT,
    legend: { show: false },
    cursor: { show: false },
    scales: { y: { range: (_, low, high) => [0, most ?? (high > 0 ? 1.1 * high : 1)] } },
    axes: [{ ...axis, size: 30, space: 70, values: (_, ticks) => ticks.map(clock) }, { ...axis, size: 64, values: (_, ticks) => ticks.map(show) }],
    series: [{}, ...lines.map((_, index) => ({ stroke: colour(index), width: 1.5, dash: index < COLOURS ? undefined : [6, 4], points: { show: false } }))],
  };
  return new uPlot(options, [[], ...lines.map(() => [])], place);
}
