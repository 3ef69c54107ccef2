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
# Beside other work a cell may take ten times as long. A cell that shows a hang has a timeout of its own.
os.environ["WORLD_SIZE_ONE_TIMEOUT"] = "300"
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
    is_worker_of_xdist = hasattr(config, "workerinput")
    if config.getoption("record_verified", False) and not is_worker_of_xdist:  # the main process hears of all tests
        from verified_run import VerifiedRun  # here, because `make sabotage` takes this file along without it

        config.pluginmanager.register(VerifiedRun(config.rootpath))


def mark_of(item):
    """The mark of a test. If it has several, the one that is further down in MARKS; if it has none, UNMARKED."""
    for mark in reversed(MARKS):
        if item.get_closest_marker(mark):
            return mark
    return UNMARKED


def pytest_itemcollected(item):
    """Give a test the marks that follow from its file and its fixtures: a cell starts ranks, for example."""
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
    if path.suffix == ".ipynb":
        return facts_at(path).longest
    return path.stem in LONGEST


def name_of_file(item):
    return item.path.name


def starts_late(item):
    """What tests are sorted by, in this order: whether they are not long, not of a notebook, and without a mark."""
    is_short = not is_long(item.path)
    is_no_notebook = item.path.suffix != ".ipynb"
    is_unmarked = mark_of(item) == UNMARKED
    return is_short, is_no_notebook, is_unmarked  # False is sorted before True


def pytest_collection_modifyitems(items):
    """Sort the tests so that long files start first, because all tests of a file stay on one worker.

    Among the notebooks, the last ones start first: later chapters take longer.
    """
    items.sort(key=name_of_file, reverse=True)
    items.sort(key=starts_late)


def pytest_collection_finish():
    """From now on, collect garbage again, but not among the modules and tests that exist now and stay until the end."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Fail a test that is skipped under CI, where nothing may be missing; explain a failure for want of a mark."""
    report = yield
    if report.skipped and os.environ.get("CI") and item.get_closest_marker("system"):
        _, _, reason = report.longrepr
        report.outcome = "failed"
        report.longrepr = f"Under CI: {reason}"
    if report.failed and mark_of(item) == UNMARKED and "unsupported gloo device" in str(report.longrepr):
        report.sections.append(("A process group in a test without a mark", "Give it one: @pytest.mark.ranks"))
    return report


def pytest_terminal_summary(terminalreporter):
    """Print a line for each mark: the seconds of all workers together, and how many tests passed, failed and so on."""
    outcomes = ["passed", "failed", "error", "skipped"]
    preparation_or_end = ""  # pytest's name for the outcome of what runs before and after a test
    seconds_by_mark = collections.Counter()
    counts_by_mark = collections.defaultdict(collections.Counter)  # {mark: {outcome: number of tests}}
    for outcome in [*outcomes, preparation_or_end]:
        for report in terminalreporter.stats.get(outcome, []):
            properties = dict(getattr(report, "user_properties", []))
            mark = properties.get("mark", UNMARKED)
            seconds_by_mark[mark] += getattr(report, "duration", 0)
            counts_by_mark[mark][outcome] += 1

    terminalreporter.section("what ran")
    for mark, counts in sorted(counts_by_mark.items()):
        counted = [f"{counts[outcome]} {outcome}" for outcome in outcomes if counts[outcome]]
        terminalreporter.line(f"{mark:10}{seconds_by_mark[mark]:7.1f} s   {', '.join(counted)}")
