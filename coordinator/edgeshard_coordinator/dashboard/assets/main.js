// The frame of all screens: who is logged in, which screen the address names, and how fresh the picture is.
import { render } from "./vendor/preact.js";
import { useEffect, useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { enter, enterByKey, logOut } from "./calls.js";
import { follow, leave, now, watch } from "./store.js";
import { About } from "./about.js";
import { Deployments } from "./deployments.js";
import { Events } from "./events.js";
import { Keys } from "./keys.js";
import { Models } from "./models.js";
import { Nodes } from "./nodes.js";
import { Now } from "./now.js";
import { Playground } from "./playground.js";
import { Site } from "./site.js";
import { Usage } from "./usage.js";

// The screens of an operator, and the screens of an application's key; the first is shown first.
const SCREENS = {
  operator: { site: Site, now: Now, models: Models, deployments: Deployments, playground: Playground, keys: Keys, nodes: Nodes, events: Events, about: About },
  application: { usage: Usage, playground: Playground },
};
const TITLES = { site: "Site", now: "Now", models: "Models", deployments: "Deployments", playground: "Playground", keys: "Keys", nodes: "Nodes", events: "Events", about: "About", usage: "Usage" };
const MOVED = { join: "nodes" }; // old addresses of screens
const SAYINGS = { connecting: "connecting", live: "live", lost: "the coordinator does not answer: this is the last state it sent" };

function screenOf(hash, screens) {
  const [first, ...rest] = hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  const name = MOVED[first] ?? first;
  return screens[name] ? [name, rest.join("/")] : [Object.keys(screens)[0], ""];
}

function Frame({ session }) {
  const [seen, setSeen] = useState(now());
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const forget = watch(() => setSeen(now()));
    const changed = () => setHash(location.hash);
    addEventListener("hashchange", changed);
    follow(session);
    return () => {
      forget();
      removeEventListener("hashchange", changed);
      leave();
    };
  }, []);
  const screens = SCREENS[session.kind];
  const [name, rest] = screenOf(hash, screens);
  useEffect(() => {
    document.title = `${TITLES[name]} · EdgeShard`;
  }, [name]);
  if (seen.state === "ended") return html`<${Outside} why="This browser is logged out: someone logged out here, or the coordinator restarted." />`;
  const Screen = screens[name];
  return html`<header><h1>EdgeShard</h1>
      <nav aria-label="Screens">${Object.keys(screens).map((other) => html`<a href=${`#/${other}`} aria-current=${other === name ? "page" : null}>${TITLES[other]}</a>`)}</nav>
      <span class=${`state ${seen.state}`} role="status">${SAYINGS[seen.state]}</span>
      <span class="who">${session.who} <button type="button" onClick=${() => logOut().finally(() => location.reload())}>Log out</button></span>
    </header>
    <main class=${seen.state === "lost" ? "stale" : ""}>${seen.picture.site ? html`<${Screen} picture=${seen.picture} rest=${rest} />` : html`<p class="quiet">Waiting for the coordinator.</p>`}</main>`;
}

function Outside({ why }) {
  const [key, setKey] = useState("");
  const [problem, setProblem] = useState("");
  const show = (event) => {
    event.preventDefault();
    enterByKey(key).then(() => location.reload(), (error) => setProblem(error.message));
  };
  return html`<main class="outside"><h1>EdgeShard</h1><p role="alert">${why}</p>
    <p>To see the site, run this on a machine with edgectl, and open the link that it prints:</p>
    <pre>edgectl dashboard</pre>
    <form onSubmit=${show}><label>Or enter an API key to see its models and its usage: <input type="password" autocomplete="off" value=${key} onInput=${(event) => setKey(event.target.value)} /></label>
      <button disabled=${!key}>Show</button></form>
    ${problem && html`<p role="alert">${problem}</p>`}
    <p class="quiet">Programs find the API at <code>/v1</code>.</p></main>`;
}

const root = document.getElementById("app");
root.replaceChildren();
enter().then(
  (session) => render(html`<${Frame} session=${session} />`, root),
  (error) => render(html`<${Outside} why=${error.message} />`, root),
);
// The address of a link that is opened while the page is open already.
addEventListener("hashchange", () => {
  if (location.hash.startsWith("#open=")) location.reload();
});
