// Pieces that several screens are made of.
import { useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { bytes, seconds } from "./format.js";

export function Table({ label, columns, rows, empty }) {
  if (!rows.length) return html`<p class="quiet">${empty}</p>`;
  return html`<div class="wide" tabindex="0" role="region" aria-label=${label}><table>
    <thead><tr>${columns.map((column) => html`<th scope="col" class=${column.right ? "right" : ""}>${column.title}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.key} class=${row.class ?? ""}>
      ${columns.map((column) => html`<td class=${column.right ? "right" : ""}>${column.cell(row)}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}

export function Bar({ label, parts, total }) {
  let at = 0;
  return html`<svg class="bar" viewBox="0 0 100 6" preserveAspectRatio="none" role="img" aria-label=${label}>
    <rect class="ground" width="100" height="6" />
    ${parts.map(([name, size]) => {
      const width = total > 0 ? Math.max(0, (100 * size) / total) : 0;
      const x = at;
      at += width;
      return html`<rect class=${name} x=${x} width=${Math.min(width, 100 - x)} height="6" />`;
    })}
  </svg>`;
}

// How far a stage is with its weights: what is done, of how much, and what it does.
export function progress(stage) {
  return stage.to_fill ? [stage.filled, stage.to_fill, stage.work] : [stage.fetched ?? 0, stage.to_fetch ?? 0, "fetching"];
}

export function Loading({ stage }) {
  if (stage.phase !== "loading") return html`<span class=${`phase ${stage.phase ?? ""}`}>${stage.why ?? stage.phase ?? "–"}</span>`;
  const [done, total, what] = progress(stage);
  const left = stage.left_s ? `, ${seconds(stage.left_s)} left` : "";
  const text = total ? `${what} ${bytes(done)} of ${bytes(total)}${left}` : what;
  return html`<span class="loading"><${Bar} label=${text} parts=${[["weights", done]]} total=${total} /> ${text}</span>`;
}

export function Line({ of }) {
  return html`<p class="line">At a terminal: <code>${of}</code></p>`;
}

// A button that does something slow once, and says what came of it.
export function Doing({ text, does, done, danger, disabled }) {
  const [busy, setBusy] = useState(false);
  const [said, setSaid] = useState("");
  const click = async () => {
    setBusy(true);
    setSaid("");
    try {
      const found = await does();
      setSaid(done ? done(found) : "");
    } catch (error) {
      setSaid(error.message);
    }
    setBusy(false);
  };
  return html`<span><button type="button" class=${danger ? "danger" : ""} disabled=${busy || disabled} onClick=${click}>${text}</button>
    <span role="status">${said}</span></span>`;
}
