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

from helpers.verify.probes import catalog
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
OTHERS = "On A100s others measured 2.5 times the speed."
BOX = f":::{{admonition}} On GPUs\n:class: note measured-bus_bandwidth\n{OTHERS}\n:::\n"
BANDWIDTH = Probe(
    "Bus bandwidth of an all-reduce",
    seconds=9.0,
    figures=[
        Figure("1 MiB", 74.57, "GB/s"),
        Figure("16 GiB | all", 482.25, "GB/s", predicted=450.0, predicted_low=370.0, predicted_high=480.0),
    ],
)


def record_of(facts=FACTS, **probes):
    return Record(facts=dict(facts), probes=probes)


@pytest.fixture
def project(tmp_path):
    """A book of one page, with folders as this book has them; ``build`` returns the page, and what went wrong."""
    (tmp_path / "book" / "measured").mkdir(parents=True)
    (tmp_path / "notebooks").mkdir()
    for name in ("08_pipeline", "14b_reading"):
        nbformat.write(
            new_notebook(cells=[new_markdown_cell(f"# The page {name}\n\nText.")]),
            tmp_path / "notebooks" / f"{name}.ipynb",
        )

    def build(text):
        (tmp_path / "index.md").write_text(f"# A page\n\n{text}")
        settings = {
            "extensions": ["myst_parser", "sphinx_design", "book_measured"],
            "myst_enable_extensions": ["colon_fence", "dollarmath"],
            "exclude_patterns": ["book", "out"],
        }
        warnings = StringIO()
        out = tmp_path / "out"
        with docutils_namespace():  # what one build registers is gone before the next
            app = Sphinx(
                tmp_path, None, out, out / "doctrees", "html", settings, status=None, warning=warnings, freshenv=True
            )
            app.build()
        page = BeautifulSoup((out / "index.html").read_text(), "html.parser")
        return SimpleNamespace(page=page, box=page.select_one(".admonition"), warnings=warnings.getvalue())

    return SimpleNamespace(root=tmp_path, measured=tmp_path / "book" / "measured", build=build)


def rows_of(table):
    return [[words_of(cell) for cell in row.select("th, td")] for row in table.select("tr")]


def words_of(element):
    return " ".join(element.get_text().split())


# --- with a record ----------------------------------------------------------------------------------------------------


def test_the_table_and_whose_it_is_come_from_the_file(project):
    write(record_of(bus_bandwidth=BANDWIDTH), project.measured / "2026-11-28-1-gpus.json")
    built = project.build(BOX)
    assert built.warnings == ""
    assert rows_of(built.box.table) == [
        ["what", "measured", "predicted", "measured / predicted"],
        ["1 MiB", "74.6 GB/s", "", ""],
        ["16 GiB | all", "482 GB/s", "450 GB/s (370 to 480)", "1.07"],
    ]
    assert words_of(built.box.select("p")[1]) == (
        "Bus bandwidth of an all-reduce. Measured by this book on 28 November 2026, on 1 x NVIDIA H100 80GB HBM3 "
        "(driver 570.86, PyTorch 2.11.0+cu130, CUDA 13.0, NCCL 2.28.9, Python 3.12.3), at commit 1a2b3c4, "
        "by python -m helpers verify --record:"
    )
    assert OTHERS not in words_of(built.box) and "Not yet" not in words_of(built.box)
    assert "On GPUs" in words_of(built.box.select_one(".admonition-title"))


def test_another_number_in_the_file_is_another_number_on_the_page(project):
    file = project.measured / "a.json"
    write(record_of(bus_bandwidth=BANDWIDTH), file)
    assert "74.6 GB/s" in words_of(project.build(BOX).box)
    file.write_text(file.read_text().replace("74.57", "31.07"))
    words = words_of(project.build(BOX).box)
    assert "31.1 GB/s" in words and "74.6" not in words


def test_a_column_in_which_no_row_has_anything_is_left_out(project):
    probe = Probe("Copies", 1.0, [Figure("pinned", 55.2, "GB/s"), Figure("pageable", 9.0, "GB/s")])
    write(record_of(bus_bandwidth=probe), project.measured / "a.json")
    assert rows_of(project.build(BOX).box.table) == [
        ["what", "measured"],
        ["pinned", "55.2 GB/s"],
        ["pageable", "9 GB/s"],
    ]


