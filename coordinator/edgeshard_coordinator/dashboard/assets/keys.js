// API keys: who may use which models.
import { html } from "./html.js";
import { Line } from "./parts.js";

export function Keys() {
  return html`<section><h2>Keys</h2><p>Programs use the HTTP endpoint with an API key.</p><${Line} of="edgectl key list" /></section>`;
}
