// The list of all pipelines, or of those of a DAG, a run or a task, refreshed while it is visible.

const PAGE_SIZE = 50;
const linkOf = (row, more = {}) => ({ search: searchOf({ ledger: row.ledger, pipeline: row.pipeline, ...more }) });

function Running({ running }) {
  const { records_done: done, records_total: total } = running;
  const left = running.remaining_seconds;
  return h(
    "div",
    { style: { minWidth: 110, maxWidth: 220 } },
    h(Bar, { fraction: running.fraction, label: `Window ${windowText(running)}` }),
    h(
      "div",
      { className: "aks-small aks-muted", "data-progress": known(running.fraction) ? Math.round(running.fraction * 100) : "" },
      known(running.fraction) ? `${Math.floor(running.fraction * 100)} %` : "",
      known(done) && known(total) ? ` of ${count(total)}` : "",
      known(left) ? `, ${seconds(left)} left` : "",
      running.attempt > 1 ? `, attempt ${running.attempt}` : "",
    ),
  );
}

// The first line of an error; of one that lists problems, the first of these.
function gist(message) {
  const [first, ...others] = message.split("\n");
  const problem = others.find((line) => /^\s*1\. /.test(line));
  return problem ? problem.replace(/^\s*1\. /, "") : first;
}

// The error of the attempt that failed, when it failed, and its log.
function LastFailure({ failure }) {
  if (!failure) return null;
  const { error } = failure;
  return h(
    "div",
    { className: "aks-small", "data-failed-attempt": failure.attempt ?? "" },
    error ? h("div", { className: "aks-clamp aks-lines", title: error.message }, h("span", { className: "aks-error aks-strong" }, error.class), error.message ? `: ${gist(error.message)}` : "") : null,
    h(
      "div",
      { className: "aks-muted" },
      known(failure.attempt) ? `attempt ${failure.attempt}, ` : "",
      error ? h(Ago, { at: error.at }) : h(Fragment, null, "begun ", h(Ago, { at: failure.started_at })),
      failure.url ? h(Fragment, null, ": ", h(Host, { to: failure.url, title: `Log of ${failure.run}` }, "log")) : null,
    ),
  );
}

// Who has paused a pipeline, and why; or its DAG.
function Paused({ row }) {
  if (row.activity !== "paused") return null;
  const text = row.pause ? `by ${row.pause.who}: ${row.pause.why}` : "its DAG is paused in Airflow";
  return h("div", { className: "aks-small aks-muted aks-clamp", title: text }, text);
}

function LastWindow({ window: last, row }) {
  if (!last) return NONE;
  return h(
    Fragment,
    null,
    h(Link, { to: linkOf(row, { window: last.name || last.number }), title: `Window ${last.name || last.number}`, className: isInterval(last) ? "aks-name" : "aks-clamp" }, windowText(last)),
    h("div", { className: "aks-small aks-muted" }, h(Ago, { at: last.completed_at })),
    h("div", { className: "aks-small aks-muted", title: plural(last.records_read, "record") }, `${count(last.records_read)} in ${seconds(last.seconds)}`),
  );
}

function Lag({ row }) {
  if (!known(row.lag_records)) return h("span", { title: "The lag has not been measured yet" }, NONE);
  return h(
    "span",
    { title: known(row.lag_age) ? `Measured ${seconds(row.lag_age)} ago` : undefined, "data-lag": row.lag_records },
    count(row.lag_records),
    known(row.lag_seconds) ? h("div", { className: "aks-small aks-muted" }, row.lag_records ? `${seconds(row.lag_seconds)} behind` : "") : null,
  );
}

// Many topics are cut after two lines; the target never is.
const Flow = ({ row }) =>
  h(
    Fragment,
    null,
    h("div", { className: "aks-clamp", title: (row.topics || []).join(", ") || row.source || undefined }, (row.topics || []).join(", ") || row.source_name || NONE),
    row.sink ? h("div", { className: "aks-name", title: row.sink, "data-target": row.sink }, h("span", { className: "aks-muted" }, "→ "), row.sink_name) : null,
    h("div", { className: "aks-small aks-muted aks-clamp" }, [row.group ? `group ${row.group}` : null, row.guarantee].filter(Boolean).join(" · ")),
  );

