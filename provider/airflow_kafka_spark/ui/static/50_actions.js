// The dialog of an action: the user gives a reason, sees the plan, and confirms it.

const ACTIONS = {
  pause: { title: "Pause", says: "The pipeline moves no windows until it is resumed. Tasks that start meanwhile end as skipped; a running task continues to its end.", done: "Paused" },
  resume: { title: "Resume", says: "The next task that runs moves windows again, the open window first, as it was planned.", done: "Resumed" },
  replay: { title: "Replay a window", says: "The task of the window is cleared, and moves the window once more with the same offsets. The sink replaces its rows; position and group do not move.", done: "The window is being replayed" },
  resend: { title: "Send dead letters again", says: "Sends the dead letters of the window once more to the topics that they came from, as they were read. The next window of the pipeline reads them, and so do other readers of these topics. Each is sent once, however often this is repeated.", done: "Sent again" },
  skip: { title: "Skip", says: "Gives up the open window; without one, skips all records that wait in the topics. The pipeline continues behind them: skipped records are never moved.", done: "Skipped", danger: true },
  reset: { title: "Reset offsets", says: "The next window begins at the new position. If it is earlier, records are moved again: a sink that appends has them twice. If it is later, records are left out.", done: "Moved", danger: true },
};

const WHERE = [["earliest", "The first record of the topics"], ["latest", "The end of the topics"], ["instant", "A time"], ["offsets", "Offsets"]];

// The form as the body of the request, or what is wrong with it.
function bodyOf(action, form) {
  if (!form.why.trim()) return { wrong: "Say why: the ledger records the reason of the change." };
  const body = { why: form.why.trim() };
  if (action === "replay" || action === "resend") {
    if (!/^\d+$/.test(form.window)) return { wrong: "Enter the number of a window. The list of windows has it." };
    // The API identifies a data interval by its name, other windows by number.
    body.window = form.name ? null : Number(form.window);
    body.name = form.name || null;
  }
  if (action === "reset") {
    if (form.to === "instant") {
      const date = instant(form.instant);
      if (!date) return { wrong: "Enter a time." };
      body.to = date.toISOString();
    } else if (form.to === "offsets") {
      try {
        body.to = JSON.parse(form.offsets);
      } catch {
        return { wrong: 'Offsets are JSON, as {"orders": {"0": 500}}.' };
      }
    } else body.to = form.to;
  }
  if (action === "reset" && form.to !== "offsets") {
    const only = form.only.split(/[;\s]+/).filter(Boolean);
    if (only.length) body.only = only;
  }
  return { body };
}

const FormRow = ({ label, help, children }) => h("label", { style: { display: "block" } }, h("div", { className: "aks-small", style: { fontWeight: 500, marginBottom: 3 } }, label), children, help ? h("div", { className: "aks-small aks-muted" }, help) : null);

function Choices({ action, form, change, disabled, row }) {
  const field = (name, props) => h(C.Input, { size: "sm", value: form[name], disabled, onChange: (event) => change({ [name]: event.target.value }), name, ...props });
  return h(
    Fragment,
    null,
    action === "replay" || action === "resend" ? h(FormRow, { label: "Window" }, field("window", { inputMode: "numeric", placeholder: "its number" })) : null,
    form.name ? h("div", { className: "aks-small aks-muted aks-name" }, `Of the data interval ${form.name}`) : null,
    action === "reset"
      ? h(
          FormRow,
          { label: "To" },
          h(C.NativeSelect.Root, { size: "sm", disabled }, h(C.NativeSelect.Field, { name: "to", value: form.to, onChange: (event) => change({ to: event.target.value }) }, ...WHERE.map(([value, text]) => h("option", { key: value, value }, text))), h(C.NativeSelect.Indicator)),
        )
      : null,
    action === "reset" && form.to === "instant" ? h(FormRow, { label: "Time", help: `In your browser's time${instant(form.instant) ? `: ${utcText(instant(form.instant).toISOString())}` : ""}` }, field("instant", { type: "datetime-local", step: 1 })) : null,
    action === "reset" && form.to === "offsets"
      ? h(FormRow, { label: "Offsets" }, h(C.Textarea, { size: "sm", rows: 3, name: "offsets", value: form.offsets, disabled, fontFamily: "mono", onChange: (event) => change({ offsets: event.target.value }) }))
      : null,
    action === "reset" && form.to !== "offsets" ? h(FormRow, { label: "Only these partitions", help: "Empty: all of them." }, field("only", { placeholder: `${row.topics?.[0] || "orders"}:0,2` })) : null,
    h(FormRow, { label: "Why" }, field("why", { placeholder: "reason, for the record of changes", autoComplete: "off", required: true, maxLength: 500 })),
  );
}

