"""How all tests run, the notebooks' cells included. What test files share is in tests/conftest.py."""

import collections
import gc
import json
import os
import tempfile
import uuid
from pathlib import Path

import nbval.kernel
import pytest
from jupyter_client.manager import KernelManager
from xdist.scheduler import LoadFileScheduling

gc.disable()  # imports and collection leave little garbage, and looking for it takes a fifth of their time

# All of them test the CPU's path. They share its cores: an OpenMP thread that waits must sleep, not spin.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_WAIT_POLICY"] = "passive"


def kernel_manager(**options):
    """A notebook's kernel that listens on sockets in a folder.

    jupyter_client looks for five free ports, and the kernel takes them later. Meanwhile the ranks of other tests take
    ports all the time, and a kernel that finds one taken dies. tests/support/ipc_kernels.py has the same for nbclient.
    """
    address = Path(tempfile.gettempdir(), f"kernel-{uuid.uuid4().hex[:12]}")
    return KernelManager(transport="ipc", ip=str(address), **options)


nbval.kernel.KernelManager = kernel_manager


# What a test needs, by its mark. A notebook's cells and tests with the fixture `browser` or `book` get theirs here.
KINDS = {
    "cells": "notebooks' cells",
    "scripts": "scripts under torchrun",
    "rehearsals": "rehearsals on pretended GPUs",
    "ranks": "process groups",
    "pages": "the built book",
    "browsers": "pages in a browser",
    "hosts": "several hosts",
    "slurm": "a Slurm cluster",
    "harnesses": "lies and many kills",
}
OTHER = "everything else"
FROM_SYSTEM = ("browsers", "hosts", "slurm")  # what they need is not a Python package
LONG = ("pages", *FROM_SYSTEM, "harnesses")  # a third of the time, for what seldom breaks alone
QUICK = ("pages", OTHER)
LEFT_OUT = "not in make test, for its ten minutes. To run these too: make test ALL=1"
DURATIONS = Path(__file__).parent / "tests" / "durations.json"  # seconds of each file
BOOKS_SECONDS = 900  # for a test of the built book: it may build it, or wait until another worker has built it
APART = ("test_fault_tolerance.py", "test_scripts.py")  # long files whose tests share nothing: each goes to any worker


def pytest_addoption(parser):
    group = parser.getgroup("this project")
    group.addoption("--quick", action="store_true", help="leave out what starts ranks, browsers or clusters")
    group.addoption("--short", action="store_true", help="skip " + ", ".join(KINDS[kind] for kind in LONG))
    group.addoption("--record-durations", action="store_true", help=f"write {DURATIONS.name}, by which files start")


def pytest_configure(config):
    for kind, text in KINDS.items():
        config.addinivalue_line("markers", f"{kind}: the test needs {text}")
    if config.option.quick:  # no process can make a group now, so that a test without its mark fails
        os.environ["GLOO_DEVICE_TRANSPORT"] = "none"


def kind_of(item):
    return next((kind for kind in KINDS if item.get_closest_marker(kind)), OTHER)


@pytest.hookimpl(tryfirst=True)  # before pytest's own -m
def pytest_collection_modifyitems(config, items):
    """Give each test its kind, and let the longest files start first: one that came last would run alone."""
    for item in items:
        if "book" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(BOOKS_SECONDS))
        if item.path.suffix == ".ipynb":
            item.add_marker("cells")
        elif "browser" in item.fixturenames:
            item.add_marker("browsers")
        elif "book" in item.fixturenames:
            item.add_marker("pages")
        item.user_properties.append(("kind", kind_of(item)))  # travels with the report from xdist's worker
    if config.option.quick:
        config.hook.pytest_deselected(items=[item for item in items if kind_of(item) not in QUICK])
        items[:] = [item for item in items if kind_of(item) in QUICK]
    if config.option.short:
        for item in items:
            if kind_of(item) in LONG:
                item.add_marker(pytest.mark.skip(reason=LEFT_OUT))
    seconds = json.loads(DURATIONS.read_text())
    counts = collections.Counter(item.path.name for item in items)
    seconds |= {name: seconds[name] / counts[name] for name in APART if counts[name]}
    items.sort(key=lambda item: -seconds.get(item.path.name, 1000))  # a new file goes first


class Scheduling(LoadFileScheduling):
    """A file's tests go to one worker, in order, except those of APART."""

    def _split_scope(self, nodeid):
        file = super()._split_scope(nodeid)
        return nodeid if Path(file).name in APART else file


@pytest.hookimpl(optionalhook=True)  # -p no:xdist leaves the hook out
def pytest_xdist_make_scheduler(config, log):
    return Scheduling(config, log) if config.option.dist == "loadfile" else None


def pytest_collection_finish():
    """From now on garbage is collected, but not looked for among the modules and tests that stay until the end."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.skipped and os.environ.get("CI") and kind_of(item) in FROM_SYSTEM:
        report.outcome, report.longrepr = "failed", f"Under CI: {report.longrepr[2]}"
    if report.failed and item.config.option.quick and "unsupported gloo device" in str(report.longrepr):
        report.sections.append(("A process group in a test without a mark", "Give it one: @pytest.mark.ranks"))
    return report


def pytest_terminal_summary(terminalreporter, config):
    """What ran, by kind; what was skipped, why, and the command that enables it."""
    rows, skipped, by_file = {}, collections.Counter(), collections.Counter()
    for outcome in ("passed", "failed", "error", "skipped", ""):  # "" is a test's preparation and its end
        for report in terminalreporter.stats.get(outcome, []):
            kind = dict(getattr(report, "user_properties", [])).get("kind", OTHER)
            row = rows.setdefault(kind, collections.Counter())
            row[outcome] += 1
            row["seconds"] += getattr(report, "duration", 0)
            by_file[Path(report.fspath).name] += getattr(report, "duration", 0)
            if outcome == "skipped":
                skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1
    terminalreporter.section("what ran")
    for kind, text in {**KINDS, OTHER: OTHER}.items():
        if row := rows.get(kind):
            outcomes = [
                f"{row[outcome]} {outcome}" for outcome in ("passed", "failed", "error", "skipped") if row[outcome]
            ]
            terminalreporter.line(f"{text:30}{row['seconds']:7.1f} s   {', '.join(outcomes)}")
    for reason, count in skipped.items():
        terminalreporter.line(f"skipped {count}: {reason}")
    if not config.option.short and any(rows[kind]["skipped"] for kind in FROM_SYSTEM if kind in rows):
        terminalreporter.line("To run these: make system, then make test ALL=1; hosts and Slurm need root too.")
    if config.option.record_durations:
        recorded = json.loads(DURATIONS.read_text()) | {name: round(seconds) for name, seconds in by_file.items()}
        DURATIONS.write_text(json.dumps(recorded, indent=0, sort_keys=True) + "\n")
