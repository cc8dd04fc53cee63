// What may be done with a pipeline. Always in the same order: say why, see the plan, confirm.

const ACTIONS = {
  pause: { title: "Pause", says: "The pipeline moves no windows until it is resumed: tasks that begin meanwhile end as skipped. One that is at work goes on to its end.", done: "Paused" },
  resume: { title: "Resume", says: "The pipeline goes on with the next task that runs: first with the window that is open, as it was planned.", done: "Resumed" },
  replay: { title: "Replay a window", says: "Its task is cleared, so that the window is moved once more, with the same offsets. The sink replaces its rows; neither the position nor the group moves.", done: "The window is being replayed" },
  skip: { title: "Skip", says: "Gives up the window that is open; without one, all that waits in the topics. The pipeline goes on behind it: what is skipped is never moved.", done: "Skipped", danger: true },
  reset: { title: "Reset offsets", says: "The next window begins where you say. Moved back, records come again: a sink that appends has them twice. Moved forward, records are left out.", done: "Moved", danger: true },
};

const WHERE = [["earliest", "The first record that is still there"], ["latest", "The end of the topics"], ["instant", "A time"], ["offsets", "Offsets"]];

// The dialog's form as the API's body, or what is wrong with it.
function bodyOf(action, form) {
  if (!form.why.trim()) return { wrong: "Say why: it is written down beside the change." };
  const body = { why: form.why.trim() };
  if (action === "replay") {
    if (!/^\d+$/.test(form.window)) return { wrong: "Which window? Its number is in the list of windows." };
    // A data interval is found by its name, every other window by its number.
    body.window = form.name ? null : Number(form.window);
    body.name = form.name || null;
  }
  if (action === "reset") {
    if (form.to === "instant") {
      const date = instant(form.instant);
      if (!date) return { wrong: "Which time?" };
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
    action === "reset" && form.to !== "offsets" ? h(FormRow, { label: "Only these partitions", help: "Nothing: all of them." }, field("only", { placeholder: `${row.topics?.[0] || "orders"}:0,2` })) : null,
    h(FormRow, { label: "Why" }, field("why", { placeholder: "for whoever reads it later", autoComplete: "off", required: true, maxLength: 500 })),
  );
}

function Plan({ plan, done }) {
  const node = useRef(null);
  // Newer browsers give a promise back, which React would take for what undoes the effect.
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
  const [form, setForm] = useState({ why: "", to: "earliest", instant: "", offsets: `{${JSON.stringify(row.topics?.[0] || "topic")}: {"0": 0}}`, only: "", window: start ? String(start.number) : "", name: start && isLane(start) ? start.name : "" });
  const [wrong, setWrong] = useState(null);
  const [done, setDone] = useState(null);
  const send = useCallback((body) => post(`actions/${action}`, { ledger: row.ledger, pipeline: row.pipeline, ...body }), [action, row.ledger, row.pipeline]);
  const plan = useAsked(send);
  const act = useAsked(send);
  const change = (changes) => {
    // What is confirmed is what was shown: another wish needs another plan.
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
