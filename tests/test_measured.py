"""The boxes of measurements: what a record shows on a page and whose it is, what stays without one, what is refused."""

import json
import re
import sys
from io import StringIO
from types import SimpleNamespace

import nbformat
import pytest
from bs4 import BeautifulSoup
from conftest import ROOT
from nbformat.v4 import new_markdown_cell, new_notebook
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import docutils_namespace

from helpers.verify.record import Figure, Probe, Record, Step, write

sys.path.append(str(ROOT / "book" / "_ext"))
import book_measured
from book_markdown import markdown

H100 = "1 x NVIDIA H100 80GB HBM3; driver 570.86, PyTorch 2.11.0+cu130, CUDA 13.0, NCCL 2.28.9, Python 3.12.3"
H200 = "1 x NVIDIA H200; driver 580.95, PyTorch 2.15.0+cu130, CUDA 13.0, NCCL 2.30.7, Python 3.13.1"
FACTS = {
    "machine": H100,
    "ranks of the scripts": "1",
    "commit": "1a2b3c4",
    "command": "`python -m helpers verify --record`",
    "date": "2026-11-28",
}
BY_OTHERS = "On A100s others measured 2.5 times the speed."
BANDWIDTH = Probe(
    "Bus bandwidth of an all-reduce",
    seconds=9.0,
    figures=[
        Figure("1 MiB", 74.57, "GB/s"),
        Figure("16 GiB | all", 482.25, "GB/s", predicted=450.0, predicted_low=370.0, predicted_high=480.0),
    ],
)


def box_of(measurement):
    return f":::{{admonition}} On GPUs\n:class: note measured-{measurement}\n{BY_OTHERS}\n:::\n"


def one_figure(value):
    return Probe("Bus bandwidth", seconds=1.0, figures=[Figure("1 MiB", value, "GB/s")])


class Project:
    """A book of one page, with folders as this book has them."""

    def __init__(self, root):
        self.root = root
        self.measured = root / "book" / "measured"
        self.measured.mkdir(parents=True)

    def record(self, name="a", facts=None, steps=None, **probes):
        """Write a record as ``make gpu ARGS=--record`` does; ``facts`` replace some of FACTS."""
        record = Record(facts=FACTS | (facts or {}), steps=steps or {}, probes=probes)
        write(record, self.measured / f"{name}.json")

    def build(self, text):
        """The first box of the page with this text, and what Sphinx warned of."""
        (self.root / "index.md").write_text(f"# A page\n\n{text}")
        settings = {
            "extensions": ["myst_parser", "sphinx_design", "book_measured"],
            "myst_enable_extensions": ["colon_fence", "dollarmath"],
            "exclude_patterns": ["book", "out"],
        }
        warnings = StringIO()
        out = self.root / "out"
        with docutils_namespace():  # what one build registers is gone before the next
            app = Sphinx(self.root, None, out, out / "doctrees", "html", settings, status=None, warning=warnings,
                         freshenv=True)  # fmt: skip
            app.build()
        page = BeautifulSoup((out / "index.html").read_text(), "html.parser")
        return SimpleNamespace(box=page.select_one(".admonition"), warnings=warnings.getvalue())

    def text_of_box(self, measurement):
        built = self.build(box_of(measurement))
        assert built.warnings == ""
        return text_of(built.box)


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def text_of(element):
    return " ".join(element.get_text().split())


def rows_of(table):
    return [[text_of(cell) for cell in row.select("th, td")] for row in table.select("tr")]


# --- with a record ----------------------------------------------------------------------------------------------------


def test_the_table_and_whose_it_is_come_from_the_record(project):
    project.record(bus_bandwidth=BANDWIDTH)
    built = project.build(box_of("bus_bandwidth"))
    assert built.warnings == ""
    assert rows_of(built.box.table) == [
        ["what", "measured", "predicted", "measured / predicted"],
        ["1 MiB", "74.6 GB/s", "", ""],
        ["16 GiB | all", "482 GB/s", "450 GB/s (370 to 480)", "1.07"],
    ]
    assert text_of(built.box.select("p")[1]) == (
        "Bus bandwidth of an all-reduce. Measured by this book on 28 November 2026, on 1 x NVIDIA H100 80GB HBM3 "
        "(driver 570.86, PyTorch 2.11.0+cu130, CUDA 13.0, NCCL 2.28.9, Python 3.12.3), at commit 1a2b3c4, "
        "by python -m helpers verify --record:"
    )
    assert BY_OTHERS not in text_of(built.box)


