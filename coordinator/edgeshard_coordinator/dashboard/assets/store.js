// The picture of the site in this page: whole first, then its differences, while the page is seen.
import { at } from "./calls.js";

const STREAMS = { operator: "stream", application: "usage" };
let picture = {};
let state = "connecting"; // connecting, live, lost, ended
const listeners = new Set();
let source = null;
let again = 0;
let stream = "";

export function watch(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function now() {
  return { picture, state };
}

function tell() {
  for (const listener of listeners) listener();
}

// A merge patch: null removes, objects are merged, all else replaces. What did not change stays the same object.
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

function become(next) {
  state = next;
  tell();
}

function close() {
  clearTimeout(again);
  source?.close();
  source = null;
}

function open() {
  close();
  source = new EventSource(at(stream));
  source.addEventListener("picture", (event) => {
    picture = JSON.parse(event.data);
    become("live");
  });
  source.addEventListener("change", (event) => {
    picture = patched(picture, JSON.parse(event.data));
    become("live");
  });
  source.addEventListener("ended", () => {
    close();
    become("ended");
  });
  source.onerror = async () => {
    // A browser tries again by itself but where the answer was a refusal; then somebody has to log in.
    close();
    become("lost");
    const answer = await fetch(at("session")).catch(() => null);
    if (answer?.status === 401) become("ended");
    else again = setTimeout(open, 1000);
  };
}

function seen() {
  if (document.hidden) close();
  else if (source === null && state !== "ended") open();
}

// `session` is whose picture it is.
export function follow(session) {
  stream = STREAMS[session.kind];
  state = "connecting";
  document.addEventListener("visibilitychange", seen);
  open();
}

export function leave() {
  document.removeEventListener("visibilitychange", seen);
  close();
  picture = {};
}
