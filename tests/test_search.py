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
# In a page's HTML: <section id="an-anchor"><h2>A heading<a class="headerlink" …
SECTION = re.compile(
    r'<section[^>]* id="(?P<anchor>[^"]+)"[^>]*>\s*(?:<span[^>]*></span>)*<h\d>(?P<heading>.*?)<a class="headerlink"',
    flags=re.DOTALL,
)


@pytest.fixture(scope="module")
def entries(book):
    """The entries of the search's index, unpacked from the script that has them. See script_with in book_search.py."""
    script = (book.html / "_static" / "search_entries.js").read_text(encoding="utf-8")
    packed = re.match(r'var searchEntries = "(.*?)"', script)[1]
    data = gzip.decompress(base64.b64decode(packed))
    columns = json.loads(data)  # a list for each field: all pages, all anchors and so on
    rows = zip(*columns, strict=True)
    return [Entry(*row) for row in rows]


def words_in(text):
    """The words of a text, without punctuation."""
    return " ".join(re.findall(r"\w+", text))


def words_of(html):
    """The words of a piece of HTML, without tags and punctuation."""
    return words_in(unescape(re.sub("<[^>]*>", "", html)))


# --- what is in the index ---------------------------------------------------------------------------------------------


def test_every_heading_can_be_found(book, entries):
    """Each section of a page has an entry with its heading, and each entry an anchor on its page."""
    heading_of_entry = {(entry.page, entry.anchor): words_of(entry.headings[-1]) for entry in entries}
    assert len(heading_of_entry) == len(entries)
    for page in toc_files():
        html = (book.html / f"{page}.html").read_text(encoding="utf-8")
        sections = list(SECTION.finditer(html))
        assert len(sections) == html.count("<section"), page
        for section in sections:
            heading = heading_of_entry.pop((page, section["anchor"]))
            assert heading == words_of(section["heading"])
        for entry in entries:
            if entry.page == page:
                assert f'id="{entry.anchor}"' in html, entry.anchor

    pages_of_other_entries = {page for page, _ in heading_of_entry}
    assert pages_of_other_entries == {"book/glossary", "book/references"}  # terms, and works that pages cite


# --- how it ranks -----------------------------------------------------------------------------------------------------

# It searches in small texts: ([titles], [texts], [queries]) => for each query the positions of the texts it finds.
RANK_TEXTS = """([titles, texts, queries]) => {
    const find = bookSearch.build(titles.map((title, k) => ['page', title, ['Page', title], texts[k], '']));
    return queries.map(query => find(query).map(result => result.anchor));
}"""
# It searches in the book: [queries] => for each query its results, the best one first.
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
    """Whether a result is one of the right answers to a search, {name of a page: pattern of a heading}."""
    page = result["page"].rpartition("/")[2]
    return page in answers and re.search(answers[page], result["headings"][-1], re.I) is not None


def is_answer_to_question(result, question):
    """Whether a result is the section that answers a Question of book/questions.md."""
    is_right_page = result["page"] == question.page
    is_right_section = slugify(result["headings"][-1]) == question.anchor
    return is_right_page and is_right_section


def test_questions_are_answered(search):
    """For 80 % of the questions the right section is first, for 97 % among the first three. None finds nothing."""
    answers_to_searches = searches()
    questions = {question.text: question for question in QUESTIONS}
    queries = list(answers_to_searches | questions)

    number_with_right_first = 0
    misses = []
    for query, results in zip(queries, search.evaluate(ANSWER, queries), strict=True):
        assert results, query
        results_in_view = results[:MAX_RESULTS]
        if query in questions:
            expected = questions[query]
            right = [is_answer_to_question(result, expected) for result in results_in_view]
        else:
            expected = answers_to_searches[query]
            right = [is_answer_to_search(result, expected) for result in results_in_view]
        if right[0]:
            number_with_right_first += 1
        if not any(right):
            found = [(result["page"], result["headings"][-1]) for result in results_in_view]
            misses.append(f"{query}\n    expected {expected}\n    not      {found}")

    totals = f"first: {number_with_right_first} of {len(queries)}; not found: {len(misses)}"
    summary = "\n".join([totals, *misses])
    assert number_with_right_first >= 0.8 * len(queries), summary
    assert len(misses) <= 0.03 * len(queries), summary


