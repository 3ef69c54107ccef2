"""The order of the code: imports go down the list of rooms."""

import ast
import re

import pytest
from conftest import ROOT

HELPERS = ROOT / "helpers"

# The folders and files of helpers/ in CONTRIBUTING.md's order: each imports only from itself and from those before.
ROOMS = re.findall(r"(?m)^- `(\w+)`: ", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))


def imports(code):
    """Yields (line, module) for each import of a code, inside functions too. ``from a import b`` is a.b."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (f"{node.module}." if node.module else "")
            yield from ((node.lineno, f"{base}{alias.name}") for alias in node.names)


def climbs(code, room):
    """What the code of a room imports from rooms that stand after it, or by a relative name, which says no room."""
    for line, module in imports(code):
        names = module.split(".")
        relative = names[0] == ""
        if relative or module == "helpers" or (names[0] == "helpers" and ROOMS.index(names[1]) > ROOMS.index(room)):
            yield f"line {line} imports {module}"


def test_contributing_lists_all_rooms():
    folders = {path.parent.name for path in HELPERS.glob("*/*.py")}
    assert sorted([*ROOMS, "__init__"]) == sorted(folders | {path.stem for path in HELPERS.glob("*.py")})


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_only_down_the_list(room):
    files = [HELPERS / f"{room}.py", *(HELPERS / room).rglob("*.py")]
    codes = {path.name: path.read_text(encoding="utf-8") for path in files if path.exists()}
    assert [f"{name}: {climb}" for name, code in codes.items() for climb in climbs(code, room)] == []


def test_importing_the_package_imports_nothing_else():
    """The ranks' forkserver can start before torch does; what loads the extension imports inside its function."""
    body = ast.parse((HELPERS / "__init__.py").read_text(encoding="utf-8")).body
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert {getattr(node, "module", None) for node in imports} <= {"typing"}


CLIMBS = [
    "from helpers.figures.ddp import overlap",
    "import torch, helpers.doctor.report",
    "def late():\n    from helpers.__main__ import main",
    "import helpers",
    "from . import launch",
]


@pytest.mark.parametrize("code", CLIMBS)
def test_an_import_that_climbs_is_seen(code):
    fine = "from helpers.ranks.launch import launch\nfrom helpers.runtime import data\nimport os.path"
    assert list(climbs(fine, "ranks")) == [] and len(list(climbs(f"{fine}\n{code}", "ranks"))) == 1
