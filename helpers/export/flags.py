"""A notebook's parameters cell as the flags of a script: ``name: type = value  # help`` becomes ``--name``."""

import ast
import json
import re
from dataclasses import dataclass
from typing import Any

from helpers.export.notebook import ExportError, label
from helpers.source import IMPORT, Statement

KINDS = {  # the types that a parameter may have, by their names
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
}
PATTERN = "Write name: type = literal  # help, with int, float, str, bool or Literal[...]."


@dataclass(frozen=True)
class Annotation:
    """The type of a parameter, as its annotation says it."""

    kind: type
    choices: list[Any]  # the values that Literal[...] allows; none for a plain type


def read_flags(parameters: list[Statement]) -> dict[str, str]:
    """{parameter: the lines of the script that add its flag}, from the statements of a notebook's parameters cell.

    For example {"lr": 'add("--lr", 0.1, "learning rate")'}. A comment on a line of its own begins a group of flags.
    Raises ExportError for a line that is not a parameter.
    """
    flags: dict[str, str] = {}
    for statement in parameters:
        if not statement.code or isinstance(statement.node, IMPORT):
            continue
        try:
            name, code = read_flag(statement)
        except (ValueError, KeyError, SyntaxError):
            raise ExportError(f"{label(statement)} is not a parameter. {PATTERN}") from None
        is_private = name.startswith("_")
        is_argparses_own = name in ("help", "args")
        if is_private or is_argparses_own or name in flags:
            raise ExportError(f"{label(statement)} cannot be a flag of its own. Choose another name.")
        flags[name] = code
    return flags


def read_flag(statement: Statement) -> tuple[str, str]:
    """Read a parameter of a notebook: (its name, the lines of the script that add its flag).

    ``lr: float = 0.1  # learning rate`` gives ("lr", 'add("--lr", 0.1, "learning rate")'). Raises ValueError, KeyError
    or SyntaxError for a statement that is no parameter.
    """
    [node] = ast.parse(statement.code).body  # whose columns count from the line's beginning
    if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name) or node.value is None:
        raise ValueError
    name = node.target.id
    default = ast.literal_eval(node.value)
    annotation = read_annotation(ast.unparse(node.annotation))
    arguments = [
        quoted(f"--{name.replace('_', '-')}"),
        ast.get_source_segment(statement.code, node.value),
        quoted(help_of(statement, node, name).replace("%", "%%")),  # argparse formats help texts with the % operator
    ]
    if annotation.kind is bool:
        arguments.append("action=switch")
    else:
        if annotation.choices:
            arguments.append(f"choices={annotation.choices!r}")
        # The script's add() takes the type from the default, unless it gets other options, such as choices. Then
        # argparse takes text, unless it is told another type.
        add_takes_another_type = annotation.kind is not type(default)
        argparse_takes_text = bool(annotation.choices) and annotation.kind is not str
        if add_takes_another_type or argparse_takes_text:
            arguments.append(f"type={annotation.kind.__name__}")
    code = f"add({', '.join(map(str, arguments))})"

    # A comment above the parameter is the heading of a group of flags.
    heading = " ".join(re.findall(r"^# *(.+?)\.?$", statement.above, re.MULTILINE))
    if heading:
        code = f"group = parser.add_argument_group({quoted(heading)})\n    {code}"
    return name, code


def read_annotation(text: str) -> Annotation:
    """Read the annotation of a parameter: a type of KINDS, or Literal[...], whose first value has the type.

    Raises KeyError or ValueError for another one.
    """
    literal = re.fullmatch(r"Literal\[(.+)\]", text)
    if literal is None:
        return Annotation(KINDS[text], choices=[])
    choices = list(ast.literal_eval(f"[{literal[1]}]"))
    return Annotation(KINDS[type(choices[0]).__name__], choices)


def help_of(statement: Statement, node: ast.AnnAssign, name: str) -> str:
    """The help text of a parameter's flag: the comment behind the parameter, or else its name in words."""
    last_line = statement.code.split("\n")[-1].encode()  # ast's columns count bytes
    comment = last_line[node.end_col_offset :].decode().lstrip("# ;")
    return comment or name.replace("_", " ")


def quoted(text: str) -> str:
    """A text as Python's string literal in double quotes. JSON's literals are also Python's."""
    return json.dumps(text, ensure_ascii=False)


def parse_args_text(flags: dict[str, str], adds: bool = False, reads: bool = False) -> str:
    """The source of the script's function ``parse_args``.

    ``flags`` are {parameter: the lines that add its flag}. ``adds`` says whether the chapter has a function
    ``add_flags``, which adds more flags by calling the script's function ``add`` with a flag, a default and a help text
    alone. Then ``add`` makes a switch of each default that is True or False; otherwise the flags' own lines say so.
    ``reads`` says whether the chapter has a function ``read_args(parser)``, which gets the arguments, for example from
    a file.
    """
    calls = list(flags.values())
    has_groups = any(call.startswith("group = ") for call in calls)
    if adds:
        calls = [call.replace(", action=switch)", ")") for call in calls]
        if has_groups:
            calls.append('group = parser.add_argument_group("Your own")')
        calls.append("add_flags(add)")
    has_switch = any("action=switch" in call for call in calls)

    lines = ["def parse_args():", "    parser = argparse.ArgumentParser(usage=__doc__)"]
    if has_switch:
        lines.append("    switch = argparse.BooleanOptionalAction")
    if has_groups:
        lines.append("    group = parser")  # for the flags above the first heading
    has_options = adds or any(re.search(r", (action|choices|type)=", call) for call in calls)
    if calls and has_options:
        lines += ["", "    def add(flag, default, help, **options):"]
    elif calls:
        lines += ["", "    def add(flag, default, help):"]
    if calls:
        if adds:
            lines.append("        if default is None or isinstance(default, (list, tuple, dict)):")
            lines.append('            parser.error(f"{flag}: a flag cannot have the type of {default!r}")')
            lines.append("        if isinstance(default, bool):")
            lines.append('            options["action"] = argparse.BooleanOptionalAction')
            lines.append('        elif "type" not in options:  # a choice is of that type too')
            lines.append('            options["type"] = type(default)')
        elif has_options:
            lines.append("        if not options:")
            lines.append('            options["type"] = type(default)')
        lines.append('        help = f"{help} (default: %(default)s)"')
        target = "group" if has_groups else "parser"
        if has_options:
            lines.append(f"        {target}.add_argument(flag, default=default, help=help, **options)")
        else:
            lines.append(f"        {target}.add_argument(flag, type=type(default), default=default, help=help)")
        lines.append("")
        lines += [f"    {call}" for call in calls]
    if reads:
        lines.append("    return read_args(parser)")
    else:
        lines.append("    return parser.parse_args()")
    return "\n".join(lines)
