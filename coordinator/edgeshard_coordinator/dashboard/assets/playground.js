// A conversation with a deployment; each token is coloured by the time before it.
import { useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { chat } from "./calls.js";
import { seconds } from "./format.js";
import { Line } from "./parts.js";
import { DEFAULTS, Sampling, asked } from "./sampling.js";

const GAPS_MS = [50, 150, 500, 2000];

function gapClass(gap) {
  return `gap-${GAPS_MS.filter((limit) => gap > limit).length}`;
}

// The answer as it grows: each part of its text with the milliseconds since the part before.
async function* told(parts) {
  const began = performance.now();
  let answer = { role: "assistant", text: "", tokens: [] };
  let before = began;
  for await (const [part, at] of parts) {
    const text = part.choices[0]?.delta?.content;
    if (!text) continue;
    const gap = answer.text ? at - before : 0;
    answer = { ...answer, text: answer.text + text, tokens: [...answer.tokens, [text, gap]] };
    answer.first ??= (at - began) / 1000;
    answer.longest = Math.max(answer.longest ?? 0, gap / 1000);
    before = at;
    yield answer;
  }
}

export function Playground({ picture }) {
  const [model, setModel] = useState("");
  // The one of the conversation stays while it is built anew.
  const ready = Object.entries(picture.deployments).filter(([name, deployment]) => deployment.phase === "ready" || name === model).map(([name]) => name);
  const [turns, setTurns] = useState([]);
  const [said, setSaid] = useState("");
  const [options, setOptions] = useState(DEFAULTS);
  const [problem, setProblem] = useState("");
  const [running, setRunning] = useState(null); // the request's AbortController
  const chosen = ready.includes(model) ? model : ready[0];
  if (chosen && chosen !== model) setModel(chosen);

  const send = async (event) => {
    event.preventDefault();
    const question = { role: "user", text: said };
    const messages = [...turns, question].map(({ role, text }) => ({ role, content: text }));
    const stopping = new AbortController();
    let answer = null;
    setProblem("");
    try {
      const body = { model: chosen, messages, stream: true, ...asked(options) };
      setRunning(stopping);
      setTurns([...turns, question]);
      setSaid("");
      for await (answer of told(chat(body, stopping.signal))) setTurns([...turns, question, answer]);
    } catch (error) {
      if (error.name !== "AbortError") setProblem(error.message);
    }
    setRunning(null);
    if (answer === null) {
      setTurns(turns);
      setSaid(said);
    }
  };
  if (!ready.length) return html`<section><h2>Playground</h2><p class="quiet">No deployment is ready. ${picture.nodes && html`<a href="#/deployments">Deploy a model</a> first.`}</p></section>`;
  return html`<section><h2>Playground</h2>
    <p><label>Deployment <select value=${chosen} onChange=${(event) => setModel(event.target.value)}>${ready.map((one) => html`<option>${one}</option>`)}</select></label></p>
    <${Sampling} options=${options} onChange=${setOptions} />
    <div class="talk" aria-live="polite">${turns.map((turn) => html`<div class=${`turn ${turn.role}`}>
      ${turn.tokens ? turn.tokens.map(([text, gap]) => html`<span class=${gapClass(gap)} title=${seconds(gap / 1000)}>${text}</span>`) : turn.text}
      ${turn.first !== undefined && html`<p class="quiet">first token after ${seconds(turn.first)}, longest gap ${seconds(turn.longest)}, ${turn.tokens.length} parts</p>`}</div>`)}</div>
    ${problem && html`<p role="alert">${problem}</p>`}
    <form onSubmit=${send}><label class="said">Message <textarea value=${said} rows="3" onInput=${(event) => setSaid(event.target.value)}></textarea></label>
      <button disabled=${!said || running !== null}>Send</button>
      <button type="button" disabled=${running === null} onClick=${() => running?.abort()}>Stop</button>
      <button type="button" onClick=${() => setTurns([])}>Clear</button></form>
    <p class="legend"><span class="gap-0">up to 50 ms</span><span class="gap-1">150 ms</span><span class="gap-2">500 ms</span><span class="gap-3">2 s</span><span class="gap-4">longer</span></p>
    ${picture.nodes && html`<${Line} of=${`edgectl generate ${chosen} "..."`} />`}</section>`;
}
