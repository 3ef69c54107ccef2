"""``launch``: how it shows what the ranks print."""

import os
import subprocess
import sys
import time

import pytest
import torch.distributed as dist
from launching import nothing_left, warmed_up  # noqa: F401  (fixtures)

from helpers.ranks.launch import launch
from helpers.ranks.messages import fold, tidy

pytestmark = pytest.mark.ranks


def test_output_comes_in_rank_order_and_folded(capsys):
    def talk():
        rank = dist.get_rank()
        time.sleep(0.05 * (3 - rank))
        print("same on all")
        print(f"I am {rank}")
        print("on stderr", file=sys.stderr)
        os.write(1, b"from C\n")
        subprocess.run(["echo", "from a child"], check=True)
        print("größer → 火 🙂")
        os.write(1, b"\xff\xfe broken\n")
        print("no newline at the end", end="")

    launch(talk)
    assert capsys.readouterr().out.splitlines() == [
        "[ranks 0-3] same on all",
        "[rank 0] I am 0",
        "[rank 1] I am 1",
        "[rank 2] I am 2",
        "[rank 3] I am 3",
        "[ranks 0-3] on stderr",
        "[ranks 0-3] from C",
        "[ranks 0-3] from a child",
        "[ranks 0-3] größer → 火 🙂",
        "[ranks 0-3] \ufffd\ufffd broken",
        "[ranks 0-3] no newline at the end",
    ]


@pytest.mark.parametrize(
    ("output", "tidied"),
    [
        ("/var/x/ipykernel_77/123.py:3: UserWarning: careful\n", "notebook cell:3: UserWarning: careful\n"),
        ('  File "/var/x/ipykernel_77/123.py", line 3\n', '  File "notebook cell", line 3\n'),
        ("[rank0]:[W1120 23:56:46.832225602 reducer.cpp:1529] Warning", "[W reducer.cpp:1529] Warning"),
        ("a\n[E1120 23:56:46.83 gloo.cpp:67] lost", "a\n[E gloo.cpp:67] lost"),
        ("epoch 1: 0.93 [done]", "epoch 1: 0.93 [done]"),
    ],
    ids=["warning", "traceback", "torch", "torch without rank", "plain"],
)
def test_what_differs_from_run_to_run_is_not_shown(output, tidied):
    assert tidy(output) == tidied


@pytest.mark.parametrize(
    ("outputs", "lines"),
    [
        ([], []),
        (["a\nx\nb\n", "a\ny\nb\n"], ["[ranks 0-1] a", "[rank 0] x", "[rank 1] y", "[ranks 0-1] b"]),
        (["a\nb\n", "b\na\n"], ["[rank 0] a", "[ranks 0-1] b", "[rank 1] a"]),
        (["same", "same", "other", "same"], ["[ranks 0, 1, 3] same", "[rank 2] other"]),
        (["a\n\n\nb", "a\nb"], ["[ranks 0-1] a", "[rank 0]", "[rank 0]", "[ranks 0-1] b"]),
        (["  a\x0cb\u2028c\n"], ["[rank 0]   a\x0cb\u2028c"]),
    ],
)
def test_what_several_ranks_print_at_the_same_point_is_shown_once(outputs, lines):
    assert list(fold(outputs)) == lines
