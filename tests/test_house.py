"""The order of the code: a file of helpers imports only from its own folder and from those before it in the list."""

import ast
import re

import pytest
from conftest import ROOT

HELPERS = ROOT / "helpers"

# The folders and files of helpers/, in CONTRIBUTING.md's order.
PARTS = re.findall(r"(?m)^- `(\w+)`: ", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))


def imported(code):
    """The names of all modules that the code imports, inside functions too. ``from a import b`` is a.b."""
    names = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level
            names += [f"{dots}{node.module or ''}.{alias.name}" for alias in node.names]
    return names


def out_of_order(code, part):
    """What the code of a part imports from parts after it, or by a relative name, which does not say from where."""
    wrong = []
    for module in imported(code):
        names = module.split(".")
        if names == ["helpers"] or names[0] == "":
            wrong.append(module)
        elif names[0] == "helpers" and PARTS.index(names[1]) > PARTS.index(part):
            wrong.append(module)
    return wrong


def test_contributing_lists_all_parts():
    folders = {path.parent.name for path in HELPERS.glob("*/*.py")}
    assert sorted([*PARTS, "__init__"]) == sorted(folders | {path.stem for path in HELPERS.glob("*.py")})


@pytest.mark.parametrize("part", PARTS)
def test_imports_go_only_up_the_list(part):
    files = [HELPERS / f"{part}.py", *(HELPERS / part).rglob("*.py")]
    for path in files:
        if path.exists():
            assert out_of_order(path.read_text(encoding="utf-8"), part) == [], path


def test_importing_the_package_imports_nothing_else():
    """The ranks' forkserver can start before torch does; what loads the extension imports inside its function."""
    body = ast.parse((HELPERS / "__init__.py").read_text(encoding="utf-8")).body
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert {getattr(node, "module", None) for node in imports} <= {"typing"}
