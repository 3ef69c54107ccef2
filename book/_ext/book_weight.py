"""Make the pages light: of all style sheets, keep what a page of this book can match.

The theme's sheet is all of Bootstrap and of Font Awesome, 390 kB, and a page uses a tenth of it. A rule stays where
each of its classes, ids and tags is somewhere in a page, or in a string of a script that may add it. So does a variable
that something reads. A script that only pages with a certain thing need is loaded by these pages alone.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tinycss2
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

from helpers.planner import form

NEEDED_BY = {  # file: what a page's article has, if the page needs the file
    "hero.css": 'class="hero"',
    "hero.js": 'class="hero"',
    "figures.js": 'class="wso',
    "filter.js": "sabotage",
    "planner.css": 'class="planner"',
    "planner.js": 'class="planner"',
    "design-tabs.js": 'class="sd-tab',
}
NEVER = {  # what no page of the book uses: menus.js does Bootstrap's part, icons are letters of a font, and the search
    "bootstrap.js",  # is the book's own
    "fontawesome.js",
    "sphinx_highlight.js",
    "doctools.js",
    "togglebutton.js",
    "togglebutton.css",
}
LOADS = re.compile(
    r'[ \t]*<(?:link|script)\b[^>]*\b(?:href|src)="[^"]*?([\w.-]+\.(?:js|css))(?:\?[^"]*)?"[^>]*>(?:</script>)?\n?'
)
PLAIN = re.compile(r'<span class="[npw]">([^<]*)</span>')  # names, punctuation and blanks have the ink of all code
# A rectangle of a drawing, as matplotlib writes it, and shorter; and the place of a text that it has anyway.
SHORTER = [
    (re.compile(r"M(\S+) (\S+)L(\S+) \2L\3 (\S+)L\1 \4(?:L\1 \2)?z"), r"M\1 \2H\3V\4H\1z"),
    (re.compile(r"(<text [^>]*?);text-anchor:start"), r"\1"),
]
DATA = {"search_entries.js", "minisearch.js"}  # no classes are in them
STRINGS = re.compile(r"""(["'`])((?:\\.|(?!\1).)*)\1""", re.S)
WORD = re.compile(r"-?[A-Za-z_][\w-]*")


def words(pages: Iterable[str], scripts: Iterable[str]) -> set[str]:
    """The classes, ids and tags of pages, and each word of a script's strings, which may become one."""
    known = {"html", "body", "head"}
    for page in pages:
        known.update(re.findall(r"<([a-z][\w-]*)", page))
        for value in re.findall(r"""\b(?:class|id)=["']([^"']*)["']""", page):
            known.update(value.split())
    for script in scripts:
        for _, string in STRINGS.findall(script):
            known.update(WORD.findall(string))
    return known


def names(selector: list) -> Iterator[str]:
    """The classes, ids and tags that a selector asks for; what a function such as :not() holds asks for nothing."""
    before = None
    for token in selector:
        if token.type == "hash" or (token.type == "ident" and before != ":"):
            yield token.value
        before = token.value if token.type == "literal" else None


def selectors(prelude: list) -> Iterator[list]:
    part: list = []
    for token in prelude:
        if token.type == "literal" and token.value == ",":
            yield part
            part = []
        else:
            part.append(token)
    yield part


def text(tokens: list) -> str:
    """Tokens as CSS, with one blank where there are several."""
    return "".join(" " if token.type == "whitespace" else token.serialize() for token in tokens).strip()


def reduced(rules: list, known: set[str], variables: set[str] | None) -> str:
    """The rules that can match, with the variables that are read; with None for ``variables`` all of them."""
    kept = []
    for rule in rules:
        if rule.type == "qualified-rule":
            alive = [text(part) for part in selectors(rule.prelude) if known.issuperset(names(part))]
            items = tinycss2.parse_blocks_contents(rule.content, True, True)
            if any(item.type.endswith("rule") for item in items):
                raise ExtensionError(f"A style sheet has rules inside {text(rule.prelude)!r}: write them one by one.")
            content = [
                f"{item.name}:{text(item.value)}{'!important' * item.important}"
                for item in items
                if item.type == "declaration"
                and (variables is None or not item.name.startswith("--") or item.name in variables)
            ]
            if alive and content:
                kept.append(f"{','.join(alive)}{{{';'.join(content)}}}")
        elif rule.type == "at-rule" and rule.lower_at_keyword in ("media", "supports", "layer") and rule.content:
            if inside := reduced(tinycss2.parse_rule_list(rule.content, True, True), known, variables):
                kept.append(f"@{rule.at_keyword} {text(rule.prelude)}{{{inside}}}")
        elif rule.type == "at-rule":
            kept.append(rule.serialize())
        else:
            raise ExtensionError(f"A style sheet has what is no rule in line {rule.source_line}: {rule.message}")
    return "".join(kept)


def read_variables(texts: Iterable[str]) -> set[str]:
    """Variables that CSS or a script reads."""
    return {name for part in texts for name in re.findall(r"(?:var\(|Property(?:Value)?\(.)\s*(--[\w-]+)", part)}


def lighten(sheets: dict[Path, str], known: set[str], others: list[str]) -> dict[Path, str]:
    """The style sheets without what no page matches. ``others`` is further text that reads variables."""
    parsed = {path: tinycss2.parse_stylesheet(sheet, True, True) for path, sheet in sheets.items()}
    light = {path: reduced(rules, known, None) for path, rules in parsed.items()}
    variables: set[str] = set()
    while variables != (read := read_variables([*light.values(), *others])):
        variables = read
        light = {path: reduced(rules, known, variables) for path, rules in parsed.items()}
    licences = {path: "".join(re.findall(r"/\*!.*?\*/", sheet, re.S)) for path, sheet in sheets.items()}
    return {path: licences[path] + sheet for path, sheet in light.items()}


def light_page(page: str) -> str:
    """A page without the files that it does not need, and without spans that change nothing."""
    article = page.partition("<article")[2].partition("</article>")[0]

    def kept(match: re.Match[str]) -> str:
        name = match[1]
        return "" if name in NEVER or NEEDED_BY.get(name, "") not in article else match[0]

    head, body, rest = page.partition("<body")
    rest = PLAIN.sub(r"\1", LOADS.sub(kept, rest))
    for long, short in SHORTER:
        rest = long.sub(short, rest)
    return LOADS.sub(kept, head) + body + rest


def make_light(app: Sphinx, exception: Exception | None) -> None:
    if exception or app.builder.format != "html":
        return
    out = Path(app.outdir)
    pages = {path: path.read_text(encoding="utf-8") for path in out.rglob("*.html") if "_static" not in path.parts}
    for path, page in pages.items():
        if (light := light_page(page)) != page:
            path.write_text(light, encoding="utf-8")
    files = [*(out / "_static").glob("*.*s"), *(out / "_static" / "styles").glob("*.css")]
    files += (out / "_static" / "scripts").glob("*.js")
    texts = {path: path.read_text(encoding="utf-8") for path in files if path.name not in NEVER | {"fonts.css"}}
    scripts = [part for page in pages.values() for part in re.findall(r"<script[^>]*>(.+?)</script>", page, re.S)]
    scripts += [text for path, text in texts.items() if path.suffix == ".js" and path.name not in DATA]
    scripts += [path.read_text(encoding="utf-8") for path in Path(form.__file__).parent.glob("*.py")]  # it writes HTML
    styles = [style for page in pages.values() for style in re.findall(r'style="[^"]*"', page)]
    sheets = {path: text for path, text in texts.items() if path.suffix == ".css"}
    for path, light in lighten(sheets, words(pages.values(), scripts), scripts + styles).items():
        path.write_text(light, encoding="utf-8")
    for name in NEVER:
        for path in (out / "_static").rglob(name):
            path.unlink()


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", make_light, priority=900)  # after those that write files
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
