"""Whether N ranks of a notebook's script would train one model together, and what to change where they would not.

They do with a process group and a wrapper or a collective, and without a fixed rank or a launcher of the notebook's.
"""

import ast
import re

from helpers.export.notebook import first_line
from helpers.export.source import IMPORT

RANK_NAMES = ("rank", "local_rank", "world_size", "num_replicas")
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
IN_ORDER = {  # {function: {position: the name of an argument that fixes a rank}}
    "init_process_group": {3: "world_size", 4: "rank", 5: "store"},
    "DistributedSampler": {1: "num_replicas", 2: "rank"},
}
STARTS = {"init_process_group", "start_process_group", "init_device_mesh", "init_distributed"}
FRAMEWORKS = {"accelerate", "colossalai", "composer", "deepspeed", "horovod"}  # each has its own group and wrapper
FRAMEWORKS |= {"lightning", "lightning_fabric", "pytorch_lightning"}
AVERAGES = re.compile(  # what makes N ranks train one model
    r"DDP|FSDP|DistributedDataParallel|FullyShardedDataParallel|fully_shard|replicate|parallelize_module|Pipe\w*|"
    r"distribute_(module|tensor)|all_(reduce|gather|to_all)\w*|reduce(_scatter\w*)?|broadcast\w*|P2POp|i?(send|recv)"
)
LAUNCHERS = re.compile(
    r"(.*\.)?(notebook_launcher|debug_launcher|elastic_launch|start_processes|launch_agent|TorchDistributor)|"
    r"((.*\.)?x?mp\.|(.*\.)?multiprocessing\.)?spawn|(hvd|horovod(\.\w+)?)\.run"
)


# ---- A fixed rank, a launcher of its own


