"""A box with the class ``measured-NAME`` shows what this book measured on GPUs, or else what others did.

    :::{admonition} On GPUs
    :class: note measured-precision
    What others measured, each figure with its source.
    :::

NAME is that of a probe (helpers/verify/probes), or ``script`` for the script of the page's own chapter. A file in
book/measured is the record of one run of ``make gpu``. If a record has the probe, its table takes the place of the
box's text. If none has it, the text stays, and the box begins with "Not yet measured by this book."

The box is an admonition because JupyterLab shows an admonition with its text, and a directive that it does not know as
an error.
"""

import math
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from book_verified import MONTHS
from docutils import nodes
from docutils.parsers.rst.directives.admonitions import Admonition
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from helpers.verify.page import fenced, ratio_of
from helpers.verify.probes import catalog
from helpers.verify.record import Figure, Record, read

FOLDER = "book/measured"
FACTS = ("machine", "date", "commit", "command")  # without these, a reader cannot know whose number it is
MESSAGES = "messages"  # the probe that records what NCCL and PyTorch print; the others record numbers
PROBES = [task.name for task in (*catalog.FIRST, *catalog.LATER)]
NOT_MEASURED = "Not yet measured by this book."
NOT_SEEN = "No message was seen on a GPU by this book yet."
MAX_REASON = 160  # letters of the reason why something was not measured; an error of PyTorch has more
COLUMNS = ("what", "measured", "predicted", "measured / predicted")
BOX = re.compile(
    r"^(?P<head>:{3,}\{admonition\}[^\n]*\n:class:(?P<classes>[^\n]*)\n)(?P<content>.*?)^(?P<end>:{3,})$",
    flags=re.M | re.S,
)


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
            reason = why_not_shown(record)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file} is damaged: {error}\nRestore it with git checkout {file}, or remove it and measure again."
            ) from None
        if reason:
            raise ValueError(f"{file} {reason}.\nRemove it, and measure on real GPUs: make gpu ARGS=--record")
        records.append(record)
    return sorted(records, key=lambda record: record.facts["date"])


def why_not_shown(record: Record) -> str:
    """Why a record may not be shown, or "". Raises ValueError for what is no date or no number."""
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


def text_of_box(root: Path, name: str, text_without_record: str) -> str:
    """What the box of a probe or a script shows, as Markdown. Raises ValueError as ``read_records`` does."""
    shown = findings(read_records(root / FOLDER), name)
    if name == MESSAGES:
        if not shown:
            return f"{NOT_SEEN} {text_without_record}"
        return "\n\n".join(map(messages_text, shown))
    if not shown:
        return f"{NOT_MEASURED} {text_without_record}"
    return "\n\n".join(map(figures_text, shown))


def figures_text(finding: Finding) -> str:
    """The numbers of a finding as a table, and what was printed with them."""
    parts = [caption(finding)]
    if finding.figures:
        parts.append(table(COLUMNS, [row(figure) for figure in finding.figures]))
    for label, text in finding.texts.items():
        parts += [f"{label}:", fenced(text)]
    return "\n\n".join(parts + trouble_text(finding))


def messages_text(finding: Finding) -> str:
    """What was printed, in a closed box for each situation."""
    parts = [caption(finding)]
    for situation, text in finding.texts.items():
        parts.append(fenced(fenced(text), head="{dropdown} " + situation))
    return "\n\n".join(parts + trouble_text(finding))


def trouble_text(finding: Finding) -> list[str]:
    if not finding.trouble:
        return []
    reason = textwrap.shorten(finding.trouble, MAX_REASON, placeholder=" …")
    return [f"The rest was not measured ({escaped(reason)})."]


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
    """A figure's cells, in the order of COLUMNS."""
    predicted = ""
    if figure.predicted is not None:
        predicted = quantity(figure.predicted, figure.unit)
    if figure.predicted_low is not None and figure.predicted_high is not None:
        predicted += f" ({number(figure.predicted_low)} to {number(figure.predicted_high)})"
    return [escaped(figure.name), quantity(figure.value, figure.unit), predicted.strip(), ratio_of(figure)]


def table(names: Iterable[str], rows: list[list[str]]) -> str:
    """A table as Markdown, without the columns in which every row is empty."""
    head: list[str] = []
    used = []  # positions of columns
    for position, name in enumerate(names):
        if any(row[position] for row in rows):
            head.append(name)
            used.append(position)
    lines = [table_line(head), "|---" * len(head) + "|"]
    for row in rows:
        lines.append(table_line([row[position] for position in used]))
    return "\n".join(lines)


def table_line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def number(value: float) -> str:
    """At least three digits: 0.0123, 74.6, 1,234,568."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def quantity(value: float, unit: str) -> str:
    return f"{number(value)} {escaped(unit)}".strip()


def escaped(text: str) -> str:
    """Words of a record, which Markdown shows as they are."""
    return re.sub(r"([\\`*$|\[\]<>{}])", r"\\\1", text)


def code(text: str) -> str:
    """A command or a message, as code."""
    plain = text.replace("`", "")
    return f"`{plain}`"


# --- Sphinx -----------------------------------------------------------------------------------------------------------


def measurements_by_class(page: str) -> dict[str, str]:
    """{class of a box, as docutils spells it: the name of a probe, or of the page's script}."""
    names = {nodes.make_id(f"measured-{name}"): name for name in PROBES}
    names["measured-script"] = Path(page).stem
    return names


class Box(Admonition, SphinxDirective):
    """``{admonition}``, whose text a measurement replaces if one of its classes names a measurement."""

    def run(self) -> list[nodes.Node]:
        classes = [name for name in self.options.get("class", []) if name.startswith("measured-")]
        if not classes:
            return super().run()
        root = Path(self.env.srcdir)
        measurements = measurements_by_class(self.env.docname)
        if classes[0] not in measurements:
            raise self.error(
                f"There is no measurement for the class {classes[0]}.\nTake one of: {', '.join(sorted(measurements))}"
            )
        for path in (root / FOLDER).glob("*.json"):
            self.env.note_dependency(str(path))
        text = text_of_box(root, measurements[classes[0]], "\n".join(self.content))
        self.content = StringList(text.splitlines(), source=self.env.docname)
        return super().run()


def with_measurements(text: str, source: Path) -> str:
    """Markdown of the page in ``source``, in which each box of a measurement has the text that the page shows."""
    root = source.parents[1]
    measurements = measurements_by_class(source.stem)

    def fill_in(box: re.Match[str]) -> str:
        content = box["content"]
        for name in box["classes"].split():
            measurement = measurements.get(nodes.make_id(name))
            if measurement is not None:
                content = text_of_box(root, measurement, content.strip()) + "\n"
        return f"{box['head']}{content}{box['end']}"

    return BOX.sub(fill_in, text)


def check_records(app: Sphinx) -> None:
    """Fail the build for a record that no page may show, with its reason, before a box reads the records."""
    try:
        read_records(Path(app.srcdir, FOLDER))
    except ValueError as error:
        raise ExtensionError(str(error)) from None


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", check_records)
    app.add_directive("admonition", Box, override=True)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
