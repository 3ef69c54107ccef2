"""``launch``: what is seen of a long call while it runs, and that a notebook's outputs have no trace of it."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import textwrap

import leftovers
import pytest
from conftest import ROOT
from launching import nothing_left, warmed_up  # noqa: F401  (fixtures)

from helpers.ranks.live import compose, is_jupyterlab, newest_line

pytestmark = pytest.mark.ranks

# A cell whose ranks print for some seconds, so that a person who watches sees live lines.
LONG_CELL = """
    import time
    import torch.distributed as dist
    from helpers.ranks.launch import launch

    def train(rank):
        for step in range(7):
            time.sleep(0.5)
            print(f"step {step}")
        print(f"rank {rank} has finished 火🙂")

    print("before", end=" ")
    results = launch(train, nproc=2)
"""
# What it prints if nobody watches, and what is left of it at the end if somebody does.
STEPS = "".join(f"[ranks 0-1] step {step}\n" for step in range(7))
STORED_OUTPUT = f"before {STEPS}[rank 0] rank 0 has finished 火🙂\n[rank 1] rank 1 has finished 火🙂\n"
METADATA_OF_JUPYTERLAB = {"deletedCells": [], "recordTiming": False, "cellId": "5f3c"}  # what it sends with a cell
LIVE_LINE = r"\d+ s  \[ranks? [01-]+\] step \d"  # such as "2 s  [ranks 0-1] step 3"

# --- the line ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("newest", "width", "expected"),
    [
        ({0: "step 3", 1: "step 3", 2: "step 2"}, 80, "5 s  [ranks 0-1] step 3  [rank 2] step 2"),
        ({1: "x" * 100}, 30, "5 s  [rank 1] xxxxxxxxxxxxxxx…"),
        ({0: "a🙂b\x07c"}, 80, "5 s  [rank 0] a?b?c"),
    ],
    ids=["ranks", "too long", "not printable"],
)
def test_the_line_names_the_ranks_and_is_cut_to_the_width(newest, width, expected):
    """``newest`` is the newest line of each rank, as {rank: line}."""
    line = compose(5.2, newest, width)
    assert line == expected
    assert len(line) <= width


def test_the_lines_of_many_ranks_fit():
    newest = {rank: f"line {rank} {'x' * 50}" for rank in range(8)}
    line = compose(5.2, newest, width=60)
    assert len(line) <= 60
    assert line.isprintable()


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("", ""),
        ("one\nunfinished", "unfinished"),
        ("10%|#   |\r50%|##  |\r", "50%|##  |"),
        ("\x1b[32mgreen\x1b[0m\n", "green"),
    ],
)
def test_the_newest_line_of_a_rank(tmp_path, output, line):
    (tmp_path / "output0").write_text(output)
    assert newest_line(tmp_path / "output0") == line


@pytest.mark.parametrize(
    ("allow_stdin", "metadata", "watched"),
    [
        (True, {"deletedCells": [], "cellId": "x"}, True),
        (False, {"deletedCells": [], "cellId": "x"}, False),  # nbclient and nbval
        (True, {"cellId": "x"}, False),  # another frontend
    ],
)
def test_only_jupyterlab_counts_as_a_person(allow_stdin, metadata, watched):
    assert is_jupyterlab({"content": {"allow_stdin": allow_stdin}, "metadata": metadata}) == watched


# --- a terminal -------------------------------------------------------------------------------------------------------


# What a terminal is told for a live line: erase to the line's end (K), save the cursor's place (7), do not wrap (?7l),
# the line, wrap again (?7h), and move the cursor back (8).
SHOWN_LINE = r"\x1b\[K\x1b7\x1b\[\?7l(.*?)\x1b\[\?7h\x1b8"
ERASE = r"\x1b\[K"


def written_to_a_terminal(command, folder, environment):
    """Run a command whose stdout is a terminal, and return all that it writes there, also the terminal's commands."""
    our_end, terminal = pty.openpty()
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=terminal)
    os.close(terminal)
    chunks = []
    with contextlib.suppress(OSError):  # at the end of a terminal, macOS gives nothing and Linux raises
        chunk = os.read(our_end, 65536)
        while chunk:
            chunks.append(chunk)
            chunk = os.read(our_end, 65536)
    os.close(our_end)
    assert process.wait() == 0
    return b"".join(chunks).decode()


