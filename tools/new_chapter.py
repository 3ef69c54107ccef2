"""Start a chapter from the template: ``make chapter NAME=NN_topic``.

It copies the template to notebooks/NN_topic.ipynb, gives the copy its title and the names of its files, adds it to
_toc.yml, and says what is left to do. It changes no other file: the first page and the search read the rest from the
notebook.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat
from store_outputs import text_of

ROOT = Path(__file__).parents[1]
# The name of a chapter, such as 17_expert_parallelism.
NAME = re.compile(r"(?P<number>\d\d)_(?P<topic>[a-z0-9]+(?:_[a-z0-9]+)*)")
# The line of a chapter in _toc.yml, such as "      - file: notebooks/04b_topic".
CHAPTER_IN_TOC = re.compile(r" *- file: notebooks/\d\d[a-z]?_\w+$")
LEFT = """\
{path} is a copy of the template, and _toc.yml lists it behind the last chapter. What is left to do:
  1. Open it (make lab), and write your chapter in the place of the template's, section by section.
  2. At the end of the file, under "book", write its question for the first page, what readers type into the search
     and the heading that answers it, and what the numbers of the script's result must be.
  3. Store the outputs: make outputs ARGS={path}
  4. Check it: make check CHAPTER={number}
CONTRIBUTING.md has the rest of the list."""


@dataclass(frozen=True)
class Name:
    """The name of a chapter, NN_topic, which its notebook and its script have too."""

    number: str  # two digits
    topic: str

    def __str__(self) -> str:
        return f"{self.number}_{self.topic}"


def checked(text: str, notebooks: Path) -> Name:
    """Read the name of a new chapter, such as ``17_topic``, whose number has to be the next one in ``notebooks``.

    Raises ValueError if it is not, because a gap between the chapters' numbers would break the order of the book, or if
    ``text`` has another form.
    """
    chapters = list(notebooks.glob("[0-9][0-9]_*.ipynb"))
    next_number = f"{len(chapters):02}"  # the first chapter's number is 00
    match = NAME.fullmatch(text)
    if match is None or match["number"] != next_number:
        raise ValueError(
            f"{text!r} cannot be the next chapter's name: its number, {next_number}, and a topic in small letters.\n"
            f"For example: make chapter NAME={next_number}_topic"
        )
    return Name(next_number, match["topic"])


def copy_of_template(template: Path, name: Name) -> nbformat.NotebookNode:
    """Read the template's notebook, and make it the notebook of a chapter; return it.

    It gets the chapter's title and the names of its files, and loses the template's questions.
    """
    nb = nbformat.read(template, as_version=4)
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            # The text names template.py and template.ipynb.
            cell.source = re.sub(r"\btemplate(?=\.(py|ipynb)\b)", str(name), cell.source)
    title = name.topic.replace("_", " ").capitalize()
    nb.cells[0].source = re.sub(r"^# .*", f"# {int(name.number)}. {title}", nb.cells[0].source)
    # A test fails as long as these are empty, so that the author of the chapter does not forget them.
    nb.metadata.book.question = ""
    nb.metadata.book.searches = {}
    return nb


def start(text: str, root: Path = ROOT) -> str:
    """Make the notebook of the chapter that ``text`` names, and its line in _toc.yml; return what is left to do.

    Raises ValueError, and changes nothing, if that cannot be the next chapter's name.
    """
    name = checked(text, root / "notebooks")
    path = Path("notebooks", f"{name}.ipynb")
    nb = copy_of_template(root / "notebooks" / "template.ipynb", name)
    (root / path).write_text(text_of(nb), encoding="utf-8")
    add_to_toc(root / "_toc.yml", path.stem)
    return LEFT.format(path=path, number=name.number)


def add_to_toc(toc: Path, stem: str) -> None:
    """Add the line of a notebook to _toc.yml, behind that of the last chapter, and indented like it."""
    lines = toc.read_text(encoding="utf-8").splitlines(keepends=True)
    indexes_of_chapters = [index for index, line in enumerate(lines) if CHAPTER_IN_TOC.match(line)]
    last = indexes_of_chapters[-1]
    new_line = re.sub(r"notebooks/.*", f"notebooks/{stem}", lines[last])
    lines.insert(last + 1, new_line)
    toc.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    try:
        print(start(" ".join(sys.argv[1:])))
    except ValueError as refusal:
        sys.exit(str(refusal))
