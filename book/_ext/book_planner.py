"""The planner's page: the directive ``{planner}`` is its form, with the answer to the form's first values.

In the browser helpers/planner answers, unchanged, in Pyodide (Python as WebAssembly). Pyodide comes from npm when the
book is built, and then is one of the book's own files, so that no page asks an outside host.
"""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

import helpers
from helpers.planner import form

HELPERS = Path(helpers.__file__).parent
VERSION = "314.0.7"
SHA256 = "66b7949e5a0cba2250b586d7e368bf12fb482800748d182c4618254b685ffaa0"
# Of the package's files, those that a page loads.
NEEDED = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "pyodide-lock.json", "python_stdlib.zip")
STORE = Path(sys.prefix, "share", f"pyodide-{VERSION}")  # kept with the environment, so that it is fetched once


# --- Before the build: Pyodide ----------------------------------------------------------------------------------------


def fetch_pyodide(app: Sphinx) -> None:
    """Fetch Pyodide, with which a page runs Python in the browser, unless it is there. Sphinx calls it before a build.

    If it cannot be fetched, the book is built all the same, and the planner's form does not compute.
    """
    if app.builder.format != "html" or has_pyodide():
        return
    try:
        fetch(STORE)
    except (OSError, subprocess.SubprocessError) as error:
        logging.getLogger(__name__).info(f"The planner's form will not compute, for want of Pyodide: {error}")


def has_pyodide() -> bool:
    """Whether all files of Pyodide that a page loads are there."""
    return all((STORE / name).exists() for name in NEEDED)


def fetch(store: Path) -> None:
    """Download Pyodide, which is Python for the browser, with npm; put the files that a page loads into ``store``.

    Raises OSError or SubprocessError if that fails, also if the package is not the one that this book was tried with.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not installed")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        command = [npm, "pack", f"pyodide@{VERSION}", "--silent"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
        [archive_file] = folder.glob("*.tgz")
        if hashlib.sha256(archive_file.read_bytes()).hexdigest() != SHA256:
            raise OSError(f"{archive_file.name} is not the file that was tried")
        with tarfile.open(archive_file) as archive:
            archive.extractall(folder, filter="data")
        unpacked = folder / "package"  # every archive of npm has this folder
        shutil.rmtree(store, ignore_errors=True)
        store.mkdir(parents=True)
        for file in NEEDED:
            shutil.copy(unpacked / file, store)


# --- The page ---------------------------------------------------------------------------------------------------------


class Planner(SphinxDirective):
    """The form, and the answer to its first values."""

    def run(self) -> list[nodes.Node]:
        """The form as HTML, and below it the planner's answer to the values with which the form begins.

        When a reader changes a value, planner.js computes the new answer in the browser, if it has Python there.
        """
        answer = form.answer({})  # without values of a reader, so it is for the first ones
        groups = ""
        for title, entries in form.GROUPS.items():
            controls = "".join(control(entry, answer.sizes) for entry in entries)
            groups += f"<fieldset><legend>{title}</legend>{controls}</fieldset>"
        if has_pyodide():
            is_live = "1"  # tells planner.js that it can compute
            status = "Change a value: the planner then starts in this page."
        else:
            is_live = "0"
            status = "In this copy of the book the form does not compute: it was built without npm, which has Pyodide."
        html = f"""<form class="planner" data-live="{is_live}" autocomplete="off">{groups}
<p class="planner-status" role="status">{status}</p></form>
<div class="planner-answer" aria-live="polite">{answer.html}</div>
<div class="planner-best">{form.best({}).html}</div>"""
        return [nodes.raw("", html, format="html")]


def control(entry: form.Input, sizes: dict[str, int]) -> str:
    """One input of the planner's form as HTML, with its label: a list to choose from, or a field for a number.

    ``sizes`` are those of the model that the form begins with, by the names of inputs, such as {"layers": 32}. An empty
    field shows the model's size in grey, because the planner computes with it until the reader types another one.
    """
    if entry.choices:
        options = ""
        for text in entry.choices:
            if text == entry.value:
                options += f"<option selected>{text}</option>"
            else:
                options += f"<option>{text}</option>"
        box = f'<select name="{entry.name}">{options}</select>'
    else:
        shown = f'value="{entry.value}" placeholder="{sizes.get(entry.name, "")}"'
        box = f'<input name="{entry.name}" {shown} inputmode="numeric" size="8">'
    return f"<label><span>{escape(entry.label)}</span>{box}</label>"


# --- After the build: what the page loads -----------------------------------------------------------------------------


def copy_planner(app: Sphinx, exception: Exception | None) -> None:
    """Copy into the built book what its planner runs in the browser: Pyodide, and the planner's modules as an archive.

    Sphinx calls this at the end of a build, with the exception if the build failed.
    """
    if exception is not None:
        return
    if app.builder.format != "html":  # only an HTML page can compute
        return
    folder = Path(app.outdir, "_static", "planner")
    if has_pyodide():
        shutil.copytree(STORE, folder, dirs_exist_ok=True)
    modules = [HELPERS / "__init__.py", HELPERS / "command_line.py", *sorted((HELPERS / "planner").glob("*.py"))]
    with zipfile.ZipFile(folder / "helpers.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in modules:
            archive.write(path, path.relative_to(HELPERS.parent))


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("planner", Planner)
    app.connect("builder-inited", fetch_pyodide)
    app.connect("build-finished", copy_planner)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
