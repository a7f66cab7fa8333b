// The next steps of a site that serves nothing yet, each with its command; those that are done are marked.
import { html } from "./html.js";
import { Line } from "./parts.js";

function stepsOf({ models, nodes, site }) {
  return [
    { text: "Add a model", screen: "models", line: "edgectl model add OWNER/NAME", done: Object.keys(models).length > 0 },
    { text: "Add a node", screen: "nodes", line: "edgectl token create --node NAME", done: Object.keys(nodes).length > 0 },
    { text: "Create a key", screen: "keys", line: "edgectl key create NAME", done: site.keys > 0 },
  ];
}

// Whether a step is open and nothing is deployed yet.
export function isFirst(picture) {
  return !Object.keys(picture.deployments).length && stepsOf(picture).some((step) => !step.done);
}

export function First({ picture }) {
  return html`<section><h2>Next steps</h2><ol class="steps">${stepsOf(picture).map(
    ({ text, screen, line, done }) => html`<li key=${screen} class=${done ? "done" : ""}><a href=${`#/${screen}`}>${text}</a>${done ? html` <span class="phase ready">done</span>` : ""}<${Line} of=${line} /></li>`,
  )}</ol>
    <p>Then <a href="#/models">deploy the model</a>.</p></section>`;
}