def test_the_newest_of_one_kind_of_gpus_wins(project):
    # The name of the newest file comes first, so that the date has to decide.
    project.record("a", {"date": "2026-12-01"}, bus_bandwidth=one_figure(22.0))
    project.record("b", {"date": "2026-11-28"}, bus_bandwidth=one_figure(11.0))
    text = project.text_of_box("bus_bandwidth")
    assert "22 GB/s" in text and "1 December 2026" in text
    assert "11 GB/s" not in text


def test_a_newer_record_in_which_the_probe_failed_hides_nothing(project):
    project.record("a", bus_bandwidth=BANDWIDTH)
    failed = Probe("Bus bandwidth", 1.0, trouble="failed: out of memory")
    project.record("b", {"date": "2026-12-01"}, bus_bandwidth=failed)
    assert "482 GB/s" in project.text_of_box("bus_bandwidth")


def test_what_stopped_a_probe_halfway_is_said_in_short(project):
    figures = [Figure("1 MiB", 11.0, "GB/s")]
    project.record(bus_bandwidth=Probe("Bus bandwidth", 1.0, figures, trouble="failed: " + "a b " * 999))
    text = project.text_of_box("bus_bandwidth")
    assert "The rest was not measured (failed: a b a b" in text
    assert len(text) < 700


def test_two_kinds_of_gpus_give_two_tables(project):
    project.record("a", bus_bandwidth=BANDWIDTH)
    project.record("b", {"machine": H200}, bus_bandwidth=one_figure(99.0))
    box = project.build(box_of("bus_bandwidth")).box
    assert ["482 GB/s" in text_of(table) for table in box.select("table")] == [True, False]
    captions = [text_of(paragraph) for paragraph in box.select("p") if "Measured by" in paragraph.get_text()]
    assert "on 1 x NVIDIA H100 80GB HBM3 (driver 570.86" in captions[0]
    assert "on 1 x NVIDIA H200 (driver 580.95" in captions[1]


def steps_of_script(result):
    """Two runs of the script of the page ``index``: one beside gloo, and one that measures speed."""
    run = Step(
        seconds=30.0,
        differences=[],
        summary="",
        command="torchrun index.py",
        result=result,
        script_seconds=[4.25, 8.5],
        memory=[61_000_000],
    )
    speed = Step(
        seconds=9.0,
        differences=[],
        summary="measured",
        command="torchrun index.py --large",
        printed="bytes   GB/s\n1024    1.5\n",
    )
    return {"index": run, "index, speed": speed}


def test_a_script_shows_its_seconds_its_memory_and_the_speed_it_printed(project):
    project.record(facts={"ranks of the scripts": "2"}, steps=steps_of_script(result={"loss": 0.5}))
    box = project.build(box_of("script")).box
    assert rows_of(box.table)[1:] == [
        ["the run on GPUs", "4.25 s"],
        ["the run on CPUs, with gloo", "8.5 s"],
        ["peak memory of rank 0", "61 MB"],
    ]
    assert box.pre.get_text() == "bytes   GB/s\n1024    1.5\n"
    assert "by torchrun index.py:" in text_of(box)
    assert "torchrun index.py --large:" in text_of(box)


def test_a_script_shows_nothing_of_a_run_on_one_rank_and_no_seconds_without_a_result(project):
    project.record(facts={"ranks of the scripts": "1"}, steps=steps_of_script(result={"loss": 0.5}))
    assert "Not yet measured" in project.text_of_box("script")
    project.record(facts={"ranks of the scripts": "2"}, steps=steps_of_script(result={}))
    text = project.text_of_box("script")
    assert "1024 1.5" in text
    assert "4.25 s" not in text


def test_messages_are_shown_as_they_were_printed(project):
    texts = {
        "a rank is late": "[rank1] Watchdog caught collective\noperation timeout\n```\nafter 5 s",
        "a fork": "Boom",
    }
    project.record(messages=Probe("Messages", 5.0, texts=texts))
    box = project.build(box_of("messages")).box
    assert "Messages. Seen by this book on 28 November 2026, on 1 x NVIDIA H100" in text_of(box)
    assert [pre.get_text().strip() for pre in box.select("pre")] == list(texts.values())
    assert [text_of(fold.summary) for fold in box.select("details")] == list(texts)