def test_the_newest_of_one_kind_of_gpus_wins(project):
    old = Probe("Bus bandwidth", 1.0, [Figure("1 MiB", 11.0, "GB/s")])
    new = Probe("Bus bandwidth", 1.0, [Figure("1 MiB", 22.0, "GB/s")])
    # The name of the newest file comes first, so that the date has to decide.
    write(record_of({**FACTS, "date": "2026-12-01"}, bus_bandwidth=new), project.measured / "a.json")
    write(record_of({**FACTS, "date": "2026-11-28"}, bus_bandwidth=old), project.measured / "b.json")
    words = words_of(project.build(BOX).box)
    assert "22 GB/s" in words and "1 December 2026" in words
    assert "11 GB/s" not in words


def test_a_newer_record_in_which_the_probe_failed_hides_nothing(project):
    write(record_of(bus_bandwidth=BANDWIDTH), project.measured / "a.json")
    failed = Probe("Bus bandwidth", 1.0, trouble="failed: out of memory")
    write(record_of({**FACTS, "date": "2026-12-01"}, bus_bandwidth=failed), project.measured / "b.json")
    assert "482 GB/s" in words_of(project.build(BOX).box)
    (project.measured / "a.json").unlink()
    assert words_of(project.build(BOX).box).endswith(f"Not yet measured by this book. {OTHERS}")


def test_what_stopped_a_probe_halfway_is_said(project):
    for trouble, said in (
        ("hung: at bench.py:7", "hung: at bench.py:7"),
        ("failed: " + "a b " * 999, "failed: a b a b"),
    ):
        probe = Probe("Bus bandwidth", 1.0, [Figure("1 MiB", 11.0, "GB/s")], trouble=trouble)
        write(record_of(bus_bandwidth=probe), project.measured / "a.json")
        words = words_of(project.build(BOX).box)
        assert f"The rest was not measured ({said}" in words and len(words) < 700


def test_two_kinds_of_gpus_give_two_tables(project):
    other = Probe("Bus bandwidth", 1.0, [Figure("1 MiB", 99.0, "GB/s")])
    write(record_of(bus_bandwidth=BANDWIDTH), project.measured / "a.json")
    write(record_of({**FACTS, "machine": H200, "commit": "5d6e7f8"}, bus_bandwidth=other), project.measured / "b.json")
    box = project.build(BOX).box
    first, second = box.select("table")
    assert "482 GB/s" in words_of(first) and "99 GB/s" in words_of(second)
    captions = [words_of(paragraph) for paragraph in box.select("p") if "Measured by" in paragraph.get_text()]
    assert "H100" in captions[0] and "1a2b3c4" in captions[0]
    assert "on 1 x NVIDIA H200 (driver 580.95" in captions[1] and "5d6e7f8" in captions[1]


ON_TWO_RANKS = {**FACTS, "ranks of the scripts": "2"}


def test_a_script_shows_its_seconds_its_memory_and_the_speed_it_printed(project):
    record = record_of(ON_TWO_RANKS)
    record.steps["index"] = Step(
        seconds=30.0,
        differences=["index.py:7 waits: 3 times on GPUs, 2 as rehearsed"],  # which makes its seconds no less true
        summary="",
        command="torchrun index.py",
        result={"loss": 0.5},
        script_seconds=[4.25, 8.5],
        memory=[61_000_000, 35_500_000],
    )
    record.steps["index, speed"] = Step(
        9.0, [], "measured", "torchrun index.py --large", printed="bytes   GB/s\n1024    1.5\n"
    )
    write(record, project.measured / "a.json")
    box = project.build(BOX.replace("bus_bandwidth", "script")).box
    assert rows_of(box.table)[1:] == [
        ["the run on GPUs", "4.25 s"],
        ["the run on CPUs, with gloo", "8.5 s"],
        ["peak memory of rank 0", "61 MB"],
        ["peak memory of rank 1", "35.5 MB"],
    ]
    assert box.pre.get_text() == "bytes   GB/s\n1024    1.5\n"
    assert "by torchrun index.py:" in words_of(box) and "torchrun index.py --large:" in words_of(box)


