"""``make chapter NAME=NN_topic``: what it makes of the template, and what it refuses."""

import shutil

import nbformat
import new_chapter
import pytest
from conftest import ROOT

from helpers.export.chapters import chapters
from helpers.export.facts import facts_at
from helpers.export.script import script_from_notebook

NEXT = f"{len(chapters()):02}"  # the number of the next chapter, such as 17


@pytest.fixture
def project(tmp_path):
    """A copy of what the command reads and changes."""
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks", ignore=shutil.ignore_patterns(".*"))
    shutil.copy(ROOT / "_toc.yml", tmp_path)
    return tmp_path


def test_the_copy_is_in_the_toc_and_has_its_own_names(project):
    toc = (project / "_toc.yml").read_text()
    left_to_do = new_chapter.start(f"{NEXT}_sums_and_more", project)
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


NAMES_TO_REFUSE = ["", "topic", "04_topic", "98_topic", f"{NEXT}_Topic", f"{NEXT}b_topic", f"../{NEXT}_topic"]


@pytest.mark.parametrize("name", NAMES_TO_REFUSE)
def test_a_name_that_the_next_chapter_cannot_have_changes_nothing(name, project):
    toc_before = (project / "_toc.yml").read_text()
    notebooks_before = sorted((project / "notebooks").iterdir())
    with pytest.raises(ValueError, match=f"For example: make chapter NAME={NEXT}_topic"):
        new_chapter.start(name, project)
    assert (project / "_toc.yml").read_text() == toc_before
    assert sorted((project / "notebooks").iterdir()) == notebooks_before
