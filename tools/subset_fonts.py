"""Make the fonts of book/_static/fonts again: two families from npm, with what a page may need, and the theme's icons.

It needs npm, and two Python packages that nothing else in this project needs:

    pip install fonttools==4.68.0 brotli==1.2.1 && python tools/subset_fonts.py
"""

import re
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from fontTools.pens.transformPen import TransformPen
from fontTools.pens.ttGlyphPen import TTGlyphPen
from fontTools.ttLib import TTFont

FONTS = Path(__file__).parents[1] / "book" / "_static" / "fonts"


@dataclass(frozen=True)
class Package:
    """A package of npm with a family of fonts."""

    name: str  # and version
    family: str
    licence: str  # the file with the licence in the package
    fonts: dict[str, str]  # {a font's file in the package: its file in FONTS}


PACKAGES = [
    Package(
        "inter-ui@4.1.1",
        family="Inter",
        licence="LICENSE.txt",
        fonts={
            "web/Inter-Regular.woff2": "Inter-Regular.woff2",
            "web/Inter-Italic.woff2": "Inter-Italic.woff2",
            "web/Inter-SemiBold.woff2": "Inter-SemiBold.woff2",
        },
    ),
    Package(
        "@expo-google-fonts/jetbrains-mono@0.4.1",
        family="JetBrainsMono",
        licence="LICENSE_FONT",
        fonts={
            "400Regular/JetBrainsMono_400Regular.ttf": "JetBrainsMono-Regular.woff2",
            "700Bold/JetBrainsMono_700Bold.ttf": "JetBrainsMono-Bold.woff2",
        },
    ),
]
# The characters that the fonts keep, as ranges of Unicode numbers. If a page uses another one, tests/test_browser.py
# fails.
CHARACTERS = [
    "20-7E,A0,A7,A9,AB,B0-B7,B9,BB-BE,C0-D6,D7,D8-F6,F7,F8-FC",  # Latin
    "391-3A9,3B1-3C9",  # Greek
    "2010-2015,2018-201E,2022,2026,2032,203A,20AC",  # punctuation
    "2070,2074-208E",  # small digits
    "2113,2190-2194,2202,2207,2208,2211,2212,221A,221E,2248,2260,2264,2265,22C5",  # arrows, mathematics
    "2500,2502,250C,2510,2514,2518,251C,2524,252C,2534,253C,2588,25CF,2713,2717",  # boxes, ticks
]
NABLA = 0x2207
CAPITAL_DELTA = 0x394
FEATURES = "--layout-features=kern,mark,mkmk,ccmp,locl,tnum"  # no ligatures: a search would not find their letters


def subset(font: Path, out: Path, *options: str) -> None:
    """Write a font with only some of its characters, as ``options`` of fonttools' pyftsubset say."""
    names = "--name-IDs=0,1,2,3,4,5,6,13,14"  # what a font says of itself and of its licence
    command = ["pyftsubset", str(font), f"--output-file={out}", "--no-hinting", "--flavor=woff2", names, *options]
    subprocess.run(command, check=True)


def make_fonts(package: Package) -> None:
    """Fetch a family of fonts from npm, and write its fonts, with only the characters that pages use, and its licence.

    They are written to ``FONTS``, the book's folder of fonts.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(["npm", "pack", "--silent", package.name], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        [archive_file] = folder.glob("*.tgz")
        with tarfile.open(archive_file) as archive:
            archive.extractall(folder, filter="data")
        unpacked = folder / "package"  # every archive of npm has this folder
        for file_of_package, file_of_book in package.fonts.items():
            subset(unpacked / file_of_package, FONTS / file_of_book, f"--unicodes={','.join(CHARACTERS)}", FEATURES)
        licence = (unpacked / package.licence).read_text()
    text = f"{package.family}, from the npm package {package.name}\n\n{licence}"
    (FONTS / f"{package.family}-OFL.txt").write_text(text)


def add_nabla(path: Path) -> None:
    """Add the character ∇ to the font file ``path``: a capital delta, Δ, upside down.

    A formula of the book needs it, and none of the fonts has it.
    """
    font = TTFont(path)
    delta = font.getBestCmap()[CAPITAL_DELTA]  # the name of its glyph
    outline = font["glyf"][delta]
    # An affine map of the outline, as (xx, xy, yx, yy, dx, dy): it turns y into yMin + yMax - y, so that the triangle
    # stands on its tip, between the same two heights.
    upside_down = (1, 0, 0, -1, 0, outline.yMin + outline.yMax)
    pen = TTGlyphPen(None)
    font.getGlyphSet()[delta].draw(TransformPen(pen, upside_down))
    font["glyf"]["nabla"] = pen.glyph()  # the table of outlines
    font["hmtx"]["nabla"] = font["hmtx"][delta]  # the table of widths: it is as wide as delta
    for table in font["cmap"].tables:  # the tables of characters: which glyph draws a character
        table.cmap[NABLA] = "nabla"
    font.save(path)


def make_icons() -> None:
    """Make the icon fonts, from those of Font Awesome that the theme brings, with only the icons that pages show.

    fonts.css lists these icons.
    """
    theme = Path(str(files("pydata_sphinx_theme"))) / "theme" / "pydata_sphinx_theme"
    fonts_of_theme = theme / "static" / "vendor" / "fontawesome" / "webfonts"
    style_sheet = (FONTS / "fonts.css").read_text(encoding="utf-8")
    for name_in_theme, name in {"fa-solid-900": "Icons-Solid", "fa-brands-400": "Icons-Brands"}.items():
        # In the style sheet each font has a rule with its file and, after it, the list of its characters:
        # src: url(Icons-Solid.woff2) …; unicode-range: U+F002, U+F00C;
        [characters] = re.findall(rf"url\({name}\.woff2\).*?unicode-range: ([^;]+);", style_sheet, flags=re.S)
        without_spaces = "".join(characters.split())
        subset(fonts_of_theme / f"{name_in_theme}.ttf", FONTS / f"{name}.woff2", f"--unicodes={without_spaces}")


def main() -> None:
    """Write all fonts of the book anew."""
    for package in PACKAGES:
        make_fonts(package)
    add_nabla(FONTS / "Inter-Regular.woff2")
    make_icons()


if __name__ == "__main__":
    main()
