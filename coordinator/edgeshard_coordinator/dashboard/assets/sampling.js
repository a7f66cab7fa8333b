// How an answer is to be made: fields, and what they ask the API for.
import { html } from "./html.js";

export const DEFAULTS = { max_tokens: "128", temperature: "0", top_p: "", seed: "", stop: "", schema: "" };
const NUMBERS = [["max_tokens", "New tokens", 1], ["temperature", "Temperature", 0.1], ["top_p", "Top p", 0.05], ["seed", "Seed", 1]];

// An empty field leaves it to the model. Throws where the schema is no JSON.
export function asked({ stop, schema, ...numbers }) {
  const given = Object.entries(numbers).filter(([, text]) => text !== "");
  const body = Object.fromEntries(given.map(([name, text]) => [name, Number(text)]));
  const stops = stop.split("\n").filter(Boolean);
  if (stops.length) body.stop = stops;
  if (schema.trim()) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsed(schema) } };
  return body;
}

function parsed(schema) {
  try {
    return JSON.parse(schema);
  } catch (error) {
    throw new Error(`The schema is no JSON: ${error.message}`);
  }
}

export function Sampling({ options, onChange }) {
  const field = (name) => ({ value: options[name], onInput: (event) => onChange({ ...options, [name]: event.target.value }) });
  return html`<p>${NUMBERS.map(([name, label, step]) => html`<label>${label} <input type="number" min="0" step=${step} ...${field(name)} /></label>`)}</p>
    <details><summary>Stop and form</summary>
      <label class="said">Stop before one of these, a line each <textarea rows="2" ...${field("stop")}></textarea></label>
      <label class="said">Answer in JSON of this schema <textarea rows="4" spellcheck="false" placeholder='{"type": "object", "properties": {}}' ...${field("schema")}></textarea></label></details>`;
}
