// The new places of the layers of lost nodes: the nodes that took them, and how long answers paused,
// compared with the prediction made while the node was still there.
import { html } from "./html.js";
import { ask } from "./calls.js";
import { moment, seconds } from "./format.js";
import { Loading, Table } from "./parts.js";
import { now, tellAll, watch } from "./store.js";

const MOST = 5;
const ASK_MS = 5000;
const SHOWN_MS = 20000; // arrows stay this long after it is over: small models move within one picture
const known = {}; // by deployment: its stages, pauses and outlook when all its nodes were last there
let recoveries = []; // the newest first

function lookAt({ nodes, links, deployments }) {
  for (const [name, deployment] of Object.entries(deployments)) {
    const before = known[name];
    const here = (stage) => nodes[stage.node]?.status === "connected";
    const lost = Object.values(before?.stages ?? {}).filter((stage) => !here(stage));
    let open = recoveries.find((one) => one.name === name && !one.endedAt);
    if (lost.length && !open) {
      const nodesLost = [...new Set(lost.map((stage) => stage.node))];
      open = { name, lost, nodes: nodesLost, began: Date.now(), pauses: before.pauses, predicted: predicted(before.outlook, nodesLost), moves: [] };
      recoveries = [open, ...recoveries].slice(0, MOST);
    }
    const whole = deployment.phase === "ready" && Object.values(deployment.stages).every(here);
    const pauses = deployment.measured?.pauses ?? 0;
    if (open) {
      open.moves = movesOf(open.lost, Object.values(deployment.stages).filter(here));
      if (whole) {
        open.endedAt = Date.now();
        setTimeout(tellAll, SHOWN_MS);
      }
    }
    const over = recoveries.find((one) => one.name === name);
    if (over?.measured === undefined && pauses > over?.pauses) over.measured = deployment.measured.last_pause_s ?? deployment.measured.pause_s;
    if (whole) remember(name, deployment, pauses, `${deployment.epoch} ${Object.keys(links).length} ${Object.values(nodes).map((node) => `${node.status} ${node.unknown} ${node.standby}`)}`);
  }
  for (const name of Object.keys(known)) if (!deployments[name]) delete known[name];
}

// An outlook depends on `version`. Planning it costs time, so this page requests it only now and then.
function remember(name, { stages }, pauses, version) {
  const { askedAt = -ASK_MS, ...before } = known[name] ?? {};
  const asks = before.version !== version && performance.now() - askedAt >= ASK_MS;
  known[name] = { ...before, stages, pauses, askedAt: asks ? performance.now() : askedAt, version: asks ? version : before.version };
  if (!asks) return;
  const keep = (found) => {
    if (known[name]?.version !== version) return;
    known[name].outlook = found;
    tellAll();
  };
  ask("outlook", { name }).then(keep, () => keep(undefined));
}

function movesOf(lost, stages) {
  return lost.flatMap((from) =>
    stages.map((to) => ({ from: from.node, to: to.node, first: Math.max(from.first, to.first), end: Math.min(from.end, to.end) })),
  ).filter(({ first, end }) => first < end);
}

function predicted(outlook, nodes) {
  const pauses = (outlook?.losses ?? []).filter((loss) => nodes.includes(loss.node)).map((loss) => loss.pause_s);
  return pauses.length && !pauses.includes(undefined) ? Math.max(...pauses) : undefined;
}

watch(() => now().picture.nodes && lookAt(now().picture));

// The newest recovery of a deployment, while it runs and shortly after.
export function recoveryOf(name) {
  const newest = recoveries.find((one) => one.name === name);
  return newest && (!newest.endedAt || Date.now() - newest.endedAt < SHOWN_MS) ? newest : null;
}

// The last forecast for a deployment.
export function outlookOf(name) {
  return known[name]?.outlook;
}

const layers = ({ first, end }) => `${first}:${end}`;
const COLUMNS = [
  { title: "Lost node", cell: ({ one }) => one.nodes.join(", ") },
  { title: "Measured pause", right: true, cell: ({ one }) => seconds(one.measured) },
  { title: "Predicted pause", right: true, cell: ({ one }) => seconds(one.predicted) },
  { title: "Layers", cell: ({ one }) => `${one.name} ${one.lost.map(layers).join(" ")}` },
  { title: "Its layers went to", cell: ({ one }) => takers(one) || "no node yet" },
  { title: "Began", cell: ({ one }) => moment(one.began) },
];
const REBUILT = [
  { title: "Node", cell: ({ stage }) => stage.node },
  { title: "Layers", cell: ({ stage }) => layers(stage) },
  { title: "State", cell: ({ stage }) => html`<${Loading} stage=${stage} />` },
];

function takers({ moves }) {
  return moves.map((move) => `${move.to} ${layers(move)}`).join(", ");
}

// The deployments that are being built again, and the nodes that were lost while this page was open.
export function Recoveries({ picture, of }) {
  const shown = recoveries.filter((one) => !of || one.name === of);
  if (!shown.length) return null;
  const rows = shown.map((one) => ({ key: `${one.name} ${one.began}`, one }));
  return html`<section><h2>Recoveries</h2>
    <div role="status">${shown.filter((one) => !one.endedAt).map((one) => html`<p class="bad">${one.nodes.join(", ")} ${one.nodes.length > 1 ? "are" : "is"} lost: layers ${one.lost.map(layers).join(", ")} of ${one.name} ${one.moves.length ? `go to ${takers(one)}` : "have no node yet"}.</p>
      <${Table} label=${`Stages of ${one.name}`} columns=${REBUILT} rows=${Object.entries(picture.deployments[one.name]?.stages ?? {}).map(([key, stage]) => ({ key, stage }))} empty="It has no stages." />`)}</div>
    <${Table} label="Recoveries" columns=${COLUMNS} rows=${rows} /></section>`;
}
