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
from dataclasses import dataclass
from pathlib import Path
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
        files += [chapter["file"] for chapter in part["chapters"]]
    return files


CHAPTERS = [name for name in toc_files() if re.match(r"notebooks/\d\d_", name)]


class Build(NamedTuple):
    """How a build of the book ended."""

    html: Path  # the folder of its HTML
    status: int  # the exit status
    complaints: str  # its warnings and errors


def build(folder, **variables):
    """Build the book whose sources are in ``folder``, warnings being errors, and return how the Build ended.

    ``variables`` are added to the environment, such as ``BOOK_LANGUAGE="de"``.
    """
    command = [Path(sys.executable).with_name("jupyter-book"), "build", folder, "-W", "--keep-going", "-n", "-q"]
    environment = {**os.environ, "NO_COLOR": "1", **variables}
    process = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return Build(folder / "_build" / "html", process.returncode, process.stderr)


def run_nbval(path, *options):
    """Run nbval on a notebook that is not this project's, in the notebook's folder. Returns the finished process.

    pytest does not find the root conftest.py from there. Its name is given, so that this kernel takes no ports either.
    """
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-p", "no:cacheprovider"]
    command += ["-p", "conftest", *options, path.name]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}", "PYTEST_ADDOPTS": ""}
    return subprocess.run(command, cwd=path.parent, env=env, capture_output=True, text=True)


def pytest_runtest_setup(item):
    """Skip a test of several hosts, or of Slurm, on a machine that cannot have them."""
    for mark in item.iter_markers("system"):
        if "missing" in mark.kwargs:
            reason = mark.kwargs["missing"]()
            if reason:
                pytest.skip(reason)


@dataclass(frozen=True)
class Book:
    """The built book."""

    html: Path  # the folder of its HTML
    scripts: Path  # the folder of the chapters' scripts
    status: int  # the exit status of the build
    complaints: str  # the build's warnings and errors


@pytest.fixture(scope="session")
def book(tmp_path_factory, worker_id):
    """The Book, which is built once for all tests and all workers of pytest-xdist.

    BUILT_BOOK names a project's folder in which `make book` has built it, without complaints.
    """
    if "BUILT_BOOK" in os.environ:
        project = Path(os.environ["BUILT_BOOK"])
        return Book(project / "_build" / "html", project / "scripts", status=0, complaints="")
    folder_of_worker = tmp_path_factory.getbasetemp()
    if worker_id == "master":  # there are no workers
        shared = folder_of_worker
    else:
        shared = folder_of_worker.parent
    folder = shared / "built-book"
    record = shared / "built-book.json"  # is written when the book is built, for the workers that waited
    with FileLock(shared / "built-book.lock"):
        if not record.exists():
            shutil.rmtree(folder, ignore_errors=True)  # a builder whose time was up may have left it
            copy_sources(folder)
            export = [sys.executable, "-m", "helpers", "export", "--all", "--out", folder / "scripts"]
            subprocess.run(export, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            done = build(folder, BOOK_REPOSITORY_URL="")
            record.write_text(json.dumps({"status": done.status, "complaints": done.complaints}))
    outcome = json.loads(record.read_text())
    return Book(folder / "_build" / "html", folder / "scripts", outcome["status"], outcome["complaints"])


def copy_sources(folder):
    """Copy what the book is built from into a folder, without the chapters' scripts."""
    for name in ["book", "notebooks"]:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.mo"))
    for name in ["_config.yml", "_toc.yml"]:
        shutil.copy(ROOT / name, folder)
    (folder / "helpers").symlink_to(ROOT / "helpers")  # a page shows functions of a file there


@pytest.fixture(scope="module")
def book_url(book):
    """The address of the built book, served on 127.0.0.1."""

    class SilentHandler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(SilentHandler, directory=book.html)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.handle_error = lambda *args: None  # a page may close while it loads
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def helpers(capsys):
    """A function that runs ``python -m helpers ARGUMENTS`` in this process: returns (exit status, stdout, stderr)."""
    from helpers.__main__ import main

    def call(*arguments):
        with mock.patch.dict(os.environ):  # a command sets variables for the ranks that it starts
            try:
                status = main([str(argument) for argument in arguments])
            except SystemExit as end:
                status = end.code
        return status, *capsys.readouterr()

    return call


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
    """In what ``visit`` opens its pages: the browser, which gives each page a context of its own.

    A test file may have another fixture of this name, which is one context for all of its pages.
    """
    return browser


@pytest.fixture
def visit(context, book_url):
    """A function that opens a page of the book, ``visit("book/intro")``, and returns Playwright's page.

    With ``url`` it is a page of the book at another address, such as the one of a folder. At the end of the test, the
    pages are closed, and the test fails if the browser complained of one.
    """
    from visits import open_page

    pages = []
    complaints = []

    def visit_page(name, url=book_url):
        pages.append(open_page(context, url, name, complaints))
        return pages[-1]

    yield visit_page
    problems = "\n".join(complaints)  # closing a page may add to them
    for page in pages:
        page.close()
    assert not problems, problems
