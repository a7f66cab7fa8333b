// API keys: their models, limits and usage; creating and revoking them.
import { useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { act } from "./calls.js";
import { Confirmed } from "./confirm.js";
import { count, moment } from "./format.js";
import { Doing, Field, Line, Problem, Table } from "./parts.js";
import { usePolled } from "./polled.js";
import { Copied, Snippets } from "./snippets.js";

const EMPTY = { name: "", models: [], requests: "", tokens_per_minute: "", metrics: false };

function limits({ requests_at_once: requests, tokens_per_minute: tokens }) {
  const texts = [requests && `${requests} concurrent requests`, tokens && `${tokens} tokens a minute`].filter(Boolean);
  return texts.join(", ") || "none";
}

function columns(revoke) {
  return [
    { title: "Key", cell: ({ key }) => key },
    { title: "Models", cell: ({ one }) => `${one.models.join(", ") || "all"}${one.metrics ? ", metrics" : ""}` },
    { title: "Limits", cell: ({ one }) => limits(one.usage) },
    { title: "Running", right: true, cell: ({ one }) => count(one.usage.running) },
    { title: "Requests", right: true, cell: ({ one }) => count(one.usage.requests) },
    { title: "Prompt tokens", right: true, cell: ({ one }) => count(one.usage.prompt_tokens) },
    { title: "Answer tokens", right: true, cell: ({ one }) => count(one.usage.new_tokens) },
    { title: "Created", cell: ({ one }) => moment(1000 * one.created_at) },
    { title: "Revoke", cell: ({ key }) => html`<${Confirmed} text=${`Revoke ${key}`} question="Its requests end, and programs with it are refused." does=${() => revoke(key)} />` },
  ];
}

export function Keys({ picture }) {
  const [answer, error, request] = usePolled("keys");
  const [created, setCreated] = useState(null);
  const revoke = async (name) => {
    await act("revoke-key", { name });
    if (created?.key.name === name) setCreated(null);
    await request();
  };
  const create = async (body) => {
    setCreated(await act("create-key", body));
    await request();
  };
  const rows = (answer?.keys ?? []).map((one) => ({ key: one.name, one }));
  const empty = answer ? "There is no key. Programs need one, unless the coordinator was started with --http-no-key." : "Loading.";
  return html`<section><h2>Keys</h2><${Problem} error=${error} /><${Table} label="Keys" columns=${columns(revoke)} rows=${rows} empty=${empty} />
      <p class="quiet">Requests and tokens are counted since the coordinator began${picture.site.began_at ? `, ${moment(1000 * picture.site.began_at)}` : ""}, or since the key was created if that is later.</p>
      <${Line} of="edgectl key list" /></section>
    ${created && html`<${Created} created=${created} picture=${picture} />`}
    <${Create} create=${create} picture=${picture} />
    ${!created && html`<section><h2>Use a key</h2><${Snippets} model=${modelOf([], picture.deployments)} /></section>`}`;
}

// The model of snippets: the first that the key may use, or that is deployed.
function modelOf(names, deployments) {
  return names[0] ?? Object.keys(deployments)[0] ?? "MODEL";
}

function Created({ created: { key, text }, picture }) {
  return html`<section><h2>The new key ${key.name}</h2><p>Copy it now: the site keeps only its hash, and no page shows it again.</p>
    <${Copied} text=${text} label="Copy the key" /><${Snippets} model=${modelOf(key.models, picture.deployments)} apiKey=${text} /></section>`;
}

function Create({ create, picture: { deployments, models } }) {
  const [form, setForm] = useState(EMPTY);
  const change = (name) => (event) => setForm({ ...form, [name]: event.target.value });
  const names = [...new Set([...Object.keys(deployments), ...Object.keys(models)])];
  const toggle = (name) => () => setForm({ ...form, models: form.models.includes(name) ? form.models.filter((one) => one !== name) : [...form.models, name] });
  const body = { name: form.name, models: form.models };
  for (const limit of ["requests", "tokens_per_minute"]) if (form[limit] !== "") body[limit] = Number(form[limit]);
  if (form.metrics) body.metrics = true;
  const options = [...form.models.map((name) => `--model ${name}`), body.requests && `--requests ${body.requests}`, body.tokens_per_minute && `--tokens-per-minute ${body.tokens_per_minute}`, form.metrics && "--metrics"];
  const line = ["edgectl key create", form.name || "NAME", ...options.filter(Boolean)].join(" ");
  return html`<section><h2>Create a key</h2>
    <div class="fields"><${Field} label="Name" hint="the program or person that uses it"><input value=${form.name} onInput=${change("name")} autocomplete="off" /><//>
      <${Field} label="Concurrent requests" hint="empty: the coordinator's quotas"><input type="number" min="1" value=${form.requests} onInput=${change("requests")} /><//>
      <${Field} label="Tokens a minute" hint="prompts plus answers"><input type="number" min="1" value=${form.tokens_per_minute} onInput=${change("tokens_per_minute")} /><//></div>
    <fieldset><legend>Deployments and models that the key may use (none selected: all)</legend>
      ${names.map((name) => html`<label><input type="checkbox" checked=${form.models.includes(name)} onChange=${toggle(name)} /> ${name}</label>`)}
      ${!names.length && html`<p class="quiet">The site has none yet: the key may use all future ones.</p>`}</fieldset>
    <p><label><input type="checkbox" checked=${form.metrics} onChange=${() => setForm({ ...form, metrics: !form.metrics })} /> Let the key read all metrics of the site</label></p>
    <p><${Doing} text="Create the key" why=${form.name ? "" : "give it a name first"} does=${async () => (await create(body), setForm(EMPTY))} /></p>
    <${Line} of=${line} /></section>`;
}
