// The last ten minutes of the site's figures, kept in this page: a sample a second, while the picture is live and seen.
import { now } from "./store.js";

const MOST = 600;
const GAP_S = 5;
let samples = [];
const listeners = new Set();

export function heard(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function sampled({ tokens_per_s, running, waiting, recent = {}, stages }) {
  const busy = Object.entries(stages).map(([index, stage]) => [index, stage.busy ?? null]);
  return { rate: tokens_per_s ?? null, running, waiting, first: recent.first_token ?? {}, between: recent.between_tokens ?? {}, busy: Object.fromEntries(busy) };
}

function record() {
  const { picture, state } = now();
  if (state !== "live" || document.hidden || !picture.deployments) return;
  const at = Math.round(Date.now() / 1000);
  const last = samples.at(-1);
  if (last && last.at >= at) return;
  if (last && at - last.at > GAP_S) samples.push({ at: last.at + 1, deployments: {} });
  samples.push({ at, deployments: Object.fromEntries(Object.entries(picture.deployments).map(([name, one]) => [name, sampled(one)])) });
  samples = samples.slice(-MOST);
  for (const listener of listeners) listener();
}

// The times of the samples, in seconds since 1970, and the results of `of` for each; null if it finds nothing.
export function times() {
  return samples.map(({ at }) => at);
}

export function values(name, of) {
  return samples.map(({ deployments }) => (deployments[name] && of(deployments[name])) ?? null);
}

setInterval(record, 1000);
