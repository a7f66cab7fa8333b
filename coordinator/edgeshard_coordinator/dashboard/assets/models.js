// The models of the store.
import { html } from "./html.js";
import { bytes, count } from "./format.js";
import { Line, Table } from "./parts.js";
import { Snippets } from "./snippets.js";

const COLUMNS = [
  { title: "Model", cell: ({ key }) => key },
  { title: "Architecture", cell: ({ model }) => model.architecture },
  { title: "Layers", right: true, cell: ({ model }) => count(model.layers) },
  { title: "Size", right: true, cell: ({ model }) => bytes(model.size) },
];

export function Models({ picture: { models, deployments } }) {
  const rows = Object.entries(models).map(([key, model]) => ({ key, model }));
  const ready = Object.keys(deployments).find((name) => deployments[name].phase === "ready");
  return html`<section><h2>Models</h2><${Table} label="Models" columns=${COLUMNS} rows=${rows} empty="The store has no model." /><${Line} of=${rows.length ? "edgectl get models" : "edgectl model add OWNER/NAME"} /></section>
    ${ready && html`<section><h2>Use ${ready}</h2><${Snippets} model=${ready} /></section>`}`;
}
