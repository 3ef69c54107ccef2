"""What makes a notebook no script: a fixed rank or world size, a name bound twice, a name that is not there."""

import ast
import builtins

from helpers.export.notebook import ExportError
from helpers.export.source import DEFINITION, each_import, import_key, imported_name

RANK_NAMES = ("rank", "local_rank", "world_size", "num_replicas")
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
BUILTINS = {*dir(builtins), "__name__", "__file__", "__doc__"}
OWN_NAMES = {  # what every script binds, and to what: a key of import_key, or itself
    "argparse": ("argparse", None),
    "main": "main",
    "Manual": "Manual",
    "parse_args": "parse_args",
}


# ---- What would not be one distributed job


def check_hard_coded(exported):
    """Raise ExportError where a cell fixes the rank or the world size, or starts the group with a file of its own."""
    fixed, moving = {}, set()  # by (function, name)
    starts_group = any("init_process_group" in statement.code for statement in exported)
    for statement in exported:
        tree = ast.Module([statement.node] if statement.node else [], [])
        for function, target, value in bindings(tree):
            if isinstance(target, ast.Name) and target.id.lower() in RANK_NAMES:
                if is_integer(value):
                    fixed.setdefault((function, target.id), (statement, f"{target.id} = {value.value}"))
                else:
                    moving.add((function, target.id))
            elif isinstance(target, ast.Subscript) and ast.unparse(target.value).endswith("environ"):
                if getattr(target.slice, "value", None) in LAUNCHER_VARIABLES and isinstance(value, ast.Constant):
                    raise worlds_of_one(statement, f"{ast.unparse(target)} = {value.value!r}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func).rpartition(".")[2]
                for given in node.keywords if called in ("init_process_group", "DistributedSampler") else []:
                    if given.arg in RANK_NAMES and is_integer(given.value):
                        raise worlds_of_one(statement, f"{called}({given.arg}={given.value.value})")
                    if given.arg == "store":
                        raise worlds_of_one(statement, f"{called}(store={ast.unparse(given.value)})")
            elif starts_group and isinstance(node, ast.Constant) and str(node.value).startswith("file://"):
                raise worlds_of_one(statement, f"{node.value}")
    for key, (statement, text) in fixed.items():
        if key not in moving:  # `rank = 0` before `rank = dist.get_rank()` is a default
            raise worlds_of_one(statement, text)


def worlds_of_one(statement, text):
    return ExportError(
        f"{statement.where} hard-codes `{text}`: every process would train a model of its own.\n"
        "Call start_process_group() instead, and ask dist.get_rank() and dist.get_world_size()."
    )


def bindings(tree, function=None):
    """Every (function, target, value) of an assignment, a loop, or a default in a function that starts the group."""
    for node in ast.iter_child_nodes(tree):
        inside = function
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from ((function, *pair) for pair in one_by_one(target, node.value))
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value:
            yield function, node.target, node.value
        elif isinstance(node, ast.AugAssign):
            yield function, node.target, node
        elif isinstance(node, ast.For):
            yield from ((function, *pair) for pair in one_by_one(node.target, node.iter))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = node
            if "init_process_group" in ast.unparse(node):
                arguments = [*node.args.posonlyargs, *node.args.args]
                defaults = zip(reversed(arguments), reversed(node.args.defaults), strict=False)
                for argument, value in [*defaults, *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]:
                    yield inside, ast.Name(argument.arg), value
        yield from bindings(node, inside)


def one_by_one(target, value):
    """The (target, value) pairs of an assignment, whose sides may be tuples."""
    if not isinstance(target, ast.Tuple | ast.List):
        return [(target, value)]
    values = value.elts if isinstance(value, ast.Tuple | ast.List) else [value] * len(target.elts)
    return [pair for both in zip(target.elts, values, strict=False) for pair in one_by_one(*both)]


def is_integer(node):
    return isinstance(node, ast.Constant) and type(node.value) is int


# ---- Which names the parts may read


def check_names(parts, flags, inlined_imports, inlined_code, cells):
    """Raise ExportError where the script would bind a name twice, or read one that is not there."""
    top = {}  # name: (what it is, where), for all that the script's top level binds

    def bind(name, what, where):
        other, elsewhere = top.setdefault(name, (what, where))
        if other != what:
            raise ExportError(f"{where} binds {name}, which {elsewhere} binds too.\nGive one of them another name.")

    for name, what in OWN_NAMES.items():
        bind(name, what, "the script itself")
    for statement in [*inlined_imports, *parts.imports]:
        for one in each_import(statement):
            bind(imported_name(one.node), import_key(one.node), statement.where)
    own = {name for statement in parts.imports for name in statement.binds}
    own |= {name for _, name in parts.wanted}
    for statement in [*inlined_code, *parts.constants, *parts.definitions]:
        for name in statement.binds:
            bind(name, statement, statement.where)
            own |= {name} if statement not in inlined_code else set()

    in_main = {name: where for name, (where, _) in flags.items()}
    for statement in parts.body:
        for name in statement.binds:
            in_main.setdefault(name, statement.where)
    for name, where in in_main.items():
        if name in own:
            raise ExportError(
                f"{where} assigns {name}, which {top[name][1]} imports or defines.\nGive one of them another name."
            )

    for statement in [*parts.constants, *parts.definitions]:
        reads = {name: by for name, by in statement.reads.items() if name not in top}
        reads = {name: by for name, by in reads.items() if name not in BUILTINS or name in in_main}
        for name, by in reads.items():
            if name in in_main:
                same = sorted(other for other in reads if other in in_main and reads[other] == by)
                raise ExportError(
                    f"{statement.where}: {reader(statement, by)} reads {' and '.join(same)}, which only main binds.\n"
                    "Pass it as an argument."
                )
            raise nothing_binds(name, reader(statement, by), statement.where, parts, cells)
    so_far = {*top, *BUILTINS, *flags, "args"}  # args: what parse_args gives, and main takes
    for statement in parts.body:
        so_far |= statement.binds
        for name, by in statement.reads.items():
            if name not in so_far and not (by and name in in_main):
                raise nothing_binds(name, by and f"{by}()" or "it", statement.where, parts, cells)


def reader(statement, by):
    """The name for a message of what reads a name inside a definition."""
    if by:
        return f"{by}()"
    return f"the head of {statement.node.name}" if isinstance(statement.node, DEFINITION) else "it"


def nothing_binds(name, by, where, parts, cells):
    """The error for a name that no exported statement binds before it is read."""
    why = "no exported cell binds before"
    if name in parts.dropped:
        why = f"is bound by a line that only a notebook can run, in {parts.dropped[name]}"
    elif name in cells.elsewhere:
        why = f"is bound in {cells.elsewhere[name]}, not exported"
    return ExportError(f"{where}: {by} reads {name}, which {why}.\nBind it in a cell that is exported.")
