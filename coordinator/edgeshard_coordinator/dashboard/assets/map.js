// The boxes and links of a site as a map: forces lay it out, the pipeline of one deployment lies over it.
import { useEffect, useRef, useState } from "./vendor/hooks.js";
import { forceCollide, forceLink, forceManyBody, forceSimulation, forceX, forceY } from "./vendor/d3-force.js";
import { html } from "./html.js";
import { count, rate, seconds } from "./format.js";

const WIDTH = 900;
const HEIGHT = 420;
const MOST_LINKS = 200;

// Places by name. A box that is there already stays nearly where it was.
function laidOut(names, pairs, before) {
  const points = names.map((id, index) => {
    const angle = (2 * Math.PI * index) / names.length;
    return { id, x: WIDTH / 2 + 160 * Math.cos(angle), y: HEIGHT / 2 + 120 * Math.sin(angle), ...before[id] };
  });
  const links = pairs.map(([source, target]) => ({ source, target }));
  forceSimulation(points)
    .randomSource(() => 0.5)
    .force("apart", forceManyBody().strength(-500))
    .force("links", forceLink(links).id((point) => point.id).distance(190))
    .force("room", forceCollide(72))
    .force("x", forceX(WIDTH / 2).strength(0.06))
    .force("y", forceY(HEIGHT / 2).strength(0.14))
    .stop()
    .tick(160);
  const inside = (value, most, edge) => Math.max(edge, Math.min(most - edge, value));
  return Object.fromEntries(points.map(({ id, x, y }) => [id, { x: inside(x, WIDTH, 70), y: inside(y, HEIGHT, 36) }]));
}

export function hops(deployment) {
  const nodes = Object.values(deployment?.stages ?? {}).map((stage) => stage.node);
  return nodes.length < 2 ? [] : nodes.map((node, index) => [node, nodes[(index + 1) % nodes.length]]);
}

export function Map({ picture, deployment }) {
  const places = useRef({});
  const [, redraw] = useState(0);
  const names = Object.keys(picture.nodes);
  const ring = hops(deployment);
  const measured = Object.keys(picture.links).map((pair) => pair.split(" ")).filter(([a, b]) => a < b || !picture.links[`${b} ${a}`]);
  const pairs = measured.length > MOST_LINKS ? [] : measured;
  const key = `${names.join()} ${pairs.join()} ${ring.join()}`;
  useEffect(() => {
    places.current = laidOut(names, [...pairs, ...ring].filter(([a, b]) => picture.nodes[a] && picture.nodes[b]), places.current);
    redraw((turn) => turn + 1);
  }, [key]);
  const at = places.current;
  const moving = (deployment?.tokens_per_s ?? 0) > 0;
  return html`<svg class="map" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label="Map of the boxes; the tables below have the same figures">
    ${pairs.map(([a, b]) => at[a] && at[b] && html`<line key=${`${a} ${b}`} class="link" x1=${at[a].x} y1=${at[a].y} x2=${at[b].x} y2=${at[b].y}>
      <title>${a} to ${b}: ${rate(picture.links[`${a} ${b}`]?.bps)}, ${seconds(picture.links[`${a} ${b}`]?.latency_s)}</title></line>`)}
    ${ring.map(([a, b], index) => at[a] && at[b] && html`<line key=${`hop ${index}`} class=${`hop${moving ? " moving" : ""}`} x1=${at[a].x} y1=${at[a].y} x2=${at[b].x} y2=${at[b].y} />`)}
    ${names.map((name) => at[name] && html`<${Box} key=${name} name=${name} node=${picture.nodes[name]} at=${at[name]} stages=${stagesOn(deployment, name)} />`)}
  </svg>`;
}

function stagesOn(deployment, name) {
  return Object.values(deployment?.stages ?? {}).filter((stage) => stage.node === name);
}

function Box({ name, node, at, stages }) {
  const layers = stages.map((stage) => `${stage.first}:${stage.end}`).join(" ");
  const loading = stages.some((stage) => stage.phase === "loading");
  return html`<g class=${`box ${node.status}${stages.length ? " used" : ""}${loading ? " loading" : ""}`} transform=${`translate(${at.x},${at.y})`} data-node=${name}>
    <rect x="-64" y="-28" width="128" height="56" rx="10" />
    <text y="-8" class="name">${name.length > 16 ? `${name.slice(0, 15)}…` : name}</text>
    <text y="8">${node.status === "connected" ? node.kind : node.status}${node.load === undefined ? "" : ` · ${count(100 * node.load)} %`}</text>
    <text y="22">${layers ? `layers ${layers}` : ""}</text>
    <title>${name}: ${node.model}, ${node.status}</title></g>`;
}
