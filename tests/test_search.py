"""The book's search: what is in its index, how it ranks and answers readers' questions, how it is used."""

import base64
import gzip
import json
import re
import sys
from html import unescape

import pytest
from asked import QUESTIONS, searches
from conftest import CHAPTERS, ROOT, toc_files
from mdit_py_plugins.anchors.index import slugify
from visits import NARROW, WIDE, open_page, seen_by_axe, too_wide

sys.path.append(str(ROOT / "book" / "_ext"))
from book_search import ERRORS, PHRASES, Entry, read_lines_of_sections

MAX_RESULTS = 3  # that a reader looks at
MAX_BYTES = 600_000  # of all that the search loads
SECTION = re.compile(r'(?s)<section[^>]* id="([^"]+)"[^>]*>\s*(?:<span[^>]*></span>)*<h\d>(.*?)<a class="headerlink"')


@pytest.fixture(scope="module")
def entries(book):
    """The search's index."""
    script = (book.html / "_static" / "search_entries.js").read_text(encoding="utf-8")
    packed = re.match(r'var searchEntries = "(.*?)"', script)[1]
    columns = json.loads(gzip.decompress(base64.b64decode(packed)))
    return [Entry(*row) for row in zip(*columns, strict=True)]


def words_in(text):
    """The words of a text, without punctuation."""
    return " ".join(re.findall(r"\w+", text))


def words_of(html):
    return words_in(unescape(re.sub("<[^>]*>", "", html)))


# --- what is in the index ---------------------------------------------------------------------------------------------


def test_every_heading_can_be_found(book, entries):
    """Each result leads to its heading, or to its term in the glossary."""
    found = {(entry.page, entry.anchor): words_of(entry.headings[-1]) for entry in entries}
    assert len(found) == len(entries)
    for page in toc_files():
        html = (book.html / f"{page}.html").read_text(encoding="utf-8")
        sections = SECTION.findall(html)
        assert len(sections) == html.count("<section"), page
        for anchor, heading in sections:
            assert found.pop((page, anchor)) == words_of(heading)
        for entry in entries:
            assert entry.page != page or f'id="{entry.anchor}"' in html, entry.anchor
    assert {page for page, _ in found} == {"book/glossary", "book/references"}  # terms, and works that pages cite


# --- how it ranks -----------------------------------------------------------------------------------------------------

RANK_TEXTS = """([titles, texts, queries]) => {
    const find = bookSearch.build(titles.map((title, k) => ['page', title, ['Page', title], texts[k], '']));
    return queries.map(query => find(query).map(result => result.anchor));
}"""
ANSWER = """async queries => {
    const find = bookSearch.build(await bookSearch.unpack(searchEntries), searchWeights);
    return queries.map(query => find(query));
}"""


@pytest.fixture(scope="module")
def search(browser, book_url):
    """A page of the book, with the search opened."""
    page = open_page(browser, book_url, "genindex", [])
    page.keyboard.press("Control+k")
    page.wait_for_function("window.MiniSearch && window.bookSearch && window.searchEntries")
    yield page
    page.close()


def test_it_finds_other_forms_of_a_word_and_ranks_by_how_many_words_match(search):
    texts = {
        "one": "alpha stands here",
        "two": "alpha and beta stand here",
        "three": "alpha, beta and gamma stand here",
        "name": "call all_gather, then reduce-scatter",
        "class": "a DistributedSampler",
        "many": "it has checkpoints",
    }
    expected = {
        "alpha beta gamma": ["three", "two", "one"],
        "gamma beta xylophone": ["three", "two"],  # a word that nothing has empties no list
        "all-gather": ["name"],
        "allgather": ["name"],
        "reduce_scatter": ["name"],
        "distributed sampler": ["class"],
        "DISTRIBUTED_SAMPLER": ["class"],
        "checkpointing": ["many"],
        "chekpoint": ["many"],  # misspelt
        "checkp": ["many"],  # unfinished
        "[10.0.0.7]:43121 pid=51763 gamma 0x7f3a": ["three"],  # numbers
        "xylophone": [],
        "": [],
    }
    rankings = search.evaluate(RANK_TEXTS, [list(texts), list(texts.values()), list(expected)])
    assert dict(zip(expected, rankings, strict=True)) == expected


def is_answer_to_search(result, answers):
    """Whether a result is one of the answers, {name of a page: pattern of a heading}."""
    page = result["page"].rpartition("/")[2]
    return page in answers and re.search(answers[page], result["headings"][-1], re.I) is not None


def is_answer_to_question(result, question):
    return (result["page"], slugify(result["headings"][-1])) == (question.page, question.anchor)


def test_questions_are_answered(search):
    """For 80 % of the questions the right section is first, for 97 % among the first three. None finds nothing."""
    typed = searches()
    questions = {question.text: question for question in QUESTIONS}
    queries = list(typed | questions)
    first = 0
    misses = []
    for query, results in zip(queries, search.evaluate(ANSWER, queries), strict=True):
        assert results, query
        top = results[:MAX_RESULTS]
        if query in questions:
            right = [is_answer_to_question(result, questions[query]) for result in top]
        else:
            right = [is_answer_to_search(result, typed[query]) for result in top]
        if right[0]:
            first += 1
        if not any(right):
            found = [(result["page"], result["headings"][-1]) for result in top]
            misses.append(f"{query}\n    expected {questions.get(query, typed.get(query))}\n    not      {found}")
    summary = "\n".join([f"first: {first} of {len(queries)}; not found: {len(misses)}", *misses])
    assert first >= 0.8 * len(queries) and len(misses) <= 0.03 * len(queries), summary


