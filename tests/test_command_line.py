"""``python -m helpers`` where its output goes nowhere, or cannot be written."""

import os
import subprocess
import sys

import pytest
from scripting import ROOT

LIST = [sys.executable, "-m", "helpers", "list"]


def test_a_closed_output_is_quiet():
    done = subprocess.run(["bash", "-c", '"$@" >&-', "bash", *LIST], cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_pipe_whose_reader_has_left_is_quiet():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(LIST, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")
def test_a_full_output_is_a_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(LIST, cwd=ROOT, stdout=full, stderr=subprocess.PIPE)
    message = b"error: the output cannot be written: No space left on device. Send it elsewhere.\n"
    assert (done.returncode, done.stderr) == (1, message)


def test_a_timeout_that_cannot_be_is_two_lines(helpers):
    status, _, errors = helpers("doctor", "--timeout", "soon")
    assert status == 2
    assert "'soon' is not a number of seconds above 0" in errors
    assert errors.count("\n") == 2
