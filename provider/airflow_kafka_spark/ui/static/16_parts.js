// Components that all pages use.

const STATUSES = {
  OK: { palette: "green", says: "Keeps up with its topics" },
  WARN: { palette: "yellow", says: "Falls behind" },
  STALL: { palette: "orange", says: "Makes no progress" },
  STOP: { palette: "red", says: "Has stopped" },
  REWIND: { palette: "purple", says: "Has gone back" },
  UNKNOWN: { palette: "gray", says: "Not measured yet" },
};
const ACTIVITIES = {
  running: { palette: "running", says: "running" },
  failed: { palette: "failed", says: "failed" },
  conflict: { palette: "orange", says: "conflict" },
  paused: { palette: "gray", says: "paused" },
  new: { palette: "info", says: "new" },
  unknown: { palette: "gray", says: "unknown" },
  idle: { palette: "gray", says: "idle" },
};
const solid = (palette) => `var(--chakra-colors-${palette}-solid)`;
const dot = (palette) => h("span", { className: "aks-dot", style: { background: solid(palette) }, "aria-hidden": true });

// The status is that of the lag. Beside a failure a lag that is in order must not look as if all were well. Rows have no lag.
const Status = ({ status, reason, activity, reads_rows }) => {
  const known = STATUSES[status] || STATUSES.UNKNOWN;
  const quiet = ["failed", "conflict"].includes(activity) && ["OK", "UNKNOWN"].includes(status);
  if (quiet && reads_rows) return null;
  const palette = quiet ? "gray" : known.palette;
  return h(C.Badge, { colorPalette: palette, variant: "subtle", size: "sm", title: reason || known.says, "data-status": status }, dot(palette), quiet ? `lag ${status}` : status);
};

const Activity = ({ activity }) => {
  const known = ACTIVITIES[activity] || { palette: "gray", says: String(activity) };
  return h("span", { className: "aks-row", style: { gap: 6 }, "data-activity": activity }, dot(known.palette), known.says);
};

function Bar({ fraction, label }) {
  const whole = known(fraction);
  const percent = whole ? Math.max(0, Math.min(100, fraction * 100)) : null;
  return h(
    "div",
    { className: `aks-bar${whole ? "" : " aks-unknown"}`, role: "progressbar", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": whole ? Math.round(percent) : undefined },
    h("div", { style: whole ? { width: `${percent}%` } : {} }),
  );
}

const Note = ({ kind = "info", title, children, ...rest }) =>
  h("div", { className: `aks-note aks-${kind}`, role: kind === "bad" ? "alert" : "status", ...rest }, title ? h("div", { className: "aks-strong" }, title) : null, children);

// An error, with what to do.
function Failure({ error, title, again }) {
  if (!error) return null;
  if (error.status === 401)
    return h(Note, { kind: "warn", title: "Your session has ended" }, h("a", { href: loginUrl() }, "Log in again"));
  const message = error.message || String(error);
  const missing = (text) => text && !message.includes(String(text).replace(/\.$/, ""));
  return h(
    Note,
    { kind: "bad", title, "data-failure": error.status },
    h("div", null, message),
    missing(error.found) ? h("div", null, `Found: ${error.found}`) : null,
    missing(error.expected) ? h("div", null, `Expected: ${error.expected}`) : null,
    missing(error.action) ? h("div", { className: "aks-strong" }, error.action) : null,
    again ? h(C.Button, { size: "xs", variant: "outline", mt: 2, onClick: again }, "Try again") : null,
  );
}

function loginUrl() {
  const url = new URL("api/v2/auth/login", document.baseURI);
  url.searchParams.set("next", location.pathname + location.search);
  return url.href;
}

const Waiting = ({ lines = 5, label = "Loading" }) =>
  h("div", { className: "aks-stack", "aria-busy": true, "aria-label": label }, ...Array.from({ length: lines }, () => h(C.Skeleton, { height: "28px" })));

const Empty = ({ title, children }) =>
  h("div", { className: "aks-panel", style: { textAlign: "center", padding: "32px 16px" } }, h("div", { className: "aks-sub" }, title), h("div", { className: "aks-muted", style: { maxWidth: 640, margin: "6px auto 0" } }, children));

const Panel = ({ title, aside, children, ...rest }) =>
  h(
    "section",
    { className: "aks-panel aks-stack", style: { gap: 8 }, ...rest },
    title || aside ? h("div", { className: "aks-between" }, h("h3", { className: "aks-sub" }, title), aside) : null,
    children,
  );

// A value that would fill a narrow column by itself.
const isLong = (text) => String(text ?? "").length > 32;

// facts: [name, value, title, true for a long value].
const Facts = ({ facts }) =>
  h("dl", { className: "aks-facts" }, ...facts.filter(Boolean).map(([name, value, title, long]) => h("div", { key: name, title, className: long ? "aks-long" : undefined }, h("dt", null, name), h("dd", null, known(value) && value !== "" ? value : NONE))));

// A table that becomes a stack of cards on a narrow page.
// columns: {key, label, cell(row), num, sort, title, width}, and as cards: lead (no label), wide, third (of the width); details(row): a second row below, across all columns.
function Table({ label, columns, rows, keyOf, sort, onSort, details, marked, cards = true }) {
  const header = (column) => {
    const by = sort ? sort.replace(/^-/, "") : "";
    const active = column.sort && by === column.sort;
    const order = active ? (sort.startsWith("-") ? "descending" : "ascending") : undefined;
    const next = active ? (sort.startsWith("-") ? column.sort : `-${column.sort}`) : column.num ? `-${column.sort}` : column.sort;
    return h(
      "th",
      { key: column.key, role: "columnheader", scope: "col", className: column.num ? "aks-num" : undefined, "aria-sort": order, title: column.title, style: column.width ? { width: column.width } : undefined },
      column.sort && onSort
        ? h("button", { className: "aks-plain", style: { fontWeight: 500 }, onClick: () => onSort(next) }, column.label, h("span", { "aria-hidden": true }, active ? (order === "descending" ? " ↓" : " ↑") : ""))
        : column.label,
    );
  };
  const line = (row, index) => {
    const odd = index % 2 === 0 ? "aks-odd" : "";
    const key = keyOf(row);
    const below = details ? details(row) : null;
    return h(
      Fragment,
      { key },
      h(
        "tr",
        { role: "row", className: `${odd}${marked && marked(row) ? " aks-marked" : ""}`, "data-row": key },
        ...columns.map((column) => h("td", { key: column.key, role: "cell", "data-label": typeof column.label === "string" ? column.label : column.key, className: ["num", "lead", "wide", "third"].filter((each) => column[each]).map((each) => `aks-${each}`).join(" ") || undefined }, h("div", { style: { minWidth: 0 } }, column.cell(row)))),
      ),
      below ? h("tr", { role: "row", className: odd }, h("td", { role: "cell", className: "aks-full", colSpan: columns.length }, below)) : null,
    );
  };
  return h(
    "div",
    { className: "aks-scroll" },
    h(
      "table",
      { className: `aks-table${cards ? " aks-cards" : ""}`, role: "table", "aria-label": label },
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, ...columns.map(header))),
      h("tbody", { role: "rowgroup" }, ...rows.map(line)),
    ),
  );
}

