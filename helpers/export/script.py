"""A notebook as one script for torchrun: ``script_from_notebook``. Text in, text out; the code is never executed.

Imports, constants and definitions stand above main, everything else becomes main's body in the notebook's order, and
parameters become flags. The statements keep their own comments.
"""

import ast
import io
import re
import shlex
import subprocess
import sys
import textwrap
import tokenize
from dataclasses import replace

from nbformat import NotebookNode
from ruff import find_ruff_bin

from helpers.export.checks import check
from helpers.export.flags import Flag, parse_args_text, read_flags
from helpers.export.notebook import ExportError, sort_cells, title_and_purpose
from helpers.export.parts import sort_statements
from helpers.source import DEFINITION, Statement, compiled, modules_of

WIDTH = 88
PLAIN = {"torch", "torchvision", "numpy", "sklearn", "matplotlib"}  # libraries that can be imported in any order
PRAGMA = re.compile(r"# *(noqa|type|pragma|ruff|pylint|mypy)\b")  # such a comment must stay in its line


def script_from_notebook(notebook: NotebookNode, name: str) -> str:
    """The text of the script NAME.py. Raises ExportError for a cell that a script cannot have."""
    cells = sort_cells(notebook, name)
    flags = read_flags(cells.parameters)
    parts = sort_statements(cells)
    check(parts, flags, name)
    about = docstring(*title_and_purpose(notebook, name), name)
    usage = "usage=__doc__.replace('%', '%%')" if "%" in about else "usage=__doc__"  # argparse uses the % operator
    sections = [
        about,
        "\n".join(dict.fromkeys([*(statement.text for statement in parts.imports), "import argparse"])),
        spaced(parts.definitions),
        f"def main(args):\n{indented(main_body(parts.body, flags))}",
        parse_args_text(flags, usage, adds="add_flags" in {name for part in parts.definitions for name in part.binds}),
        spaced(parts.plumbing),
        'if __name__ == "__main__":\n    main(parse_args())',
    ]
    script = formatted("\n\n\n".join(filter(None, sections)) + "\n", name, in_any_order(parts.imports))
    try:
        compiled(script)
    except SyntaxError as error:  # such as a `global` that is valid in a cell and not in a function
        line = script.split("\n")[(error.lineno or 1) - 1].strip()
        raise ExportError(f"{name}: in the function main, `{line}` is not Python: {error.msg}. Change it.") from None
    return script


def main_body(body: list[Statement], flags: list[Flag]) -> str:
    """main's statements, cell by cell, with args.NAME for a parameter where that means the same."""
    rebound = {name for statement in body for name in statement.names.binds | statement.names.own}
    passed = {flag.name for flag in flags} - rebound
    passed -= {name for statement in body for name in passed if with_arguments(statement.code, {name}) is None}
    read = {name for statement in body for name in statement.reads}
    lines = [f"{flag.name} = args.{flag.name}" for flag in flags if flag.name in read - passed]
    lines += [""] if lines else []
    for statement in body:
        if statement.above.strip(" ").startswith("\n") and lines and lines[-1]:
            lines.append("")
        lines.append(replace(statement, code=with_arguments(statement.code, passed) or statement.code).text)
    return "\n".join(lines).strip("\n")


def with_arguments(code: str, names: set[str]) -> str | None:
    """The code with ``args.NAME`` for each of the names; None where the replaced text would mean something else."""
    tree = ast.parse(code)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in names]
    lines = [line.encode() for line in code.split("\n")]  # ast's columns count bytes
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        line, column = lines[node.lineno - 1], node.col_offset
        lines[node.lineno - 1] = line[:column] + b"args." + line[column:]
    try:  # f"{lr=}" prints its own text; and before Python 3.12 some positions inside f-strings are wrong
        new = b"\n".join(lines).decode()
        meaning = re.sub(
            r"Attribute\(value=Name\(id='args', ctx=Load\(\)\), attr=('\w+')", r"Name(id=\1", ast.dump(ast.parse(new))
        )
        return new if meaning == ast.dump(tree) else None
    except (SyntaxError, UnicodeDecodeError):
        return None


# ---- The script's text


def docstring(title: str, purpose: str, name: str) -> str:
    """What the script is, and how to run it."""
    file = shlex.quote(f"{name}.py")
    title += "" if title.endswith((".", "?", "!")) else "."
    nodes = f"torchrun --nnodes=2 --node-rank=0 --master-addr=HOST --nproc-per-node=gpu {file}"
    if len(nodes) > WIDTH:
        nodes = nodes.replace(f" {file}", f" \\\n    {file}")
    text = f"""{textwrap.fill(f"{title} {purpose}".strip(), WIDTH - 4)}

One node, all GPUs (without GPUs, a number), and two (--node-rank=1 on the second):
torchrun --nproc-per-node=gpu {file}
{nodes}
""".replace('"""', "'''")
    return ('r"""' if "\\" in text else '"""') + text + '"""'


def spaced(statements: list[Statement]) -> str:
    """Definitions two lines apart, constants together."""
    text, before = "", None
    for statement in statements:
        constants = before and not isinstance(before.node, DEFINITION) and not isinstance(statement.node, DEFINITION)
        text += ("\n" if constants else "\n\n\n") + statement.text
        before = statement
    return text.strip("\n")


def indented(code: str) -> str:
    """The code moved four spaces to the right, except for lines that begin inside a string."""
    inside: set[int] = set()
    todo: list[ast.AST] = [ast.parse(code)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)):
            inside.update(range(node.lineno + 1, (node.end_lineno or 0) + 1))
        else:  # what is inside an f-string has wrong line numbers in Python 3.11
            todo += ast.iter_child_nodes(node)
    lines = enumerate(code.split("\n"), 1)
    return "\n".join(line if number in inside or not line else f"    {line}" for number, line in lines)


def with_short_lines(script: str) -> str:
    """The script without formatters' comments; a comment at the end of a line that is too long goes above the line."""
    lines: list[str | None] = [*script.split("\n")]
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(script).readline):
        row, column = token.start[0] - 1, token.start[1]
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
        elif token.type == tokenize.COMMENT:
            line = lines[row] or ""
            before = line[:column].rstrip()
            if re.match(r"# *(fmt|isort) *:", token.string):
                lines[row] = before or None
            elif before and len(line) > WIDTH and not depth and not PRAGMA.match(token.string):
                indent = before[: len(before) - len(before.lstrip())]
                lines[row] = f"{indent}{token.string}\n{before}"
    return "\n".join(line for line in lines if line is not None)


def in_any_order(imports: list[Statement]) -> bool:
    """Whether the imports may be sorted: whether all are from the standard library or in PLAIN."""
    roots = {name.partition(".")[0] for statement in imports for name in modules_of(statement.node)}
    return roots <= PLAIN | sys.stdlib_module_names


def formatted(script: str, name: str, sort: bool) -> str:
    """The script as ruff formats it, its imports sorted or not. Raises ExportError where ruff fails."""
    try:
        script = with_short_lines(script)
    except (tokenize.TokenError, SyntaxError):
        return script  # which does not compile either, and that names the line
    commands = [["check", "--fix", "--exit-zero", "--quiet", "--select=I"], ["format"]]
    for command in commands if sort else commands[1:]:
        ruff = [find_ruff_bin(), *command, "--isolated", f"--line-length={WIDTH}", "--target-version=py311", "-"]
        done = subprocess.run(ruff, input=script, capture_output=True, text=True, encoding="utf-8")
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise ExportError(f"{name}: ruff could not format the script: {reason}")
        script = done.stdout
    return script
