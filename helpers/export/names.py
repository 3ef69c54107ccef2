"""A script's names: which ones main declares global, which helpers are renamed, which ones are never defined."""

import ast
import builtins
from dataclasses import replace

from helpers.export.notebook import first_line
from helpers.export.source import DEFINITION, IMPORT, each_import, imported_name

BUILTINS = {*dir(builtins), "__name__", "__file__", "__doc__"}
OWN = {"argparse": "argparse", "main": "main", "parse_args": "parse_args"}  # names that every script defines
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def meaning(statement, name):
    """A value for what a statement binds a name to: equal for imports of one thing, and for equal definitions."""
    node = statement.node
    if isinstance(node, IMPORT):
        one = next(one.node for one in each_import(statement) if imported_name(one.node) == name)
        alias, module = one.names[0], getattr(one, "module", None)
        return f"{module}.{alias.name}" if module else alias.name if alias.asname else name
    if isinstance(node, DEFINITION) and name == node.name:
        return f"{statement.code}"
    return id(statement)


def fixed_names(statements, flags):
    """The names that mean one thing in all the statements that bind them, and that are not flags."""
    meanings = {}
    for statement in statements:
        for name in statement.binds:
            meanings.setdefault(name, set()).add(meaning(statement, name))
    return {name for name, found in meanings.items() if len(found) == 1} - flags.keys()


# ---- What main declares global


def in_this_scope(node):
    """Yields the nodes that run when the statement runs: not those of a function's body, which runs later."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, FUNCTION):
            yield from in_this_scope(child)


def looks_up_names(node):
    """Whether some code reaches names by their text: ``globals()[name]``, ``eval(text)``, ``import __main__``."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in ("globals", "eval", "exec"):
            return True
        if isinstance(part, ast.alias) and part.name == "__main__":
            return True
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and "import __main__" in part.value:
            return True
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and "from __main__" in part.value:
            return True
    return False


def impossible_lookups(body):
    """Yields a problem for each statement of main that asks for the global names, which in main are not at hand."""
    for statement in body:
        for node in in_this_scope(statement.node) if statement.node else []:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called, given = node.func.id, len(node.args)
                if (called in ("locals", "vars", "dir") and not given) or (called == "exec" and given < 2):
                    yield (
                        f"{statement.where}: `{first_line(ast.unparse(node))}` works on a notebook's global names, "
                        "but in the script on the local names of main.\nUse the names themselves, or pass globals()."
                    )


def global_names(parts, dynamic):
    """({name that main must declare global: the reason}, all names that main binds).

    ``dynamic`` says that some code looks names up by their text.
    """
    in_main = set(parts.flags)
    for statement in parts.body:
        in_main |= statement.binds
    found, so_far = {}, set()

    def keep(names, why):
        for name in sorted(in_main.intersection(names)):
            found.setdefault(name, why)

    for statement in parts.above():
        for name, reader in statement.reads.items():
            keep([name], f"{reader or getattr(statement.node, 'name', 'it')} reads it")
        keep(statement.binds, "the script binds it above main too")
    for statement in parts.body:
        node = statement.node
        if isinstance(node, DEFINITION | IMPORT):
            keep(statement.binds, "it is defined where the notebook defines it")
        for part in ast.walk(node) if node else []:
            if isinstance(part, ast.Global):
                keep(part.names, "a function assigns it")
            elif isinstance(part, DEFINITION):
                keep([part.name], "it is defined where the notebook defines it")
        if isinstance(node, DEFINITION):
            keep(statement.reads, f"{node.name} reads it")
        keep((set(statement.needs) & BUILTINS) - so_far, "it is Python's own before that")
        so_far |= statement.binds
    if dynamic:
        keep(in_main, "code looks names up by their text")
    return found, in_main


# ---- Names of the script's own


def made_room(conflicts, taken):
    """{name: the same name with underscores at its end} for the conflicts; no new name is in ``taken``."""
    found = {}
    for name in conflicts:
        found[name] = f"{name}_"
        while found[name] in taken:
            found[name] += "_"
    return found


