"""Bring only those icons of the theme that pages use: two small fonts in book/fonts, from Font Awesome's.

The theme brings all of Font Awesome twice, as fonts of 270 kB and as a script of 1.5 MB that draws the same icons. The
small fonts take the places of the large ones here, and book_weight.py removes the script. tools/subset_fonts.py makes
the small fonts.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

FONTS = Path(__file__).parents[1] / "fonts"


@dataclass(frozen=True)
class IconFont:
    """A small font, and the characters in it: what buttons, links and admonitions show."""

    file: str
    codes: list[str]  # hexadecimal


ICONS = {  # the theme's font: the small one
    "fa-solid-900": IconFont(
        "Icons-Solid.woff2",
        codes="f002 f010 f019 f03a f042 f057 f058 f05a f062 f064 f065 f06a f071 f0c9 f0eb f0f3 f104 f105 f121 f135 "
        "f15b f185 f186 f1c1 f303 f304 f35d".split(),
    ),
    "fa-brands-400": IconFont("Icons-Brands.woff2", codes=["f09b"]),
}


def used_icons(style_sheet: str, pages: list[str]) -> dict[str, str]:
    """{icon: code} of the icons that pages name in a class, such as fa-bars. The theme's style sheet has the codes."""
    code_of = {}
    for selectors, code in re.findall(r'((?:\.fa-[a-z0-9-]+:before,?)+)\{content:"\\(\w+)"\}', style_sheet):
        for name in re.findall(r"\.fa-([a-z0-9-]+):before", selectors):
            code_of[name] = code
    used = {}
    for page in pages:
        for name in re.findall(r"\bfa-([a-z-]+)\b", page):
            if name in code_of:  # others, such as fa-solid and fa-lg, are no icons
                used[name] = code_of[name]
    return used


def missing_icons(style_sheet: str, pages: list[str]) -> dict[str, str]:
    """{icon: code} of the icons that pages use and that the small fonts lack."""
    in_fonts = {code for font in ICONS.values() for code in font.codes}
    return {name: code for name, code in used_icons(style_sheet, pages).items() if code not in in_fonts}


def replace_fonts(app: Sphinx, exception: Exception | None) -> None:
    if exception or app.builder.format != "html":
        return
    static = Path(app.outdir, "_static")
    style_sheet = (static / "styles" / "pydata-sphinx-theme.css").read_text(encoding="utf-8")
    pages = [page.read_text(encoding="utf-8") for page in Path(app.outdir).rglob("*.html")]
    missing = missing_icons(style_sheet, pages)
    if missing:
        raise ExtensionError(f"The fonts of icons lack {missing}: add them to ICONS, and run tools/subset_fonts.py.")
    for name, font in ICONS.items():
        copyfile(FONTS / font.file, static / "vendor" / "fontawesome" / "webfonts" / f"{name}.woff2")


def setup(app: Sphinx) -> dict[str, Any]:
    # book_weight.py comes after it: it removes from the style sheet what is read here.
    app.connect("build-finished", replace_fonts)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
