// Lines to copy: calls of a model by curl, by the openai client and by ollama, at this site's address.
import { useRef, useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { at } from "./calls.js";

export function siteAddress() {
  return at("../").href.replace(/\/$/, "");
}

// A text with a button that copies it. Browsers have no clipboard on plain HTTP beyond loopback: then it is selected.
export function Copied({ text, label = "Copy" }) {
  const [result, setResult] = useState("");
  const shown = useRef(null);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      setResult("copied");
    } catch {
      getSelection().selectAllChildren(shown.current);
      setResult("selected: copy it with Ctrl+C");
    }
  };
  return html`<div class="copied"><pre class="secret" ref=${shown}>${text}</pre>
    <p><button type="button" onClick=${copy}>${label}</button> <span role="status">${result}</span></p></div>`;
}

// `apiKey` is the text of a new API key; without one the lines have a place for it. (Preact takes `key` for itself.)
export function Snippets({ model, apiKey = "API_KEY" }) {
  const address = siteAddress();
  const body = JSON.stringify({ model, messages: [{ role: "user", content: "Hello" }] });
  const texts = {
    curl: `curl ${address}/v1/chat/completions -H 'Authorization: Bearer ${apiKey}' -H 'Content-Type: application/json' -d '${body}'`,
    "the openai client": `from openai import OpenAI

client = OpenAI(base_url="${address}/v1", api_key="${apiKey}")
answer = client.chat.completions.create(model="${model}", messages=[{"role": "user", "content": "Hello"}])
print(answer.choices[0].message.content)`,
    ollama: `from ollama import Client

client = Client("${address}", headers={"Authorization": "Bearer ${apiKey}"})
print(client.chat("${model}", messages=[{"role": "user", "content": "Hello"}]).message.content)`,
  };
  return html`<div class="snippets">${Object.entries(texts).map(([name, text]) => html`<h3>${name}</h3><${Copied} text=${text} label=${`Copy for ${name}`} />`)}</div>`;
}
