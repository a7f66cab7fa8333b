// The line by which one more node joins, shown this once.
import { useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { act } from "./calls.js";
import { Doing, Field, Line } from "./parts.js";
import { Copied } from "./snippets.js";

export function Join({ picture }) {
  const [name, setName] = useState("");
  const [lines, setLines] = useState(null);
  const free_name = [...Array(99).keys()].map((index) => `node-${index + 1}`).find((one) => !picture.nodes[one]);
  const node = name || free_name;
  return html`<section><h2>Add a node</h2>
    <div class="fields"><${Field} label="Its name"><input value=${name} placeholder=${free_name} onInput=${(event) => setName(event.target.value)} autocomplete="off" /><//></div>
    <p><${Doing} text="Create the command" does=${async () => setLines(await act("join", { name: node }))} /></p>
    ${lines && html`<p>Run this on the new node within an hour. It admits one node, once, and is not shown again:</p><${Copied} text=${lines.line} />
      ${lines.bare && html`<p>On a machine without EdgeShard, run this instead (with sudo, the node is installed as a service):</p><${Copied} text=${lines.bare} />`}`}
    <${Line} of=${`edgectl token create --node ${node}`} /></section>`;
}
