// The position of a pipeline in each partition, changes by hand, and the next window.

// The bar: moved from low to position, to be moved up to the LSO, held back by open transactions up to high. The tick: committed.
function PartitionBar({ p }) {
  const [ref, width] = useWidth();
  const from = Math.min(...[p.low, p.position, p.committed].filter(known));
  const to = Math.max(...[p.high, p.lso, p.position].filter(known));
  const x = (offset) => (to > from ? ((offset - from) / (to - from)) * width : width);
  const part = (start, end, fill, key) => (known(start) && known(end) && end > start ? h("rect", { key, x: x(start), y: 3, width: Math.max(1.5, x(end) - x(start)), height: 8, fill }) : null);
  const stands = [p.position, p.committed, p.low].find(known);
  const text = [`low ${count(p.low)}`, `position ${count(p.position)}`, `committed ${count(p.committed)}`, `last stable ${count(p.lso)}`, `high ${count(p.high)}`].join("\n");
  return h(
    "div",
    { ref, style: { minWidth: 80 } },
    width > 0
      ? h(
          "svg",
          { className: "aks-partition", width, height: 14, role: "img", "aria-label": text.replace(/\n/g, ", ") },
          h("title", null, text),
          h("rect", { x: 0, y: 3, width, height: 8, fill: "var(--chakra-colors-bg-emphasized)" }),
          part(p.low, stands, solid("blue"), "moved"),
          part(Math.max(stands, p.low), p.lso, solid("orange"), "lag"),
          part(Math.max(p.lso, stands), p.high, solid("purple"), "held"),
          known(p.committed) ? h("rect", { x: Math.min(width - 2, Math.max(0, x(p.committed) - 1)), y: 0, width: 2, height: 14, fill: "var(--chakra-colors-fg)" }) : null,
        )
      : null,
  );
}

// Data intervals have no position: their group follows those that are complete without a hole.
function Partitions({ partitions, age, intervals }) {
  const [sort, setSort] = useState("partition");
  const [offset, setOffset] = useState(0);
  const size = 50;
  const sorted = useMemo(() => {
    const by = sort.replace(/^-/, "");
    const sign = sort.startsWith("-") ? -1 : 1;
    const place = (a, b) => (a.topic < b.topic ? -1 : a.topic > b.topic ? 1 : a.partition - b.partition);
    return [...partitions].sort((a, b) => sign * (by === "lag" ? (a.lag ?? -1) - (b.lag ?? -1) || -sign * -place(a, b) : place(a, b)));
  }, [partitions, sort]);
  if (!partitions.length) return h(Empty, { title: "No partition yet" }, "Partitions are shown after the first measurement.");
  const number = (key, label, title) => ({ key, label, title, num: true, third: true, cell: (p) => count(p[key]) });
  const swatch = (colour, text) => h("span", null, h("span", { className: "aks-swatch", style: { background: colour } }), text);
  return h(
    "div",
    { className: "aks-stack", style: { gap: 8 } },
    h(
      "div",
      { className: "aks-between" },
      h("div", { className: "aks-legend" }, swatch(solid("blue"), "moved"), swatch(solid("orange"), "to be moved"), swatch(solid("purple"), "held back by an open transaction"), swatch("var(--chakra-colors-fg)", "committed by the group")),
      known(age) ? h("span", { className: "aks-small aks-muted" }, `measured ${seconds(age)} ago`) : null,
    ),
    h(Table, {
      label: "Partitions", rows: sorted.slice(offset, offset + size), keyOf: (p) => `${p.topic}-${p.partition}`, sort, onSort: (next) => setSort(next),
      columns: [
        { key: "partition", label: "Partition", sort: "partition", lead: true, cell: (p) => h("span", { className: "aks-name" }, `${p.topic}-${p.partition}`) },
        { key: "bar", label: "Log", width: "32%", wide: true, cell: (p) => h(PartitionBar, { p }) },
        number("low", "Low", "The first offset of the log"),
        intervals ? null : number("position", "Position", "The next offset to move, from the ledger"),
        number("committed", "Committed", "The committed offset of the group"),
        number("lso", "Last stable", "The last stable offset, up to which committed records can be read"),
        number("high", "High", "The high watermark"),
        { ...number("lag", "Lag", "Records to be moved"), sort: "lag" },
      ].filter(Boolean),
    }),
    h(Pager, { offset, limit: size, total: partitions.length, onOffset: setOffset, what: "partitions" }),
  );
}