function Pager({ offset, limit, total, onOffset, what }) {
  if (total <= limit && offset === 0) return null;
  const step = (to, text, off) => h(C.Button, { size: "xs", variant: "outline", disabled: off, onClick: () => onOffset(to) }, text);
  return h(
    "nav",
    { className: "aks-row", "aria-label": `Pages of ${what}`, style: { justifyContent: "flex-end" } },
    h("span", { className: "aks-muted aks-small" }, `${count(Math.min(offset + 1, total))}–${count(Math.min(offset + limit, total))} of ${count(total)} ${what}`),
    step(Math.max(0, offset - limit), "Previous", offset === 0),
    step(offset + limit, "Next", offset + limit >= total),
  );
}

function Tabs({ tabs, chosen, onChoose, label }) {
  const bar = useRef(null);
  // On a narrow page the chosen tab may be one that has to be scrolled to.
  useEffect(() => {
    const tab = bar.current?.querySelector(`[data-tab="${chosen}"]`);
    if (!tab) return;
    const hidden = tab.offsetLeft < bar.current.scrollLeft || tab.offsetLeft + tab.offsetWidth > bar.current.scrollLeft + bar.current.clientWidth;
    if (hidden) bar.current.scrollLeft = tab.offsetLeft - (bar.current.clientWidth - tab.offsetWidth) / 2;
  }, [chosen]);
  const keys = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const at = tabs.findIndex((tab) => tab.key === chosen);
    const next = tabs[(at + step + tabs.length) % tabs.length].key;
    onChoose(next);
    bar.current?.querySelector(`[data-tab="${next}"]`)?.focus();
  };
  return h(
    "div",
    { className: "aks-tabs", role: "tablist", "aria-label": label, ref: bar, onKeyDown: keys },
    ...tabs.map((tab) =>
      h("button", { key: tab.key, type: "button", role: "tab", "data-tab": tab.key, "aria-selected": tab.key === chosen, tabIndex: tab.key === chosen ? 0 : -1, onClick: () => onChoose(tab.key) }, tab.label, known(tab.count) ? h("span", { className: "aks-muted" }, ` ${count(tab.count)}`) : null),
    ),
  );
}

// A link to a page of Airflow. Its router adds the path of the base URL.
const Host = ({ to, children, title }) => (to ? h(Link, { to: `/${to.replace(/^\//, "")}`, title }, children) : children);
const dagPath = (dag) => `dags/${encodeURIComponent(dag)}`;
const taskPath = (dag, run, task, index) =>
  run && task ? `${dagPath(dag)}/runs/${encodeURIComponent(run)}/tasks/${encodeURIComponent(task)}${known(index) && index >= 0 ? `/mapped/${index}` : ""}` : dagPath(dag);

// An error in a page removes that page only, not Airflow's.
class Guard extends Component {
  constructor(props) {
    super(props);
    this.state = { error: null };
  }
  static getDerivedStateFromError(error) {
    return { error };
  }
  render() {
    if (!this.state.error) return this.props.children;
    return h(Failure, { title: "This page could not be shown", error: this.state.error, again: () => this.setState({ error: null }) });
  }
}
