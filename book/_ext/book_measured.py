"""A box with the class ``measured-NAME`` shows what this book measured on GPUs, or else what others did.

    :::{admonition} On GPUs
    :class: note measured-precision
    What others measured, each figure with its source.
    :::

NAME is that of a probe, or ``script`` for the script of the page's own chapter. If a file in book/measured has it, its
table takes the place of the box's text. If none has it, the text stays, and the box begins with "Not yet measured by
this book." The box is an admonition because JupyterLab shows an admonition with its text, and a directive that it does
not know as an error.
"""

import json
import math
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from book_search import ERRORS, read_errors
from book_verified import MONTHS
from docutils import nodes
from docutils.parsers.rst.directives.admonitions import Admonition
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from helpers.verify.page import fenced, ratio_of
from helpers.verify.record import Figure, Record, read

FOLDER = "book/measured"
FACTS = ("machine", "date", "commit", "command")  # without these, a reader cannot know whose number it is
MESSAGES = "messages"
PROBES = (
    MESSAGES,
    "planned",
    "precision",
    "rates",
    "launch",
    "copies",
    "recompute",
    "checkpoint",
    "shared_gpu",
    "float8",
    "nccl_memory",
    "bus_bandwidth",
    "overlap",
)
NOT_MEASURED = "Not yet measured by this book."
NOT_SEEN = "No message was seen on a GPU by this book yet."
LONGEST = 160  # letters of the reason why something was not measured; an error of PyTorch has more
HEADS = ("what", "measured", "predicted", "measured / predicted")
BOX = re.compile(r"^(:{3,}\{admonition\}[^\n]*\n:class:([^\n]*)\n)(.*?)^(:{3,})$", flags=re.M | re.S)


@dataclass(frozen=True)
class Finding:
    """What one record has of a probe, or of a chapter's script."""

    record: Record
    title: str
    command: str
    figures: list[Figure]
    texts: dict[str, str]  # {what was done, or by which command, as Markdown: what it printed}
    trouble: str = ""  # why the rest was not measured


# --- the records ------------------------------------------------------------------------------------------------------


def read_records(folder: Path) -> list[Record]:
    """The records in a folder, the oldest first. Raises ValueError for a file that no page may show."""
    records = []
    for path in sorted(folder.glob("*.json")):
        file = f"{FOLDER}/{path.name}"
        try:
            record = read(path)
            flaw = flaw_of(record)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file} is damaged: {error}\nRestore it with git checkout {file}, or remove it and measure again."
            ) from None
        if flaw:
            raise ValueError(f"{file} {flaw}.\nRemove it, and measure on real GPUs: make gpu ARGS=--record")
        records.append(record)
    return sorted(records, key=lambda record: record.facts["date"])


def flaw_of(record: Record) -> str:
    """What keeps a record from being shown, or "". Raises ValueError for a date or a number that is none."""
    if "rehearsed" in record.facts:
        return "was rehearsed on pretended GPUs, so its numbers are not measurements"
    missing = [name for name in FACTS if not record.facts.get(name)]
    if missing:
        return f"does not say its {' and '.join(missing)}"
    date.fromisoformat(record.facts["date"])
    for probe in record.probes.values():
        for figure in probe.figures:
            if not math.isfinite(figure.value):
                raise ValueError(f"{figure.name} is {figure.value}")
    return ""


def gpus_of(record: Record) -> str:
    """How many GPUs of which model: ``8 x NVIDIA H100 80GB HBM3``."""
    return record.facts["machine"].partition(";")[0]


def findings(records: Iterable[Record], name: str) -> list[Finding]:
    """What the newest record of each kind of GPUs has of a probe or a script. The records come oldest first."""
    newest: dict[str, Finding] = {}
    for record in records:
        if name in PROBES:
            finding = finding_of_probe(record, name)
        else:
            finding = finding_of_script(record, name)
        if finding.figures or finding.texts:
            newest[gpus_of(record)] = finding
    return [newest[gpus] for gpus in sorted(newest)]


