// Deployments: loading, predicted and measured figures, the effect of losing a node, and an operator's actions.
import { useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { act } from "./calls.js";
import { Deploy } from "./deploy.js";
import { bytes, count, percent, seconds } from "./format.js";
import { Doing, Field, Line, Loading, Table } from "./parts.js";
import { Recoveries, outlookOf } from "./recovery.js";

const STAGES = [
  { title: "Node", cell: ({ stage }) => stage.node },
  { title: "Layers", cell: ({ stage }) => `${stage.first}:${stage.end}` },
  { title: "State", cell: ({ stage }) => html`<${Loading} stage=${stage} />` },
  { title: "Weights", right: true, cell: ({ stage }) => bytes(stage.weights) },
  { title: "KV cache used", right: true, cell: ({ stage }) => `${bytes(stage.kv_used)} of ${bytes(stage.kv)}` },
  { title: "Tokens/s", right: true, cell: ({ stage }) => count(stage.tokens_per_s, 1) },
  { title: "Busy", right: true, cell: ({ stage }) => percent(stage.busy) },
];
const FIGURES = [
  { title: "Metric", cell: ({ key }) => key },
  { title: "Predicted", right: true, cell: ({ predicted }) => predicted },
  { title: "Measured", right: true, cell: ({ measured }) => measured },
];
const LOSSES = [
  { title: "Lost node", cell: ({ loss }) => loss.node },
  { title: "Pause", right: true, cell: ({ loss }) => seconds(loss.pause_s) },
  { title: "Its layers move to", cell: ({ loss }) => loss.taken_by || loss.note || "–" },
];

export function Deployments({ picture, rest }) {
  const names = Object.keys(picture.deployments);
  if (rest && picture.deployments[rest]) return html`<${Deployment} key=${rest} name=${rest} deployment=${picture.deployments[rest]} picture=${picture} />`;
  const rows = names.map((key) => ({ key, deployment: picture.deployments[key] }));
  const columns = [
    { title: "Name", cell: ({ key }) => html`<a href=${`#/deployments/${encodeURIComponent(key)}`}>${key}</a>` },
    { title: "Model", cell: ({ deployment }) => deployment.model },
    { title: "State", cell: ({ deployment }) => html`<span class=${`phase ${deployment.phase}`}>${deployment.phase}</span>` },
    { title: "Nodes", cell: ({ deployment }) => Object.values(deployment.stages).map((stage) => stage.node).join(", ") },
    { title: "Running", right: true, cell: ({ deployment }) => count(deployment.running) },
    { title: "Waiting", right: true, cell: ({ deployment }) => count(deployment.waiting) },
    { title: "Tokens/s", right: true, cell: ({ deployment }) => count(deployment.tokens_per_s, 1) },
  ];
  return html`<section><h2>Deployments</h2>
      <${Table} label="Deployments" columns=${columns} rows=${rows} empty="Nothing is deployed." /><${Line} of="edgectl get deployments" /></section>
    <${Deploy} picture=${picture} />`;
}

function Deployment({ name, deployment, picture }) {
  const [typed, setTyped] = useState("");
  const outlook = outlookOf(name);
  const { predicted = {}, measured = {} } = deployment;
  const figures = [
    { key: "First token", predicted: seconds(predicted.first_token_s), measured: seconds(measured.first_token_s) },
    { key: "Between tokens", predicted: seconds(predicted.between_tokens_s), measured: seconds(measured.between_tokens_s) },
    { key: "Tokens/s in total", predicted: count(predicted.tokens_per_s, 1), measured: count(deployment.tokens_per_s, 1) },
    { key: "Pause when a node is lost", predicted: worst(outlook), measured: seconds(measured.last_pause_s ?? measured.pause_s) },
  ];
  const stages = Object.entries(deployment.stages).map(([key, stage]) => ({ key, stage }));
  const losses = (outlook?.losses ?? []).map((loss) => ({ key: loss.node, loss }));
  return html`<section><h2>${name} <span class=${`phase ${deployment.phase}`}>${deployment.phase}</span></h2>
      <p>${deployment.model} in ${deployment.dtype}, epoch ${deployment.epoch}: ${deployment.running} running, ${deployment.waiting} waiting, ${deployment.served} served.</p>
      ${deployment.failure && html`<p role="alert">${deployment.failure}</p>`}
      <${Table} label="Stages" columns=${STAGES} rows=${stages} /><${Line} of=${`edgectl describe deployment ${name}`} /></section>
    <${Recoveries} picture=${picture} of=${name} />
    <section><h2>Predicted and measured</h2><${Table} label="Predicted and measured" columns=${FIGURES} rows=${figures} />
      ${predicted.bottleneck && html`<p class="quiet">${predicted.bottleneck}</p>`}</section>
    <section><h2>If a node is lost</h2><${Table} label="If a node is lost" columns=${LOSSES} rows=${losses} empty="Available when the deployment is ready." /></section>
    <${Move} name=${name} />
    <section><h2>Delete</h2><p class="fields"><${Field} label="Type its name"><input value=${typed} onInput=${(event) => setTyped(event.target.value)} autocomplete="off" /><//>
      <${Doing} text="Delete" danger=${true} why=${typed !== name && "Type the name of the deployment first."} does=${() => act("delete", { name, typed })} done=${() => "It is being deleted."} /></p>
      <${Line} of=${`edgectl delete deployment ${name}`} /></section>`;
}

// Whether another placement is better, and the step to it.
function Move({ name }) {
  const [found, setFound] = useState(null);
  const look = async () => {
    const answer = await act("replan", { name, look: true });
    setFound(answer);
    return answer;
  };
  const why = !found ? "Find a better placement first." : found.reason !== "WOULD_MOVE" && "No better placement was found.";
  return html`<section><h2>Move</h2><p class="fields"><${Doing} text="Find a better placement" does=${look} done=${advice} />
      <${Doing} text="Move it there" why=${why} does=${() => act("replan", { name })} done=${advice} /></p><${Line} of=${`edgectl replan ${name}`} /></section>`;
}

function worst(outlook) {
  const pauses = (outlook?.losses ?? []).map((loss) => loss.pause_s).filter((pause) => pause !== undefined);
  return pauses.length ? `up to ${seconds(Math.max(...pauses))}` : "–";
}

function advice(found) {
  const where = found.found.stages.map((stage) => `${stage.node}=${stage.first}:${stage.end}`).join(", ");
  const gain = found.gain === undefined ? "" : `, ${percent(found.gain)} better`;
  const words = { MOVED: `It moves to ${where}${gain}.`, WOULD_MOVE: `It would move to ${where}${gain}.`, SAME_LAYERS: "Each node already has its best layers.", SMALL_GAIN: "Another placement would gain less than 5 %.", NOTHING_NEW: "The result has not changed since the last search." };
  return words[found.reason] ?? found.note ?? found.reason;
}
