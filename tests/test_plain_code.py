"""The code is plain: no exception is added to the list in plain_code_exceptions.txt, and each rule sees what breaks it.

An exported script has the code of its notebook's cells and of helpers/runtime, so the rules are applied to these.
"""

import plain_code
import pytest

PLACE = "helpers/sample.py"


@pytest.fixture(scope="module")
def found():
    return plain_code.all_findings()


def test_no_code_breaks_a_rule_but_the_exceptions(found):
    new = plain_code.exceptions_of(found) - plain_code.listed()
    messages = [finding.message for finding in found if finding.exception in new]
    assert not messages, "\n\n".join([f"{len(messages)} statements break a rule:", *messages])


def test_an_exception_goes_when_its_code_is_plain(found):
    gone = plain_code.listed() - plain_code.exceptions_of(found)
    command = "Take them out: python tests/support/plain_code.py --write"
    assert not gone, "\n".join(["The code does not break these rules any more.", command, *gone.elements()])


# --- the rules themselves ---------------------------------------------------------------------------------------------

BREAKS = {
    "arithmetic with a condition": "total = base + extra * (rank == 0)",
    ":= in a call's arguments": "share = divmod(size, ranks := count())",
    "conditional expression inside another": "name = 'first' if rank == 0 else 'last' if rank == last else 'inner'",
    "more than two values in one assignment": "x, y, z = 1, 2, 3",
}
PLAIN = """\
if rank == 0 and not done:
    total += extra
correct = (guess == label).sum() + others
call(a if b else c, d if e else f)
a, b, c = b, c, a
a, b, c = read()
"""


def rules_broken_by(code):
    return [finding.rule.name for finding in plain_code.findings(plain_code.Source(PLACE, code))]


def test_each_rule_sees_what_breaks_it_and_lets_plain_code_pass():
    for rule, code in BREAKS.items():
        assert rules_broken_by(code) == [rule]
    assert rules_broken_by(PLAIN) == []


def test_a_message_names_the_line_of_a_cell_and_shows_the_plain_form():
    cell = '%%ranks 2\nif rank == 0:\n    text = (\n        "a" *\n        (rank > 1)\n    )'
    source = plain_code.Source("notebooks/a.ipynb#one", plain_code.python_of(cell))
    [finding] = plain_code.findings(source)
    assert finding.message.startswith('notebooks/a.ipynb#one:4: arithmetic with a condition\n    "a" *\n')
    assert "lines += extra" in finding.message
