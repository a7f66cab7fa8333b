// A conversation with a deployment; each token is coloured by the time before it.
import { useRef, useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { chat } from "./calls.js";
import { seconds } from "./format.js";
import { Line } from "./parts.js";

const GAPS_MS = [50, 150, 500, 2000];

function gapClass(gap) {
  return `gap-${GAPS_MS.filter((limit) => gap > limit).length}`;
}

export function Playground({ picture }) {
  const [model, setModel] = useState("");
  // The one of the conversation stays while it is built anew.
  const ready = Object.entries(picture.deployments).filter(([name, deployment]) => deployment.phase === "ready" || name === model).map(([name]) => name);
  const [turns, setTurns] = useState([]);
  const [said, setSaid] = useState("");
  const [options, setOptions] = useState({ max_tokens: 128, temperature: 0 });
  const [problem, setProblem] = useState("");
  const stopping = useRef(null);
  const chosen = ready.includes(model) ? model : ready[0];
  if (chosen && chosen !== model) setModel(chosen);

  const send = async (event) => {
    event.preventDefault();
    const messages = [...turns.map(({ role, text }) => ({ role, content: text })), { role: "user", content: said }];
    const asked = [...turns, { role: "user", text: said }];
    const answer = { role: "assistant", text: "", tokens: [] };
    setTurns([...asked, answer]);
    setSaid("");
    setProblem("");
    stopping.current = new AbortController();
    const began = performance.now();
    let before = began;
    try {
      for await (const [part, at] of chat({ model: chosen, messages, stream: true, ...options }, stopping.current.signal)) {
        const text = part.choices[0]?.delta?.content;
        if (!text) continue;
        answer.first ??= (at - began) / 1000;
        answer.longest = Math.max(answer.longest ?? 0, answer.text ? (at - before) / 1000 : 0);
        answer.tokens.push([text, answer.text ? at - before : 0]);
        answer.text += text;
        before = at;
        setTurns([...asked, { ...answer }]);
      }
    } catch (error) {
      if (error.name !== "AbortError") setProblem(error.message);
    }
    stopping.current = null;
    setTurns([...asked, { ...answer, done: true }]);
  };
  const option = (key, label, step) => html`<label>${label} <input type="number" min="0" step=${step} value=${options[key]} onInput=${(event) => setOptions({ ...options, [key]: Number(event.target.value) })} /></label>`;
  if (!ready.length) return html`<section><h2>Playground</h2><p class="quiet">No deployment is ready. <a href="#/deployments">Deploy a model</a> first.</p></section>`;
  return html`<section><h2>Playground</h2>
    <p><label>Deployment <select value=${chosen} onChange=${(event) => setModel(event.target.value)}>${ready.map((one) => html`<option>${one}</option>`)}</select></label>
      ${option("max_tokens", "New tokens", 1)} ${option("temperature", "Temperature", 0.1)}</p>
    <div class="talk" aria-live="polite">${turns.map((turn) => html`<div class=${`turn ${turn.role}`}>
      ${turn.tokens ? turn.tokens.map(([text, gap]) => html`<span class=${gapClass(gap)} title=${seconds(gap / 1000)}>${text}</span>`) : turn.text}
      ${turn.first !== undefined && html`<p class="quiet">first token after ${seconds(turn.first)}, longest gap ${seconds(turn.longest)}, ${turn.tokens.length} parts</p>`}</div>`)}</div>
    ${problem && html`<p role="alert">${problem}</p>`}
    <form onSubmit=${send}><label class="said">Message <textarea value=${said} rows="3" onInput=${(event) => setSaid(event.target.value)}></textarea></label>
      <button disabled=${!said || stopping.current !== null}>Send</button>
      <button type="button" disabled=${stopping.current === null} onClick=${() => stopping.current?.abort()}>Stop</button>
      <button type="button" onClick=${() => setTurns([])}>Clear</button></form>
    <p class="legend"><span class="gap-0">up to 50 ms</span><span class="gap-1">150 ms</span><span class="gap-2">500 ms</span><span class="gap-3">2 s</span><span class="gap-4">longer</span></p>
    <${Line} of=${`edgectl generate ${chosen} "..."`} /></section>`;
}
