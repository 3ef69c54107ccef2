"""A chapter as one script for torchrun: ``script_from_notebook``, and ``jupyter nbconvert --to torchrun``.

Text in, text out. The notebook's code is never executed. Its statements keep their own comments; what they use of the
run-time modules is copied into the script.
"""

import ast
import copy
import io
import re
import shlex
import subprocess
import textwrap
import tokenize
from dataclasses import replace
from types import SimpleNamespace

from nbconvert.exporters import Exporter
from ruff import find_ruff_bin
from traitlets import Bool

from helpers.export.distributed import fixed_ranks, launchers, worlds
from helpers.export.flags import parse_args_text, read_flags
from helpers.export.inline import in_reading_order, inlined
from helpers.export.names import (
    BUILTINS,
    OWN,
    bound_anywhere,
    edited,
    global_names,
    impossible_lookups,
    looks_up_names,
    made_room,
    meaning,
    missing_names,
    renamed,
    with_arguments,
)
from helpers.export.notebook import (
    ExportError,
    plain_refusal,
    read_notebook,
    script_name,
    sort_cells,
    title_and_purpose,
)
from helpers.export.parts import PLAIN, has_effect, is_library, root_of, sort_statements
from helpers.export.source import IMPORT, SIMPLE, Statement, check_syntax, each_import

WIDTH = 88
PRAGMA = re.compile(r"# *(noqa|type|pragma|ruff|pylint|mypy)\b")  # such a comment must stay in its line


def script_from_notebook(notebook, name, allow_single=False):
    """The text of the torchrun script of a notebook node. ``name`` is the script's file name without .py.

    Raises ExportError when the notebook is not in Python, or a cell cannot be a part of a script.
    """
    return script_and_notes(notebook, name, allow_single)[0]


def script_and_notes(notebook, name, allow_single=False):
    """(the script's text, notes on what is left out, changed or moved).

    ``allow_single`` exports a notebook whose ranks would train one model each. Raises ExportError with all problems.
    """
    cells, flags, problems = sort_cells(notebook, name), {}, []
    try:
        flags = read_flags(cells.parameters)
    except ExportError as error:
        problems += error.problems
    parts = sort_statements(cells, flags)
    if not any(has_effect(statement.node) for statement in parts.body) and not parts.problems:
        raise ExportError(
            *problems, f"{name} has no statement that a script could run.\nTag the cells of the script `export`."
        )
    problems += [*fixed_ranks([*cells.parameters, *cells.exported]), *launchers(cells.exported), *parts.problems]
    if not allow_single and not problems:
        problems += worlds(cells.exported, name)
    problems += impossible_lookups(parts.body)

    if problems:
        raise ExportError(*problems)
    return written(parts, cells, *title_and_purpose(notebook, name), name)


