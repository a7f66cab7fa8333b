// The nodes and links of a site as a map. Over it lies the pipeline of one deployment with its
// direction, and over that the moves of the layers of a lost node. Each node shows the memory that
// it holds and has free.
import { useEffect, useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { bytes, count, percent, rate, seconds } from "./format.js";
import { progress } from "./parts.js";

const MAX_LINKS = 200;
const NARROW = matchMedia("(max-width: 40rem)");
// In units of the drawing: a node's box. And, each for a wide and a narrow window: the width, the
// columns of a grid, and the most nodes that fit in a ring.
const [BOX, HALF_HEIGHT] = [180, 46];
const WIDE_MAP = { width: 900, columns: 4, ring: 8 };
const NARROW_MAP = { width: 410, columns: 2, ring: 2 };
const ROW = 146;
const MARGIN = 8;
const TEXT = BOX - 12; // the width of a line in a box
const NAME_SCALE = 1.3; // of the letters of a name, compared with other lines
const MAX_NAME_CHARACTERS = 26;

// The places of nodes by name, and the height of the map. Few nodes are in a ring. More nodes are in
// columns, and every second column is half a row lower, so that a line between two columns passes
// between the nodes of the column between them.
export function placesOf(names, form) {
  const points = names.length <= form.ring ? ringOf(names.length, form) : columnsOf(names.length, form);
  const ys = points.map(([, y]) => y);
  const top = Math.min(...ys) - HALF_HEIGHT - MARGIN;
  const height = names.length ? Math.max(...ys) + HALF_HEIGHT + MARGIN - top : 0;
  return [Object.fromEntries(names.map((name, index) => [name, { x: points[index][0], y: points[index][1] - top }])), height];
}

function ringOf(number, { width, columns }) {
  const first = number === 2 && columns > 2 ? Math.PI : -Math.PI / 2;
  const [across, down] = number > 1 ? [Math.min(330, width / 2 - BOX / 2 - MARGIN), 140] : [0, 0];
  return Array.from({ length: number }, (_, index) => {
    const turn = first + (2 * Math.PI * index) / number;
    return [width / 2 + across * Math.cos(turn), down * Math.sin(turn)];
  });
}

function columnsOf(number, { width, columns }) {
  const first = BOX / 2 + MARGIN;
  const step = (width - 2 * first) / (columns - 1);
  return Array.from({ length: number }, (_, index) => {
    const column = index % columns;
    return [first + step * column, ROW * Math.floor(index / columns) + (column % 2) * (ROW / 2)];
  });
}

// The steps of a token through a deployment: from each stage to the next one, and from the last back to the first.
export function hops(deployment) {
  const nodes = Object.values(deployment?.stages ?? {}).map((stage) => stage.node);
  return nodes.length < 2 ? [] : nodes.map((node, index) => [node, nodes[(index + 1) % nodes.length]]);
}

function useNarrow() {
  const [narrow, setNarrow] = useState(NARROW.matches);
  useEffect(() => {
    const changed = () => setNarrow(NARROW.matches);
    NARROW.addEventListener("change", changed);
    return () => NARROW.removeEventListener("change", changed);
  }, []);
  return narrow;
}

export function Map({ picture, deployment, recovery }) {
  const form = useNarrow() ? NARROW_MAP : WIDE_MAP;
  const names = Object.keys(picture.nodes);
  const [at, height] = placesOf(names, form);
  const measured = Object.keys(picture.links).map((pair) => pair.split(" ")).filter(([a, b]) => a < b || !picture.links[`${b} ${a}`]);
  const pairs = measured.length > MAX_LINKS ? [] : measured;
  const kind = deployment?.phase !== "ready" ? " broken" : deployment.tokens_per_s > 0 ? " moving" : "";
  const there = ([a, b]) => at[a] && at[b] && a !== b;
  const moves = (recovery?.moves ?? []).filter(({ from, to }) => there([from, to]));
  return html`<svg class="map" viewBox=${`0 0 ${form.width} ${height}`} role="img" aria-label="Map of the nodes; the tables below have the same figures">
    <defs>${["hop", "move"].map((name) => html`<marker id=${`${name}-arrow`} class=${`${name}-arrow`} viewBox="0 0 10 10" refX="9" refY="5" markerUnits="userSpaceOnUse" markerWidth="16" markerHeight="16" orient="auto"><path d="M0 0L10 5L0 10z" /></marker>`)}</defs>
    ${pairs.filter(there).map(([a, b]) => html`<line key=${`${a} ${b}`} class="link" x1=${at[a].x} y1=${at[a].y} x2=${at[b].x} y2=${at[b].y}>
      <title>${a} to ${b}: ${rate(picture.links[`${a} ${b}`]?.bps)}, ${seconds(picture.links[`${a} ${b}`]?.latency_s)}</title></line>`)}
    ${hops(deployment).filter(there).map(([a, b], index) => html`<line key=${`hop ${index}`} class=${`hop${kind}`} ...${ends(at[a], at[b], 7)} marker-end="url(#hop-arrow)"><title>From ${a} to ${b}</title></line>`)}
    ${names.map((name) => html`<${Node} key=${name} name=${name} node=${picture.nodes[name]} at=${at[name]} stages=${stagesOn(deployment, name)} />`)}
    ${moves.map((move) => html`<${Move} key=${`${move.from} ${move.to} ${move.first}`} move=${move} line=${ends(at[move.from], at[move.to], 22)} />`)}
  </svg>`;
}

// The line between two nodes from edge to edge, so far to the right of the straight one that both directions are seen.
function ends(from, to, aside) {
  const length = Math.hypot(to.x - from.x, to.y - from.y);
  const [x, y] = [(to.x - from.x) / length, (to.y - from.y) / length];
  const [right, down] = [-aside * y, aside * x];
  const away = (direction, offset, half) => (direction ? (half + 3 - Math.sign(direction) * offset) / Math.abs(direction) : Infinity);
  const out = Math.min(away(x, right, BOX / 2), away(y, down, HALF_HEIGHT), length / 2);
  const into = length - Math.min(away(-x, right, BOX / 2), away(-y, down, HALF_HEIGHT), length / 2);
  return { x1: from.x + x * out + right, y1: from.y + y * out + down, x2: from.x + x * into + right, y2: from.y + y * into + down };
}

function Move({ move, line }) {
  const text = `${move.first}:${move.end}`;
  const [x, y] = [(line.x1 + line.x2) / 2, (line.y1 + line.y2) / 2];
  return html`<g class="move"><line ...${line} marker-end="url(#move-arrow)" />
    <rect x=${x - 24} y=${y - 11} width="48" height="22" rx="6" /><text x=${x} y=${y + 5}>${text}</text>
    <title>Layers ${text} go from ${move.from} to ${move.to}</title></g>`;
}

function stagesOn(deployment, name) {
  return Object.values(deployment?.stages ?? {}).filter((stage) => stage.node === name);
}

// The parts of a node's memory budget, in bytes, each with the name of its colour.
export function memoryParts({ weights, kv, kv_used, budget, free }) {
  const reserved = Math.max(0, budget - free - weights - kv);
  return [["weights", weights], ["used", kv_used], ["kv", Math.max(0, kv - kv_used)], ["reserved", reserved]];
}

// About how wide a text is, in units of the drawing: fonts differ, and most are narrower.
function widthOf(text) {
  const width = (letter) => (/[\sil.,:·]/.test(letter) ? 4 : /[mwMW%]/.test(letter) ? 11 : 7);
  return [...text].reduce((sum, letter) => sum + width(letter), 0);
}

// A line of text in a node's box, squeezed if it may be too long for it.
function Words({ y, text, name, scale = 1 }) {
  const squeezed = scale * widthOf(text) > TEXT ? { textLength: TEXT, lengthAdjust: "spacingAndGlyphs" } : {};
  return html`<text y=${y} class=${name} ...${squeezed}>${text}</text>`;
}

function Node({ name, node, at, stages }) {
  const layers = stages.map((stage) => `${stage.first}:${stage.end}`).join(" ");
  const loading = stages.filter((stage) => stage.phase === "loading");
  const [done, total] = loading.map(progress).reduce(([one, all], [more, most]) => [one + more, all + most], [0, 0]);
  const speed = stages[0]?.tokens_per_s;
  const isHere = node.status === "connected";
  const memory = isHere ? `${bytes(node.budget - node.free)} held, ${bytes(node.free)} free` : "";
  const state = [isHere ? node.kind : node.status, node.load === undefined ? "" : `${percent(node.load)} busy`];
  const work = loading.length ? [`loads ${layers}`, total ? percent(done / total) : ""] : [layers && `layers ${layers}`, layers && speed !== undefined ? `${count(speed, speed < 100 ? 1 : 0)} tokens/s` : ""];
  const texts = [state, work, [memory]].map((parts) => parts.filter(Boolean).join(" · "));
  const short = name.length > MAX_NAME_CHARACTERS ? `${name.slice(0, MAX_NAME_CHARACTERS - 1)}…` : name;
  const left = 8 - BOX / 2;
  const wide = BOX - 16;
  let begin = left;
  const parts = loading.length ? [["done", done]] : isHere ? memoryParts(node) : [];
  const most = loading.length ? total : node.budget;
  return html`<g class=${`node ${node.status}${stages.length ? " used" : ""}${loading.length ? " loading" : ""}`} transform=${`translate(${at.x},${at.y})`} data-node=${name}>
    <rect class="frame" x=${-BOX / 2} y=${-HALF_HEIGHT} width=${BOX} height=${2 * HALF_HEIGHT} rx="10" />
    <${Words} y="-27" name="name" text=${short} scale=${NAME_SCALE} />
    ${texts.map((text, index) => html`<${Words} y=${-10 + 16 * index} text=${text} />`)}
    ${isHere && html`<rect class="ground" x=${left} y="31" width=${wide} height="7" />`}
    ${parts.map(([part, size]) => {
      const x = begin;
      const share = most > 0 ? Math.max(0, Math.min(left + wide - x, (wide * size) / most)) : 0;
      begin += share;
      return html`<rect class=${part} x=${x} y="31" width=${share} height="7" />`;
    })}
    <title>${[`${name}: ${node.model}`, node.status, memory].filter(Boolean).join(", ")}</title></g>`;
}
