"""``%%ranks 4``: run the body of a notebook's cell, unchanged, on N real ranks."""

import ast
import linecache
import os
from dataclasses import dataclass
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from helpers.ranks import launch
from helpers.source import DEFINITION, Statement, split

SOURCE = "<ranks cell>"
# Names that have each rank's own values in a cell, whatever they are in the notebook.
OWN_NAMES = ("rank", "local_rank", "world_size")
# After one of these statements it is not certain that the names which it binds are bound:
MAY_NOT_RUN = ast.If | ast.For | ast.While | ast.Try | ast.TryStar | ast.Match


def load(shell: InteractiveShell) -> None:
    """Start the forkserver and register the magic; ``%load_ext helpers`` calls this."""
    # The kernel asks all programs for colours, and from Python 3.13 on the tracebacks of its children obey.
    os.environ["PYTHON_COLORS"] = "0"
    launch.warm()
    shell.register_magics(RanksMagics)


@magics_class
class RanksMagics(Magics):
    """The magic, bound to one IPython shell."""

    shell: InteractiveShell

    @magic_arguments()
    @argument("nproc", type=int, nargs="?", default=4, help="number of ranks (default: 4)")
    @argument("--timeout", type=float, default=launch.DEFAULT_TIMEOUT, help="seconds for the cell (default: 60)")
    @argument("--backend", default="gloo", help="gloo (default), nccl, or auto: nccl where each rank has a GPU")
    @argument("--check", action="store_true", help="look for mistakes of training that raise no error")
    @argument("--into", metavar="NAME", help="keep the last line's values, [rank 0's, rank 1's, ...], under this name")
    @cell_magic
    def ranks(self, line: str, cell: str) -> None:
        """Run the cell's body on N real local processes, with the process group started.

        Names that the body reads have the notebook's values; ``rank``, ``local_rank`` and ``world_size`` are each
        rank's own. What the body assigns stays in the ranks. If the last line is an expression, each rank prints its
        value. Raises RankError and LaunchError as ``launch`` does.
        """
        options = parse_argstring(self.ranks, line)
        variables = sendable(self.shell.user_ns, cell)
        # With this entry tracebacks show the cell's lines.
        linecache.cache[SOURCE] = (len(cell), None, cell.splitlines(keepends=True), SOURCE)
        values_of_ranks = launch.launch(
            run_body,
            cell,
            variables,
            nproc=options.nproc,
            timeout=options.timeout,
            backend=options.backend,
            check=options.check,
        )
        if options.into:
            self.shell.user_ns[options.into] = values_of_ranks


@dataclass(frozen=True)
class FreeNames:
    """The names that a cell's body may read from the notebook.

    In this cell, for example, ``x`` is required and ``y`` is optional::

        print(x)
        def f():
            return y
        y = 1
    """

    required: set[str]  # the body binds them nowhere, or certainly reads them before it binds them
    optional: set[str]  # the body may bind them before it reads them: in a block or a function that may not run


def sendable(namespace: dict[str, Any], cell: str) -> dict[str, Any]:
    """The part of the notebook's variables that is sent to the ranks, so that they can run a cell: {name: value}.

    Raises LaunchError if a variable that the cell certainly reads cannot be pickled. A variable that the cell may set
    itself before it reads it is left out in that case.
    """
    names = free_names(cell)
    to_send = {}
    labelled = {}  # the same values, under the words by which an error message calls them
    for name in sorted(names.required):
        if name in namespace:
            to_send[name] = namespace[name]
            labelled[f"the notebook's {name!r}"] = namespace[name]
    error = launch.cannot_be_sent(labelled)
    if error is not None:
        raise error

    for name in sorted(names.optional):
        if name in namespace:
            value = namespace[name]
            can_be_sent = launch.cannot_be_sent({name: value}) is None
            if can_be_sent:
                to_send[name] = value
    return to_send


def free_names(cell: str) -> FreeNames:
    """The names that a cell's body needs from the notebook, because it reads them without binding them before.

    To bind a name is to assign, import or define it. A name is optional if the cell may bind it itself: here ``model``
    is required, and ``best`` is optional, because nobody knows whether the ``if`` runs::

        loss = model(x)
        if loss < 1:
            best = loss
        print(best)

    Raises LaunchError where the body is not plain Python.
    """
    statements = statements_of(cell)
    bound_anywhere: set[str] = set()
    for statement in statements:
        bound_anywhere |= statement.binds

    # The loop below goes through the statements in their order. These sets are those of the statements so far.
    certainly_bound = set(OWN_NAMES)
    perhaps_bound: set[str] = set()  # by a block such as ``if``, or in a function, which may not run
    read_unbound: set[str] = set()  # read by a statement, or in a function, when the name was not certainly bound
    read_first: set[str] = set()  # read when a statement itself runs, before anything may have bound the name
    for statement in statements:
        node = statement.node
        has_block = hasattr(node, "body")
        if has_block:
            perhaps_bound |= statement.binds
        read_unbound |= statement.reads - certainly_bound
        read_first |= statement.needs - certainly_bound - perhaps_bound
        if isinstance(node, DEFINITION):
            certainly_bound.add(node.name)  # what its body binds by `global` is bound only when it is called
        elif not isinstance(node, MAY_NOT_RUN):
            certainly_bound |= statement.binds
    # A name that the cell binds somewhere may be bound when it is read, so the notebook need not have it. But a name
    # that is read before anything may have bound it is certainly needed.
    optional = (read_unbound & bound_anywhere) - read_first
    return FreeNames(required=read_unbound - optional, optional=optional)


def statements_of(cell: str) -> list[Statement]:
    """The statements of a cell's body, in order. Raises LaunchError where the body is not plain Python."""
    try:
        return split(cell)
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise launch.LaunchError(
            f"line {error.lineno} of the cell is not Python ({error.msg}): {line}\n"
            "Correct it; a magic or a shell command belongs in a cell of its own."
        ) from None


def run_body(cell: str, variables: dict[str, Any]) -> Any:
    """In a rank: run a cell's body with these variables of the notebook.

    If its last statement is an expression, its value is printed, as in a notebook, and returned; otherwise None is.
    """
    import torch.distributed as dist

    scope = {
        "__name__": "__main__",
        **variables,
        "rank": dist.get_rank(),
        "local_rank": dist.get_rank(),  # all ranks of launch are on one machine
        "world_size": dist.get_world_size(),
    }
    module = ast.parse(cell, SOURCE)
    last_expression = None
    if module.body:
        last_statement = module.body[-1]
        if isinstance(last_statement, ast.Expr):
            del module.body[-1]
            last_expression = ast.Expression(last_statement.value)
    exec(compile(module, SOURCE, "exec"), scope)
    if last_expression is None:
        return None
    value = eval(compile(last_expression, SOURCE, "eval"), scope)
    if value is not None:
        print(repr(value))
    return value
