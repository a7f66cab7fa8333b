// When each node computed, step by step. Nodes record only while somebody has this open.
import { useEffect, useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { act } from "./calls.js";
import { count, percent, seconds } from "./format.js";
import { Line, Table } from "./parts.js";

const PAUSE_MS = 3000;
const COLOURS = 6;
const COLUMNS = [
  { title: "Node", cell: ({ stage }) => stage.node },
  { title: "Layers", cell: ({ stage }) => stage.layers },
  { title: "Steps", right: true, cell: ({ stage }) => stage.steps },
  { title: "Tokens/s", right: true, cell: ({ stage }) => count(stage.tokens_per_s, 1) },
  { title: "Busy: computes", right: true, cell: ({ stage }) => percent(stage.computing) },
  { title: "Busy: sends", right: true, cell: ({ stage }) => percent(stage.sending) },
  { title: "A step computes", right: true, cell: ({ stage }) => seconds(stage.step_s) },
  { title: "A step waits", right: true, cell: ({ stage }) => seconds(stage.wait_s) },
];

export function Timeline({ name }) {
  const [open, setOpen] = useState(false);
  return html`<section><h2>Steps</h2>
    <p><button type="button" aria-expanded=${String(open)} onClick=${() => setOpen(!open)}>${open ? "Stop recording" : "Record steps"}</button></p>
    ${open ? html`<${Slices} key=${name} name=${name} />` : html`<p class="quiet">The nodes record two seconds of every five while this is open.</p>`}
    <${Line} of=${`edgectl trace ${name}`} /></section>`;
}

function Slices({ name }) {
  const [found, setFound] = useState({});
  useEffect(() => {
    let open = true;
    const follow = async () => {
      while (open) {
        // Errors are shown too, and the request is repeated.
        const next = document.hidden ? null : await act("timeline", { name }).then((slice) => ({ slice }), (error) => ({ problem: error.message }));
        if (open && next) setFound((before) => ({ ...before, problem: "", ...next }));
        await new Promise((done) => setTimeout(done, PAUSE_MS));
      }
    };
    follow();
    return () => {
      open = false;
    };
  }, []);
  const { slice, problem } = found;
  if (problem) return html`<p role="alert">${problem}</p>`;
  if (!slice) return html`<p class="quiet" role="status">Recording for two seconds.</p>`;
  if (slice.taken) return html`<p role="status">An operator traces ${name} now. Recording continues when that trace ends.</p>`;
  if (!slice.span_us) return html`<p role="status">No step ran in these two seconds. Send a request to see its steps.</p>`;
  return html`<${Rows} slice=${slice} />
    <${Table} label="Steps of each node" columns=${COLUMNS} rows=${slice.stages.map((stage, key) => ({ key, stage }))} />`;
}

function Rows({ slice: { span_us, stages } }) {
  return html`<div class="timeline" role="img" aria-label="The newest steps on each node; the table below has their figures">
    ${stages.map(({ node, layers, bars }) => html`<span class="name">${node} <span class="quiet">${layers}</span></span>
      <svg viewBox=${`0 0 ${span_us} 10`} preserveAspectRatio="none"><rect class="ground" width=${span_us} height="10" />
        ${bars.map(([step, begins, lasts, tokens, prompt]) => html`<rect key=${step} class=${`turn-${step % COLOURS}`} x=${begins} y=${prompt ? 0 : 2} width=${lasts} height=${prompt ? 10 : 6}>
          <title>step ${step}: ${tokens} tokens${prompt ? `, ${prompt} of prompts` : ""}, ${seconds(lasts / 1e6)}</title></rect>`)}</svg>`)}
    <span></span><span class="span"><span>0</span><span>${seconds(span_us / 1e6)}</span></span></div>
    <p class="quiet">Each bar is a step, in the same colour on all nodes. Taller bars process prompts. Gaps are waits.</p>`;
}
