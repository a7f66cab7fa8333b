// The site at this moment: the requests that run and wait, and the last ten minutes in charts.
import { useEffect, useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { count, percent, seconds } from "./format.js";
import { heard, times, values } from "./history.js";
import { Bar, Line, STATES, Table } from "./parts.js";
import { Chart } from "./chart.js";
import { Timeline } from "./timeline.js";

const REQUESTS = [
  { title: "Client", cell: ({ request }) => request.who ?? "–" },
  { title: "Deployment", cell: ({ request }) => request.deployment },
  { title: "State", cell: ({ request }) => STATES[request.state] },
  { title: "Prompt tokens read", cell: ({ request: { read, prompt } }) => html`<${Progress} done=${read} of=${prompt} part="weights" />` },
  { title: "New tokens", cell: ({ request }) => html`<${Progress} done=${request.new} of=${request.limit} part="used" />` },
  { title: "Age", right: true, cell: ({ request }) => (request.age_s < 100 ? `${request.age_s} s` : seconds(request.age_s)) },
];
const SHARES = ["p50", "p95", "p99"];
const PERCENTILES = [
  { title: "Time, in the last minute", cell: ({ key }) => key },
  ...SHARES.map((share) => ({ title: share, right: true, cell: ({ recent }) => seconds(recent?.[share]) })),
  { title: "Mean since the coordinator started", right: true, cell: ({ mean }) => seconds(mean) },
];

function Progress({ done, of, part }) {
  if (of === undefined) return done ?? "–";
  const text = `${done} of ${of}`;
  return html`<span class="loading"><${Bar} label=${text} parts=${[[part, done]]} total=${of} /> ${text}</span>`;
}

export function Now({ picture }) {
  const [chosen, choose] = useState("");
  const [, redraw] = useState(0);
  useEffect(() => heard(() => redraw((turn) => turn + 1)), []);
  const names = Object.keys(picture.deployments);
  const name = picture.deployments[chosen] ? chosen : names[0];
  return html`<${Requests} picture=${picture} />
    ${names.length > 1 && html`<p><label>Deployment <select value=${name} onChange=${(event) => choose(event.target.value)}>${names.map((one) => html`<option>${one}</option>`)}</select></label></p>`}
    ${name && html`<${Figures} key=${name} name=${name} names=${names} deployment=${picture.deployments[name]} /><${Timeline} key=${`steps ${name}`} name=${name} />`}`;
}

function Requests({ picture }) {
  const rows = Object.entries(picture.requests).map(([key, request]) => ({ key, request }));
  const sum = (figure) => Object.values(picture.deployments).reduce((all, one) => all + one[figure], 0);
  const more = sum("running") + sum("waiting") - rows.length;
  return html`<section><h2>${sum("running")} running, ${sum("waiting")} waiting</h2>
    <${Table} label="Running and waiting requests" columns=${REQUESTS} rows=${rows} empty="No request runs." />
    ${more > 0 && html`<p class="quiet">And ${more} newer ones.</p>`}<${Line} of="edgectl top" /></section>`;
}

function Figures({ name, names, deployment }) {
  const at = times();
  const of = (label, figure) => ({ name: label, values: values(name, figure) });
  const shares = (kind) => SHARES.map((share) => of(share, (sample) => sample[kind][share]));
  const busy = Object.entries(deployment.stages).map(([index, stage]) => of(`${stage.node} ${stage.first}:${stage.end}`, (sample) => sample.busy[index]));
  const rates = names.map((one) => ({ name: one, values: values(one, (sample) => sample.rate) }));
  const { measured = {}, recent = {} } = deployment;
  const rows = [
    { key: "From request to first token", recent: recent.first_token, mean: measured.first_token_s },
    { key: "From each token to the next", recent: recent.between_tokens, mean: measured.between_tokens_s },
  ];
  return html`<section><h2>The last ten minutes${names.length > 1 ? ` of ${name}` : ""}</h2><div class="charts">
      <${Chart} title="New tokens per second" times=${at} lines=${rates} show=${(value) => count(value, value % 1 && value < 10 ? 1 : 0)} />
      <${Chart} title="Number of requests" times=${at} lines=${[of("running", (sample) => sample.running), of("waiting", (sample) => sample.waiting)]} show=${(value) => (value % 1 ? "" : count(value))} />
      <${Chart} title="Time to the first token" times=${at} lines=${shares("first")} show=${(value) => (value ? seconds(value) : "0")} />
      <${Chart} title="Time between tokens" times=${at} lines=${shares("between")} show=${(value) => (value ? seconds(value) : "0")} />
      <${Chart} title="Busy: share of time in which each node computes" times=${at} lines=${busy} show=${percent} most=${1} /></div></section>
    <section><h2>Token latency</h2><${Table} label="Token latency" columns=${PERCENTILES} rows=${rows} />
      <p class="quiet">p95 is the time that 95 of 100 measured times do not exceed; p50 and p99 are the same for 50 and 99 of 100. They are estimates: the true time differs by a factor of 2.5 at most.</p>
      <${Line} of=${`edgectl describe deployment ${name}`} /></section>`;
}
