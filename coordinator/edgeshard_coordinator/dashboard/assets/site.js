// Nodes and links, with the pipeline of one deployment over them.
import { useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { bytes, count, percent, rate, seconds } from "./format.js";
import { Bar, Line, Table } from "./parts.js";
import { First, isFirst } from "./first.js";
import { Map, memoryParts } from "./map.js";
import { Recoveries, recoveryOf } from "./recovery.js";

const NODES = [
  { title: "Node", cell: ({ key }) => key },
  { title: "State", cell: ({ node }) => `${node.status}${node.silent_s ? `, silent ${node.silent_s} s` : ""}${node.measuring ? ", measuring" : ""}${node.twin ? `, another agent at ${node.twin} has its identity` : ""}` },
  { title: "Layers", cell: ({ layers }) => layers || "–" },
  { title: "Device", cell: ({ node }) => `${node.model}, ${node.cores} cores` },
  { title: "Memory budget", cell: ({ node, key }) => html`<${Memory} node=${node} name=${key} />` },
  { title: "Weights", right: true, cell: ({ node }) => bytes(node.weights) },
  { title: "KV cache used", right: true, cell: ({ node }) => `${bytes(node.kv_used)} of ${bytes(node.kv)}` },
  { title: "Free for models", right: true, cell: ({ node }) => bytes(node.free) },
  { title: "Free in the system", right: true, cell: ({ node }) => bytes(node.available) },
  { title: "Busy", right: true, cell: ({ node }) => percent(node.load) },
];

const LINKS = [
  { title: "From", cell: ({ from }) => from },
  { title: "To", cell: ({ to }) => to },
  { title: "Bits per second", right: true, cell: ({ link }) => rate(link.bps) },
  { title: "Latency", right: true, cell: ({ link }) => seconds(link.latency_s) },
];

function Memory({ node, name }) {
  const parts = memoryParts(node);
  const [, , , [, reserved]] = parts;
  const label = `${name}: weights ${bytes(node.weights)}, KV cache ${bytes(node.kv_used)} used of ${bytes(node.kv)}, reserved ${bytes(reserved)}, free ${bytes(node.free)} of ${bytes(node.budget)}`;
  return html`<${Bar} label=${label} parts=${parts} total=${node.budget} />`;
}

// The memory of all connected nodes together, in bytes: their budgets, and what deployments leave of them.
export function memoryOf(nodes) {
  const connected = Object.values(nodes).filter((node) => node.status === "connected");
  const sum = (figure) => connected.reduce((all, node) => all + node[figure], 0);
  return { nodes: connected.length, budget: sum("budget"), free: sum("free") };
}

function Sum({ nodes }) {
  const { nodes: number, budget, free } = memoryOf(nodes);
  return html`<p class="sum"><b>${bytes(budget)}</b> in ${number} ${number === 1 ? "node" : "nodes"}; the largest model that fits has <b>${bytes(free)}</b>, with its KV cache.</p>`;
}

function layersOn(picture, node) {
  const found = Object.entries(picture.deployments).flatMap(([name, { stages }]) =>
    Object.values(stages).filter((stage) => stage.node === node).map((stage) => `${name} ${stage.first}:${stage.end}`),
  );
  return found.join(", ");
}

export function Site({ picture }) {
  const names = Object.keys(picture.deployments);
  const [chosen, choose] = useState("");
  const name = picture.deployments[chosen] ? chosen : names[0];
  const nodes = Object.entries(picture.nodes).map(([key, node]) => ({ key, node, class: node.status, layers: layersOn(picture, key) }));
  const links = Object.entries(picture.links).map(([key, link]) => ({ key, link, from: key.split(" ")[0], to: key.split(" ")[1] }));
  const there = nodes.filter(({ node }) => node.status === "connected").length;
  const first = isFirst(picture) && html`<${First} picture=${picture} />`;
  if (!nodes.length) return html`${first}<section><h2>No node has joined yet</h2><p>The map shows nodes once they have joined.</p><${Line} of="edgectl get nodes" /></section>`;
  return html`${first}<section><h2>${there} of ${nodes.length} nodes connected</h2>
      <${Sum} nodes=${picture.nodes} />
      ${names.length > 1 && html`<p class="fields"><label>Pipeline of <select value=${name} onChange=${(event) => choose(event.target.value)}>${names.map((one) => html`<option>${one}</option>`)}</select></label></p>`}
      ${name && html`<${Serving} name=${name} deployment=${picture.deployments[name]} />`}
      <${Map} picture=${picture} deployment=${picture.deployments[name]} recovery=${recoveryOf(name)} /><${Legend} /></section>
    <${Recoveries} picture=${picture} />
    <section><h2>Nodes</h2><${Table} label="Nodes" columns=${NODES} rows=${nodes} /><${Line} of="edgectl get nodes -o wide" /></section>
    <section><h2>Links</h2><${Table} label="Links" columns=${LINKS} rows=${links} empty="No link has been measured yet." /><${Line} of="edgectl top" /></section>`;
}

function Serving({ name, deployment }) {
  const rate = deployment.tokens_per_s === undefined ? "" : `, ${count(deployment.tokens_per_s, 1)} tokens/s`;
  return html`<p><a href=${`#/deployments/${encodeURIComponent(name)}`}>${name}</a> <span class=${`phase ${deployment.phase}`}>${deployment.phase}</span>: ${deployment.running} ${deployment.running === 1 ? "request" : "requests"} running, ${deployment.waiting} waiting${rate}</p>`;
}

function Legend() {
  return html`<p class="legend"><span class="weights">weights</span><span class="used">KV cache in use</span><span class="kv">KV cache not in use</span><span class="reserved">reserved</span><span class="ground">free</span></p>`;
}
