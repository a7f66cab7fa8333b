// The events, the newest first.
import { html } from "./html.js";
import { moment } from "./format.js";
import { Line, Table } from "./parts.js";

const COLUMNS = [
  { title: "Time", cell: ({ event }) => moment(event.time) },
  { title: "Event", cell: ({ event }) => `${event.subject} ${event.name} ${event.what}` },
  { title: "Detail", cell: ({ event }) => event.detail ?? "" },
];

export function Events({ picture }) {
  const rows = Object.entries(picture.events).map(([key, event]) => ({ key, event, class: event.warning ? "warning" : "" }));
  rows.sort((one, other) => other.key - one.key);
  return html`<section><h2>Events</h2><${Table} label="Events" columns=${COLUMNS} rows=${rows} empty="Nothing has happened yet." /><${Line} of="edgectl get events -w" /></section>`;
}