def test_no_phrase_is_one_of_the_searches():
    """The searches tell how well the search finds what nobody foresaw, so its list of phrases must not have them."""
    phrases = set()
    for phrases_of_section in read_lines_of_sections(ROOT / PHRASES).values():
        phrases.update(words_in(phrase).lower() for phrase in phrases_of_section)
    assert len(phrases) > 700
    foreseen = [query for query in searches() if words_in(query).lower() in phrases]
    assert foreseen == []


def sections_by_message():
    """{an error message: the section that says how to repair it, as "page#anchor"}, from book/error_messages.txt."""
    sections = {}
    for section, messages in read_lines_of_sections(ROOT / ERRORS).items():
        for message in messages:
            sections[message] = section
    return sections


TERMINAL = "Traceback (most recent call last): File train.py, line 41, in <module> RuntimeError: {} [rank 3 of 8]"


@pytest.mark.parametrize("pasted", ["{}", TERMINAL], ids=["alone", "in a terminal"])
def test_an_error_message_leads_to_the_section_that_cures_it(search, pasted):
    sections = sections_by_message()
    assert len(sections) > 20
    queries = [pasted.format(message) for message in sections]
    results_of_queries = search.evaluate(ANSWER, queries)
    for query, results, section in zip(queries, results_of_queries, sections.values(), strict=True):
        first = results[0]
        assert f"{first['page']}#{first['anchor']}" == section, query


# --- how it is used ---------------------------------------------------------------------------------------------------


def type_query(page, query):
    """Open the search's dialog, type a query, and return its results as a locator of Playwright."""
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
    assert chosen(page) == addresses[0]
    page.keyboard.press("ArrowUp")  # above the first result there is none
    assert chosen(page) == addresses[0]
    page.keyboard.press("ArrowDown")
    assert chosen(page) == addresses[1]
    page.keyboard.press("ArrowDown")
    assert chosen(page) == addresses[2]
    page.keyboard.press("ArrowUp")
    assert chosen(page) == addresses[1]
    page.keyboard.press("Enter")
    page.wait_for_url(addresses[1])
    wait_until_heading_is_seen(page)

    type_query(page, "gradient accumulation")
    page.keyboard.press("Escape")  # this may only clear the field
    page.keyboard.press("Escape")
    assert not dialog.is_visible()

    type_query(page, "optimizer fully_shard")  # its results are on the open page, which is not loaded again
    page.keyboard.press("Enter")
    dialog.wait_for(state="hidden")
    wait_until_heading_is_seen(page)


def test_search_loads_little_and_only_when_it_is_used(visit, book):
    """A page itself loads search.js alone. The other files come when the reader begins to search."""
    page = visit(CHAPTERS[0])
    page.wait_for_load_state("networkidle")
    files_loaded = set()

    def note_file(request):
        name = request.url.rpartition("/")[2]
        if name != "favicon.svg":  # Chromium may fetch it at any time
            files_loaded.add(name)

    page.on("request", note_file)
    assert type_query(page, "how to run on 2 gpus").count() > MAX_RESULTS
    assert files_loaded == {"minisearch.js", "search_engine.js", "search_entries.js"}
    all_files = [book.html / "_static" / name for name in ["search.js", *files_loaded]]
    assert sum(file.stat().st_size for file in all_files) <= MAX_BYTES


def test_results_are_legible_and_named(visit):
    """Axe finds nothing, light or dark, wide or narrow, and nothing scrolls sideways."""
    page = visit("genindex")
    type_query(page, "find_unused_parameters set_model_state_dict")
    problems = list(too_wide(page))
    for size in (WIDE, NARROW):
        page.set_viewport_size(size)
        problems += seen_by_axe(page)
    assert not problems, "\n".join(problems)
    number_that_scroll_sideways = page.locator(".search-list:visible").evaluate_all(
        "lists => lists.filter(list => list.scrollWidth > list.clientWidth).length"
    )
    assert number_that_scroll_sideways == 0


def test_a_bookmark_may_have_a_query(visit, book_url):
    page = visit("search")
    page.goto(f"{book_url}/search.html?q=find_unused_parameters")
    page.locator("main [role=option]").first.wait_for()
