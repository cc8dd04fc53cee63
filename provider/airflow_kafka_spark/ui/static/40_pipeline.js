// The page of one pipeline: its facts, its open window, and the views of its windows.

const LOOK_ONLY = "You may look at this pipeline, but not change it: that requires the right to edit its DAG.";

function Header({ row, where, onAction }) {
  const off = !row.may_edit;
  // Actions that this kind of pipeline does not allow have no button.
  const button = (action, text, title) =>
    !row.actions.includes(action) ? null : h(C.Button, { key: action, size: "xs", variant: "outline", disabled: off, title: off ? LOOK_ONLY : title, onClick: () => onAction({ action }), "data-action": action }, text);
  return h(
    "div",
    { className: "aks-stack", style: { gap: 6 } },
    h("nav", { "aria-label": "Breadcrumb", className: "aks-small" }, h(Link, { to: { search: "" } }, where.dagId ? "All pipelines here" : "Kafka pipelines")),
    h(
      "div",
      { className: "aks-between" },
      h("div", { style: { minWidth: 0, flex: "1 1 300px" } }, h("h1", { className: "aks-heading aks-name" }, row.pipeline), h("div", { className: "aks-row", style: { marginTop: 4 } }, h(Status, row), h(Activity, row), row.reason ? h("span", { className: "aks-muted aks-name" }, row.reason) : null)),
      h(
        "div",
        { className: "aks-row", role: "group", "aria-label": "Actions" },
        button("resume", "Resume", "Let it move windows again"),
        button("pause", "Pause", "It moves no windows until it is resumed"),
        button("replay", "Replay a window", "Move one window once more, with the same offsets"),
        button("skip", "Skip", "Give up the open window, or skip the backlog of the topics"),
        button("reset", "Reset offsets", "Move the pipeline to other offsets"),
      ),
    ),
    h(FailureNote, row),
    row.activity === "conflict" ? h(Note, { kind: "warn", "data-conflict": true }, "Only the newest attempt can complete the window. The other one can no longer commit anything, and ends with an error.") : null,
    row.activity === "paused" && !row.pause ? h("div", { "data-pause": "dag" }, "Its DAG is paused in Airflow, and starts no runs.") : null,
    row.pause ? h("div", { className: "aks-name", "data-pause": true }, `Paused by ${row.pause.who}, `, h(Ago, { at: row.pause.at }), `: ${row.pause.why}`) : null,
    off ? h("div", { className: "aks-small aks-muted", "data-may-edit": "false" }, LOOK_ONLY) : null,
  );
}

// The error of the attempt that failed. An attempt that was killed has stored none.
function FailureNote({ failure }) {
  if (!failure) return null;
  const { error } = failure;
  return h(
    Note,
    { kind: "bad", "data-failure-of": failure.number ?? "", title: known(failure.number) ? `Window ${windowText(failure)} has failed` : "The task has failed before it planned a window" },
    error ? h("div", { "data-error": error.class, style: { margin: "4px 0" } }, h("div", { className: "aks-strong" }, error.class), h("div", { style: { whiteSpace: "pre-wrap" } }, error.message)) : null,
    h(
      "div",
      null,
      known(failure.attempt) ? `Attempt ${failure.attempt} began ` : "The task began ",
      h(Ago, { at: failure.started_at }),
      error ? h(Fragment, null, " and failed ", h(Ago, { at: error.at })) : "",
      failure.task_state ? `. The state of the task is ${failure.task_state}. ` : ". Airflow no longer has the task instance. ",
      error ? null : "It has stored no error: perhaps it was killed. ",
      failure.url ? h(Host, { to: failure.url, title: failure.run }, "See its log.") : `See the log of run ${failure.run}.`,
    ),
  );
}

function progressOf(found) {
  const of = known(found.all_chunks) ? ` of about ${count(found.all_chunks)}` : "";
  const left = found.seconds_left ? `, about ${seconds(found.seconds_left)} to go` : "";
  return `${count(found.chunks)}${of} chunks in ${seconds(found.seconds)}${left}`;
}

function About({ row, partitionsAge, guarantee }) {
  const last = row.last_window;
  return h(Facts, {
    facts: [
      row.reads_rows ? null : ["Lag", known(row.lag_records) ? h("span", { "data-lag": row.lag_records }, plural(row.lag_records, "record")) : null, known(row.lag_age ?? partitionsAge) ? `Measured ${seconds(row.lag_age ?? partitionsAge)} ago` : undefined],
      row.reads_rows ? null : ["Behind", known(row.lag_seconds) ? seconds(row.lag_seconds) : null, "Age of the oldest record that is not yet moved"],
      known(row.log_bytes_behind) ? ["Log behind", bytes(row.log_bytes_behind), "Bytes of the database's log that lay behind the last window when it was planned"] : null,
      row.source_progress ? ["All tables", progressOf(row.source_progress), "Chunks of the snapshot or the bulk read that are done; how many there are follows from the database's estimate"] : null,
      ["Rate", rateOf(row.rate), "Records per second of the last window"],
      ["Last window", last ? h(Fragment, null, `${windowText(last)}, `, h(Ago, { at: last.completed_at })) : null],
      ["DAG and task", row.dag_id ? h(Fragment, null, h(Host, { to: dagPath(row.dag_id) }, row.dag_id), row.task_id ? ` · ${row.task_id}` : "", row.dag_paused ? " (paused in Airflow)" : "") : "no DAG names it", undefined, isLong(`${row.dag_id} · ${row.task_id}`)],
      row.topics?.length ? ["Topics", row.topics.join(", "), undefined, isLong(row.topics.join(", "))] : null,
      row.source && !row.topics?.length ? ["Source", row.source_name, row.source, true] : null,
      row.sink ? ["Sink", row.sink_name, row.sink, true] : null,
      row.group ? ["Group", row.group, undefined, isLong(row.group)] : null,
      ["Guarantee", row.guarantee || guarantee],
      ["Ledger", row.ledger, undefined, true],
    ],
  });
}

