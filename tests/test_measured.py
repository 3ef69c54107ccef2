"""The boxes of measurements on pages: what they show of a record, what they show without one, and what is refused."""

import json
import re
import sys
from dataclasses import asdict
from io import StringIO

import nbformat
import pytest
from bs4 import BeautifulSoup
from conftest import ROOT
from nbformat.v4 import new_markdown_cell, new_notebook
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import docutils_namespace

from helpers.verify.record import Figure, Prediction, Probe, Record, Step

sys.path.append(str(ROOT / "book" / "_ext"))
import book_measured
from book_markdown import markdown

H100 = "1 x NVIDIA H100 80GB HBM3; driver 570.86, PyTorch 2.11.0+cu130, CUDA 13.0, NCCL 2.28.9, Python 3.12.3"
H200 = "1 x NVIDIA H200; driver 580.95, PyTorch 2.15.0+cu130, CUDA 13.0, NCCL 2.30.7, Python 3.13.1"
FACTS = {
    "machine": H100,
    "ranks of the scripts": "2",
    "commit": "1a2b3c4",
    "command": "`python -m helpers verify`",
    "date": "2026-11-28",
}
BY_OTHERS = "On A100s others measured 2.5 times the speed."
TABLE_BY_OTHERS = "| GPU | times the speed |\n| --- | --- |\n| A100 | 2.5 |"
PREDICTIONS = {"bus_bandwidth": [Prediction("1 GiB", "GB/s", 450.0, 370.0, 480.0)]}
BANDWIDTH = Probe("Bus bandwidth", [Figure("1 MiB", 74.57, "GB/s"), Figure("1 GiB", 482.25, "GB/s")])
MESSAGES = Probe("Messages", texts={"a rank is late": "Watchdog\n```\nafter 5 s"}, trouble="failed: no memory")
SCRIPT = Step([], "", "torchrun index.py", {"loss": 0.5}, script_seconds=[4.25, 8.5], memory=[61_000_000])


def box_of(measurement, text=BY_OTHERS):
    """A box of a page in Markdown, whose text is shown until there is a record of the measurement."""
    return f":::{{admonition}} On GPUs\n:class: note measured-{measurement}\n{text}\n:::\n"


class Project:
    """A book of one page, with folders as this book has them."""

    def __init__(self, root):
        self.root = root
        self.measured = root / "book" / "measured"
        self.measured.mkdir(parents=True)

    def record(self, name="a", steps=None, changed_facts=None, **probes):
        """Write a record as ``make gpu`` does. ``changed_facts`` replace some of FACTS."""
        facts = {**FACTS, **(changed_facts or {})}
        record = Record(facts, PREDICTIONS, probes, steps or {})
        (self.measured / f"{name}.json").write_text(json.dumps(asdict(record)))

    def build(self, *measurements):
        """Build a page with a box for each measurement. Returns the texts of the boxes, and Sphinx's warnings."""
        boxes = [box_of(measurement) for measurement in measurements]
        (self.root / "index.md").write_text("# A page\n\n" + "\n".join(boxes))
        page, warnings = self.html()
        texts = []
        for box in page.select(".admonition:not(.error)"):
            words = box.get_text(" ").split()
            texts.append(" ".join(words))
        return texts, warnings

    def html(self):
        """Build the page. Returns it, parsed, and Sphinx's warnings."""
        settings = {
            "extensions": ["myst_parser", "sphinx_design", "book_measured"],
            "myst_enable_extensions": ["colon_fence", "dollarmath"],
            "exclude_patterns": ["book", "out"],
        }
        warnings = StringIO()
        out = self.root / "out"
        with docutils_namespace():  # It forgets what a build registers before the next build.
            app = Sphinx(self.root, None, out, out / "doctrees", "html", settings, None, warnings, freshenv=True)
            app.build()
        return BeautifulSoup((out / "index.html").read_text(), "html.parser"), warnings.getvalue()


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def test_a_box_shows_what_its_record_has_and_whose_it_is(project):
    project.record(bus_bandwidth=BANDWIDTH, messages=MESSAGES, steps={"index": SCRIPT})
    [bandwidth, messages, script, other], warnings = project.build("bus_bandwidth", "messages", "script", "rates")
    assert warnings == ""
    assert bandwidth == (
        "On GPUs Bus bandwidth. Measured by this book on 28 November 2026, on 1 x NVIDIA H100 80GB HBM3 "
        "(driver 570.86, PyTorch 2.11.0+cu130, CUDA 13.0, NCCL 2.28.9, Python 3.12.3), at commit 1a2b3c4, "
        "by python -m helpers verify : what measured unit predicted measured / predicted "
        "1 GiB 482.2 GB/s 450 (370 to 480) 1.07 1 MiB 74.57 GB/s"
    )
    assert "a rank is late Watchdog ``` after 5 s" in messages
    assert "The rest was not measured: failed: no memory" in messages
    assert "the run on GPUs 4.25 s the run on CPUs, with gloo 8.5 s peak memory of rank 0 61 MB" in script
    assert other == f"On GPUs Not yet measured by this book. {BY_OTHERS}"


