// Charts over windows and over time, as plain SVG: axes with units, values under the pointer, gaps in red.

const CHART = { height: 150, left: 52, right: 8, top: 8, bottom: 22 };

function useWidth() {
  const [width, setWidth] = useState(0);
  const node = useRef(null);
  const watch = useRef(null);
  const ref = useCallback((element) => {
    watch.current?.disconnect();
    node.current = element;
    if (!element) return;
    watch.current = new ResizeObserver(([entry]) => setWidth(Math.round(entry.contentRect.width)));
    watch.current.observe(element);
  }, []);
  return [ref, width];
}

// The units of an axis of seconds that is too long for them.
const LONG_UNITS = [[86400, "days"], [3600, "hours"], [60, "minutes"]];

// Round numbers from 0 to at least the largest value.
function ticks(largest, wanted = 4) {
  if (!(largest > 0)) return [0, 1];
  const rough = largest / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  const found = [];
  for (let i = 0; i * step < largest + step * 0.999; i++) found.push(i * step);
  return found;
}

// columns: [{key, title, x label, ...}], one per window or measurement. children(scale) draws; `read` says what the pointer is on.
function Frame({ label, unit, columns, largest, times, series, valueOf, textOf, draw, empty }) {
  const [ref, width] = useWidth();
  const [over, setOver] = useState(null);
  const inner = Math.max(0, width - CHART.left - CHART.right);
  const down = CHART.height - CHART.top - CHART.bottom;
  const [size, sizeName] = (unit === "seconds" && LONG_UNITS.find(([each]) => largest >= 2 * each)) || [1, unit];
  const marks = ticks(largest / size).map((mark) => mark * size);
  const top = marks[marks.length - 1];
  const y = (value) => CHART.top + down * (1 - value / top);
  const span = times ? times[times.length - 1] - times[0] : 0;
  const x = times
    ? (index) => CHART.left + (span ? ((times[index] - times[0]) / span) * inner : inner / 2)
    : (index) => CHART.left + ((index + 0.5) / columns.length) * inner;
  const edge = (index) => {
    if (!times) return CHART.left + (index / columns.length) * inner;
    if (index <= 0) return CHART.left;
    return index >= columns.length ? CHART.left + inner : (x(index - 1) + x(index)) / 2;
  };
  const wanted = Math.max(2, Math.floor(inner / 110));
  const stride = Math.max(1, Math.ceil(columns.length / wanted));
  const labels = [];
  if (columns.length) {
    if (times) {
      const n = Math.min(wanted, columns.length);
      for (let i = 0; i < n; i++) {
        const part = n === 1 ? 0.5 : i / (n - 1);
        labels.push([CHART.left + part * inner, clockText(new Date(times[0] + part * span), span), n === 1 ? "middle" : i === 0 ? "start" : i === n - 1 ? "end" : "middle"]);
      }
    } else for (let i = 0; i < columns.length; i += stride) labels.push([x(i), columns[i].label, "middle"]);
  }
  const shown = over === null ? null : columns[over];
  return h(
    "figure",
    { style: { margin: 0, minWidth: 0 }, "data-chart": label, "data-points": columns.length },
    h(
      "figcaption",
      { className: "aks-between", style: { gap: "0 12px" } },
      h("span", { className: "aks-sub" }, label, h("span", { className: "aks-muted", style: { fontWeight: 400 } }, ` (${sizeName})`)),
      h("span", { className: "aks-small aks-muted" }, shown ? shown.title : ""),
    ),
    h(
      "div",
      { className: "aks-legend" },
      ...series.map((each) =>
        h("span", { key: each.key }, h("span", { className: "aks-swatch", style: { background: each.colour } }), each.label, shown ? h(Fragment, null, " ", h("b", null, textOf(valueOf(shown, each.key)))) : null),
      ),
    ),
    h(
      "div",
      { ref },
      !columns.length
        ? h("div", { className: "aks-muted", style: { height: CHART.height, display: "grid", placeItems: "center" } }, empty)
        : width > 0
          ? h(
              "svg",
              { className: "aks-chart", width, height: CHART.height, role: "img", "aria-label": `${label}, ${unit}: ${plural(columns.length, "point")}, at most ${textOf(largest)}`, onMouseLeave: () => setOver(null) },
              ...marks.map((mark) => h("g", { key: `y${mark}` }, h("line", { className: "aks-axis", x1: CHART.left, x2: CHART.left + inner, y1: y(mark), y2: y(mark) }), h("text", { x: CHART.left - 6, y: y(mark) + 4, textAnchor: "end" }, unit === "seconds" ? oneDigitOrMore(mark / size) : unit === "bytes" ? bytes(mark) : short(mark)))),
              ...labels.map(([at, text, anchor], i) => h("text", { key: `x${i}`, x: at, y: CHART.height - 6, textAnchor: anchor }, text)),
              h("g", { key: "marks" }, draw({ x, y, width: times ? 0 : inner / columns.length, bottom: y(0) })),
              ...columns.map((column, i) =>
                h(
                  "rect",
                  { key: column.key, className: "aks-over", x: edge(i), y: CHART.top, width: Math.max(0.5, edge(i + 1) - edge(i)), height: down, onMouseEnter: () => setOver(i) },
                  h("title", null, [column.title, ...series.map((each) => `${each.label}: ${textOf(valueOf(column, each.key))}`)].join("\n")),
                ),
              ),
            )
          : null,
    ),
  );
}