def test_a_script_on_one_rank_shows_nothing(project):
    box = BOX.replace("bus_bandwidth", "script")
    for facts, words in ((ON_TWO_RANKS, "the run on GPUs 4 s"), (FACTS, "Not yet measured by this book.")):
        record = record_of(facts)
        record.steps["index"] = Step(30.0, [], "", "torchrun", result={"loss": 1.0}, script_seconds=[4.0])
        record.steps["index, speed"] = Step(9.0, [], "measured", "torchrun", printed="1.5 GB/s")
        write(record, project.measured / "a.json")
        assert words in words_of(project.build(box).box)


def test_a_script_that_came_to_no_result_shows_no_seconds(project):
    record = record_of(ON_TWO_RANKS)
    record.steps["index"] = Step(30.0, ["on GPUs it hung"], "", "torchrun", result={}, script_seconds=[4.0, 8.0])
    write(record, project.measured / "a.json")
    assert "Not yet measured" in words_of(project.build(BOX.replace("bus_bandwidth", "script")).box)


def test_messages_say_which_this_book_explains(project):
    (project.root / "pages").mkdir()
    (project.root / "pages" / "reading.md").write_text("# Reading what NCCL says\n\nText.")
    (project.root / "book" / "error_messages.txt").write_text(
        "pages/reading#one\n    Watchdog caught collective operation timeout\n    Operation timed out after\n"
    )
    texts = {
        "a rank is late": "[rank1] Watchdog caught collective\noperation timeout\n```\nafter 5 s",
        "a fork": "Boom",
    }
    as_quoted = Figure("a fork: printed as the book quotes it", 0, "of 1", predicted=1)
    probe = Probe("Messages", 5.0, figures=[as_quoted], texts=texts)
    write(record_of(messages=probe), project.measured / "a.json")
    built = project.build(f"{BOX.replace('bus_bandwidth', 'messages')}\n```{{toctree}}\npages/reading\n```\n")
    assert built.warnings == ""
    assert "Messages. Seen by this book on 28 November 2026, on 1 x NVIDIA H100" in words_of(built.box)
    assert [pre.get_text().strip() for pre in built.box.select("pre")] == list(texts.values())
    assert [words_of(fold.summary) for fold in built.box.select("details")] == list(texts)
    assert rows_of(built.box.table) == [
        ["message", "explained in"],
        ["Watchdog caught collective operation timeout", "Reading what NCCL says"],
    ]
    assert built.box.table.a["href"] == "pages/reading.html"
    assert words_of(built.box).count("comes from the source that is named beside it") == 1


def test_a_notebook_is_named_by_its_title(project):
    assert book_measured.title_of(project.root, "notebooks/14b_reading") == "The page 14b_reading"
    assert book_measured.source_of(project.root, "notebooks/14b_reading") == "notebooks/14b_reading.ipynb"


# --- without a record -------------------------------------------------------------------------------------------------


def test_without_a_record_the_figures_of_others_stay(project):
    write(record_of(launch=BANDWIDTH), project.measured / "a.json")  # of another probe
    built = project.build(BOX)
    assert built.warnings == ""
    assert words_of(built.box) == f"On GPUs Not yet measured by this book. {OTHERS}"
    assert built.box.table is None
    messages = project.build(BOX.replace("bus_bandwidth", "messages"))
    assert words_of(messages.box) == f"On GPUs No message was seen on a GPU by this book yet. {OTHERS}"


def test_a_box_without_such_a_class_is_left_alone(project):
    write(record_of(bus_bandwidth=BANDWIDTH), project.measured / "a.json")
    box = project.build(":::{admonition} gloo and NCCL\n:class: note\nBoth hang.\n:::\n").box
    assert words_of(box) == "gloo and NCCL Both hang."


def test_the_copy_in_markdown_shows_what_the_page_shows(project):
    page = project.root / "notebooks" / "08_pipeline.ipynb"
    nbformat.write(new_notebook(cells=[new_markdown_cell(f"# A page\n\n{BOX}\nAfter the box.")]), page)
    assert f"measured-bus_bandwidth\nNot yet measured by this book. {OTHERS}\n:::\n\nAfter the box." in markdown(page)
    write(record_of(bus_bandwidth=BANDWIDTH), project.measured / "a.json")
    text = markdown(page)
    assert "| 1 MiB | 74.6 GB/s |  |  |\n" in text and "at commit 1a2b3c4" in text
    assert OTHERS not in text and text.count(":::") == 2