def test_a_table_by_others_stays_a_table(project):
    (project.root / "index.md").write_text("# A page\n\n" + box_of("rates", TABLE_BY_OTHERS))
    page, _ = project.html()
    assert page.select_one(".admonition p:not(.admonition-title)").text == "Not yet measured by this book."
    assert [cell.text for cell in page.select(".admonition td")] == ["A100", "2.5"]


def dates_shown(project, measurement):
    """The dates of the records that a page shows for a measurement."""
    records = book_measured.read_records(project.measured)
    findings = book_measured.findings(records, measurement)
    return [finding.record.facts["date"] for finding in findings]


def test_the_newest_record_of_each_kind_of_gpus_is_shown(project):
    # The older record has the later file name, so only the date can tell which one is newer.
    project.record("a", changed_facts={"date": "2026-12-01"}, bus_bandwidth=BANDWIDTH)
    project.record("b", bus_bandwidth=BANDWIDTH)
    assert dates_shown(project, "bus_bandwidth") == ["2026-12-01"]

    project.record("c", changed_facts={"machine": H200}, bus_bandwidth=BANDWIDTH)
    assert dates_shown(project, "bus_bandwidth") == ["2026-12-01", "2026-11-28"]


def test_a_newer_record_in_which_the_probe_failed_hides_nothing(project):
    failed = Probe("Bus bandwidth", trouble="failed")
    project.record("a", bus_bandwidth=BANDWIDTH)
    project.record("b", changed_facts={"date": "2026-12-01"}, bus_bandwidth=failed)
    assert dates_shown(project, "bus_bandwidth") == ["2026-11-28"]


def test_a_script_on_one_rank_is_not_shown(project):
    project.record(changed_facts={"ranks of the scripts": "1"}, steps={"index": SCRIPT})
    assert dates_shown(project, "index") == []


def test_the_copy_in_markdown_shows_what_the_page_shows(project):
    (project.root / "notebooks").mkdir()
    page = project.root / "notebooks" / "08_pipeline.ipynb"
    text = f"# A page\n\n{box_of('bus_bandwidth')}\nAfter the box."
    nbformat.write(new_notebook(cells=[new_markdown_cell(text)]), page)
    without_record = markdown(page)
    assert f"> Not yet measured by this book.\n>\n> {BY_OTHERS}\n\nAfter the box." in without_record

    project.record(bus_bandwidth=BANDWIDTH)
    with_record = markdown(page)
    assert "> | 1 MiB | 74.57 | GB/s |" in with_record
    assert BY_OTHERS not in with_record


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("<<<<<<< HEAD", "is not a record of a verification"),
        (json.dumps(asdict(Record({**FACTS, "commit": ""}))), "does not say its commit"),
        (json.dumps(asdict(Record({**FACTS, "rehearsed": "yes"}))), "was rehearsed on simulated GPUs"),
    ],
)
def test_a_file_that_no_page_may_show_fails_the_build_and_is_named(project, content, message):
    (project.measured / "a.json").write_text(content)
    with pytest.raises(ExtensionError, match=f"a.json {message}"):
        project.build("rates")


def test_a_class_that_names_no_measurement_is_an_error_of_the_build(project):
    _, warnings = project.build("bandwith")
    assert "There is no measurement for the class measured-bandwith." in warnings
    assert "measured-bus-bandwidth" in warnings  # one of the classes that it lists instead


# --- this book --------------------------------------------------------------------------------------------------------

BOXES = {  # {chapter: the measurements that its boxes show}
    "02": {"bus_bandwidth"},
    "03b": {"copies"},
    "05": {"precision", "float8"},
    "06": {"overlap", "recompute"},
    "06c": {"nccl_memory"},
    "08": {"script"},
    "10": {"checkpoint"},
    "14": {"launch"},
    "14b": {"messages"},
    "15": {"rates"},
    "15b": {"planned"},
}


SOURCE = re.compile(r"\{cite\}`|\]\(https://")  # "{cite}`key`" or "[text](https://…)"


@pytest.mark.parametrize("number", BOXES)
def test_a_chapter_that_speaks_of_gpus_has_its_boxes_and_names_the_sources_of_others(number):
    """It has the boxes of BOXES, and the text that a box shows without a record says who measured its figures."""
    [path] = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
    notebook = nbformat.read(path, as_version=4)
    prose = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    shown = set()
    for box in book_measured.BOX.finditer(prose):
        measurements = re.findall(r"measured-(\S+)", box["classes"])
        shown.update(measurements)
        has_figures = bool(measurements) and measurements != ["messages"]
        if has_figures:
            assert SOURCE.search(box["content"]), f"whose are the figures of {box['content']!r}?"
    assert shown == BOXES[number]
