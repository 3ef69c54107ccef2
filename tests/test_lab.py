"""Notebooks in JupyterLab, in a real browser: run all, no error, the controls work, nothing left running.

The template has one of everything. With LAB=all in the environment, ``make test ARGS=tests/test_lab.py`` runs all.
"""

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import textwrap
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import nbformat
import psutil
import pytest
from conftest import CHAPTERS, ROOT
from leftovers import wait_until
from nbformat.v4 import new_code_cell, new_notebook
from visits import PATIENCE

NAMES = ["notebooks/template"]
if os.environ.get("LAB") == "all":
    NAMES = CHAPTERS

# With --LabApp.expose_app_in_browser, JupyterLab is `jupyterapp` in the page.
NOTEBOOK = "jupyterapp.shell.currentWidget"
READY = f"window.jupyterapp && {NOTEBOOK}?.sessionContext?.session?.kernel?.status === 'idle'"
CELLS = f"""[...{NOTEBOOK}.content.widgets].map((widget, place) => ({{place, model: widget.model}}))
    .filter(({{model}}) => model.type === 'code').map(({{place, model}}) => ({{
        place, count: model.executionCount, tags: model.getMetadata('tags') ?? [], outputs: model.outputs.toJSON(),
    }}))"""


@dataclass(frozen=True)
class Lab:
    """A JupyterLab on a copy of the notebooks."""

    url: str
    token: str  # which an address has to have
    notebooks: Path  # the folder with the copies


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A JupyterLab that ends with the tests. It leaves the user's own settings alone, and no kernel running."""
    folder = tmp_path_factory.mktemp("lab")
    notebooks = folder / "notebooks"
    shutil.copytree(ROOT / "notebooks", notebooks, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    sockets = Path(tempfile.mkdtemp(prefix="lab-"))  # instead of ports, which others may take first
    token = secrets.token_hex(16)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "PYTEST"))}
    for name in ["CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR"]:
        environment[f"JUPYTER_{name}"] = str(folder / name)
    command = [
        *(sys.executable, "-m", "jupyterlab"),
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        "--port=0",
        f"--IdentityProvider.token={token}",
        f"--ServerApp.root_dir={notebooks}",
        f"--config={ROOT / 'tools' / 'lab' / 'jupyter_config.py'}",  # as `make lab`
        "--LabApp.expose_app_in_browser=True",
        "--LabApp.news_url=",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--KernelManager.transport=ipc",
        f"--KernelManager.ip={sockets / 'kernel'}",
    ]
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def server_info():
        """What the server says of itself, as JSON; nothing before it has a port."""
        files = list((folder / "RUNTIME_DIR").glob("jpserver-*.json"))
        if not files:
            return ""
        return files[0].read_text()

    try:
        url = json.loads(wait_until(server_info, 120))["url"]
        yield Lab(url, token, notebooks)
        kernels = psutil.Process(server.pid).children(recursive=True)
        shutdown = urllib.request.Request(f"{url}api/shutdown?token={token}", method="POST")
        urllib.request.urlopen(shutdown, timeout=60).close()
        server.wait(timeout=60)
        _, alive = psutil.wait_procs(kernels, timeout=60)
        for process in alive:
            process.kill()
        assert not alive, f"left running: {alive}"
    finally:
        server.kill()  # if it has not ended by itself
        server.wait()
        shutil.rmtree(sockets, ignore_errors=True)


def open_notebook(browser, lab, name):
    """Open a notebook in JupyterLab and wait for its kernel. Returns the browser's page."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(PATIENCE)
    page.goto(f"{lab.url}lab/tree/{name}.ipynb?token={lab.token}&reset")
    page.wait_for_function(READY)
    return page


def run_all_cells(page):
    page.evaluate("void jupyterapp.commands.execute('notebook:run-all-cells')")


def wait_for_last_cell(page):
    """Wait until the last cell has run. Returns all code cells, each as a dictionary: see CELLS."""
    page.wait_for_function(f"{CELLS}.at(-1).count && {READY}", timeout=2 * PATIENCE)
    return page.evaluate(CELLS)


def shown_frame(figure):
    """The alt text of the drawing that a figure with sliders shows now."""
    return figure.locator(".wso-on").get_attribute("aria-label")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chapter", NAMES)
def test_chapter_runs_in_jupyterlab(browser, lab, chapter):
    page = open_notebook(browser, lab, chapter.removeprefix("notebooks/"))
    run_all_cells(page)
    cells = wait_for_last_cell(page)
    assert [cell["count"] for cell in cells] == list(range(1, len(cells) + 1))
    positions_of_live_figures = []
    for cell in cells:
        for output in cell["outputs"]:
            is_error = "ename" in output
            if is_error:
                assert "raises-exception" in cell["tags"], output
            html = "".join(output.get("data", {}).get("text/html", ""))
            if "wso-controls" in html:
                positions_of_live_figures.append(cell["place"])

    assert positions_of_live_figures, "no live figure"
    for position in positions_of_live_figures:
        page.evaluate(f"position => {NOTEBOOK}.content.scrollToItem(position, 'start')", position)
        figure = page.locator(f".jp-Notebook .jp-Cell[data-windowed-list-index='{position}'] figure.wso")
        for control in figure.locator("[data-labels]").all():
            before = shown_frame(figure)
            knob = control.locator("[type=range], :checked")
            knob.press("ArrowRight")
            if shown_frame(figure) == before:  # the slider was at its last value
                knob.press("ArrowLeft")
            assert shown_frame(figure) != before
    page.close()


@dataclass(frozen=True)
class Clone:
    """A repository of git."""

    folder: Path

    def git(self, *words):
        """Run ``git words`` in the repository. Returns what it printed."""
        command = ["git", *words]
        return subprocess.run(command, cwd=self.folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def clone(tmp_path):
    """A Clone with the book's notebooks, and with the filter of their outputs that the first make sets up."""
    clone = Clone(tmp_path)
    shutil.copy(ROOT / ".gitattributes", tmp_path)
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks", ignore=shutil.ignore_patterns(".*"))
    program = f'"{sys.executable}" "{ROOT}/tools/lab/keep_stored_outputs.py" %f'
    clone.git("init")
    clone.git("config", "filter.stored-outputs.clean", program)
    clone.git("add", ".")
    return clone


