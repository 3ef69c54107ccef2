"""Make the SVG that matplotlib writes small, and its ids unique on a page, for ``drawing``."""

import hashlib
import re
from xml.etree import ElementTree

# Digits after the point that a number keeps in each attribute. A tenth of a pixel is not seen; opacities and scales
# need two digits.
DIGITS = {"d": 1, "x": 1, "y": 1, "width": 1, "height": 1, "style": 2, "transform": 2}
NUMBER = re.compile(r"-?\d+\.\d+")
# A path around a rectangle, as matplotlib writes it: "M 10 20 L 30 20 L 30 45 L 10 45 z". The groups are the left side,
# the top, the right side and the bottom.
RECTANGLE = re.compile(r"M (\S+) (\S+) L (\S+) \2 L \3 (\S+) L \1 \4 z")
# Where one element refers to another by its id: url(#NAME) or href="#NAME".
REFERENCE = re.compile(r"(?:url\(#|href=\"#)([^)\"]+)")


def compact(drawing: bytes) -> ElementTree.Element:
    """Parse an SVG of matplotlib, and drop what a page does not need: metadata, fonts, digits, invisible elements."""
    root = ElementTree.fromstring(drawing)
    for element in root.iter():
        element.tag = without_namespace(element.tag)
        remove_line_breaks(element)
        element.attrib = compact_attributes(element)
    remove_unneeded(root)
    return root


def remove_line_breaks(element: ElementTree.Element) -> None:
    """Remove the white space between tags. Only an innermost <text> or <tspan> has words.

    A <text> can have line breaks as well: matplotlib writes a power such as 10⁻³ as a <text> of several <tspan>.
    """
    element.tail = None
    has_words = element.tag in ("text", "tspan") and len(element) == 0
    if not has_words:
        element.text = None


def compact_attributes(element: ElementTree.Element) -> dict[str, str]:
    """An element's attributes without namespaces, and shortened by ``tidy``."""
    attributes = {}
    for full_name, value in element.attrib.items():
        name = without_namespace(full_name)
        short_value = tidy(name, value)
        if short_value:
            attributes[name] = short_value
    # An artist that sliders.js moves has the gid "move 0 -42" (see explore), which matplotlib writes as its id.
    if attributes.get("id", "").startswith("move "):
        attributes["data-move"] = attributes.pop("id").removeprefix("move ")
    return attributes


def without_namespace(name: str) -> str:
    """``{http://www.w3.org/2000/svg}path`` as ``path``."""
    return name.rpartition("}")[2]


def tidy(name: str, value: str) -> str:
    """Shorten the value of the SVG attribute ``name``; "" says that the attribute has no effect.

    - Numbers are rounded.
    - The font is left out of a style.
    - In a path, such as ``d="M 1.04 2.5 L 7.25 2.5"``, spaces are left out, and the four sides of a rectangle become
      horizontal and vertical lines.
    """
    if name == "style":
        value = without_font(value)
    if name in DIGITS:
        value = with_rounded_numbers(value, DIGITS[name])
    value = " ".join(value.split())
    value = re.sub(r"rotate\(-?0 [^)]*\)", "", value)  # "rotate(-0 12 34)", by 0 degrees, does nothing
    is_path = name == "d"
    if is_path:
        # The commands M, L, H, V and z mean: move to, line to, horizontal line, vertical line, close the path.
        value = RECTANGLE.sub(r"M\1 \2H\3V\4H\1z", value)
        value = re.sub(r" ?([MLHVQCz]) ?", r"\1", value)  # commands need no spaces around them
    return value


def without_font(style: str) -> str:
    """The rules of a style attribute without the font: ``fill:red`` for ``fill: red; font-family: Arial``.

    A page's own style sheet says in which font a figure's text is.
    """
    rules = []
    for rule in style.split(";"):
        rule = rule.strip()
        if rule and not rule.startswith("font-family:"):
            rules.append(re.sub(r":\s*", ":", rule, count=1))
    return ";".join(rules)


def with_rounded_numbers(text: str, digits: int) -> str:
    """A text in which each number has at most so many digits after the point: ``M 1 2.5`` for ``M 1.04 2.5``."""

    def round_match(match: re.Match[str]) -> str:
        return rounded(match[0], digits)

    return NUMBER.sub(round_match, text)


def rounded(number: str, digits: int) -> str:
    """A number with so many digits after the point, and without zeros at its end: ``12`` for ``12.00``."""
    value = round(float(number), digits)
    value = value + 0  # This makes a negative zero, from -0.01, positive.
    return f"{value:.8g}"


def remove_unneeded(parent: ElementTree.Element) -> None:
    """Remove metadata, style sheets, invisible paths and empty definitions from all levels of an SVG below ``parent``.

    A group without attributes, or with an id alone, has no effect, so it is replaced by its children.
    """
    for child in list(parent):
        remove_unneeded(child)
        style = child.get("style", "")
        is_about_the_file = child.tag in ("metadata", "style", "title")
        is_invisible = child.tag == "path" and "fill:none" in style and "stroke:" not in style
        is_empty = child.tag == "defs" and len(child) == 0
        has_only_an_id = all(name == "id" for name in child.attrib)
        if is_about_the_file or is_invisible or is_empty:
            parent.remove(child)
        elif child.tag == "g" and has_only_an_id:
            index = list(parent).index(child)
            parent.remove(child)
            for offset, grandchild in enumerate(list(child)):
                parent.insert(index + offset, grandchild)


def with_own_ids(text: str, salt: str) -> str:
    """Replace the ids in an SVG's text by ids that no other drawing of a page has: ``f1a2b3c4d-0`` and so on.

    They are made of a hash of the text and of ``salt``, so that the same drawing has the same ids every time.
    """
    # matplotlib's ids depend on the figures that were drawn before, so they may not be in the text of which the hash is
    # made. They are replaced by ID-0, ID-1 and so on until the hash is known.
    ids: list[str] = []
    for name in REFERENCE.findall(text):
        if name not in ids:
            ids.append(name)
    for number, name in enumerate(ids):
        # The element has the id as id="NAME", and other elements refer to it by "#NAME" or url(#NAME).
        text = re.sub(rf"(id=\"|#){re.escape(name)}(?=[\")])", rf"\1ID-{number}", text)
    prefix = "f" + hashlib.sha256((salt + text).encode()).hexdigest()[:8]
    return re.sub(r"(id=\"|#)ID-", rf"\1{prefix}-", text)
