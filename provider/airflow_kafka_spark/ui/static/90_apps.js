// The components that Airflow mounts: one page in the navigation, and tabs of a DAG, a run, a task and a task instance.

function Pages({ dagId, runId, taskId }) {
  const [params] = useQuery();
  const ledger = params.get("ledger");
  const pipeline = params.get("pipeline");
  const where = useMemo(() => ({ dagId, runId, taskId }), [dagId, runId, taskId]);
  const one = ledger && pipeline;
  useEffect(() => {
    if (dagId) return undefined;
    const before = document.title;
    document.title = one ? `${pipeline} - Kafka pipelines` : "Kafka pipelines";
    return () => void (document.title = before);
  }, [dagId, one, pipeline]);
  const page = (row, alone) => h(Pipeline, { key: `${row.ledger}\n${row.pipeline}`, ledger: row.ledger, pipeline: row.pipeline, where, alone });
  return h(
    "div",
    { className: "aks" },
    h("style", null, STYLE),
    h(Guard, { key: one ? `${ledger}\n${pipeline}` : "list" }, one ? page({ ledger, pipeline }, false) : h(List, { where, onOne: where.taskId ? (row) => page(row, true) : null })),
  );
}

// Airflow looks a component up by the name of its app in ui/plugin.py.
for (const name of ["Kafka pipelines", "Pipelines", "Pipelines of run", "Pipelines of task", "Kafka window"]) globalThis[name] = Pages;
globalThis.AirflowPlugin = Pages;