SUMMARY = ".jp-Notebook details > summary"
# Whether the first answer of a notebook, a <details>, looks open ("disclosure-open") or closed ("disclosure-closed").
LOOKS = f"""style => {{
    const summary = document.querySelector('{SUMMARY}');
    return summary && getComputedStyle(summary).listStyleType == style;
}}"""
# It scrolls there each time, because JupyterLab itself scrolls while it opens a notebook, and removes what is far away.
SCROLL_AND_LOOK = f"""style => {{
    const cells = [...{NOTEBOOK}.content.widgets];
    const place = cells.findIndex(cell => cell.model.sharedModel.getSource().includes('<summary>'));
    {NOTEBOOK}.content.scrollToItem(place, 'start');
    return ({LOOKS})(style);
}}"""


def save(page):
    """Save the notebook, and wait until it has been."""
    page.evaluate("jupyterapp.commands.execute('docmanager:save')")
    page.wait_for_function(f"!{NOTEBOOK}.content.model.dirty")


def test_opening_a_notebook_changes_nothing_and_a_closed_answer_looks_closed(browser, lab):
    page = open_notebook(browser, lab, "template")
    page.wait_for_function(f"{NOTEBOOK}.content.model.getMetadata('language_info').version")
    assert not page.evaluate(f"{NOTEBOOK}.content.model.dirty")
    page.wait_for_function(SCROLL_AND_LOOK, arg="disclosure-closed", polling=1000)
    # jupyterlab_myst draws a cell anew when it becomes the active one, and then what the first click opened is closed.
    for _ in range(5):
        page.locator(SUMMARY).first.click()
        page.wait_for_timeout(2000)
        if page.evaluate(LOOKS, "disclosure-open"):
            break
    assert page.evaluate(LOOKS, "disclosure-open")
    page.close()


def test_after_all_cells_were_run_and_saved_git_sees_no_change(browser, lab, clone):
    page = open_notebook(browser, lab, "template")
    run_all_cells(page)
    wait_for_last_cell(page)
    save(page)
    page.close()
    saved = (lab.notebooks / "template.ipynb").read_text(encoding="utf-8")
    assert saved != (ROOT / "notebooks" / "template.ipynb").read_text(encoding="utf-8")
    notebook_in_clone = clone.folder / "notebooks" / "template.ipynb"
    notebook_in_clone.write_text(saved, encoding="utf-8")
    assert clone.git("diff", "--stat") == ""
    without_new_files = clone.git("status", "--porcelain", "--untracked-files=no")
    assert clone.git("status", "--porcelain") == without_new_files

    # If the reader has changed a line, git shows this line alone, and not the outputs of the reader's run.
    changed = saved.replace("# ", "## ", 1)
    notebook_in_clone.write_text(changed, encoding="utf-8")
    diff = clone.git("diff", "--unified=0").splitlines()
    changed_lines = diff[5:]  # the first five say which file it is, and where in it
    assert [line[0] for line in changed_lines] == ["-", "+"]


LONG_LAUNCH = """
    import time
    from helpers.ranks.launch import launch

    def train(rank):
        for step in range(10):
            time.sleep(0.5)
            print(f"step {step}")

    results = launch(train, nproc=2)
"""


def test_a_long_launch_shows_the_newest_lines_of_its_ranks_until_it_ends(browser, lab):
    """Below the cell a line such as `5 s  [ranks 0-1] step 3` appears. Nothing of it is left, nor would be stored."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}  # or JupyterLab asks for one
    cell = new_code_cell(textwrap.dedent(LONG_LAUNCH))
    notebook = new_notebook(cells=[cell], metadata={"kernelspec": kernel})
    nbformat.write(notebook, lab.notebooks / "long_launch.ipynb")
    page = open_notebook(browser, lab, "long_launch")
    run_all_cells(page)
    shown_output = page.locator(".jp-OutputArea-output")
    newest_line = re.compile(r"\d+ s\s+\[ranks? [01-]+\] step \d")
    shown_output.get_by_text(newest_line).wait_for()

    [cell] = wait_for_last_cell(page)
    expected = "".join(f"[ranks 0-1] step {step}\n" for step in range(10))
    [output] = cell["outputs"]
    assert "".join(output["text"]) == expected
    assert shown_output.inner_text().strip() == expected.strip()
    page.close()
