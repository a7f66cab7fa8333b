// The picture of the site in this page: whole first, then its differences, while the page is seen.
//
// A browser allows six connections to a host over HTTP/1.1. So of all visible pages of one session,
// the page that holds a lock has the stream and sends the others its messages. If a browser has no
// locks, each page has a stream of its own.
import { events, onEntered } from "./calls.js";

const STREAMS = { operator: "stream", application: "usage" };
const ALIVE_MS = 5000;
const SILENT_MS = 15000;

let picture = {};
let state = "connecting"; // connecting, live, lost, ended
const listeners = new Set();
let source = null; // what ends the stream of this page
let again = 0;
let others = null; // the channel to the other pages
let lock = "";
let letGo = null; // while this page has the stream, or waits for it
let heardAt = 0;
let stream = "";
let isWhole = false; // whether a picture came

export function watch(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function now() {
  return { picture, state };
}

// A merge patch: null removes, objects are merged, all else replaces. Unchanged parts stay the same objects.
export function patched(before, patch) {
  const after = { ...before };
  for (const [key, value] of Object.entries(patch)) {
    if (value === null) delete after[key];
    else if (typeof value === "object" && !Array.isArray(value)) {
      const known = before[key];
      after[key] = patched(known && typeof known === "object" && !Array.isArray(known) ? known : {}, value);
    } else after[key] = value;
  }
  return after;
}

export function tellAll() {
  for (const listener of listeners) listener();
}

function become(next) {
  state = next;
  tellAll();
}

// Take a message of the stream, received here or by another page.
function take(kind, value) {
  if (kind === "picture") [picture, isWhole] = [value, true];
  else if (kind === "change" && isWhole) picture = patched(picture, value);
  if (kind === "ended") {
    close();
    become("ended");
  } else if (kind === "lost") become("lost");
  else if (isWhole) become("live");
}

function tell(kind, value) {
  take(kind, value);
  others?.postMessage([kind, value]);
}

function close() {
  clearTimeout(again);
  source?.abort();
  source = null;
  letGo?.();
  letGo = null;
}

async function open() {
  clearTimeout(again);
  source?.abort();
  const own = (source = new AbortController());
  let refused = false;
  try {
    for await (const [kind, value] of events(stream, own.signal)) tell(kind, value);
  } catch (error) {
    refused = error.status === 401 || error.status === 403;
  }
  if (source !== own) return;
  tell(refused ? "ended" : "lost");
  if (!refused) again = setTimeout(open, 1000);
}

// Have the stream, or wait until the page that has it is hidden, closed or (`steal`) silent.
function queue(steal = false) {
  if (!others) return open();
  close();
  const left = new AbortController();
  const until = new Promise((done) => (letGo = () => (left.abort(), done())));
  const granted = () => {
    if (left.signal.aborted) return undefined;
    open();
    const alive = setInterval(() => others.postMessage(["alive"]), ALIVE_MS);
    return until.finally(() => clearInterval(alive));
  };
  // Ends in an error if this page no longer waits, or if another one took the stream: then it waits again.
  navigator.locks.request(lock, steal ? { steal } : { signal: left.signal }, granted).catch(() => !left.signal.aborted && seen());
  others.postMessage(["ask"]);
  heardAt = performance.now();
}

function heard({ data: [kind, value] }) {
  heardAt = performance.now();
  if (kind === "ask") {
    if (source && isWhole) others.postMessage(["picture", picture]);
    if (source && state === "lost") others.postMessage(["lost"]);
  } else if (kind !== "alive" && !source && letGo) take(kind, value);
}

function seen() {
  if (document.hidden) close();
  else if (state !== "ended") queue();
}

// The stream of the session's kind, which all pages of the session have in common.
export function follow(session) {
  stream = STREAMS[session.kind];
  state = "connecting";
  document.addEventListener("visibilitychange", seen);
  // A person who signs in here admits all pages of this browser.
  onEntered(() => state === "ended" && location.reload());
  if (navigator.locks) {
    lock = `edgeshard-dashboard ${session.token}`;
    others = new BroadcastChannel(lock);
    others.onmessage = heard;
    setInterval(() => letGo && !source && performance.now() - heardAt > SILENT_MS && queue(true), ALIVE_MS);
  }
  seen();
}

export function leave() {
  document.removeEventListener("visibilitychange", seen);
  close();
  picture = {};
}
