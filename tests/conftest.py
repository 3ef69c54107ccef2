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
    return [toc["root"]] + [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]


CHAPTERS = [name for name in toc_files() if re.match(r"notebooks/\d\d_", name)]


def build(folder, **env):
    """Build the book whose sources are in ``folder``, warnings being errors.

    Returns (folder of the HTML, exit status, what the build complained about).
    """
    command = [Path(sys.executable).with_name("jupyter-book"), "build", folder, "-W", "--keep-going", "-n", "-q"]
    env = {**os.environ, "NO_COLOR": "1", **env}
    process = subprocess.run(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return folder / "_build" / "html", process.returncode, process.stderr


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


@pytest.fixture(scope="session")
def book(tmp_path_factory, worker_id):
    """The book, built once for all tests: ``.html`` is its folder, ``.status`` and ``.complaints`` are the build's.

    BUILT_BOOK names a project's folder in which `make book` has built it, without complaints.
    """
    if "BUILT_BOOK" in os.environ:
        built = Path(os.environ["BUILT_BOOK"])
        return SimpleNamespace(html=built / "_build" / "html", scripts=built / "scripts", status=0, complaints="")
    shared = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        shared = shared.parent  # one folder for all of pytest-xdist's workers
    folder = shared / "built-book"
    record = shared / "built-book.json"
    with FileLock(shared / "built-book.lock"):
        if not record.exists():
            shutil.rmtree(folder, ignore_errors=True)  # a builder whose time was up may have left it
            for name in ["book", "notebooks"]:
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(".*", "__pycache__"))
            for name in ["_config.yml", "_toc.yml"]:
                shutil.copy(ROOT / name, folder)
            (folder / "helpers").symlink_to(ROOT / "helpers")  # a page shows functions of a file there
            export = [sys.executable, "-m", "helpers", "export", "--all", "--out", folder / "scripts"]
            subprocess.run(export, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            _, status, complaints = build(folder, BOOK_REPOSITORY_URL="")
            record.write_text(json.dumps({"status": status, "complaints": complaints}))
    outcome = json.loads(record.read_text())
    return SimpleNamespace(html=folder / "_build" / "html", scripts=folder / "scripts", **outcome)


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
    """A function that runs the command line in this process and returns (exit status, stdout, stderr)."""
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
    """What opens the pages of ``visit``: each page in a context of its own. A test file may have one for all."""
    return browser


@pytest.fixture
def visit(context, book_url):
    """A function that opens a page of the book, at ``url`` if it is not the served one. No page may complain."""
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
