"""``make chapter NAME=NN_topic``: what it makes of the template, and what it refuses."""

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
    toc = (project / "_toc.yml").read_text()
    left_to_do = new_chapter.start([f"{NEXT}_sums_and_more"], project)
    path = project / "notebooks" / f"{NEXT}_sums_and_more.ipynb"
    nb = nbformat.read(path, as_version=4)
    assert nb.cells[0].source.startswith(f"# {int(NEXT)}. Sums and more\n")

    prose = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    command = f"torchrun --nproc-per-node=gpu {path.stem}.py"
    assert command in prose
    assert command in script_from_notebook(nb, path.stem)
    assert f"scripts/{path.stem}.py>" in prose
    assert "template.py" not in prose and "template.ipynb" not in prose

    facts = facts_at(path)
    assert facts.question == ""
    assert facts.searches == {}
    assert facts.script.result == {"sum_over_expected": "== 1"}

    last = f"notebooks/{chapters()[-1].stem}\n"
    expected = toc.replace(last, f"{last}      - file: notebooks/{path.stem}\n")
    assert (project / "_toc.yml").read_text() == expected
    assert f"make outputs ARGS=notebooks/{path.name}" in left_to_do
    assert f"make check CHAPTER={NEXT}" in left_to_do


EXAMPLE = f"make chapter NAME={NEXT}_topic"
REFUSED = {  # the words behind NAME=: the two lines that refuse them
    "": f"A chapter has one name, and 0 were given.\nGive it a number and a topic: {EXAMPLE}",
    "topic": "'topic' is not the name of a chapter, which is two digits, _, and a topic in small letters.\n"
    f"For example: {EXAMPLE}",
    "04_topic": f"There is a chapter 04: {find_notebook('04').stem}.\nTake the next free number: {EXAMPLE}",
    "98_topic": f"There is no chapter {NEXT} yet, so 98 would leave a gap.\nFor example: {EXAMPLE}",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_name_that_no_chapter_can_have_changes_nothing(words, project):
    toc = (project / "_toc.yml").read_text()
    files = sorted((project / "notebooks").iterdir())
    with pytest.raises(new_chapter.Refused) as refused:
        new_chapter.start(words.split(), project)
    assert str(refused.value) == REFUSED[words]
    assert (project / "_toc.yml").read_text() == toc
    assert sorted((project / "notebooks").iterdir()) == files


@pytest.mark.parametrize("name", ["NEXT_Topic", "NEXTb_topic", "../NEXT_topic"])
def test_a_chapters_name_is_a_number_and_small_letters(name, project):
    with pytest.raises(new_chapter.Refused, match="is not the name of a chapter"):
        new_chapter.start([name.replace("NEXT", NEXT)], project)


def test_a_refusal_goes_to_standard_error(capsys):
    assert new_chapter.main(["topic"]) == 1
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors == f"{REFUSED['topic']}\n"
