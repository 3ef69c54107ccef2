"""``python -m helpers`` where its output goes nowhere, or cannot be written."""

import os
import subprocess
import sys

import pytest
from scripting import ROOT

LIST = ["list"]
PLAN = ["plan", "gpt2", "h100", "--layout", "dp=8"]
DOCTOR = ["doctor", "--nproc", "1", "--backend", "gloo"]
COMMANDS = [LIST, PLAN, pytest.param(DOCTOR, marks=pytest.mark.ranks)]


def run(words, output):
    """The finished process of a command that prints to a file."""
    command = [sys.executable, "-m", "helpers", *words]
    return subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True)


def test_closed_streams_are_quiet():
    """A shell starts the command with stdout and stderr closed."""
    command = [sys.executable, "-m", "helpers", *LIST]
    shell = ["bash", "-c", '"$@" 2>&- >&-', "bash", *command]
    done = subprocess.run(shell, cwd=ROOT, capture_output=True)
    assert done.returncode == 0
    assert done.stdout == b""
    assert done.stderr == b""


ENDED_BY_SIGPIPE = 128 + 13  # as a shell counts the end by a signal; SIGPIPE is number 13


@pytest.mark.parametrize("words", COMMANDS)
def test_a_pipe_whose_reader_has_left_is_quiet(words):
    reader, writer = os.pipe()
    os.close(reader)
    done = run(words, writer)
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode in (1, ENDED_BY_SIGPIPE)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")
@pytest.mark.parametrize("words", COMMANDS)
def test_a_full_output_is_a_line(words):
    with open("/dev/full", "w") as full:
        done = run(words, full)
    assert done.stderr == "error: the output cannot be written: No space left on device. Send it elsewhere.\n"
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("doctor --timeout soon", "'soon' is not a number of seconds above 0"),
        (
            "export 04 --nodes 99999999999999999999",
            "'99999999999999999999' is not a whole number from 1 to 1000000",
        ),
    ],
)
def test_an_argument_that_cannot_be_is_two_lines(helpers, words, message):
    status, _, errors = helpers(*words.split())
    assert status == 2
    assert message in errors
    assert errors.count("\n") == 2
