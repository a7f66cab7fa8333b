// The coordinator that serves this page.
import { html } from "./html.js";
import { Line } from "./parts.js";

export function About({ picture: { site } }) {
  return html`<section><h2>About</h2><p>EdgeShard ${site.version}</p><${Line} of="edgectl doctor" /></section>`;
}
