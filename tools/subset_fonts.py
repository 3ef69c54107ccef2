"""Make the fonts of book/fonts again: two families from npm, reduced to the characters that a page may need, and icons.

It needs npm, and two Python packages that nothing else in this project needs:

    pip install fonttools==4.68.0 brotli==1.2.1 && python tools/subset_fonts.py
"""

import subprocess
import sys
import tarfile
import tempfile
from importlib.resources import files
from pathlib import Path

from fontTools.pens.transformPen import TransformPen
from fontTools.pens.ttGlyphPen import TTGlyphPen
from fontTools.ttLib import TTFont

sys.path.insert(0, str(Path(__file__).parents[1] / "book" / "_ext"))
from book_fonts import FACES_OF_DRAWINGS
from book_icons import ICONS

FONTS = Path(__file__).parents[1] / "book" / "fonts"
PACKAGES = {  # npm package: (its licence, {its file: ours})
    "inter-ui@4.1.1": (
        "LICENSE.txt",
        {f"web/Inter-{style}.woff2": f"Inter-{style}.woff2" for style in ["Regular", "Italic", "SemiBold"]},
    ),
    "@expo-google-fonts/jetbrains-mono@0.4.1": (
        "LICENSE_FONT",
        {f"{name}/JetBrainsMono_{name}.ttf": f"JetBrainsMono-{name[3:]}.woff2" for name in ["400Regular", "700Bold"]},
    ),
}
# A character that pages use and that is not among these fails tests/test_browser.py, page by page.
LATIN, GREEK = "20-7E,A0,A7,A9,AB,B0-B7,B9,BB-BE,C0-D6,D7,D8-F6,F7,F8-FC", "391-3A9,3B1-3C9"
PUNCTUATION, DIGITS = "2010-2015,2018-201E,2022,2026,2032,203A,20AC", "2070,2074-208E"
ARROWS_MATHEMATICS = "2113,2190-2194,2202,2207,2208,2211,2212,221A,221E,2248,2260,2264,2265,22C5"
BOXES_TICKS = "2500,2502,250C,2510,2514,2518,251C,2524,252C,2534,253C,2588,25CF,2713,2717"
CHARACTERS = ",".join([LATIN, GREEK, PUNCTUATION, DIGITS, ARROWS_MATHEMATICS, BOXES_TICKS])
NAMES = "--name-IDs=0,1,2,3,4,5,6,13,14"
FEATURES = "kern,mark,mkmk,ccmp,locl,tnum"  # no ligatures: a browser's search does not find their letters

for package, (licence, names) in PACKAGES.items():
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        tarfile.open(next(Path(folder).glob("*.tgz"))).extractall(folder, filter="data")
        for theirs, ours in names.items():
            cut = [f"--unicodes={CHARACTERS}", f"--layout-features={FEATURES}", "--no-hinting", "--flavor=woff2"]
            cut += [NAMES, f"{folder}/package/{theirs}", f"--output-file={FONTS / ours}"]
            subprocess.run(["pyftsubset", *cut], check=True)
        text, family = Path(folder, "package", licence).read_text(), ours.split("-")[0]
        (FONTS / f"{family}-OFL.txt").write_text(f"{family}, from the npm package {package}\n\n{text}")

# Neither family has a nabla, which a formula needs: it is a delta that stands on its head.
path = FONTS / "Inter-Regular.woff2"
font = TTFont(path)
delta = font.getBestCmap()[0x394]
pen = TTGlyphPen(None)
upside_down = (1, 0, 0, -1, 0, font["glyf"][delta].yMin + font["glyf"][delta].yMax)
font.getGlyphSet()[delta].draw(TransformPen(pen, upside_down))
font["glyf"]["nabla"] = pen.glyph()
font["hmtx"]["nabla"] = font["hmtx"][delta]
for table in font["cmap"].tables:
    table.cmap[0x2207] = "nabla"
font.save(path)

# A drawing that a page shows as an image carries its fonts: only the letters in it.
letters = "".join(
    sorted({letter for path in FONTS.parent.glob("*.svg") for letter in path.read_text(encoding="utf-8")})
)
for face in OF_DRAWINGS:
    cut = [f"--text={letters}", f"--layout-features={FEATURES}", "--no-hinting", "--flavor=woff2", NAMES]
    drawn = f"--output-file={FONTS / f'Drawn-{face}.woff2'}"
    subprocess.run(["pyftsubset", FONTS / f"{face}.woff2", *cut, drawn], check=True)

# The theme's icons are Font Awesome's.
static = Path(str(files("pydata_sphinx_theme"))) / "theme" / "pydata_sphinx_theme" / "static"
for theirs, (ours, codes) in ICONS.items():
    cut = [f"--unicodes={codes.replace(' ', ',')}", "--no-hinting", "--flavor=woff2", NAMES]
    icons = static / "vendor" / "fontawesome" / "webfonts" / f"{theirs}.ttf"
    subprocess.run(["pyftsubset", icons, *cut, f"--output-file={FONTS / ours}"], check=True)