const offsetsText = (list) => (list || []).map(([topic, partition, offset]) => `${topic}-${partition}: ${count(offset)}`).join("\n");

function Changes({ changes }) {
  if (!changes.length) return h(Empty, { title: "Nobody has changed anything by hand" }, "Resets, skips, replays and dead letters that are sent again are written to the ledger, with who, when and why.");
  return h(Table, {
    label: "Changes by hand", rows: changes, keyOf: (change) => String(change.number),
    columns: [
      { key: "number", label: "#", cell: (c) => c.number },
      { key: "at", label: "When", cell: (c) => h(When, { at: c.at }) },
      { key: "action", label: "What", cell: (c) => (c.action === "replay" || c.action === "resend" ? `${c.action} of window ${c.name || c.window}` : c.action) },
      { key: "who", label: "Who", cell: (c) => h("span", { className: "aks-name" }, c.who) },
      { key: "why", label: "Why", cell: (c) => h("span", { className: "aks-name" }, c.why) },
      { key: "before", label: "From", cell: (c) => h("div", { className: "aks-small aks-name", style: { whiteSpace: "pre-wrap" } }, offsetsText(c.before) || NONE) },
      { key: "after", label: "To", cell: (c) => h("div", { className: "aks-small aks-name", style: { whiteSpace: "pre-wrap" } }, offsetsText(c.after) || NONE, c.discarded?.length ? `\ngiven up: window ${c.discarded.join(", ")}` : "") },
    ],
  });
}

const BEGINNINGS = { "open window": "the open window's offsets", ledger: "the position in the ledger", sink: "the end of the sink's last window", group: "the group's offsets", starting_offsets: "starting_offsets" };

function NextWindow({ ledger, pipeline }) {
  const question = useCallback(() => get("next", { ledger, pipeline }), [ledger, pipeline]);
  const asked = useAsked(question);
  useEffect(() => void asked.go(), [question]);
  const next = asked.data?.next;
  return h(
    "div",
    { className: "aks-stack", style: { gap: 8 } },
    h("div", { className: "aks-between" }, h("span", { className: "aks-muted" }, "What a run would move if it began now. Nothing is changed by looking."), h(C.Button, { size: "xs", variant: "outline", loading: asked.busy, onClick: asked.go }, "Look again")),
    h(Failure, { title: "The next window could not be worked out", error: asked.error }),
    asked.busy && !asked.data ? h(Waiting, { lines: 3, label: "Asking Kafka" }) : null,
    asked.data?.refused ? h(Note, { kind: "warn", title: "There is no next window now" }, asked.data.refused) : null,
    next
      ? h(
          Fragment,
          null,
          h(Facts, {
            facts: [
              ["Window", known(next.number) ? `#${next.number}` : null],
              ["At most", plural(next.offsets, "record"), "Offsets in its ranges: transaction markers and compacted records take some"],
              ["About", known(next.bytes) ? bytes(next.bytes) : null],
              ["Oldest record", known(next.age) ? `${seconds(next.age)} old` : null],
              ["Begins at", BEGINNINGS[next.begins] || next.begins],
              ["Held back", known(next.held_back) ? plural(next.held_back, "offset") : null, "Offsets of open transactions"],
            ],
          }),
          next.warnings?.length ? h(Note, { kind: "warn", title: "The run may differ" }, next.warnings.join(". ")) : null,
          next.gaps?.length ? h(Note, { kind: "bad" }, `Deleted before they could be read: ${next.gaps.map(rangeText).join(", ")}`) : null,
          h(Table, {
            label: "Ranges of the next window", rows: next.ranges || [], keyOf: (r) => `${r.topic}-${r.partition}`,
            columns: [
              { key: "partition", label: "Partition", lead: true, cell: (r) => `${r.topic}-${r.partition}` },
              { key: "range", label: "Offsets", cell: (r) => `[${count(r.start)}, ${count(r.end)})` },
              { key: "offsets", label: "At most", num: true, cell: (r) => count(r.offsets) },
              { key: "bytes", label: "About", num: true, cell: (r) => (known(r.bytes) ? bytes(r.bytes) : NONE) },
              { key: "oldest", label: "Oldest record", cell: (r) => (r.oldest ? h(When, { at: r.oldest }) : NONE) },
            ],
          }),
        )
      : null,
  );
}
