"""What a notebook says of itself, and what the book makes of it: the first page's list, searches, contents.

``make check CHAPTER=17`` runs all of this file: these are the tests that a new chapter can fail without its cells.
"""

import re
import sys
from pathlib import Path

import nbformat
import pytest
from asked import searches
from conftest import ROOT, toc_files
from hygiene import prose
from printed import printed
from sphinx.errors import ExtensionError

from helpers.export import chapters
from helpers.export.error import ExportError
from helpers.export.facts import Chapter, Line, Rehearsal, Script, facts_at, facts_in, unmet

sys.path.append(str(ROOT / "book" / "_ext"))  # as in the build
import front_page

NOTEBOOKS = [path for path in sorted(ROOT.glob("notebooks/*.ipynb")) if path.stem != "template"]

# --- what each notebook says ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_says_what_the_book_asks_of_it(path):
    facts = facts_at(path)
    assert facts.question, (
        'the first page prints a question behind the title: write it into metadata, "book", "question"'
    )
    if path in chapters.chapters():
        assert facts.script.result, (
            'the tests ask what the numbers of the script must be: write metadata, "book", "script", "result"'
        )
    else:
        assert facts.script == Script(), "a page without a script says something of one"


@pytest.mark.parametrize(
    "path", [path for path in NOTEBOOKS if facts_at(path).script.how_to_start], ids=lambda path: path.stem
)
def test_the_commands_of_a_scripts_own_are_those_of_its_page(path):
    """The page may export a variable first, and name its flags in another order."""
    exported = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    on_pages = [sorted(command.split()) for command in printed()]
    text = "\n".join(facts_at(path).script.how_to_start).replace("\\\n", " ")
    commands = [line.split() for line in text.splitlines() if "torchrun " in line]
    assert len(commands) == 2  # for one machine, and for two
    for words in commands:
        assert sorted(word for word in words if word != exported) in on_pages, " ".join(words)


def headings_of(path):
    """The headings of a notebook, of all levels, without their signs #."""
    notebook = nbformat.read(path, as_version=4)
    return re.findall(r"^#+ (.*)", prose(notebook), flags=re.MULTILINE)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_typed_into_the_search_leads_to_a_heading(path):
    """Where a search says that this notebook answers it, one of the notebook's headings fits the search's pattern."""
    headings = headings_of(path)
    for typed, answers in searches().items():
        pattern = answers.get(path.stem)
        if pattern is None:  # other pages answer this search
            continue
        fitting = [heading for heading in headings if re.search(pattern, heading, re.IGNORECASE)]
        assert fitting, f"{typed!r} should lead to a heading like {pattern!r}, and {path.name} has none"


def test_a_search_leads_to_every_page():
    pages = {Path(page).name for page in toc_files()}
    pages_of_answers = set()
    for answers in searches().values():
        pages_of_answers.update(answers)
    missing = pages - pages_of_answers
    mend = 'write into the notebook\'s metadata, "book", "searches": {what a reader types: a pattern of the heading}'
    assert missing == set(), f"no search is said to lead to {', '.join(sorted(missing))}: {mend}"
    assert pages_of_answers <= pages, "an answer names a page that there is not"


def test_the_toc_names_every_page_once():
    pages = [f"book/{path.stem}" for path in (ROOT / "book").glob("*.md")]
    pages += [f"notebooks/{path.stem}" for path in NOTEBOOKS]
    assert sorted(toc_files()) == sorted(pages)


def test_the_toc_has_the_chapters_in_the_order_of_their_numbers():
    in_toc = [page for page in toc_files() if re.match(r"notebooks/\d\d", page)]
    assert in_toc == [f"notebooks/{path.stem}" for path in chapters.numbered()]


def test_chapters_are_numbered_from_0_without_a_gap():
    numbers = [int(path.name[:2]) for path in chapters.chapters()]
    assert numbers == list(range(len(numbers)))


# --- how it is read ---------------------------------------------------------------------------------------------------