def test_a_terminal_shows_the_newest_lines_and_then_what_a_pipe_gets(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(LONG_CELL))
    with leftovers.surroundings() as environment:
        environment.update(TERM="xterm", COLUMNS="80", PYTHONPATH=str(ROOT))
        text = written_to_a_terminal([sys.executable, "script.py"], tmp_path, environment)

    shown_lines = re.findall(SHOWN_LINE, text)
    assert len(shown_lines) >= 2
    for line in shown_lines[:2]:
        assert re.match(LIVE_LINE, line), shown_lines
    assert len(set(shown_lines)) == len(shown_lines), "a line that is shown already is not written again"

    # The cursor stays where each line began. So the last erasing from there to the line's end takes all of it away.
    left = re.sub(rf"({SHOWN_LINE})+{ERASE}", "", text)
    assert left.replace("\r\n", "\n") == STORED_OUTPUT


# --- notebooks --------------------------------------------------------------------------------------------------------


def jupyterlabs_text(texts):
    """The text that JupyterLab keeps of a stream that it gets in these pieces: a "\\b" deletes the last character.

    This is what processText does in packages/outputarea/src/model.ts of JupyterLab 4.6.
    """
    text = ""
    cursor = 0
    for character in "".join(texts):
        if character == "\b":
            if cursor > 0 and text[cursor - 1] != "\n":
                cursor -= 1
                text = text[:cursor] + text[cursor + 1 :]
        elif character == "\n":
            text += "\n"
            cursor = len(text)
        else:
            text = text[:cursor] + character + text[cursor + 1 :]
            cursor += 1
    return text


@pytest.fixture(scope="module")
def kernel():
    with leftovers.own_kernel() as kernel:
        yield kernel


def run_as(kernel, source, allow_stdin, metadata):
    """Run a cell as a frontend does, which sends this metadata with it. Returns the pieces of its stdout as a list.

    ``allow_stdin`` says whether somebody could answer a question of the cell. Fails if the cell also sends anything
    that is no text, such as a picture.
    """
    content = {
        "code": textwrap.dedent(source),
        "silent": False,
        "store_history": True,
        "user_expressions": {},
        "allow_stdin": allow_stdin,
        "stop_on_error": False,
    }
    client = kernel.client
    request = client.session.msg("execute_request", content, metadata=metadata)
    client.shell_channel.send(request)
    texts = []
    while True:
        message = client.get_iopub_msg(timeout=300)
        if message["parent_header"].get("msg_id") != request["header"]["msg_id"]:
            continue
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            break
        if message["msg_type"] in ("display_data", "update_display_data", "clear_output"):
            raise AssertionError(f"the cell also sent {json.dumps(message['content'])}")
        if message["msg_type"] == "stream":
            texts.append(message["content"]["text"])
    client.get_shell_msg(timeout=300)
    return texts


def test_jupyterlab_shows_the_newest_lines_and_stores_none_of_them(kernel):
    texts = run_as(kernel, LONG_CELL, allow_stdin=True, metadata=METADATA_OF_JUPYTERLAB)
    live_lines = re.findall(LIVE_LINE, "".join(texts))
    assert len(live_lines) >= 2, texts
    assert jupyterlabs_text(texts) == STORED_OUTPUT


def test_nbclient_and_nbval_get_no_trace_of_it(kernel):
    """They tell the kernel that nobody can answer a question. A busy kernel may send a stream in several messages."""
    texts = run_as(kernel, LONG_CELL, allow_stdin=False, metadata={})
    assert "".join(texts) == STORED_OUTPUT