def written(parts, cells, title, purpose, name):
    """(the script's text, its notes), made from the sorted parts. Raises ExportError for names that nothing defines."""
    drop_unread_imports(parts, cells)
    starts = any(re.search(r"\b(start|init)_process_group\(", statement.code) for statement in parts.statements())
    if starts:
        parts.wanted.setdefault(("process_group", "stop_process_group"), "the script itself")
    used = {read for statement in parts.statements() for read in statement.reads} | {"stop_process_group"}
    copied_imports, copied = inlined([key for key in parts.wanted if key[1] in used])
    dynamic = any(looks_up_names(statement.node) for statement in cells.exported if statement.node)
    declared, in_main = global_names(parts, dynamic)

    # Where a notebook's name is also a helper's, the helper is renamed.
    theirs = {name: meaning(one, name) for one in parts.above() for name in one.binds} | dict.fromkeys(declared)
    ours = OWN | {name: meaning(one, name) for one in [*copied_imports, *copied] for name in one.binds}
    wanted = {name for _, name in parts.wanted if theirs.get(name) is None}
    conflicts = [name for name in ours if name in theirs and theirs[name] != ours[name]]
    in_body = {name for statement in parts.body if statement.node for name in bound_anywhere(statement.node)}
    conflicts += ["args"] if "args" in {*theirs, *in_body, *parts.flags} else []
    own = made_room(conflicts, {*theirs, *ours, *in_main, *in_body, *BUILTINS})
    copied_imports, copied = ([renamed(one, own) for one in found] for found in (copied_imports, copied))
    own = {name: own.get(name, name) for name in [*ours, "args", "stop_process_group"]}

    problems = list(missing_names(parts, {*theirs, *wanted}, in_main, cells))
    for name in declared.keys() & BUILTINS & {read for one in copied for read in one.reads}:
        problems.append(f"{name} is a built-in that the script needs.\nGive the notebook's {name} another name.")
    if problems:
        raise ExportError(*dict.fromkeys(problems))
    if declared:
        reasons = ", ".join(f"{name} ({why})" for name, why in declared.items())
        parts.notes.append(f"main declares global: {reasons}.")

    end_safely(parts, starts, own["stop_process_group"])
    definitions, plumbing = in_reading_order(parts.constants, copied, parts.definitions)
    about = docstring(title, purpose, name)
    usage = "usage=__doc__.replace('%', '%%')" if "%" in about else "usage=__doc__"  # argparse uses the % operator
    sections = [
        about,
        *imports_text(parts.top, copied_imports, own["argparse"]),
        definitions_text(definitions),
        main_text(parts, declared, own),
        parse_args_text(parts.flags, own["parse_args"], usage).replace("argparse.", f"{own['argparse']}."),
        definitions_text(plumbing),
        f'if __name__ == "__main__":\n    {own["main"]}({own["parse_args"]}())',
    ]
    script = tidy("\n\n\n".join(section for section in sections if section) + "\n", name, in_any_order(parts.top))
    try:
        check_syntax(script)
    except SyntaxError as error:  # such as a `global` that is valid in a cell and not in a function
        raise ExportError(
            f"{name}: cells become the function main, where this is a syntax error: {error.msg}.\nChange {error.text}"
        ) from None
    return script, [*cells.notes, *parts.notes]


# ---- What changes on the way


def drop_unread_imports(parts, cells):
    """Drop imports that only left-out code reads. An import that nothing reads stays: it may have an effect."""
    read = {name for statement in parts.statements() for name in statement.reads}
    unread = (cells.read_elsewhere | parts.read_elsewhere) - read
    for place, statement in enumerate(parts.top):
        if isinstance(statement.node, IMPORT) and statement.binds & unread:
            node = copy.copy(statement.node)
            node.names = [one.node.names[0] for one in each_import(statement) if not one.binds & unread]
            parts.top[place] = replace(statement, code=ast.unparse(node), node=node) if node.names else None
    parts.top = [statement for statement in parts.top if statement]


def end_safely(parts, starts, stop):
    """Replace ``dist.destroy_process_group()``, which can hang after DDP, by a call of ``stop``, or add that call.

    A function that main does not call is left alone: it may run in a process that has no function ``stop``.
    """
    reached, todo = [], [*parts.body]
    by_name = {statement.node.name: statement for statement in parts.definitions if statement.node}
    while todo:
        statement = todo.pop()
        reached.append(statement)
        for node in ast.walk(statement.node) if statement.node else []:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in by_name:
                todo.append(by_name.pop(node.func.id))
    for statements in (parts.definitions, parts.body):
        for place, statement in enumerate(statements):
            if "destroy_process_group" in statement.code and any(statement is other for other in reached):
                ends = [node for node in ast.walk(ast.parse(statement.code)) if is_end(node)]
                statements[place] = replace(
                    statement, code=edited(statement.code, [(end, f"{stop}()") for end in ends])
                )
    if starts and not any(f"{stop}()" in statement.code for statement in [*parts.definitions, *parts.body]):
        parts.body.append(replace(parts.body[-1], node=ast.Pass(), code=f"{stop}()", above="", comment=""))


