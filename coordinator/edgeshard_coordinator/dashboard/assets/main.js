// The frame of all screens: who is logged in, which screen the address names, and how fresh the picture is.
import { render } from "./vendor/preact.js";
import { useEffect, useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { enter, logOut } from "./calls.js";
import { follow, leave, now, watch } from "./store.js";
import { Site } from "./site.js";
import { Deployments } from "./deployments.js";
import { Events } from "./events.js";
import { Join } from "./join.js";
import { Playground } from "./playground.js";

const SCREENS = { site: Site, deployments: Deployments, playground: Playground, join: Join, events: Events };
const TITLES = { site: "Site", deployments: "Deployments", playground: "Playground", join: "Join", events: "Events" };
const SAYINGS = { connecting: "connecting", live: "live", lost: "the coordinator is away: the last picture is shown" };

function screenOf(hash) {
  const [name, ...rest] = hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  return SCREENS[name] ? [name, rest.join("/")] : ["site", ""];
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
  const [name, rest] = screenOf(hash);
  useEffect(() => {
    document.title = `${TITLES[name]} · EdgeShard`;
  }, [name]);
  if (seen.state === "ended") return html`<${Outside} why="This browser is logged out: somebody logged out here, or the coordinator was started again." />`;
  const Screen = SCREENS[name];
  return html`<header><h1>EdgeShard</h1>
      <nav aria-label="Screens">${Object.keys(SCREENS).map((other) => html`<a href=${`#/${other}`} aria-current=${other === name ? "page" : null}>${TITLES[other]}</a>`)}</nav>
      <span class=${`state ${seen.state}`} role="status">${SAYINGS[seen.state]}</span>
      <span class="who">${session.who} <button type="button" onClick=${() => logOut().finally(() => location.reload())}>Log out</button></span>
    </header>
    <main class=${seen.state === "lost" ? "stale" : ""}>${seen.picture.site ? html`<${Screen} picture=${seen.picture} rest=${rest} />` : html`<p class="quiet">Waiting for the first picture.</p>`}</main>`;
}

function Outside({ why }) {
  return html`<main class="outside"><h1>EdgeShard</h1><p role="alert">${why}</p>
    <p>To look at the site, run this where edgectl is set up, and open the link that it prints:</p>
    <pre>edgectl dashboard</pre>
    <p class="quiet">Programs find the API at <code>/v1</code>.</p></main>`;
}

const root = document.getElementById("app");
root.replaceChildren();
enter().then(
  (session) => render(html`<${Frame} session=${session} />`, root),
  (error) => render(html`<${Outside} why=${error.status === 401 ? error.message : `The coordinator does not answer: ${error.message}`} />`, root),
);
// The address of a link that is opened where the page is open already.
addEventListener("hashchange", () => {
  if (location.hash.startsWith("#open=")) location.reload();
});
