"""Each page as Markdown beside its HTML, and llms.txt, which lists them: for readers that are programs."""

import json
import re
from pathlib import Path
from typing import Any

from book_measured import with_measurements
from book_verified import last_run
from front_page import with_chapters
from sphinx.application import Sphinx

PROMISE = "Learn distributed PyTorch on your laptop. Each claim is a cell that fails if the claim is false."


def markdown(source: Path) -> str:
    """A page's text; of a notebook also its cells, with what they print."""
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".md":
        text = with_chapters(text, root=source.parents[1])
        text = with_measurements(text, source)
        return re.sub(r"(?s)```\{hero\}.*?```\n\n", "", text)  # a moving picture says nothing in Markdown
    parts = []
    for cell in json.loads(text)["cells"]:
        cell_source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(with_measurements(cell_source, source))
            continue
        parts.append(f"```python\n{cell_source}\n```")
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                printed = "".join(output["text"])
                parts.append(f"```text\n{printed.rstrip()}\n```")
            elif output["output_type"] == "error":
                parts.append(f"```text\n{output['ename']}: {output['evalue'].rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def write_pages(app: Sphinx, exception: Exception | None) -> None:
    if exception or app.builder.format != "html":
        return
    lines = [f"# {app.config.html_title}", "", f"> {PROMISE}", ""]
    for page in [app.config.root_doc, *app.env.toctree_includes[app.config.root_doc]]:
        text = markdown(Path(app.env.doc2path(page)))
        Path(app.outdir, f"{page}.md").write_text(f"{text}\n{last_run(app, page)}\n", encoding="utf-8")
        lines.append(f"- [{app.env.titles[page].astext()}]({page}.md)")
    Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", write_pages)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
