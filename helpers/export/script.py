"""A notebook as one script for torchrun: ``script_from_notebook``. Text in, text out; the code is never executed."""

import ast
import io
import re
import subprocess
import sys
import textwrap
import tokenize
from collections.abc import Sequence
from dataclasses import replace

from nbformat import NotebookNode
from ruff import find_ruff_bin

from helpers.command_line import as_argument
from helpers.export.facts import facts_in
from helpers.export.flags import WIDTH, parse_args_text, read_flags
from helpers.export.notebook import LIBRARIES, sort_cells, title_and_purpose
from helpers.export.parts import check_names, names_bound_by, names_read_by, sort_statements
from helpers.export.refused import check_launching, check_start
from helpers.source import Statement, in_strings, packages_of


def script_from_notebook(notebook: NotebookNode, name: str, tested_with: Sequence[str] | None = None) -> str:
    """The text of the script NAME.py. Raises ExportError for a cell that a script cannot have.

    ``tested_with`` are the versions of PyTorch on which a chapter's script was run; none if the chapter has changed
    since. It is None for a notebook that is no chapter.
    """
    cells = sort_cells(notebook, name)
    flags = read_flags(cells.parameters)
    check_launching(cells.exported)
    parts = sort_statements(cells)
    check_names(parts, cells.parameters)
    check_start(parts.of_cells(), name)

    title, purpose = title_and_purpose(notebook, name)
    parameters = list(flags)
    defined_names = names_bound_by(parts.definitions)
    saves_at_signal = "StopRequest" in defined_names
    own_commands = facts_in(notebook.metadata, name).script.how_to_start
    commands = how_to_start(name, parameters, own_commands, saves_at_signal)
    body = main_body(parts.body, parameters)
    sections = [
        docstring(title, purpose, commands, tested_with),
        text_of_imports(parts.imports),
        with_short_lines(text_of(parts.definitions)),
        with_short_lines(f"def main(args):\n{indented(body)}"),
        parse_args_text(flags, adds="add_flags" in defined_names, reads="read_args" in defined_names),
        with_short_lines(text_of(parts.plumbing)),
        'if __name__ == "__main__":\n    main(parse_args())',
    ]
    script = "\n\n\n".join(section for section in sections if section) + "\n"

    imported_packages: set[str] = set()
    for statement in parts.imports:
        imported_packages |= packages_of(statement.node)
    # The order of imports may matter to a package that is not among LIBRARIES, so it is kept then.
    may_be_sorted = imported_packages <= LIBRARIES | sys.stdlib_module_names
    return formatted(script, sort=may_be_sorted)


def text_of(statements: Sequence[Statement]) -> str:
    """The statements as text, one below the other."""
    return "\n".join(statement.text for statement in statements)


def text_of_imports(imports: Sequence[Statement]) -> str:
    """The script's imports as text, each one once, with argparse, which its function parse_args needs."""
    lines = [statement.text for statement in imports]
    lines.append("import argparse")
    each_line_once = dict.fromkeys(lines)
    return "\n".join(each_line_once)


def main_body(body: list[Statement], parameters: list[str]) -> str:
    """The text of the script's main, from the statements of the notebook's cells.

    A parameter of the notebook, such as ``lr``, is a flag of the script, and main reads it as ``args.lr``. If a
    statement also assigns the name, or if its text cannot be changed safely, main begins with ``lr = args.lr`` instead.
    """
    read_from_args = parameters_read_from_args(body, parameters)
    needed_at_top = names_read_by(body) - read_from_args
    lines = [f"{name} = args.{name}" for name in parameters if name in needed_at_top]
    if lines:
        lines.append("")
    cell = ""
    for statement in body:
        starts_paragraph = statement.above.strip(" ").startswith("\n") or statement.where != cell
        if starts_paragraph and lines and lines[-1]:
            lines.append("")
        cell = statement.where
        code = with_arguments(statement.code, read_from_args) or statement.code
        lines.append(replace(statement, code=code).text)
    return "\n".join(lines).strip("\n")