def edited(code, changes):
    """The code in which each (node, text) of ``changes`` puts the text in the node's place. No node spans lines."""
    lines = code.encode().split(b"\n")  # ast's columns count bytes
    for node, text in sorted(changes, key=lambda change: (change[0].lineno, change[0].col_offset), reverse=True):
        line = lines[node.lineno - 1]
        lines[node.lineno - 1] = line[: node.col_offset] + text.encode() + line[node.end_col_offset :]
    return b"\n".join(lines).decode()


def renamed(statement, names):
    """A statement of a run-time module in which the names {old: new} are changed, where it binds or reads them."""
    code, [node] = statement.code, ast.parse(statement.code).body
    if isinstance(node, IMPORT):
        if imported_name(node) not in names:
            return statement
        node.names[0].asname = names[imported_name(node)]
        code = ast.unparse(node)
    elif isinstance(node, DEFINITION) and node.name in names:
        code = code.replace(f" {node.name}", f" {names[node.name]}", 1)
    found = [part for part in ast.walk(ast.parse(code)) if isinstance(part, ast.Name) and part.id in names]
    code = edited(code, [(part, names[part.id]) for part in found])
    return replace(statement, code=code, node=ast.parse(code).body[0])


# ---- Parameters in main


class AsArgument(ast.NodeTransformer):
    def __init__(self, names, args):
        self.names, self.args = names, args

    def visit_Name(self, node):
        if node.id not in self.names:
            return node
        return ast.Attribute(ast.Name(self.args, ast.Load()), node.id, ast.Load())


def with_arguments(code, names, args):
    """The code with ``args.NAME`` for each of the names; None where the replaced text would mean something else."""
    found = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name) and node.id in names]
    new = edited(code, [(node, f"{args}.{node.id}") for node in found])
    try:  # f"{lr=}" prints its own text; and before Python 3.12 some positions inside f-strings are wrong
        same = ast.dump(ast.parse(new)) == ast.dump(AsArgument(names, args).visit(ast.parse(code)))
    except SyntaxError:
        same = False
    return new if same else None


def bound_anywhere(node):
    """Yields every name that a statement binds in any scope: its own, a function's, a comprehension's."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load):
            yield part.id
        elif isinstance(part, ast.arg):
            yield part.arg
        elif isinstance(part, ast.alias):
            yield (part.asname or part.name).split(".")[0]
        elif isinstance(part, ast.Global | ast.Nonlocal):
            yield from part.names
        else:
            yield from (getattr(part, field, None) for field in ("name", "rest"))


# ---- Names that nothing binds


def missing_names(parts, top, in_main, cells):
    """Yields a problem for each statement that reads a name that nothing defines, or that is defined only later."""
    known = {*top, *in_main, *BUILTINS}
    for statement in parts.above():
        for name, by in statement.reads.items():
            if name not in known:
                by = f"{by}()" if by else f"the head of {getattr(statement.node, 'name', 'it')}"
                yield nothing_binds(name, by, statement.where, parts, cells)
    so_far = {*top, *BUILTINS, *parts.flags, "args"}  # args is main's argument
    for statement in parts.body:
        so_far |= statement.binds
        for name, by in statement.reads.items():
            if name not in so_far and not (by and name in in_main):
                yield nothing_binds(name, f"{by}()" if by else "it", statement.where, parts, cells)


def nothing_binds(name, by, where, parts, cells):
    """The problem, as text, of a name that no exported statement defines before ``by`` reads it."""
    why = "no exported cell binds before"
    if name in parts.dropped:
        why = f"is bound by a line that only a notebook can run, in {parts.dropped[name]}"
    elif name in cells.elsewhere:
        why = f"is bound in {cells.elsewhere[name]}, not exported"
    elif cells.other_files:
        why = f"perhaps {cells.other_files[0]} binds, which is left out"
    return f"{where}: {by} reads {name}, which {why}.\nBind it in a cell that is exported."