const mayPause = (row) => row.may_edit && (row.actions.includes("pause") || row.actions.includes("resume"));

// `chosen` and `onChoose`: the pipelines that are selected to be paused or resumed together.
function PipelineName({ row, chosen, onChoose }) {
  const name = h(
    "div",
    { style: { minWidth: 0 } },
    h(Link, { to: linkOf(row), className: "aks-strong aks-clamp", title: row.pipeline }, row.pipeline),
    row.dag_id
      ? h("div", { className: "aks-small aks-muted aks-clamp" }, h(Host, { to: dagPath(row.dag_id), title: `DAG ${row.dag_id}` }, row.dag_id), row.task_id ? ` · ${row.task_id}` : "")
      : h("div", { className: "aks-small aks-muted" }, "no DAG names it"),
  );
  if (!mayPause(row)) return name;
  return h(
    "div",
    { style: { display: "flex", gap: 8, alignItems: "flex-start" } },
    h("input", { type: "checkbox", className: "aks-check", checked: chosen, "aria-label": `Select ${row.pipeline}`, onChange: (event) => onChoose(row, event.target.checked) }),
    name,
  );
}

const rowKey = (row) => `${row.ledger}\n${row.pipeline}`;
const listColumns = ({ chosen, onChoose }) => [
  {
    key: "pipeline", label: "Pipeline", sort: "pipeline", lead: true, width: "24%",
    cell: (row) => h(PipelineName, { row, chosen: chosen.has(rowKey(row)), onChoose }),
  },
  {
    key: "status", label: "Status", sort: "status", width: "17%",
    cell: (row) => h(Fragment, null, h(Status, row), row.reason ? h("div", { className: "aks-small aks-muted aks-clamp", title: row.reason }, row.reason) : null),
  },
  { key: "activity", label: "Activity", sort: "activity", width: "15%", cell: (row) => h(Fragment, null, h(Activity, row), h(Paused, { row }), row.running ? h(Running, row) : null, h(LastFailure, row)) },
  { key: "flow", label: "Flow", width: "20%", wide: true, cell: (row) => h(Flow, { row }) },
  { key: "last", label: "Last window", width: "11%", third: true, sort: "last_window", cell: (row) => h(LastWindow, { window: row.last_window, row }) },
  { key: "lag", label: "Lag", sort: "lag", num: true, third: true, title: "Records in the topics that are not yet moved, and the age of the oldest one", cell: (row) => h(Lag, { row }) },
  { key: "rate", label: "Rate", sort: "rate", num: true, third: true, title: "Records per second of the last window", cell: (row) => rateOf(row.rate) },
];

const LEDGER_SAYS = {
  loading: ["info", "is being read", "are being read"],
  down: ["bad", "cannot be reached", "cannot be reached"],
  missing: ["warn", "does not exist yet", "do not exist yet"],
  empty: ["info", "contains no pipeline yet", "contain no pipeline yet"],
  unreadable: ["bad", "cannot be read", "cannot be read"],
};

const sentence = (text) => text.replace(/[^.!?]$/, "$&.");
function ledgerDetails(ledger) {
  const age = ["loading", "empty", "missing"].includes(ledger.state) ? null : known(ledger.age) ? `The data shown is ${seconds(ledger.age)} old.` : "None of its records has been read.";
  return [ledger.message ? sentence(ledger.message) : null, age].filter(Boolean).join(" ");
}

