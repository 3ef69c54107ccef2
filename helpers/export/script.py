"""A chapter as one script for torchrun: ``script_from_notebook``, and ``jupyter nbconvert --to torchrun``.

Text in, text out. The notebook's code is never executed. Its statements keep their own formatting and comments;
what they use of the run-time modules is copied into the script.
"""

import ast
import collections
import re
import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field, replace

from nbconvert.exporters import Exporter

from helpers.export.flags import read_flags
from helpers.export.inline import TOUCHING, belongs, in_reading_order, inlined, runtime_module, runtime_module_of
from helpers.export.names import check_hard_coded, check_names
from helpers.export.notebook import ExportError, first_line, left_out, read_notebook, sort_cells, title_and_promise
from helpers.export.source import DEFINITION, IMPORT, SIMPLE, Statement, check_syntax, each_import


@dataclass
class Parts:
    """The script's parts, as statements."""

    imports: list = field(default_factory=list)
    constants: list = field(default_factory=list)
    definitions: list = field(default_factory=list)
    body: list = field(default_factory=list)
    dropped: dict = field(default_factory=dict)  # names that only statements bind that are left out: {name: where}
    wanted: dict = field(default_factory=dict)  # names of run-time modules: {(module, name): where}


# ---- From statements to the script's parts


def sort_statements(cells, flags):
    """The statements by where they go. Raises ExportError for one that is of the notebook and of the script."""
    parts, pyplot = Parts(), {"plt", "matplotlib.pyplot"}
    counts = collections.Counter(name for statement in cells.exported for name in statement.binds)
    steady = set()  # what a constant may be made of: what is imported, and other constants
    last = None  # the list that the cell's last statement went to
    for statement in [*(found for found in cells.parameters if isinstance(found.node, IMPORT)), *cells.exported]:
        node = statement.node
        if node is None:
            at_end = last is parts.definitions and last and last[-1].where == statement.where
            (parts.definitions if at_end else parts.body).append(statement)
            continue
        last = parts.body
        if isinstance(node, IMPORT):
            sort_import(statement, parts)
            steady |= statement.binds
            pyplot |= {alias.asname for alias in node.names if alias.name in ("matplotlib.pyplot", "pyplot")}
            continue
        only_notebook = notebook_use(statement, cells.kernel_only, pyplot)
        constant = node.targets[0].id if is_constant(node, steady) else None
        if only_notebook and isinstance(node, SIMPLE):
            parts.body.append(without(statement))
            parts.dropped.update(dict.fromkeys(statement.binds, statement.where))
        elif only_notebook:
            raise ExportError(
                f"{statement.where}: `{first_line(statement.written or statement.code)}` uses {only_notebook}, "
                "which only a notebook has.\nMove that to a cell that is not exported."
            )
        elif isinstance(node, DEFINITION):
            last = parts.definitions
            last.append(statement)
        elif constant and counts[constant] == 1 and constant not in flags:
            parts.constants.append(statement)
            steady.add(constant)
        elif isinstance(node, ast.Expr) and not any(isinstance(part, ast.Call) for part in ast.walk(node)):
            parts.body.append(without(statement))  # a notebook would show the value
        else:
            parts.body.append(statement)
    return parts


def sort_import(statement, parts):
    """Put an import where it belongs: into the script, as names to inline, or out."""
    node, kept = statement.node, []
    if getattr(node, "level", 0) or node.names[0].name == "*":
        raise ExportError(f"{statement.where}: `{statement.code}` hides what it imports.\nName module and names.")
    for one in each_import(statement):
        place, name = belongs(one.node), one.node.names[0]
        if place == "script":
            kept.append(one)
        elif place == "notebook":
            parts.body.append(without(one))
        elif place == "refused":
            raise ExportError(
                f"{statement.where}: `{statement.code}` takes a whole module.\n"
                "Name what you use, so that it can be copied: from helpers.runtime.data import digits"
            )
        else:
            module = runtime_module_of(one.node)
            if name.name not in runtime_module(module) or name.asname not in (None, name.name):
                wrong = "renames it" if name.asname else "but there is no such name"
                raise ExportError(
                    f"{statement.where}: `{one.code}`, {wrong}.\nImport a name of helpers/runtime/{module}.py as it is."
                )
            parts.wanted[module, name.name] = statement.where
    parts.imports += [statement] if len(kept) == len(node.names) else kept


