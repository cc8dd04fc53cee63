// The records of a topic around an offset, decoded with the pipeline's own formats, and the configuration of its task.

function Part({ label, content, columns, format }) {
  if (!columns) return h(Content, { label, content });
  return h(
    "div",
    { style: { minWidth: 0 } },
    h("div", { className: "aks-small aks-muted" }, `${label} (${[format, content ? bytes(content.bytes) : null].filter(Boolean).join(", ")})`),
    h("pre", { className: "aks-pre", "data-decoded": label.toLowerCase() }, columns),
  );
}

function TopicRecord({ record, page }) {
  return h(
    "article",
    { className: "aks-panel aks-stack", style: { gap: 6 }, "data-record": record.offset },
    h("div", { className: "aks-between" }, h("span", { className: "aks-strong" }, `Offset ${count(record.offset)}`), h("span", { className: "aks-small aks-muted" }, h(When, { at: record.timestamp }))),
    record.reason ? h("div", { className: "aks-error aks-name" }, record.reason) : null,
    h("div", { className: "aks-panels" }, h(Part, { label: "Key", content: record.key, columns: record.key_columns }), h(Part, { label: "Value", content: record.value, columns: record.value_columns, format: page.value_format })),
    record.headers?.length
      ? h("details", null, h("summary", { className: "aks-small", style: { cursor: "pointer" } }, plural(record.headers.length, "header")), h("pre", { className: "aks-pre" }, record.headers.map(([name, value]) => `${name}: ${value ? value.text : "null"}`).join("\n")))
      : null,
  );
}

function Records({ ledger, pipeline, topics, partitions }) {
  const first = partitions.find((p) => topics.includes(p.topic));
  const [form, setForm] = useState({ topic: first?.topic || topics[0] || "", partition: String(first?.partition ?? 0), offset: "" });
  const question = useCallback((query) => get("records", { ledger, pipeline, limit: 20, ...query }), [ledger, pipeline]);
  const asked = useAsked(question);
  if (!topics.length) return h(Empty, { title: "No topic yet" }, "The topics of the pipeline are known once it has planned a window, or when its DAG file names them.");
  const change = (changes) => setForm((was) => ({ ...was, ...changes }));
  const look = (offset) => asked.go({ topic: form.topic, partition: form.partition || "0", offset });
  const page = asked.data;
  const standing = partitions.find((p) => p.topic === form.topic && String(p.partition) === form.partition);
  const submit = (event) => {
    event.preventDefault();
    look(/^\d+$/.test(form.offset.trim()) ? form.offset.trim() : null);
  };
  const half = page ? Math.floor((page.end - page.start) / 2) : 0;
  const step = (offset, text, off) => h(C.Button, { size: "xs", variant: "outline", disabled: off || asked.busy, onClick: () => { change({ offset: String(offset) }); look(offset); } }, text);
  return h(
    "div",
    { className: "aks-stack" },
    h(
      "form",
      { className: "aks-row", style: { alignItems: "flex-end" }, onSubmit: submit, "aria-label": "Records to show" },
      h(FormRow, { label: "Topic" }, h(C.NativeSelect.Root, { size: "sm" }, h(C.NativeSelect.Field, { name: "topic", value: form.topic, onChange: (event) => change({ topic: event.target.value, partition: "0", offset: "" }) }, ...topics.map((topic) => h("option", { key: topic, value: topic }, topic))), h(C.NativeSelect.Indicator))),
      h(FormRow, { label: "Partition" }, h(C.Input, { size: "sm", name: "partition", inputMode: "numeric", style: { width: 90 }, value: form.partition, onChange: (event) => change({ partition: event.target.value.replace(/\D/g, "") }) })),
      h(FormRow, { label: "Around offset" }, h(C.Input, { size: "sm", name: "offset", inputMode: "numeric", style: { width: 150 }, placeholder: "the last ones", value: form.offset, onChange: (event) => change({ offset: event.target.value }) })),
      h(C.Button, { size: "sm", type: "submit", colorPalette: "brand", loading: asked.busy, "data-look": "records" }, "Show records"),
      standing && known(standing.position) ? h("button", { type: "button", className: "aks-chip", onClick: () => { change({ offset: String(standing.position) }); look(standing.position); } }, `At the position, ${count(standing.position)}`) : null,
    ),
    h(Failure, { title: "The records could not be read", error: asked.error }),
    page || asked.error ? null : h("div", { className: "aks-small aks-muted" }, "Shows committed records around an offset, decoded with the pipeline's own formats. Looking changes nothing."),
    page
      ? h(
          "div",
          { className: "aks-stack", "data-records": `${page.topic}-${page.partition}` },
          h(
            "div",
            { className: "aks-between" },
            h("span", { className: "aks-muted aks-name" }, `${page.topic}-${page.partition}: offsets ${count(page.start)} to ${count(page.end)} of ${count(page.low)} to ${count(page.lso)}`),
            h("div", { className: "aks-row" }, step(Math.max(page.low, page.start - half), "Earlier", page.start <= page.low), step(page.end + half, "Later", page.end >= page.lso)),
          ),
          page.problem ? h(Note, { kind: "warn" }, page.problem) : null,
          page.records.length ? null : h(Note, { kind: "info" }, "There is no committed record at these offsets."),
          ...page.records.map((record) => h(TopicRecord, { key: record.offset, record, page })),
        )
      : null,
  );
}

