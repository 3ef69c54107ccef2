"""The order of the code: a file of helpers imports only from its own folder and from those before it in the list."""

import ast
import re

import pytest
from conftest import ROOT

HELPERS = ROOT / "helpers"

# The folders and files of helpers/, in the order of CONTRIBUTING.md, which has a line for each: "- `ranks`: …"
PARTS = re.findall(r"(?m)^- `(\w+)`: ", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))


def imported(code):
    """The names of all modules that a file imports, given its code, inside functions too: ``from a import b`` is a.b.

    A name that is relative to the file's folder begins with a dot.
    """
    names = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level
            module = node.module or ""  # nothing in ``from . import b``
            names += [f"{dots}{module}.{alias.name}" for alias in node.names]
    return names


def out_of_order(code, part):
    """The modules that a file of a part may not import, given the file's code.

    They are those of parts after it, the package as a whole, and relative names, which do not say from where they are.
    """
    wrong = []
    for module in imported(code):
        package, *names_below = module.split(".")
        is_relative = package == ""
        if is_relative:
            wrong.append(module)
        elif package == "helpers":
            if not names_below or PARTS.index(names_below[0]) > PARTS.index(part):
                wrong.append(module)
    return wrong


def test_contributing_lists_all_parts():
    folders = {path.parent.name for path in HELPERS.glob("*/*.py")}
    files = {path.stem for path in HELPERS.glob("*.py")} - {"__init__"}
    assert sorted(PARTS) == sorted(folders | files)


@pytest.mark.parametrize("part", PARTS)
def test_imports_go_only_up_the_list(part):
    files = [HELPERS / f"{part}.py", *(HELPERS / part).rglob("*.py")]
    for path in files:
        if path.exists():
            assert out_of_order(path.read_text(encoding="utf-8"), part) == [], path


def test_importing_the_package_imports_nothing_else():
    """The ranks' forkserver can start before torch does; what loads the extension imports inside its function."""
    for statement in ast.parse((HELPERS / "__init__.py").read_text(encoding="utf-8")).body:
        assert not isinstance(statement, ast.Import)
        if isinstance(statement, ast.ImportFrom):
            assert statement.module == "typing"
