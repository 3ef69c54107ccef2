"""The book's search: what is in its index, how it ranks and answers readers' questions, how it is used."""

import base64
import csv
import gzip
import json
import re
from html import unescape

import pytest
from asked import QUESTIONS, searches
from conftest import CHAPTERS, ROOT, toc_files
from mdit_py_plugins.anchors.index import slugify
from visits import NARROW, WIDE, open_page, seen_by_axe, too_wide

from helpers.export.chapters import find_notebook

FIRST = 3  # results that a reader looks at

# JavaScript for a page: rank these sections, (title, text), in place of the book's.
RANK = """([titles, texts, queries]) => {
    const find = bookSearch.build(titles.map((title, k) => ['page', title, ['Page', title], texts[k], '']));
    return queries.map(query => find(query).map(result => result.anchor));
}"""
ANSWER = """async queries => {
    const find = bookSearch.build(await bookSearch.unpack(searchEntries), searchWeights);
    return queries.map(query => find(query));
}"""


@pytest.fixture(scope="module")
def entries(book):
    """The search's index: (page, anchor, headings, text, code, errors) of each section."""
    script = (book.html / "_static" / "search_entries.js").read_text(encoding="utf-8")
    return [*zip(*json.loads(gzip.decompress(base64.b64decode(script.split('"')[1]))), strict=True)]


SECTION = re.compile(r'(?s)<section[^>]* id="([^"]+)"[^>]*>\s*(?:<span[^>]*></span>)*<h\d>(.*?)<a class="headerlink"')


def words(html):
    return " ".join(re.findall(r"\w+", unescape(re.sub("<[^>]*>", "", html))))


# --- what is found ----------------------------------------------------------------------------------------------------


def test_every_heading_can_be_found(book, entries):
    """Each result leads to its heading, to its term in the glossary, or to its row in the table of lies."""
    pages = {page: (book.html / f"{page}.html").read_text(encoding="utf-8") for page in toc_files()}
    headings = {}
    for page, html in pages.items():
        headings |= {(page, anchor): words(heading) for anchor, heading in SECTION.findall(html)}
        assert html.count("<section") == sum(key[0] == page for key in headings), page
    names = {(page, anchor): words(above[-1]) for page, anchor, above, *_ in entries}
    assert len(names) == len(entries) and {key: names.get(key) for key in headings} == headings
    terms = names.keys() - headings
    assert {page for page, _ in terms} == {"book/glossary", "book/references", "book/sabotage"}
    assert not [(page, anchor) for page, anchor in terms if f'id="{anchor}"' not in pages[page]]


def test_what_is_folded_can_be_found_but_no_script(book, entries):
    """Folded cells and answers are found. The listing of a script is not: the page's cells have the same lines."""
    for page in CHAPTERS:
        texts = [text for name, _, _, *texts, _ in entries if name == page for text in texts]
        index = " ".join(re.findall(r"\w+", " ".join(texts)))
        html = (book.html / f"{page}.html").read_text(encoding="utf-8")
        for fold in re.findall(r"<details>(.*?)</details>", html, flags=re.S):
            sentences = re.findall(r"<p>([^<.:(]{20,})", fold)
            assert [sentence for sentence in sentences if words(sentence) not in index] == [], page
        for cell in json.loads((ROOT / f"{page}.ipynb").read_text(encoding="utf-8"))["cells"]:
            if "solution" in cell["metadata"].get("tags", []):
                names = re.findall(r"^def (\w{4,})", "".join(cell["source"]), flags=re.M)
                assert [name for name in names if name not in index] == [], f"{page}: not of a solution"
        script = (book.scripts / f"{page.split('/')[1]}.py").read_text(encoding="utf-8")
        title = words(script.splitlines()[0].removeprefix('r"""'))
        assert len(title.split()) > 3 and title not in index


# --- how it ranks -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def search(browser, book_url):
    """The book's first page, with the search opened."""
    page = open_page(browser, book_url, toc_files()[0], [])
    page.keyboard.press("Control+k")
    page.wait_for_function("window.MiniSearch && window.bookSearch && window.searchEntries")
    yield page
    page.close()


