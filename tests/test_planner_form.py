"""The planner's form: by Python, by its widget, and in the page, where Pyodide must give the same numbers."""

import json
import math
import random
import shlex
import sys

import pytest

from helpers.planner import cluster, form, model

PAGE = "book/planner"
SEVENTY = {"model": "llama3-70b", "gpus": "128"}
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


def layouts(count):
    """So many random values of the form; about every fifth plan can be."""
    choose = random.Random(0).choice
    for _ in range(count):
        sizes = {name: choose("111248") for name in ("tp", "pp", "cp", "interleave", "micro_batch")}
        more = {"layers": choose(("", "", "48")), "seq": choose(("", "4096", "32768")), "ep": choose("1112")}
        words = {
            name: choose(form.INPUTS[name].choices) for name in ("zero", "recompute", "sequence_parallel", "dtype")
        }
        names = {"model": choose([*model.PRESETS]), "cluster": choose([*cluster.PRESETS])}
        counts = {"gpus": choose(("8", "64", "512", "12")), "batch": choose(("256", "1024", "1000"))}
        yield sizes | more | words | names | counts


def by_kind(planned, refused):
    """(values of so many plans, values of so many that cannot be)."""
    kinds = {True: [], False: []}
    for values in layouts(3000):
        kinds[bool(form.answer(values).numbers)].append(values)
        if len(kinds[True]) >= planned and len(kinds[False]) >= refused:
            return kinds[True][:planned], kinds[False][:refused]
    raise ValueError(f"only {len(kinds[True])} plans")


def flat(numbers, at=""):
    """{path: number or word} of nested tables."""
    if isinstance(numbers, dict | list):
        pairs = numbers.items() if isinstance(numbers, dict) else enumerate(numbers)
        return {path: value for name, inner in pairs for path, value in flat(inner, f"{at}/{name}").items()}
    return {at: numbers}


def differences(numbers, expected):
    """{path: (value, expected)} of what is not equal; floats may differ in their last digits."""
    paths = numbers.keys() | expected.keys()
    pairs = {path: (numbers.get(path, "missing"), expected.get(path, "missing")) for path in paths}
    return {path: pair for path, pair in pairs.items() if pair[0] != pair[1] and not close(*pair)}


def close(a, b):
    """JavaScript's JSON has no .0, so a whole float comes back as an int."""
    return {type(a), type(b)} <= {int, float} and float in (type(a), type(b)) and math.isclose(a, b, rel_tol=1e-12)


def through_json(answer):
    return json.loads(json.dumps({"html": answer.html, "numbers": answer.numbers, "sizes": answer.sizes}))


def test_the_command_under_a_plan_prints_the_same_numbers(helpers):
    planned, _ = by_kind(10, 0)
    for values in planned:
        status, out, _ = helpers(*shlex.split(form.ask(values).command)[3:], "--json")
        assert status == 0 and json.loads(out) == through_json(form.answer(values))["numbers"], values


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gpus": "x"}, "GPUs: &#x27;x&#x27;.</strong> Give a whole number from 1 on."),
        ({"gpus": "7", "tp": "2"}, "7 GPUs do not divide by tp x pp x cp = 2.</strong> Give a multiple of 2"),
        ({"model": "<b>"}, "&#x27;&lt;b&gt;&#x27; is not a model that the planner knows.</strong> Give one of gpt2,"),
        ({"cluster": "a100", "dtype": "float8"}, "Give one of bfloat16, float16, tf32, float32"),
        ({"layers": "0"}, "layers: &#x27;0&#x27;.</strong>"),
        ({"batch": "9" * 30}, "at most 1e+24"),
    ],
)
def test_what_cannot_be_is_said_with_the_next_step(values, words):
    answer = form.answer(values)
    assert words in answer.html and not answer.numbers


