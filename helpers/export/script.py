"""A notebook as one script for torchrun: ``script_from_notebook``. Text in, text out; the code is never executed."""

import ast
import io
import re
import shlex
import subprocess
import sys
import textwrap
import tokenize
from collections.abc import Sequence
from dataclasses import replace

from nbformat import NotebookNode
from ruff import find_ruff_bin

from helpers.export.flags import parse_args_text, read_flags
from helpers.export.notebook import LIBRARIES, sort_cells, title_and_purpose
from helpers.export.parts import check_launching, check_names, check_start, sort_statements
from helpers.source import Statement, in_strings, packages_of

WIDTH = 88


def script_from_notebook(notebook: NotebookNode, name: str, tested_with: Sequence[str] | None = None) -> str:
    """The text of the script NAME.py. Raises ExportError for a cell that a script cannot have.

    ``tested_with`` are the versions of PyTorch on which a chapter's script was run, or None for a notebook that is no
    chapter. The docstring names them in one line, also if there are none, so that the numbers of the lines below stay.
    """
    cells = sort_cells(notebook, name)
    flags = read_flags(cells.parameters)
    check_launching(cells.exported)
    parts = sort_statements(cells)
    check_names(parts, cells.parameters)
    check_start(parts, name)
    sections = [
        docstring(*title_and_purpose(notebook, name), name, tested_with),
        "\n".join(dict.fromkeys([*(statement.text for statement in parts.imports), "import argparse"])),
        "\n".join(statement.text for statement in parts.definitions),
        f"def main(args):\n{indented(main_body(parts.body, [*flags]))}",
        parse_args_text(flags, adds=any("add_flags" in statement.binds for statement in parts.definitions)),
        "\n".join(statement.text for statement in parts.plumbing),
        'if __name__ == "__main__":\n    main(parse_args())',
    ]
    script = "\n\n\n".join(filter(None, sections)) + "\n"
    packages = {package for statement in parts.imports for package in packages_of(statement.node)}
    return formatted(with_short_lines(script), sort=packages <= LIBRARIES | sys.stdlib_module_names)


def main_body(body: list[Statement], parameters: list[str]) -> str:
    """main's statements, cell by cell, with args.NAME for a parameter where that means the same."""
    rebound = {name for statement in body for name in statement.binds | statement.own}
    passed = set() if "args" in rebound else {*parameters} - rebound
    passed -= {name for statement in body for name in passed if with_arguments(statement.code, {name}) is None}
    read = {name for statement in body for name in statement.reads}
    lines = [f"{name} = args.{name}" for name in parameters if name in read - passed]
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
        return new if ast.dump(NamesOfArguments().visit(ast.parse(new))) == ast.dump(tree) else None
    except (SyntaxError, UnicodeDecodeError):
        return None


class NamesOfArguments(ast.NodeTransformer):
    """Makes NAME of each ``args.NAME``."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "args":
            return ast.Name(node.attr, node.ctx)
        return node


# ---- The script's text


def docstring(title: str, purpose: str, name: str, tested_with: Sequence[str] | None = None) -> str:
    """What the script is, how to run it, and on which versions of PyTorch it was run."""
    file = shlex.quote(f"{name}.py")
    title += "" if title.endswith((".", "?", "!")) else "."
    nodes = f"torchrun --nnodes=2 --node-rank=0 --master-addr=HOST --nproc-per-node=gpu {file}"
    if len(nodes) > WIDTH:
        nodes = nodes.replace(f" {file}", f" \\\n    {file}")
    text = f"""{textwrap.fill(f"{title} {purpose}".strip(), WIDTH - 4)}

One node, all GPUs (without GPUs, a number), and two (--node-rank=1 on the second):
torchrun --nproc-per-node=gpu {file}
{nodes}
"""
    if tested_with:
        text += f"\nTested on CPUs with PyTorch {listed(tested_with)}.\n"
    elif tested_with is not None:
        text += "\nChanged since it was last tested.\n"
    text = text.replace('"""', "'''").replace("%", "%%")  # argparse shows it, and uses the % operator
    return ('r"""' if "\\" in text else '"""') + text + '"""'


def listed(words: Sequence[str]) -> str:
    """The words as a list in a sentence: ``a, b and c``."""
    *first, last = words
    if not first:
        return last
    return f"{', '.join(first)} and {last}"


def indented(code: str) -> str:
    """The code moved four spaces to the right, except for lines that begin inside a string."""
    inside = in_strings(code)
    lines = enumerate(code.split("\n"), 1)
    return "\n".join(line if number in inside or not line else f"    {line}" for number, line in lines)


def with_short_lines(script: str) -> str:
    """The script without formatters' comments; a comment at the end of a line that is too long goes above the line."""
    lines, inside = script.split("\n"), in_strings(script)
    for token in tokenize.generate_tokens(io.StringIO(script).readline):
        number, column = token.start
        if token.type == tokenize.COMMENT:
            line = lines[number - 1]
            code = line[:column].rstrip()
            if re.match(r"# *(fmt|isort) *:", token.string):
                lines[number - 1] = code
            elif code and len(line) > WIDTH and number not in inside:
                indent = code[: len(code) - len(code.lstrip())]
                lines[number - 1] = f"{indent}{token.string}\n{code}"
    return "\n".join(lines)


def formatted(script: str, sort: bool) -> str:
    """The script as ruff formats it, its imports sorted or not."""
    commands = [["check", "--fix", "--exit-zero", "--quiet", "--select=I"], ["format"]]
    for command in commands if sort else commands[1:]:
        ruff = [find_ruff_bin(), *command, "--isolated", f"--line-length={WIDTH}", "--target-version=py311", "-"]
        script = subprocess.run(ruff, input=script, capture_output=True, check=True, text=True, encoding="utf-8").stdout
    return script
