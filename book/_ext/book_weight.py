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
UNUSED = {  # what no page of the book uses
    "bootstrap.js",  # menus.js does its part
    "fontawesome.js",  # icons are letters of a font: see book_icons.py
    "searchtools.js",  # the search is the book's own: see book_search.py
    "language_data.js",
    "sphinx_highlight.js",  # marks the words of a search on the page
    "doctools.js",
    "togglebutton.js",  # closed boxes are <details>
    "togglebutton.css",
}
DATA = {"search_entries.js", "minisearch.js"}  # scripts whose strings are no classes
LOADED_FILE = re.compile(
    r'[ \t]*<(?:link|script)\b[^>]*\b(?:href|src)="[^"]*?([\w.-]+\.(?:js|css))(?:\?[^"]*)?"[^>]*>(?:</script>)?\n?'
)
SHORTER = [  # in a page's body: the long form, and one that looks the same
    # Names, punctuation and blanks of a listing have the ink of all code.
    (re.compile(r'<span class="[npw]">([^<]*)</span>'), r"\1"),
    # A rectangle of a drawing, as matplotlib writes it.
    (re.compile(r"M(\S+) (\S+)L(\S+) \2L\3 (\S+)L\1 \4(?:L\1 \2)?z"), r"M\1 \2H\3V\4H\1z"),
    # A text begins at its place unless a rule says otherwise.
    (re.compile(r"(<text [^>]*?);text-anchor:start"), r"\1"),
]
STRING = re.compile(r"""(["'`])((?:\\.|(?!\1).)*)\1""", re.S)  # of a script
NAME = re.compile(r"-?[A-Za-z_][\w-]*")  # of a class, an id or a tag
VARIABLE_READ = re.compile(r"(?:var\(|Property(?:Value)?\(.)\s*(--[\w-]+)")  # by CSS, or by a script
LICENCE = re.compile(r"/\*!.*?\*/", re.S)


# --- style sheets -----------------------------------------------------------------------------------------------------


def names_in_use(pages: Iterable[str], scripts: Iterable[str]) -> set[str]:
    """The classes, ids and tags of pages, and each word of a script's strings, which may become one."""
    names = {"html", "body", "head"}
    for page in pages:
        names.update(re.findall(r"<([a-z][\w-]*)", page))
        for value in re.findall(r"""\b(?:class|id)=["']([^"']*)["']""", page):
            names.update(value.split())
    for script in scripts:
        for _, string in STRING.findall(script):
            names.update(NAME.findall(string))
    return names


def lighten(sheets: dict[Path, str], names: set[str], other_texts: list[str]) -> dict[Path, str]:
    """The style sheets without what no page matches. ``other_texts`` may read variables too."""
    rules = {path: tinycss2.parse_stylesheet(sheet, skip_comments=True, skip_whitespace=True)
             for path, sheet in sheets.items()}  # fmt: skip
    variables = None  # At first all of them are kept. Each round drops those that only dropped ones had read.
    while True:
        light = {path: reduced(rules[path], names, variables) for path in sheets}
        still_read = set(VARIABLE_READ.findall("\n".join([*light.values(), *other_texts])))
        if still_read == variables:
            break
        variables = still_read
    return {path: "".join(LICENCE.findall(sheet)) + light[path] for path, sheet in sheets.items()}


def reduced(rules: list, names: set[str], variables: set[str] | None) -> str:
    """The rules that can match, as CSS, with the variables that are read; with None for ``variables`` all of them."""
    kept = ""
    for rule in rules:
        if rule.type == "qualified-rule":
            kept += reduced_rule(rule, names, variables)
        elif rule.type == "at-rule" and rule.lower_at_keyword in ("media", "supports", "layer") and rule.content:
            inner_rules = tinycss2.parse_rule_list(rule.content, skip_comments=True, skip_whitespace=True)
            inside = reduced(inner_rules, names, variables)
            if inside:
                kept += f"@{rule.at_keyword} {as_css(rule.prelude)}{{{inside}}}"
        elif rule.type == "at-rule":
            kept += rule.serialize()
        else:
            raise ExtensionError(f"A style sheet has what is no rule in line {rule.source_line}: {rule.message}")
    return kept


