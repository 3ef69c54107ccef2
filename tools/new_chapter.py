"""Start a chapter from the template: ``make chapter NAME=NN_topic``.

It copies the template to notebooks/NN_topic.ipynb, gives the copy its title and the names of its files, adds it to
_toc.yml, and says what is left to do. It changes no other file: the first page and the search read the rest from the
notebook.
"""

import re
import sys
from collections.abc import Sequence
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


class Refused(Exception):
    """A name that no chapter can have: what is wrong with it, and the next step."""


def checked(names: Sequence[str], notebooks: Path) -> tuple[str, str]:
    """(number, topic) of a new chapter. Raises Refused for what is not one name, or not the next chapter's."""
    taken = {path.name[:2]: path for path in notebooks.glob("[0-9][0-9]_*.ipynb")}
    following = f"{len(taken):02}"
    example = f"make chapter NAME={following}_topic"
    if len(names) != 1:
        raise Refused(f"A chapter has one name, and {len(names)} were given.\nGive it a number and a topic: {example}")
    match = NAME.fullmatch(names[0])
    if match is None:
        form = "two digits, _, and a topic in small letters"
        raise Refused(f"{names[0]!r} is not the name of a chapter, which is {form}.\nFor example: {example}")
    number, topic = match.groups()
    if number in taken:
        raise Refused(f"There is a chapter {number}: {taken[number].stem}.\nTake the next free number: {example}")
    if number != following:
        raise Refused(f"There is no chapter {following} yet, so {number} would leave a gap.\nFor example: {example}")
    return number, topic


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


def start(names: Sequence[str], root: Path = ROOT) -> str:
    """Make the notebook and its line in _toc.yml; return what is left to do. Raises Refused, and then makes nothing."""
    number, topic = checked(names, root / "notebooks")
    path = Path("notebooks", f"{number}_{topic}.ipynb")
    nb = copy_of_template(root / "notebooks" / "template.ipynb", number, topic)
    (root / path).write_text(text_of(nb), encoding="utf-8")

    toc = root / "_toc.yml"
    lines = toc.read_text(encoding="utf-8").splitlines(keepends=True)
    last = max(index for index, line in enumerate(lines) if CHAPTER_IN_TOC.match(line))
    lines.insert(last + 1, re.sub(r"notebooks/.*", f"notebooks/{path.stem}", lines[last]))
    toc.write_text("".join(lines), encoding="utf-8")
    return LEFT.format(path=path, number=number)


def main(names: Sequence[str]) -> int:
    try:
        print(start(names))
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
