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
LONG = """
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
STEPS = "".join(f"[ranks 0-1] step {step}\n" for step in range(7))
STORED = f"before {STEPS}[rank 0] rank 0 has finished 火🙂\n[rank 1] rank 1 has finished 火🙂\n"
JUPYTERLAB = {"deletedCells": [], "recordTiming": False, "cellId": "5f3c"}  # what it sends with a cell
LIVE = r"\d+ s  \[ranks? [01-]+\] step \d"

# --- the line ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("newest", "width", "line"),
    [
        ({0: "step 3", 1: "step 3", 2: "step 2"}, 80, "5 s  [ranks 0-1] step 3  [rank 2] step 2"),
        ({1: "x" * 100}, 30, "5 s  [rank 1] xxxxxxxxxxxxxxx…"),
        ({0: "a🙂b\x07c"}, 80, "5 s  [rank 0] a?b?c"),
        ({rank: f"line {rank} {'x' * 50}" for rank in range(8)}, 60, None),
    ],
)
def test_the_line_fits_and_names_the_ranks(newest, width, line):
    composed = compose(5.2, newest, width)
    assert len(composed) <= width and composed.isprintable()
    assert line is None or composed == line


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


def test_a_terminal_shows_the_newest_lines_and_then_what_a_pipe_gets(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(LONG))
    with leftovers.surroundings() as environment:
        parent, child = pty.openpty()
        environment.update(TERM="xterm", COLUMNS="80", PYTHONPATH=str(ROOT))
        process = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, env=environment, stdout=child)
        os.close(child)
        written = b""
        with contextlib.suppress(OSError):  # at the end of a terminal, macOS gives nothing and Linux raises
            while chunk := os.read(parent, 65536):
                written += chunk
        os.close(parent)
        assert process.wait() == 0
    text = written.decode()
    shown = re.findall(r"\x1b\[K\x1b7\x1b\[\?7l(.*?)\x1b\[\?7h\x1b8", text)
    assert len(shown) >= 2 and all(re.fullmatch(LIVE + r".*", line) for line in shown[:2]), shown
    assert len(set(shown)) == len(shown)
    # The cursor stays where each line began. So the last erasing from there to the line's end takes all of it away.
    left = re.sub(r"(\x1b\[K\x1b7\x1b\[\?7l.*?\x1b\[\?7h\x1b8)+\x1b\[K", "", text)
    assert left.replace("\r\n", "\n") == STORED


# --- notebooks --------------------------------------------------------------------------------------------------------


def jupyterlabs_text(texts):
    """The text that JupyterLab 4.6 keeps of a stream (processText of its packages/outputarea/src/model.ts)."""
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
    """The texts of stdout that a frontend gets of a cell; the frontend sends this metadata with the cell."""
    content = {"code": textwrap.dedent(source), "silent": False, "store_history": True, "user_expressions": {}}
    content |= {"allow_stdin": allow_stdin, "stop_on_error": False}
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
    texts = run_as(kernel, LONG, allow_stdin=True, metadata=JUPYTERLAB)
    assert len(re.findall(LIVE, "".join(texts))) >= 2, texts
    assert jupyterlabs_text(texts) == STORED


def test_nbclient_and_nbval_get_no_trace_of_it(kernel):
    """They tell the kernel that nobody can answer a question. A busy kernel may send a stream in several messages."""
    assert "".join(run_as(kernel, LONG, allow_stdin=False, metadata={})) == STORED
