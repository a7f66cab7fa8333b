// The form of a new deployment: its options, the plan with its prediction, and then the button that deploys.
import { useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { act } from "./calls.js";
import { bytes, count, seconds } from "./format.js";
import { Doing, Field, Line, Table } from "./parts.js";

const STAGES = [
  { title: "Node", cell: ({ stage }) => stage.node },
  { title: "Layers", cell: ({ stage }) => `${stage.first}:${stage.end}` },
  { title: "Weights", right: true, cell: ({ stage }) => bytes(stage.weights) },
  { title: "KV", right: true, cell: ({ stage }) => bytes(stage.kv) },
];
const OBJECTIVES = { "": "automatic", request: "one request", ttft: "time to the first token", latency: "time between tokens", throughput: "tokens/s in total", energy: "energy" };
const MOST_COPIES = 98;

// The options that a form has beyond the model: each as a key of the spec, and as words of the command line.
const OPTIONS = {
  quantise: { key: (value) => ({ quantisation: { "*": value } }), flag: "--quantise" },
  context: { key: (value) => ({ max_context: Number(value) }), flag: "--max-context" },
  concurrency: { key: (value) => ({ concurrency: Number(value) }), flag: "--concurrency" },
  kv: { key: (value) => ({ kv_dtype: value }), flag: "--kv-dtype" },
  objective: { key: (value) => ({ objective: value }), flag: "--objective" },
  prefixes: { key: () => ({ prefix_cache: true }), flag: "--prefix-cache", bare: true },
};

function freeName(model, deployments) {
  const names = [model, ...Array.from({ length: MOST_COPIES }, (_, index) => `${model}-${index + 2}`)];
  return names.find((name) => !deployments[name]) ?? model;
}

// `model` is the only model of the form; without it one of the store is chosen.
export function Deploy({ picture, model }) {
  const { models, deployments } = picture;
  const names = model ? [model] : Object.keys(models);
  const [wanted, setWanted] = useState("");
  const [typed, setTyped] = useState("");
  const [options, setOptions] = useState({});
  const [plan, setPlan] = useState(null);
  if (!names.length) return html`<section><h2>Deploy a model</h2><p class="quiet">The store has no model: <a href="#/models">add one</a> first.</p><${Line} of="edgectl model add OWNER/NAME" /></section>`;
  const chosen = names.includes(wanted) ? wanted : names[0];
  const name = typed || freeName(chosen, deployments);
  const given = Object.entries(OPTIONS).filter(([option]) => options[option]);
  const spec = Object.assign({ name, model: chosen }, ...given.map(([option, { key }]) => key(options[option])));
  const flags = given.map(([option, { flag, bare }]) => (bare ? flag : `${flag} ${options[option]}`));
  const change = (set) => (value) => (setPlan(null), set(value));
  const option = (key) => ({ value: options[key] ?? "", onInput: ({ target }) => change(setOptions)({ ...options, [key]: target.value }) });
  const key = JSON.stringify(spec);
  return html`<section><h2>${model ? `Deploy ${model}` : "Deploy a model"}</h2>
    <div class="fields">
      ${!model && html`<${Field} label="Model"><select value=${chosen} onChange=${({ target }) => change(setWanted)(target.value)}>${names.map((one) => html`<option>${one}</option>`)}</select><//>`}
      <${Field} label="Name"><input value=${typed} placeholder=${freeName(chosen, deployments)} autocomplete="off" onInput=${({ target }) => change(setTyped)(target.value.trim())} /><//>
      <${Field} label="Weights"><select ...${option("quantise")}><option value="">as stored</option><option>int8</option><option>int4</option><option value="none">whole</option></select><//>
      <${Field} label="Context (tokens)"><input type="number" min="1" placeholder=${models[chosen]?.context} ...${option("context")} /><//>
      <${Field} label="Concurrent requests"><input type="number" min="1" placeholder="8" ...${option("concurrency")} /><//>
      <${Field} label="KV cache"><select ...${option("kv")}><option value="">as the weights</option><option>int4</option><option>float16</option><option>float32</option></select><//>
      <${Field} label="Optimise for"><select ...${option("objective")}>${Object.entries(OBJECTIVES).map(([value, text]) => html`<option value=${value}>${text}</option>`)}</select><//>
      <label><input type="checkbox" checked=${Boolean(options.prefixes)} onChange=${({ target }) => change(setOptions)({ ...options, prefixes: target.checked })} /> Enable prefix caching</label>
    </div>
    <p><${Doing} key=${`plan ${key}`} text="Show the plan" does=${async () => setPlan(await act("plan", { spec }))} />
      <${Doing} key=${`deploy ${key}`} text=${`Deploy ${name}`} why=${!plan && "Show its plan first."} does=${() => act("deploy", { spec })} done=${() => "It is loading."} /></p>
    ${plan && html`<${Plan} plan=${plan} />`}
    <${Line} of=${["edgectl deploy", name, "--model", chosen, ...flags].join(" ")} /></section>`;
}

// A placement before it is deployed: who holds what, and how fast it is predicted to be.
export function Plan({ plan }) {
  const rows = plan.stages.map((stage) => ({ key: stage.node, stage }));
  const predicted = plan.predicted;
  return html`<${Table} label="The plan" columns=${STAGES} rows=${rows} />
    ${predicted && html`<p>Predicted: first token in ${seconds(predicted.first_token_s)}, one every ${seconds(predicted.between_tokens_s)}, ${count(predicted.tokens_per_s, 1)} tokens/s in total. ${predicted.bottleneck}</p>`}
    ${plan.note && html`<p class="quiet">${plan.note}</p>`}`;
}