# --- what is refused --------------------------------------------------------------------------------------------------

DAMAGED = {
    "<<<<<<< HEAD": "Expecting value",
    "{}": "facts",
    "[1, 2]": "list",
    '{"facts": {}, "steps": {}, "probes": {"rates": {"title": "Rates"}}}': "figures",
}


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_fails_the_build_and_is_named(content, project):
    (project.measured / "a.json").write_text(content)
    with pytest.raises(ExtensionError) as refused:
        project.build("No box is on this page.")
    first, second = str(refused.value).splitlines()
    assert first.startswith("book/measured/a.json is damaged: ") and DAMAGED[content] in first
    assert second == "Restore it with git checkout book/measured/a.json, or remove it and measure again."


@pytest.mark.parametrize("number", ['"fast"', "NaN", "null"])
def test_a_number_that_is_none_fails_the_build(number, project):
    file = project.measured / "a.json"
    write(record_of(bus_bandwidth=BANDWIDTH), file)
    file.write_text(file.read_text().replace("74.57", number))
    with pytest.raises(ExtensionError, match=r"book/measured/a.json is damaged"):
        project.build(BOX)


@pytest.mark.parametrize("fact", ["machine", "date", "commit", "command"])
def test_a_record_that_does_not_say_whose_it_is_fails_the_build(fact, project):
    write(record_of({**FACTS, fact: ""}, bus_bandwidth=BANDWIDTH), project.measured / "a.json")
    with pytest.raises(ExtensionError, match=f"book/measured/a.json does not say its {fact}\\.\n"):
        project.build(BOX)


def test_a_rehearsed_record_is_never_shown(project):
    write(record_of({**FACTS, "rehearsed": "on pretended GPUs"}, bus_bandwidth=BANDWIDTH), project.measured / "a.json")
    with pytest.raises(ExtensionError) as refused:
        project.build(BOX)
    assert str(refused.value) == (
        "book/measured/a.json was rehearsed on pretended GPUs, so its numbers are not measurements.\n"
        "Remove it, and measure on real GPUs: make gpu ARGS=--record"
    )


def test_a_class_that_names_no_measurement_is_an_error_of_the_build(project):
    warnings = project.build(BOX.replace("bus_bandwidth", "bandwith")).warnings
    assert "There is no measurement for the class measured-bandwith." in warnings
    assert "Take one of: " in warnings and "measured-bus-bandwidth" in warnings and "measured-script" in warnings


# --- this book --------------------------------------------------------------------------------------------------------

SPEAK_OF_GPUS = {  # chapter: what its boxes show
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


@pytest.mark.parametrize("number", SPEAK_OF_GPUS)
def test_a_chapter_that_speaks_of_gpus_has_its_boxes(number):
    [path] = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
    prose = "\n\n".join(
        "".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "markdown"
    )
    boxes = book_measured.BOX.findall(prose)
    names = {name for _, classes, _, _ in boxes for name in re.findall(r"measured-(\S+)", classes)}
    assert names == SPEAK_OF_GPUS[number]
    for _, classes, text, _ in boxes:
        if "measured-" in classes and "measured-messages" not in classes:
            assert re.search(r"\{cite\}`|\]\(https://", text), f"whose are the figures of {text!r}?"


def test_each_probe_of_the_command_has_a_box_and_each_box_a_probe():
    assert set(book_measured.PROBES) == {task.name for task in (*catalog.FIRST, *catalog.LATER)}


def test_a_number_has_three_digits_or_more():
    assert book_measured.row(Figure("a step", 1234.5, "ms", 1000.0)) == ["a step", "1,234 ms", "1,000 ms", "1.23"]
    assert book_measured.row(Figure("a launch", 0.004567, "ms")) == ["a launch", "0.00457 ms", "", ""]
    assert [book_measured.number(value) for value in (99.96, 612.4, 999.7, 0)] == ["100", "612", "1,000", "0"]
