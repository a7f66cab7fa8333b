// Nodes: their facts and labels, why they are unused, their removal, and the join tokens of more nodes.
import { useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { act, ask } from "./calls.js";
import { Confirmed, Typed } from "./confirm.js";
import { bytes, moment, percent, seconds } from "./format.js";
import { Join } from "./join.js";
import { Doing, Field, Line, Problem, Table } from "./parts.js";
import { usePolled } from "./polled.js";
import { outlookOf } from "./recovery.js";

const NODES = [
  { title: "Node", cell: ({ key }) => html`<a href=${`#/nodes/${encodeURIComponent(key)}`}>${key}</a>` },
  { title: "State", cell: ({ node }) => stateOf(node) },
  { title: "Device", cell: ({ node }) => `${node.model}, ${node.cores} cores` },
  { title: "Layers", cell: ({ layers }) => layers || "none" },
  { title: "Free memory", right: true, cell: ({ node }) => `${bytes(node.free)} of ${bytes(node.budget)}` },
  { title: "Labels", cell: ({ node }) => labelsText(node) || "–" },
];
const FACTS = [
  { title: "Property", cell: ({ key }) => key },
  { title: "Value", cell: ({ value }) => value },
];
const CAUSES = [
  { title: "Deployment", cell: ({ key }) => html`<a href=${`#/deployments/${encodeURIComponent(key)}`}>${key}</a>` },
  { title: "Why it does not use the node", cell: ({ cause }) => cause.why },
  { title: "At a terminal", cell: ({ cause }) => html`<code>${cause.line}</code>` },
];
const COSTS = [
  { title: "Deployment", cell: ({ key }) => key },
  { title: "Layers here", cell: ({ layers }) => layers },
  { title: "Predicted pause", right: true, cell: ({ loss }) => seconds(loss?.pause_s) },
  { title: "Taken over by", cell: ({ loss }) => loss?.taken_by || loss?.note || "unknown so far" },
];

function stateOf(node) {
  const silent = node.silent_s ? `, silent for ${node.silent_s} s` : "";
  const twin = node.twin ? `, another agent at ${node.twin} has its identity` : "";
  return `${node.status}${silent}${node.measuring ? ", measuring" : ""}${twin}`;
}

function labelsText({ labels = {} }) {
  return Object.entries(labels).map(([key, value]) => `${key}=${value}`).join(", ");
}

// The layers of each deployment on a node, by the deployment's name.
function layersOn(name, deployments) {
  const layers = {};
  for (const [deployment, { stages }] of Object.entries(deployments)) {
    const here = Object.values(stages).filter((stage) => stage.node === name);
    if (here.length) layers[deployment] = here.map((stage) => `${stage.first}:${stage.end}`).join(", ");
  }
  return layers;
}

export function Nodes({ picture, rest }) {
  if (rest) return html`<${Details} key=${rest} name=${rest} picture=${picture} />`;
  const rows = Object.entries(picture.nodes).map(([key, node]) => {
    const layers = Object.entries(layersOn(key, picture.deployments)).map(([name, text]) => `${name} ${text}`);
    return { key, node, class: node.status, layers: layers.join("; ") };
  });
  return html`<section><h2>Nodes</h2><${Table} label="Nodes" columns=${NODES} rows=${rows} empty="No node has joined yet." /><${Line} of="edgectl get nodes -o wide" /></section>
    <${Join} picture=${picture} />${picture.site.name && html`<${Tokens} />`}`;
}

function Details({ name, picture }) {
  const node = picture.nodes[name];
  if (!node) return html`<section><h2>${name}</h2><p>The site has no node ${name}. It may have been removed.</p><p><a href="#/nodes">All nodes</a></p><${Line} of="edgectl get nodes" /></section>`;
  return html`<section><h2>${name} <span class=${`phase ${node.status === "connected" ? "ready" : "waiting"}`}>${stateOf(node)}</span></h2>
      <${Table} label=${`Facts of ${name}`} columns=${FACTS} rows=${factsOf(node)} /><${Line} of=${`edgectl describe node ${name}`} /></section>
    <${Use} name=${name} deployments=${picture.deployments} /><${Labels} name=${name} labels=${node.labels ?? {}} /><${Removal} name=${name} picture=${picture} />`;
}

function factsOf(node) {
  const facts = {
    Device: `${node.kind}, ${node.model}, ${node.cores} cores`,
    "Memory of the machine": bytes(node.total),
    "Budget for layers": `${bytes(node.budget)}, of which ${bytes(node.free)} are free`,
    Weights: bytes(node.weights),
    "KV cache": `${bytes(node.kv_used)} in use of ${bytes(node.kv)}`,
    "Free in the system": bytes(node.available),
    Busy: node.load === undefined ? "no layers" : percent(node.load),
  };
  if (node.standby) facts["Standby weights"] = node.standby.join(", ");
  if (node.unknown) facts["Missing measurements"] = `${node.unknown}; run edgectl profile`;
  return Object.entries(facts).map(([key, value]) => ({ key, value }));
}

// The deployments that use the node, and on request why the others do not. The answer plans each of them again.
function Use({ name, deployments }) {
  const [causes, setCauses] = useState(null);
  const here = layersOn(name, deployments);
  const others = Object.keys(deployments).filter((deployment) => !here[deployment]);
  const texts = Object.entries(here).map(([deployment, layers]) => `${deployment} (layers ${layers})`);
  const rows = Object.entries(causes ?? {}).map(([key, cause]) => ({ key, cause }));
  const look = async () => setCauses((await ask("unused", { name })).causes);
  return html`<section><h2>Use</h2><p>${texts.length ? `It has layers of ${texts.join(", ")}.` : "No deployment has layers here."}</p>
    ${!Object.keys(deployments).length && html`<p>Nothing is deployed: <a href="#/models">deploy a model</a>.</p>`}
    ${others.length > 0 && html`<p><${Doing} text=${`Find why it is unused by ${others.length === 1 ? others[0] : `${others.length} deployments`}`} does=${look} /></p>`}
    ${causes && html`<${Table} label="Why it is unused" columns=${CAUSES} rows=${rows} empty="All deployments use it now." />`}
    <${Line} of=${others.length ? `edgectl replan ${others[0]} --dry-run` : "edgectl get deployments"} /></section>`;
}

function Labels({ name, labels }) {
  const [key, setKey] = useState("");
  const [value, setValue] = useState("");
  const change = (text) => act("label", { name, changes: [text] });
  const columns = [
    { title: "Label", cell: (row) => row.key },
    { title: "Value", cell: (row) => labels[row.key] },
    { title: "Remove", cell: (row) => html`<${Doing} text=${`Remove ${row.key}`} does=${() => change(`${row.key}-`)} />` },
  ];
  const set = async () => {
    await change(`${key}=${value}`);
    setKey("");
    setValue("");
  };
  return html`<section><h2>Labels</h2><p class="quiet">Rules of deployments select nodes by labels, such as zone=hall1. A label does not move a running deployment until it is placed again.</p>
    <${Table} label="Labels" columns=${columns} rows=${Object.keys(labels).map((one) => ({ key: one }))} empty="It has no labels." />
    <div class="fields"><${Field} label="Label"><input value=${key} onInput=${(event) => setKey(event.target.value)} autocomplete="off" /><//>
      <${Field} label="Value"><input value=${value} onInput=${(event) => setValue(event.target.value)} autocomplete="off" /><//></div>
    <p><${Doing} text="Set the label" why=${key && value ? "" : "give a label and a value first"} does=${set} /></p>
    <${Line} of=${`edgectl label node ${name} ${key || "zone"}=${value || "hall1"}`} /></section>`;
}

function Removal({ name, picture: { deployments, site } }) {
  const rows = Object.entries(layersOn(name, deployments)).map(([key, layers]) => ({ key, layers, loss: outlookOf(key)?.losses?.find((loss) => loss.node === name) }));
  return html`<section><h2>Remove</h2><p>The agent stops${site.name ? ", and its certificate is refused: it can join again with a new join token" : ""}. Its layers move to other nodes, if they fit there.</p>
    <${Table} label="Cost of the removal" columns=${COSTS} rows=${rows} empty="No deployment has layers on it: the removal costs nothing." />
    <${Typed} name=${name} text=${`Remove ${name}`} does=${(typed) => act("remove-node", { name, typed })} />
    <${Line} of=${`edgectl delete node ${name}`} /></section>`;
}

function Tokens() {
  const [answer, error, request] = usePolled("tokens");
  const revoke = async (id) => {
    await act("revoke-token", { token_id: id });
    await request();
  };
  const columns = [
    { title: "Token", cell: ({ key }) => key },
    { title: "For", cell: ({ token }) => `${token.role} ${token.name}` },
    { title: "Created", cell: ({ token }) => `${token.created_at ? moment(1000 * token.created_at) : "–"}${token.creator ? ` by ${token.creator}` : ""}` },
    { title: "Expires", cell: ({ token }) => moment(1000 * token.expires_at) },
    { title: "Revoke", cell: ({ key }) => html`<${Confirmed} text="Revoke" question="No process can join with it then." does=${() => revoke(key)} />` },
  ];
  const rows = (answer?.tokens ?? []).map((token) => ({ key: token.id, token }));
  return html`<section><h2>Valid join tokens</h2><${Problem} error=${error} />
    ${answer && html`<${Table} label="Valid join tokens" columns=${columns} rows=${rows} empty="No token is valid: each was used, was revoked or has expired." />`}
    <${Line} of="edgectl token list" /></section>`;
}
