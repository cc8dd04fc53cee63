// Records in the dead letter topic: their number by window, and a preview with the reason. Content is shown as text only.

function Content({ label, content }) {
  const [all, setAll] = useState(false);
  if (!content) return h("div", null, h("div", { className: "aks-small aks-muted" }, label), h("div", { className: "aks-muted" }, "null"));
  const cut = 600;
  const long = content.text.length > cut;
  const about = [bytes(content.bytes), content.binary ? "binary, as hex" : null, content.cut ? "the beginning" : null].filter(Boolean).join(", ");
  return h(
    "div",
    { style: { minWidth: 0 } },
    h("div", { className: "aks-small aks-muted" }, `${label} (${about})`),
    h("pre", { className: "aks-pre" }, all || !long ? content.text : content.text.slice(0, cut), long && !all ? "…" : ""),
    long ? h("button", { type: "button", className: "aks-plain aks-small", style: { color: "var(--chakra-colors-fg-info)" }, "aria-expanded": all, onClick: () => setAll(!all) }, all ? "Show less" : content.cut ? "Show more" : "Show all of it") : null,
  );
}

function DeadLetter({ record }) {
  return h(
    "article",
    { className: "aks-panel aks-stack", style: { gap: 6 }, "data-dead-letter": record.origin || "" },
    h("div", { className: "aks-between" }, h("span", { className: "aks-strong aks-name" }, record.origin ? `Was ${record.origin}` : `${record.topic}-${record.partition}@${record.offset}`), h("span", { className: "aks-small aks-muted" }, h(When, { at: record.timestamp }))),
    h("div", { className: "aks-error aks-name" }, record.reason || "Unknown reason: the record has no headers with it"),
    h("div", { className: "aks-small aks-muted aks-name" }, [record.stage ? `stage ${record.stage}` : null, record.exception, `stored at ${record.topic}-${record.partition}@${record.offset}`].filter(Boolean).join(" · ")),
    h("div", { className: "aks-panels" }, h(Content, { label: "Key", content: record.key }), h(Content, { label: "Value", content: record.value })),
    record.headers?.length
      ? h("details", null, h("summary", { className: "aks-small", style: { cursor: "pointer" } }, plural(record.headers.length, "header")), h("pre", { className: "aks-pre" }, record.headers.map(([name, value]) => `${name}: ${value ? value.text : "null"}`).join("\n")))
      : null,
  );
}

// The last change that has sent the dead letters of a window again.
const resendOf = (changes, w) => (changes || []).find((c) => c.action === "resend" && (isInterval(w) ? c.name === w.name : !c.name && c.window === w.number));

function DeadLetters({ ledger, pipeline, summary, row, changes, onAction }) {
  const [chosen, setChosen] = useState(null);
  const question = useCallback((window) => get("dead-letters", { ledger, pipeline, window, limit: 20 }), [ledger, pipeline]);
  const asked = useAsked(question);
  if (!summary) return h(Waiting, { label: "The ledger is being read" });
  if (!summary.total) return h(Empty, { title: "No dead letters" }, "With errors_tolerance=\"all\", bad records go to the dead letter topic and are shown here.");
  const look = (window) => {
    setChosen(window);
    asked.go(windowId(window));
  };
  return h(
    "div",
    { className: "aks-stack" },
    h(Table, {
      label: "Windows with dead letters", rows: summary.windows || [], keyOf: (w) => `${w.name}/${w.number}`, marked: (w) => chosen !== null && windowKey(w) === windowKey(chosen),
      columns: [
        { key: "window", label: "Window", cell: windowText },
        { key: "records", label: "Dead letters", num: true, cell: (w) => count(w.records) },
        { key: "topic", label: "Topic", cell: (w) => h("span", { className: "aks-name" }, w.topic) },
        { key: "look", label: "Records", cell: (w) => h(C.Button, { size: "2xs", variant: "outline", loading: asked.busy && chosen !== null && windowKey(w) === windowKey(chosen), onClick: () => look(w) }, "Look at them") },
        ...(row.actions.includes("resend")
          ? [{
              key: "again", label: "Send again", wide: true,
              cell: (w) => {
                const sent = resendOf(changes, w);
                return h(
                  Fragment,
                  null,
                  h(C.Button, { size: "2xs", variant: "outline", disabled: !row.may_edit, "data-action": "resend", title: row.may_edit ? "Send them again to the topics that they came from" : LOOK_ONLY, onClick: () => onAction({ action: "resend", window: w }) }, "Send again"),
                  sent ? h("div", { className: "aks-small aks-muted aks-name" }, `sent again by ${sent.who}, `, h(Ago, { at: sent.at })) : null,
                );
              },
            }]
          : []),
      ],
    }),
    h(Failure, { title: "The dead letters could not be read", error: asked.error }),
    asked.data
      ? h(
          "div",
          { className: "aks-stack" },
          h("div", { className: "aks-muted" }, `${count(asked.data.records.length)} of ${plural(asked.data.total, "dead letter")} of window ${windowText(chosen)}`),
          asked.data.records.length ? null : h(Note, { kind: "info" }, "None of them is in the topic any more: its retention has removed them."),
          ...asked.data.records.map((record) => h(DeadLetter, { key: `${record.topic}-${record.partition}@${record.offset}`, record })),
        )
      : null,
  );
}
