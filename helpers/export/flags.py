"""A notebook's parameters cell as the flags of a script: ``name: type = value  # help`` becomes ``--name``."""

import ast
import json
import re
import textwrap
from dataclasses import dataclass
from typing import Any

from helpers.export.notebook import ExportError, label
from helpers.source import IMPORT, Statement

WIDTH = 88  # characters of a line of a script
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


@dataclass(frozen=True)
class Flag:
    """A flag of the script, made of a parameter of the notebook."""

    option: str  # such as --batch-size
    kind: type
    choices: list[Any]  # none, if each value of the type is allowed
    default: str  # as Python's source
    default_kind: type
    help: str
    heading: str  # of the group of flags that this one begins; empty for the others


def read_flags(parameters: list[Statement]) -> dict[str, Flag]:
    """{parameter: its flag}, from the statements of a notebook's parameters cell.

    A comment on a line of its own begins a group of flags. Raises ExportError for a line that is not a parameter.
    """
    flags: dict[str, Flag] = {}
    for statement in parameters:
        if not statement.code or isinstance(statement.node, IMPORT):
            continue
        try:
            name, flag = read_flag(statement)
        except (ValueError, KeyError, SyntaxError):
            raise ExportError(f"{label(statement)} is not a parameter. {PATTERN}") from None
        is_private = name.startswith("_")
        is_argparses_own = name in ("help", "args")
        if is_private or is_argparses_own or name in flags:
            raise ExportError(f"{label(statement)} cannot be a flag of its own. Choose another name.")
        flags[name] = flag
    return flags


def read_flag(statement: Statement) -> tuple[str, Flag]:
    """Read a parameter of a notebook, such as ``lr: float = 0.1  # learning rate``: (its name, its flag).

    Raises ValueError, KeyError or SyntaxError for a statement that is no parameter.
    """
    [node] = ast.parse(statement.code).body  # statement.node has the columns of the cell
    if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name) or node.value is None:
        raise ValueError
    name = node.target.id
    annotation = read_annotation(ast.unparse(node.annotation))
    flag = Flag(
        option=f"--{name.replace('_', '-')}",
        kind=annotation.kind,
        choices=annotation.choices,
        default=str(ast.get_source_segment(statement.code, node.value)),
        default_kind=type(ast.literal_eval(node.value)),
        help=help_of(statement, node, name),
        heading=heading_above(statement),
    )
    return name, flag


def heading_above(statement: Statement) -> str:
    """The heading of the group of flags that a parameter begins, from the comment above it; "" without a comment.

    ``# The model.`` gives "The model". The texts of several lines are joined.
    """
    lines = re.findall(r"^# *(.+?)\.?$", statement.above, re.MULTILINE)
    return " ".join(lines)


def read_annotation(text: str) -> Annotation:
    """Read the annotation of a parameter: a type of KINDS, or Literal[...], whose first value has the type.

    Raises KeyError or ValueError for another one.
    """
    literal = re.fullmatch(r"Literal\[(.+)\]", text)  # Literal['ddp', 'fsdp']
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


def parse_args_text(flags: dict[str, Flag], adds: bool = False, reads: bool = False) -> str:
    """The source of the script's function ``parse_args``.

    ``adds`` says whether the chapter has a function ``add_flags``, which adds more flags. ``reads`` says whether the
    chapter has a function ``read_args(parser)``, which gets the arguments, for example from a file.
    """
    if adds:
        lines = lines_with_add_flags(flags)
    else:
        lines = lines_of_flags(flags)
    if reads:
        lines.append("    return read_args(parser)")
    else:
        lines.append("    return parser.parse_args()")
    return "\n".join(lines)


