"""Questions that people ask, typed into the book's search: the first results lead to a heading that is the question."""

from urllib.parse import urlsplit

import pytest
from conftest import toc_files
from test_book import parsed

FIRST = 3  # results that a reader looks at

QUESTIONS = {
    "How do I run this with one GPU or none?": "notebooks/01_process_groups",
    "Why does spawn fail in a notebook?": "notebooks/01_process_groups",
    "Which rank is hanging?": "notebooks/02_collectives",
    "Why does evaluation change with the number of processes?": "notebooks/03_samplers",
    "Where does the data loader resume?": "notebooks/07_checkpointing",
    "Why do two GPUs not halve my step count?": "notebooks/04_ddp",
    "Does find_unused_parameters change my results?": "notebooks/04_ddp",
    "Why can I not align the FSDP loss exactly with one GPU?": "notebooks/06_fsdp",
    "In which order do I apply TP, PP, activation checkpointing, compile and FSDP?": "notebooks/decision_guide",
    "How do I resume on a different number of GPUs?": "notebooks/07_checkpointing",
    "Why did torchrun not restart my job the way I expected?": "notebooks/09_fault_tolerance",
    "How do I launch this on Slurm?": "notebooks/10_multi_node",
    "Which parallelism do I need, and in which order do I apply it?": "notebooks/decision_guide",
}


@pytest.fixture(scope="module")
def search_page(browser, book_url):
    """The book's first page, on which a reader begins to search."""
    page = browser.new_page()
    page.goto(f"{book_url}/{toc_files()[0]}.html")
    yield page
    page.close()


@pytest.mark.parametrize("question", QUESTIONS)
def test_search_answers_the_question(search_page, book, question):
    search_page.keyboard.press("Control+k")
    search_page.locator("input[type=search]:visible").first.fill(question.lower().rstrip("?"))  # as one types
    with search_page.expect_navigation():
        search_page.keyboard.press("Enter")
    search_page.locator("#search-results .search-summary", has_text="found").wait_for(timeout=60_000)
    links = search_page.locator("#search-results li > a").evaluate_all("links => links.map(link => link.href)")
    answers = []
    for link in links[:FIRST]:
        address = urlsplit(link)
        docname = address.path.strip("/").removesuffix(".html")
        section = parsed(book.html / f"{docname}.html").find("section", id=address.fragment)
        if section and section.find(["h1", "h2", "h3"]).get_text().rstrip("#") == question:
            answers.append(docname)
            assert len(section.get_text().split()) > 40, "a heading without an answer"
    assert QUESTIONS[question] in answers, links
