"""How all tests run, the notebooks' cells included. What test files share is in tests/conftest.py and tests/support."""

import collections
import functools
import gc
import os
import sys

import nbval.kernel
import pytest
from ipc_kernels import SocketKernelManager

from helpers.export.facts import facts_at

gc.disable()  # imports and collection leave little garbage, and looking for it takes a fifth of their time

# All of them test the CPU's path. They share its cores: an OpenMP thread that waits must sleep, not spin.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_WAIT_POLICY"] = "passive"
if sys.version_info[:3] == (3, 13, 0):
    # PyTorch warns there, below each cell that compiles, that a later release of Python is faster.
    os.environ["PYTHONWARNINGS"] = "ignore:Guards may run slower on Python 3.13.0"

MARKS = {
    "ranks": "starts ranks: the notebooks' cells, process groups, scripts under torchrun, rehearsals",
    "slow": "builds the book, or tells lies and kills ranks many times; make test ALL=1 runs it",
    "system": "needs chromium, Slurm, or root for several hosts; make test ALL=1 runs it",
    "daily": "takes long, and seldom fails unless a shorter one fails too; .ci/run daily runs it",
}
UNMARKED = "no ranks"
BOOKS_SECONDS = 900  # for a test of the built book: it may build it, or wait until another worker has built it
LONGEST = ("test_browser", "test_fault_tolerance", "test_launch_files", "test_scripts", "test_slurm")


nbval.kernel.KernelManager = SocketKernelManager  # a free port may be taken before the kernel takes it


def pytest_addoption(parser):
    parser.addoption("--record-verified", action="store_true", help="write what passed to notebooks/verified.json")


def pytest_configure(config):
    for mark, text in MARKS.items():
        config.addinivalue_line("markers", f"{mark}: the test {text}")
    if "not ranks" in config.option.markexpr:  # no process can make a group now, so that a test without its mark fails
        os.environ["GLOO_DEVICE_TRANSPORT"] = "none"
    if config.getoption("record_verified", False) and not hasattr(
        config, "workerinput"
    ):  # one of pytest-xdist's workers has it
        from verified_run import VerifiedRun  # here, because `make sabotage` takes this file along without it

        config.pluginmanager.register(VerifiedRun(config.rootpath))


def mark_of(item):
    return next((mark for mark in reversed(MARKS) if item.get_closest_marker(mark)), UNMARKED)


def pytest_itemcollected(item):
    """Mark what a fixture or a file's kind tells."""
    needs = getattr(item, "fixturenames", ())
    if item.path.suffix == ".ipynb":
        item.add_marker("ranks")
    if "browser" in needs:
        item.add_marker("system")
    if "book" in needs:
        item.add_marker("slow")
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(BOOKS_SECONDS))
    item.user_properties.append(("mark", mark_of(item)))  # travels with the report from xdist's worker


@functools.cache
def is_long(path):
    """Whether a test file, or a notebook by what it says of itself, takes so long that it should start first."""
    return facts_at(path).longest if path.suffix == ".ipynb" else path.stem in LONGEST


def pytest_collection_modifyitems(items):
    """A file's tests stay on one worker, so let the long files start first; of the notebooks, the later ones are."""
    items.sort(key=lambda item: item.path.name, reverse=True)
    items.sort(key=lambda item: (not is_long(item.path), item.path.suffix != ".ipynb", mark_of(item) == UNMARKED))


def pytest_collection_finish():
    """From now on garbage is collected, but not looked for among the modules and tests that stay until the end."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.skipped and os.environ.get("CI") and item.get_closest_marker("system"):
        report.outcome, report.longrepr = "failed", f"Under CI: {report.longrepr[2]}"
    if report.failed and mark_of(item) == UNMARKED and "unsupported gloo device" in str(report.longrepr):
        report.sections.append(("A process group in a test without a mark", "Give it one: @pytest.mark.ranks"))
    return report


def pytest_terminal_summary(terminalreporter):
    """What ran, by mark, with the seconds of all workers together."""
    rows = collections.defaultdict(collections.Counter)
    for outcome in ("passed", "failed", "error", "skipped", ""):  # "" is a test's preparation and its end
        for report in terminalreporter.stats.get(outcome, []):
            row = rows[dict(getattr(report, "user_properties", [])).get("mark", UNMARKED)]
            row.update({outcome: 1, "seconds": getattr(report, "duration", 0)})
    terminalreporter.section("what ran")
    for mark, row in sorted(rows.items()):
        outcomes = [f"{row[name]} {name}" for name in ("passed", "failed", "error", "skipped") if row[name]]
        terminalreporter.line(f"{mark:10}{row['seconds']:7.1f} s   {', '.join(outcomes)}")
