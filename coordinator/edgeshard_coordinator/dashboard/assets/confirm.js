// Actions that cannot be undone: a second click, or the name typed again.
import { useEffect, useRef, useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { Doing, Field } from "./parts.js";

// A button that opens a question; only the second button acts.
export function Confirmed({ text, question, does }) {
  const [open, setOpen] = useState(false);
  const keep = useRef(null);
  useEffect(() => {
    if (open) keep.current.focus(); // the button that had the focus is gone
  }, [open]);
  if (!open) return html`<button type="button" class="danger" onClick=${() => setOpen(true)}>${text}</button>`;
  return html`<span class="doing">${question} <${Doing} text=${text} danger=${true} does=${does} />
    <button type="button" ref=${keep} onClick=${() => setOpen(false)}>Keep</button></span>`;
}

// A button that acts once the name is typed.
export function Typed({ name, text, does, done }) {
  const [typed, setTyped] = useState("");
  const why = typed === name ? "" : "type the name first";
  return html`<div class="fields"><${Field} label="Type its name"><input value=${typed} onInput=${(event) => setTyped(event.target.value)} autocomplete="off" /><//></div>
    <p><${Doing} text=${text} danger=${true} why=${why} does=${() => does(typed)} done=${done} /></p>`;
}
