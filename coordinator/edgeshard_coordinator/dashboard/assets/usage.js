// The view of an API key's holder: its models, and the key's use.
import { html } from "./html.js";
import { count } from "./format.js";
import { Table } from "./parts.js";

const MODELS = [
  { title: "Name", cell: ({ key }) => key },
  { title: "Model", cell: ({ deployment }) => deployment.model },
  { title: "State", cell: ({ deployment }) => html`<span class=${`phase ${deployment.phase}`}>${deployment.phase}</span>` },
];
const USED = [
  { title: "Metric", cell: ({ key }) => key },
  { title: "Used", right: true, cell: ({ used }) => count(used) },
  { title: "Limit", right: true, cell: ({ most }) => most ?? "" },
];

export function Usage({ picture: { deployments, usage } }) {
  const models = Object.entries(deployments).map(([key, deployment]) => ({ key, deployment }));
  const tokens = usage.tokens_per_minute === undefined ? undefined : `${count(usage.tokens_per_minute)} a minute`;
  const used = [
    { key: "Requests", used: usage.requests },
    { key: "Running and waiting requests", used: usage.running, most: count(usage.requests_at_once) },
    { key: "Prompt tokens", used: usage.prompt_tokens, most: tokens },
    { key: "Answer tokens", used: usage.new_tokens, most: tokens && "together with prompt tokens" },
  ];
  return html`<section><h2>Models of this key</h2><${Table} label="Models of this key" columns=${MODELS} rows=${models} empty="No deployment is available to this key." /></section>
    <section><h2>Usage</h2><${Table} label="Usage" columns=${USED} rows=${used} /><p class="quiet">Since the coordinator started.</p></section>`;
}