const fine = new Intl.NumberFormat(undefined, { maximumSignificantDigits: 3 });
const oneDigitOrMore = (value) => (value < 1 ? fine.format(value) : short(value));

// Lines over points. A missing value is a hole in the line, a lone point a dot.
function LineChart({ series, columns, valueOf, times, ...rest }) {
  const largest = Math.max(0, ...columns.flatMap((column) => series.map((each) => valueOf(column, each.key) || 0)));
  const draw = ({ x, y }) =>
    series.flatMap((each) => {
      const runs = [[]];
      columns.forEach((column, i) => {
        const value = valueOf(column, each.key);
        if (known(value)) runs[runs.length - 1].push([x(i), y(Math.max(0, value))]);
        else runs.push([]);
      });
      return runs.flatMap((points, run) => [
        points.length > 1 ? h("polyline", { key: `${each.key}${run}`, points: points.map((p) => p.map((v) => v.toFixed(1)).join(",")).join(" "), fill: "none", stroke: each.colour, strokeWidth: 1.75, strokeLinejoin: "round" }) : null,
        ...(points.length === 1 || points.length <= 30 ? points.map(([px, py], i) => h("circle", { key: `${each.key}${run}.${i}`, cx: px, cy: py, r: 2.2, fill: each.colour })) : []),
      ]);
    });
  return h(Frame, { series, columns, valueOf, times, largest, draw, ...rest });
}

// Bars side by side (`stacked` false) or on top of each other. A series with `on` stands on another one's bar.
function BarChart({ series, columns, valueOf, stacked, ...rest }) {
  const ground = series.filter((each) => !each.on);
  const sum = (column) => series.reduce((total, each) => total + (valueOf(column, each.key) || 0), 0);
  const alone = (column) => Math.max(0, ...series.map((each) => (valueOf(column, each.key) || 0) + (each.on ? valueOf(column, each.on) || 0 : 0)));
  const largest = Math.max(0, ...columns.map(stacked ? sum : alone));
  const draw = ({ x, y, width, bottom }) => {
    const room = Math.min(width * 0.8, 48);
    const bar = (key, colour, left, wide, from, value) => {
      const height = Math.max(value > 0 ? 1 : 0, y(from) - y(from + value));
      return value > 0 ? h("rect", { key, x: left, y: Math.min(bottom, y(from)) - height, width: Math.max(0.8, wide), height, fill: colour }) : null;
    };
    return columns.flatMap((column, i) => {
      const left = x(i) - room / 2;
      if (stacked) {
        let from = 0;
        return series.map((each) => {
          const value = valueOf(column, each.key) || 0;
          const made = bar(`${column.key}.${each.key}`, each.colour, left, room, from, value);
          from += value;
          return made;
        });
      }
      const wide = room / ground.length;
      return series.map((each) => {
        const place = ground.findIndex((other) => other.key === (each.on || each.key));
        const from = each.on ? valueOf(column, each.on) || 0 : 0;
        return bar(`${column.key}.${each.key}`, each.colour, left + place * wide, wide > 3 ? wide - 1 : wide, from, valueOf(column, each.key) || 0);
      });
    });
  };
  return h(Frame, { series, columns, valueOf, largest, draw, ...rest });
}

