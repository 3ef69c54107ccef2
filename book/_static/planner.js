/* The planner's page: reads the inputs, asks Python in a worker, shows its HTML. The inputs' state is in the address. */
document.addEventListener("DOMContentLoaded", () => {
  const form = document.querySelector("form.planner");
  if (!form) return;
  const [status, answer, best] = ["status", "answer", "best"].map((name) => document.querySelector(`.planner-${name}`));
  const inputs = [...form.elements].filter((element) => element.name);
  const first = Object.fromEntries(inputs.map((input) => [input.name, input.value]));
  let worker, running = false, again = false, asked = false;

  const values = () => Object.fromEntries(inputs.map((input) => [input.name, input.value.trim()]));

  function start() {
    const folder = new URL(`${document.documentElement.dataset.content_root}_static/planner/`, location.href);
    worker ??= new Worker(new URL("worker.mjs", folder), { type: "module" });
  }

  function call(kind) {
    start();
    return new Promise((resolve, reject) => {
      worker.onmessage = ({ data }) => (data.failure ? reject(new Error(data.failure)) : resolve(data));
      worker.onerror = () => reject(new Error("Python did not load. Load the page again."));
      worker.postMessage({ kind, values: values() });
    });
  }

  async function ask() {
    again = true;
    if (running) return;
    running = true;
    try {
      while (again) {
        again = false;
        status.textContent = asked ? "Planning …" : "Loading Python: 13 MB, once …";
        const plan = await call("answer");
        asked = true;
        show(answer, plan);
        for (const [name, size] of Object.entries(plan.sizes)) form.elements[name].placeholder = size;
        if (again) continue;
        status.textContent = "Ranking all layouts …";
        show(best, await call("best"));
      }
      status.textContent = "Planned in this page.";
    } catch (error) {
      status.textContent = error.message;
    }
    running = false;
  }

  function show(box, { html }) {
    box.innerHTML = html;
    decorate(box);
  }

  /* Tables and the command can be copied. */
  function decorate(box) {
    for (const part of box.querySelectorAll("table, pre")) {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: "copy" });
      button.className = "planner-copy";
      button.addEventListener("click", async () => {
        await navigator.clipboard.writeText(part.matches("pre") ? part.textContent : markdown(part));
        button.textContent = "copied";
      });
      part.before(button);
    }
  }

  function markdown(table) {
    const rows = [...table.rows].map((row) => [...row.cells].filter((cell) => !cell.querySelector("button")));
    const lines = rows.map((cells) => `| ${cells.map((cell) => cell.textContent).join(" | ")} |`);
    lines.splice(1, 0, `|${" --- |".repeat(rows[1].length)}`);
    return lines.join("\n");
  }

  function changed() {
    const now = values();
    const state = new URLSearchParams(Object.entries(now).filter(([name, value]) => value !== first[name]));
    history.replaceState(null, "", `${location.pathname}${location.search}#${state}`);
    ask();
  }

  function fill(fields) {
    for (const [name, value] of fields) if (form.elements[name]) form.elements[name].value = value;
  }

  document.addEventListener("click", ({ target }) => {
    if (!target.dataset?.layout) return;
    fill(target.dataset.layout.split(",").map((field) => field.split("=")));
    changed();
  });
  [answer, best].forEach(decorate);
  form.addEventListener("submit", (event) => event.preventDefault());
  if (form.dataset.live === "0") return;
  if (location.protocol === "file:") {
    status.textContent = "A page that was opened from a folder may not load Python. Run make serve, and open its address.";
    return;
  }
  form.addEventListener("input", changed);
  for (const near of ["focusin", "pointerenter"]) form.addEventListener(near, start, { once: true });
  const state = new URLSearchParams(location.hash.slice(1));
  if ([...state.keys()].some((name) => name in first)) {
    fill(state);
    ask();
  }
});
