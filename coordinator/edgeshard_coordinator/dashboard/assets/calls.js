// Calls to the coordinator. Each that changes something shows the page's token.
let session = null;
const DASHBOARD = new URL("../", import.meta.url);

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

function send(path, method, body) {
  const headers = { "content-type": "application/json" };
  if (session) headers["x-edgeshard-token"] = session.token;
  return fetch(at(path), { method, headers, body: JSON.stringify(body) });
}

// The session of this browser: by the secret of a link in the address, which leaves it at once, or by its cookie.
export async function enter() {
  const opened = location.hash.match(/^#open=([\w-]+)$/);
  if (opened) {
    history.replaceState(null, "", "#/site");
    session = await answered(await send("session", "POST", { secret: opened[1] }));
  } else session = await answered(await fetch(at("session")));
  return session;
}

// The key stays here no longer than this call: what is kept is a cookie.
export async function enterByKey(key) {
  session = await answered(await send("session", "POST", { key }));
}

export async function logOut() {
  await send("session", "DELETE", {});
  session = null;
}

export async function act(what, body) {
  return answered(await send(`do/${what}`, "POST", body));
}

export async function ask(what, query) {
  return answered(await fetch(at(`do/${what}?${new URLSearchParams(query)}`)));
}

// The parts of a streamed chat completion, with the milliseconds at which each came.
export async function* chat(body, signal) {
  const headers = { "content-type": "application/json", "x-edgeshard-token": session.token };
  const answer = await fetch(at("chat"), { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!answer.ok) throw new Refused(answer.status, await answer.json().catch(() => null));
  let rest = "";
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue; // a comment, which keeps the connection open
      const data = line.slice("data: ".length);
      if (data === "[DONE]") return;
      const part = JSON.parse(data);
      if (part.error) throw new Refused(answer.status, part);
      yield [part, performance.now()];
    }
  }
}
