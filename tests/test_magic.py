"""``%%ranks``: which names a cell needs, how its body runs on the ranks, and that nbval can compare it."""

import threading

import leftovers
import pytest

from helpers.ranks.launch import LaunchError
from helpers.ranks.magic import free_names, sendable

# --- the names that a cell reads --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cell, names",
    [
        ("# a comment", []),
        ("print(x)", ["print", "x"]),
        ("x = 1\nx", []),
        ("x = x + 1", ["x"]),
        ("x += 1", ["x"]),
        ("x = 0\nx += 1", []),
        ("x: int = y", ["int", "y"]),
        ("del x", []),
        ("import torch.distributed as dist\ndist.barrier(); torch", ["torch"]),
        ("from math import sqrt\nsqrt(n)", ["n"]),
        ("{i: j for i, j in pairs if i in members}", ["members", "pairs"]),
        ("list(i for i in items)\ni", ["items", "list", "i"]),
        ("(y := x) + y", ["x", "y"]),
        ("lambda a, b=c: a + b + d", ["c", "d"]),
        ("def f(a, b=c) -> r:\n    local = a + d\n    return local", ["c", "d", "r"]),
        ("def f():\n    x = 1\n    def g():\n        return x + deep\n    return g", ["deep"]),
        ("def f():\n    return later()\nf()", ["later"]),
        ("@wrap\ndef f(): pass\nf()", ["wrap"]),
        ("class A(Base, k=K):\n    y = z\n    def f(self):\n        return self.a + w", ["Base", "K", "w", "z"]),
        ("async def f():\n    await g()", ["g"]),
        ("def f():\n    global x\n    x = 1\nf()\nx", ["x"]),
        ("with a as b:\n    c = b\nc", ["a"]),
        ("for i in items:\n    last = i\nlast", ["items"]),
        ("try:\n    x = f()\nexcept E as e:\n    print(e)\nx", ["E", "f", "print", "x"]),
        ("match x:\n    case [y, z]:\n        y + k", ["k", "x"]),
        ("f'{x:{width}} {y!r}'", ["width", "x", "y"]),
        ("rank + local_rank + world_size", []),
        ("print(rank)\nrank = 3", ["print"]),
        ("x.y[i] = z", ["i", "x", "z"]),
        ("größe * 2", ["größe"]),
    ],
)
def test_free_names(cell, names):
    free = set.union(*free_names(cell))
    bound_in_part = {"last", "i", "y", "z", "e", "x", "b"}  # bound in a block: the notebook's values do no harm
    assert set(names) <= free <= {*names, *bound_in_part}


LOCK = threading.Lock()  # which cannot be sent


@pytest.mark.parametrize(
    ("cell", "names"),
    [
        ("for lock in range(2):\n    print(lock)", []),
        ("with open(path) as lock:\n    lock.read()", ["path"]),
        ("if path:\n    lock = 1\nlock", ["path"]),
        ("try:\n    f()\nexcept OSError as lock:\n    print(lock)", []),
        ("def f():\n    return lock\nlock = 1\nf()", []),
        ("def f():\n    global lock\n    lock = 1\nf()\nlock", []),
        ("if path:\n    path = 2\npath", ["path"]),  # what can be sent is
        ("del path", ["path"]),
    ],
)
def test_what_cannot_be_sent_is_not_asked_for_where_the_cell_replaces_it(cell, names):
    assert list(sendable({"lock": LOCK, "path": "here"}, cell)) == names


@pytest.mark.parametrize(
    "cell", ["lock", "lock.acquire()\nlock = 1", "lock = [lock]", "if x:\n    lock.acquire()\nlock = 1", "del lock"]
)
def test_what_cannot_be_sent_is_refused_where_the_cell_reads_it_first(cell):
    with pytest.raises(LaunchError, match="the notebook's 'lock' cannot be sent"):
        sendable({"lock": LOCK}, cell)


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ("x = 1\ny = = 2", "line 2 of the cell is not Python (invalid syntax): y = = 2"),
        ("!ls", "line 1 of the cell is not Python (invalid syntax): !ls"),
        ("if x:\npass", "line 2 of the cell is not Python"),
        ("print('a", "line 1 of the cell is not Python"),
    ],
)
def test_what_is_not_python_is_refused_with_its_line(cell, line):
    with pytest.raises(LaunchError) as refusal:
        free_names(cell)
    assert line in str(refusal.value) and len(str(refusal.value).splitlines()) == 2


# --- in a real kernel -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernel():
    with leftovers.surroundings() as environment:
        kernel = leftovers.Kernel(environment)
        try:
            reply, printed = kernel.run("%load_ext helpers\nimport torch\nimport torch.distributed as dist")
            assert (reply["status"], printed) == ("ok", "")
            yield kernel
        finally:
            kernel.close()


def run(kernel, *cells):
    """Run cells, each of which has to succeed; return what the last one printed."""
    for cell in cells:
        reply, printed = kernel.run(cell)
        assert reply["status"] == "ok", reply
    return printed


