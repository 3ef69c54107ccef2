"""The order of the code: imports go down the list of rooms, files stay small, and each package says its boundary."""

import ast
import re

import pytest
from conftest import ROOT

HELPERS = ROOT / "helpers"

# The folders and files of helpers/, as CONTRIBUTING.md lists them: each imports only from itself and from those before.
# `source` reads Python text as statements, for `ranks` and for `export`.
ROOMS = [
    "runtime", "source", "ranks", "figures", "command_line", "planner", "export", "rehearsal", "doctor", "__main__",
]  # fmt: skip
MOST_LINES = {"helpers": 320, "tests": 500}


def python_files(folder):
    return sorted(folder.rglob("*.py"))


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
        if relative or module == "helpers" or names[0] == "helpers" and ROOMS.index(names[1]) > ROOMS.index(room):
            yield f"line {line} imports {module}"


def files_of(room):
    return python_files(HELPERS / room) or [HELPERS / f"{room}.py"]


def too_long(folder, most):
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_files(folder)}
    return [f"{path.relative_to(folder)}: {lines} lines" for path, lines in lengths.items() if lines > most]


def boundary(package):
    """The docstring of a package, or of its first module if it has none."""
    file = package / "__init__.py"
    first = file if file.exists() else python_files(package)[0]
    return ast.get_docstring(ast.parse(first.read_text(encoding="utf-8"))) or ""


def states_a_boundary(docstring):
    """It has more than a title, and says who may import what."""
    return len(list(filter(None, docstring.splitlines()))) > 1 and "import" in docstring


def packages():
    return [folder for folder in sorted(HELPERS.iterdir()) if python_files(folder)]


def rooms():
    return [name for name in ROOMS if (HELPERS / name).is_dir() or (HELPERS / f"{name}.py").exists()]


def test_contributing_lists_the_rooms_in_this_order():
    names = re.findall(r"(?m)^- `(\w+)`: ", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert names == rooms()
    assert {*rooms(), "__init__"} == {path.name for path in packages()} | {path.stem for path in HELPERS.glob("*.py")}


@pytest.mark.parametrize("room", rooms())
def test_imports_go_only_down_the_list(room):
    codes = {path.name: path.read_text(encoding="utf-8") for path in files_of(room)}
    problems = [f"{name}: {climb}" for name, code in codes.items() for climb in climbs(code, room)]
    assert not problems, "\n".join(problems)


def test_importing_the_package_imports_nothing_else():
    """The ranks' forkserver can start before torch does; what loads the extension imports inside its function."""
    body = ast.parse((HELPERS / "__init__.py").read_text(encoding="utf-8")).body
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert {getattr(node, "module", None) for node in imports} <= {"typing"}


@pytest.mark.parametrize("folder", MOST_LINES)
def test_files_are_short(folder):
    assert not (problems := too_long(ROOT / folder, MOST_LINES[folder])), "\n".join(problems)


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.name)
def test_a_package_says_its_boundary(package):
    docstring = boundary(package)
    assert states_a_boundary(docstring), f"neither what {package.name} gives nor what it imports: {docstring!r}"


@pytest.mark.parametrize(
    ("code", "climb"),
    [
        ("from helpers.figures.ddp import overlap", "helpers.figures.ddp.overlap"),
        ("import torch, helpers.doctor.report", "helpers.doctor.report"),
        ("from helpers import runtime, export", "helpers.export"),
        ("def late():\n    from helpers.__main__ import main", "helpers.__main__.main"),
        ("import helpers", "helpers"),
        ("from ..planner import memory", "..planner.memory"),
        ("from . import launch", ".launch"),
        ("from helpers.ranks.launch import launch\nfrom helpers.runtime import data\nimport os.path", None),
        ("from helpers.source import split\nfrom torch import distributed as doctor", None),
    ],
)
def test_an_import_that_climbs_is_seen(code, climb):
    assert [problem.split()[-1] for problem in climbs(code, "ranks")] == ([climb] if climb else [])


def test_a_long_file_and_a_package_without_a_boundary_are_seen(tmp_path):
    (tmp_path / "long.py").write_text("# a comment\n" * 4)
    assert too_long(tmp_path, 3) == ["long.py: 4 lines"] and too_long(tmp_path, 4) == []
    assert boundary(tmp_path) == "" and not states_a_boundary("")
    (tmp_path / "__init__.py").write_text('"""Only a title."""')
    assert not states_a_boundary(boundary(tmp_path))
    (tmp_path / "__init__.py").write_text('"""A title.\n\nIt imports torch alone.\n"""')
    assert states_a_boundary(boundary(tmp_path))
