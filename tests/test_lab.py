"""Chapters in JupyterLab, in a real browser: run all, no error, the sliders live, nothing left running.

The template has one of everything. With LAB=all in the environment, ``make test ARGS=tests/test_lab.py`` runs all.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import psutil
import pytest
from conftest import CHAPTERS, ROOT
from leftovers import wait_until
from store_outputs import WIDGET_VIEW
from visits import PATIENCE

NAMES = CHAPTERS if os.environ.get("LAB") == "all" else ["notebooks/template"]

# With --LabApp.expose_app_in_browser, JupyterLab is `jupyterapp` in the page.
NOTEBOOK = "jupyterapp.shell.currentWidget"
READY = f"window.jupyterapp && {NOTEBOOK}?.sessionContext?.session?.kernel?.status === 'idle'"
CELLS = f"""[...{NOTEBOOK}.content.widgets].map((widget, place) => ({{place, model: widget.model}}))
    .filter(({{model}}) => model.type === 'code').map(({{place, model}}) => ({{
        place, count: model.executionCount, tags: model.getMetadata('tags') ?? [], outputs: model.outputs.toJSON(),
    }}))"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address, with its token, of a JupyterLab on a copy of the notebooks. It ends with the test."""
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    sockets = Path(tempfile.mkdtemp(prefix="lab-"))  # instead of ports, which others may take first
    token = secrets.token_hex(16)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "PYTEST"))}
    for name in ["CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR"]:  # leave the user's own alone
        env[f"JUPYTER_{name}"] = str(folder / name)
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0",
        f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder / 'notebooks'}",
        "--LabApp.expose_app_in_browser=True", "--LabApp.news_url=", "--LabApp.check_for_updates_class="
        "jupyterlab.NeverCheckForUpdate", "--KernelManager.transport=ipc", f"--KernelManager.ip={sockets / 'kernel'}",
    ]  # fmt: skip
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        infos = (folder / "RUNTIME_DIR").glob
        [info] = wait_until(lambda: [text for file in infos("jpserver-*.json") if (text := file.read_text())], 120)
        url = json.loads(info)["url"]
        yield url, token
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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chapter", NAMES)
def test_chapter_runs_in_jupyterlab(browser, lab, chapter):
    url, token = lab
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(PATIENCE)
    page.goto(f"{url}lab/tree/{chapter.split('/')[1]}.ipynb?token={token}&reset")
    page.wait_for_function(READY)
    page.evaluate("jupyterapp.commands.execute('notebook:run-all-cells')")
    page.wait_for_function(f"{CELLS}.at(-1).count && {READY}", timeout=2 * PATIENCE)

    cells = page.evaluate(CELLS)
    assert [cell["count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [(cell, output) for cell in cells for output in cell["outputs"]]
    errors = [output for cell, output in outputs if "raises-exception" not in cell["tags"] and "ename" in output]
    assert errors == []

    places = [cell["place"] for cell, output in outputs if WIDGET_VIEW in output.get("data", {})]
    assert places, "no live figure"
    for place in places:
        page.evaluate(f"place => {NOTEBOOK}.content.scrollToItem(place, 'start')", place)
        output = page.locator(f".jp-Notebook .jp-Cell[data-windowed-list-index='{place}'] .jp-OutputArea-output")
        for handle in output.locator("[role=slider]").all():
            handle.scroll_into_view_if_needed()
            before = pictures(output)
            assert before, "no picture beside the slider"
            handle.focus()
            at_the_end = handle.get_attribute("aria-valuenow") == handle.get_attribute("aria-valuemax")
            page.keyboard.press("ArrowLeft" if at_the_end else "ArrowRight")
            assert wait_until(lambda output=output, before=before: pictures(output) not in ([], before))
    page.close()


def pictures(output):
    return output.locator("svg").evaluate_all("all => all.map(svg => svg.outerHTML)")