def test_a_number_has_three_digits_or_more():
    assert book_measured.row(Figure("a step", 1234.5, "ms", 1000.0)) == ["a step", "1,234 ms", "1,000 ms", "1.23"]
    assert book_measured.row(Figure("a launch", 0.004567, "ms")) == ["a launch", "0.00457 ms", "", ""]
    assert [book_measured.number(value) for value in (99.96, 612.4, 0)] == ["100", "612", "0"]


# --- without a record -------------------------------------------------------------------------------------------------


def test_without_a_record_the_figures_of_others_stay(project):
    project.record(launch=BANDWIDTH)  # of another probe
    assert project.text_of_box("bus_bandwidth") == f"On GPUs Not yet measured by this book. {BY_OTHERS}"
    assert project.text_of_box("messages") == f"On GPUs No message was seen on a GPU by this book yet. {BY_OTHERS}"


def test_a_box_without_such_a_class_is_left_alone(project):
    project.record(bus_bandwidth=BANDWIDTH)
    built = project.build(":::{admonition} gloo and NCCL\n:class: note\nBoth hang.\n:::\n")
    assert text_of(built.box) == "gloo and NCCL Both hang."


def test_the_copy_in_markdown_shows_what_the_page_shows(project):
    (project.root / "notebooks").mkdir()
    page = project.root / "notebooks" / "08_pipeline.ipynb"
    text = f"# A page\n\n{box_of('bus_bandwidth')}\nAfter the box."
    nbformat.write(new_notebook(cells=[new_markdown_cell(text)]), page)
    assert f"measured-bus_bandwidth\nNot yet measured by this book. {BY_OTHERS}\n:::\n\nAfter the box." in markdown(
        page
    )
    project.record(bus_bandwidth=BANDWIDTH)
    assert "| 1 MiB | 74.6 GB/s |  |  |\n" in markdown(page)
    assert BY_OTHERS not in markdown(page)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    ["<<<<<<< HEAD", '{"facts": {}, "steps": {}, "probes": {"rates": {"title": "Rates"}}}'],
)
def test_a_damaged_file_fails_the_build_and_is_named(project, content):
    (project.measured / "a.json").write_text(content)
    with pytest.raises(ExtensionError) as refused:
        project.build("No box is on this page.")
    first_line, second_line = str(refused.value).splitlines()
    assert first_line.startswith("book/measured/a.json is damaged: ")
    assert second_line == "Restore it with git checkout book/measured/a.json, or remove it and measure again."


def test_a_record_that_does_not_say_whose_it_is_fails_the_build(project):
    project.record(facts={"commit": ""}, bus_bandwidth=BANDWIDTH)
    with pytest.raises(ExtensionError, match=r"book/measured/a.json does not say its commit\.\n"):
        project.build(box_of("bus_bandwidth"))


def test_a_rehearsed_record_is_never_shown(project):
    project.record(facts={"rehearsed": "on pretended GPUs"}, bus_bandwidth=BANDWIDTH)
    with pytest.raises(ExtensionError) as refused:
        project.build(box_of("bus_bandwidth"))
    assert str(refused.value) == (
        "book/measured/a.json was rehearsed on pretended GPUs, so its numbers are not measurements.\n"
        "Remove it, and measure on real GPUs: make gpu ARGS=--record"
    )


def test_a_class_that_names_no_measurement_is_an_error_of_the_build(project):
    warnings = project.build(box_of("bandwith")).warnings
    assert "There is no measurement for the class measured-bandwith." in warnings
    assert "measured-bus-bandwidth" in warnings  # among those that it lists


# --- this book --------------------------------------------------------------------------------------------------------

BOXES = {  # chapter: the measurements that its boxes show
    "02": {"bus_bandwidth"},
    "03": {"copies"},
    "05": {"precision", "float8"},
    "06": {"overlap", "recompute"},
    "06c": {"nccl_memory"},
    "08": {"script"},
    "10": {"checkpoint"},
    "14": {"launch"},
    "14b": {"messages"},
    "15": {"rates", "planned"},
}


@pytest.mark.parametrize("number", BOXES)
def test_a_chapter_that_speaks_of_gpus_has_its_boxes_and_names_the_sources_of_others(number):
    [path] = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    prose = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    measurements = set()
    for box in book_measured.BOX.finditer(prose):
        measured = re.findall(r"measured-(\S+)", box["classes"])
        measurements.update(measured)
        if measured and measured != ["messages"]:
            assert re.search(r"\{cite\}`|\]\(https://", box["content"]), f"whose are the figures of {box['content']!r}?"
    assert measurements == BOXES[number]