function NowRunning({ running }) {
  if (!running) return null;
  const name = windowText(running);
  const path = running.dag_id ? taskPath(running.dag_id, running.run_id, running.task_id, running.map_index) : null;
  return h(
    Panel,
    { title: `Window ${name} is running`, "data-running": running.number, aside: h("span", { className: "aks-small" }, h(Host, { to: path }, "Task instance")) },
    h(Bar, { fraction: running.fraction, label: `Window ${name}` }),
    h(
      "div",
      { className: "aks-row aks-small aks-muted", style: { gap: "2px 16px" } },
      known(running.records_total) ? h("span", null, `${known(running.records_done) ? `${count(running.records_done)} of ` : ""}${plural(running.records_total, "record")}${known(running.fraction) ? `, ${Math.floor(running.fraction * 100)} %` : ""}`) : null,
      known(running.records_done) || known(running.fraction) ? null : h("span", null, "no progress has been reported yet"),
      known(running.remaining_seconds) ? h("span", null, `${seconds(running.remaining_seconds)} left`) : null,
      running.started_at ? h("span", null, "started ", h(Ago, { at: running.started_at })) : null,
      running.step ? h("span", null, `step ${running.step}`) : null,
      running.attempt ? h("span", null, `attempt ${running.attempt}`) : null,
    ),
  );
}

function Intervals({ intervals }) {
  if (!intervals || !intervals.total) return null;
  const missing = intervals.missing || [];
  return h(
    "div",
    { className: "aks-stack", style: { gap: 6 } },
    h("div", { className: "aks-small aks-muted" }, `Data intervals: ${count(intervals.complete)} of ${count(intervals.total)} complete`),
    missing.length ? h(Note, { kind: "warn", "data-missing": missing.length }, `Records between complete intervals were not moved: ${missing.slice(0, 5).map(intervalText).join("; ")}${missing.length > 5 ? ` and ${count(missing.length - 5)} more` : ""}. The lag counts from the first of them. Run the DAG for these times, as by a backfill.`) : null,
  );
}

function Pipeline({ ledger, pipeline, where, alone }) {
  const [params, set] = useQuery();
  const [action, setAction] = useState(null);
  const live = useLive("pipeline", { ledger, pipeline });
  // Links beside a task name an interval's window in full.
  const asked = params.get("window") || "";
  const wanted = asked.startsWith(`${pipeline}.`) ? asked.slice(pipeline.length + 1) : asked;
  const view = params.get("view") || (wanted || where.runId ? "windows" : "charts");
  const data = live.data;
  if (!data) {
    const back = alone ? null : h(Link, { to: { search: "" } }, "All pipelines");
    return h("div", { className: "aks-stack" }, back, live.error ? h(Failure, { title: "The pipeline could not be read", error: live.error, again: live.refresh }) : h(Waiting, { label: "Loading the pipeline" }));
  }
  const { row } = data;
  const tabs = [
    { key: "charts", label: "Charts" },
    { key: "windows", label: "Windows", count: data.windows_total },
    // Only its source, or its DAG's timetable, knows what comes next.
    ...(row.reads_rows ? [] : [{ key: "partitions", label: "Partitions", count: data.partitions.length }, ...(row.intervals ? [] : [{ key: "next", label: "Next window" }])]),
    { key: "records", label: "Records" },
    { key: "dead", label: "Dead letters", count: data.dead_letters?.total },
    { key: "changes", label: "Changes", count: known(data.windows_total) ? data.changes.length : null },
    { key: "configuration", label: "Configuration" },
  ];
  const views = {
    charts: () => h(Charts, { series: data.series || {}, readsRows: row.reads_rows }),
    windows: () => h(Windows, { ledger, pipeline, data, where, wanted, row, onAction: setAction }),
    partitions: () => h(Partitions, { partitions: data.partitions, age: data.partitions_age, intervals: row.intervals }),
    next: () => h(NextWindow, { ledger, pipeline }),
    records: () => h(Records, { ledger, pipeline, topics: data.topics || [], partitions: data.partitions }),
    dead: () => h(DeadLetters, { ledger, pipeline, summary: data.dead_letters, row, changes: data.changes, onAction: setAction }),
    changes: () => h(Changes, { changes: data.changes }),
    configuration: () => h(Configuration, { configuration: data.configuration, row }),
  };
  const chosen = tabs.some((tab) => tab.key === view) ? view : "charts";
  return h(
    "div",
    { className: "aks-stack", "data-pipeline": pipeline },
    h(Unfresh, { live }),
    // One without pipelines is that of every new pipeline.
    data.ledger && data.ledger.state !== "empty" ? h(Ledgers, { ledgers: [data.ledger] }) : null,
    h(Header, { row, where: alone ? { dagId: null } : where, onAction: setAction }),
    h(NowRunning, row),
    h("div", { className: "aks-panel" }, h(About, { row, partitionsAge: data.partitions_age, guarantee: data.configuration?.guarantee })),
    h(Intervals, data),
    h(Tabs, { tabs, chosen, label: "Views of the pipeline", onChoose: (next) => set({ view: next, window: next === "windows" ? wanted : null }) }),
    h("div", { role: "tabpanel", "aria-label": tabs.find((tab) => tab.key === chosen).label, "data-view": chosen }, views[chosen]()),
    action ? h(ActionDialog, { key: action.action, ...action, row, windows: data.windows, onClose: () => setAction(null), onDone: live.refresh }) : null,
  );
}