// Problems of ledgers, and the age of the data shown. Several ledgers with the same problem take one line, which can be opened.
function Ledgers({ ledgers }) {
  const byState = new Map();
  for (const ledger of ledgers || []) if (LEDGER_SAYS[ledger.state]) byState.set(ledger.state, [...(byState.get(ledger.state) || []), ledger]);
  return h(
    Fragment,
    null,
    ...[...byState].map(([state, found]) => {
      const [kind, says, many] = LEDGER_SAYS[state];
      const [first] = found;
      if (found.length === 1)
        return h(Note, { key: state, kind, "data-ledger-state": state }, h("span", { className: "aks-strong" }, `Ledger ${first.ledger} ${says}. `), ledgerDetails(first));
      return h(
        Note,
        { key: state, kind, "data-ledger-state": state },
        h(
          "details",
          null,
          h("summary", { style: { cursor: "pointer" } }, h("span", { className: "aks-strong" }, `${count(found.length)} ledgers ${many}`), h("span", { className: "aks-wide-only" }, `: ${found.map((ledger) => ledger.ledger).join(", ")}`)),
          ...found.map((ledger) => h("div", { key: ledger.ledger, style: { marginTop: 4 } }, h("span", { className: "aks-strong" }, `${ledger.ledger}. `), ledgerDetails(ledger))),
        ),
      );
    }),
  );
}

// The age of the page while Airflow does not answer.
function Unfresh({ live }) {
  if (!live.error || !live.data) return null;
  return h(Note, { kind: "warn" }, `Not refreshed since ${timeText(live.at)}: ${live.error.message} It is tried again.`);
}

function Counts({ data, status, onStatus }) {
  const counts = data.counts || {};
  const all = Object.values(counts).reduce((sum, each) => sum + each, 0);
  const chip = (key, text, number, palette) =>
    h("button", { key: key || "all", type: "button", className: "aks-chip", "aria-pressed": status === key, "data-count": key || "all", onClick: () => onStatus(status === key ? "" : key), title: key ? STATUSES[key]?.says : undefined }, palette ? dot(palette) : null, text, h("span", { style: { fontWeight: 600 } }, count(number)));
  const doing = Object.entries(data.activities || {}).filter(([activity, number]) => (number && activity !== "idle") || activity === status);
  return h(
    "div",
    { className: "aks-between", style: { alignItems: "center" } },
    h("div", { className: "aks-row", role: "group", "aria-label": "Filter by status" }, chip("", "All", all), ...Object.keys(STATUSES).filter((key) => counts[key] || key === status).map((key) => chip(key, key, counts[key] || 0, STATUSES[key].palette))),
    h("div", { className: "aks-row", role: "group", "aria-label": "Filter by activity" }, ...doing.map(([activity, number]) => chip(activity, activity, number, (ACTIVITIES[activity] || ACTIVITIES.idle).palette))),
  );
}

// What can be done with the selected pipelines, which may be on several pages.
function Selection({ chosen, rows, onChoose, onAction }) {
  if (!chosen.size) return null;
  const here = rows.filter(mayPause);
  return h(
    "div",
    { className: "aks-row", role: "group", "aria-label": "Selected pipelines", "data-selected": chosen.size },
    h("span", { className: "aks-strong" }, `${plural(chosen.size, "pipeline")} selected`),
    h(C.Button, { size: "xs", variant: "outline", "data-bulk": "pause", onClick: () => onAction("pause") }, "Pause"),
    h(C.Button, { size: "xs", variant: "outline", "data-bulk": "resume", onClick: () => onAction("resume") }, "Resume"),
    h("button", { type: "button", className: "aks-chip", onClick: () => onChoose(new Map([...chosen, ...here.map((row) => [rowKey(row), row])])) }, "Select all of this page"),
    h("button", { type: "button", className: "aks-chip", onClick: () => onChoose(new Map()) }, "Select none"),
  );
}

