"""``%%ranks``: which names a cell needs, how its body runs on the ranks, and that nbval can compare it."""

import re
import threading

import leftovers
import pytest
from conftest import ROOT

from helpers.ranks.launch import LaunchError
from helpers.ranks.magic import free_names, sendable

# --- the names that a cell reads --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "names"),
    [
        ("x = 1\nx", []),
        ("x = x + 1", ["x"]),
        ("import torch.distributed as dist\ndist.barrier(); torch", ["torch"]),
        ("{i: j for i, j in pairs if i in members}", ["members", "pairs"]),
        ("lambda a, b=c: a + b + d", ["c", "d"]),
        ("def f():\n    x = 1\n    def g():\n        return x + deep\n    return g", ["deep"]),
        ("@wrap\ndef f(a, b=c) -> r: pass\nf()", ["c", "r", "wrap"]),
        ("class A(Base, k=K):\n    y = z\n    def f(self):\n        return self.a + w", ["Base", "K", "w", "z"]),
        ("with a as b:\n    c = b\nc", ["a", "b"]),
        ("try:\n    x = f()\nexcept E as e:\n    print(e)\nx", ["E", "e", "f", "print", "x"]),
        ("rank + local_rank + world_size", []),
    ],
)
def test_names_that_a_cell_needs_or_may_replace(cell, names):
    """The names of the notebook that a cell may read, so that they are sent to the ranks with it.

    Not among them are names that the cell always assigns first, attributes, and those that each rank has of its own.
    """
    free = free_names(cell)
    assert sorted(free.required | free.optional) == names


LOCK = threading.Lock()  # it cannot be sent to a rank


@pytest.mark.parametrize(
    ("cell", "sent_names"),
    [
        ("for lock in range(2):\n    print(lock)", []),
        ("with open(path) as lock:\n    lock.read()", ["path"]),
        ("if path:\n    lock = 1\nlock", ["path"]),
        ("def f():\n    global lock\n    lock = 1\nf()\nlock", []),
    ],
)
def test_what_cannot_be_sent_is_not_asked_for_where_the_cell_replaces_it(cell, sent_names):
    values_of_the_notebook = {"lock": LOCK, "path": "here"}
    sent = sendable(values_of_the_notebook, cell)
    assert list(sent) == sent_names


@pytest.mark.parametrize(
    "cell", ["lock", "lock.acquire()\nlock = 1", "lock = [lock]", "if x:\n    lock.acquire()\nlock = 1", "del lock"]
)
def test_what_cannot_be_sent_is_refused_where_the_cell_reads_it_first(cell):
    with pytest.raises(LaunchError, match="the notebook's 'lock' cannot be sent"):
        sendable({"lock": LOCK}, cell)


def test_what_is_not_python_is_refused_with_its_line():
    with pytest.raises(LaunchError) as raised:
        free_names("!ls")
    assert "line 1 of the cell is not Python (invalid syntax): !ls" in str(raised.value)


# --- in a real kernel -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernel():
    with leftovers.own_kernel() as kernel:
        run(kernel, "%load_ext helpers\nimport torch\nimport torch.distributed as dist")
        yield kernel


def run(kernel, *cells):
    """Run cells, each of which has to succeed. Returns what the last one printed."""
    for cell in cells:
        reply, printed = kernel.run(cell)
        assert reply["status"] == "ok", reply
    return printed


# A cell that defines what the cells of ranks then use.
DEFINITIONS = """
scale = torch.tensor([2.0])

class Net(torch.nn.Module):
    def forward(self, x):
        return scale * x

def twice(x):
    return helper(helper(x))

def helper(x):
    return x + 1

net = Net()
"""
# {what is shown: (cells, what the last of them prints)}
PRINTS = {
    "each rank runs the body": (
        ["%%ranks 2\nx = torch.ones(1) * (rank + 1)\ndist.all_reduce(x)\nprint(rank, local_rank, world_size)\nx"],
        "[rank 0] 0 0 2\n[rank 1] 1 1 2\n[ranks 0-1] tensor([3.])\n",
    ),
    "its own names win, on four ranks unless the line says otherwise": (
        ["rank, local_rank, world_size = 7, 7, 7", "%%ranks\nrank == local_rank, world_size"],
        "[ranks 0-3] (True, 4)\n",
    ),
    "the notebook's names are there": (
        [DEFINITIONS, "%%ranks 2\n[net(torch.ones(1)).item() for _ in range(2)], twice(rank)"],
        "[rank 0] ([2.0, 2.0], 2)\n[rank 1] ([2.0, 2.0], 3)\n",
    ),
    "values are kept": (
        ["%%ranks 2 --into values\nNone if rank else torch.tensor([7])", "print(values)"],
        "[tensor([7]), None]\n",
    ),
    "what it assigns does not stay": (
        ["kept = 1", "%%ranks 2\nkept = 2", "print(kept)"],
        "1\n",
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("case", PRINTS)
def test_what_the_ranks_print(kernel, case):
    cells, printed = PRINTS[case]
    assert run(kernel, *cells) == printed


@pytest.mark.ranks
def test_the_examples_of_how_to_run_it_give_what_it_says(kernel):
    """The page has an example with launch, and the same with %%ranks. A comment and a sentence give the result."""
    page = (ROOT / "book" / "how_to_run.md").read_text(encoding="utf-8")
    with_launch, with_ranks, _ = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)

    # The first one ends with the line "launch(add, 1.0, nproc=4)  # [10.0, 10.0, 10.0, 10.0]".
    *definition, last_line = with_launch.removeprefix("%load_ext helpers\n").splitlines()
    call, result = last_line.split("  # ")
    run(kernel, "\n".join(definition))
    assert run(kernel, f"print({call})") == f"{result}\n"

    run(kernel, with_ranks)
    assert run(kernel, "print(totals)") == f"{result}\n"
    assert f"here `{result}`" in page


# {what happens: (cells, a part of the last one's error)}
ERRORS = {
    "raises": (
        ["%%ranks 2\nx = 1\nif rank == 1:\n    raise ValueError('no data')\ndist.barrier()"],
        "RankError: rank 1 failed first: ValueError: no data\n  at line 3: raise ValueError('no data')",
    ),
    "hangs": (
        ["%%ranks 2 --timeout 6\nif rank == 0:\n    dist.barrier()"],
        "RankError: 1 of 2 ranks still ran after timeout=6 s:\n  rank 0: at line 2: dist.barrier()\n  rank 1: finished",
    ),
    "a lock": (
        ["import threading\nlock = threading.Lock()", "%%ranks 2\nlock"],
        "LaunchError: the notebook's 'lock' cannot be sent to the ranks",
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("case", ERRORS)
def test_what_fails_is_said_shortly(kernel, case):
    """The error has at most twelve lines, and none is about files of this project or of IPython."""
    (*first_cells, last_cell), message = ERRORS[case]
    for cell in first_cells:
        run(kernel, cell)
    reply, _ = kernel.run(last_cell)

    assert message in f"{reply['ename']}: {reply['evalue']}"
    traceback = "\n".join(reply["traceback"])
    assert "helpers/" not in traceback
    assert "ipykernel" not in traceback
    lines = [line for line in traceback.splitlines() if line.strip(" ~^")]  # without underlines and empty lines
    assert len(lines) <= 12
    if case == "raises":
        assert 'File "notebook cell", line 3, in <module>' in reply["traceback"][1]
