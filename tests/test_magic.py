"""``%%ranks``: which names a cell needs, how its body runs on the ranks, and that nbval can compare it."""

import os
import sys
import threading

import leftovers
import nbformat
import pytest
from conftest import run_nbval
from ipc_kernels import SocketKernelManager
from nbclient import NotebookClient

from helpers.ranks.launch import LaunchError
from helpers.ranks.magic import free_names, sendable

# --- the names that a cell reads --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cell, names",
    [
        ("", []),
        ("# a comment", []),
        ("print(x)", ["print", "x"]),
        ("x", ["x"]),
        ("x = 1\nx", []),
        ("x = x + 1", ["x"]),
        ("x += 1", ["x"]),
        ("x = 0\nx += 1", []),
        ("x, y = 1, 2\nx + y + z", ["z"]),
        ("x: int = y", ["int", "y"]),
        ("del x", []),
        ("import torch\ntorch.ones(n)", ["n"]),
        ("import torch.distributed as dist\ndist.barrier(); torch", ["torch"]),
        ("from math import sqrt\nsqrt(n)", ["n"]),
        ("[i * k for i in items]", ["items", "k"]),
        ("{i: j for i, j in pairs if i in wanted}", ["pairs", "wanted"]),
        ("list(i for i in items)\ni", ["items", "list", "i"]),
        ("(y := x) + y", ["x", "y"]),
        ("lambda a, b=c: a + b + d", ["c", "d"]),
        ("def f(a, b=c) -> r:\n    local = a + d\n    return local", ["c", "d", "r"]),
        ("def f():\n    def g():\n        return deep\n    return g", ["deep"]),
        ("def f():\n    x = 1\n    def g():\n        return x\n    return g", []),
        ("def f():\n    return later()\nf()", ["later"]),
        ("@wrap\ndef f(): pass\nf()", ["wrap"]),
        ("class A(Base, k=K):\n    y = z\n    def f(self):\n        return self.a + w", ["Base", "K", "w", "z"]),
        ("class A: pass\nA()", []),
        ("async def f():\n    await g()", ["g"]),
        ("def f():\n    global x\n    x = 1\nf()\nx", ["x"]),
        ("with a as b:\n    c = b\nc", ["a"]),
        ("for i in items:\n    last = i\nlast", ["items"]),
        ("if rank == 0:\n    x = 1\nprint(x)", ["print", "x"]),
        ("try:\n    x = f()\nexcept E as e:\n    print(e)\nx", ["E", "f", "print", "x"]),
        ("while not done:\n    done = step()", ["done", "step"]),
        ("match x:\n    case [y, z]:\n        y + k", ["k", "x"]),
        ("f'{x:{width}} {y!r}'", ["width", "x", "y"]),
        ("rank + local_rank + world_size", []),
        ("print(rank)\nrank = 3", ["print"]),
        ("model.train()\nmodel.weight[i] = 0", ["i", "model"]),
        ("x.y = z", ["x", "z"]),
        ("x[0] += 1", ["x"]),
        ("assert x, message", ["message", "x"]),
        ("größe * 2", ["größe"]),
    ],
)
def test_free_names(cell, names):
    free = free_names(cell)
    free = free.required | free.replaced
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
    "cell, line",
    [
        ("x = 1\ny = = 2", "line 2 of the cell is not Python (invalid syntax): y = = 2"),
        ("!ls", "line 1 of the cell is not Python (invalid syntax): !ls"),
        ("x = 1\n%time x", "line 2 of the cell is not Python (invalid syntax): %time x"),
        ("if x:\npass", "line 2 of the cell is not Python"),
        ("print('a", "line 1 of the cell is not Python"),
    ],
)
def test_what_is_not_python_is_refused_with_its_line(cell, line):
    with pytest.raises(LaunchError) as caught:
        free_names(cell)
    assert line in str(caught.value) and len(str(caught.value).splitlines()) == 2


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


def error(kernel, cell):
    """Run a cell that has to fail; return (the error's name, its message, the traceback that is shown)."""
    reply, _ = kernel.run(cell)
    assert reply["status"] == "error"
    return reply["ename"], reply["evalue"], "\n".join(reply["traceback"])


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
    "four, unless told otherwise": (["%%ranks\nworld_size"], "[ranks 0-3] 4\n"),
    "one": (["%%ranks 1\nworld_size"], "[rank 0] 1\n"),
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


@pytest.mark.ranks
def test_state_does_not_pass_from_one_cell_to_the_next(kernel):
    run(kernel, "%%ranks 2\nonly_there = 1")
    assert "NameError: name 'only_there' is not defined" in error(kernel, "%%ranks 2\nonly_there")[1]


@pytest.mark.ranks
def test_failure_is_told_shortly(kernel):
    cell = "%%ranks 2\nx = 1\nif rank == 1:\n    raise ValueError('no data')\ndist.barrier()"
    name, message, shown = error(kernel, cell)
    assert name == "RankError"
    assert message == "rank 1 failed first: ValueError: no data\n  at line 3: raise ValueError('no data')"
    assert 'File "notebook cell", line 3, in <module>' in shown and "helpers/" not in shown