const STEP_COLOURS = { fence: "gray", plan: "purple", session: "cyan", workers: "yellow", read: "blue", decode: "green", write: "teal", wait: "pink", move: "blue", close: "orange" };
// A step that is divided into parts is not shown beside them.
const stepsOf = (timings) => Object.entries(timings || {}).filter(([step, value]) => step !== "total" && value > 0 && !(step === "move" && "session" in timings));

// A pipeline that reads rows of a source has no lag and no latency, but bytes.
function Charts({ series, readsRows }) {
  const windows = useMemo(() => {
    const newest = (series.windows || []).slice(-120);
    return newest.map((w) => ({ ...w, key: `${w.name}/${w.number}`, label: intervalOf(w) ? minuteText(intervalOf(w)[0]) : String(w.number), title: `Window ${windowText(w)}, complete ${timeText(w.completed_at)}` }));
  }, [series.windows]);
  const lag = useMemo(() => (series.lag || []).map((point, i) => ({ ...point, key: i, title: timeText(point.at) })), [series.lag]);
  const lagTimes = lag.map((point) => instant(point.at)?.getTime() ?? 0);
  const steps = useMemo(() => {
    const found = new Set(windows.flatMap((w) => stepsOf(w.timings).map(([step]) => step)));
    const order = Object.keys(STEP_COLOURS);
    const spare = ["cyan", "pink", "yellow", "green"];
    return [...found]
      .sort((a, b) => (order.indexOf(a) + 1 || 99) - (order.indexOf(b) + 1 || 99))
      .map((step, i) => ({ key: step, label: step, colour: solid(STEP_COLOURS[step] || spare[i % spare.length]) }));
  }, [windows]);
  const of = (row, key) => row[key];
  const told = (each) => windows.some((w) => (each.key === "gaps" ? w.gaps > 0 : known(w[each.key])));
  const none = "No complete window yet";
  return h(
    "div",
    { className: "aks-panels" },
    readsRows ? null : h("div", { className: "aks-panel" }, h(LineChart, { label: "Lag", unit: "records", columns: lag, times: lagTimes, valueOf: of, textOf: count, series: [{ key: "records", label: "behind the topics", colour: solid("orange") }], empty: "The lag has not been measured yet" })),
    h(
      "div",
      { className: "aks-panel" },
      h(BarChart, {
        label: readsRows ? "Rows per window" : "Records per window", unit: readsRows ? "rows" : "records", columns: windows, valueOf: of, textOf: count, empty: none,
        series: [
          readsRows ? null : { key: "published", label: "published", colour: "var(--chakra-colors-fg-subtle)" },
          { key: "read", label: "read", colour: solid("blue") },
          { key: "gaps", label: "lost (gaps)", colour: solid("red"), on: "read" },
          { key: "written", label: readsRows ? "published" : "written", colour: solid("green") },
        ].filter((each) => each && told(each)),
      }),
    ),
    readsRows ? h("div", { className: "aks-panel" }, h(BarChart, { label: "Bytes per window", unit: "bytes", columns: windows, valueOf: of, textOf: bytes, empty: none, series: [{ key: "bytes", label: "published", colour: solid("green") }] })) : null,
    readsRows ? null : h("div", { className: "aks-panel" }, h(LineChart, { label: "Latency", unit: "seconds", columns: windows, valueOf: of, textOf: seconds, empty: none, series: [{ key: "p50", label: "p50", colour: solid("blue") }, { key: "p95", label: "p95", colour: solid("purple") }] })),
    h("div", { className: `aks-panel${readsRows ? " aks-whole" : ""}` }, h(BarChart, { label: "Duration", unit: "seconds", columns: windows, valueOf: (w, key) => (stepsOf(w.timings).find(([step]) => step === key) || [])[1], textOf: seconds, stacked: true, series: steps, empty: none })),
  );
}
