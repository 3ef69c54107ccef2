"""Start a chapter from the template: ``make chapter NAME=NN_topic``.

It copies the template to notebooks/NN_topic.ipynb, gives the copy its title and the names of its files, adds it to
_toc.yml, and says what is left to do. It changes no other file: the first page and the search read the rest from the
notebook.
"""

import re
import sys
from pathlib import Path

import nbformat
from store_outputs import text_of

ROOT = Path(__file__).parents[1]
NAME = re.compile(r"(\d\d)_([a-z0-9]+(?:_[a-z0-9]+)*)")
CHAPTER_IN_TOC = re.compile(r" *- file: notebooks/\d\d[a-z]?_\w+$")
LEFT = """\
{path} is a copy of the template, and _toc.yml lists it behind the last chapter. What is left to do:
  1. Open it (make lab), and write your chapter in the place of the template's, section by section.
  2. At the end of the file, under "book", write its question for the first page, what readers type into the search
     and the heading that answers it, and what the numbers of the script's result must be.
  3. Store the outputs: make outputs ARGS={path}
  4. Check it: make check CHAPTER={number}
CONTRIBUTING.md has the rest of the list."""


def checked(name: str, notebooks: Path) -> tuple[str, str]:
    """(number, topic) of a new chapter. Raises ValueError, with the next step, for what is not the next chapter's name.

    A gap between the chapters' numbers would break the order of the book.
    """
    number = f"{len(list(notebooks.glob('[0-9][0-9]_*.ipynb'))):02}"
    match = NAME.fullmatch(name)
    if match is None or match[1] != number:
        raise ValueError(
            f"{name!r} cannot be the next chapter's name: its number, {number}, and a topic in small letters.\n"
            f"For example: make chapter NAME={number}_topic"
        )
    return number, match[2]


def copy_of_template(template: Path, number: str, topic: str) -> nbformat.NotebookNode:
    """The template as a chapter: with its title and the names of its files, and without the template's questions."""
    nb = nbformat.read(template, as_version=4)
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\btemplate(?=\.(py|ipynb)\b)", f"{number}_{topic}", cell.source)
    title = topic.replace("_", " ").capitalize()
    nb.cells[0].source = re.sub(r"^# .*", f"# {int(number)}. {title}", nb.cells[0].source)
    # They are the template's. Empty ones fail a test, so that they are not forgotten.
    nb.metadata.book.question = ""
    nb.metadata.book.searches = {}
    return nb


def start(name: str, root: Path = ROOT) -> str:
    """Make the notebook and its line in _toc.yml; return what is left to do. A refused name changes nothing."""
    number, topic = checked(name, root / "notebooks")
    path = Path("notebooks", f"{number}_{topic}.ipynb")
    nb = copy_of_template(root / "notebooks" / "template.ipynb", number, topic)
    (root / path).write_text(text_of(nb), encoding="utf-8")

    toc = root / "_toc.yml"
    lines = toc.read_text(encoding="utf-8").splitlines(keepends=True)
    last = max(index for index, line in enumerate(lines) if CHAPTER_IN_TOC.match(line))
    lines.insert(last + 1, re.sub(r"notebooks/.*", f"notebooks/{path.stem}", lines[last]))
    toc.write_text("".join(lines), encoding="utf-8")
    return LEFT.format(path=path, number=number)


if __name__ == "__main__":
    try:
        print(start(" ".join(sys.argv[1:])))
    except ValueError as refusal:
        sys.exit(str(refusal))
