/* The planner's page: reads the inputs, asks Python in a worker, shows its HTML. The inputs' state is in the address. */
document.addEventListener("DOMContentLoaded", () => {
  const form = document.querySelector("form.planner");
  if (!form) return;
  const [status, answer, best] = ["status", "answer", "best"].map((name) => document.querySelector(`.planner-${name}`));
  const inputs = [...form.elements].filter((element) => element.name);
  const first = Object.fromEntries(inputs.map((input) => [input.name, input.value]));
  let worker, loaded = false, newest = 0;

  const values = () => Object.fromEntries(inputs.map((input) => [input.name, input.value.trim()]));

  function start() {
    if (worker) return;
    const folder = new URL(`${document.documentElement.dataset.content_root}_static/planner/`, location.href);
    worker = new Worker(new URL("worker.mjs", folder), { type: "module" });
    worker.onmessage = ({ data }) => {
      if (data.number === newest) take(data); // or the inputs have changed since
    };
    worker.onerror = () => {
      status.textContent = "Python did not load. Load the page again.";
    };
  }

  function send(kind) {
    start();
    newest += 1;
    worker.postMessage({ kind, values: values(), number: newest });
  }

  /* First the plan of the inputs, then the ranking of all layouts. What is shown until then is marked as old. */
  function ask() {
    for (const box of [answer, best]) box.classList.add("planner-old");
    status.textContent = loaded ? "Planning …" : "Loading Python: 13 MB, once …";
    send("answer");
  }

  function take(reply) {
    loaded = true;
    if (reply.failure) {
      status.textContent = reply.failure;
    } else if (reply.kind === "answer") {
      show(answer, reply);
      for (const [name, size] of Object.entries(reply.sizes)) form.elements[name].placeholder = size;
      status.textContent = "Ranking all layouts …";
      send("best");
    } else {
      show(best, reply);
      status.textContent = "Planned in this page.";
    }
  }

  function show(box, { html }) {
    box.innerHTML = html;
    box.classList.remove("planner-old");
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
  /* Python takes seconds to start, so it starts before a value is changed: with a mouse, when somebody moves it on the
     page. A phone, or a reader who saves data, loads 13 MB only for the form. */
  const isFree = matchMedia("(pointer: fine)").matches && !navigator.connection?.saveData;
  if (isFree) addEventListener("pointermove", start, { once: true });
  for (const near of ["focusin", "pointerenter"]) form.addEventListener(near, start, { once: true });
  const state = new URLSearchParams(location.hash.slice(1));
  if ([...state.keys()].some((name) => name in first)) {
    fill(state);
    ask();
  }
});
