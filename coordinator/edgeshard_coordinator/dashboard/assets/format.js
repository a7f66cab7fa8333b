// Figures as texts, as edgectl writes them.
const SIZES = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  if (count === undefined) return "–";
  let unit = 0;
  while (count >= 1024 && unit < SIZES.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit && count < 100 ? count.toFixed(1) : Math.round(count)} ${SIZES[unit]}`;
}

export function seconds(value) {
  if (value === undefined) return "–";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return value < 100 ? `${value.toFixed(1)} s` : `${Math.round(value / 60)} min`;
}

export function rate(bps) {
  if (bps === undefined) return "–";
  return bps >= 1e9 ? `${(bps / 1e9).toFixed(1)} Gb/s` : `${(bps / 1e6).toFixed(bps < 1e7 ? 1 : 0)} Mb/s`;
}

export function count(value, digits = 0) {
  return value === undefined ? "–" : value.toFixed(digits);
}

export function percent(share) {
  return share === undefined ? "–" : `${Math.round(100 * share)} %`;
}

const MOMENT = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium", hourCycle: "h23" });
const CLOCK = new Intl.DateTimeFormat(undefined, { timeStyle: "medium", hourCycle: "h23" });
const ZONE = new Intl.DateTimeFormat(undefined, { timeZoneName: "short" });

// The time zone of all times here, such as "UTC" or "GMT+1".
export function zone(time = Date.now()) {
  return ZONE.formatToParts(new Date(time)).find(({ type }) => type === "timeZoneName").value;
}

// A date, a time and its zone. `time` is a text of ISO 8601 or milliseconds since 1970, as below.
export function moment(time) {
  return `${MOMENT.format(new Date(time))} ${zone(time)}`;
}

// The time of a day, for a place that has the date and the zone next to it.
export function clock(time) {
  return CLOCK.format(new Date(time));
}

// A date only, with the zone in which it is that date.
export function day(time) {
  return `${new Date(time).toLocaleDateString(undefined, { dateStyle: "medium" })}, ${zone(time)}`;
}
