// Numbers, sizes, durations and times as text, in the user's locale.

const whole = new Intl.NumberFormat();
const oneDigit = new Intl.NumberFormat(undefined, { maximumFractionDigits: 1 });
const compact = new Intl.NumberFormat(undefined, { notation: "compact", maximumFractionDigits: 1 });
const NONE = "–";

const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);
const count = (value) => (known(value) ? whole.format(value) : NONE);
const short = (value) => (known(value) ? (Math.abs(value) < 10000 ? oneDigit.format(value) : compact.format(value)) : NONE);
const plural = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;
const rateOf = (value) => (known(value) ? `${value < 100 ? oneDigit.format(value) : whole.format(Math.round(value))}/s` : NONE);

function bytes(value) {
  if (!known(value)) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  let left = value;
  while (left >= 1000 && unit < units.length - 1) {
    left /= 1000;
    unit++;
  }
  return `${oneDigit.format(left)} ${units[unit]}`;
}

// Seconds -> "0.42 s", "12 s", "3 min 20 s", "2 h 5 min", "3 d 4 h".
function seconds(value) {
  if (!known(value)) return NONE;
  const sign = value < 0 ? "−" : "";
  const left = Math.abs(value);
  if (left < 0.001) return "0 s";
  if (left < 1) return `${sign}${Math.round(left * 1000)} ms`;
  if (left < 10) return `${sign}${oneDigit.format(left)} s`;
  const s = Math.round(left);
  if (s < 60) return `${sign}${s} s`;
  const two = (big, unit, small, lesser) => `${sign}${whole.format(big)} ${unit}${small ? ` ${small} ${lesser}` : ""}`;
  if (s < 3600) return two(Math.floor(s / 60), "min", s % 60, "s");
  const m = Math.round(s / 60);
  if (m < 1440) return two(Math.floor(m / 60), "h", m % 60, "min");
  const hours = Math.round(m / 60);
  return two(Math.floor(hours / 24), "d", hours % 24, "h");
}

// ISO text, or a number of seconds or milliseconds since the epoch -> Date, or null.
function instant(value) {
  if (value === null || value === undefined || value === "") return null;
  const date = new Date(typeof value === "number" && Math.abs(value) < 1e11 ? value * 1000 : value);
  return Number.isNaN(date.getTime()) ? null : date;
}

// The time zone that was chosen in Airflow, or else the browser's.
function zone() {
  try {
    const chosen = (localStorage.getItem("timezone") || "").replace(/^"|"$/g, "");
    return chosen ? new Intl.DateTimeFormat(undefined, { timeZone: chosen }).resolvedOptions().timeZone : undefined;
  } catch {
    return undefined;
  }
}

const formats = new Map();
function format(date, options) {
  const key = `${zone()} ${JSON.stringify(options)}`;
  if (!formats.has(key)) formats.set(key, new Intl.DateTimeFormat(undefined, { ...options, timeZone: zone() }));
  return formats.get(key).format(date);
}
const timeText = (value) => {
  const date = instant(value);
  return date ? format(date, { ...yearOf(date), ...DAY, hour: "2-digit", minute: "2-digit", second: "2-digit" }) : NONE;
};
const clockText = (date, span) =>
  format(date, span > 2 * 86400e3 ? { month: "short", day: "numeric" } : span > 180e3 ? { hour: "2-digit", minute: "2-digit" } : { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const utcText = (value) => {
  const date = instant(value);
  return date ? `${date.toISOString().replace("T", " ").replace(/\.000Z$|Z$/, "")} UTC` : "";
};

// An instant; the pointer shows it in UTC.
function When({ at }) {
  const date = instant(at);
  return date ? h("time", { dateTime: date.toISOString(), title: utcText(at) }, timeText(at)) : NONE;
}

// The time since an instant, as "12 s ago", updated every second.
function Ago({ at }) {
  const now = useNow();
  const date = instant(at);
  if (!date) return NONE;
  const passed = Math.max(0, (now - date.getTime()) / 1000);
  return h("time", { dateTime: date.toISOString(), title: `${timeText(at)}\n${utcText(at)}` }, passed < 5 ? "just now" : `${seconds(passed < 60 ? Math.round(passed) : passed)} ago`);
}

// The name of a window is its number, or its data interval, whose name consists of two instants.
const INTERVAL_NAME = /^(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)(?:\.\d+)?Z-(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)(?:\.\d+)?Z$/;
const isInterval = (w) => Boolean(w.name) && w.name !== String(w.number);
function intervalOf(w) {
  const found = INTERVAL_NAME.exec(w.name || "");
  if (!found) return null;
  const [, ...parts] = found.map(Number);
  return [0, 6].map((at) => new Date(Date.UTC(parts[at], parts[at + 1] - 1, ...parts.slice(at + 2, at + 6))));
}
const DAY = { month: "short", day: "numeric" };
const yearOf = (date) => (date.getFullYear() !== new Date().getFullYear() ? { year: "numeric" } : {});
const clockOf = (date) => ({ hour: "2-digit", minute: "2-digit", ...(date.getSeconds() ? { second: "2-digit" } : {}) });
const minuteText = (date) => format(date, { ...yearOf(date), ...DAY, ...clockOf(date) });
// The bounds of a data interval. Its day is not repeated.
const boundsText = ([start, end]) => {
  const day = (date) => format(date, { year: "numeric", ...DAY });
  return `${minuteText(start)} – ${day(start) === day(end) ? format(end, clockOf(end)) : minuteText(end)}`;
};
function windowText(w) {
  const bounds = intervalOf(w);
  return bounds ? boundsText(bounds) : isInterval(w) ? w.name : `#${w.number}`;
}

const rangeText = (r) => `${r.topic}-${r.partition} [${whole.format(r.start)}, ${whole.format(r.end)})`;
const intervalText = (interval) => (interval ? boundsText(interval.map(instant)) : "");
const intervalUtc = (interval) => (interval ? `${utcText(interval[0])} – ${utcText(interval[1])}` : "");
