"""Give the pages fonts of their own: a style sheet that holds the files of book/fonts.

The fonts are there before the first line is drawn, so that no page jumps, and where a browser opens the book from a
folder too.
"""

import base64
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

FONTS = Path(__file__).parents[1] / "fonts"


@dataclass(frozen=True)
class Face:
    """One of a family's fonts, and what it is used for."""

    family: str
    style: str
    weights: str  # "lightest heaviest"


FACES = {  # name of a file
    "Inter-Regular": Face("Inter", "normal", "100 500"),
    "Inter-Italic": Face("Inter", "italic", "100 900"),
    "Inter-SemiBold": Face("Inter", "normal", "501 900"),
    "JetBrainsMono-Regular": Face("JetBrains Mono", "normal", "100 500"),
    "JetBrainsMono-Bold": Face("JetBrains Mono", "normal", "501 900"),
}


def font_face(name: str) -> str:
    """The ``@font-face`` rule of a face, with the font in it."""
    face = FACES[name]
    font = base64.b64encode((FONTS / f"{name}.woff2").read_bytes()).decode()
    return (
        f"@font-face {{ font-family: '{face.family}'; font-style: {face.style}; font-weight: {face.weights}; "
        f"font-display: block; src: url(data:font/woff2;base64,{font}) format('woff2'); }}"
    )


def write_style_sheet(app: Sphinx) -> None:
    if app.builder.format != "html":
        return
    folder = Path(app.outdir, "_static")
    folder.mkdir(exist_ok=True)
    licences = sorted(FONTS.glob("*-OFL.txt"))
    for path in licences:
        shutil.copy(path, folder)
    names = " and ".join(path.name for path in licences)
    rules = [f"/* The fonts' licences are in {names}. */"]
    for name in FACES:
        rules.append(font_face(name))
    (folder / "fonts.css").write_text("\n".join(rules), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_css_file("fonts.css")
    app.connect("builder-inited", write_style_sheet)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