def test_the_fastest_layouts_can_be_taken_over():
    best = form.best(SEVENTY)
    first = best.html.partition('data-layout="')[2].partition('"')[0]
    values = SEVENTY | dict(field.split("=") for field in first.split(","))
    assert form.answer(values).numbers["step"]["seconds"] == best.numbers["ranked"][0]["seconds"]
    assert "no layout of llama3-405b fits." in form.best({"model": "llama3-405b", "gpus": "8"}).html


def test_a_widget_answers_as_the_page():
    from helpers.planner.widget import planner

    groups, answer, best = planner().children
    boxes = {box.description: box for group in groups.children for box in group.children[1:]}
    assert answer.value == form.answer({}).html
    boxes["preset"].value, boxes["GPUs"].value = SEVENTY.values()
    assert answer.value == form.answer(SEVENTY).html and best.value == form.best(SEVENTY).html


@pytest.mark.parametrize("layouts, refusals", [(30, 10), pytest.param(300, 50, marks=pytest.mark.daily)])
def test_in_the_browser_layouts_have_the_same_numbers(visit, layouts, refusals):
    planned, refused = by_kind(layouts, refusals)
    questions = [{"kind": "answer", "values": values} for values in planned + refused]
    questions += [{"kind": "best", "values": values} for values in ({}, SEVENTY, {"model": "qwen3-30b-a3b"})]
    answers = visit(PAGE).evaluate(ASK, questions)
    for question, answer in zip(questions, answers, strict=True):
        expected = through_json(getattr(form, question["kind"])(question["values"]))
        assert differences(flat(answer["numbers"]), flat(expected["numbers"])) == {}, question
        assert answer["sizes"] == expected["sizes"]
        if not expected["numbers"]:
            assert answer["html"] == expected["html"]


def answered(page, words):
    page.wait_for_function("words => document.querySelector('.planner-answer').textContent.includes(words)", arg=words)
    page.wait_for_function("document.querySelector('.planner-status').textContent == 'Planned in this page.'")


def test_the_page_answers_keeps_its_state_and_takes_a_layout_over(visit, book_url):
    page = visit(PAGE)
    assert (
        form.answer({}).html in page.content().replace("&#x27;", "'") or page.locator(".planner-answer .fits").count()
    )
    page.select_option("[name=model]", SEVENTY["model"])
    page.fill("[name=gpus]", SEVENTY["gpus"])
    answered(page, "--gpus=128")
    assert form.ask(SEVENTY).command == page.inner_text(".planner-answer pre")
    assert page.get_attribute("[name=layers]", "placeholder") == "80"
    assert page.url.endswith("#model=llama3-70b&gpus=128")

    page.click(".planner-best button[data-layout]")
    answered(page, "Fits")
    fastest = form.best(SEVENTY).numbers["ranked"][0]["layout"]
    assert page.input_value("[name=tp]") == str(fastest["tp"]) != "1"

    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click(".planner-answer .planner-copy")
    page.wait_for_function("document.querySelector('.planner-answer .planner-copy').textContent == 'copied'")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("| memory of a rank | GiB |\n| --- | --- |\n| parameters | ")

    page.fill("[name=gpus]", "x")
    answered(page, "Give a whole number")
    page.goto(f"{book_url}/{PAGE}.html?again#model=llama3-70b&gpus=256")
    answered(page, "--gpus=256")


def test_a_page_in_a_folder_says_what_to_do(context, book):
    page = context.new_page()
    page.goto((book.html / f"{PAGE}.html").as_uri())
    assert "Run make serve" in page.inner_text(".planner-status")
    assert "Fits" in page.inner_text(".planner-answer")
    page.close()


def test_without_npm_the_page_stays_still(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, "book/_ext"])
    import book_planner

    store = tmp_path / "store"
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho other >pyodide.tgz\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(OSError, match="is not the file that was tried"):
        book_planner.fetch(store)
    npm.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError):
        book_planner.fetch(store)
    assert not store.exists()