def parameters_read_from_args(body: list[Statement], parameters: list[str]) -> set[str]:
    """The parameters that main's text can read as ``args.NAME``, because no statement in it gives them a new value."""
    assigned_names = names_bound_by(body)
    for statement in body:
        assigned_names |= statement.local_names
    if "args" in assigned_names:  # then it is another thing in main
        return set()
    read_from_args = set()
    for name in set(parameters) - assigned_names:
        codes_with_argument = [with_arguments(statement.code, {name}) for statement in body]
        if None not in codes_with_argument:
            read_from_args.add(name)
    return read_from_args


def with_arguments(code: str, names: set[str]) -> str | None:
    """The code with ``args.NAME`` for each of the names; None if that code would mean something else.

    It is replaced in the text, and not in the syntax tree, because the reader's comments and line breaks have to stay.
    """
    tree = ast.parse(code)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in names]
    # From the end to the beginning, so that a replacement does not move those that are still to come.
    nodes.sort(key=position, reverse=True)
    lines = [line.encode() for line in code.split("\n")]  # ast's columns count bytes
    for node in nodes:
        line = lines[node.lineno - 1]
        before_name = line[: node.col_offset]
        from_name_on = line[node.col_offset :]
        lines[node.lineno - 1] = before_name + b"args." + from_name_on
    # Some texts do not take the replacement: f"{lr=}" prints its own text, and before Python 3.12 some positions inside
    # f-strings are wrong. So the new code, with the old names put back, has to be the old code.
    try:
        new_code = b"\n".join(lines).decode()
        new_tree = ast.parse(new_code)
    except (SyntaxError, UnicodeDecodeError):
        return None
    tree_with_old_names = ArgumentsToNames().visit(new_tree)
    if ast.dump(tree_with_old_names) != ast.dump(tree):
        return None
    return new_code


def position(node: ast.expr) -> tuple[int, int]:
    """Where a node begins: its line, and its column in bytes."""
    return node.lineno, node.col_offset


class ArgumentsToNames(ast.NodeTransformer):
    """Puts the name NAME in the place of each ``args.NAME`` in a syntax tree."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """What takes the place of an attribute, such as args.lr; ast calls it for each one in the tree."""
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "args":
            return ast.Name(node.attr, node.ctx)
        return node


# ---- The script's text


def docstring(title: str, purpose: str, commands: Sequence[str], tested_with: Sequence[str] | None) -> str:
    """The script's docstring: what it is, the ``commands`` that start it, and where it was tested.

    For the versions of PyTorch in ``tested_with`` there is one line, and if there are none a line that says so, which
    keeps the numbers of the lines below. For None, in the script of a notebook that is no chapter, there is no such
    line.
    """
    if not title.endswith((".", "?", "!")):
        title += "."
    what = textwrap.fill(f"{title} {purpose}".strip(), WIDTH - 4)  # The first line begins with the quotation marks.
    lines = [what, "", *commands]
    if tested_with is not None:
        tested = "Not tested again since its last change."
        if tested_with:
            tested = f"Tested on CPUs with PyTorch {listed(tested_with)}."
        lines += ["", tested]
    text = "\n".join(lines) + "\n"
    text = text.replace('"""', "'''").replace("%", "%%")  # argparse shows it, and uses the % operator
    literal = f'"""{text}"""'
    if "\\" in text:
        return f"r{literal}"
    return literal


