// Pieces that several screens are made of.
import { useEffect, useId, useLayoutEffect, useRef, useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { bytes, seconds } from "./format.js";

// Whether a box is too narrow for its content, as it is drawn. `needed` is the width that its
// content had when it last did not fit, in pixels, so that a folded table unfolds only if there is
// room for it.
function useFolded() {
  const box = useRef(null);
  const needed = useRef(0);
  const [folded, setFolded] = useState(false);
  const look = () => {
    if (!box.current) return; // it left the page before the last of its events arrived
    const { clientWidth, scrollWidth } = box.current;
    if (folded && clientWidth >= needed.current) setFolded(false);
    if (folded || scrollWidth <= clientWidth) return;
    needed.current = scrollWidth;
    setFolded(true);
  };
  useLayoutEffect(look);
  useEffect(() => {
    const resized = new ResizeObserver(look);
    resized.observe(box.current);
    return () => resized.disconnect();
  }, [folded]);
  return [box, folded];
}

// `columns` are { title, cell, right }: `cell` draws a row's value, `right` is for numbers. Rows
// have a `key`. If the columns do not fit, each row becomes a list of its values with their titles:
// no table is cut, and no table scrolls sideways.
export function Table({ rows, empty, ...table }) {
  if (!rows.length) return html`<p class="quiet">${empty}</p>`;
  return html`<${Rows} rows=${rows} ...${table} />`;
}

function Rows({ label, columns, rows }) {
  const [box, folded] = useFolded();
  const of = (name) => (folded ? name : undefined); // a table that is drawn as boxes has no roles of its own
  return html`<div class=${`wide${folded ? " folded" : ""}`} role="region" aria-label=${label} ref=${box}><table role=${of("table")}>
    <thead role=${of("rowgroup")}><tr role=${of("row")}>${columns.map((column) => html`<th scope="col" role=${of("columnheader")} class=${column.right ? "right" : ""}>${column.title}</th>`)}</tr></thead>
    <tbody role=${of("rowgroup")}>${rows.map((row) => html`<tr key=${row.key} role=${of("row")} class=${row.class ?? ""}>
      ${columns.map((column) => html`<td role=${of("cell")} data-title=${column.title} class=${column.right ? "right" : ""}><span>${column.cell(row)}</span></td>`)}</tr>`)}</tbody>
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

// The states of a request, by their names in the picture.
export const STATES = { parked: "waits for a head", queued: "waits", reading: "reads its prompt", writing: "writes" };

// A stage's progress with its weights: the work done, the total, and the present action.
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

// A field of a form: its label above it, and a hint below it. `children` is the input, select or textarea.
export function Field({ label, hint, children }) {
  return html`<label class="field"><span>${label}</span>${children}${hint && html`<small class="quiet">${hint}</small>`}</label>`;
}

// The message of an error, and below it the remedy if the error has one of its own. `error` is an Error or a text.
export function Problem({ error }) {
  if (!error) return null;
  return html`<span class="problem" role="alert">${error.message ?? error}${error.remedy && html`<span class="remedy">${error.remedy}</span>`}</span>`;
}

// A button. `why` is the reason for which it can do nothing yet: it is disabled, and the reason is next to it.
export function Button({ text, why, danger, busy, type = "button", onClick }) {
  const id = useId();
  return html`<button type=${type} class=${danger ? "danger" : ""} disabled=${busy || Boolean(why)} aria-describedby=${why ? id : undefined} onClick=${onClick}>${text}</button>
    ${why && html`<small class="quiet why" id=${id}>${why}</small>`}`;
}

// A button that runs a slow action once and shows its result, as the text that `done` makes of it, or its error.
export function Doing({ text, does, done, danger, why }) {
  const [busy, setBusy] = useState(false);
  const [result, setResult] = useState("");
  const [problem, setProblem] = useState(null);
  const click = async () => {
    setBusy(true);
    setResult("");
    setProblem(null);
    try {
      const value = await does();
      setResult(done ? done(value) : "");
    } catch (error) {
      setProblem(error);
    }
    setBusy(false);
  };
  return html`<span class="doing"><${Button} text=${text} why=${why} danger=${danger} busy=${busy} onClick=${click} />
    <span role="status">${busy ? "…" : result}</span><${Problem} error=${problem} /></span>`;
}