def test_ranking(search):
    texts = {
        "one": "alpha stands here",
        "two": "alpha and beta stand here",
        "three": "alpha, beta and gamma stand here",
        "name": "call all_gather, then reduce-scatter",
        "class": "a DistributedSampler",
        "many": "it has checkpoints",
    }
    expected = {
        "alpha beta gamma": ["three", "two", "one"],  # by how many words match
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
    queries = list(expected)
    rankings = search.evaluate(RANK, [list(texts), list(texts.values()), queries])
    assert dict(zip(queries, rankings, strict=True)) == expected


def test_questions_lead_to_every_page_and_are_answered(search, entries):
    """For 80 % of the questions the right section is first, for 97 % among the first three. None finds nothing."""
    questions = searches()
    assert len(questions) >= 60
    asked = {question.asked: (question.page, question.anchor) for question in QUESTIONS}

    misses, first = [], 0
    headings_alone = {(page, anchor) for page, anchor, _, text, code, _ in entries if not text and not code}
    typed = list(questions | asked)
    for question, results in zip(typed, search.evaluate(ANSWER, typed), strict=True):
        assert results, question
        top = [(result["page"].split("/")[1], result["headings"][-1]) for result in results[:FIRST]]
        if answers := questions.get(question):
            right = [page in answers and bool(re.search(answers[page], heading, re.I)) for page, heading in top]
        else:
            answers = asked[question]
            right = [(r["page"], slugify(r["headings"][-1])) == answers for r in results[:FIRST]]
        first += right[0]
        if not any(right):
            misses.append(f"{question}\n    expected {answers}\n    not      {top}")
        for result in results:
            place = result["page"], result["anchor"]
            assert result["sentence"] or place in headings_alone, f"{question}: no sentence of {place}"
    summary = "\n".join([f"first: {first} of {len(typed)}; not among the first {FIRST}: {len(misses)}", *misses])
    print(summary)  # pytest -rP shows it
    assert first >= 0.8 * len(typed) and len(misses) <= 0.03 * len(typed), summary


def first(search, *queries, places=1):
    """[(page, anchor) of the first results] of each query."""
    return [
        [(result["page"], result["anchor"]) for result in results[:places]]
        for results in search.evaluate(ANSWER, list(queries))
    ]


def test_an_error_message_leads_to_the_section_that_cures_it(search):
    """Alone, and inside what a terminal prints around it."""
    cures, section = {}, ""
    for line in (ROOT / "book" / "error_messages.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("    "):
            cures[line.strip()] = tuple(section.split("#"))
        elif not line.startswith("#"):
            section = line
    assert len(cures) > 20
    around = "Traceback (most recent call last): File train.py, line 41, in <module> RuntimeError: {} [rank 3 of 8]"
    for queries in (list(cures), [around.format(message) for message in cures]):
        found = [top[0] for top in first(search, *queries)]
        wrong = {query: place for query, place in zip(queries, found, strict=True) if place not in cures.values()}
        assert not wrong
        assert [top for top, right in zip(found, cures.values(), strict=True) if top != right] == []


def test_a_comparison_leads_to_the_decision_guide(search):
    guide = ("notebooks/decision_guide", "which-parallelism-do-i-need-and-in-which-order-do-i-apply-it")
    for top in first(search, "FSDP vs DDP", "DDP or FSDP", "pipeline parallel versus tensor parallel"):
        assert top == [guide]
    [[(page, _)]] = first(search, "gloo vs NCCL")
    assert page != guide[0]


def test_an_abbreviation_is_one_word(search):
    [lora, zero] = first(search, "LoRA", "ZeRO", places=20)
    assert not [page for page, _ in lora if page in ("book/glossary", "notebooks/environment_variables")]
    assert zero[0] == (f"notebooks/{find_notebook('06').stem}", "zero-on-one-page")


def test_a_heading_of_every_chapter_does_not_win_every_query(search):
    queries = ["GPUs", "how many GPUs", "two GPUs slower than one", "run on all GPUs", "Adam on 8 GPUs"]
    assert [top for top in first(search, *queries) if "take-it-to-your-gpus" in top[0][1]] == []


def test_a_lie_is_an_entry_and_comes_after_what_chapters_say(search, entries):
    lies = [headings[-1] for page, _, headings, *_ in entries if page == "book/sabotage" and len(headings) == 2]
    with (ROOT / "book" / "recorded" / "sabotage.csv").open() as file:
        rows = list(csv.reader(file))[1:]
    assert len(lies) == len(rows)
    assert max(len(text) for page, *_, text, _, _ in entries if page == "book/sabotage") < 2_500
    queries = ["all-reduce", "gradient accumulation", "sampler epoch", "checkpoint resume", "hang timeout"]
    assert not [page for top in first(search, *queries, places=3) for page, _ in top if page == "book/sabotage"]
    assert first(search, f"sabotage: {rows[0][0]}") == [[("book/sabotage", "lie-1")]]


def test_code_is_said_to_be_code(search):
    [results] = search.evaluate(ANSWER, ["parallelize_module ColwiseParallel"])
    texts = ["".join(text for text, _ in result["sentence"]) for result in results]
    assert [text for text in texts if re.fullmatch("in code: ColwiseParallel, (.*, )?parallelize_module", text)]


# --- how it is used ---------------------------------------------------------------------------------------------------


def type_query(page, query):
    """Type a query into the dialog; return the results."""
    page.keyboard.press("Control+k")
    page.keyboard.type(query)
    page.locator(f'dialog [role=listbox][data-query="{query}"]').wait_for()
    return page.locator("dialog [role=option]")


def choice(page):
    """The address of the result that Enter would open, by the attributes that a screen reader uses."""
    field = page.locator("dialog input[role=combobox]")
    return page.locator(f"#{field.get_attribute('aria-activedescendant')}[aria-selected=true]").evaluate("a => a.href")


def heading_is_seen(page):
    return page.wait_for_function("""() => {
        const heading = document.getElementById(decodeURIComponent(location.hash.slice(1)));
        const {top, bottom} = heading?.getBoundingClientRect() ?? {};  // none yet, while the page loads
        return top >= 0 && top < innerHeight && bottom > 0;
    }""")


@pytest.mark.parametrize("place", ["served", "in a folder"])
def test_search_works_from_the_keyboard(visit, book, book_url, place):
    """Ctrl+K opens the search, arrows move through the results, Enter opens one, Escape closes the search."""
    page = visit(toc_files()[0], book_url if place == "served" else book.html.as_uri())
    dialog = page.locator("#pst-search-dialog")
    hrefs = type_query(page, "gradient accumulation").evaluate_all("links => links.map(link => link.href)")
    choices = [choice(page)]
    for key in ["ArrowUp", "ArrowDown", "ArrowDown", "ArrowUp"]:
        page.keyboard.press(key)
        choices.append(choice(page))
    assert choices == [hrefs[k] for k in (0, 0, 1, 2, 1)]
    assert dialog.locator("input").evaluate("field => field === document.activeElement")
    page.keyboard.press("Enter")
    page.wait_for_url(hrefs[1])
    heading_is_seen(page)

    type_query(page, "gradient accumulation")
    for _ in range(2):  # the first Escape may only clear the field
        page.keyboard.press("Escape")
    assert not dialog.is_visible()
    type_query(page, "optimizer fully_shard")  # its results are on the open page, which is not loaded again
    page.keyboard.press("Enter")
    dialog.wait_for(state="hidden")
    heading_is_seen(page)


def test_search_loads_little_and_only_when_it_is_used(visit, book_url):
    page, replies = visit(CHAPTERS[0]), []
    page.wait_for_load_state("networkidle")
    page.on("response", lambda reply: replies.append(reply))  # playwright marks its handlers
    assert type_query(page, "how to run on 2 gpus").count() > FIRST
    sizes = {reply.url.rpartition("/")[2]: len(reply.body()) for reply in replies}
    sizes.pop("favicon.svg", None)  # which chromium may fetch again at any time
    assert set(sizes) == {"minisearch.js", "search_engine.js", "search_entries.js"}
    own = len(page.request.get(f"{book_url}/_static/search.js").body())
    assert sum(sizes.values()) + own <= 330_000, sizes


@pytest.mark.parametrize("place", ["dialog", "page"])
def test_results_are_legible_and_named(visit, book_url, place):
    """Axe finds nothing, light or dark, wide or narrow, and nothing scrolls sideways. A bookmark may have a query."""
    query = "find_unused_parameters set_model_state_dict"
    page = visit("search" if place == "page" else toc_files()[0])
    if place == "page":
        page.goto(f"{book_url}/search.html?q={query}")
        page.locator("main [role=option]").first.wait_for()
    else:
        type_query(page, query)
    problems = list(too_wide(page))
    for size in (WIDE, NARROW):
        page.set_viewport_size(size)
        problems += [f"{size} {problem}" for problem in seen_by_axe(page)]
    assert not problems, "\n".join(problems)
    wide = "lists => lists.filter(list => list.scrollWidth > list.clientWidth).length"
    assert not page.locator(".search-list:visible").evaluate_all(wide)