function Plan({ plan, done }) {
  const node = useRef(null);
  // Newer browsers return a promise, which React would take for the cleanup of the effect.
  useEffect(() => void node.current?.scrollIntoView({ block: "nearest" }), [plan]);
  return h(
    "div",
    { ref: node, className: "aks-stack", style: { gap: 6 }, "data-plan": done ? "done" : "dry", "aria-live": "polite" },
    h("div", { className: "aks-sub aks-name" }, plan.title),
    ...(plan.lines || []).map((line, i) => h("div", { key: i, className: "aks-name" }, line)),
    plan.table
      ? h(
          "div",
          { className: "aks-scroll", style: { maxHeight: 260, overflowY: "auto" } },
          h(
            "table",
            { className: "aks-table aks-small" },
            h("thead", null, h("tr", null, ...plan.table.header.map((name, i) => h("th", { key: i, scope: "col" }, name)))),
            h("tbody", null, ...plan.table.rows.map((cells, i) => h("tr", { key: i, className: i % 2 ? "" : "aks-odd" }, ...cells.map((cell, j) => h("td", { key: j, className: "aks-name" }, cell))))),
          ),
        )
      : null,
  );
}

const refusalTitle = (error) => (error && error.status === 409 ? "Refused" : error && error.status === 403 ? "Not allowed" : "It was not done");

function DialogFrame({ name, title, busy, onClose, footer, children }) {
  return h(
    C.Dialog.Root,
    { open: true, onOpenChange: (change) => change.open || busy || onClose(), size: "lg", scrollBehavior: "inside" },
    h(C.Portal, null,
      h(C.Dialog.Backdrop),
      h(C.Dialog.Positioner, null,
        h(
          C.Dialog.Content,
          { className: "aks-dialog", "data-dialog": name, fontSize: "14px" },
          h(C.Dialog.Header, { pb: 1 }, h(C.Dialog.Title, null, title)),
          h(C.Dialog.Body, null, children),
          h(C.Dialog.Footer, null, footer),
          h(C.Dialog.CloseTrigger, { asChild: true }, h(C.CloseButton, { size: "sm", "aria-label": "Close", disabled: busy })),
        ),
      ),
    ),
  );
}

function ActionDialog({ action, window: chosen, row, windows, onClose, onDone }) {
  const about = ACTIONS[action];
  const newest = (windows || []).find((w) => w.state === "COMPLETE");
  const start = chosen || (action === "replay" ? newest : null);
  const [form, setForm] = useState({ why: "", to: "earliest", instant: "", offsets: `{${JSON.stringify(row.topics?.[0] || "topic")}: {"0": 0}}`, only: "", window: start ? String(start.number) : "", name: start && isInterval(start) ? start.name : "" });
  const [wrong, setWrong] = useState(null);
  const [done, setDone] = useState(null);
  const send = useCallback((body) => post(`actions/${action}`, { ledger: row.ledger, pipeline: row.pipeline, ...body }), [action, row.ledger, row.pipeline]);
  const plan = useAsked(send);
  const act = useAsked(send);
  const change = (changes) => {
    // The plan that is confirmed is the plan that was shown: a change of the form needs a new plan.
    setForm((was) => ({ ...was, ...changes, ...(changes.window !== undefined ? { name: "" } : {}) }));
    setWrong(null);
    plan.clear();
    act.clear();
  };
  const submit = async (event) => {
    event.preventDefault();
    const { body, wrong: said } = bodyOf(action, form);
    setWrong(said || null);
    if (said) return;
    if (!plan.data) {
      plan.go({ ...body, dry_run: true });
      return;
    }
    const result = await act.go({ ...body, dry_run: false });
    if (result) {
      setDone(result);
      onDone();
    }
  };
  const busy = plan.busy || act.busy;
  const error = act.error || plan.error;
  return h(
    DialogFrame,
    {
      name: action, title: about.title, busy, onClose,
      footer: done
        ? h(C.Button, { size: "sm", onClick: onClose }, "Close")
        : h(
            Fragment,
            null,
            h(C.Button, { size: "sm", variant: "outline", disabled: busy, onClick: onClose }, "Cancel"),
            h(C.Button, { size: "sm", type: "submit", form: "aks-action", loading: busy, colorPalette: plan.data && about.danger ? "danger" : "brand", "data-step": plan.data ? "confirm" : "plan" }, plan.data ? `Confirm: ${about.title.toLowerCase()}` : "Show the plan"),
          ),
    },
    h(
      "form",
      { id: "aks-action", onSubmit: submit, className: "aks-stack", noValidate: true },
      h("div", { className: "aks-strong aks-name" }, row.pipeline),
      done
        ? h(Note, { kind: "good", title: about.done }, h(Plan, { plan: done, done: true }))
        : h(
            Fragment,
            null,
            h("div", { className: "aks-muted" }, about.says),
            h(Choices, { action, form, change, disabled: busy, row }),
            wrong ? h(Note, { kind: "warn" }, wrong) : null,
            h(Failure, { title: refusalTitle(error), error }),
            plan.data && !act.error ? h("div", { className: "aks-panel" }, h("div", { className: "aks-small aks-muted" }, "What would be done"), h(Plan, { plan: plan.data })) : null,
          ),
    ),
  );
}