def notebook_use(statement, kernel_only, pyplot):
    """What of a notebook's own a statement uses, as words for a message, or None."""
    for node in ast.walk(statement.node):
        if isinstance(node, IMPORT) and any(belongs(one.node) != "script" for one in each_import(Statement(node, ""))):
            return f"`{ast.unparse(node)}` in a block"
        if isinstance(node, ast.Attribute) and node.attr == "show" and ast.unparse(node.value) in pyplot:
            return f"{ast.unparse(node)}()"
    used = sorted(kernel_only & set(statement.reads))
    if used:
        return "a magic" if used == ["get_ipython"] and statement.written else f"{used[0]}()"
    return None


def without(statement):
    """The comment that stands for a statement which is left out; the comment right above it goes too."""
    lines = (statement.written or statement.code).split("\n")
    text = first_line(lines[0]) + (" …" if len(lines) > 1 else "")
    above = TOUCHING.sub("", statement.above) and TOUCHING.sub("", statement.above) + "\n"
    return left_out(text, statement.where, statement.heading, above)


def is_constant(node, steady):
    """Whether a statement is ``NAME = value``, the value made of literals and of the names in ``steady``."""
    if not isinstance(node, ast.Assign) or len(node.targets) > 1 or not isinstance(node.targets[0], ast.Name):
        return False
    allowed = ast.Constant | ast.Tuple | ast.List | ast.Set | ast.Dict | ast.BinOp | ast.UnaryOp | ast.Attribute
    allowed |= ast.operator | ast.unaryop | ast.expr_context
    return node.targets[0].id.isupper() and all(
        isinstance(part, allowed) or (isinstance(part, ast.Name) and part.id in steady) for part in ast.walk(node.value)
    )


def leave_out_idle(parts):
    """Leave out what only names a value that nothing reads (the notebook showed it); return all names that are read."""
    while True:
        reads = {read for statement in [*parts.constants, *parts.definitions, *parts.body] for read in statement.reads}
        idle = [statement for statement in parts.body if is_idle(statement.node, reads)]
        if not idle:
            return reads
        parts.body = [without(statement) if statement in idle else statement for statement in parts.body]


def is_idle(node, reads):
    """Whether a statement binds names that are not read, to a value that calls nothing."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or any(isinstance(part, ast.Call) for part in ast.walk(node)):
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return all(isinstance(target, ast.Name) and target.id not in reads for target in targets)


def safe_end(statement):
    """The statement with ``dist.destroy_process_group()``, which can hang behind DDP, as stop_process_group()."""
    if "destroy_process_group" not in statement.code:
        return statement
    lines = statement.code.encode().split(b"\n")
    for call in reversed([node for node in ast.walk(ast.parse(statement.code)) if isinstance(node, ast.Call)]):
        if re.fullmatch(r"(\w+\.)*destroy_process_group\(\)", ast.unparse(call)) and call.lineno == call.end_lineno:
            line = lines[call.lineno - 1]
            lines[call.lineno - 1] = line[: call.col_offset] + b"stop_process_group()" + line[call.end_col_offset :]
    return replace(statement, code=b"\n".join(lines).decode())


# ---- The script


def script_from_notebook(notebook, name):
    """The text of the torchrun script that a notebook node makes; ``name`` is the file's, without its extension.

    Raises ExportError when the notebook is not in Python, or a cell cannot be a part of a script.
    """
    cells = sort_cells(notebook, name)
    flags = read_flags(cells.parameters)
    check_hard_coded([*cells.parameters, *cells.exported])
    cells.exported = [safe_end(statement) for statement in cells.exported]
    parts = sort_statements(cells, flags)
    if all(statement.node is None for statement in parts.body):
        raise ExportError(f"{name} has no statement that a script could run.\nTag the cells of the script `export`.")
    reads = leave_out_idle(parts)
    code = "\n".join(statement.code for statement in [*parts.definitions, *parts.body])
    if re.search(r"\b(start|init)_process_group\(", code) and "stop_process_group" not in reads:
        parts.body.append(replace(parts.body[-1], node=ast.Pass(), code="stop_process_group()", above="", comment=""))
        reads.add("stop_process_group")
    own = {("process_group", name): "the script itself" for name in ("stop_process_group",)}
    parts.wanted = {**own, **parts.wanted}
    inlined_imports, inlined_code = inlined([key for key in parts.wanted if key[1] in reads])
    check_names(parts, flags, inlined_imports, inlined_code, cells)

    title, promise = title_and_promise(notebook, name)
    imports = [statement.text for statement in [*inlined_imports, *parts.imports]]
    imports.append("import argparse")
    sections = [
        docstring(title, promise, name),
        "\n".join(imports),
        definitions_text(in_reading_order(parts.constants, inlined_code, parts.definitions)),
        parse_args_text(title, flags),
        main_text(parts.body, [flag for flag in flags if flag in reads]),
        'if __name__ == "__main__":\n    main(parse_args())',
    ]
    script = tidy("\n\n\n".join(section for section in sections if section) + "\n", name)
    try:
        check_syntax(script)
    except SyntaxError as error:  # such as a `global` that is right in a cell and wrong in a function
        raise ExportError(f"{name}: in a function, this is a syntax error: {error.msg}.\nSee {error.text}") from None
    return script


def docstring(title, promise, name):
    """The script's docstring: what it is, and how to run it."""
    file = shlex.quote(f"{name}.py")
    title += "" if title.endswith((".", "?", "!")) else "."
    text = "\n\n".join(textwrap.fill(part, 110) for part in (title, promise) if part)
    text = text.replace("\\", "\\\\").replace('"""', "'''")
    return f'''"""{text}

One GPU, or a CPU:
    torchrun --nproc-per-node=1 {file}
All GPUs of a node (on a CPU, give a number):
    torchrun --nproc-per-node=gpu {file}
Two nodes, the same line on both but for --node-rank, 0 on HOST and 1 on the other:
    torchrun --nnodes=2 --node-rank=0 --master-addr=HOST --nproc-per-node=gpu {file}
"""'''