// An object of options, as a sink or a format, as its constructor is written; on one line where it is short.
function argumentText(value, indent = "", nested = false) {
  const deeper = `${indent}  `;
  const listed = (open, items, close) => {
    const line = `${open}${items.join(", ")}${close}`;
    return line.length <= 80 && !line.includes("\n") ? line : `${open}\n${items.map((each) => `${deeper}${each}`).join(",\n")}\n${indent}${close}`;
  };
  const of = (each) => argumentText(each, deeper, true);
  if (Array.isArray(value)) return listed("[", value.map(of), "]");
  if (value && typeof value === "object" && "class" in value && "arguments" in value)
    return listed(`${value.class}(`, Object.entries(value.arguments).map(([name, each]) => `${name}=${of(each)}`), ")");
  if (value && typeof value === "object") return listed("{", Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${of(each)}`), "}");
  if (typeof value === "string") return nested ? JSON.stringify(value) : value;
  return value === null ? "None" : value === true ? "True" : value === false ? "False" : String(value);
}

function Configuration({ configuration, row }) {
  if (!configuration?.operator)
    return h(Empty, { title: "The configuration is not known" }, "It is shown for a task of a DAG file of this Airflow. That of a mapped task, or of one whose pipeline is named by a template, is shown once it has run with Airflow 3.3 or later.");
  const given = Object.entries(configuration.arguments || {});
  return h(
    "div",
    { className: "aks-stack", "data-configuration": configuration.operator },
    h("div", { className: "aks-panel" }, h(Facts, {
      facts: [
        ["Operator", configuration.operator, undefined, true],
        ["Guarantee", configuration.guarantee || row.guarantee],
        ...Object.entries(configuration.connections || {}).map(([name, connection]) => [`Connection (${name})`, connection]),
      ],
    })),
    h(Table, {
      label: "Arguments", rows: given, keyOf: ([name]) => name,
      columns: [
        { key: "name", label: "Argument", lead: true, width: "26%", cell: ([name]) => h("span", { className: "aks-strong aks-name" }, name) },
        { key: "value", label: "Value", lead: true, cell: ([, value]) => h("pre", { className: "aks-pre", style: { background: "none", padding: 0 } }, argumentText(value)) },
      ],
    }),
    h("div", { className: "aks-small aks-muted" }, `${configuration.of_run ? "Arguments of the last run" : "Arguments of the DAG file as Airflow has stored it"}; templates are not rendered, secrets are left out. Arguments that are not listed have their defaults.`),
  );
}