def fixed_ranks(exported):
    """Yields a problem for each cell that fixes the rank or the world size, or starts the group with its own file."""
    fixed, moving = {}, set()  # names with a fixed number and names with another value, as (function, name)
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
                    yield worlds_of_one(statement, f"{ast.unparse(target)} = {value.value!r}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield from (worlds_of_one(statement, text) for text in fixed_by_call(node))
            elif starts_group and isinstance(node, ast.Constant) and str(node.value).startswith("file://"):
                yield worlds_of_one(statement, f"{node.value}")
    for key, (statement, text) in fixed.items():
        if key not in moving:  # in `rank = 0` before `rank = dist.get_rank()`, the 0 is only a default
            yield worlds_of_one(statement, text)


def fixed_by_call(call):
    """Yields, as text, what a call fixes: a rank, a world size, a store or a launcher's variable.

    ``os.environ.setdefault`` fixes nothing: torchrun has set the variable before.
    """
    function = ast.unparse(call.func)
    called = function.rpartition(".")[2]
    given = {IN_ORDER.get(called, {}).get(place): value for place, value in enumerate(call.args)}
    given |= {keyword.arg: keyword.value for keyword in call.keywords}
    if called in IN_ORDER:
        for name in RANK_NAMES:
            if name in given and is_integer(given[name]):
                yield f"{called}({name}={given[name].value})"
        if "store" in given and not is_none(given["store"]):
            yield f"{called}(store={ast.unparse(given['store'])})"
    elif function.endswith("environ.update"):
        for table in call.args:
            if isinstance(table, ast.Dict):
                given |= {
                    getattr(key, "value", None): value for key, value in zip(table.keys, table.values, strict=True)
                }
        yield from (f"{function}({name}=…)" for name in LAUNCHER_VARIABLES if isinstance(given.get(name), ast.Constant))
    elif called == "putenv" and len(call.args) == 2 and isinstance(call.args[1], ast.Constant):
        if getattr(call.args[0], "value", None) in LAUNCHER_VARIABLES:
            yield f"{ast.unparse(call)}"


def worlds_of_one(statement, text):
    return (
        f"{statement.where} hard-codes `{text}`: every process would train a model of its own.\n"
        "Call start_process_group() instead, and ask dist.get_rank() and dist.get_world_size()."
    )


def bindings(tree, function=None):
    """Yields (function, target, value) for each assignment and loop, and for the defaults of what starts the group."""
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
    """The (target, value) pairs of an assignment; tuples on both sides are taken apart."""
    if not isinstance(target, ast.Tuple | ast.List):
        return [(target, value)]
    values = value.elts if isinstance(value, ast.Tuple | ast.List) else [value] * len(target.elts)
    return [pair for both in zip(target.elts, values, strict=False) for pair in one_by_one(*both)]


def is_integer(node):
    return isinstance(node, ast.Constant) and type(node.value) is int


def is_none(node):
    return isinstance(node, ast.Constant) and node.value is None


def launchers(exported):
    """Yields a problem for each statement that starts ranks itself."""
    for statement, call in calls(exported):
        function = ast.unparse(call.func)
        strategy = " ".join(str(word.value.value) for word in call.keywords if is_word(word, "strategy"))
        process = function.endswith("Process") and any(
            "init_process_group" in other.code for other in exported if reads_target(call, other)
        )
        if LAUNCHERS.fullmatch(function) or re.search("notebook|spawn|fork", strategy) or process:
            yield (
                f"{statement.where}: `{first_line(ast.unparse(call))}` starts ranks, but torchrun starts the "
                "script's ranks already, and each would start more.\n"
                "Call its function itself, after start_process_group()."
            )


def is_word(keyword, name):
    return keyword.arg == name and isinstance(keyword.value, ast.Constant)


def reads_target(call, statement):
    """Whether the statement defines the function that the call of Process has as its target."""
    return any(word.arg == "target" and ast.unparse(word.value) in statement.binds for word in call.keywords)


def calls(exported):
    """Yields (statement, call) for each call in the statements, in order."""
    for statement in exported:
        for node in ast.walk(statement.node) if statement.node else []:
            if isinstance(node, ast.Call):
                yield statement, node


# ---- N ranks that would train N models


def worlds(exported, name):
    """[the problem] of a notebook whose N ranks would train N models, or []."""
    words = set()
    for statement in exported:
        if isinstance(statement.node, IMPORT):
            module = getattr(statement.node, "module", None)
            roots = [module] if module else [alias.name for alias in statement.node.names]
            words |= {root.partition(".")[0] for root in roots}
        for node in ast.walk(statement.node) if statement.node else []:
            words.add(getattr(node, "id", getattr(node, "attr", None)))
    if words & FRAMEWORKS or (words & {"transformers", "trl"} and any(str(word).endswith("Trainer") for word in words)):
        return []
    grouped = bool(words & STARTS)
    together = any(word and AVERAGES.fullmatch(word) for word in words)
    if grouped and (together or "backward" not in words):
        return []
    why = f"{name} {'wraps no model and calls no collective' if grouped else 'starts no process group'}"
    lines = [
        f"{why}: N ranks would train N models and overwrite one another's files.",
        *([] if grouped else ["  before these lines: device = start_process_group() (chapter 1)"]),
        *dict.fromkeys(line for statement, call in calls(exported) for line in what_changes(statement, call)),
        "Change these lines; or export the notebook as it is: --allow-single",
    ]
    return ["\n".join(lines)]


def what_changes(statement, call):
    """Yields, as a line of a message, what to change in a call so that the ranks train one model."""
    function = ast.unparse(call.func)
    called = function.rpartition(".")[2]
    given = {keyword.arg for keyword in call.keywords}
    text = ast.unparse(call)
    if called == "DataLoader" and not given & {"sampler", "batch_sampler"}:
        advice = "give it sampler=DistributedSampler(dataset) in place of shuffle (chapter 3)"
    elif called == "parameters" and isinstance(call.func, ast.Attribute) and "optim" in statement.code.lower():
        model = ast.unparse(call.func.value)
        advice = f"before it, {model} = DistributedDataParallel({model}.to(device)) (chapter 4)"
    elif called == "DataParallel":
        advice = "DistributedDataParallel in its place (chapter 4)"
    elif called == "cuda" or (called in ("to", "device") and re.search(r"\(['\"]cuda", text)):
        advice = "the device that start_process_group() returned (chapter 1)"
    elif function in ("torch.save", "save") or called in ("save_pretrained", "save_weights"):
        advice = "on one rank only, if dist.get_rank() == 0 (chapter 4)"
    else:
        return
    cell = statement.where.partition(", ")[2].partition(" (")[0] or statement.where
    yield f"  {cell}: `{first_line(text)}`: {advice}"
