"""Every shell line that the project prints for its readers, and the pages on which it stands."""

import json
import re

from scripting import CHAPTERS, ROOT

from helpers.export.flags import read_flags
from helpers.export.notebook import read_notebook, sort_cells
from helpers.export.script import docstring

PROGRAMS = r"(?:LAB=all )?(?:make|python -m|pytest|jupyter|torchrun|srun|sbatch|scontrol)"
LISTING = re.compile(r"^```bash\n(.*?)^```", flags=re.M | re.S)
INLINE_COMMAND = re.compile(rf"(?<!`)`({PROGRAMS} [^`]+)`(?!`)")


def shell_lines(text):
    """The commands in a text: the lines of shell listings, without comments, and code in sentences."""
    for listing in LISTING.findall(text):
        for line in listing.replace("\\\n", " ").splitlines():
            command = re.sub(r"(^|\s+)#.*", "", line)
            if command:
                yield " ".join(command.split())
    yield from INLINE_COMMAND.findall(text)


def pages():
    """(name, text) of each page. What a script says of itself, which is also its --help, is a page too."""
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "book").rglob("*.md"))]:
        is_measurement = path.parent.name == "measured" and path.name[0].isdigit()
        if not is_measurement:  # it says what was run, not what to run
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        if path.stem == "template":  # its lines are for its copies, which have their own names
            continue
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        yield path.name, "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        if path in CHAPTERS:
            flags = read_flags(sort_cells(read_notebook(path), path.stem).parameters)
            commands = re.findall(r"(?m)^torchrun .*?(?:\\\n.*)?$", docstring("", "", path.stem, list(flags)))
            listing = "\n".join(commands)
            yield f"{path.stem}.py", f"```bash\n{listing}\n```"


def printed():
    """{command: names of its pages}, in reading order."""
    names = {}
    for name, text in pages():
        for command in shell_lines(text):
            names.setdefault(command, [])
            if name not in names[command]:
                names[command].append(name)
    return names