def definitions_text(statements):
    """What the script's top level defines, with the headings as comments."""
    text, before = "", Statement(None, "")
    for statement in statements:
        if statement.heading and statement.heading != before.heading:
            text += f"\n\n\n{section_comment(statement.heading)}"
        constants = isinstance(before.node, SIMPLE) and isinstance(statement.node, SIMPLE)
        text += ("\n" if constants else "\n\n\n") + statement.text
        before = statement
    return text.strip("\n")


def section_comment(heading):
    return textwrap.fill(heading, 110, initial_indent="# ", subsequent_indent="# ")


def parse_args_text(title, flags):
    """The function that reads the flags."""
    lines = ["parser = argparse.ArgumentParser(description=__doc__, formatter_class=Manual)"]
    lines += [call for _, call in flags.values()]
    manual = "class Manual(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):\n"
    manual += '    """--help: the text above as it stands, and every flag with its default."""\n\n\n'
    return manual + "\n    ".join(["def parse_args():", *lines, "return parser.parse_args()"])


def main_text(body, parameters):
    """The main function: the parameters it uses, then the statements cell by cell."""
    lines = [f"{name} = args.{name}" for name in parameters]
    heading = where = None
    for statement in body:
        if statement.heading and statement.heading != heading:
            lines += ["", section_comment(statement.heading)]
            if statement.above.strip():
                lines.append("")  # two comments
        elif statement.where != where:
            lines.append("")
        heading, where = statement.heading, statement.where
        blank = [""] if statement.above.strip(" ").startswith("\n") and lines[-1] else []
        lines += [*blank, statement.text]
    return "def main(args):\n" + indented("\n".join(lines).strip("\n"))


def indented(code):
    """The code four spaces to the right, but for what stands inside of strings."""
    inside = set()
    for node in outer_strings(ast.parse(code)):
        inside.update(range(node.lineno + 1, node.end_lineno + 1))
    lines = enumerate(code.split("\n"), 1)
    return "\n".join(line if number in inside or not line else f"    {line}" for number, line in lines)


def outer_strings(tree):
    """The string nodes of a tree, without those inside f-strings (whose line numbers Python 3.11 gets wrong)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)):
            yield node
        else:
            yield from outer_strings(node)


def tidy(script, name):
    """The script with its imports merged and sorted, the unused ones removed, and formatted, all by ruff."""
    style = ["--isolated", "--line-length=120", "--target-version=py311", "-"]
    for command in (["check", "--fix", "--exit-zero", "--quiet", "--select=I,F401"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, *style]
        done = subprocess.run(ruff, input=script, capture_output=True, text=True, encoding="utf-8")
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise ExportError(f"{name}: ruff could not format the script: {reason}\nInstall ruff, or report the cell.")
        script = done.stdout
    return script


class TorchrunExporter(Exporter):
    """``jupyter nbconvert --to torchrun``: a notebook as a script for torchrun. No cell is ever executed."""

    export_from_notebook = "Script for torchrun"
    file_extension = ".py"
    output_mimetype = "text/x-python"

    def from_filename(self, filename, resources=None, **kwargs):
        read_notebook(filename)  # nbconvert alone would upgrade other formats without a word
        return super().from_filename(filename, resources, **kwargs)

    def from_notebook_node(self, nb, resources=None, **kwargs):
        resources = self._init_resources(resources)  # no preprocessor: one of them executes notebooks
        return script_from_notebook(nb, resources["metadata"].get("name") or "notebook"), resources
