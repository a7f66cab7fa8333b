// The models of the store: what fits, adding one at the coordinator, and each model's page.
import { useEffect, useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { act, ask } from "./calls.js";
import { Deploy, Plan } from "./deploy.js";
import { bytes, count } from "./format.js";
import { Bar, Doing, Field, Line, Problem, Table } from "./parts.js";
import { Snippets } from "./snippets.js";

const WIDTHS = { int8: "int8", int4: "int4", bfloat16: "bfloat16", float16: "float16", float32: "float32" };
const MODELS = [
  { title: "Model", cell: ({ key }) => html`<a href=${linkTo(key)}>${key}</a>` },
  { title: "Architecture", cell: ({ model }) => model.architecture },
  { title: "Format", cell: ({ model }) => model.format },
  { title: "Layers", right: true, cell: ({ model }) => count(model.layers) },
  { title: "Parameters", right: true, cell: ({ model }) => parameters(model.parameters) },
  { title: "Size", right: true, cell: ({ model }) => bytes(model.size) },
  { title: "Context", right: true, cell: ({ model }) => model.context.toLocaleString("en") },
  { title: "Deployments", cell: ({ used }) => used.map((name, index) => html`${index ? ", " : ""}<a href=${`#/deployments/${encodeURIComponent(name)}`}>${name}</a>`) },
];
const ADDITIONS = [
  { title: "Model", cell: ({ addition }) => addition.name },
  { title: "From", cell: ({ addition }) => addition.source },
  { title: "State", cell: ({ addition }) => html`<${Progress} addition=${addition} />` },
  { title: "By", cell: ({ addition }) => addition.who },
  { title: "", cell: ({ key, addition }) => isOpen(addition) && html`<${Doing} text=${`Cancel ${addition.name}`} does=${() => act("cancel-addition", { number: Number(key) })} />` },
];

const linkTo = (model) => `#/models/${encodeURIComponent(model)}`;
const isOpen = ({ phase }) => phase === "queued" || phase === "converting" || phase === "storing";
const parameters = (number) => (number < 1e9 ? `${(number / 1e6).toFixed(0)} M` : `${(number / 1e9).toFixed(1)} B`);
const usersOf = (model, deployments) => Object.keys(deployments).filter((name) => deployments[name].model === model);

export function Models({ picture, rest }) {
  const { models, deployments, adding = {} } = picture;
  if (rest && models[rest]) return html`<${Model} key=${rest} name=${rest} model=${models[rest]} picture=${picture} />`;
  const rows = Object.entries(models).map(([key, model]) => ({ key, model, used: usersOf(key, deployments) }));
  const additions = Object.entries(adding.additions ?? {}).map(([key, addition]) => ({ key, addition })).reverse();
  return html`<section><h2>Models</h2><${Table} label="Models" columns=${MODELS} rows=${rows} empty="The store has no model." /><${Line} of="edgectl get models" /></section>
    ${additions.length > 0 && html`<section><h2>Additions</h2><${Table} label="Additions" columns=${ADDITIONS} rows=${additions} /></section>`}
    <${Add} adding=${adding} />`;
}

function Progress({ addition }) {
  const { phase, work, done, total, error, notes = [] } = addition;
  if (phase === "failed") return html`<${Problem} error=${error} />`;
  const far = total ? `${work} ${bytes(done)} of ${bytes(total)}` : "";
  if (isOpen(addition)) return html`<span class="loading">${total && html`<${Bar} label=${far} parts=${[["weights", done]]} total=${total} /> `}${far || phase}</span>`;
  return html`${phase}${notes.map((note) => html`<small class="quiet">. ${note}</small>`)}`;
}

function Add({ adding }) {
  const { folders = [], hub = false } = adding;
  const [listings, setListings] = useState(null);
  const [problem, setProblem] = useState(null);
  const [typed, setTyped] = useState("");
  const [picked, setPicked] = useState("");
  const [name, setName] = useState("");
  const [width, setWidth] = useState("int8");
  const look = async () => setListings((await ask("folders", {})).folders);
  useEffect(() => {
    if (folders.length) look().catch(setProblem);
  }, []);
  if (!folders.length && !hub)
    return html`<section><h2>Add a model</h2><p>This coordinator cannot add models itself. Start it with <code>--model-folder DIR</code> for models on its machine, or with <code>--allow-hub</code> for models of the Hugging Face Hub. Or run this on the machine that has the model:</p>
      <${Line} of="edgectl model add DIR" /></section>`;
  const offered = (listings ?? []).flatMap((listing) => listing.models);
  const source = typed || (offered.some(({ path }) => path === picked) ? picked : (offered[0]?.path ?? ""));
  const usual = offered.find(({ path }) => path === source)?.name ?? "";
  const words = ["edgectl model add", source || "DIR", ...(name ? ["--name", name] : []), ...(width === "int8" ? [] : ["--width", width])];
  return html`<section><h2>Add a model</h2>
    <p class="quiet">The coordinator reads it, converts what it cannot keep as it is, and stores it. ${folders.length > 0 && `The coordinator reads ${folders.join(", ")} on its machine.`}</p>
    <${Problem} error=${problem} />
    ${(listings ?? []).map((listing) => listing.problem && html`<${Problem} error=${`${listing.folder}: ${listing.problem}`} />`)}
    ${(listings ?? []).some(({ cut }) => cut) && html`<p class="quiet">There are more models than can be shown: name a smaller folder.</p>`}
    <div class="fields">
      ${folders.length > 0 && html`<${Field} label="Found in the folders"><select value=${source} disabled=${Boolean(typed)} onChange=${({ target }) => setPicked(target.value)}>${offered.map(({ path, size }) => html`<option value=${path}>${shortened(path, folders)}, ${bytes(size)}</option>`)}</select><//>`}
      ${hub && html`<${Field} label="Or from the Hub"><input value=${typed} placeholder="OWNER/NAME" autocomplete="off" onInput=${({ target }) => setTyped(target.value.trim())} /><//>`}
      <${Field} label="Name in the store"><input value=${name} placeholder=${usual} autocomplete="off" onInput=${({ target }) => setName(target.value.trim())} /><//>
      <${Field} label="Format for weights that must be rounded"><select value=${width} onChange=${({ target }) => setWidth(target.value)}>${Object.keys(WIDTHS).map((one) => html`<option>${one}</option>`)}</select><//>
    </div>
    <p><${Doing} key=${`${source} ${name} ${width}`} text="Add" why=${!source && (listings || !folders.length ? "Choose a model first." : "The folders are being read.")} does=${() => act("add-model", { source, name, width })} done=${(added) => `${added.name} is being added.`} />
      ${folders.length > 0 && html`<${Doing} text="Read the folders again" does=${look} />`}</p>
    <${Line} of=${words.join(" ")} /></section>`;
}

// A path as seen from its folder.
function shortened(path, folders) {
  const folder = folders.find((one) => path.startsWith(`${one}/`));
  return folder ? path.slice(folder.length + 1) : path;
}

function Model({ name, model, picture }) {
  const [typed, setTyped] = useState("");
  const used = usersOf(name, picture.deployments);
  const ready = used.filter((one) => picture.deployments[one].phase === "ready");
  const inUse = used.length && `${used.join(", ")} ${used.length > 1 ? "use" : "uses"} it: delete that first.`;
  return html`<section><h2>${name}</h2>
      <p>${model.architecture}: ${parameters(model.parameters)} parameters in ${model.layers} layers, ${bytes(model.size)} as ${model.format}, with a context of up to ${model.context.toLocaleString("en")} tokens. ${used.length ? `Deployed as ${used.join(", ")}.` : "It is not deployed."}</p>
      <${Line} of=${`edgectl describe model ${name}`} /></section>
    <${Fits} name=${name} model=${model} />
    <${Deploy} picture=${picture} model=${name} />
    ${ready.map((one) => html`<section key=${one}><h2>Use ${one}</h2><${Snippets} model=${one} /></section>`)}
    <section><h2>Delete</h2>
      <p><label>Type its name <input value=${typed} autocomplete="off" onInput=${({ target }) => setTyped(target.value)} /></label>
        <${Doing} text=${`Delete ${name}`} danger=${true} why=${inUse || (typed !== name && "Type the name of the model first.")} does=${() => act("delete-model", { name, typed })} /></p>
      <${Line} of=${`edgectl delete model ${name}`} /></section>`;
}

// Whether a model fits the nodes as they are now, and with how much context.
function Fits({ name, model }) {
  const [found, setFound] = useState(null);
  const whole = found && found.context === model.context && found.concurrency > 1;
  return html`<section><h2>Does it fit?</h2>
    <p><${Doing} text="Find the largest context that fits" does=${async () => (setFound(null), setFound(await act("fits", { name })))} /></p>
    ${found && html`<p>It fits with ${found.context.toLocaleString("en")} tokens of context and ${found.concurrency} ${found.concurrency > 1 ? "requests" : "request"} at once. ${!whole && "More does not fit: add a node, free memory, or choose smaller weights below."}</p><${Plan} plan=${found} />`}
    <${Line} of=${`edgectl plan --model ${name}`} /></section>`;
}
