"""What the tests of ``launch`` share: a notebook's cell, a call that must fail, and a look at what is left."""

import itertools
import linecache
import sys
import textwrap
import time
from types import SimpleNamespace

import cloudpickle
import leftovers
import pytest
import torch

from helpers.ranks.launch import RankError, launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # importing it takes a rank a second
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc, cgroups or fork")
cell_numbers = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def warmed_up():
    """Start the forkserver, and use OpenMP in this process, as a notebook's kernel has done."""
    torch.set_num_threads(2)
    torch.ones(512, 512) @ torch.ones(512, 512)
    launch(lambda: torch.ones(512, 512).sum(), nproc=1)


@pytest.fixture(autouse=True)
def nothing_left(request, warmed_up):
    """Check that each test leaves this process as it was. The fixture of a test with a kernel checks the kernel."""
    if "kernel" in request.fixturenames:
        yield
    else:
        with leftovers.unchanged():
            yield


def cell(source):
    """Run source code as a cell of a notebook runs: in ``__main__``, from a file that exists only in linecache.

    Returns an object with the functions and values that the cell defines: ``cell("x = 1").x`` is 1. The cell need not
    import os, signal, sys, threading, time, torch and dist.
    """
    source = textwrap.dedent(source).lstrip()
    file = f"/somewhere/ipykernel_12345/{next(cell_numbers)}.py"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names = {"__name__": "__main__"}
    exec("import os, signal, sys, threading, time\nimport torch\nimport torch.distributed as dist", names)
    exec(compile(source, file, "exec"), names)
    return SimpleNamespace(**names)


class CallWhenUnpickled:
    """An object that calls ``function(*args)`` when it is unpickled, so in a rank when it gets its arguments."""

    def __init__(self, function, *args):
        self.function = function
        self.args = args

    def __reduce__(self):
        return self.function, self.args


def failure(fn, *args, timeout=600, **options):
    """Launch a function that has to fail, and return its RankError. Fails if that takes a minute or more."""
    start = time.monotonic()
    with pytest.raises(RankError) as raised:
        launch(fn, *args, timeout=timeout, **options)
    assert time.monotonic() - start < 60
    return raised.value