def lines_of_flags(flags: dict[str, Flag]) -> list[str]:
    """The lines of ``parse_args`` up to its ``return``: each flag is one call of argparse's ``add_argument``."""
    lines = ["def parse_args():"]
    if not flags:
        lines.append("    parser = argparse.ArgumentParser(usage=__doc__)")
        return lines
    lines.append("    parser = argparse.ArgumentParser(")
    lines.append("        usage=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter")
    lines.append("    )")
    if any(flag.kind is bool for flag in flags.values()):
        lines.append("    switch = argparse.BooleanOptionalAction  # --NAME and --no-NAME")
    lines.append("    # fmt: off")  # a formatter would give each argument of a call a line of its own
    target = "parser"
    for flag in flags.values():
        if flag.heading:
            target = "group"
            lines += ["", f"    group = parser.add_argument_group({quoted(flag.heading)})"]
        lines += call_of_add_argument(flag, f"    {target}.add_argument(")
    lines.append("    # fmt: on")
    return lines


def call_of_add_argument(flag: Flag, begin: str) -> list[str]:
    """The lines of the call of ``add_argument`` that adds a flag: what the flag is, and below that its help text.

    ``begin`` is the first line up to the call's parenthesis.
    """
    arguments = [quoted(flag.option)]
    if flag.kind is bool:
        arguments.append("action=switch")
    else:
        arguments.append(f"type={flag.kind.__name__}")
    arguments.append(f"default={flag.default}")
    lines = [f"{begin}{', '.join(arguments)},"]

    indent = " " * len(begin)
    if flag.choices:
        lines.append(f"{indent}choices={json.dumps(flag.choices, ensure_ascii=False)},")
    text = flag.help.replace("%", "%%")  # argparse formats it with the % operator
    parts = textwrap.wrap(text, WIDTH - len(f'{indent}help="")'), drop_whitespace=False)
    lines.append(f"{indent}help={quoted(parts[0])}")
    for part in parts[1:]:
        lines.append(f"{indent}     {quoted(part)}")
    lines[-1] += ")"
    return lines


def lines_with_add_flags(flags: dict[str, Flag]) -> list[str]:
    """The lines of ``parse_args`` up to its ``return``, in a chapter that has a function ``add_flags``.

    That function gets the script's own function ``add``, and calls it with a flag, a default and a help text alone. So
    ``add`` takes the type from the default, and makes a switch of each default that is True or False.
    """
    has_groups = any(flag.heading for flag in flags.values())
    lines = ["def parse_args():", "    parser = argparse.ArgumentParser(usage=__doc__)"]
    target = "parser"
    if has_groups:
        lines.append("    group = parser")  # for the flags above the first heading
        target = "group"
    lines += ["", "    def add(flag, default, help, **options):"]
    lines.append("        if default is None or isinstance(default, (list, tuple, dict)):")
    lines.append('            parser.error(f"{flag}: a flag cannot have the type of {default!r}")')
    lines.append("        if isinstance(default, bool):")
    lines.append('            options["action"] = argparse.BooleanOptionalAction')
    lines.append('        elif "type" not in options:  # a choice is of that type too')
    lines.append('            options["type"] = type(default)')
    lines.append('        help = f"{help} (default: %(default)s)"')
    lines.append(f"        {target}.add_argument(flag, default=default, help=help, **options)")
    lines.append("")
    for flag in flags.values():
        if flag.heading:
            lines.append(f"    group = parser.add_argument_group({quoted(flag.heading)})")
        lines.append(f"    {call_of_add(flag)}")
    if has_groups:
        lines.append('    group = parser.add_argument_group("Your own")')
    lines.append("    add_flags(add)")
    return lines


def call_of_add(flag: Flag) -> str:
    """A flag as a call of the script's function ``add``: ``add("--lr", 0.1, "learning rate")``."""
    help_text = quoted(flag.help.replace("%", "%%"))  # argparse formats it with the % operator
    arguments = [quoted(flag.option), flag.default, help_text]
    if flag.choices:
        arguments.append(f"choices={flag.choices!r}")
    if flag.kind is not flag.default_kind:  # add takes the type from the default, unless it is told another one
        arguments.append(f"type={flag.kind.__name__}")
    return f"add({', '.join(arguments)})"
