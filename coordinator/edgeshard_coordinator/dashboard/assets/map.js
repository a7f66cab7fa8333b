// The nodes and links of a site as a map: forces lay it out, the pipeline of one deployment lies over it, and over that
// the way of the layers of a node that was lost.
import { useEffect, useRef, useState } from "./vendor/hooks.js";
import { forceCollide, forceLink, forceManyBody, forceSimulation, forceX, forceY } from "./vendor/d3-force.js";
import { html } from "./html.js";
import { count, rate, seconds } from "./format.js";
import { progress } from "./parts.js";

const MOST_LINKS = 200;
const ROOMY_NODES = 12; // for more of them the map shows more, and all of it smaller
const NARROW = matchMedia("(max-width: 40rem)");

// The width and height of the map, in units of which a node is 128 wide.
function sizeFor(nodes, narrow) {
  const scale = Math.max(1, Math.sqrt(nodes / ROOMY_NODES));
  return narrow ? [400 * scale, 420 * scale] : [900 * scale, 400 * scale];
}

// Places by name. A node that is there already stays nearly where it was.
function laidOut(names, pairs, before, [width, height]) {
  const points = names.map((id, index) => {
    const angle = (2 * Math.PI * index) / names.length - Math.PI / 2;
    return { id, x: width * (0.5 + 0.3 * Math.cos(angle)), y: height * (0.5 + 0.3 * Math.sin(angle)), ...before[id] };
  });
  const links = pairs.map(([source, target]) => ({ source, target }));
  forceSimulation(points)
    .randomSource(() => 0.5)
    .force("apart", forceManyBody().strength(-500))
    .force("links", forceLink(links).id((point) => point.id).distance(Math.min(260, 0.6 * width)))
    .force("room", forceCollide(76))
    .force("x", forceX(width / 2).strength(0.06))
    .force("y", forceY(height / 2).strength(0.14))
    .stop()
    .tick(160);
  const inside = (value, most, edge) => Math.max(edge, Math.min(most - edge, value));
  return Object.fromEntries(points.map(({ id, x, y }) => [id, { x: inside(x, width, 70), y: inside(y, height, 36) }]));
}

// What of the map has nodes, from top to bottom.
function viewed(at, width) {
  const ys = Object.values(at).map(({ y }) => y);
  return ys.length ? `0 ${Math.min(...ys) - 44} ${width} ${Math.max(...ys) - Math.min(...ys) + 88}` : `0 0 ${width} 88`;
}

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
  const places = useRef({});
  const [, redraw] = useState(0);
  const names = Object.keys(picture.nodes);
  const size = sizeFor(names.length, useNarrow());
  const ring = hops(deployment);
  const measured = Object.keys(picture.links).map((pair) => pair.split(" ")).filter(([a, b]) => a < b || !picture.links[`${b} ${a}`]);
  const pairs = measured.length > MOST_LINKS ? [] : measured;
  const key = `${names.join()} ${pairs.join()} ${size}`;
  useEffect(() => {
    places.current = laidOut(names, [...pairs, ...ring].filter(([a, b]) => picture.nodes[a] && picture.nodes[b]), places.current, size);
    redraw((turn) => turn + 1);
  }, [key]);
  const at = places.current;
  const kind = deployment?.phase !== "ready" ? " broken" : deployment.tokens_per_s > 0 ? " moving" : "";
  const there = ([a, b]) => at[a] && at[b];
  return html`<svg class="map" viewBox=${viewed(at, size[0])} role="img" aria-label="Map of the nodes; the tables below have the same figures">
    <defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="5" markerHeight="5" orient="auto"><path d="M0 0L10 5L0 10z" /></marker></defs>
    ${pairs.filter(there).map(([a, b]) => html`<line key=${`${a} ${b}`} class="link" x1=${at[a].x} y1=${at[a].y} x2=${at[b].x} y2=${at[b].y}>
      <title>${a} to ${b}: ${rate(picture.links[`${a} ${b}`]?.bps)}, ${seconds(picture.links[`${a} ${b}`]?.latency_s)}</title></line>`)}
    ${ring.filter(there).map(([a, b], index) => html`<line key=${`hop ${index}`} class=${`hop${kind}`} x1=${at[a].x} y1=${at[a].y} x2=${at[b].x} y2=${at[b].y} />`)}
    ${(recovery?.moves ?? []).filter(({ from, to }) => from !== to && there([from, to])).map((move) => html`<${Move} key=${`${move.from} ${move.to} ${move.first}`} move=${move} from=${at[move.from]} to=${at[move.to]} />`)}
    ${names.filter((name) => at[name]).map((name) => html`<${Node} key=${name} name=${name} node=${picture.nodes[name]} at=${at[name]} stages=${stagesOn(deployment, name)} />`)}
  </svg>`;
}

// Beside the line between two nodes, where the pipeline may be, and from edge to edge.
function Move({ move, from, to }) {
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const long = Math.hypot(dx, dy) || 1;
  const [aside, begin, end] = [14, edge(dx, dy) / long, 1 - (edge(dx, dy) + 4) / long];
  const point = (share) => [from.x + dx * share - (aside * dy) / long, from.y + dy * share + (aside * dx) / long];
  const [[x1, y1], [x2, y2], [x, y]] = [point(begin), point(end), point(0.5)];
  const text = `${move.first}:${move.end}`;
  return html`<g class="move"><line x1=${x1} y1=${y1} x2=${x2} y2=${y2} marker-end="url(#arrow)" />
    <rect x=${x - 24} y=${y - 11} width="48" height="22" rx="6" /><text x=${x} y=${y + 5}>${text}</text>
    <title>Layers ${text} go from ${move.from} to ${move.to}</title></g>`;
}

// How far a node reaches in a direction.
function edge(dx, dy) {
  const long = Math.hypot(dx, dy) || 1;
  return Math.min(68 / Math.abs(dx / long || 1e-9), 32 / Math.abs(dy / long || 1e-9));
}

function stagesOn(deployment, name) {
  return Object.values(deployment?.stages ?? {}).filter((stage) => stage.node === name);
}

function Node({ name, node, at, stages }) {
  const layers = stages.map((stage) => `${stage.first}:${stage.end}`).join(" ");
  const loading = stages.filter((stage) => stage.phase === "loading");
  const [done, total] = loading.map(progress).reduce(([one, all], [more, most]) => [one + more, all + most], [0, 0]);
  return html`<g class=${`node ${node.status}${stages.length ? " used" : ""}${loading.length ? " loading" : ""}`} transform=${`translate(${at.x},${at.y})`} data-node=${name}>
    <rect class="frame" x="-64" y="-28" width="128" height="56" rx="10" />
    ${loading.length > 0 && html`<rect class="ground" x="-54" y="18" width="108" height="6" rx="3" /><rect class="done" x="-54" y="18" width=${total ? 108 * Math.min(1, done / total) : 0} height="6" rx="3" />`}
    <text y="-9" class="name">${name.length > 16 ? `${name.slice(0, 15)}…` : name}</text>
    <text y="${loading.length ? 3 : 6}">${node.status === "connected" ? node.kind : node.status}${node.load === undefined ? "" : ` · ${count(100 * node.load)} % busy`}</text>
    <text y="${loading.length ? 15 : 21}">${layers ? `layers ${layers}` : ""}</text>
    <title>${name}: ${node.model}, ${node.status}</title></g>`;
}