def is_end(node):
    """Whether a node is a call of destroy_process_group() without arguments, in one line."""
    return (
        isinstance(node, ast.Call)
        and node.lineno == node.end_lineno
        and bool(re.fullmatch(r"(\w+\.)*destroy_process_group\(\)", ast.unparse(node)))
    )


# ---- The script's text


def docstring(title, purpose, name):
    """The script's docstring: what it is, and how to run it."""
    file = shlex.quote(f"{name}.py")
    title += "" if title.endswith((".", "?", "!")) else "."
    text = textwrap.fill(f"{title} {purpose}".strip(), WIDTH - 4).replace('"""', "'''")
    nodes = f"torchrun --nnodes=2 --node-rank=0 --master-addr=HOST --nproc-per-node=gpu {file}"
    if len(nodes) > WIDTH:
        nodes = nodes.replace(f" {file}", f" \\\n    {file}")
    text += f"""

One node, all GPUs (without GPUs, a number), and two (--node-rank=1 on the second):
torchrun --nproc-per-node=gpu {file}
{nodes}
"""
    return ('r"""' if "\\" in text else '"""') + text + '"""'


def imports_text(top, copied, argparse):
    """The texts of the imports, and of settings among them: the standard library first, then the others in order."""
    there = {(name, meaning(statement, name)) for statement in top for name in statement.binds}
    added = [one for one in copied if not {(name, meaning(one, name)) for name in one.binds} <= there]
    if ("argparse", "argparse") not in there:
        code = "import argparse" + (f" as {argparse}" if argparse != "argparse" else "")
        added.append(Statement(ast.parse(code).body[0], code))
    standard = [one for one in [*top, *added] if isinstance(one.node, IMPORT) and not is_library_statement(one)]
    others = [one for one in top if one not in standard]
    others += [one for one in added if one not in standard]
    texts = dict.fromkeys(one.text for one in sorted(standard, key=lambda one: one.code))
    return ["\n".join(texts) + "\n\n" + "\n".join(dict.fromkeys(one.text for one in others))]


def is_library_statement(statement):
    return any(is_library(one.node) for one in each_import(statement))


def in_any_order(top):
    """Whether the imports may be sorted: all are from the standard library or in PLAIN."""
    return all(isinstance(one.node, IMPORT) for one in top) and all(
        root_of(one.node) in PLAIN for statement in top for one in each_import(statement) if is_library(one.node)
    )


def definitions_text(statements):
    """The text of the definitions at the script's top level."""
    text, before = "", None
    for statement in statements:
        constants = before and isinstance(before.node, SIMPLE) and isinstance(statement.node, SIMPLE)
        text += ("\n" if constants else "\n\n\n") + statement.text
        before = statement
    return text.strip("\n")


def main_text(parts, declared, own):
    """The text of main: its statements cell by cell, with args.NAME for a parameter where that means the same."""
    trees = [statement.node for statement in parts.body if statement.node]
    rebound = {name for tree in trees for name in bound_anywhere(tree)}
    passed = parts.flags.keys() - declared.keys() - rebound
    read = {name for statement in parts.statements() for name in statement.reads}
    lines = []
    for statement in parts.body:
        code = without_annotation(statement, declared)
        names = passed & set(statement.reads)
        for name in sorted(names):
            if (new := with_arguments(code, {name}, own["args"])) is None:
                passed.discard(name)
            else:
                code = new
    for statement in parts.body:
        code = without_annotation(statement, declared)
        code = with_arguments(code, passed & set(statement.reads), own["args"]) or code
        if statement.above.strip(" ").startswith("\n") and lines and lines[-1]:
            lines.append("")
        lines += [replace(statement, code=code).text]
    bound = [f"{name} = {own['args']}.{name}" for name in parts.flags if name in declared or name in read - passed]
    named = textwrap.wrap(", ".join(declared), WIDTH - 11)
    head = [*(f"global {line.rstrip(',')}" for line in named), *bound]
    return f"def {own['main']}({own['args']}):\n" + indented("\n".join([*head, "" if head else "", *lines]).strip("\n"))


