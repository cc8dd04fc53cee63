// The windows of a pipeline: their records, their duration, and their tasks.

const windowKey = (w) => `${w.name}/${w.number}`;
const windowId = (w) => (isInterval(w) ? w.name : w.number);
const isWanted = (w, wanted) => Boolean(wanted) && (String(w.name) === wanted || String(w.number) === wanted);

const lostOffsets = (w) => (w.gaps || []).reduce((sum, gap) => sum + gap.end - gap.start, 0);
const lostText = (w) => `${plural(lostOffsets(w), "offset")} deleted before they could be read`;
const outOfInterval = (w) => `${plural(w.records_out_of_interval, "record")} outside of the interval, by up to ${seconds(w.out_of_interval_seconds)}`;

function Ranges({ ranges }) {
  const all = ranges || [];
  const shown = all.slice(0, 2);
  return h(
    "div",
    { className: "aks-small", title: all.slice(0, 40).map(rangeText).join("\n") },
    ...shown.map((r) => h("div", { key: `${r.topic}-${r.partition}`, className: "aks-name" }, rangeText(r))),
    all.length > shown.length ? h("div", { className: "aks-muted" }, `and ${plural(all.length - shown.length, "more partition")}`) : null,
  );
}

// Rows of a source have no offsets and no timestamps. Deletes have a column if a window has any.
const windowColumns = ({ where, open, onOpen, readsRows, deletes }) => [
  {
    key: "window", label: "Window", lead: true,
    cell: (w) =>
      h(
        "div",
        { style: { whiteSpace: isInterval(w) ? "normal" : "nowrap" } },
        h("button", { type: "button", className: "aks-plain aks-strong", "aria-expanded": open === windowKey(w), onClick: () => onOpen(open === windowKey(w) ? "" : windowKey(w)), title: w.interval ? `${intervalUtc(w.interval)}\nAll details of this window` : "All details of this window" }, h("span", { "aria-hidden": true, className: "aks-muted" }, open === windowKey(w) ? "▾ " : "▸ "), windowText(w)),
        " ",
        w.state === "COMPLETE" ? null : h(C.Badge, { size: "sm", colorPalette: "running", variant: "subtle" }, w.state),
        w.replay ? h(C.Badge, { size: "sm", colorPalette: "purple", variant: "subtle", title: "Moved again with the same offsets" }, `replay ${w.replay}`) : null,
        where.runId && w.run_id === where.runId ? h(C.Badge, { size: "sm", colorPalette: "blue", variant: "subtle" }, "this run") : null,
      ),
  },
  readsRows ? { key: "splits", label: "Splits", num: true, third: true, title: "Parts of the source's rows, each published in a transaction of its own", cell: (w) => count(w.splits) } :
  { key: "range", label: "Offsets", width: "20%", wide: true, cell: (w) => h(Fragment, null, h(Ranges, w), lostOffsets(w) ? h("div", { className: "aks-small aks-warning", "data-lost": lostOffsets(w), title: w.gaps.map(rangeText).join("\n") }, lostText(w)) : null, w.records_out_of_interval ? h("div", { className: "aks-small aks-warning" }, outOfInterval(w)) : null) },
  { key: "read", label: "Read", num: true, third: true, cell: (w) => count(w.records_read) },
  { key: "written", label: "Written", num: true, third: true, cell: (w) => count(w.records_written) },
  deletes ? { key: "deleted", label: "Deleted", num: true, third: true, title: "Rows that records without a value have deleted", cell: (w) => count(w.records_deleted) } : null,
  { key: "rejected", label: "Rejected", num: true, third: true, title: "Bad records that were tolerated", cell: (w) => (w.records_rejected ? h("span", { className: "aks-warning" }, count(w.records_rejected)) : count(w.records_rejected)) },
  { key: "filtered", label: "Filtered", num: true, third: true, title: "Records that transforms dropped", cell: (w) => count(w.records_filtered) },
  { key: "rate", label: "Rate", num: true, third: true, cell: (w) => rateOf(w.rate) },
  readsRows ? null : { key: "latency", label: "Latency p50 / p95", num: true, title: "From the timestamp of a record until the sink has committed it", cell: (w) => (w.latency ? `${seconds(w.latency.p50)} / ${seconds(w.latency.p95)}` : NONE) },
  { key: "seconds", label: "Took", num: true, third: true, cell: (w) => seconds(w.seconds) },
  { key: "attempts", label: "Tries", num: true, third: true, title: "Attempts that worked on it", cell: (w) => (w.attempts > 1 ? h("span", { className: "aks-warning" }, w.attempts) : count(w.attempts)) },
  { key: "complete", label: "Complete", cell: (w) => h("span", { className: "aks-small", style: { whiteSpace: "nowrap" } }, w.completed_at ? h(When, { at: w.completed_at }) : h(Fragment, null, "planned ", h(Ago, { at: w.planned_at }))) },
  { key: "task", label: "Task instance", cell: (w) => h("span", { className: "aks-small" }, w.url ? h(Host, { to: w.url, title: w.run_id || w.run }, w.task_state || "open") : w.run ? h("span", { className: "aks-clamp", title: w.run }, w.run) : NONE) },
].filter(Boolean);

