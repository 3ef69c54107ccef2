"""Every shell line that the project prints for its readers, and the pages on which it stands."""

import json
import re

from scripting import CHAPTERS, ROOT

from helpers.export.flags import read_flags
from helpers.export.notebook import read_notebook, sort_cells
from helpers.export.script import how_to_start

PROGRAMS = r"(?:LAB=all )?(?:make|python -m|pytest|jupyter|torchrun|srun|sbatch|scontrol)"
LISTING = re.compile(r"^```bash\n(.*?)^```", flags=re.M | re.S)
INLINE_COMMAND = re.compile(rf"(?<!`)`({PROGRAMS} [^`]+)`(?!`)")  # in a sentence: `make lab`
# A line that begins with torchrun, and the line on which it continues if it ends with a backslash.
TORCHRUN = re.compile(r"^torchrun .*?(?:\\\n.*)?$", flags=re.M)


def shell_lines(text):
    """The commands in a text: the lines of shell listings, without comments, and code in sentences."""
    for listing in LISTING.findall(text):
        for line in listing.replace("\\\n", " ").splitlines():
            command = re.sub(r"(^|\s+)#.*", "", line)
            if command:
                yield " ".join(command.split())
    yield from INLINE_COMMAND.findall(text)


def pages():
    """Yields (name, Markdown) of all that readers read: of the Markdown files, the notebooks and the chapters' scripts.

    Of a script, this is a listing of the commands in its docstring, which its --help prints.
    """
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "book").rglob("*.md"))]:
        is_measurement = path.parent.name == "measured" and path.name[0].isdigit()
        if not is_measurement:  # it says what was run, not what to run
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        if path.stem == "template":  # its lines are for its copies, which have their own names
            continue
        yield path.name, prose_of(path)
        if path in CHAPTERS:
            commands = "\n".join(commands_of_script(path))
            yield f"{path.stem}.py", f"```bash\n{commands}\n```"


def prose_of(notebook):
    """The text of a notebook without its code, as Markdown."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    return "\n\n".join(texts)


def commands_of_script(chapter):
    """The usual torchrun commands in the docstring of the script that is exported from a chapter's notebook."""
    parameters = sort_cells(read_notebook(chapter), chapter.stem).parameters
    flags = list(read_flags(parameters))
    lines = how_to_start(chapter.stem, flags, own_commands=[], saves_at_signal=False)
    return TORCHRUN.findall("\n".join(lines))


def printed():
    """All commands that are printed, in reading order: {command: names of the pages that print it}."""
    names = {}
    for name, text in pages():
        for command in shell_lines(text):
            names.setdefault(command, [])
            if name not in names[command]:
                names[command].append(name)
    return names
