"""The planner's form: by Python, and in the page, where Pyodide must give the same answers."""

import shlex
import sys
from dataclasses import asdict

import pytest

from helpers.planner import form
from helpers.planner.widget import planner

PAGE = "book/planner"
# Inputs of the form. Together these questions set each input.
PLANNED = [
    {
        "model": "llama3-70b",
        "gpus": "128",
        "tp": "8",
        "pp": "4",
        "zero": "1",
        "interleave": "2",
        "sequence_parallel": "true",
    },
    {"model": "mixtral-8x7b", "ep": "8", "experts": "16", "active_experts": "4", "recompute": "full"},
    {"model": "llama3-8b", "seq": "32768", "cp": "4", "recompute": "sac", "dtype": "float8"},
    {"model": "palm-8b", "cluster": "tpu-v4", "shard": "4", "layers": "24", "recompute": "selective"},
    {"width": "2048", "heads": "16", "kv_heads": "4", "ffn": "5504", "vocab": "50000", "micro_batch": "4"},
    {"model": "pixels", "gpus": "1", "batch": "48", "zero": "0", "dtype": "float32"},
]
REFUSED = [  # inputs, and a part of the answer in HTML
    ({"gpus": "x"}, "GPUs: &#x27;x&#x27;.</strong> Give a whole number from 1 on."),
    ({"gpus": "7", "tp": "2"}, "7 GPUs do not divide by tp x pp x cp = 2.</strong> Give a multiple of 2"),
    ({"model": "<b>"}, "&#x27;&lt;b&gt;&#x27; is not a model that the planner knows.</strong> Give one of gpt2,"),
    ({"cluster": "a100", "dtype": "float8"}, "Give one of bfloat16, float16, tf32, float32"),
]


@pytest.mark.parametrize("values", PLANNED, ids=str)
def test_the_command_under_a_plan_prints_the_same_plan(values, helpers):
    command = shlex.split(form.ask(values).command)
    python, _, _, *arguments = command  # python -m helpers plan …
    assert python == "python"
    status, out, _ = helpers(*arguments)
    assert status == 0

    _, _, behind_label = out.partition("a step")
    seconds, unit, *_ = behind_label.split()
    assert f"a step: {seconds} {unit}" in form.answer(values).html


@pytest.mark.parametrize(("values", "words"), REFUSED)
def test_what_is_wrong_is_named_with_the_next_step(values, words):
    assert words in form.answer(values).html


def test_in_a_notebook_the_answer_follows_each_input():
    groups, answer, best = planner().children
    inputs = {}
    for group in groups.children:
        for box in group.children:
            inputs[box.description] = box

    inputs["GPUs"].value = "16"

    values = {**form.DEFAULTS, "gpus": "16"}
    assert answer.value == form.answer(values).html
    assert best.value == form.best(values).html


# --- In the browser ---------------------------------------------------------------------------------------------------

# A function of the page that asks the planner's worker each question in turn, and returns the answers.
ASK = """async questions => {
    const worker = new Worker(new URL('../_static/planner/worker.mjs', location.href), {type: 'module'});
    const answers = [];
    for (const question of questions) {
        const reply = new Promise(resolve => worker.onmessage = ({data}) => resolve(data));
        worker.postMessage(question);
        answers.push(await reply);
    }
    worker.terminate();
    return answers;
}"""


def test_the_page_answers_as_python_does(visit):
    questions = []
    expected = []

    def ask(kind, function, values):
        """Add a question for the page, and what the function of Python answers to it."""
        number = len(questions)
        questions.append({"kind": kind, "values": values, "number": number})
        expected.append({"kind": kind, "number": number, **asdict(function(values))})

    for values in PLANNED:
        ask("answer", form.answer, values)
    for values, _ in REFUSED:
        ask("answer", form.answer, values)
    ask("best", form.best, {"model": "gpt2", "gpus": "8", "batch": "64"})
    assert visit(PAGE).evaluate(ASK, questions) == expected


def test_a_change_during_a_ranking_is_answered_before_the_ranking_would_end(visit):
    """Until then, the answer to the old inputs is greyed. Thousands of layouts are ranked here, which takes seconds."""
    page = visit(PAGE)
    page.fill("[name=gpus]", "1024")
    page.wait_for_function("document.querySelector('.planner-status').textContent == 'Ranking all layouts …'")
    assert page.locator(".planner-best.planner-old").count() == 1
    page.fill("[name=gpus]", "0")
    page.wait_for_function("document.querySelector('.planner-answer').textContent.includes('Give a whole number')")
    wait_for_answer(page, "Give a whole number")
    assert page.inner_text(".planner-best") == ""
    assert page.locator(".planner-old").count() == 0


def wait_for_answer(page, words):
    """Wait until the page's answer has these words and the planner is at rest."""
    page.wait_for_function("words => document.querySelector('.planner-answer').textContent.includes(words)", arg=words)
    page.wait_for_function("document.querySelector('.planner-status').textContent == 'Planned in this page.'")


@pytest.fixture
def page_of_small_model(visit):
    """The page after a reader has chosen gpt2-xl on 8 GPUs, whose layouts are ranked quickly."""
    page = visit(PAGE)
    page.select_option("[name=model]", "gpt2-xl")
    page.fill("[name=gpus]", "8")
    wait_for_answer(page, "--gpus=8")
    return page


def test_the_page_plans_before_a_reader_changes_anything(visit):
    page = visit(PAGE)
    assert page.locator(".planner-answer .fits").count() == 1


def test_the_page_and_its_address_show_what_was_chosen(page_of_small_model, book_url):
    page = page_of_small_model
    command = form.ask({"model": "gpt2-xl", "gpus": "8"}).command
    assert page.inner_text(".planner-answer pre") == command
    assert page.get_attribute("[name=layers]", "placeholder") == "48"
    assert page.url.endswith("#model=gpt2-xl&gpus=8")

    page.goto(f"{book_url}/{PAGE}.html?again#model=gpt2-xl&gpus=16")  # "?again": so that the page is loaded anew
    wait_for_answer(page, "--gpus=16")


def test_a_layout_of_the_ranking_is_taken_over(page_of_small_model):
    page = page_of_small_model
    page.click(".planner-best button[data-layout]")
    micro_batch = page.input_value("[name=micro_batch]")
    assert micro_batch != "1"  # as it was before
    wait_for_answer(page, f"micro_batch={micro_batch}")


def test_the_table_of_memory_is_copied_as_markdown(page_of_small_model):
    page = page_of_small_model
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click(".planner-answer .planner-copy")
    page.wait_for_function("document.querySelector('.planner-answer .planner-copy').textContent == 'copied'")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("| memory of a rank | GiB |\n| --- | --- |\n| parameters | ")


def test_a_wrong_number_is_named_on_the_page(page_of_small_model):
    page = page_of_small_model
    page.fill("[name=gpus]", "x")
    wait_for_answer(page, "Give a whole number")


def test_a_page_in_a_folder_says_what_to_do(context, book):
    page = context.new_page()
    page.goto((book.html / f"{PAGE}.html").as_uri())
    assert "Run make serve" in page.inner_text(".planner-status")
    assert "of the 74.5 GiB of a GPU" in page.inner_text(".planner-answer")
    page.close()


def test_only_the_pyodide_that_was_tried_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, "book/_ext"])
    import book_planner

    store = tmp_path / "store"
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho other >pyodide.tgz\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(OSError, match="is not the file that was tried"):
        book_planner.fetch(store)
    assert not store.exists()
