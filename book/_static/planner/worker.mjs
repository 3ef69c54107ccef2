// Python beside the page: helpers/planner of this book, unchanged. To {kind, values, number} it answers
// {kind, number, html, sizes}, or {number, failure}. A ranking is given up when a newer question comes.
import { loadPyodide } from "./pyodide.mjs";

const ready = (async () => {
  const [python, archive] = await Promise.all([
    loadPyodide({ indexURL: new URL("./", import.meta.url).href }),
    fetch(new URL("helpers.zip", import.meta.url)).then((response) => response.arrayBuffer()),
  ]);
  python.unpackArchive(archive, "zip", { extractDir: "/book" });
  return python.runPython(`
import asyncio, json, sys, time
sys.path.insert(0, "/book")
from helpers.planner import form

PAUSE_EVERY = 0.05  # seconds of a ranking
newest = None

async def reply(kind, values, number):
    global newest
    newest = number
    values = json.loads(values)
    if kind == "answer":
        answer = form.answer(values)
    else:
        since = time.monotonic()
        for answer in form.ranking(values):
            if time.monotonic() > since + PAUSE_EVERY:
                await asyncio.sleep(0)  # so that a newer question is taken
                since = time.monotonic()
            if newest != number:
                return None
    return json.dumps({"kind": kind, "number": number, "html": answer.html, "sizes": answer.sizes})
reply
`);
})();

addEventListener("message", async ({ data: { kind, values, number } }) => {
  try {
    const reply = await ready;
    const answer = await reply(kind, JSON.stringify(values), number);
    if (answer) postMessage(JSON.parse(answer));
  } catch (error) {
    postMessage({ number, failure: String(error).trim().split("\n").at(-1) });
  }
});
