// A conversation with a deployment: the reason for waiting, the speed of answers, and the time before each part.
import { useEffect, useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { chat, who } from "./calls.js";
import { count, seconds } from "./format.js";
import { Button, Field, Line, Problem } from "./parts.js";
import { DEFAULTS, Sampling, requested } from "./sampling.js";

const GAPS_MS = [50, 150, 500, 2000];
const GAP_TEXTS = ["up to 50 ms", "150 ms", "500 ms", "2 s", "longer"];
const TICK_MS = 250;

function gapClass(gap) {
  return `gap-${GAPS_MS.filter((limit) => gap > limit).length}`;
}

// The answer as it grows: each part of its text with the milliseconds since the part before. Times are in seconds.
async function* answersOf(parts, began) {
  let answer = { role: "assistant", text: "", parts: [] };
  let before = began;
  for await (const [part, at] of parts) {
    const text = part.choices[0]?.delta?.content;
    if (part.usage) yield (answer = { ...answer, usage: part.usage });
    if (!text) continue;
    const gap = answer.text ? at - before : 0;
    answer = { ...answer, text: answer.text + text, parts: [...answer.parts, [text, gap]], total: (at - began) / 1000 };
    answer.first ??= answer.total;
    answer.longest = Math.max(answer.longest ?? 0, gap / 1000);
    before = at;
    yield answer;
  }
}

// The figures of an answer in words; a part is a token, unless several arrived together.
function figuresOf({ parts, first, total, longest, usage }) {
  const tokens = usage?.completion_tokens ?? parts.length;
  const speed = total > first ? `${count((tokens - 1) / (total - first), 1)} tokens/s` : "";
  const read = usage && `${usage.prompt_tokens} prompt tokens read`;
  const texts = [read, `${tokens} new tokens in ${seconds(total)}`, `the first after ${seconds(first)}`, speed, `longest gap ${seconds(longest)}`];
  return texts.filter(Boolean).join(", ");
}

// The request of this page in the list of all: the newest one of this user at the deployment.
function ownRequest(picture, name) {
  const own = Object.values(picture.requests ?? {}).filter(({ deployment, who: client }) => deployment === name && client === who());
  return own.reduce((newest, one) => (newest && newest.age_s <= one.age_s ? newest : one), undefined);
}

// The request's wait or work, with its counts.
function Progress({ picture, name, began, answer }) {
  const [, redraw] = useState(0);
  useEffect(() => {
    const ticking = setInterval(() => redraw((turn) => turn + 1), TICK_MS);
    return () => clearInterval(ticking);
  }, []);
  const own = ownRequest(picture, name);
  const since = `${count((performance.now() - began) / 1000, 1)} s`;
  if (answer) return html`<p class="quiet figures" role="status">Writing: ${figuresOf(answer)}.</p>`;
  if (own?.state === "reading") return html`<p class="quiet figures" role="status">Reading: ${own.read ?? 0} of ${own.prompt ?? "?"} prompt tokens, ${since} so far.</p>`;
  const { running, waiting } = picture.deployments[name] ?? {};
  const others = running === undefined ? "" : ` ${running} requests run and ${waiting} wait at ${name}.`;
  return html`<p class="quiet figures" role="status">Waiting for the first token, ${since} so far.${others}</p>`;
}

export function Playground({ picture }) {
  const [model, setModel] = useState("");
  // The conversation's deployment stays while it is built again.
  const ready = Object.entries(picture.deployments).filter(([name, deployment]) => deployment.phase === "ready" || name === model).map(([name]) => name);
  const [system, setSystem] = useState("");
  const [turns, setTurns] = useState([]);
  const [text, setText] = useState("");
  const [options, setOptions] = useState(DEFAULTS);
  const [problem, setProblem] = useState(null);
  const [running, setRunning] = useState(null); // the request: its AbortController, when it began, and the answer so far
  const name = ready.includes(model) ? model : ready[0];
  if (name && name !== model) setModel(name);

  const send = async (event) => {
    event.preventDefault();
    const question = { role: "user", text };
    const before = system.trim() ? [{ role: "system", text: system }, ...turns] : turns;
    const messages = [...before, question].map((turn) => ({ role: turn.role, content: turn.text }));
    const stopping = new AbortController();
    const began = performance.now();
    let answer = null;
    setProblem(null);
    try {
      const body = { model: name, messages, stream: true, stream_options: { include_usage: true }, ...requested(options) };
      setRunning({ stopping, began });
      setTurns([...turns, question]);
      setText("");
      for await (const next of answersOf(chat(body, stopping.signal), began)) {
        if (!next.parts.length) continue;
        answer = next;
        setTurns([...turns, question, answer]);
        setRunning({ stopping, began, answer });
      }
    } catch (error) {
      if (error.name !== "AbortError") setProblem(error);
    }
    setRunning(null);
    if (answer === null) {
      setTurns(turns);
      setText(text);
    }
  };
  if (!ready.length) return html`<section><h2>Playground</h2><p class="quiet">No deployment is ready. ${picture.nodes && html`<a href="#/deployments">Deploy a model</a> first.`}</p></section>`;
  const noSend = running ? "An answer is being written." : !text && "Write a message first.";
  return html`<section><h2>Playground</h2>
    <p class="fields"><${Field} label="Deployment"><select value=${name} onChange=${(event) => setModel(event.target.value)}>${ready.map((one) => html`<option>${one}</option>`)}</select><//></p>
    <${Sampling} options=${options} onChange=${setOptions} />
    <details><summary>System prompt</summary>
      <label class="said">System prompt: how the model should answer <textarea rows="2" value=${system} onInput=${(event) => setSystem(event.target.value)}></textarea></label></details>
    <div class="talk" aria-live="polite">${turns.map((turn) => html`<div class=${`turn ${turn.role}`}>
      ${turn.parts ? turn.parts.map(([part, gap]) => html`<span class=${gapClass(gap)} title=${seconds(gap / 1000)}>${part}</span>`) : turn.text}
      ${turn.parts && turn !== running?.answer && html`<p class="quiet figures">${figuresOf(turn)}.</p>`}</div>`)}</div>
    ${running && html`<${Progress} picture=${picture} name=${name} began=${running.began} answer=${running.answer} />`}
    <${Problem} error=${problem} />
    <form onSubmit=${send}><label class="said">Message <textarea value=${text} rows="3" onInput=${(event) => setText(event.target.value)}></textarea></label>
      <div class="fields"><span class="doing"><${Button} text="Send" type="submit" why=${noSend} /></span>
        <span class="doing"><${Button} text="Stop" why=${!running && "No answer is being written."} onClick=${() => running.stopping.abort()} /></span>
        <span class="doing"><${Button} text="Clear" why=${!turns.length && "There is no conversation yet."} onClick=${() => setTurns([])} /></span></div></form>
    <p class="gaps quiet">Colours: time since the part before. ${GAP_TEXTS.map((limit, index) => html`<span class=${`gap-${index}`}>${limit}</span>`)}</p>
    ${picture.nodes && html`<${Line} of=${`edgectl generate ${name} "..."`} />`}</section>`;
}
