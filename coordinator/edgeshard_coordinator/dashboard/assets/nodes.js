// The nodes of the site, and the line by which one more joins.
import { html } from "./html.js";
import { bytes } from "./format.js";
import { Line, Table } from "./parts.js";
import { Join } from "./join.js";

const NODES = [
  { title: "Node", cell: ({ key }) => key },
  { title: "State", cell: ({ node }) => node.status },
  { title: "Device", cell: ({ node }) => `${node.model}, ${node.cores} cores` },
  { title: "Memory", right: true, cell: ({ node }) => bytes(node.budget) },
];

export function Nodes({ picture }) {
  const rows = Object.entries(picture.nodes).map(([key, node]) => ({ key, node, class: node.status }));
  return html`<section><h2>Nodes</h2><${Table} label="Nodes" columns=${NODES} rows=${rows} empty="No node has joined yet." /><${Line} of="edgectl get nodes -o wide" /></section>
    <${Join} picture=${picture} />`;
}
