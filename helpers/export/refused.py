"""What a notebook may not have, because its script would not do under torchrun what the cells do.

Each error is one line: the cell, why, and what to change.
"""

import ast
import copy
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TypeVar

from helpers.export.notebook import LIBRARIES, ExportError, first_line, label
from helpers.source import DEFINITION, IMPORT, Statement, packages_of

LAUNCHERS = re.compile(  # calls that start ranks
    r"(\b(?:mp|multiprocessing)\.(?:spawn|Process)|(?<![\w.])spawn|\w*TorchDistributor|TrainerClient|TorchTrainer"
    r"|notebook_launcher|debug_launcher|elastic_launch|distributed\.run\.main)\("
)
PROGRAMS = re.compile(r"\b(torchrun|torch\.distributed\.(?:run|launch)|accelerate launch|deepspeed|mpirun|srun)\b")
RUNS_A_PROGRAM = {"run", "Popen", "call", "check_call", "check_output", "system", "popen", "getoutput"}
# Of a statement as ast.unparse writes it: a variable that torchrun sets in each rank.
ENVIRONMENT = re.compile(
    r"environ.*?\b((?:LOCAL_)?RANK|(?:LOCAL_)?WORLD_SIZE|MASTER_ADDR|MASTER_PORT)'?\]? ?[=:] ?(?:str\()?['\d]",
    re.DOTALL,
)

STARTS = {"init_process_group", "start_process_group", "init_device_mesh"}  # functions that start a process group
START_PARAMETERS = ("backend", "init_method", "timeout", "world_size", "rank", "store")  # of init_process_group
# Names that say that ranks exchange gradients or values. A notebook without any of them trains each rank alone.
COMMUNICATES = re.compile(
    r"ddp|fsdp|distributeddataparallel|fully_?shard|parallel|reduce|gather|scatter|broadcast|all_to_all|average"
    r"|send|recv|dtensor|distribute_|pipeline|zeroredundancy|device_mesh",
    re.IGNORECASE,
)

Node = TypeVar("Node", bound=ast.AST)
# What is assigned to each name: {"rank": [<0>]} for ``rank = 0``, where <0> is the expression. None stands for a value
# that no plain assignment gives, such as that of a loop's variable.
Values = dict[str, list[ast.expr | None]]


def check_launching(statements: list[Statement]) -> None:
    """Raise ExportError for what torchrun does: to start ranks, to number them, and to say where they meet."""
    values = assigned(statement.node for statement in statements)
    for statement in statements:
        check_launchers(statement, values)
    for statement in statements:
        variable = ENVIRONMENT.search(ast.unparse(with_values(statement.node, values)))
        if variable is not None:
            raise ExportError(f"{label(statement)} fixes {variable[1]}, which is torchrun's to say. Leave it out.")
        for call, values_there in start_calls(statement, statements, values):
            check_start_call(statement, call, values_there)
    for statement in statements:
        check_numbers(statement, values)


def check_launchers(statement: Statement, values: Values) -> None:
    """Raise ExportError for a call that starts ranks: mp.spawn(…) and its like, or one of a program such as torchrun.

    values: what the notebook assigns to each name, because a command may be kept in a variable.
    """
    launcher = LAUNCHERS.search(ast.unparse(statement.node))
    if launcher is not None:
        why = f"starts ranks by {launcher[1]}, and torchrun starts a script's"
        raise ExportError(f"{label(statement)} {why}. Leave it out, and call the function.")
    for call in calls_in(statement.node):
        if name_of(call.func) in RUNS_A_PROGRAM:
            # The command may be a list, such as ["torchrun", "train.py"]. Without quotation marks and commas it reads
            # like a line of a shell.
            command = re.sub(r"[',\[\]]+ *", " ", ast.unparse(with_values(call, values)))
            program = PROGRAMS.search(command)
            if program is not None:
                why = f"starts ranks by {program[1]}, and the exported script is started by torchrun itself"
                raise ExportError(f"{label(statement)} {why}. Leave it out, and train in the notebook's cells.")


def check_start_call(statement: Statement, call: ast.Call, values: Values) -> None:
    """Raise ExportError for a call of init_process_group that numbers the ranks, or says where they meet.

    values: what is assigned to each name where the call is.
    """
    arguments = start_arguments(with_values(call, values))
    fixed_arguments = []
    for name in ("init_method", "rank", "world_size", "store"):
        if name in arguments and is_fixed(name, arguments[name]):
            fixed_arguments.append(f"{name}={first_line(ast.unparse(arguments[name]))}")
    if fixed_arguments:
        what = f"fixes {', '.join(fixed_arguments)}, which torchrun says to each rank"
        advice = "Leave it out, and read dist.get_rank() and dist.get_world_size() after the call"
        raise ExportError(f"{label(statement)} {what}. {advice}.")


