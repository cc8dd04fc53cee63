// The dialog of an action: the user gives a reason, sees the plan, and confirms it.

const ACTIONS = {
  pause: { title: "Pause", says: "The pipeline moves no windows until it is resumed. Tasks that start meanwhile end as skipped; a running task continues to its end.", done: "Paused" },
  resume: { title: "Resume", says: "The next task that runs moves windows again, the open window first, as it was planned.", done: "Resumed" },
  replay: { title: "Replay a window", says: "The task of the window is cleared, and moves the window once more with the same offsets. The sink replaces its rows; position and group do not move.", done: "The window is being replayed" },
  skip: { title: "Skip", says: "Gives up the open window; without one, skips all records that wait in the topics. The pipeline continues behind them: skipped records are never moved.", done: "Skipped", danger: true },
  reset: { title: "Reset offsets", says: "The next window begins at the new position. If it is earlier, records are moved again: a sink that appends has them twice. If it is later, records are left out.", done: "Moved", danger: true },
};

const WHERE = [["earliest", "The first record of the topics"], ["latest", "The end of the topics"], ["instant", "A time"], ["offsets", "Offsets"]];

// The form as the body of the request, or what is wrong with it.
function bodyOf(action, form) {
  if (!form.why.trim()) return { wrong: "Say why: the ledger records the reason of the change." };
  const body = { why: form.why.trim() };
  if (action === "replay") {
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
    action === "replay" ? h(FormRow, { label: "Window" }, field("window", { inputMode: "numeric", placeholder: "its number" })) : null,
    action === "replay" && form.name ? h("div", { className: "aks-small aks-muted aks-name" }, `Of the data interval ${form.name}`) : null,
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
    C.Dialog.Root,
    { open: true, onOpenChange: (change) => change.open || busy || onClose(), size: "lg", scrollBehavior: "inside" },
    h(C.Portal, null,
      h(C.Dialog.Backdrop),
      h(C.Dialog.Positioner, null,
        h(
          C.Dialog.Content,
          { className: "aks-dialog", "data-dialog": action, fontSize: "14px" },
          h(C.Dialog.Header, { pb: 1 }, h(C.Dialog.Title, null, about.title)),
          h(
            C.Dialog.Body,
            null,
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
                    h(Failure, { title: error && error.status === 409 ? "Refused" : error && error.status === 403 ? "Not allowed" : "It was not done", error }),
                    plan.data && !act.error ? h("div", { className: "aks-panel" }, h("div", { className: "aks-small aks-muted" }, "What would be done"), h(Plan, { plan: plan.data })) : null,
                  ),
            ),
          ),
          h(
            C.Dialog.Footer,
            null,
            done
              ? h(C.Button, { size: "sm", onClick: onClose }, "Close")
              : h(
                  Fragment,
                  null,
                  h(C.Button, { size: "sm", variant: "outline", disabled: busy, onClick: onClose }, "Cancel"),
                  h(C.Button, { size: "sm", type: "submit", form: "aks-action", loading: busy, colorPalette: plan.data && about.danger ? "danger" : "brand", "data-step": plan.data ? "confirm" : "plan" }, plan.data ? `Confirm: ${about.title.toLowerCase()}` : "Show the plan"),
                ),
          ),
          h(C.Dialog.CloseTrigger, { asChild: true }, h(C.CloseButton, { size: "sm", "aria-label": "Close", disabled: busy })),
        ),
      ),
    ),
  );
}
