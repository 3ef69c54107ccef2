"""Give the pages fonts of their own: a style sheet that holds the files of book/fonts, and the same in the drawings.

The fonts are there before the first line is drawn, so that no page jumps, and where a browser opens the book from a
folder too. A drawing that a page shows as an image may load nothing, so it carries those letters that it needs.
"""

import base64
import shutil
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

FONTS = Path(__file__).parents[1] / "fonts"
FACES = {  # file: family, style, range of weights
    "Inter-Regular": ("Inter", "normal", "100 500"),
    "Inter-Italic": ("Inter", "italic", "100 900"),
    "Inter-SemiBold": ("Inter", "normal", "501 900"),
    "JetBrainsMono-Regular": ("JetBrains Mono", "normal", "100 500"),
    "JetBrainsMono-Bold": ("JetBrains Mono", "normal", "501 900"),
}
OF_DRAWINGS = ["Inter-Regular", "Inter-SemiBold", "JetBrainsMono-Regular"]  # tools/subset_fonts.py cuts them


def font_face(face: str, file: str = "") -> str:
    """The ``@font-face`` rule of a face, with the font of its file in it."""
    family, style, weights = FACES[face]
    font = base64.b64encode((FONTS / f"{file or face}.woff2").read_bytes()).decode()
    return (
        f"@font-face {{ font-family: '{family}'; font-style: {style}; font-weight: {weights}; font-display: block; "
        f"src: url(data:font/woff2;base64,{font}) format('woff2'); }}"
    )


def write_style_sheet(app: Sphinx) -> None:
    if app.builder.format == "html":
        folder = Path(app.outdir, "_static")
        folder.mkdir(exist_ok=True)
        licences = sorted(FONTS.glob("*-OFL.txt"))
        for path in licences:
            shutil.copy(path, folder)
        names = " and ".join(path.name for path in licences)
        rules = [f"/* The fonts' licences are in {names}. */", *map(font_face, FACES)]
        (folder / "fonts.css").write_text("\n".join(rules), encoding="utf-8")


def put_into_drawings(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        for path in Path(app.outdir, "_images").glob("*.svg"):
            style = "".join(["<style>", *(font_face(face, f"Drawn-{face}") for face in OF_DRAWINGS)])
            path.write_text(path.read_text(encoding="utf-8").replace("<style>", style, 1), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_css_file("fonts.css")
    app.connect("builder-inited", write_style_sheet)
    app.connect("build-finished", put_into_drawings)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