function Nothing({ filtered, where, onClear }) {
  if (filtered)
    return h(Empty, { title: "No pipeline matches" }, h(C.Button, { size: "xs", variant: "outline", onClick: onClear }, "Show all"));
  const operators = [h(C.Code, null, "KafkaToSinkOperator"), ", ", h(C.Code, null, "KafkaToKafkaOperator"), " or ", h(C.Code, null, "SourceToKafkaOperator")];
  // Only its first window names the pipeline of a mapped task, or of one with a template.
  if (where.dagId)
    return h(Empty, { title: "No pipeline here" }, "Tasks of ", ...operators, " are shown. A mapped task, or one whose pipeline is named by a template, is shown once it has planned a window.");
  return h(
    Empty,
    { title: "No pipeline yet" },
    "A pipeline is shown as soon as a DAG has a task of ", ...operators,
    ". Pipelines that no DAG names are shown when Airflow's setting ",
    h(C.Code, null, "[kafka_spark] ledgers"), " names their ledger, as ", h(C.Code, null, "connection/topic"), ".",
  );
}

function List({ where, onOne }) {
  const [params, set] = useQuery();
  const [typed, setTyped] = useState(params.get("q") || "");
  const q = useDelayed(typed.trim(), 250);
  const status = params.get("status") || "";
  const sort = params.get("sort") || "status";
  const offset = Math.max(0, Number(params.get("offset")) || 0);
  useEffect(() => {
    if (q !== (params.get("q") || "")) set({ q, offset: null });
  }, [q]);
  const live = useLive("pipelines", { q, status, sort, limit: PAGE_SIZE, offset: offset || null, dag_id: where.dagId, run_id: where.runId, task_id: where.taskId });
  const [kept, keep] = useState(null);
  // The last page stays while another page or filter is loaded.
  useEffect(() => {
    if (live.data) keep(live.data);
  }, [live.data]);
  const data = live.data || kept;
  const filtered = Boolean(q || status);
  const [chosen, setChosen] = useState(new Map());
  const [bulk, setBulk] = useState(null);
  const choose = (row, is) =>
    setChosen((was) => {
      const now = new Map(was);
      if (is) now.set(rowKey(row), row);
      else now.delete(rowKey(row));
      return now;
    });
  const only = onOne && data && data.total === 1 && !filtered ? data.pipelines[0] : null;
  if (only) return onOne(only);
  const clear = () => {
    setTyped("");
    set({ q: null, status: null, offset: null });
  };
  const table = data && data.pipelines.length
    ? h(Table, { label: "Kafka pipelines", columns: listColumns({ chosen, onChoose: choose }), rows: data.pipelines, keyOf: rowKey, sort, onSort: (next) => set({ sort: next, offset: null }) })
    : null;
  return h(
    "div",
    { className: "aks-stack" },
    where.dagId ? null : h("h1", { className: "aks-heading" }, "Kafka pipelines"),
    h(Unfresh, { live }),
    live.error && !live.data ? h(Failure, { title: "The pipelines could not be read", error: live.error, again: live.refresh }) : null,
    // Beside a DAG only its own ledgers matter.
    data ? h(Ledgers, { ledgers: where.dagId ? data.ledgers.filter((each) => data.pipelines.some((row) => row.ledger === each.ledger)) : data.ledgers }) : null,
    data ? h(Counts, { data, status, onStatus: (next) => set({ status: next, offset: null }) }) : null,
    data && (data.total || filtered)
      ? h(C.Input, { type: "search", size: "sm", placeholder: "Search pipelines, DAGs, topics, groups", "aria-label": "Search pipelines", value: typed, onChange: (event) => setTyped(event.target.value) })
      : null,
    data ? h(Selection, { chosen, rows: data.pipelines, onChoose: setChosen, onAction: setBulk }) : null,
    !data && !live.error ? h(Waiting, { lines: 8, label: "Loading pipelines" }) : null,
    data && !data.pipelines.length ? h(Nothing, { filtered: filtered || offset > 0, where, onClear: clear }) : table,
    data ? h(Pager, { offset, limit: PAGE_SIZE, total: data.total, onOffset: (next) => set({ offset: next || null }), what: "pipelines" }) : null,
    bulk ? h(BulkDialog, { key: bulk, action: bulk, rows: [...chosen.values()], onClose: () => setBulk(null), onDone: () => { setChosen(new Map()); live.refresh(); } }) : null,
  );
}
