"""The questions of book/questions.md: a link leads to each answer, and the cells that prove it stand there."""

import functools
import re

import nbformat
import pytest
from asked import QUESTIONS
from conftest import ROOT
from mdit_py_plugins.anchors.index import slugify


class Section:
    """What stands below a heading, until the next one: prose, and {id: code cell}."""

    def __init__(self):
        self.prose = ""
        self.cells = {}


@functools.cache
def sections_of(file):
    """{anchor of a heading: its section} of a notebook, or of a page in Markdown."""
    text = (ROOT / file).read_text(encoding="utf-8")
    if file.endswith(".md"):
        cells = [nbformat.v4.new_markdown_cell(text)]
    else:
        cells = nbformat.reads(text, as_version=4).cells
    sections = {}
    section = Section()  # what stands above the first heading
    for cell in cells:
        if cell.cell_type == "code":
            section.cells[cell.id] = cell
            continue
        without_listings = re.sub(r"(?ms)^```.*?^```", "", cell.source)
        for line in without_listings.splitlines():
            if line.startswith("#"):
                section = Section()
                sections[slugify(line.lstrip("# ").replace("`", ""))] = section
            else:
                section.prose += line
    return sections


def proves_something(cell):
    """Whether a cell can fail: it has an assert, or nbval compares what it printed. A tag can keep nbval from that."""
    is_compared = cell.outputs and "nbval" not in str(cell.metadata)
    return "assert " in cell.source or is_compared


@pytest.mark.parametrize("question", QUESTIONS, ids=[question.text for question in QUESTIONS])
def test_the_answer_stands_where_the_link_leads_and_its_proof_below(question):
    """The cells that prove an answer are in its section, or in one to which the section links."""
    assert question.cells or question.sources, "the answer has no proof"
    sections = sections_of(f"{question.page}.ipynb")
    assert question.anchor in sections, f"{question.page} has only the sections {list(sections)}"
    answer = sections[question.anchor]
    cells = dict(answer.cells)
    for linked_section in re.findall(r"\]\(#([\w-]+)\)", answer.prose):  # [a text](#a-section)
        cells |= sections[linked_section].cells

    for cell_id in question.cells:
        assert cell_id in cells, f"below {question.anchor} are only the cells {list(cells)}"
        assert proves_something(cells[cell_id]), f"{cell_id} proves nothing"


def test_a_proof_opens_its_cell(visit, book_url):
    """The page of questions links to each cell that proves an answer. If the cell is in a closed box, the box opens."""
    links = visit("book/questions").locator("a.proof")
    assert links.count() == sum(len(question.cells) for question in QUESTIONS)
    addresses = links.evaluate_all("links => links.map(link => link.href)")

    pages_with_proofs = [question.page for question in QUESTIONS if question.cells]
    page = visit(pages_with_proofs[0])
    anchor = page.locator("details [id^=proof-]").first.get_attribute("id")
    address = f"{book_url}/{pages_with_proofs[0]}.html#{anchor}"
    assert address in addresses
    box = page.locator(f"details:has(#{anchor})")
    assert box.get_attribute("open") is None

    page.goto(address)
    page.wait_for_function("id => document.getElementById(id).closest('details').open", arg=anchor)
    assert "assert " in box.inner_text()
