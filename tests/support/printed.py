"""Every shell line that the project prints for its readers, and the pages on which it stands."""

import json
import re

from scripting import CHAPTERS, ROOT

from helpers.export.script import docstring

PROGRAMS = r"(?:LAB=all )?(?:make|python -m|pytest|jupyter|torchrun|srun|sbatch|scontrol)"


def shell_lines(text):
    """The commands in a text: the lines of shell listings, without comments, and code in sentences."""
    for listing in re.findall(r"^```bash\n(.*?)^```", text, flags=re.M | re.S):
        for line in listing.replace("\\\n", " ").splitlines():
            if command := re.sub(r"(^|\s+)#.*", "", line):
                yield " ".join(command.split())
    yield from re.findall(rf"(?<!`)`({PROGRAMS} [^`]+)`(?!`)", text)


def pages():
    """(name, text) of each page; what a script says of itself, which is also its --help, is a page."""
    measured = set((ROOT / "book" / "measured").glob("[0-9]*.md"))  # They say what was run, not what to run.
    for path in [*sorted(ROOT.glob("*.md")), *sorted({*(ROOT / "book").rglob("*.md")} - measured)]:
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    notebooks = sorted(ROOT.glob("notebooks/*.ipynb"))
    notebooks.remove(ROOT / "notebooks" / "template.ipynb")  # its lines are for its copies, which have their own names
    for path in notebooks:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        yield path.name, "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        if path in CHAPTERS:
            [lines] = re.findall(r"(?ms)^torchrun .*(?=^\S+$)", docstring("", "", path.stem))
            yield f"{path.stem}.py", f"```bash\n{lines}```"


def printed():
    """{command: names of its pages}, in reading order."""
    commands = {}
    for name, text in pages():
        for command in shell_lines(text):
            commands.setdefault(command, []).append(name)
    return {command: list(dict.fromkeys(names)) for command, names in commands.items()}
