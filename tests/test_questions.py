"""The fifty questions of book/questions.md: a link leads to each answer, and the cells that prove it stand there."""

import re

import nbformat
import pytest
from asked import QUESTIONS
from conftest import ROOT
from mdit_py_plugins.anchors.index import slugify


def test_fifty_questions():
    assert len({question.asked for question in QUESTIONS}) == len(QUESTIONS) == 50


@pytest.mark.parametrize("question", QUESTIONS, ids=[question.asked for question in QUESTIONS])
def test_the_answer_stands_where_the_link_leads_and_its_proof_below(question):
    """A proof asserts something, or nbval compares what it printed. The answer may link to its section."""
    prose, cells, anchor = {}, {}, ""
    for cell in nbformat.read(ROOT / f"{question.page}.ipynb", as_version=4).cells:
        if cell.cell_type == "markdown":
            for line in re.sub(r"(?ms)^```.*?^```", "", cell.source).splitlines():
                if line.startswith("#"):
                    anchor = slugify(line.lstrip("# ").replace("`", ""))
                    prose[anchor], cells[anchor] = "", {}
                elif anchor:
                    prose[anchor] += line
        elif anchor:
            cells[anchor][cell.id] = cell
    assert question.anchor in prose, f"{question.page} has no section {question.anchor}: it has {list(prose)}"
    assert question.cells or question.sources
    proofs = dict(cells[question.anchor])
    for linked in re.findall(r"\]\(#([\w-]+)\)", prose[question.anchor]):
        proofs |= cells[linked]
    for name in question.cells:
        assert name in proofs, f"below {question.anchor} stand the cells {list(proofs)}"
        compared = proofs[name].outputs and "nbval" not in str(proofs[name].metadata)
        assert "assert " in proofs[name].source or compared, f"{name} proves nothing"
