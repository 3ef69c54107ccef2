"""What a notebook may not have, because its script would not do under torchrun what the cells do.

Each error is one line: the cell, why, and what to change.
"""

import ast
import copy
import re
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from helpers.export.notebook import LIBRARIES, ExportError, first_line, label
from helpers.source import DEFINITION, IMPORT, Statement, packages_of

# Calls that start ranks, such as mp.spawn(…), notebook_launcher(…) and TrainerClient(…).
LAUNCHERS = re.compile(
    r"(\b(?:mp|multiprocessing)\.(?:spawn|Process)|(?<![\w.])spawn|\w*TorchDistributor|TrainerClient|TorchTrainer"
    r"|notebook_launcher|debug_launcher|elastic_launch|distributed\.run\.main)\("
)
# Programs that start ranks, in a command such as "torchrun train.py" or "python -m torch.distributed.run train.py".
PROGRAMS = re.compile(r"\b(torchrun|torch\.distributed\.(?:run|launch)|accelerate launch|deepspeed|mpirun|srun)\b")
# Functions of subprocess and os that run a program.
RUNS_A_PROGRAM = {"run", "Popen", "call", "check_call", "check_output", "system", "popen", "getoutput"}
# A variable that torchrun sets in each rank, in a statement as ast.unparse writes it. For example RANK, in
# os.environ['RANK'] = '0', in os.environ.update(RANK=str(0)) and in os.environ.update({'RANK': '0'}).
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
        check_environment(statement, values)
        for call, values_at_call in start_calls(statement, statements, values):
            check_start_call(statement, call, values_at_call)
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


def check_environment(statement: Statement, values: Values) -> None:
    """Raise ExportError for a statement that sets a variable of torchrun's, as ``os.environ["RANK"] = "0"`` does.

    values: what the notebook assigns to each name, because the text may be kept in a variable.
    """
    text = ast.unparse(with_values(statement.node, values))
    variable = ENVIRONMENT.search(text)
    if variable is not None:
        raise ExportError(f"{label(statement)} fixes {variable[1]}, which is torchrun's to say. Leave it out.")


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
    """Whether an argument of init_process_group says what torchrun says: a rank's number, or where the ranks meet.

    ``name`` is the argument's: rank, world_size, init_method or store. ``value`` is its expression.
    """
    text = ast.unparse(value)
    if name == "store":
        return text != "None"
    if name == "init_method":
        is_address = "://" in text
        is_of_torchrun = "env://" in text  # the address is in environment variables
        return is_address and not is_of_torchrun
    number = literal_int(value)
    is_left_to_torchrun = number == -1  # the default: the number is in an environment variable
    return number is not None and not is_left_to_torchrun


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
    called_functions: set[str] = set()
    packages: set[str] = set()
    names: set[str] = set()
    for statement in statements:
        called_functions |= called_in(statement.node)
        packages |= packages_of(statement.node)
        names.update(names_in(statement.node))
    if called_functions.isdisjoint(STARTS):
        why = "starts no process group: N ranks would train N models"
        raise ExportError(f"{name} {why}. Call torch.distributed.init_process_group() in an exported cell.")

    unknown_packages = packages - LIBRARIES - sys.stdlib_module_names - {"helpers"}
    if unknown_packages:
        return  # One of them may average the gradients.
    if any(COMMUNICATES.search(name) for name in names):
        return
    for statement in statements:
        if "backward" in called_in(statement.node):
            why = "trains, but no cell exchanges gradients: N ranks would train N models"
            raise ExportError(f"{label(statement)} {why}. Wrap the model: DistributedDataParallel(model).")


# ---- What calls get


def calls_in(node: ast.AST) -> list[ast.Call]:
    """All calls in a statement or an expression."""
    return [part for part in ast.walk(node) if isinstance(part, ast.Call)]


def called_in(node: ast.AST) -> set[str]:
    """The names of all functions and methods that are called in a statement, such as "backward"."""
    return {name_of(call.func) for call in calls_in(node)}


def name_of(function: ast.expr) -> str:
    """The last part of a called function's name: "init_process_group" for ``dist.init_process_group``."""
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
    calls_of_function: list[ast.Call] = []
    for statement in statements:
        calls_of_function += [call for call in calls_in(statement.node) if name_of(call.func) == function.name]
    for call in calls_of_function:
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
        elif isinstance(value, ast.Dict):  # **{"rank": 0}
            for key, item in zip(value.keys, value.values, strict=True):
                if isinstance(key, ast.Constant):
                    arguments[str(key.value)] = item
        elif isinstance(value, ast.Call) and name_of(value.func) == "dict":  # **dict(rank=0)
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
    """Yield (name, expression) for each name that a statement binds itself, and not by the statements in it.

    The expression is None if no plain assignment gives it, as for the variable of a loop.
    """
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from names_and_values(target, node.value)
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield from names_and_values(node.target, node.value)
    elif isinstance(node, ast.AugAssign | ast.For | ast.comprehension | ast.NamedExpr):
        yield from names_and_values(node.target, None)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield from names_and_values(node.optional_vars, None)


def names_and_values(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield (name, expression) for each name in an assignment ``target = value``.

    - ``rank = 0`` gives one pair.
    - ``rank, world_size = 0, 1`` gives two.
    - ``rank, world_size = setup()`` gives two with None, because it cannot be told which value a name gets.
    - ``config["rank"] = 0`` binds no name, so it gives none.
    """
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple | ast.List):
        if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
            inner_values: list[ast.expr | None] = list(value.elts)
        else:
            inner_values = [None] * len(target.elts)
        for inner_target, inner_value in zip(target.elts, inner_values, strict=True):
            yield from names_and_values(inner_target, inner_value)


def with_values(node: Node, values: Values) -> Node:
    """A copy of a node in which each name that always has one value is replaced by that value.

    After ``port = "29500"``, that is ``os.environ["MASTER_PORT"] = "29500"`` for ``os.environ["MASTER_PORT"] = port``.
    """
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
    """Replaces the names in a syntax tree by what is assigned to them, and then the names in that, too."""

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
        # In the value, this name is left as it is. Otherwise ``rank = rank + 1`` would be replaced for ever.
        others = {name: values for name, values in self.values.items() if name != node.id}
        return Replacement(others).visit(copy.deepcopy(value))