def test_what_is_left_out_has_its_default():
    assert facts_in({}, "one") == Chapter()
    metadata = {
        "book": {
            "question": "Why?",
            "script": {"tolerance": 1, "lines": [{"flags": "--a 1", "here": "--a 2"}], "rehearsals": [{"nodes": 2}]},
        }
    }
    facts = facts_in(metadata, "one")
    assert facts.question == "Why?"
    assert facts.script.rehearsals == [Rehearsal(nodes=2, gpus=8)]
    assert facts.line("--a 1") == Line("--a 1", here="--a 2")
    assert facts.line("--b") == Line("--b")


ERRORS_OF_METADATA = {  # a notebook's metadata, "book": the beginning of the error
    '{"questoin": "Why?"}': "one: metadata.book has an unknown entry: questoin.\nIt may have: question, formerly,",
    '{"script": {"quick": "--steps 1"}}': "one: metadata.book.script has an unknown entry: quick.\nIt may have: ",
    '{"script": {"lines": [{"here": ""}]}}': "one: metadata.book.script.lines: an entry of it has no flags.\nAdd it",
    '{"question": ["Why?"]}': "one: metadata.book.question is ['Why?'].\nIts type must be str.",
    '{"script": {"gpus": true}}': "one: metadata.book.script.gpus is True.\nIts type must be int.",
    '{"script": {"result": {"loss": "small"}}}': "one: metadata.book.script.result.loss is 'small'.\nWrite a relation",
}


@pytest.mark.parametrize("metadata", ERRORS_OF_METADATA)
def test_what_no_field_reads_is_refused_in_two_lines(metadata, tmp_path):
    path = tmp_path / "one"
    path.write_text(f'{{"metadata": {{"book": {metadata}}}}}')
    message = ERRORS_OF_METADATA[metadata]
    with pytest.raises(ExportError, match=re.escape(message)) as refused:
        facts_at(path)
    assert len(str(refused.value).splitlines()) == 2


def test_a_damaged_notebook_is_refused(tmp_path):
    (tmp_path / "one.ipynb").write_text("{")
    with pytest.raises(ExportError, match=r"one\.ipynb is not a notebook that can be read.*\nGive"):
        facts_at(tmp_path / "one.ipynb")


def test_a_result_is_held_to_its_conditions():
    result = {"loss": 2.0, "right": 3, "checked": 3}
    assert unmet({"loss": "> 1.5 and < 2.5", "right": "== checked", "checked": ">= 3"}, result) == []
    assert unmet({"loss": "> 1.5 and < 1.9"}, result) == ["loss is 2.0, and not < 1.9"]
    assert unmet({"right": "== loss", "checked": "<= -3"}, result) == [
        "right is 3, and not == loss",
        "checked is 3, and not <= -3",
    ]
    assert unmet({"accuracy": "> 0"}, result) == ["the result has no accuracy, only loss, right, checked"]
    assert unmet({"loss": "< 1e9"}, {"loss": float("nan")}) == ["loss is nan, and not < 1e9"]


# --- the first page's list --------------------------------------------------------------------------------------------

BLOCK = "```{chapters}\nwords: what they mean\n```\n"


# A line of the list: "  4. [DDP](../notebooks/04_topic.ipynb): A question?", or "  * [More](…): …" without a number
LINE_OF_LIST = re.compile(r"^  (?:\d+\.|\*) \[[^]]+\]\((?P<link>[^)]+)\): \S", flags=re.MULTILINE)


def test_the_first_page_lists_every_page_of_the_toc():
    intro = (ROOT / "book" / "intro.md").read_text(encoding="utf-8")
    intro_with_list = front_page.with_chapters(intro, ROOT)
    listed = []
    for line in LINE_OF_LIST.finditer(intro_with_list):
        # A link is relative to the folder of the first page, such as ../notebooks/template.ipynb. The table of contents
        # has notebooks/template.
        file = (ROOT / "book" / line["link"]).resolve()
        page = file.relative_to(ROOT.resolve()).with_suffix("")
        listed.append(page.as_posix())
    linked_elsewhere = ("book/intro", "book/how_to_run")
    assert listed == [page for page in toc_files() if page not in linked_elsewhere]


