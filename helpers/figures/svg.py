"""matplotlib's SVG made small and fit for a page, for ``drawing``. It knows nothing of figures."""

import hashlib
import re
from xml.etree import ElementTree


def compact(drawing: bytes) -> ElementTree.Element:
    """matplotlib's drawing without namespaces, metadata, fonts, long numbers and what is not seen."""
    root = ElementTree.fromstring(drawing)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.tail = None
        if element.tag not in ("text", "tspan") or len(element):  # a power is a text of parts, with blanks between them
            element.text = None
        attributes = [(name.rpartition("}")[2], value) for name, value in element.attrib.items()]
        element.attrib = {name: shorter for name, value in attributes if (shorter := tidy(name, value))}
        if element.attrib.get("id", "").startswith("move "):  # an artist that travels: see sliders.py
            element.attrib["data-move"] = element.attrib.pop("id").removeprefix("move ")
    clean(root)
    return root


def tidy(name: str, value: str) -> str:
    """The value of an SVG attribute with rounded numbers and without a font, or "" for an attribute without effect."""
    if name == "style":
        rules = dict(re.split(r":\s*", rule, maxsplit=1) for rule in re.split(r";\s*", value) if rule)
        rules.pop("font-family", None)
        value = ";".join(f"{key}:{setting}" for key, setting in rules.items())
    digits = {"d": 1, "x": 1, "y": 1, "width": 1, "height": 1, "style": 2, "transform": 2}.get(name)
    if digits:
        value = re.sub(r"-?\d+\.\d+", lambda number: f"{round(float(number[0]), digits) + 0:.8g}", value)
    value = re.sub(r"rotate\(-?0 [^)]*\)", "", " ".join(value.split()))
    if name == "d":
        value = re.sub(r"M (\S+) (\S+) L (\S+) \2 L \3 (\S+) L \1 \4 z", r"M\1 \2H\3V\4H\1z", value)  # a rectangle
        value = re.sub(r" ?([MLHVQCz]) ?", r"\1", value)
    return value


def clean(parent: ElementTree.Element) -> None:
    """Remove what the page does not need from ``parent``: metadata, page-wide styles, invisible paths, bare groups."""
    for child in list(parent):
        clean(child)
        look = child.get("style", "")
        invisible = child.tag == "path" and "fill:none" in look and "stroke:" not in look
        if child.tag in ("metadata", "style", "title") or invisible:
            parent.remove(child)
        elif child.tag == "g" and not (set(child.attrib) - {"id"}):
            where = list(parent).index(child)
            parent.remove(child)
            for offset, grandchild in enumerate(list(child)):
                parent.insert(where + offset, grandchild)
        elif child.tag == "defs" and not len(child):
            parent.remove(child)


def with_own_ids(text: str, salt: str) -> str:
    """An SVG's text in which each id that something refers to is made of the text and of ``salt``."""
    used = dict.fromkeys(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", text))
    for number, name in enumerate(used):
        text = re.sub(rf"(id=\"|#){re.escape(name)}(?=[\")])", rf"\1ID-{number}", text)
    own = "f" + hashlib.sha256((salt + text).encode()).hexdigest()[:8]
    return re.sub(r"(id=\"|#)ID-", rf"\1{own}-", text)
