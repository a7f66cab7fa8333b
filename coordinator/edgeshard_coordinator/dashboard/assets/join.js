// The line by which one more node joins, shown this once.
import { useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { act } from "./calls.js";
import { Doing, Line } from "./parts.js";
import { Copied } from "./snippets.js";

export function Join({ picture }) {
  const [name, setName] = useState("");
  const [line, setLine] = useState(null);
  const wanted = name || [...Array(99).keys()].map((index) => `node-${index + 1}`).find((one) => !picture.nodes[one]);
  return html`<section><h2>Join a node</h2>
    <p><label>Its name <input value=${name} placeholder=${wanted} onInput=${(event) => setName(event.target.value)} autocomplete="off" /></label>
      <${Doing} text="Make the line" does=${async () => setLine(await act("join", { name: wanted }))} /></p>
    ${line && html`<p>Run this there, within an hour. It lets one node in, once, and is not shown again:</p><${Copied} text=${line.line} />
      ${line.bare && html`<p>On a machine without EdgeShard, this one instead (sudo in front has it installed as a service):</p><${Copied} text=${line.bare} />`}`}
    <${Line} of=${`edgectl token create --node ${wanted}`} /></section>`;
}