function WindowDetails({ w, row, onAction }) {
  const dead = (w.dead_letters || []).reduce((sum, part) => sum + (part.records || 0), 0);
  return h(
    "div",
    { className: "aks-stack", style: { gap: 10 }, "data-window": windowId(w) },
    h(Facts, {
      facts: [
        ["Name", w.name],
        ["Planned", h(When, { at: w.planned_at })],
        ["Complete", w.completed_at ? h(When, { at: w.completed_at }) : "not yet"],
        w.interval ? ["Interval", intervalText(w.interval), intervalUtc(w.interval), true] : null,
        row.reads_rows ? ["Splits", count(w.splits)] : ["Deleted in the sink", count(w.records_deleted)],
        ["Dead letters", count(dead)],
        w.records_routed ? ["Routed elsewhere", w.routed.map((each) => `${count(each.records)} to ${each.to}`).join(", ") || count(w.records_routed)] : null,
        ["Guarantee", w.guarantee],
        w.latency ? ["Latency", Object.entries(w.latency).map(([name, value]) => `${name} ${seconds(value)}`).join(", "), undefined, true] : null,
        w.timings && Object.keys(w.timings).length ? ["Steps", stepsOf(w.timings).map(([step, value]) => `${step} ${seconds(value)}`).join(", "), undefined, true] : null,
        ["Run", w.run, undefined, true],
      ],
    }),
    lostOffsets(w) ? h(Note, { kind: "bad" }, `${lostText(w)}: ${w.gaps.map(rangeText).join(", ")}`) : null,
    w.records_out_of_interval ? h(Note, { kind: "bad" }, `The timestamps of ${plural(w.records_out_of_interval, "record")} lie outside of the interval, by up to ${seconds(w.out_of_interval_seconds)}: late records, or a wrong clock of their producer`) : null,
    row.reads_rows ? null : h("div", null, h("div", { className: "aks-small aks-muted" }, "Offsets"), h("div", { className: "aks-pre" }, (w.ranges || []).map((r) => `${rangeText(r)}  ${plural(r.end - r.start, "offset")}`).join("\n") || "none")),
    w.state === "COMPLETE" && row.actions.includes("replay")
      ? h("div", null, h(C.Button, { size: "xs", variant: "outline", disabled: !row.may_edit, title: row.may_edit ? undefined : LOOK_ONLY, onClick: () => onAction({ action: "replay", window: w }) }, "Replay this window"))
      : null,
  );
}

function Windows({ ledger, pipeline, data, where, wanted, row, onAction }) {
  const [older, setOlder] = useState([]);
  const [open, setOpen] = useState(null);
  const [page, setPage] = useState(0);
  const [mine, setMine] = useState(Boolean(where.runId));
  // The tab of a run shows the windows that the run planned, until the user chooses all.
  const ofRun = useLive(mine ? "windows" : null, { ledger, pipeline, run_id: where.runId, task_id: where.taskId, limit: 200 });
  const newest = mine ? ofRun.data?.windows || [] : data.windows;
  const fetchOlder = useCallback((before, limit = 50) => get("windows", { ledger, pipeline, limit, before }), [ledger, pipeline]);
  const more = useAsked(fetchOlder);
  const found = useMemo(() => {
    if (mine) return newest;
    const keys = new Set(newest.map(windowKey));
    return [...newest, ...older.filter((w) => !keys.has(windowKey(w)))];
  }, [newest, older, mine]);
  const size = 25;
  const at = wanted ? found.findIndex((w) => isWanted(w, wanted)) : -1;
  // The window of the address is fetched once if it is not among the newest ones.
  useEffect(() => {
    if (wanted && at < 0 && !mine) fetchOlder(/^\d+$/.test(wanted) ? Number(wanted) + 1 : `${wanted}~`).then((answer) => setOlder((was) => [...was, ...answer.windows]), () => {});
  }, [wanted]);
  useEffect(() => {
    if (at >= 0) {
      setPage(Math.floor(at / size));
      setOpen(windowKey(found[at]));
    }
  }, [wanted, at >= 0]);
  const total = mine ? found.length : Math.max(data.windows_total || 0, found.length);
  async function turn(offset) {
    const end = Math.min(offset + size, total);
    if (found.length < end) {
      const answer = await more.go(windowId(found[found.length - 1]));
      if (answer) setOlder((was) => [...was, ...answer.windows]);
    }
    setPage(offset / size);
  }
  if (mine && !ofRun.data && !ofRun.error) return h(Waiting, { label: "Loading windows" });
  const all = where.runId ? h("div", null, h("button", { type: "button", className: "aks-chip", "aria-pressed": mine, onClick: () => { setPage(0); setMine(!mine); } }, "Only what this run has planned")) : null;
  if (!found.length) return h("div", { className: "aks-stack" }, all, h(Empty, { title: mine ? "This run has planned no window" : "No window yet" }, mine ? "It may have completed a window that an earlier run planned." : "Run the task: it plans the first window."));
  const shown = found.slice(page * size, page * size + size);
  const file = h("a", { href: apiUrl("windows.csv", { ledger, pipeline }), download: `${pipeline.replace(/[^\w.-]+/g, "_")}-windows.csv`, className: "aks-small", "data-export": "csv", title: "All windows that the ledger remembers" }, "Download as CSV");
  return h(
    "div",
    { className: "aks-stack", style: { gap: 8 } },
    h("div", { className: "aks-between" }, all || h("span"), file),
    h(Failure, { title: "The windows could not be read", error: more.error || ofRun.error }),
    wanted && at < 0 ? h(Note, { kind: "info" }, `Window ${wanted} is not among those that the ledger remembers.`) : null,
    h(Table, {
      label: "Windows", columns: windowColumns({ where, open, onOpen: setOpen, readsRows: row.reads_rows, deletes: shown.some((w) => w.records_deleted) }), rows: shown, keyOf: windowKey,
      marked: (w) => isWanted(w, wanted) || (where.runId && w.run_id === where.runId),
      details: (w) => (open === windowKey(w) ? h(WindowDetails, { w, row, onAction }) : null),
    }),
    h(Pager, { offset: page * size, limit: size, total, onOffset: turn, what: "windows" }),
  );
}
