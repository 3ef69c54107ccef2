"""The code is plain: no exception is added to the list in plain_code_exceptions.txt, and each rule sees what breaks it.

An exported script has the code of its notebook's cells and of helpers/runtime, so the rules are applied to these. That
the export adds nothing which breaks a rule is tested here too.
"""

from collections import Counter

import plain_code
import pytest

from helpers.export import chapters
from helpers.export.notebook import read_notebook
from helpers.export.script import script_from_notebook

PLACE = "helpers/sample.py"


@pytest.fixture(scope="module")
def found():
    return plain_code.all_findings()


def test_no_code_breaks_a_rule_but_the_exceptions(found):
    messages = [finding.message for finding in plain_code.not_listed(found, plain_code.listed())]
    assert not messages, "\n\n".join([f"{len(messages)} statements break a rule:", *messages])


def test_an_exception_goes_when_its_code_is_plain(found):
    gone = plain_code.listed() - Counter(finding.exception for finding in found)
    command = "Take them out: python tests/support/plain_code.py --write"
    assert not gone, "\n".join(["The code does not break these rules any more.", command, *gone.elements()])


def test_a_script_breaks_a_rule_only_where_a_cell_or_the_runtime_does(found):
    in_sources = {what(finding) for finding in found if finding.place.startswith(("notebooks/", "helpers/runtime/"))}
    for path in chapters.chapters():
        script = script_from_notebook(read_notebook(path), path.stem)
        in_script = plain_code.findings(plain_code.Source(f"{path.stem}.py", script))
        messages = [finding.message for finding in in_script if what(finding) not in in_sources]
        assert not messages, "\n\n".join(messages)


def what(finding):
    """The rule and the code that breaks it. What is `lr` in a cell can be `args.lr` in its script."""
    return finding.rule.name, finding.code.replace("args.", "")


# --- the rules themselves ---------------------------------------------------------------------------------------------

ARITHMETIC, WALRUS, CONDITIONAL, PACKED = [rule.name for rule in plain_code.RULES]

BREAKS = {
    ARITHMETIC: [
        "total = base + extra * (rank == 0)",
        "half = size // (world_size > 1)",
        "share = total / (count or 1)",
        "text = f'{count} rank{\"s\" * (count != 1)}'",
        "tensors = [bias] * (not tied)",
        "count += isinstance(value, list)",
    ],
    WALRUS: [
        "share = divmod(size, ranks := count())",
        "names = sorted(match[1] for line in lines if (match := find(line)))",
    ],
    CONDITIONAL: [
        "name = 'first' if rank == 0 else 'last' if rank == last else 'inner'",
        "rows = [a if b else c for b in d] if e else []",
    ],
    PACKED: [
        "x, y, z = 1, 2, 3",
        "(a, b), (c, d) = (1, 2), (3, 4)",
        "a, b, c = b, c, 0",
    ],
}
PLAIN = [
    "total = base + extra",
    "if rank == 0 and not done:\n    total += extra",
    "mask = labels != -100\nloss = losses * mask",
    "correct = (guess == label).sum() + others",
    "if match := find(line):\n    print(match[1])",
    "call(a if b else c, d if e else f)",
    "a, b = 1, 2",
    "a, b, c = b, c, a",
    "a, b, c = read()",
    "sizes = 1, 2, 3",
]


def broken(code):
    return {finding.rule.name for finding in plain_code.findings(plain_code.Source(PLACE, code))}


@pytest.mark.parametrize("rule, code", [(rule, code) for rule, codes in BREAKS.items() for code in codes])
def test_a_rule_sees_what_breaks_it(rule, code):
    assert broken(code) == {rule}


@pytest.mark.parametrize("code", PLAIN)
def test_the_rules_let_plain_code_pass(code):
    assert broken(code) == set()


# --- the list of exceptions -------------------------------------------------------------------------------------------


def test_a_line_is_found_in_a_cell_with_a_magic():
    cell = '%%ranks 2\nif rank == 0:\n    text = (\n        "a" *\n        (rank > 1)\n    )'
    source = plain_code.Source("notebooks/a.ipynb#one", plain_code.python_of(cell))
    [finding] = plain_code.findings(source)
    assert finding.message.startswith(f'notebooks/a.ipynb#one:4: {ARITHMETIC}\n    "a" *\n')
    assert finding.exception == f'notebooks/a.ipynb#one: {ARITHMETIC}: text = ( "a" * (rank > 1) )'


def test_the_list_is_written_anew_and_says_what_changed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plain_code, "EXCEPTIONS", tmp_path / "exceptions.txt")
    plain_code.EXCEPTIONS.write_text(f"{plain_code.HEAD}gone.py: {PACKED}: a, b, c = 1, 2, 3\n")
    twice = list(plain_code.findings(plain_code.Source(PLACE, "n += x > 1\nm = 1\nn += x > 1")))
    assert plain_code.not_listed(twice, plain_code.listed()) == twice
    plain_code.write_exceptions(twice)
    exception = f"{PLACE}: {ARITHMETIC}: n += x > 1"
    assert capsys.readouterr().out.splitlines() == [
        f"added:   {exception}",
        f"added:   {exception}",
        f"removed: gone.py: {PACKED}: a, b, c = 1, 2, 3",
    ]
    assert plain_code.listed() == {exception: 2}
    assert plain_code.not_listed(twice, plain_code.listed()) == []
    assert plain_code.not_listed([*twice, twice[0]], plain_code.listed()) == [twice[0]]