def test_no_phrase_is_one_of_the_searches():
    """The searches tell how well the search finds what nobody foresaw, so its list of phrases must not have them."""
    phrases = [phrase for lines in read_lines_of_sections(ROOT / PHRASES).values() for phrase in lines]
    assert len(phrases) > 700
    foreseen = {words_in(phrase).lower() for phrase in phrases}
    assert not [query for query in searches() if words_in(query).lower() in foreseen]


def first_places(search, queries):
    """(page, anchor) of each query's first result."""
    return [(results[0]["page"], results[0]["anchor"]) for results in search.evaluate(ANSWER, list(queries))]


def test_an_error_message_leads_to_the_section_that_cures_it(search):
    """Alone, and inside what a terminal prints around it."""
    cures = {}
    for section, messages in read_lines_of_sections(ROOT / ERRORS).items():
        for message in messages:
            cures[message] = tuple(section.split("#"))
    assert len(cures) > 20
    terminal = "Traceback (most recent call last): File train.py, line 41, in <module> RuntimeError: {} [rank 3 of 8]"
    for queries in (cures, [terminal.format(message) for message in cures]):
        for query, place, cure in zip(queries, first_places(search, queries), cures.values(), strict=True):
            assert place == cure, query


# --- how it is used ---------------------------------------------------------------------------------------------------


def type_query(page, query):
    """Type a query into the dialog; return the results."""
    page.keyboard.press("Control+k")
    page.keyboard.type(query)
    page.locator(f'dialog [role=listbox][data-query="{query}"]').wait_for()
    return page.locator("dialog [role=option]")


def chosen(page):
    """The address of the result that Enter would open, by the attributes that a screen reader uses."""
    field = page.locator("dialog input[role=combobox]")
    option = page.locator(f"#{field.get_attribute('aria-activedescendant')}[aria-selected=true]")
    return option.evaluate("link => link.href")


def wait_until_heading_is_seen(page):
    page.wait_for_function("""() => {
        const heading = document.getElementById(decodeURIComponent(location.hash.slice(1)));
        const {top, bottom} = heading?.getBoundingClientRect() ?? {};  // none yet, while the page loads
        return top >= 0 && top < innerHeight && bottom > 0;
    }""")


def test_search_works_from_the_keyboard(visit, book):
    """Ctrl+K opens the search, arrows move through the results, Enter opens one, Escape closes the search.

    The book is opened from a folder, where a page may load scripts and nothing else.
    """
    page = visit(toc_files()[0], book.html.as_uri())
    dialog = page.locator("#pst-search-dialog")
    addresses = type_query(page, "gradient accumulation").evaluate_all("links => links.map(link => link.href)")
    choices = [chosen(page)]
    for key in ["ArrowUp", "ArrowDown", "ArrowDown", "ArrowUp"]:
        page.keyboard.press(key)
        choices.append(chosen(page))
    assert choices == [addresses[position] for position in (0, 0, 1, 2, 1)]
    page.keyboard.press("Enter")
    page.wait_for_url(addresses[1])
    wait_until_heading_is_seen(page)

    type_query(page, "gradient accumulation")
    for _ in range(2):  # the first Escape may only clear the field
        page.keyboard.press("Escape")
    assert not dialog.is_visible()
    type_query(page, "optimizer fully_shard")  # its results are on the open page, which is not loaded again
    page.keyboard.press("Enter")
    dialog.wait_for(state="hidden")
    wait_until_heading_is_seen(page)


def test_search_loads_little_and_only_when_it_is_used(visit, book):
    page = visit(CHAPTERS[0])
    page.wait_for_load_state("networkidle")
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    assert type_query(page, "how to run on 2 gpus").count() > MAX_RESULTS
    loaded = {url.rpartition("/")[2] for url in requests} - {"favicon.svg"}  # which chromium may fetch at any time
    assert loaded == {"minisearch.js", "search_engine.js", "search_entries.js"}
    assert sum((book.html / "_static" / name).stat().st_size for name in [*loaded, "search.js"]) <= MAX_BYTES


def test_results_are_legible_and_named(visit):
    """Axe finds nothing, light or dark, wide or narrow, and nothing scrolls sideways."""
    page = visit("genindex")
    type_query(page, "find_unused_parameters set_model_state_dict")
    problems = list(too_wide(page))
    for size in (WIDE, NARROW):
        page.set_viewport_size(size)
        problems += seen_by_axe(page)
    assert not problems, "\n".join(problems)
    wide = "lists => lists.filter(list => list.scrollWidth > list.clientWidth).length"
    assert not page.locator(".search-list:visible").evaluate_all(wide)


def test_a_bookmark_may_have_a_query(visit, book_url):
    page = visit("search")
    page.goto(f"{book_url}/search.html?q=find_unused_parameters")
    page.locator("main [role=option]").first.wait_for()
