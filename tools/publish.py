"""Prepare a built book for its address: ``make publish ADDRESS=https://github.com/OWNER/NAME``.

In the built book it puts the helpers as a wheel, and in front of each notebook's copy a cell that installs the wheel on
a machine without the helpers. Colab and Kaggle open a notebook without its repository, so they need this cell. They
open it from GitHub and not from the book, so the copies also have to be there: .github/workflows/book.yml pushes them
as the branch that the pages' buttons name.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from store_outputs import text_of

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "book" / "_ext"))
from book_address import address_of_book  # noqa: E402 (book/_ext is not a package)

HTML = ROOT / "_build" / "html"
FIRST_CELL = """\
# For Colab, Kaggle and other machines that have PyTorch, but not this book: install the book's helpers.
# It keeps the PyTorch that is installed, and does nothing where the helpers are there.
import importlib.util

if importlib.util.find_spec("helpers") is None:
    %pip install --quiet {wheel}

from helpers.ranks.older_torch import use_newer_names

use_newer_names()  # in case that PyTorch is older than 2.13, with which the book begins
"""


def build_wheel(folder: Path) -> Path:
    """Build the wheel of the helpers in ``folder``, in place of an older one, and return its path."""
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        # The wheel is built from a copy of the sources: setuptools leaves its folder build/ beside them, and the next
        # wheel would contain old files from there.
        sources = Path(name)
        for part in ("helpers", "notebooks"):
            shutil.copytree(ROOT / part, sources / part, ignore=shutil.ignore_patterns("__pycache__"))
        for file in ("pyproject.toml", "LICENSE"):
            shutil.copy(ROOT / file, sources)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--wheel-dir", folder, sources], check=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def with_first_cell(notebook: Path, wheel: str) -> str:
    """The text of a notebook's file, with FIRST_CELL before its cells. ``wheel`` is the address of the wheel."""
    nb = nbformat.read(notebook, as_version=4)
    cell = nbformat.v4.new_code_cell(FIRST_CELL.format(wheel=wheel).rstrip(), id="install-helpers")
    nb.cells.insert(0, cell)
    return text_of(nb)


def main(repository: str) -> int:
    """Prepare the built book of the repository at this address; say what was added, and return the exit status 0."""
    address = address_of_book(repository)
    wheel = build_wheel(HTML / "wheels")
    address_of_wheel = f"{address}wheels/{wheel.name}"
    # The built book has a copy of each notebook, to which the download button of its page leads.
    copies = sorted((HTML / "_sources" / "notebooks").glob("*.ipynb"))
    for copy in copies:
        text = with_first_cell(ROOT / "notebooks" / copy.name, address_of_wheel)
        copy.write_text(text, encoding="utf-8")
    print(f"For {address}: {wheel.relative_to(ROOT)}, and {len(copies)} notebooks that install it where it is missing.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
