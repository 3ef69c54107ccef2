"""From a notebook's parameters cell to the flags of a script: ``name: type = value  # help`` becomes ``--name``."""

import ast
import json
import re

from helpers.export.notebook import ExportError, first_line
from helpers.export.source import IMPORT


def read_flags(parameters):
    """{name: (the place in the notebook, the lines of code that add the flag)} of the parameters cell.

    A comment on a line of its own begins a group of flags. Raises ExportError with the problems of all lines.
    """
    flags, problems = {}, []
    for statement in parameters:
        if statement.node is None or isinstance(statement.node, IMPORT):
            continue
        try:
            name, call = flag(statement)
        except ExportError as error:
            problems += error.problems
            continue
        if name in flags:
            problems.append(f"{statement.where} has the parameter {name} twice.\nKeep one.")
        if comments := re.findall(r"^# *(.+?)\.?$", statement.above, re.MULTILINE):
            call = f"group = parser.add_argument_group({quoted(' '.join(comments))})\n    {call}"
        flags[name] = statement.where, call
    if problems:
        raise ExportError(*problems)
    return flags


def parse_args_text(flags, name, usage):
    """The source of the script's function that reads the flags; ``name`` is what the script calls that function."""
    calls = "\n    ".join(call for _, call in flags.values())
    head = f"""\
def {name}():
    parser = argparse.ArgumentParser({usage})
"""
    if "action=switch" in calls:
        head += "    switch = argparse.BooleanOptionalAction\n"
    if "group = " in calls:
        head += "    group = parser\n"
    add = f"""
    def add(flag, default, help, **options):
        options = options or {{"type": type(default)}}
        help = f"{{help}} (default: %(default)s)"
        {"group" if "group = " in calls else "parser"}.add_argument(flag, default=default, help=help, **options)

    {calls}
"""
    return f"{head}{add if calls else ''}    return parser.parse_args()"


def flag(statement):
    """(name, the call that adds its flag) from one line of the parameters cell. Raises ExportError for another line."""
    node, where = ast.parse(statement.code).body[0], statement.where
    target = node.targets[0] if isinstance(node, ast.Assign) else isinstance(node, ast.AnnAssign) and node.target
    if not isinstance(target, ast.Name) or len(getattr(node, "targets", [1])) > 1 or not getattr(node, "value", None):
        wrong = f"`{first_line(statement.code)}` is not a parameter"
        raise ExportError(f"{where}: {wrong}.\nWrite name: type = value  # help")
    name, value = target.id, ast.get_source_segment(statement.code, node.value)
    if name == "help":
        raise ExportError(
            f"{where}: argparse needs the flag --help for itself.\nChoose another name for the parameter."
        )
    try:
        default = ast.literal_eval(node.value)
    except ValueError:
        raise ExportError(
            f"{where}: the default of {name}, {value}, is not a literal.\n"
            "Write a number, a string, True, False or None."
        ) from None
    kind, choices, optional = flag_type(node, default, name, where)
    fits = type(default) is kind or (kind is float and type(default) is int) or (optional and default is None)
    if not fits or (choices and default is not None and default not in choices):
        raise ExportError(f"{where}: the default of {name}, {value}, does not fit its type.\nChange one of the two.")
    words = statement.comment.lstrip("# ") or name.replace("_", " ")
    options = [quoted(f"--{name.replace('_', '-')}"), value]
    options.append(quoted(words.replace("%", "%%")))  # argparse formats help texts with the % operator
    if kind is bool:
        options.append("action=switch")
    elif choices:
        options.append(f"choices={choices!r}")
    if kind is not bool and (kind is not type(default) or (choices and kind is not str)):
        options.append(f"type={kind.__name__}")
    return name, f"add({', '.join(options)})"


def flag_type(node, default, name, where):
    """A parameter's (type: int, float, str or bool; choices or None; whether it may be None). Raises ExportError."""
    if isinstance(node, ast.Assign):
        if type(default) in (int, float, str, bool):
            return type(default), None, False
        raise ExportError(f"{where}: the type of {name} cannot be seen.\nWrite {name}: type = {default!r}")
    kinds = {kind.__name__: kind for kind in (int, float, str, bool)}
    written = ast.unparse(node.annotation)
    inner = re.sub(r"^(?:typing\.)?Optional\[(.*)\]$|^(.*) \| None$|^None \| (.*)$", r"\1\2\3", written)
    if inner in kinds:
        return kinds[inner], None, inner != written
    if listed := re.fullmatch(r"(?:typing\.)?Literal\[(.*)\]", inner):
        try:
            values = list(ast.literal_eval(f"[{listed[1].removeprefix('(').removesuffix(')')}]"))
        except (ValueError, SyntaxError):
            values = []
        if values and {type(value) for value in values} in ({str}, {int}, {float}):
            return type(values[0]), values, inner != written
    raise ExportError(
        f"{where}: {name} has the type {written}, of which no flag can be made.\n"
        "Use int, float, str, bool or Literal[...], or one of these | None."
    )


def quoted(text):
    """A Python string literal in double quotes."""
    return json.dumps(text, ensure_ascii=False)
