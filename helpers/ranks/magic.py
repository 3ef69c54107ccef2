"""``%%ranks 4``: run the body of a notebook's cell, unchanged, on N real ranks."""

import ast
import linecache
import os
import symtable

from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from helpers.ranks import launch
from helpers.ranks.comprehensions import AsGenerators

SOURCE = "<ranks cell>"
OWN = ("rank", "local_rank", "world_size")  # each rank gets values of its own, whatever these are in the notebook


def load(shell):
    """Start the forkserver and register the magic; ``%load_ext helpers`` calls this."""
    os.environ["PYTHON_COLORS"] = "0"  # the kernel asks for colours; from Python 3.13 on its children's tracebacks obey
    launch.warm()
    shell.register_magics(RanksMagics)


@magics_class
class RanksMagics(Magics):
    """The magic, bound to one IPython shell."""

    @magic_arguments()
    @argument("nproc", type=int, nargs="?", default=4, help="number of ranks (default: 4)")
    @argument("--timeout", type=float, default=60, help="seconds for the whole cell (default: 60)")
    @argument("--into", metavar="NAME", help="keep the last line's values, [rank 0's, rank 1's, ...], under this name")
    @cell_magic
    def ranks(self, line, cell):
        """Run the cell's body on N real local processes, with the process group started.

        Names that the body reads have the notebook's values; ``rank``, ``local_rank`` and ``world_size`` are each
        rank's own. What the body assigns stays in the ranks. If the last line is an expression, each rank prints its
        value. Raises RankError and LaunchError as ``launch`` does.
        """
        options = parse_argstring(self.ranks, line)
        wanted = {name: self.shell.user_ns[name] for name in free_names(cell) if name in self.shell.user_ns}
        if error := launch.cannot_be_sent({f"the notebook's {name!r}": value for name, value in wanted.items()}):
            raise error
        linecache.cache[SOURCE] = (len(cell), None, cell.splitlines(keepends=True), SOURCE)
        values = launch.launch(run_body, cell, wanted, nproc=options.nproc, timeout=options.timeout)
        if options.into:
            self.shell.user_ns[options.into] = values


def free_names(cell):
    """The names that a cell's body reads before it binds them, which the notebook has to supply.

    Raises LaunchError where the body is not plain Python.
    """
    try:
        body = ast.parse(cell, SOURCE).body
    except SyntaxError as error:
        raise launch.LaunchError(
            f"line {error.lineno} of the cell is not Python ({error.msg}): {(error.text or '').strip()}\n"
            "Correct it; a magic or a shell command belongs in a cell of its own."
        ) from None
    bound, free = set(OWN), []
    for statement in body:
        table = symtable.symtable(ast.unparse(AsGenerators().visit(statement)), SOURCE, "exec")
        read = read_names(table) + [node.target.id for node in ast.walk(statement) if augments(node)]
        free += [name for name in read if name not in bound and name not in free]
        if not isinstance(statement, ast.If | ast.For | ast.While | ast.Try | ast.Match):  # a block may not run
            bound |= {
                symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()
            }
    return free


def augments(node):
    """Whether a node is ``name += value``. That reads the name as well, but symtable only says that it binds it."""
    return isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)


def read_names(table):
    """The global names that a scope and the scopes inside it read."""
    top = table.get_type() == "module"
    found = [
        symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced() and (top or symbol.is_global())
    ]
    for child in table.get_children():
        found += read_names(child)
    return found


def run_body(cell, wanted):
    """In a rank: run the body with the names ``wanted``; print the value of a last expression and return it."""
    import torch.distributed as dist

    own = (dist.get_rank(), dist.get_rank(), dist.get_world_size())
    scope = {"__name__": "__main__", **wanted, **dict(zip(OWN, own, strict=True))}
    body = ast.parse(cell, SOURCE)
    last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) else None
    exec(compile(body, SOURCE, "exec"), scope)
    if last is None:
        return None
    value = eval(compile(ast.Expression(last.value), SOURCE, "eval"), scope)
    if value is not None:
        print(repr(value))
    return value
