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

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from book_chapter import root_of
from book_verified import MONTHS
from docutils import nodes
from docutils.parsers.rst.directives.admonitions import Admonition
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from helpers.verify.order import PROBES
from helpers.verify.page import fenced, figures_table
from helpers.verify.record import Figure, Prediction, Record, read

FOLDER = "book/measured"
FACTS = ("machine", "date", "commit", "command")  # without these, a reader cannot know whose number it is
# In the text of a page, a box with its classes. Its end is a fence on a line of its own.
BOX = re.compile(
    r"^(?P<head>:{3,}\{admonition\}[^\n]*\n:class:(?P<classes>[^\n]*)\n)(?P<content>.*?)^(?P<end>:{3,})$",
    flags=re.M | re.S,
)


@dataclass(frozen=True)
class Finding:
    """What one record has of a probe, or of a chapter's script."""

    record: Record
    title: str
    figures: list[Figure]
    predictions: Sequence[Prediction]
    texts: dict[str, str]  # {what was done: what was printed}
    trouble: str  # why the rest was not measured, or ""


# --- the records ------------------------------------------------------------------------------------------------------


def read_records(folder: Path) -> list[Record]:
    """The records in a folder, the oldest first. Raises ValueError for a file that no page may show."""
    records = []
    for path in folder.glob("*.json"):
        record = read(path)
        missing = [name for name in FACTS if not record.facts.get(name)]
        if missing:
            raise ValueError(f"{path} does not say its {' and '.join(missing)}, so no page can show it. Remove it.")
        if "rehearsed" in record.facts:
            raise ValueError(f"{path} was rehearsed on simulated GPUs: its numbers are no measurements. Remove it.")
        records.append(record)
    return sorted(records, key=lambda record: record.facts["date"])


def findings(records: Sequence[Record], name: str) -> list[Finding]:
    """What was measured by a probe or a script: for each kind of GPU the newest result, sorted by the GPU's name.

    ``name`` is that of a probe, which is a program that measures one thing, or of a chapter's script. ``records`` are
    of runs on GPUs, the oldest first.
    """
    newest: dict[str, Finding] = {}  # {number and name of the GPUs: what was measured there}
    for record in records:
        if name in PROBES:
            finding = finding_of_probe(record, name)
        else:
            finding = finding_of_script(record, name)
        if finding is not None:
            gpus, _, _ = record.facts["machine"].partition(";")  # of "8 x NVIDIA H100 80GB HBM3; driver …"
            newest[gpus] = finding  # in the place of an older one
    return [newest[gpus] for gpus in sorted(newest)]


def finding_of_probe(record: Record, name: str) -> Finding | None:
    """What a probe, a program that measures one thing, measured or printed; None if the record has nothing of it."""
    probe = record.probes.get(name)
    if probe is None or not (probe.figures or probe.texts):
        return None
    return Finding(
        record,
        title=probe.title,
        figures=probe.figures,
        predictions=record.predictions.get(name, []),
        texts=probe.texts,
        trouble=probe.trouble,
    )


def finding_of_script(record: Record, script: str) -> Finding | None:
    """How long a chapter's script ran, and how much memory each rank took; None if the record has nothing to show."""
    step = record.steps.get(script)
    if step is None:  # the script was not run
        return None
    if not step.result:  # it failed
        return None
    if record.facts.get("ranks of the scripts") == "1":  # the scripts are about several ranks
        return None
    # A script is run twice, so that the results on GPUs and on CPUs can be compared.
    seconds_on_gpus, seconds_on_cpus = step.script_seconds
    figures = [
        Figure("the run on GPUs", seconds_on_gpus, "s"),
        Figure("the run on CPUs, with gloo", seconds_on_cpus, "s"),
    ]
    for rank, peak_bytes in enumerate(step.memory):
        figures.append(Figure(f"peak memory of rank {rank}", peak_bytes / 1e6, "MB"))
    return Finding(record, step.command, figures, predictions=[], texts={}, trouble="")


# --- Markdown, for the page and for its copy beside it ----------------------------------------------------------------


def text_of_box(root: Path, name: str, text_without_record: str) -> str:
    """What a page shows of a measurement, as Markdown: the results on each kind of GPU.

    ``name`` is that of a probe or of a script. As long as no record has it, ``text_without_record``, the page's own
    text, is shown. ``root`` is the project's folder. Raises ValueError for a record that no page may show.
    """
    shown = findings(read_records(root / FOLDER), name)
    if not shown:
        return f"Not yet measured by this book.\n\n{text_without_record}"
    return "\n\n".join(map(text_of_finding, shown))


