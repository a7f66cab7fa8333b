// The line by which one more box joins, shown this once.
import { useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { act } from "./calls.js";
import { Doing, Line } from "./parts.js";

export function Join({ picture }) {
  const [name, setName] = useState("");
  const [line, setLine] = useState("");
  const wanted = name || [...Array(99).keys()].map((index) => `box-${index + 1}`).find((one) => !picture.nodes[one]);
  return html`<section><h2>Join a box</h2>
    <p><label>Its name <input value=${name} placeholder=${wanted} onInput=${(event) => setName(event.target.value)} autocomplete="off" /></label>
      <${Doing} text="Make the line" does=${async () => setLine((await act("join", { name: wanted })).line)} /></p>
    ${line && html`<p>Run this there, within an hour. It lets one box in, once, and is not shown again:</p><pre class="secret">${line}</pre>
      <p><button type="button" onClick=${() => navigator.clipboard?.writeText(line)}>Copy</button></p>`}
    <${Line} of=${`edgectl token create --node ${wanted}`} /></section>`;
}
