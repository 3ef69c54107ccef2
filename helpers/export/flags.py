"""A notebook's parameters cell as the flags of a script: ``name: type = value  # help`` becomes ``--name``."""

import ast
import json
import re
from dataclasses import dataclass

from helpers.export.notebook import ExportError, label
from helpers.source import IMPORT, Statement

KINDS = {kind.__name__: kind for kind in (int, float, str, bool)}
PATTERN = "Write name: type = literal  # help, with int, float, str, bool or Literal[...]; | None may follow."


@dataclass(frozen=True)
class Flag:
    """A flag, as the call in the script that adds it."""

    name: str  # of the parameter
    call: str
    group: str  # the heading of --help below which this flag and those behind it stand, or ""

    @property
    def code(self) -> str:
        group = f"group = parser.add_argument_group({quoted(self.group)})\n    " if self.group else ""
        return group + self.call


def read_flags(parameters: list[Statement]) -> list[Flag]:
    """The flags of the parameters cell. A comment on a line of its own begins a group of flags.

    Raises ExportError for a line that is not a parameter.
    """
    flags: dict[str, Flag] = {}
    for statement in parameters:
        if statement.node is None or isinstance(statement.node, IMPORT):
            continue
        try:
            flag = read_flag(statement)
        except (ValueError, SyntaxError):
            raise ExportError(f"{label(statement)} is not a parameter. {PATTERN}") from None
        if flag.name.startswith("_") or flag.name == "help" or flag.name in flags:
            raise ExportError(f"{label(statement)} cannot be a flag of its own. Choose another name.")
        flags[flag.name] = flag
    return list(flags.values())


def read_flag(statement: Statement) -> Flag:
    """The flag of one line. Raises ValueError or SyntaxError for a line that is not a parameter."""
    [node] = ast.parse(statement.code).body  # whose columns count from the line's beginning
    if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name) or node.value is None:
        raise ValueError
    name, default = node.target.id, ast.literal_eval(node.value)
    annotation = ast.unparse(node.annotation)
    kind, choices = type_of(annotation.removesuffix(" | None"))
    if default is None:
        fits = annotation.endswith(" | None")
    else:
        fits = type(default) is kind or (kind is float and type(default) is int)
        fits = fits and (not choices or default in choices)
    if not fits:
        raise ValueError
    words = statement.comment.lstrip("# ") or name.replace("_", " ")
    options = [quoted(f"--{name.replace('_', '-')}"), ast.get_source_segment(statement.code, node.value) or ""]
    options.append(quoted(words.replace("%", "%%")))  # argparse formats help texts with the % operator
    if kind is bool:
        options.append("action=switch")
    elif choices:
        options.append(f"choices={choices!r}")
    if kind is not bool and (kind is not type(default) or (choices and kind is not str)):
        options.append(f"type={kind.__name__}")
    comments = re.findall(r"^# *(.+?)\.?$", statement.above, re.MULTILINE)
    return Flag(name, f"add({', '.join(options)})", " ".join(comments))


def type_of(annotation: str) -> tuple[type, list[int | float | str]]:
    """(the type of a flag, its choices or []). Raises ValueError or SyntaxError for another annotation."""
    if annotation in KINDS:
        return KINDS[annotation], []
    if not annotation.startswith("Literal["):
        raise ValueError
    choices = list(ast.literal_eval(f"[{annotation[8:-1].strip('()')}]"))
    if {type(choice) for choice in choices} not in ({int}, {float}, {str}):
        raise ValueError
    return type(choices[0]), choices


def parse_args_text(flags: list[Flag], usage: str, adds: bool = False) -> str:
    """The source of the script's function that reads the flags. If ``adds``, the script's ``add_flags`` adds more."""
    calls = "\n    ".join([flag.code for flag in flags] + ["add_flags(add)"] * adds)
    calls = calls.replace(", action=switch)", ")") if adds else calls  # there, a default of bool makes a switch
    head = f"def parse_args():\n    parser = argparse.ArgumentParser({usage})\n"
    if "action=switch" in calls:
        head += "    switch = argparse.BooleanOptionalAction\n"
    grouped = any(flag.group for flag in flags)
    if grouped:
        head += "    group = parser\n"
    switch = """if isinstance(default, bool):
            options = {"action": argparse.BooleanOptionalAction}
        """
    add = f"""
    def add(flag, default, help, **options):
        {switch if adds else ""}options = options or {{"type": type(default)}}
        help = f"{{help}} (default: %(default)s)"
        {"group" if grouped else "parser"}.add_argument(flag, default=default, help=help, **options)

    {calls}
"""
    return f"{head}{add if calls else ''}    return parser.parse_args()"


def quoted(text: str) -> str:
    """A Python string literal in double quotes."""
    return json.dumps(text, ensure_ascii=False)