def how_to_start(name: str, parameters: Sequence[str], own_commands: Sequence[str], saves_at_signal: bool) -> list[str]:
    """The lines of the docstring that say how to start the script NAME.py.

    - ``own_commands``: commands from the notebook. If there are none, the usual commands of torchrun are used.
    - ``parameters`` of the script: if ``backend`` is among them, the usual commands for GPUs pass NCCL explicitly, so
      that a missing GPU is an error.
    - ``saves_at_signal``: whether the script saves a checkpoint when a signal stops it. If so, and if it has the
      parameters ``checkpoint_dir`` and ``resume``, one more command makes torchrun wait for the save.
    """
    file = as_argument(f"{name}.py")
    lines = list(own_commands)
    if not lines:
        lines = usual_commands(file, takes_backend="backend" in parameters)
    if saves_at_signal and {"checkpoint_dir", "resume"} <= set(parameters):
        lines += stopping_command(file, name)
    return lines


def usual_commands(file: str, takes_backend: bool) -> list[str]:
    """How to start a script on one machine and on two.

    On two machines the number of GPUs is written down: ``gpu`` would start fewer ranks on a machine that has lost one.
    """
    without_gpus = "--nproc-per-node=2"
    script = file
    if takes_backend:
        without_gpus += " --backend gloo"
        script += " --backend nccl"
    on_two_machines = "torchrun --nnodes=2 --node-rank=0 --master-addr=HOST --nproc-per-node=8"
    return [
        f"On all GPUs of a machine (without GPUs: {without_gpus}):",
        f"torchrun --nproc-per-node=gpu {script}",
        "On two machines with 8 GPUs each (on the second: --node-rank=1):",
        f"{on_two_machines} \\",
        f"    {script}",
    ]


def stopping_command(file: str, name: str) -> list[str]:
    """How to start a script that saves when a signal stops it."""
    return [
        "By itself torchrun ends at SIGUSR1, and 30 seconds after SIGTERM it kills a rank",
        f"that still saves. With 300 seconds for the save (for Slurm: {name}.sbatch):",
        "torchrun --shutdown-timeout=300 --signals-to-handle=SIGTERM,SIGINT,SIGUSR1 \\",
        f"    --nproc-per-node=gpu {file} --checkpoint-dir runs --resume",
    ]


def listed(words: Sequence[str]) -> str:
    """The words as a list in a sentence: ``a, b and c``."""
    *first, last = words
    if not first:
        return last
    return f"{', '.join(first)} and {last}"


def indented(code: str) -> str:
    """The code moved four spaces to the right, except for lines that begin inside a string."""
    inside = in_strings(code)
    lines = code.split("\n")
    for number, line in enumerate(lines, 1):
        if line and number not in inside:
            lines[number - 1] = f"    {line}"
    return "\n".join(lines)


def with_short_lines(code: str) -> str:
    """Move a comment at the end of a line that is too long above the line, and leave out comments for formatters.

    These are comments such as ``# fmt: skip``. ``code`` is some definitions of a script.
    """
    lines = code.split("\n")
    lines_in_strings = in_strings(code)
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type != tokenize.COMMENT:
            continue
        line_number, column = token.start
        line = lines[line_number - 1]
        before_comment = line[:column].rstrip()
        is_for_formatters = re.match(r"# *(fmt|isort) *:", token.string)  # "# fmt: off"
        if is_for_formatters:
            lines[line_number - 1] = before_comment
        elif before_comment and len(line) > WIDTH and line_number not in lines_in_strings:
            indent = before_comment[: len(before_comment) - len(before_comment.lstrip())]
            lines[line_number - 1] = f"{indent}{token.string}\n{before_comment}"
    return "\n".join(lines)


def formatted(script: str, sort: bool) -> str:
    """The script as ruff formats it, with its imports sorted if ``sort``."""
    commands = []
    if sort:
        commands.append(["check", "--fix", "--exit-zero", "--quiet", "--select=I"])  # I: the rules of imports
    commands.append(["format"])
    for command in commands:
        # The last argument, a dash, is standard input. Without --isolated, a pyproject.toml nearby would decide.
        ruff = [find_ruff_bin(), *command, "--isolated", f"--line-length={WIDTH}", "--target-version=py311", "-"]
        done = subprocess.run(ruff, input=script, capture_output=True, check=True, text=True, encoding="utf-8")
        script = done.stdout
    return script