def is_fixed(name: str, value: ast.expr) -> bool:
    """Whether an argument of init_process_group is the same on every rank, or a meeting place of its own."""
    text = ast.unparse(value)
    if name == "store":
        return text != "None"
    if name == "init_method":
        return "://" in text and "env://" not in text
    return literal_int(value) not in (None, -1)  # -1 is the default: the environment says it


def check_numbers(statement: Statement, values: Values) -> None:
    """Raise ExportError for a statement such as ``rank = 0`` or ``world_size = 1``, which is wrong on other ranks.

    values: what the notebook assigns to each name. A name that it also assigns something else is not refused, because
    that may be the right value.
    """
    if not isinstance(statement.node, ast.Assign | ast.AnnAssign):
        return
    right_value = {
        "rank": "dist.get_rank(), after init_process_group",
        "local_rank": 'int(os.environ["LOCAL_RANK"])',
        "world_size": "dist.get_world_size(), after init_process_group",
    }
    for name in sorted(statement.binds & right_value.keys()):
        numbers = [literal_int(value) for value in values.get(name, [])]  # None for what is no number
        if name == "world_size":
            is_wrong = None not in numbers
        else:
            is_wrong = set(numbers) == {0}  # A matrix may have a rank, too, but not rank 0.
        if is_wrong:
            what = f"{label(statement)} gives every rank the same {name}"
            raise ExportError(f"{what}. Write {name} = {right_value[name]}.")


def check_start(statements: list[Statement], name: str) -> None:
    """Raise ExportError for a script whose ranks would not train together: each would train a model of its own.

    Either no statement starts a process group, or the script trains and no name in it says that ranks exchange
    gradients. name: the script's, for the message.
    """
    calls = list(chain.from_iterable(calls_in(statement.node) for statement in statements))
    if not any(name_of(call.func) in STARTS for call in calls):
        why = "starts no process group: N ranks would train N models"
        raise ExportError(f"{name} {why}. Call torch.distributed.init_process_group() in an exported cell.")

    packages = set(chain.from_iterable(packages_of(statement.node) for statement in statements))
    unknown_packages = packages - LIBRARIES - sys.stdlib_module_names - {"helpers"}
    if unknown_packages:
        return  # One of them may average the gradients.
    names = set(chain.from_iterable(names_in(statement.node) for statement in statements))
    if any(COMMUNICATES.search(name) for name in names):
        return
    for statement in statements:
        trains = any(name_of(call.func) == "backward" for call in calls_in(statement.node))
        if trains:
            why = "trains, but no cell exchanges gradients: N ranks would train N models"
            raise ExportError(f"{label(statement)} {why}. Wrap the model: DistributedDataParallel(model).")


# ---- What calls get


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    return (part for part in ast.walk(node) if isinstance(part, ast.Call))


def name_of(function: ast.expr) -> str:
    """init_process_group for ``dist.init_process_group``."""
    return ast.unparse(function).rpartition(".")[2]