def finding_of_probe(record: Record, name: str) -> Finding:
    command = record.facts["command"]
    if name not in record.probes:
        return Finding(record, name, command, figures=[], texts={})
    probe = record.probes[name]
    figures = probe.figures
    if name == MESSAGES:  # its figures say what was printed as quoted, which the page finds in the texts itself
        figures = []
    texts = {escaped(what): text for what, text in probe.texts.items()}
    return Finding(record, probe.title, command, figures, texts, probe.trouble)


def finding_of_script(record: Record, script: str) -> Finding:
    """Seconds and memory of a script's run, if it came to a result, and what it printed where it measured speed.

    A run on one rank is left out: it says nothing about what the scripts of this book are for.
    """
    command = record.facts["command"]
    figures: list[Figure] = []
    texts: dict[str, str] = {}
    title = f"The script {script}.py"
    if record.facts.get("ranks of the scripts") == "1":
        return Finding(record, title, command, figures, texts)
    step = record.steps.get(script)
    if step is not None and step.result:
        command = step.command
        for where, seconds in zip(("GPUs", "CPUs, with gloo"), step.script_seconds, strict=False):
            figures.append(Figure(f"the run on {where}", seconds, "s"))
        for rank, peak in enumerate(step.memory):
            figures.append(Figure(f"peak memory of rank {rank}", peak / 1e6, "MB"))
    speed = record.steps.get(f"{script}, speed")
    if speed is not None and speed.printed.strip():
        texts[code(speed.command)] = speed.printed
    return Finding(record, title, command, figures, texts)


# --- Markdown, for the page and for its copy beside it ----------------------------------------------------------------


def text_of_box(root: Path, name: str, text_of_others: str) -> str:
    """What the box of a probe or a script shows, as Markdown. Raises ValueError as ``read_records`` does."""
    shown = findings(read_records(root / FOLDER), name)
    if not shown:
        if name == MESSAGES:
            return f"{NOT_SEEN} {text_of_others}"
        return f"{NOT_MEASURED} {text_of_others}"
    parts = []
    for finding in shown:
        parts.append(caption(finding))
        if finding.figures:
            parts.append(table(HEADS, [row(figure) for figure in finding.figures]))
        for label, text in finding.texts.items():
            if name == MESSAGES:
                parts.append(fenced(fenced(text), head="{dropdown} " + label))
            else:
                parts += [f"{label}:", fenced(text)]
        if finding.trouble:
            why = textwrap.shorten(finding.trouble, LONGEST, placeholder=" …")
            parts.append(f"The rest was not measured ({escaped(why)}).")
    if name == MESSAGES:
        parts.append(explanations(root, shown))
    return "\n\n".join(parts)


def caption(finding: Finding) -> str:
    """What was measured or seen, when and on what, at which commit and by which command."""
    verb = "Measured"
    if not finding.figures:
        verb = "Seen"
    facts = finding.record.facts
    day = date.fromisoformat(facts["date"])
    when = f"{day.day} {MONTHS[day.month - 1]} {day.year}"
    gpus, _, versions = facts["machine"].partition("; ")
    return (
        f"**{escaped(finding.title)}.** {verb} by this book on {when}, on {escaped(gpus)} ({escaped(versions)}), "
        f"at commit {escaped(facts['commit'])}, by {code(finding.command)}:"
    )


def row(figure: Figure) -> list[str]:
    """A figure's cells, in the order of HEADS."""
    predicted = ""
    if figure.predicted is not None:
        predicted = quantity(figure.predicted, figure.unit)
    if figure.predicted_low is not None and figure.predicted_high is not None:
        predicted += f" ({number(figure.predicted_low)} to {number(figure.predicted_high)})"
    return [escaped(figure.name), quantity(figure.value, figure.unit), predicted.strip(), ratio_of(figure)]


def table(heads: Iterable[str], rows: list[list[str]]) -> str:
    """A table as Markdown, without the columns in which every row is empty."""
    columns = list(zip(heads, *rows, strict=True))
    used = [column for column in columns if any(column[1:])]
    lines = [f"| {' | '.join(cells)} |" for cells in zip(*used, strict=True)]
    lines.insert(1, "|---" * len(used) + "|")
    return "\n".join(lines)


