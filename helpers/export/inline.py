"""What a script uses of helpers/runtime is copied into it: which statements, and where in the script they stand."""

import ast
import functools
import re
from dataclasses import replace
from pathlib import Path

from helpers.export.source import IMPORT, each_import, imported_name, split

# The modules of helpers that a script may use. Each imports only from those that stand before it here.
RUNTIME = ("process_group", "data", "models", "checkpoint", "stop_request")
PACKAGE = "helpers.runtime"
NOTEBOOK_PACKAGES = ("helpers", "IPython", "ipywidgets")  # everything else in these packages is for notebooks
TOUCHING = re.compile(r"(?:^#.*\n?)*\Z", re.MULTILINE)  # the comment right above a statement


def belongs(node):
    """Where an import of one name belongs: "script", "inline", "notebook"; "refused" if it takes a whole module."""
    imported = node.names[0].name if isinstance(node, ast.Import) else node.module or "."
    if imported.split(".")[0] not in NOTEBOOK_PACKAGES:
        return "script"
    if runtime_module_of(node):
        return "inline"
    whole = imported if isinstance(node, ast.Import) else f"{imported}.{node.names[0].name}"
    return "refused" if whole in ("helpers", PACKAGE, *(f"{PACKAGE}.{module}" for module in RUNTIME)) else "notebook"


def runtime_module_of(node):
    """The run-time module that a ``from helpers.x import …`` names, or None."""
    package, _, module = (getattr(node, "module", None) or "").rpartition(".")
    return module if package == PACKAGE and module in RUNTIME else None


@functools.cache
def runtime_module(module):
    """{name: [the statements of the run-time module that bind it]}, in the order of the module."""
    found = {}
    source = Path(__file__).parents[1].joinpath("runtime", f"{module}.py").read_text(encoding="utf-8")
    for statement in split(source, f"{PACKAGE}.{module}"):
        if isinstance(statement.node, IMPORT):
            for one in each_import(statement):
                found.setdefault(imported_name(one.node), []).append(one)
        elif statement.node is not None:
            for name in statement.binds:
                touching = TOUCHING.search(statement.above)[0]
                found.setdefault(name, []).append(replace(statement, above=touching))
    return found


def inlined(wanted):
    """(imports, other statements) that define the names [(module, name)] and all that these use in turn."""
    taken = set()

    def take(module, name):
        if (module, name) in taken:
            return
        taken.add((module, name))
        for statement in runtime_module(module)[name]:
            if runtime_module_of(statement.node):
                take(runtime_module_of(statement.node), statement.node.names[0].name)
            elif not isinstance(statement.node, IMPORT):
                for read in statement.reads:
                    if read in runtime_module(module):
                        take(module, read)

    for module, name in wanted:
        take(module, name)
    imports, code = [], []
    for module in RUNTIME:
        for name, found in runtime_module(module).items():  # in the order of the source
            for statement in found if (module, name) in taken else []:
                if not isinstance(statement.node, IMPORT):
                    code.append(statement)
                elif not runtime_module_of(statement.node):
                    imports.append(statement)
    return imports, list(dict.fromkeys(code))


def in_reading_order(constants, copied, definitions):
    """(what a script defines above main, what it defines below main).

    Above stand constants, copied statements and definitions, each after what its definition needs. Below stands the
    code of the process group, which a reader wants to see last.
    """
    own = [*constants, *(statement for statement in copied if not is_plumbing(statement)), *definitions]
    readers = by_name([*copied, *own])
    plumbing = by_name([statement for statement in copied if is_plumbing(statement)])
    ordered, seen = [], set()
    for statement in own:
        early = reached(statement.needs, readers, seen)
        ordered += dict.fromkeys(other for name in sorted(early) for other in plumbing.get(name, []))
        ordered.append(statement)
    early = {id(statement) for statement in ordered}
    return ordered, [statement for statement in copied if is_plumbing(statement) and id(statement) not in early]


def is_plumbing(statement):
    return statement.where == f"{PACKAGE}.process_group"


def by_name(statements):
    """{name: [the statements that bind it]}."""
    found = {}
    for statement in statements:
        for name in statement.binds:
            found.setdefault(name, []).append(statement)
    return found


def reached(names, readers, seen):
    """The names, all that their definitions read, what those definitions read, and so on.

    Names in ``seen`` are left out, and the found names are added to it. ``readers`` is {name: [statements]}.
    """
    found, todo = set(), [*names]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            found.add(name)
            todo += [read for statement in readers.get(name, []) for read in statement.reads]
    return found
