"""The published copy of a notebook: its first cell installs the helpers where they are missing, and nothing else."""

import functools
import http.server
import importlib
import os
import re
import subprocess
import sysconfig
import threading
import tomllib
import venv

import nbformat
import publish
import pytest
import torch
from conftest import CHAPTERS, ROOT

from helpers.ranks.older_torch import NEWER_NAMES, use_newer_names

CHAPTER = ROOT / f"{CHAPTERS[0]}.ipynb"


def published(wheel):
    """The published copy of the first chapter. Its first cell installs the helpers from ``wheel``, an address."""
    return nbformat.reads(publish.with_first_cell(CHAPTER, wheel), as_version=4)


def test_the_other_cells_are_the_chapters():
    assert published("a.whl").cells[1:] == nbformat.read(CHAPTER, as_version=4).cells


def test_the_wheel_takes_the_pytorch_of_colab_and_of_kaggle():
    """Kaggle's image of August 2026 has 2.10.0. With a narrower range the first cell would replace it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [requirement] = [text for text in project["dependencies"] if text.startswith("torch")]
    lowest = re.fullmatch(r"torch>=(?P<major>\d+)\.(?P<minor>\d+)", requirement)
    assert (int(lowest["major"]), int(lowest["minor"])) <= (2, 10)


@pytest.mark.slow
def test_the_first_cell_installs_the_helpers_beside_the_pytorch_that_is_there(tmp_path):
    """On a machine that has everything but the helpers, with the book's site on the loopback. It can run twice."""
    wheel = publish.build_wheel(tmp_path / "site" / "wheels")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "site")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/wheels/{wheel.name}"

    # A new environment that finds the packages of this one, such as torch, but not the helpers: they are importable
    # here by a file in this one's folder of packages, and Python reads such files only in its own environment.
    environment = tmp_path / "venv"
    venv.create(environment, symlinks=True, with_pip=True)
    [site] = (environment / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    program = tmp_path / "cell.py"
    program.write_text(
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        f"shell.run_cell({published(address).cells[0].source!r}).raise_error()\n"
        "import helpers, torch\n"
        "print(helpers.__file__, torch.__version__)\n"
    )

    def run_the_cell():
        """Run the first cell in a new process. Returns the last line, with the places of helpers and torch."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        command = [environment / "bin" / "python", program]
        done = subprocess.run(command, env=clean, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()[-1]

    first_run = run_the_cell()
    second_run = run_the_cell()
    server.shutdown()
    server.server_close()
    assert first_run == second_run
    assert first_run.startswith(str(site / "helpers"))
    assert first_run.endswith(torch.__version__)


def test_an_older_pytorch_gets_the_newer_names(monkeypatch):
    """PyTorch has only the older name of each function here. After use_newer_names it has the newer one, too."""
    names = []  # [(module, newer name, older name)]
    for module_name, older_names in NEWER_NAMES.items():
        module = importlib.import_module(module_name)
        names += [(module, newer, older) for newer, older in older_names.items()]
    for module, newer, older in names:
        # Both are set before the newer one is deleted, so that monkeypatch takes back what use_newer_names adds.
        monkeypatch.setattr(module, newer, object(), raising=False)
        monkeypatch.setattr(module, older, object(), raising=False)  # PyTorch may lack it one day
        monkeypatch.delattr(module, newer)

    use_newer_names()

    for module, newer, older in names:
        assert getattr(module, newer) is getattr(module, older)