def explanations(root: Path, shown: list[Finding]) -> str:
    """Which messages of book/error_messages.txt were printed, with the page that explains each, as a table."""
    printed = " ".join(text for finding in shown for text in finding.texts.values())
    printed = " ".join(printed.split())
    rows = []
    for section, messages in read_errors(root / ERRORS).items():
        page = section.partition("#")[0]
        link = f"[{escaped(title_of(root, page))}](/{source_of(root, page)})"
        for message in messages:
            if message in printed:
                rows.append([code(message).replace("|", r"\|"), link])
    others = "Every other message about GPUs in this book comes from the source that is named beside it."
    if not rows:
        return f"None of these is a message that this book explains. {others}"
    return "\n\n".join(
        ["Among these are messages that this book explains:", table(("message", "explained in"), rows), others]
    )


def source_of(root: Path, page: str) -> str:
    """A page's file, from the root: ``notebooks/14b_reading_nccl.ipynb``."""
    if (root / f"{page}.ipynb").exists():
        return f"{page}.ipynb"
    return f"{page}.md"


def title_of(root: Path, page: str) -> str:
    """A page's title, its first heading."""
    source = source_of(root, page)
    text = (root / source).read_text(encoding="utf-8")
    if source.endswith(".ipynb"):
        text = "".join(json.loads(text)["cells"][0]["source"])
    return text.partition("\n")[0].removeprefix("# ")


def number(value: float) -> str:
    """At least three digits: 0.0123, 74.6, 1,234,568."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def quantity(value: float, unit: str) -> str:
    return f"{number(value)} {escaped(unit)}".strip()


def escaped(text: str) -> str:
    """Words of a record, in which no sign is Markdown's."""
    return re.sub(r"([\\`*$|\[\]<>{}])", r"\\\1", text)


def code(text: str) -> str:
    """A command or a message, as code."""
    plain = text.replace("`", "")
    return f"`{plain}`"


# --- Sphinx -----------------------------------------------------------------------------------------------------------


def names_of_classes(page: str) -> dict[str, str]:
    """{class of a box, as docutils spells it: the name of a probe, or of the page's script}."""
    names = {nodes.make_id(f"measured-{name}"): name for name in PROBES}
    names["measured-script"] = Path(page).stem
    return names


class Box(Admonition, SphinxDirective):
    """``{admonition}``, whose text a measurement replaces if one of its classes names a measurement."""

    def run(self) -> list[nodes.Node]:
        asked = [name for name in self.options.get("class", []) if name.startswith("measured-")]
        if not asked:
            return super().run()
        root = Path(self.env.srcdir)
        names = names_of_classes(self.env.docname)
        if asked[0] not in names:
            raise self.error(
                f"There is no measurement for the class {asked[0]}.\nTake one of: {', '.join(sorted(names))}"
            )
        for path in (root / FOLDER).glob("*.json"):
            self.env.note_dependency(str(path))
        text = text_of_box(root, names[asked[0]], "\n".join(self.content))
        self.content = StringList(text.splitlines(), source=self.env.docname)
        return super().run()


def with_measurements(text: str, source: Path) -> str:
    """Markdown of the page in ``source``, in which each box of a measurement has the text that the page shows."""
    root = source.parents[1]
    names = names_of_classes(source.stem)

    def shown(box: re.Match[str]) -> str:
        head, classes, own_text, end = box.groups()
        for name in classes.split():
            if nodes.make_id(name) in names:
                own_text = text_of_box(root, names[nodes.make_id(name)], own_text.strip()) + "\n"
        return f"{head}{own_text}{end}"

    return BOX.sub(shown, text)


def check_records(app: Sphinx) -> None:
    """Fail the build for a file that no page may show, even if no page asks for it."""
    try:
        read_records(Path(app.srcdir, FOLDER))
    except ValueError as error:
        raise ExtensionError(str(error)) from None


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", check_records)
    app.add_directive("admonition", Box, override=True)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