NOTEBOOKS_NAMES = """
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
PRINTS = {  # {what: (cells, what the last one prints)}
    "each rank runs the body": (
        ["%%ranks 2\nx = torch.ones(1) * (rank + 1)\ndist.all_reduce(x)\nprint(rank, local_rank, world_size)\nx"],
        "[rank 0] 0 0 2\n[rank 1] 1 1 2\n[ranks 0-1] tensor([3.])\n",
    ),
    "four, unless the line says otherwise": (["%%ranks\nworld_size"], "[ranks 0-3] 4\n"),
    "one rank": (["%%ranks 1\nworld_size"], "[rank 0] 1\n"),
    "its own names win": (
        ["rank, local_rank, world_size = 7, 7, 7", "%%ranks 2\n(rank, local_rank, world_size)"],
        "[rank 0] (0, 0, 2)\n[rank 1] (1, 1, 2)\n",
    ),
    "and stay there": (["rank = 7", "%%ranks 2\nrank = 8", "print(rank)"], "7\n"),
    "the notebook's names are there": (
        [NOTEBOOKS_NAMES, "%%ranks 2\n[net(torch.ones(1)).item() for _ in range(2)], twice(rank)"],
        "[rank 0] ([2.0, 2.0], 2)\n[rank 1] ([2.0, 2.0], 3)\n",
    ),
    "what it assigns stays in the ranks": (
        ["kept = 1", "%%ranks 2\nkept = 2\nnew = 3", "print(kept, 'new' in globals())"],
        "1 False\n",
    ),
    "its functions see its names": (
        ["%%ranks 2\nk = rank\ndef f():\n    return k + g()\ndef g():\n    return 10\nf()"],
        "[rank 0] 10\n[rank 1] 11\n",
    ),
    "a last expression": (["%%ranks 2\n'text'"], "[ranks 0-1] 'text'\n"),
    "without a value": (["%%ranks 2\nNone"], ""),
    "no expression": (["%%ranks 2\nx = 1"], ""),
    "nothing": (["%%ranks 2\n# nothing"], ""),
    "not the last": (["%%ranks 2\nif True:\n    'not the last expression'"], ""),
    "values are kept": (
        [
            "%%ranks 3 --into values\n@(lambda c: c)\nclass Mine:\n    rank = rank\ntorch.tensor([rank])",
            "print(values, [type(value).__name__ for value in values])",
        ],
        "[tensor([0]), tensor([1]), tensor([2])] ['Tensor', 'Tensor', 'Tensor']\n",
    ),
    "none, too": (["%%ranks 2 --into nothing\nx = 1", "print(nothing)"], "[None, None]\n"),
    "a name may be replaced or deleted": (
        [
            "import threading\nlock, x = threading.Lock(), 5",
            "%%ranks 2\nfor lock in [1]:\n    pass\ndel x\nlock, 'x' in globals()",
        ],
        "[ranks 0-1] (1, False)\n",
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("case", PRINTS)
def test_what_the_ranks_print(kernel, case):
    cells, printed = PRINTS[case]
    assert run(kernel, *cells) == printed


ERRORS = {  # {what: (cells, a part of the last one's error)}
    "raises": (
        ["%%ranks 2\nx = 1\nif rank == 1:\n    raise ValueError('no data')\ndist.barrier()"],
        "RankError: rank 1 failed first: ValueError: no data\n  at line 3: raise ValueError('no data')",
    ),
    "raises in a notebook's function": (
        ["def check(x):\n    y = x - 1\n    return 1 / y", "%%ranks 2\ncheck(rank)\ndist.barrier()"],
        "RankError: rank 1 failed first: ZeroDivisionError: division by zero\n  at line 3 of check: return 1 / y",
    ),
    "hangs": (
        ["%%ranks 2 --timeout 4\nif rank == 0:\n    dist.barrier()"],
        "RankError: 1 of 2 ranks still ran after timeout=4.0 s:\n"
        "  rank 0: at line 2: dist.barrier()\n  rank 1: finished",
    ),
    "needs what the cell before left": (
        ["%%ranks 2\nonly_there = 1", "%%ranks 2\nonly_there"],
        "NameError: name 'only_there' is not defined",
    ),
    "is not Python": (["%%ranks 2\nx = 1\n!ls"], "LaunchError: line 2 of the cell is not Python"),
    "no ranks": (["%%ranks 0\n1"], "LaunchError: nproc=0 is not a number of ranks between 1 and 64"),
    "no time": (["%%ranks 2 --timeout 0\n1"], "LaunchError: timeout is a number of seconds above 0"),
    "not a number": (["%%ranks many\n1"], "many"),
    "unknown option": (["%%ranks 2 --unknown\n1"], "--unknown"),
    "a lock": (
        ["import threading\nlock = threading.Lock()", "%%ranks 2\nlock"],
        "LaunchError: the notebook's 'lock' cannot be sent to the ranks",
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("case", ERRORS)
def test_what_fails_is_said_shortly(kernel, case):
    (*before, last), message = ERRORS[case]
    for cell in before:
        run(kernel, cell)
    reply, _ = kernel.run(last)
    lines = "\n".join(reply["traceback"]).splitlines()
    assert message in f"{reply['ename']}: {reply['evalue']}"
    assert not [line for line in lines if "helpers/" in line or "ipykernel" in line]
    assert len([line for line in lines if line.strip(" ~^")]) <= 12  # Python 3.13 underlines more of them
    assert case != "raises" or 'File "notebook cell", line 3, in <module>' in reply["traceback"][1]
