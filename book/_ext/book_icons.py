"""Bring only those icons of the theme that pages use: two small fonts in book/fonts, from Font Awesome's.

The theme brings all of Font Awesome twice, as fonts of 270 kB and as a script of 1.5 MB that draws the same icons. The
small fonts take the places of the large ones, and the script is emptied. tools/subset_fonts.py makes the small fonts.
"""

import re
from pathlib import Path
from shutil import copyfile
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

FONTS = Path(__file__).parents[1] / "fonts"
ICONS = {  # the theme's font: (ours, the letters in it: what buttons, links and admonitions show)
    "fa-solid-900": (
        "Icons-Solid.woff2",
        "f002 f010 f019 f03a f042 f057 f058 f05a f062 f064 f065 f06a f071 f0c9 f0eb f0f3 f104 f105 f121 f135 f15b "
        "f185 f186 f1c1 f303 f304 f35d",
    ),
    "fa-brands-400": ("Icons-Brands.woff2", "f09b"),
}
CODES = {code for _, codes in ICONS.values() for code in codes.split()}


def used(style_sheet: str, pages: list[str]) -> dict[str, str]:
    """{icon: code} of the icons that pages name in a class, such as fa-bars, and of those that the theme adds."""
    classes = {name for page in pages for name in re.findall(r"\bfa-([a-z-]+)\b", page)}
    codes = {}
    for names, code in re.findall(r'((?:\.fa-[a-z0-9-]+:before,?)+)\{content:"\\(\w+)"\}', style_sheet):
        codes |= dict.fromkeys(re.findall(r"\.fa-([a-z0-9-]+):before", names), code)
    return {name: codes[name] for name in classes & codes.keys()}


def reduce_icons(app: Sphinx, exception: Exception | None) -> None:
    if exception or app.builder.format != "html":
        return
    static = Path(app.outdir, "_static")
    sheet = (static / "styles" / "pydata-sphinx-theme.css").read_text(encoding="utf-8")
    pages = [page.read_text(encoding="utf-8") for page in Path(app.outdir).rglob("*.html")]
    if missing := {name: code for name, code in used(sheet, pages).items() if code not in CODES}:
        raise ExtensionError(f"The fonts of icons lack {missing}: add them to ICONS, and run tools/subset_fonts.py.")
    for theirs, (ours, _) in ICONS.items():
        copyfile(FONTS / ours, static / "vendor" / "fontawesome" / "webfonts" / f"{theirs}.woff2")
    (static / "scripts" / "fontawesome.js").write_text("// Icons are letters of a font.\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", reduce_icons)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