@pytest.mark.ranks
def test_failure_in_a_notebooks_function_names_its_line(kernel):
    run(kernel, "def check(x):\n    y = x - 1\n    return 1 / y")
    _, message, shown = error(kernel, "%%ranks 2\ncheck(rank)\ndist.barrier()")
    assert message == "rank 1 failed first: ZeroDivisionError: division by zero\n  at line 3 of check: return 1 / y"
    assert "check(rank)" in shown and "ipykernel" not in shown


@pytest.mark.ranks
def test_hang_is_told_with_its_line(kernel):
    name, message, _ = error(kernel, "%%ranks 2 --timeout 4\nif rank == 0:\n    dist.barrier()")
    assert (name, message) == (
        "RankError",
        "1 of 2 ranks still ran after timeout=4.0 s:\n  rank 0: at line 2: dist.barrier()\n  rank 1: finished",
    )


@pytest.mark.parametrize(
    "cell, name, message",
    [
        ("%%ranks 2\nx = = 1", "LaunchError", "line 1 of the cell is not Python"),
        ("%%ranks 2\nx = 1\n!ls", "LaunchError", "line 2 of the cell is not Python"),
        ("%%ranks 0\n1", "LaunchError", "nproc=0 is not between 1 and 64"),
        ("%%ranks 2 --timeout 0\n1", "LaunchError", "timeout is a number of seconds above 0"),
        ("%%ranks many\n1", "UsageError", "many"),
        ("%%ranks 2 --unknown\n1", "UsageError", "--unknown"),
        ("%%ranks 2\nlock", "LaunchError", "the notebook's 'lock' cannot be sent to the ranks"),
        (
            "%%ranks 2\nfrom helpers.ranks.launch import launch\nlaunch(int)",
            "RankError",
            "launch was called inside a rank",
        ),
    ],
)
@pytest.mark.ranks
def test_what_cannot_work_is_told_shortly(kernel, cell, name, message):
    run(kernel, "import threading\nlock = threading.Lock()")
    ename, evalue, shown = error(kernel, cell)
    assert ename == name and message in evalue
    assert len([line for line in shown.splitlines() if line.strip(" ~^")]) <= 12  # Python 3.13 underlines more of them


@pytest.mark.ranks
def test_extension_can_be_loaded_again(kernel):
    assert run(kernel, "%reload_ext helpers", "%%ranks 2\nworld_size") == "[ranks 0-1] 2\n"


@pytest.mark.ranks
def test_works_without_the_extensions_early_start(kernel):
    run(kernel, "import os, signal\nfrom multiprocessing.forkserver import _forkserver as server")
    run(kernel, "os.kill(server._forkserver_pid, signal.SIGKILL)")
    run(kernel, "import psutil, time\nkilled = psutil.Process(server._forkserver_pid)")
    run(kernel, "while killed.status() != psutil.STATUS_ZOMBIE:\n    time.sleep(0.05)")
    assert run(kernel, "%%ranks 2\nworld_size") == "[ranks 0-1] 2\n"


# --- under nbval ------------------------------------------------------------------------------------------------------

CELLS = [
    "%load_ext helpers",
    "import os, sys, torch\nimport torch.distributed as dist\nfrom helpers.ranks.launch import launch",
    "%%ranks 2\nx = torch.ones(2) * rank\ndist.all_reduce(x)\nx",
    "%%ranks 2\nprint('rank', rank, file=sys.stderr)\nos.write(1, b'from C\\n')",
    "launch(lambda: print('hello') or dist.get_rank(), nproc=3)",
]
FAILING = [
    "%%ranks 2\nif rank == 1:\n    os._exit(3)\ndist.barrier()",
    "%%ranks 2\nimport warnings\nwarnings.warn('careful')\nraise ValueError('no data')",
    "def step(x):\n    return x[5]\n\nlaunch(step, torch.ones(2), nproc=2)",
    "%%ranks 2 --timeout 4\nif rank == 1:\n    dist.barrier()",
]


@pytest.mark.ranks
def test_nbval_compares_ranks(tmp_path):
    """Two runs have equal outputs, and no output names this machine."""
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    cells += [nbformat.v4.new_code_cell(cell, metadata={"tags": ["raises-exception"]}) for cell in FAILING]
    notebook = NotebookClient(
        nbformat.v4.new_notebook(cells=cells),
        kernel_manager_class=SocketKernelManager,
        resources={"metadata": {"path": tmp_path}},
    ).execute()
    path = tmp_path / "ranks.ipynb"
    nbformat.write(notebook, path)
    compared = "".join(
        str({key: value for key, value in output.items() if key != "traceback"})
        for cell in notebook.cells
        for output in cell.outputs
    )
    assert "[ranks 0-1] tensor([1., 1.])" in compared and "[ranks 0-2] hello" in compared
    assert "rank 1 died first: ended by itself with exit code 3" in compared
    for private in (str(tmp_path), sys.prefix, "ipykernel_", os.path.expanduser("~") + os.sep, "pymp-"):
        assert private not in compared
    done = run_nbval(path, "-q")
    assert done.returncode == 0 and f"{len(cells)} passed" in done.stdout, done.stdout