def names_in(node: ast.AST) -> Iterator[str]:
    """All names in a statement: of variables, attributes and imports."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr
        elif isinstance(part, ast.alias):
            yield part.name


def literal_int(value: ast.expr | None) -> int | None:
    """The number that an expression writes, or None for any other expression."""
    if value is None:
        return None
    try:
        number = ast.literal_eval(value)
    except (ValueError, TypeError):
        return None
    if isinstance(number, int):
        return number
    return None


def start_calls(statement: Statement, statements: list[Statement], values: Values) -> Iterator[tuple[ast.Call, Values]]:
    """Find the calls of init_process_group in one statement of a notebook. Yields each call with its Values.

    Values say which expressions each name may stand for. Those of a call in a function are what the notebook assigns,
    ``values``, and also the function's own parameters and variables. For example, the notebook has these statements::

        def setup(rank):
            backend = "gloo"
            dist.init_process_group(backend, rank=rank)

        setup(0)

    For the first one, this yields its call of init_process_group with {"rank": [<0>], "backend": [<"gloo">], …}, where
    <0> is the expression ``0``. ``statements`` are all those of the notebook, because each may call the function.
    """
    values_at_call = dict(values)
    if isinstance(statement.node, ast.FunctionDef):
        function = statement.node
        # In the function, its own names hide the notebook's names that are the same.
        values_at_call.update(parameter_values(function, statements))
        values_at_call.update(assigned(function.body))
    for call in calls_in(statement.node):
        if name_of(call.func) == "init_process_group":
            yield call, values_at_call


def parameter_values(function: ast.FunctionDef, statements: list[Statement]) -> Values:
    """{parameter: its values} of a function: what each call in these statements gives, or else the default.

    For example {"rank": [<0>], "backend": [<"gloo">]} for ``def setup(rank, backend="gloo")`` and the call
    ``setup(0)``, where <0> is the expression. A value is None if a call gives it in another way, as by ``*args``.
    """
    parameters = [parameter.arg for parameter in [*function.args.args, *function.args.kwonlyargs]]
    values: Values = {name: [] for name in parameters}
    defaults = function.args.defaults
    # Only the last ones of the positional parameters have defaults.
    number_without_default = len(function.args.args) - len(defaults)
    parameters_with_default = parameters[number_without_default : len(function.args.args)]
    default_of = dict(zip(parameters_with_default, defaults, strict=True))
    for call in chain.from_iterable(calls_in(statement.node) for statement in statements):
        if name_of(call.func) != function.name:
            continue
        positional = dict(zip(parameters, call.args, strict=False))
        by_keyword = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        given: dict[str, ast.expr] = {**default_of, **positional, **by_keyword}
        for name in parameters:
            values[name].append(given.get(name))
    return values


def start_arguments(call: ast.Call) -> dict[str, ast.expr]:
    """{name: expression} of all arguments of a call of init_process_group.

    They may be positional, by name, or in a dict: ``**{"rank": 0}`` or ``**dict(rank=0)``.
    """
    arguments = dict(zip(START_PARAMETERS, call.args, strict=False))
    for keyword in call.keywords:
        value = keyword.value
        if keyword.arg is not None:
            arguments[keyword.arg] = value
        elif isinstance(value, ast.Dict):
            for key, item in zip(value.keys, value.values, strict=True):
                if isinstance(key, ast.Constant):
                    arguments[str(key.value)] = item
        elif isinstance(value, ast.Call) and name_of(value.func) == "dict":
            for item_of_dict in value.keywords:
                if item_of_dict.arg:
                    arguments[item_of_dict.arg] = item_of_dict.value
    return arguments


# ---- What variables stand for


def assigned(nodes: Iterable[ast.AST]) -> Values:
    """{name: the expressions that these statements assign to it, in order}, also by statements inside of them.

    An expression is None if a statement binds the name in another way, such as by a loop. Functions and classes bind
    their own names; the variables inside of them are others, and are left out.
    """
    values: Values = {}
    for node in nodes:
        if isinstance(node, DEFINITION):
            values.setdefault(node.name, []).append(None)
            continue
        if isinstance(node, IMPORT):
            continue
        for name, value in targets_and_values(node):
            values.setdefault(name, []).append(value)
        values_inside = assigned(ast.iter_child_nodes(node))
        for name, inside in values_inside.items():
            values.setdefault(name, []).extend(inside)
    return values


def targets_and_values(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """The names that a statement binds itself, not by the statements in it, each with its value."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from pairs(target, node.value)
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield from pairs(node.target, node.value)
    elif isinstance(node, ast.AugAssign | ast.For | ast.comprehension | ast.NamedExpr):
        yield from pairs(node.target, None)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield from pairs(node.optional_vars, None)


def pairs(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, ast.expr | None]]:
    """Yields (name, expression) of an assignment; several for one such as ``rank, world_size = 0, 1``.

    The expression is None if it cannot be told which one a name gets, as in ``rank, world_size = setup()``.
    """
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple | ast.List):
        inner_values: list[ast.expr | None] = [None] * len(target.elts)
        if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
            inner_values = list(value.elts)
        for inner_target, inner_value in zip(target.elts, inner_values, strict=True):
            yield from pairs(inner_target, inner_value)


def with_values(node: Node, values: Values) -> Node:
    """A copy of a node in which names that are assigned once, to an expression, are replaced by that expression."""
    return Replacement(values).visit(copy.deepcopy(node))


def only_value(values: list[ast.expr | None]) -> ast.expr | None:
    """The expression that a name is assigned, each time the same one. None if there is no such expression."""
    if not values or values[0] is None:
        return None
    for later in values[1:]:
        if later is None or ast.dump(later) != ast.dump(values[0]):
            return None
    return values[0]


class Replacement(ast.NodeTransformer):
    """Replaces names by what is assigned to them, and the names in that too."""

    def __init__(self, values: Values) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """What stands in the place of one name: its value, or the name itself if it has none, or several.

        ast calls this for each name in the code.
        """
        if not isinstance(node.ctx, ast.Load):  # the name is not read here, but assigned to or deleted
            return node
        value = only_value(self.values.get(node.id, []))
        if value is None:
            return node
        others = {name: value for name, value in self.values.items() if name != node.id}  # so that it comes to an end
        return Replacement(others).visit(copy.deepcopy(value))
