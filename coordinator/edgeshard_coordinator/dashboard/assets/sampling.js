// The options of an answer: their fields, and the API's names of them.
import { html } from "./html.js";
import { Field } from "./parts.js";

export const DEFAULTS = { max_tokens: "128", temperature: "0", top_p: "", seed: "", stop: "", schema: "" };
const NUMBERS = [["max_tokens", "Maximum of new tokens", 1], ["temperature", "Temperature", 0.1], ["top_p", "Top p", 0.05], ["seed", "Seed", 1]];

// The options in a request's body; an empty field is left out. Throws an Error if the schema is not JSON.
export function requested({ stop, schema, ...numbers }) {
  const filled = Object.entries(numbers).filter(([, text]) => text !== "");
  const body = Object.fromEntries(filled.map(([name, text]) => [name, Number(text)]));
  const stops = stop.split("\n").filter(Boolean);
  if (stops.length) body.stop = stops;
  if (schema.trim()) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsed(schema) } };
  return body;
}

function parsed(schema) {
  try {
    return JSON.parse(schema);
  } catch (error) {
    throw new Error(`The schema is not JSON: ${error.message}. Correct it, or leave the field empty.`);
  }
}

export function Sampling({ options, onChange }) {
  const field = (name) => ({ value: options[name], onInput: (event) => onChange({ ...options, [name]: event.target.value }) });
  return html`<p class="fields">${NUMBERS.map(([name, label, step]) => html`<${Field} label=${label}><input type="number" min="0" step=${step} ...${field(name)} /><//>`)}</p>
    <details><summary>Stop texts and answer format</summary>
      <label class="said">Stop before one of these texts, one per line <textarea rows="2" ...${field("stop")}></textarea></label>
      <label class="said">Answer in JSON with this schema <textarea rows="4" spellcheck="false" placeholder='{"type": "object", "properties": {}}' ...${field("schema")}></textarea></label></details>`;
}