@pytest.fixture
def small_book(tmp_path):
    """A book of a chapter, a page beside it and a page without a notebook."""
    (tmp_path / "book").mkdir()
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "book" / "words.md").write_text("# The words\n\nMany.")
    for name, title in (("03_first", "3. First"), ("03b_more", "More")):
        cell = nbformat.v4.new_markdown_cell(f"# {title}\n\nIt begins.")
        nb = nbformat.v4.new_notebook(cells=[cell], metadata={"book": {"question": f"Why {title}?"}})
        nbformat.write(nb, tmp_path / "notebooks" / f"{name}.ipynb")
    files = "[{file: notebooks/03_first}, {file: notebooks/03b_more}, {file: book/words}]"
    (tmp_path / "_toc.yml").write_text(
        f"parts:\n- chapters: [{{file: book/start}}]\n- {{caption: A, chapters: {files}}}"
    )
    return tmp_path


def test_the_list_has_titles_numbers_and_questions(small_book):
    assert front_page.with_chapters(f"Before.\n\n{BLOCK}\nAfter.", small_book) == (
        "Before.\n\n{.chapters}\n* **A**\n\n"
        "  3. [First](../notebooks/03_first.ipynb): Why 3. First? {minutes}`03_first`\n"
        "  * [More](../notebooks/03b_more.ipynb): Why More? {minutes}`03b_more`\n"
        "  * [The words](words.md): what they mean\n"
        "\nAfter."
    )
    assert front_page.with_chapters("No list.", small_book) == "No list."


def test_a_page_without_a_question_fails_the_build(small_book):
    with pytest.raises(ExtensionError, match=r"no line for book/words\.md"):
        front_page.with_chapters(BLOCK.replace("words", "others"), small_book)
    with pytest.raises(ExtensionError, match=r"names pages that _toc\.yml does not: others"):
        front_page.with_chapters(BLOCK.replace("words", "others: these\nwords"), small_book)
    path = small_book / "notebooks" / "03b_more.ipynb"
    path.write_text(path.read_text().replace("Why More?", ""))
    with pytest.raises(ExtensionError, match=r"03b_more\.ipynb has no question"):
        front_page.with_chapters(BLOCK, small_book)


# --- where a chapter is named -----------------------------------------------------------------------------------------

TEACHING = {  # files that may name a chapter by its file's name: to teach what
    "README.md": "where the first lines of code come from",
    "SKILL.md": "which section proves a rule",
    "Makefile": "what the arguments of the commands look like",
    "helpers/export/command.py": "what CHAPTER may be",
    "helpers/rehearsal/command.py": "what CHAPTER may be",
    "helpers/export/verified.py": "what the name of a page looks like",
    "tests/support/verified_run.py": "what the name of a page looks like",
    "tests/support/plain_code.py": "what the place of a cell looks like",
    "tests/plain_code_exceptions.txt": "not to teach: it lists cells by their places, and only shrinks",
    "helpers/training_check.py": "which section explains a mistake",
    "tools/store_outputs.py": "what the path of a notebook looks like",
    "tools/built_pages.py": "what a link to a page looks like",
}


def files_of_the_project():
    """The files outside of notebooks/, book/ and _toc.yml that people write."""
    paths = [ROOT / "Makefile"]
    for pattern in ("*.md", "*.py", "*.txt", "*.toml"):
        paths += ROOT.glob(pattern)
    for folder in ("helpers", "tests", "tools", ".ci", ".github"):
        paths += (ROOT / folder).rglob("*")
    return [path for path in paths if path.is_file() and "__pycache__" not in path.parts]


def test_no_file_names_a_chapter_but_to_teach():
    """A chapter's file can be renamed, because no other file has its name. A test looks it up: find_notebook("04")."""
    any_chapter = "|".join(path.stem for path in chapters.numbered())
    chapters_in_files = {}  # {file: the chapters that it names}
    for path in files_of_the_project():
        text = path.read_text(encoding="utf-8", errors="replace")
        named = set(re.findall(rf"\b(?:{any_chapter})\b", text))
        if named:
            chapters_in_files[path.relative_to(ROOT).as_posix()] = named
    not_to_teach = {file: named for file, named in chapters_in_files.items() if file not in TEACHING}
    assert not_to_teach == {}
    assert TEACHING.keys() <= chapters_in_files.keys(), "a file of this list names no chapter now: take it out"
