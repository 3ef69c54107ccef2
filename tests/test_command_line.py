"""``python -m helpers`` where its output goes nowhere, or cannot be written."""

import subprocess
import sys

import pytest
from scripting import ROOT


@pytest.mark.parametrize(
    ("redirection", "status", "errors"),
    [
        (">&-", 0, ""),
        ("2>&- >&-", 0, ""),
        ("| true", 141, ""),
        (">/dev/full", 1, "error: the output cannot be written: No space left on device.\n"),
    ],
)
def test_an_output_that_is_closed_or_full_is_quiet_or_a_line(redirection, status, errors):
    if "full" in redirection and not sys.platform.startswith("linux"):
        pytest.skip("/dev/full is Linux's")
    command = f"'{sys.executable}' -m helpers list {redirection}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (status, errors)


def test_wrong_usage_is_two_lines(helpers):
    status, _, errors = helpers("run", "04", "--lr", "1")
    assert status == 2
    assert errors == "error: put two dashes before the script's flags: -- --lr 1\nSee python -m helpers run --help.\n"
    status, _, errors = helpers("doctor", "--timeout", "soon")
    assert status == 2
    assert "'soon' is not a number of seconds above 0" in errors
    assert errors.count("\n") == 2
