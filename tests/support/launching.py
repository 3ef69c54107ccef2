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
cells = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def warmed_up():
    """Start the forkserver, and use OpenMP in this process, as a notebook's kernel has done."""
    torch.set_num_threads(2)
    torch.ones(512, 512) @ torch.ones(512, 512)
    launch(lambda: torch.ones(512, 512).sum(), nproc=1)


@pytest.fixture(autouse=True)
def nothing_left(request, warmed_up):
    """Check that each test leaves this process as it was; tests of a kernel check the kernel instead."""
    if "kernel" in request.fixturenames:
        yield
    else:
        with leftovers.unchanged():
            yield


def cell(source):
    """{name: value} after a cell with this source has run in ``__main__``, as a notebook's cells do."""
    source = textwrap.dedent(source).lstrip()
    file = f"/somewhere/ipykernel_12345/{next(cells)}.py"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names = {"__name__": "__main__"}
    exec("import os, signal, sys, threading, time\nimport torch\nimport torch.distributed as dist", names)
    exec(compile(source, file, "exec"), names)
    return SimpleNamespace(**names)


class Trap:
    """An object whose unpickling calls ``function(*args)``."""

    def __init__(self, function, *args):
        self.function = function
        self.args = args

    def __reduce__(self):
        return self.function, self.args


def failure(fn, *args, timeout=600, **options):
    """The RankError of a launch that has to fail. Its default timeout is ten minutes, which must not be reached."""
    start = time.monotonic()
    with pytest.raises(RankError) as refusal:
        launch(fn, *args, timeout=timeout, **options)
    assert time.monotonic() - start < 60
    return refusal.value
