"""``make chapter NAME=NN_topic``: what it makes of the template, and what it refuses."""

import re
import shutil

import nbformat
import new_chapter
import pytest
from conftest import ROOT

from helpers.export.chapters import chapters, find_notebook
from helpers.export.facts import facts_at
from helpers.export.script import script_from_notebook

NEXT = f"{len(chapters()):02}"


@pytest.fixture
def project(tmp_path):
    """A copy of what the command reads and changes."""
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks", ignore=shutil.ignore_patterns(".*"))
    shutil.copy(ROOT / "_toc.yml", tmp_path)
    return tmp_path


def test_the_copy_is_in_the_toc_and_has_its_own_names(project):
    before = (project / "_toc.yml").read_text()
    left = new_chapter.start([f"{NEXT}_sums_and_more"], project)
    path = project / "notebooks" / f"{NEXT}_sums_and_more.ipynb"
    nb = nbformat.read(path, as_version=4)
    assert nb.cells[0].source.startswith(f"# {int(NEXT)}. Sums and more\n")
    prose = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    assert f"scripts/{NEXT}_sums_and_more.py>" in prose and f"torchrun --nproc-per-node=gpu {path.stem}.py" in prose
    assert "template.py" not in prose and "template.ipynb" not in prose
    assert f"torchrun --nproc-per-node=gpu {path.stem}.py" in script_from_notebook(nb, path.stem)

    facts = facts_at(path)
    assert (facts.question, facts.searches) == ("", {}) and facts.script.result == {"sum_over_expected": "== 1"}

    last = chapters()[-1].stem
    expected = before.replace(f"notebooks/{last}\n", f"notebooks/{last}\n      - file: notebooks/{path.stem}\n")
    assert (project / "_toc.yml").read_text() == expected
    assert f"make outputs ARGS=notebooks/{path.name}" in left and f"make check CHAPTER={NEXT}" in left


REFUSED = {  # the words behind NAME=: what is said of them
    "": "A chapter has one name, and 0 were given.\nGive it a number and a topic: make chapter NAME=NEXT_topic",
    "one two": "A chapter has one name, and 2 were given.\n",
    "topic": "'topic' is not the name of a chapter, which is two digits, _, and a topic in small letters.\n",
    "NEXT_Topic": "'NEXT_Topic' is not the name of a chapter",
    "NEXTb_topic": "'NEXTb_topic' is not the name of a chapter",
    "../NEXT_topic": "'../NEXT_topic' is not the name of a chapter",
    "04_topic": "There is a chapter 04: DDP.\nTake the next free number: make chapter NAME=NEXT_topic",
    "98_topic": "There is no chapter NEXT yet, so 98 would leave a gap.\nFor example: make chapter NAME=NEXT_topic",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_name_that_no_chapter_can_have_changes_nothing(words, project, monkeypatch, capsys):
    monkeypatch.setattr(new_chapter, "start", lambda names, start=new_chapter.start: start(names, project))
    toc, files = (project / "_toc.yml").read_text(), sorted((project / "notebooks").iterdir())
    status = new_chapter.main(words.replace("NEXT", NEXT).split())
    out, errors = capsys.readouterr()
    expected = REFUSED[words].replace("NEXT", NEXT).replace("DDP", find_notebook("04").stem)
    assert status == 1 and out == "" and errors.startswith(expected) and len(errors.splitlines()) == 2
    assert re.search(rf"make chapter NAME={NEXT}_topic$", errors.strip())
    assert (project / "_toc.yml").read_text() == toc and sorted((project / "notebooks").iterdir()) == files
