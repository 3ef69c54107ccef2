"""The book's search: a chapter is found by its title, a question that people ask by the heading that is it."""

import re
from urllib.parse import urlsplit

import nbformat
import pytest
from conftest import CHAPTERS, ROOT, toc_files
from test_book import parsed
from test_browser import Visit

FIRST = 3  # results that a reader looks at

QUESTIONS = {
    "How do I run this with one GPU or none?": "notebooks/01_process_groups",
    "Why does spawn fail in a notebook?": "notebooks/01_process_groups",
    "Which rank is hanging?": "notebooks/02_collectives",
    "Why does evaluation change with the number of processes?": "notebooks/03_samplers",
    "Where does the data loader resume?": "notebooks/10_checkpointing",
    "Why do two GPUs not halve my step count?": "notebooks/04_ddp",
    "Does find_unused_parameters change my results?": "notebooks/04_ddp",
    "Why can I not align the FSDP loss exactly with one GPU?": "notebooks/06_fsdp",
    "In which order do I apply TP, PP, activation checkpointing, compile and FSDP?": "notebooks/decision_guide",
    "How do I resume on a different number of GPUs?": "notebooks/10_checkpointing",
    "Why did torchrun not restart my job the way I expected?": "notebooks/13_fault_tolerance",
    "How do I launch this on Slurm?": "notebooks/12_multi_node",
    "Which parallelism do I need, and in which order do I apply it?": "notebooks/decision_guide",
}


# What the page of the results does with the query of its address. It loads a page for the excerpt of each result: once
# is enough.
ASK = """query => {
    DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
    document.getElementById('search-results').replaceChildren();
    Search.performSearch(query);
}"""
TITLES = {chapter: nbformat.read(ROOT / f"{chapter}.ipynb", 4).cells[0].source.splitlines()[0] for chapter in CHAPTERS}


def longest_word(chapter):
    return max(re.findall(r"\w+", TITLES[chapter]), key=len)


@pytest.fixture(scope="module")
def searched(browser, book_url):
    """The book's first page, on which a reader has typed the longest word of a chapter's title."""
    seen = Visit(browser, book_url, toc_files()[0])
    seen.page.keyboard.press("Control+k")
    seen.page.locator("input[type=search]:visible").first.fill(longest_word(CHAPTERS[0]))
    with seen.page.expect_navigation():
        seen.page.keyboard.press("Enter")
    results(seen.page)
    seen.page.wait_for_function("!document.querySelector('#search-results li:not(:has(p.context))')")  # the excerpts
    yield seen
    seen.page.close()


def results(page):
    """The results' (file without suffix, id of the heading), best first."""
    page.wait_for_function("document.querySelector('#search-results .search-summary').innerText")
    links = page.locator("#search-results li > a").evaluate_all("links => links.map(link => link.href)")
    return [(urlsplit(link).path.strip("/").removesuffix(".html"), urlsplit(link).fragment) for link in links]


def test_what_a_reader_types_is_searched_without_an_error(searched):
    assert CHAPTERS[0] in dict(results(searched.page))
    assert not searched.complaints, "\n".join(searched.complaints)


def test_search_finds_every_chapter_by_its_title(searched):
    missed = []
    for chapter in CHAPTERS:
        searched.page.evaluate(ASK, longest_word(chapter))
        if chapter not in dict(results(searched.page)):
            missed.append(f"{longest_word(chapter)}: not {chapter}")
    assert not missed, "\n".join(missed)


def test_search_answers_the_questions(searched, book):
    missed = []
    for question, expected in QUESTIONS.items():
        searched.page.evaluate(ASK, question.lower().rstrip("?"))  # as one types
        first, answers = results(searched.page)[:FIRST], set()
        for docname, anchor in first:
            section = parsed(book.html / f"{docname}.html").find("section", id=anchor)
            if section and section.find(["h1", "h2", "h3"]).get_text().rstrip("#") == question:
                answers.add(docname)
                if len(section.get_text().split()) <= 40:
                    missed.append(f"{question} {docname} has a heading without an answer")
        if expected not in answers:
            missed.append(f"{question} {expected} was expected: {first}")
    assert not missed, "\n".join(missed)
