// Python beside the page: helpers/planner of this book, unchanged, answers {kind, values} with {html, sizes}.
import { loadPyodide } from "./pyodide.mjs";

const ready = (async () => {
  const [python, archive] = await Promise.all([
    loadPyodide({ indexURL: new URL("./", import.meta.url).href }),
    fetch(new URL("helpers.zip", import.meta.url)).then((response) => response.arrayBuffer()),
  ]);
  python.unpackArchive(archive, "zip", { extractDir: "/book" });
  return python.runPython(`
import json, sys
sys.path.insert(0, "/book")
from helpers.planner import form

def call(kind, values):
    answer = getattr(form, kind)(json.loads(values))
    return json.dumps({"html": answer.html, "sizes": answer.sizes})
call
`);
})();

addEventListener("message", async ({ data: { kind, values } }) => {
  try {
    const call = await ready;
    postMessage(JSON.parse(call(kind, JSON.stringify(values))));
  } catch (error) {
    postMessage({ failure: String(error).trim().split("\n").at(-1) });
  }
});
