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
    """Fetch Pyodide with npm, and put the files that a page loads into the folder ``store``.

    Pyodide is Python for the browser. Raises OSError or SubprocessError where that fails, also for a package that is
    not the one that was tried.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not installed")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        command = [npm, "pack", f"pyodide@{VERSION}", "--silent"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
        archive_file = next(folder.glob("*.tgz"))
        if hashlib.sha256(archive_file.read_bytes()).hexdigest() != SHA256:
            raise OSError(f"{archive_file.name} is not the file that was tried")
        with tarfile.open(archive_file) as archive:
            archive.extractall(folder, filter="data")
        contents = folder / "package"  # the folder that each archive of npm has
        shutil.rmtree(store, ignore_errors=True)
        store.mkdir(parents=True)
        for file in NEEDED:
            shutil.copy(contents / file, store)


# --- The page ---------------------------------------------------------------------------------------------------------


class Planner(SphinxDirective):
    """The form, and the answer to its first values."""

    def run(self) -> list[nodes.Node]:
        """The form as HTML, with the answers to the values that it begins with.

        planner.js then answers in the browser. It learns from ``data-live`` whether the page can compute.
        """
        answer = form.answer({})
        groups = ""
        for title, entries in form.GROUPS.items():
            controls = "".join(control(entry, answer.sizes) for entry in entries)
            groups += f"<fieldset><legend>{title}</legend>{controls}</fieldset>"
        if has_pyodide():
            is_live = "1"  # planner.js lets the form compute
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
    """An input of the form as HTML, with its label: a list to choose from, or a field for a number.

    The form begins with a known model, whose ``sizes`` are given by the inputs' names, such as {"layers": 32}. A field
    that is empty shows that model's size in grey.
    """
    if entry.choices:
        options = ""
        for text in entry.choices:
            selected = " selected" if text == entry.value else ""
            options += f"<option{selected}>{text}</option>"
        box = f'<select name="{entry.name}">{options}</select>'
    else:
        shown = f'value="{entry.value}" placeholder="{sizes.get(entry.name, "")}"'
        box = f'<input name="{entry.name}" {shown} inputmode="numeric" size="8">'
    return f"<label><span>{escape(entry.label)}</span>{box}</label>"


# --- After the build: what the page loads -----------------------------------------------------------------------------


def copy_planner(app: Sphinx, exception: Exception | None) -> None:
    """Copy into the built book what its planner runs in the browser: Pyodide, and the planner's modules as an archive.

    Sphinx calls it at the end of a build, with the exception if the build failed.
    """
    if exception is not None or app.builder.format != "html":
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
