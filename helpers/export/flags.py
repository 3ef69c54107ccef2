"""A notebook's parameters cell as the flags of a script: ``name: type = value  # help`` becomes ``--name``."""

import ast
import functools
import json
import re

from helpers.export.notebook import ExportError, label
from helpers.source import IMPORT, Statement

KINDS = {kind.__name__: kind for kind in (int, float, str, bool)}
quoted = functools.partial(json.dumps, ensure_ascii=False)  # a Python string literal in double quotes
PATTERN = "Write name: type = literal  # help, with int, float, str, bool or Literal[...]; | None may follow."


def read_flags(parameters: list[Statement]) -> dict[str, str]:
    """{parameter: the lines of the script that add its flag}, of the parameters cell.

    A comment on a line of its own begins a group of flags. Raises ExportError for a line that is not a parameter.
    """
    flags: dict[str, str] = {}
    for statement in parameters:
        if not statement.code or isinstance(statement.node, IMPORT):
            continue
        try:
            name, code = read_flag(statement)
        except (ValueError, KeyError, SyntaxError):
            raise ExportError(f"{label(statement)} is not a parameter. {PATTERN}") from None
        if name.startswith("_") or name in ("help", "args") or name in flags:
            raise ExportError(f"{label(statement)} cannot be a flag of its own. Choose another name.")
        flags[name] = code
    return flags


def read_flag(statement: Statement) -> tuple[str, str]:
    """One parameter, and the lines that add its flag. Raises ValueError, KeyError or SyntaxError for another line."""
    [node] = ast.parse(statement.code).body  # whose columns count from the line's beginning
    if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name) or node.value is None:
        raise ValueError
    name, default = node.target.id, ast.literal_eval(node.value)
    annotation = ast.unparse(node.annotation).removesuffix(" | None")
    literal = re.fullmatch(r"Literal\[(.+)\]", annotation)
    choices = list(ast.literal_eval(f"[{literal[1]}]")) if literal else []
    kind = KINDS[type(choices[0]).__name__ if choices else annotation]
    values = choices if default is None and "| None" in ast.unparse(node.annotation) else [default, *choices]
    fitting = (float, int) if kind is float else (kind,)
    if any(type(value) not in fitting or value not in (choices or values) for value in values):
        raise ValueError
    comment = statement.code.split("\n")[-1].encode()[node.end_col_offset :].decode().lstrip("# ;")
    words = (comment or name.replace("_", " ")).replace("%", "%%")  # argparse formats help texts with the % operator
    options = [quoted(f"--{name.replace('_', '-')}"), ast.get_source_segment(statement.code, node.value), quoted(words)]
    if kind is bool:
        options.append("action=switch")
    elif choices:
        options.append(f"choices={choices!r}")
    if kind is not bool and (kind is not type(default) or (choices and kind is not str)):
        options.append(f"type={kind.__name__}")
    heading = " ".join(re.findall(r"^# *(.+?)\.?$", statement.above, re.MULTILINE))
    group = f"group = parser.add_argument_group({quoted(heading)})\n    " if heading else ""
    return name, f"{group}add({', '.join(map(str, options))})"


def parse_args_text(flags: dict[str, str], adds: bool = False) -> str:
    """The source of the script's function that reads the flags. If ``adds``, the script's ``add_flags`` adds more."""
    calls = "\n    ".join([*flags.values(), *["add_flags(add)"] * adds])
    if adds:  # a default of True or False is enough there
        calls = calls.replace(", action=switch)", ")")
    lines = ["def parse_args():", "parser = argparse.ArgumentParser(usage=__doc__)"]
    if "action=switch" in calls:
        lines.append("switch = argparse.BooleanOptionalAction")
    if "group = " in calls:
        lines.append("group = parser")
    switch = """
        if isinstance(default, bool):
            options = {"action": argparse.BooleanOptionalAction}"""
    if calls:
        lines.append(f"""
    def add(flag, default, help, **options):{switch * adds}
        options = options or {{"type": type(default)}}
        help = f"{{help}} (default: %(default)s)"
        {"group" if "group = " in calls else "parser"}.add_argument(flag, default=default, help=help, **options)

    {calls}""")
    return "\n    ".join([*lines, "return parser.parse_args()"])