def text_of_finding(finding: Finding) -> str:
    """One measurement as Markdown: where it was made, its numbers as a table, and what was printed.

    ``finding.texts`` has what was printed in each situation, such as after a time-out that was provoked. The page shows
    each of these texts in a closed box of its own.
    """
    parts = [caption(finding)]
    if finding.figures:
        parts.append(figures_table(finding.figures, finding.predictions))
    for situation, text in finding.texts.items():
        parts.append(fenced(fenced(text), head="{dropdown} " + situation))
    if finding.trouble:
        parts += ["The rest was not measured:", fenced(finding.trouble)]
    return "\n\n".join(parts)


def caption(finding: Finding) -> str:
    """What was measured, when and on what, at which commit and by which command."""
    facts = finding.record.facts
    day = date.fromisoformat(facts["date"])
    when = f"{day.day} {MONTHS[day.month - 1]} {day.year}"
    gpus, _, versions = facts["machine"].partition("; ")  # "8 x NVIDIA H100 80GB HBM3; driver …"
    return (
        f"**{finding.title}.** Measured by this book on {when}, on {gpus} ({versions}), "
        f"at commit {facts['commit']}, by {facts['command']}:"
    )


# --- Sphinx -----------------------------------------------------------------------------------------------------------


def measurements_by_class(page: str) -> dict[str, str]:
    """{class of a box: what was measured}, for the boxes that ``page`` may have: all probes, and the page's script.

    A probe is a program that measures one thing on GPUs. A class is as docutils spells it, which writes small letters,
    and dashes for other characters: the probe ``shared_gpu`` has the class ``measured-shared-gpu``.
    """
    names = {nodes.make_id(f"measured-{name}"): name for name in PROBES}
    names["measured-script"] = Path(page).stem
    return names


class Box(Admonition, SphinxDirective):
    """``{admonition}``, whose text a measurement replaces if one of its classes is ``measured-NAME``."""

    def run(self) -> list[nodes.Node]:
        """The box as nodes, with the measurement's text if there is a measurement for one of its classes."""
        for name in self.options.get("class", []):
            if name.startswith("measured-"):
                text = self.text_of_measurement(name)
                # docutils' own directive then parses this text as it would parse the one that the page has.
                self.content = StringList(text.splitlines(), source=self.env.docname)
                break  # the text is that of one measurement
        return super().run()

    def text_of_measurement(self, class_name: str) -> str:
        """The text of a box with a class such as ``measured-precision``, as Markdown: what this book has measured.

        Without such a measurement, it says so, and goes on with the text that the page has in the box. Raises the
        directive's error, which names the page's file and line, if the class names none of the measurements.
        """
        measurements = measurements_by_class(self.env.docname)
        if class_name not in measurements:
            raise self.error(
                f"There is no measurement for the class {class_name}.\nTake one of: {', '.join(sorted(measurements))}"
            )
        self.note_records()
        return text_of_box(
            root=Path(self.env.srcdir),
            name=measurements[class_name],
            text_without_record="\n".join(self.content),
        )

    def note_records(self) -> None:
        """Make the records files of this page, so that the next build shows what has been measured in between.

        Sphinx reads a page again only if one of its files has changed.
        """
        for path in Path(self.env.srcdir, FOLDER).glob("*.json"):
            self.env.note_dependency(str(path))


def with_measurements(text: str, source: Path) -> str:
    """The Markdown of a page, with what was measured in the boxes that are for it, as the built page shows them.

    Such a box has a class that begins with ``measured-``, here for the measurement ``precision``::

        :::{admonition} On GPUs
        :class: note measured-precision
        What others measured. It is shown until a record has the measurement.
        :::

    ``text`` is the Markdown, and ``source`` is the page's file.
    """
    root = root_of(source)
    measurements = measurements_by_class(source.stem)

    def box_with_measurement(box: re.Match[str]) -> str:
        """The box, a match of BOX. Its first lines and its end stay as they are."""
        content = box["content"]
        for class_name in box["classes"].split():
            # make_id spells the class as the keys of `measurements` are spelled.
            measurement = measurements.get(nodes.make_id(class_name))
            if measurement is not None:
                content = text_of_box(root, measurement, text_without_record=content.strip()) + "\n"
        return f"{box['head']}{content}{box['end']}"

    return BOX.sub(box_with_measurement, text)


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
