"""The page of questions: its proofs are links, and each opens the notebook's cell that proves the answer.

In the last column of its tables stand ids of cells, such as `eval-means`, which say nothing to a reader. Here each
becomes a link to that cell on the page of its chapter. If the cell is in a closed box, a browser opens the box.
"""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import nbformat
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.transforms.post_transforms import SphinxPostTransform

QUESTIONS = "book/questions"
# A row of a table: ``| A question | See [DDP](../notebooks/04_ddp.ipynb#a-section) | `eval-means` |``
ROW = re.compile(r"^\| .+\]\(\.\./(?P<page>[\w/]+)\.ipynb#[^)]+\) \| (?P<proof>.+) \|$", flags=re.M)
LINK = re.compile(r"\[.*?\]\(.*?\)")  # [a text](address)
CELL = re.compile(r"`([^`]+)`")  # a cell's id: `eval-means`


def proofs_of(text: str) -> dict[str, set[str]]:
    """The cells that prove answers on the page of questions, whose Markdown is ``text``: {notebook: ids of its cells}.

    In a row of a table, the last link of the second column leads to the notebook, such as ``notebooks/04_ddp``.
    """
    proofs: defaultdict[str, set[str]] = defaultdict(set)
    for row in ROW.finditer(text):
        without_links = LINK.sub("", row["proof"])
        cell_ids = CELL.findall(without_links)
        proofs[row["page"]].update(cell_ids)
    return proofs


def anchor_of(cell_id: str) -> str:
    """The anchor of a cell on its page. Headings have anchors too, so it begins with a word of its own."""
    return f"proof-{cell_id}"


class LinkProofs(SphinxPostTransform):
    """Gives the cells that prove answers an anchor each, and makes links of their names on the page of questions."""

    default_priority = 210  # after the transform of book_cells, which puts the end of a cell into a closed box
    formats = ("html",)

    def run(self, **kwargs: Any) -> None:
        """Change one page, ``self.document``: a tree of nodes, which Sphinx will write as HTML."""
        page = self.env.docname
        if page == QUESTIONS:
            for row in self.document.findall(nodes.row):
                link_proofs(row)
            return
        file = Path(self.env.srcdir, f"{QUESTIONS}.md")
        if file.exists():
            cell_ids = proofs_of(file.read_text(encoding="utf-8")).get(page)
            if cell_ids:
                mark_cells(self.document, Path(self.env.doc2path(page)), cell_ids)


def link_proofs(row: nodes.row) -> None:
    """Make a link of each cell's id in the last column of a row. The second column's link says on which page it is."""
    *_, answer, proof = row.children
    links = list(answer.findall(nodes.reference))
    if not links:  # the table's head
        return
    page = links[-1]["refuri"].partition("#")[0]
    cell_ids = list(proof.findall(nodes.literal))
    for number, cell_id in enumerate(cell_ids, start=1):
        if len(cell_ids) == 1:
            text = "proof"
        else:
            text = f"proof {number}"
        target = f"{page}#{anchor_of(cell_id.astext())}"
        link = nodes.reference("", text, refuri=target, internal=True, classes=["proof"])
        cell_id.parent.replace(cell_id, link)


def mark_cells(document: nodes.document, notebook: Path, cell_ids: set[str]) -> None:
    """Put an anchor before the code of each of these cells of a page. Raises ExtensionError if one is not there.

    If a cell has several listings of code, the last is meant: a cell ends with its checks, which may be in a closed
    box. The anchor is inside that box, because a browser opens a box only for what is in it.
    """
    cells = nbformat.read(notebook, as_version=4).cells
    missing = set(cell_ids)
    for node in document.findall(nodes.container):
        if node.get("nb_element") != "cell_code":
            continue
        cell_id = cells[node["cell_index"]].get("id", "")
        if cell_id not in missing:
            continue
        missing.remove(cell_id)
        listing = last_listing_of_code(node)
        anchor = nodes.target("", "", ids=[anchor_of(cell_id)])
        listing.parent.insert(listing.parent.index(listing), anchor)
    if missing:
        raise ExtensionError(f"{QUESTIONS}.md names cells that {notebook.name} does not show: {sorted(missing)}")


def last_listing_of_code(cell: nodes.Element) -> nodes.literal_block:
    """The last listing of a cell that is code, and not output. Outputs are in a container of their own."""
    ids_of_outputs = set()  # nodes cannot be compared, so they are known by their ids in Python
    for container in outputs_of(cell):
        for listing in container.findall(nodes.literal_block):
            ids_of_outputs.add(id(listing))
    listings_of_code = [listing for listing in cell.findall(nodes.literal_block) if id(listing) not in ids_of_outputs]
    return listings_of_code[-1]


def outputs_of(cell: nodes.Element) -> list[nodes.container]:
    """The containers of what a cell printed and drew."""
    return [part for part in cell.findall(nodes.container) if part.get("nb_element") == "cell_code_output"]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_post_transform(LinkProofs)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
