// The coordinator that serves this page: version, site, metrics, documents and licences.
import { useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { at } from "./calls.js";
import { moment } from "./format.js";
import { Doing, Line, Table } from "./parts.js";
import { siteAddress } from "./snippets.js";

const FACTS = [
  { title: "Property", cell: ({ key }) => key },
  { title: "Value", cell: ({ value }) => value },
];
const DOCUMENTS = {
  "docs/dashboard.md": "this dashboard",
  "docs/http.md": "the HTTP interfaces of OpenAI and Ollama",
  "docs/models.md": "models and their formats",
  "docs/joining.md": "how nodes join",
  "docs/metrics.md": "metrics, alerts and a Grafana dashboard",
  "docs/security.md": "rights, keys and the audit log",
  "docs/troubleshoot.md": "faults and their remedies",
};
const DOCUMENT_COLUMNS = [
  { title: "Document", cell: ({ key }) => html`<code>${key}</code>` },
  { title: "About", cell: ({ about }) => about },
];

export function About({ picture: { site } }) {
  const [licences, setLicences] = useState("");
  const facts = { Version: site.version, Site: site.name ?? "without certificates, so it has no name" };
  if (site.began_at) facts["Running since"] = moment(1000 * site.began_at);
  facts["Address as this browser sees it"] = siteAddress();
  const rows = Object.entries(facts).map(([key, value]) => ({ key, value }));
  const documents = Object.entries(DOCUMENTS).map(([key, about]) => ({ key, about }));
  const load = async () => setLicences(await (await fetch(at("assets/vendor/LICENSES"))).text());
  return html`<section><h2>About</h2><${Table} label="About" columns=${FACTS} rows=${rows} /><${Line} of="edgectl doctor" /></section>
    <section><h2>Metrics</h2><p>Prometheus reads <a href=${`${siteAddress()}/metrics`}>${siteAddress()}/metrics</a> with an API key that has the right to read metrics.</p><${Line} of="edgectl key create prometheus --metrics" /></section>
    <section><h2>Documents</h2><p>They are in the release and in the repository.</p><${Table} label="Documents" columns=${DOCUMENT_COLUMNS} rows=${documents} /></section>
    <section><h2>Licences</h2><p>This page contains preact, htm and uPlot, and nothing from other hosts.</p>
      ${licences ? html`<pre>${licences}</pre>` : html`<p><${Doing} text="Show their licences" does=${load} /></p>`}</section>`;
}