def reduced_rule(rule: Any, names: set[str], variables: set[str] | None) -> str:
    """A rule with those of its selectors that can match, or "" if none can or if it says nothing."""
    selectors = []
    for selector in selectors_of(rule.prelude):
        if names.issuperset(required_names(selector)):
            selectors.append(as_css(selector))
    items = tinycss2.parse_blocks_contents(rule.content, skip_comments=True, skip_whitespace=True)
    declarations = []
    for item in items:
        if item.type.endswith("rule"):
            raise ExtensionError(f"A style sheet has rules inside {as_css(rule.prelude)!r}: write them one by one.")
        if item.type != "declaration":
            continue
        is_variable = item.name.startswith("--")
        if is_variable and variables is not None and item.name not in variables:
            continue
        declaration = f"{item.name}:{as_css(item.value)}"
        if item.important:
            declaration += "!important"
        declarations.append(declaration)
    if not selectors or not declarations:
        return ""
    return f"{','.join(selectors)}{{{';'.join(declarations)}}}"


def selectors_of(prelude: list) -> list[list]:
    """The selectors in front of a rule's block, between commas."""
    selectors: list[list] = [[]]
    for token in prelude:
        if token.type == "literal" and token.value == ",":
            selectors.append([])
        else:
            selectors[-1].append(token)
    return selectors


def required_names(selector: list) -> Iterator[str]:
    """The classes, ids and tags that a selector asks for; what a function such as :not() holds asks for nothing."""
    before = None
    for token in selector:
        is_pseudo_class = before == ":"
        if token.type == "hash" or (token.type == "ident" and not is_pseudo_class):
            yield token.value
        before = token.value if token.type == "literal" else None


def as_css(tokens: list) -> str:
    """Tokens as CSS, with one blank where there are several."""
    css = ""
    for token in tokens:
        if token.type == "whitespace":
            css += " "
        else:
            css += token.serialize()
    return css.strip()


# --- pages ------------------------------------------------------------------------------------------------------------


def light_page(page: str) -> str:
    """A page without the files that it does not need, and with shorter forms of what looks the same."""
    article = page.partition("<article")[2].partition("</article>")[0]

    def keep_if_needed(tag: re.Match[str]) -> str:
        file = tag[1]
        if file in UNUSED or NEEDED_BY.get(file, "") not in article:
            return ""
        return tag[0]

    head, body_tag, body = page.partition("<body")
    head = LOADED_FILE.sub(keep_if_needed, head)
    body = LOADED_FILE.sub(keep_if_needed, body)
    for long_form, short_form in SHORTER:
        body = long_form.sub(short_form, body)
    return head + body_tag + body


def make_light(app: Sphinx, exception: Exception | None) -> None:
    if exception or app.builder.format != "html":
        return
    static = Path(app.outdir, "_static")
    for file in UNUSED:
        for path in static.rglob(file):
            path.unlink()

    pages = {}
    for path in Path(app.outdir).rglob("*.html"):
        if "_static" not in path.parts:
            pages[path] = path.read_text(encoding="utf-8")
    for path, page in pages.items():
        path.write_text(light_page(page), encoding="utf-8")

    style_paths = [path for path in static.glob("*.css") if path.name != "fonts.css"]
    style_paths += (static / "styles").glob("*.css")
    script_paths = [path for path in static.glob("*.js") if path.name not in DATA]
    script_paths += (static / "scripts").glob("*.js")
    script_paths += Path(form.__file__).parent.glob("*.py")  # the planner writes HTML in the browser
    sheets = {path: path.read_text(encoding="utf-8") for path in style_paths}
    scripts = [path.read_text(encoding="utf-8") for path in script_paths]
    inline_styles = []
    for page in pages.values():
        scripts += re.findall(r"<script[^>]*>(.+?)</script>", page, re.S)
        inline_styles += re.findall(r'style="[^"]*"', page)
    names = names_in_use(pages.values(), scripts)
    for path, sheet in lighten(sheets, names, scripts + inline_styles).items():
        path.write_text(sheet, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    # Hooks run in the order of their priorities, and 500 is the usual one. This one has to be the last of the event:
    # it reads all pages and scripts that were written, also by the other extensions of this folder, and book_icons.py
    # still needs the whole style sheet.
    app.connect("build-finished", make_light, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