def without_annotation(statement, declared):
    """The statement's code without an annotation, which Python forbids for a name that main declares global."""
    node = statement.node
    if not isinstance(node, ast.AnnAssign) or not statement.binds & declared.keys():
        return statement.code
    node = ast.parse(statement.code).body[0]
    target, annotation = node.target, node.annotation
    if node.value is None or annotation.end_lineno > 1:
        return statement.code
    gap = SimpleNamespace(lineno=1, col_offset=target.end_col_offset, end_col_offset=annotation.end_col_offset)
    return edited(statement.code, [(gap, "")])


def indented(code):
    """The code moved four spaces to the right, except for lines that begin inside a string."""
    inside = set()
    for node in outer_strings(ast.parse(code)):
        inside.update(range(node.lineno + 1, node.end_lineno + 1))
    lines = enumerate(code.split("\n"), 1)
    return "\n".join(line if number in inside or not line else f"    {line}" for number, line in lines)


def outer_strings(tree):
    """Yields the string nodes of a tree, but not those inside f-strings, whose lines Python 3.11 gets wrong."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)):
            yield node
        else:
            yield from outer_strings(node)


def with_short_lines(script):
    """The script without formatters' comments; a comment at the end of a line that is too long goes above the line."""
    lines, depth = script.split("\n"), 0
    for token in tokenize.generate_tokens(io.StringIO(script).readline):
        row, column = token.start[0] - 1, token.start[1]
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
        elif token.type == tokenize.COMMENT:
            before = lines[row][:column].rstrip()
            if re.match(r"# *(fmt|isort) *:", token.string):
                lines[row] = before or None
            elif before and len(lines[row]) > WIDTH and not depth and not PRAGMA.match(token.string):
                indent = before[: len(before) - len(before.lstrip())]
                lines[row] = f"{indent}{token.string}\n{before}"
    return "\n".join(line for line in lines if line is not None)


def tidy(script, name, sort):
    """The script formatted by ruff, its imports sorted if ``sort`` is true. Raises ExportError where ruff fails."""
    script = with_short_lines(script)
    style = ["--isolated", f"--line-length={WIDTH}", "--target-version=py311", "-"]
    commands = [["check", "--fix", "--exit-zero", "--quiet", "--select=I"], ["format"]]
    for command in commands if sort else commands[1:]:
        ruff = [find_ruff_bin(), *command, *style]
        done = subprocess.run(ruff, input=script, capture_output=True, text=True, encoding="utf-8")
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise ExportError(f"{name}: ruff could not format the script: {reason}\nInstall ruff, or report the cell.")
        script = done.stdout
    return script


class TorchrunExporter(Exporter):
    """``jupyter nbconvert --to torchrun``: a notebook as a script for torchrun. It executes no cell."""

    export_from_notebook = "Script for torchrun"
    file_extension = ".py"
    output_mimetype = "text/x-python"
    allow_single = Bool(False, help="Export a notebook whose ranks would train a model each.").tag(config=True)

    @plain_refusal
    def from_filename(self, filename, resources=None, **kwargs):
        read_notebook(filename)  # which refuses old formats; nbconvert would upgrade them silently
        return super().from_filename(filename, resources, **kwargs)

    @plain_refusal
    def from_notebook_node(self, nb, resources=None, **kwargs):
        resources = self._init_resources(resources)  # and no preprocessors: one of them executes notebooks
        name = script_name(nb, resources["metadata"].get("name") or "notebook")
        resources["unique_key"] = name  # which nbconvert takes for the file's name
        script, notes = script_and_notes(nb, name, self.allow_single)
        for note in notes:
            self.log.warning(note)
        return script, resources
