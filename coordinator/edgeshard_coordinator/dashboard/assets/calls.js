// Calls to the coordinator. Each shows the token of the session, which only a login returns. Without it the cookie opens
// nothing: a browser sends that to programs on other ports, too. A tab keeps the token and sends it to other tabs.
let session = null;
const DASHBOARD = new URL("../", import.meta.url);
const NAME = `edgeshard-dashboard ${DASHBOARD.pathname}`;
const ASKING_MS = 300;
const tabs = new BroadcastChannel(NAME); // the tabs of this browser at this dashboard
let arrived = null; // takes the token that another tab sends while this one asks
let entered = () => {}; // called when another tab has a session

tabs.onmessage = ({ data: token }) => {
  if (token === null) {
    if (session) tabs.postMessage(session.token);
    return;
  }
  arrived?.(token);
  if (session) keep({ ...session, token });
  entered();
};

export function onEntered(listener) {
  entered = listener;
}

function keep(opened) {
  session = opened;
  sessionStorage.setItem(NAME, session.token);
  return session;
}

// The token of another tab; "" if no tab sends one.
function askTabs() {
  return new Promise((done) => {
    arrived = done;
    tabs.postMessage(null);
    setTimeout(done, ASKING_MS, "");
  }).finally(() => (arrived = null));
}

function shown(token = session?.token) {
  return token ? { "x-edgeshard-token": token } : {};
}

// The name of the person logged in here, as the list of requests shows it.
export function who() {
  return session?.who;
}

// An address of the dashboard's, whatever path a proxy puts before it and wherever the page itself lies.
export function at(path) {
  return new URL(path, DASHBOARD);
}

export class Refused extends Error {
  constructor(status, body) {
    super(body?.error?.message ?? `the coordinator answered ${status}`);
    this.field = body?.error?.param ?? "";
    this.status = status;
  }
}

async function answered(answer) {
  const body = await answer.json().catch(() => null);
  if (!answer.ok) throw new Refused(answer.status, body);
  return body;
}

// The answer to a request, which may be a refusal. Throws an error with a remedy if there is none.
async function reach(path, options) {
  try {
    return await fetch(at(path), options);
  } catch {
    throw new Error("The coordinator does not answer. Check that it runs and that this browser can reach it, or run edgectl doctor.");
  }
}

function send(path, method, body) {
  const headers = { "content-type": "application/json", ...shown() };
  return reach(path, { method, headers, body: JSON.stringify(body) });
}

// The session of this browser. It uses the secret of a link, which the address loses at once, or its
// cookie and the token of this tab or another one.
export async function enter() {
  const opened = location.hash.match(/^#open=([\w-]+)$/);
  if (opened) {
    history.replaceState(null, "", "#/site");
    keep(await answered(await send("session", "POST", { secret: opened[1] })));
  } else {
    const kept = sessionStorage.getItem(NAME);
    const again = kept && (await resumed(kept).catch((error) => (error.status ? null : Promise.reject(error))));
    if (!again) await resumed(await askTabs());
  }
  tabs.postMessage(session.token);
  return session;
}

async function resumed(token) {
  return keep({ ...(await answered(await reach("session", { headers: shown(token) }))), token });
}

// The key stays here no longer than this call: only a cookie and a token are kept.
export async function enterByKey(key) {
  keep(await answered(await send("session", "POST", { key })));
}

export async function logOut() {
  await send("session", "DELETE", {});
  sessionStorage.removeItem(NAME);
  session = null;
}

export async function act(what, body) {
  return answered(await send(`do/${what}`, "POST", body));
}

export async function ask(what, query) {
  return answered(await reach(`do/${what}?${new URLSearchParams(query)}`, { headers: shown() }));
}

// The events of an answer that is a stream: the kind of each, if it has one, and its data. EventSource sends no header.
async function* eventsOf(answer) {
  if (!answer.ok) throw new Refused(answer.status, await answer.json().catch(() => null));
  let rest = "";
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const fields = Object.fromEntries(event.split("\n").map((line) => [line.slice(0, line.indexOf(": ")), line.slice(line.indexOf(": ") + 2)]));
      if (fields.data) yield [fields.event, fields.data]; // else a comment, which keeps the connection open
    }
  }
}

// The events of the stream of that name, as values.
export async function* events(name, signal) {
  for await (const [kind, data] of eventsOf(await fetch(at(name), { headers: shown(), signal }))) yield [kind, JSON.parse(data)];
}

// The parts of a streamed chat completion, with the milliseconds at which each came.
export async function* chat(body, signal) {
  const headers = { "content-type": "application/json", ...shown() };
  const answer = await fetch(at("chat"), { method: "POST", headers, body: JSON.stringify(body), signal });
  for await (const [, data] of eventsOf(answer)) {
    if (data === "[DONE]") return;
    const part = JSON.parse(data);
    if (part.error) throw new Refused(answer.status, part);
    yield [part, performance.now()];
  }
}