// --- several pipelines at once ---

const BULK = {
  pause: { title: "Pause pipelines", done: "Paused" },
  resume: { title: "Resume pipelines", done: "Resumed" },
};

// Each pipeline is changed by a request of its own, in order: one that is refused does not keep the others from being changed.
function BulkDialog({ action, rows, onClose, onDone }) {
  const [why, setWhy] = useState("");
  const [wrong, setWrong] = useState(null);
  const [found, setFound] = useState(null);
  const [busy, setBusy] = useState(false);
  const send = async (dry) => {
    setBusy(true);
    const answers = [];
    for (const row of rows) {
      const refused = found?.get(rowKey(row))?.error;
      if (!dry && refused) answers.push([rowKey(row), { error: refused }]);
      else answers.push([rowKey(row), await post(`actions/${action}`, { ledger: row.ledger, pipeline: row.pipeline, why: why.trim(), dry_run: dry }).then((data) => ({ data }), (error) => ({ error }))]);
      setFound(new Map(answers));
    }
    setBusy(false);
    return answers;
  };
  const [done, setDone] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    if (!why.trim()) return setWrong("Say why: the ledger records the reason of the change.");
    setWrong(null);
    if (!found) return void (await send(true));
    await send(false);
    setDone(true);
  };
  const close = () => {
    onClose();
    if (done) onDone();
  };
  const able = found ? [...found.values()].filter((each) => each.data).length : rows.length;
  const result = (each) =>
    !each ? NONE : each.error ? h("span", { className: "aks-error" }, each.error.message) : h(Fragment, null, each.data.title, ...(each.data.lines || []).map((line, i) => h("div", { key: i, className: "aks-small aks-muted" }, line)));
  return h(
    DialogFrame,
    {
      name: `bulk-${action}`, title: BULK[action].title, busy, onClose: close,
      footer: done
        ? h(C.Button, { size: "sm", onClick: close }, "Close")
        : h(
            Fragment,
            null,
            h(C.Button, { size: "sm", variant: "outline", disabled: busy, onClick: close }, "Cancel"),
            h(C.Button, { size: "sm", type: "submit", form: "aks-bulk", loading: busy, disabled: found && !able, colorPalette: "brand", "data-step": found ? "confirm" : "plan" }, found ? `Confirm: ${action} ${plural(able, "pipeline")}` : "Show the plan"),
          ),
    },
    h(
      "form",
      { id: "aks-bulk", onSubmit: submit, className: "aks-stack", noValidate: true },
      h("div", { className: "aks-muted" }, ACTIONS[action].says),
      done ? h(Note, { kind: "good", title: `${BULK[action].done}: ${plural(able, "pipeline")}` }) : h(FormRow, { label: "Why" }, h(C.Input, { size: "sm", name: "why", value: why, disabled: busy, placeholder: "reason, for the record of changes", autoComplete: "off", required: true, maxLength: 500, onChange: (event) => { setWhy(event.target.value); setFound(null); } })),
      wrong ? h(Note, { kind: "warn" }, wrong) : null,
      h(
        "div",
        { "data-plan": found ? (done ? "done" : "dry") : "none", "aria-live": "polite" },
        h(Table, {
          label: "Selected pipelines", rows, keyOf: rowKey,
          columns: [
            { key: "pipeline", label: "Pipeline", lead: true, width: "35%", cell: (row) => h("span", { className: "aks-name" }, row.pipeline) },
            { key: "plan", label: done ? "What was done" : "What would be done", wide: true, cell: (row) => result(found?.get(rowKey(row))) },
          ],
        }),
      ),
    ),
  );
}
