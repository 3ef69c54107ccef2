"""Make the fonts of book/fonts again: two families from npm, reduced to the characters that a page may need.

It needs npm, and two Python packages that nothing else in this project needs:

    pip install fonttools==4.68.0 brotli==1.2.1 && python tools/subset_fonts.py
"""

import subprocess
import tarfile
import tempfile
from pathlib import Path

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
LATIN, GREEK, PUNCTUATION, DIGITS = "20-7E,A0-17F,218-21B,1E9E", "391-3A9,3B1-3C9", "2010-2044,20AC,2122", "2070-209C"
ARROWS_MATHEMATICS_BOXES_TICKS = "2190-21FF,2200-22FF,27E8-27E9,2500-25FF,2713,2717"
CHARACTERS = ",".join([LATIN, GREEK, PUNCTUATION, DIGITS, ARROWS_MATHEMATICS_BOXES_TICKS])
FEATURES = "kern,mark,mkmk,ccmp,locl,tnum"  # no ligatures: a browser's search does not find their letters

for package, (licence, files) in PACKAGES.items():
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        tarfile.open(next(Path(folder).glob("*.tgz"))).extractall(folder, filter="data")
        for theirs, ours in files.items():
            cut = [f"--unicodes={CHARACTERS}", f"--layout-features={FEATURES}", "--no-hinting", "--flavor=woff2"]
            cut += ["--name-IDs=0,1,2,3,4,5,6,13,14", f"{folder}/package/{theirs}", f"--output-file={FONTS / ours}"]
            subprocess.run(["pyftsubset", *cut], check=True)
        text, family = Path(folder, "package", licence).read_text(), ours.split("-")[0]
        (FONTS / f"{family}-OFL.txt").write_text(f"{family}, from the npm package {package}\n\n{text}")
