"""What several test files share: the built book, a server for a folder, a browser."""

import functools
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
import yaml
from chromium import Missing, chromium
from filelock import FileLock

ROOT = Path(__file__).parents[1]

# A shell's background job ignores Ctrl-C, and so do its children. The tests that press Ctrl-C need it to be heard.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def toc_files():
    """The files of _toc.yml without their suffixes, in reading order: ``["book/intro", …]``."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    files = [toc["root"]]
    for part in toc["parts"]:
        for chapter in part["chapters"]:
            files.append(chapter["file"])
    return files


CHAPTERS = [name for name in toc_files() if re.match(r"notebooks/\d\d_", name)]


class Build(NamedTuple):
    """A build of the book that has ended."""

    html: Path  # the folder with the pages
    status: int  # the exit status, which is not 0 if there was a warning
    complaints: str  # errors and warnings


def build(folder, **variables):
    """Build the book whose sources are in ``folder``, with these environment variables. Returns a Build."""
    jupyter_book = Path(sys.executable).with_name("jupyter-book")
    warnings_are_errors = ["-W", "--keep-going", "-n"]
    command = [jupyter_book, "build", folder, *warnings_are_errors, "-q"]
    environment = {**os.environ, "NO_COLOR": "1", **variables}
    process = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return Build(folder / "_build" / "html", process.returncode, process.stderr)


def run_nbval(path, *options):
    """Run nbval on a notebook that is not this project's, in the notebook's folder. Returns the finished process.

    pytest does not find this project's conftest.py from there, so ``-p`` names it. It keeps a kernel from taking ports.
    """
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-p", "no:cacheprovider"]
    command += ["-p", "conftest", *options, path.name]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}", "PYTEST_ADDOPTS": ""}
    return subprocess.run(command, cwd=path.parent, env=env, capture_output=True, text=True)


def pytest_runtest_setup(item):
    """Skip a test that this machine cannot run. The mark says why not: ``@pytest.mark.system(missing=function)``.

    The function returns the reason, such as "no ip on this machine", or None.
    """
    for mark in item.iter_markers("system"):
        if "missing" in mark.kwargs:
            reason = mark.kwargs["missing"]()
            if reason:
                pytest.skip(reason)


@pytest.fixture(scope="session")
def book(tmp_path_factory, worker_id):
    """The book, built once for all tests: its folders ``.html`` and ``.scripts``, the ``.status`` and ``.complaints``.

    If the variable BUILT_BOOK names a project's folder, the book is there already: `make book` has built it, without
    complaints.
    """
    if "BUILT_BOOK" in os.environ:
        built = Path(os.environ["BUILT_BOOK"])
        return SimpleNamespace(html=built / "_build" / "html", scripts=built / "scripts", status=0, complaints="")

    # The first of pytest-xdist's workers builds the book, in a folder for all. The others wait for its record.
    shared = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        shared = shared.parent
    folder = shared / "built-book"
    record = shared / "built-book.json"
    with FileLock(shared / "built-book.lock"):
        if not record.exists():
            shutil.rmtree(folder, ignore_errors=True)  # a builder whose time was up may have left it
            copy_sources(folder)
            export = [sys.executable, "-m", "helpers", "export", "--all", "--out", folder / "scripts"]
            subprocess.run(export, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            built = build(folder, BOOK_REPOSITORY_URL="")
            record.write_text(json.dumps({"status": built.status, "complaints": built.complaints}))
    outcome = json.loads(record.read_text())
    return SimpleNamespace(html=folder / "_build" / "html", scripts=folder / "scripts", **outcome)


def copy_sources(folder):
    """Copy what the book is built from, except its scripts, to a new folder."""
    for name in ["book", "notebooks"]:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.mo"))
    for name in ["_config.yml", "_toc.yml"]:
        shutil.copy(ROOT / name, folder)
    (folder / "helpers").symlink_to(ROOT / "helpers")  # a page shows functions of a file there


@pytest.fixture(scope="module")
def book_url(book):
    """The address of the built book, served on 127.0.0.1."""
    handler = functools.partial(SilentHandler, directory=book.html)
    with SilentServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class SilentHandler(http.server.SimpleHTTPRequestHandler):
    """It serves the files of a folder, and prints nothing about requests."""

    def log_message(self, *args):
        pass


class SilentServer(http.server.ThreadingHTTPServer):
    """It prints nothing about errors, which are normal here: a page may close while it loads."""

    def handle_error(self, *args):
        pass


@pytest.fixture
def helpers(capsys):
    """A function that runs ``python -m helpers …`` in this process and returns (exit status, stdout, stderr).

    For example, ``helpers("export", "11", "--nodes=3")``.
    """
    from helpers.__main__ import main

    def run_command(*arguments):
        with mock.patch.dict(os.environ):  # a command sets variables for the ranks that it starts
            try:
                status = main([str(argument) for argument in arguments])
            except SystemExit as end:
                status = end.code
        out, errors = capsys.readouterr()
        return status, out, errors

    return run_command


@pytest.fixture(scope="module")
def browser():
    """A headless chromium, or a skip."""
    try:
        with chromium() as browser:
            yield browser
    except Missing as missing:
        pytest.skip(str(missing).splitlines()[0])


@pytest.fixture(scope="module")
def context(browser):
    """The browser, in which each page that ``visit`` opens has a context of its own.

    A test file may override this fixture with one context for all pages.
    """
    return browser


@pytest.fixture
def visit(context, book_url):
    """A function that opens a page of the book, such as ``visit("book/glossary")``, and returns the browser's page.

    ``url`` is for a book that is served at another address. The test fails if a page complains: see ``open_page``.
    """
    from visits import open_page

    pages = []
    complaints = []

    def visit_page(name, url=book_url):
        page = open_page(context, url, name, complaints)
        pages.append(page)
        return page

    yield visit_page
    problems = "\n".join(complaints)  # closing a page may add to them
    for page in pages:
        page.close()
    assert not problems, problems
