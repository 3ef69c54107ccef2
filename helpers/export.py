"""A chapter as one script for torchrun: ``script_from_notebook``, and ``jupyter nbconvert --to torchrun``.

Text in, text out. The notebook's code is read with ast and symtable and is never executed; statements keep
their own formatting and comments. What they use of the run-time modules is copied into the script.
"""

import ast
import builtins
import collections
import functools
import json
import re
import shlex
import subprocess
import symtable
import sys
import textwrap
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from markdown_it import MarkdownIt
from nbconvert.exporters import Exporter
from nbconvert.utils.exceptions import ConversionException

RUNTIME = ("process_group", "data", "models")  # what a script may use of helpers; each imports only from those before
NOTEBOOK_PACKAGES = ("helpers", "IPython", "ipywidgets")  # all else of these lives in a notebook only
BODY_MAGICS = ("time", "capture", "prun")  # cell magics that run the cell's body as it stands
RANK_NAMES = ("rank", "local_rank", "world_size", "num_replicas")
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
BUILTINS = {*dir(builtins), "__name__", "__file__", "__doc__"}
ANONYMOUS = ("lambda", "genexpr", "listcomp", "setcomp", "dictcomp")  # symtable's names of scopes without one
OWN_NAMES = {  # what every script binds, and to what: a key of import_key, or itself
    "argparse": ("argparse", None),
    "record": ("torch.distributed.elastic.multiprocessing.errors", "record"),
    "main": "main",
    "parse_args": "parse_args",
}
TOUCHING = re.compile(r"(?:^#.*\n?)*\Z", re.MULTILINE)  # the comment right above a statement
IMPORT = ast.Import | ast.ImportFrom
DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
SIMPLE = ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Assert | ast.Delete


class ExportError(ConversionException):
    """A notebook that cannot become a script. The message says where, why and what to change."""


@dataclass(frozen=True)
class Statement:
    """One top-level statement as it was written, and where. Without a node: comments at the end of a cell."""

    node: ast.stmt | None
    code: str
    above: str = ""  # the comment and blank lines before it
    comment: str = ""  # the comment behind it
    where: str = ""
    heading: str = ""
    written: str = ""  # what the notebook has, where a magic was translated

    @property
    def text(self):
        behind = self.comment and f"  {self.comment}"
        return f"{self.above}\n{self.code}{behind}".strip("\n")


@dataclass
class Cells:
    """The notebook's code cells, as statements and names."""

    parameters: list = field(default_factory=list)
    exported: list = field(default_factory=list)
    kernel_only: set = field(default_factory=lambda: {"get_ipython", "display"})  # names that a script cannot have
    elsewhere: dict = field(default_factory=dict)  # what the other cells bind: {name: where}


@dataclass
class Parts:
    """The script's parts, as statements."""

    imports: list = field(default_factory=list)
    constants: list = field(default_factory=list)
    definitions: list = field(default_factory=list)
    body: list = field(default_factory=list)
    dropped: dict = field(default_factory=dict)  # names that only statements bind that are left out: {name: where}
    wanted: dict = field(default_factory=dict)  # names of run-time modules: {(module, name): where}


# ---- Reading a notebook


def read_notebook(path):
    """The notebook at ``path`` as a NotebookNode. Raises ExportError unless it is a valid notebook of format 4."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file"
        raise ExportError(f"{path} cannot be read: {reason}.\nGive a chapter or the path of a notebook.") from None
    try:
        version = json.loads(text)["nbformat"]
    except (ValueError, TypeError, KeyError):
        raise ExportError(f"{path} is not a notebook.\nGive an .ipynb file that Jupyter can open.") from None
    if version != 4:
        raise ExportError(
            f"{path} has notebook format {version}, and format 4 is needed.\n"
            f"Convert it: jupyter nbconvert --to notebook --inplace {shlex.quote(str(path))}"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about cells without ids, which a script does not need
            notebook = nbformat.reads(text, as_version=4)
            nbformat.validate(notebook)
    except (nbformat.ValidationError, AttributeError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ExportError(f"{path} is not a valid notebook: {reason}\nOpen it in Jupyter and save it.") from None
    return notebook


def check_language(notebook, name):
    """Raise ExportError unless the notebook's language is Python, or not given."""
    metadata = notebook.metadata
    language = metadata.get("kernelspec", {}).get("language") or metadata.get("language_info", {}).get("name")
    if (language or "python").lower() not in ("python", "ipython"):
        raise ExportError(f"{name} is a notebook in {language}.\nOnly one in Python can become a torchrun script.")


def headings_and_paragraphs(markdown):
    """A markdown cell's headings [(level, text)] and paragraphs [text], without their markup."""
    tokens = MarkdownIt().parse(markdown)
    headings, paragraphs = [], []
    for opening, inline in zip(tokens, tokens[1:], strict=False):
        if opening.type == "heading_open":
            headings.append((int(opening.tag[1]), plain(inline)))
        elif opening.type == "paragraph_open" and opening.level == 0:
            paragraphs.append(plain(inline))
    return headings, paragraphs


def plain(inline):
    """The words of a line of markdown: no emphasis, no link targets, and of {term}`rank <Rank>` only: rank."""
    words = ""
    for token in inline.children:
        if token.type == "code_inline" and (role := re.search(r"\{[\w:-]+\}$", words)):
            words = words[: role.start()] + re.sub(r"\s*<[^>]*>$", "", token.content)
        elif token.type in ("text", "code_inline"):
            words += token.content
        elif token.type in ("softbreak", "hardbreak"):
            words += " "
    return " ".join(words.split())


def title_and_promise(notebook, name):
    """The notebook's title, and the first sentence below it ("" where there is none)."""
    title = None
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            continue
        headings, paragraphs = headings_and_paragraphs(cell.source)
        title = title or next((text for level, text in headings if level == 1), None)
        prose = [text for text in paragraphs if re.match(r"[\w\"']", text)]  # no label, no directive
        if title and prose:
            return title, re.match(r".+?[.?!](?=\s|$)|.+", prose[0])[0]
    return title or name, ""


# ---- From cells to statements


def sort_cells(notebook, name):
    """The code cells: the parameters, the exported ones (tagged ``export``; without such a tag, all), the rest."""
    cells, title, heading = Cells(), None, ""
    tagged = any("export" in tags_of(cell) for cell in notebook.cells if cell.cell_type == "code")
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "markdown":
            for level, text in headings_and_paragraphs(cell.source)[0]:
                if level == 1 and title is None:
                    title = text  # stands in the docstring
                else:
                    heading = text
        if cell.cell_type != "code" or not cell.source.strip():
            continue
        where, tags = f"{name}, cell {number} (`{first_line(cell.source)}`)", tags_of(cell)
        if "parameters" in tags:
            if cells.parameters:
                raise ExportError(f"{where} is the second that is tagged parameters.\nKeep one such cell.")
            found = cells.parameters = cell_statements(cell.source, where, heading, tagged=True)
        elif "export" in tags or not tagged:
            found = cell_statements(cell.source, where, heading, "export" in tags)
            if {"raises-exception", "nbval-raises-exception"} & set(tags):
                found = [left_out(f"{first_line(cell.source)} (a cell that raises)", where, heading)]
            cells.exported += found
        else:
            try:
                found = cell_statements(cell.source, where, heading, tagged=False)
            except ExportError:
                continue  # what is not exported may be anything
            for bound in (bound for statement in found for bound in names(statement.code)[0]):
                cells.elsewhere.setdefault(bound, where)
        for statement in found:
            for one in each_import(statement) if isinstance(statement.node, IMPORT) else []:
                if belongs(one.node) == "notebook":
                    cells.kernel_only.add(imported_name(one.node))
    return cells


def tags_of(cell):
    return cell.metadata.get("tags", [])


def first_line(source):
    """The first line of a source text that is not blank, shortened to 60 characters."""
    line = next((line.strip() for line in source.split("\n") if line.strip()), "")
    return line if len(line) <= 60 else f"{line[:59]}…"


def left_out(text, where, heading, above=""):
    """The line of the script that stands for what is left out of it."""
    return Statement(None, "", f"{above}# Notebook only: {text}", "", where, heading)


def cell_statements(source, where, heading, tagged):
    """The statements of a code cell; a magic is what IPython makes of it, a call of get_ipython()."""
    source = source.replace("\r\n", "\n").strip("\n")
    notes = []
    if magic := re.match(r"\s*%%(\w+).*", source):
        if magic[1] not in BODY_MAGICS:
            if tagged:
                raise ExportError(f"{where} is exported, but %%{magic[1]} is for notebooks.\nTake one of them away.")
            return [left_out(f"a %%{magic[1]} cell", where, heading)]
        notes = [left_out(magic[0].strip(), where, heading)]
        source = source[magic.end() :].strip("\n")
    python = as_python(source, where)
    found = split(python, where, heading)
    written = source.split("\n")
    if python != source and len(python.split("\n")) == len(written):
        for number, statement in enumerate(found):
            if statement.node is not None:
                lines = written[statement.node.lineno - 1 : statement.node.end_lineno]
                found[number] = replace(statement, written="\n".join(lines))
    return notes + found


def as_python(source, where):
    """The source, its magics translated if it has any. Raises ExportError for what a module may not contain."""
    try:
        check_syntax(source)
        return source
    except SyntaxError as error:
        try:
            python = TransformerManager().transform_cell(source).rstrip("\n")
            check_syntax(python)
            return python
        except SyntaxError:
            line = f" in line {error.lineno}" if error.lineno else ""
            raise ExportError(
                f"{where} has a syntax error{line}: {error.msg}.\n"
                "A script's cells are plain Python; `await` and `return` belong into a function."
            ) from None


def check_syntax(source):
    """Raise SyntaxError unless the source compiles as a module. Nothing is executed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(source, "cell", "exec", dont_inherit=True)
        except ValueError as error:  # a null byte
            raise SyntaxError(str(error)) from None


def split(source, where="", heading=""):
    """The top-level statements of a source text, in order, each with its comments."""
    lines = source.split("\n")
    found, done = [], 0  # `done`: the lines that are taken
    for node in ast.parse(source).body:
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        code = lines[first - 1 : node.end_lineno]
        rest = code[-1].encode()[node.end_col_offset :].decode()  # ast counts bytes
        code[-1] = code[-1].encode()[: node.end_col_offset].decode()
        if first == node.lineno:  # without a decorator, it may stand behind a semicolon
            code[0] = code[0].encode()[node.col_offset :].decode()
        comment = re.fullmatch(r"\s*;?\s*(#.*)", rest)
        above = lower_part(found, lines[done : first - 1])
        found.append(Statement(node, "\n".join(code), above, comment[1] if comment else "", where, heading))
        done = node.end_lineno
    above = lower_part(found, lines[done:])
    return [*found, Statement(None, "", above, "", where, heading)] if above.strip() else found


def lower_part(found, lines):
    """The comment lines above a statement, less the indented ones: these end the block before, and go to it."""
    taken = 0
    if found and hasattr(found[-1].node, "body"):
        for number, line in enumerate(lines, 1):
            if line.strip() and not line[0].isspace():
                break
            taken = number if line.strip() else taken
    if taken:
        behind = found[-1].comment and f"  {found[-1].comment}"
        found[-1] = replace(found[-1], code="\n".join([found[-1].code + behind, *lines[:taken]]), comment="")
    return "\n".join(lines[taken:])


# ---- Which names a piece of code binds and reads


class AsGenerators(ast.NodeTransformer):
    """Every comprehension as a generator, which has a scope of its own in symtable on every Python."""

    def visit_ListComp(self, node):
        self.generic_visit(node)
        return ast.GeneratorExp(node.elt, node.generators)

    visit_SetComp = visit_ListComp

    def visit_DictComp(self, node):
        self.generic_visit(node)
        return ast.GeneratorExp(ast.Tuple([node.key, node.value], ast.Load()), node.generators)


@functools.cache
def names(code):
    """What module-level code binds, and the globals it reads: (set, {name: the function that reads it, or ""})."""
    if sys.version_info >= (3, 12):  # there symtable gives a comprehension's variables to the module (PEP 709)
        code = ast.unparse(AsGenerators().visit(ast.parse(code)))
    table = symtable.symtable(code, "cell", "exec")
    bound = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    reads = {symbol.get_name(): "" for symbol in table.get_symbols() if symbol.is_referenced()}
    reads |= dict.fromkeys(changed(ast.parse(code)), "")

    def visit(table, path):
        for child in table.get_children():
            unnamed = child.get_name() in ANONYMOUS or [child.get_name()] == path[-1:]  # the latter: type parameters
            inner = path if unnamed else [*path, child.get_name()]
            for symbol in child.get_symbols():
                if symbol.is_global() and symbol.is_referenced():
                    reads.setdefault(symbol.get_name(), ".".join(inner))
                if symbol.is_declared_global() and symbol.is_assigned():
                    bound.add(symbol.get_name())
            visit(child, inner)

    visit(table, [])
    return bound, reads


def changed(tree):
    """The names that module-level code deletes or adds to, which for symtable it only binds."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.AugAssign | ast.Delete):
            targets = node.targets if isinstance(node, ast.Delete) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        if not isinstance(node, DEFINITION):
            yield from changed(node)


def each_import(statement):
    """An import statement as one statement for every name that it binds."""
    for alias in statement.node.names:
        node = ast.parse(ast.unparse(statement.node)).body[0]
        node.names = [alias]
        yield replace(statement, node=node, code=ast.unparse(node), above="", comment="")


def imported_name(node):
    """The name that an import of one name binds."""
    return node.names[0].asname or node.names[0].name.split(".")[0]


def import_key(node):
    """What an import of one name binds its name to: equal for two imports of the same thing."""
    alias = node.names[0]
    if isinstance(node, ast.ImportFrom):
        return node.module, alias.name
    return (alias.name if alias.asname else alias.name.split(".")[0]), None


def belongs(node):
    """Where an import of one name belongs: "script", "inline", "notebook", or "refused" for a run-time module whole."""
    imported = node.names[0].name if isinstance(node, ast.Import) else node.module or "."
    if imported.split(".")[0] not in NOTEBOOK_PACKAGES:
        return "script"
    if runtime_module_of(node):
        return "inline"
    whole = imported if isinstance(node, ast.Import) else f"{imported}.{node.names[0].name}"
    return "refused" if whole in ("helpers", *(f"helpers.{module}" for module in RUNTIME)) else "notebook"


def runtime_module_of(node):
    """The run-time module that a ``from helpers.x import …`` names, or None."""
    package, _, module = (getattr(node, "module", None) or "").partition(".")
    return module if package == "helpers" and module in RUNTIME else None


# ---- helpers' run-time modules, copied into the script


@functools.cache
def runtime_module(module):
    """A run-time module's statements by the names that they bind, in order: {name: [Statement, ...]}."""
    found = {}
    source = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    for statement in split(source, f"helpers.{module}"):
        if isinstance(statement.node, IMPORT):
            for one in each_import(statement):
                found.setdefault(imported_name(one.node), []).append(one)
        elif statement.node is not None:
            for name in names(statement.code)[0]:
                touching = TOUCHING.search(statement.above)[0]
                found.setdefault(name, []).append(replace(statement, above=touching))
    return found


def inlined(wanted):
    """What the names [(module, name)] of run-time modules need, themselves included: (imports, other statements)."""
    taken = set()

    def take(module, name):
        if (module, name) in taken:
            return
        taken.add((module, name))
        for statement in runtime_module(module)[name]:
            if runtime_module_of(statement.node):
                take(runtime_module_of(statement.node), statement.node.names[0].name)
            elif not isinstance(statement.node, IMPORT):
                for read in names(statement.code)[1]:
                    if read in runtime_module(module):
                        take(module, read)

    for module, name in wanted:
        take(module, name)
    imports, code = [], []
    for module in RUNTIME:
        for name, found in runtime_module(module).items():  # in the order of the source
            for statement in found if (module, name) in taken else []:
                if not isinstance(statement.node, IMPORT):
                    code.append(statement)
                elif not runtime_module_of(statement.node):
                    imports.append(statement)
    return imports, list(dict.fromkeys(code))


# ---- From the parameters to flags


def read_flags(parameters):
    """The parameters cell as {name: (where, add_argument call)}."""
    flags = {}
    for statement in parameters:
        if statement.node is not None and not isinstance(statement.node, IMPORT):
            name, call = flag(statement)
            if name in flags:
                raise ExportError(f"{statement.where} has the parameter {name} twice.\nKeep one.")
            flags[name] = statement.where, call
    return flags


def flag(statement):
    """One line of the parameters cell, ``name: type = value  # help``, as (name, add_argument call)."""
    node, where = ast.parse(statement.code).body[0], statement.where
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    if not isinstance(target, ast.Name) or len(getattr(node, "targets", [1])) > 1 or not getattr(node, "value", None):
        raise ExportError(f"{where}: `{first_line(statement.code)}` is no parameter.\nWrite name: type = value  # help")
    name, value = target.id, ast.get_source_segment(statement.code, node.value)
    if name in ("args", "help"):
        raise ExportError(f"{where}: the script needs the name {name} for itself.\nChoose another for the parameter.")
    try:
        default = ast.literal_eval(node.value)
    except ValueError:
        raise ExportError(
            f"{where}: the default of {name}, {value}, is no literal.\nWrite a number, a string, True, False or None."
        ) from None
    kind, choices, optional = flag_type(node, default, name, where)
    fits = type(default) is kind or (kind is float and type(default) is int) or (optional and default is None)
    if not fits or (choices and default is not None and default not in choices):
        raise ExportError(f"{where}: the default of {name}, {value}, does not fit its type.\nChange one of the two.")
    words = statement.comment.lstrip("# ") or name.replace("_", " ")
    options = [f'"--{name.replace("_", "-")}"']
    if kind is bool:
        options.append("action=argparse.BooleanOptionalAction")
    elif kind is not str:
        options.append(f"type={kind.__name__}")
    if choices:
        options.append(f"choices={choices!r}")
    if default is not None:
        options.append(f"default={value}")
    options.append(f"help={quoted(words.replace('%', '%%'))}")  # argparse formats it with %
    return name, f"parser.add_argument({', '.join(options)})"


def flag_type(node, default, name, where):
    """A parameter's type: (int, float, str or bool; its choices or None; whether it may be None)."""
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


# ---- What would not be one distributed job


def check_hard_coded(exported):
    """Raise ExportError where a cell fixes the rank or the world size, or starts the group with a file of its own."""
    fixed, moving = {}, set()  # by (function, name)
    starts_group = any("init_process_group" in statement.code for statement in exported)
    for statement in exported:
        tree = ast.Module([statement.node] if statement.node else [], [])
        for function, target, value in bindings(tree):
            if isinstance(target, ast.Name) and target.id.lower() in RANK_NAMES:
                if is_integer(value):
                    fixed.setdefault((function, target.id), (statement, f"{target.id} = {value.value}"))
                else:
                    moving.add((function, target.id))
            elif isinstance(target, ast.Subscript) and ast.unparse(target.value).endswith("environ"):
                if getattr(target.slice, "value", None) in LAUNCHER_VARIABLES and isinstance(value, ast.Constant):
                    raise worlds_of_one(statement, f"{ast.unparse(target)} = {value.value!r}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func).rpartition(".")[2]
                for given in node.keywords if called in ("init_process_group", "DistributedSampler") else []:
                    if given.arg in RANK_NAMES and is_integer(given.value):
                        raise worlds_of_one(statement, f"{called}({given.arg}={given.value.value})")
                    if given.arg == "store":
                        raise worlds_of_one(statement, f"{called}(store={ast.unparse(given.value)})")
            elif starts_group and isinstance(node, ast.Constant) and str(node.value).startswith("file://"):
                raise worlds_of_one(statement, f"{node.value}")
    for key, (statement, text) in fixed.items():
        if key not in moving:  # `rank = 0` before `rank = dist.get_rank()` is a default
            raise worlds_of_one(statement, text)


def worlds_of_one(statement, text):
    return ExportError(
        f"{statement.where} hard-codes `{text}`: every process would train a model of its own.\n"
        "Call start_process_group() instead, and ask dist.get_rank() and dist.get_world_size()."
    )


def bindings(tree, function=None):
    """Every (function, target, value) of an assignment, a loop, or a default in a function that starts the group."""
    for node in ast.iter_child_nodes(tree):
        inside = function
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from ((function, *pair) for pair in one_by_one(target, node.value))
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value:
            yield function, node.target, node.value
        elif isinstance(node, ast.AugAssign):
            yield function, node.target, node
        elif isinstance(node, ast.For):
            yield from ((function, *pair) for pair in one_by_one(node.target, node.iter))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = node
            if "init_process_group" in ast.unparse(node):
                arguments = [*node.args.posonlyargs, *node.args.args]
                defaults = zip(reversed(arguments), reversed(node.args.defaults), strict=False)
                for argument, value in [*defaults, *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]:
                    yield inside, ast.Name(argument.arg), value
        yield from bindings(node, inside)


def one_by_one(target, value):
    """The (target, value) pairs of an assignment, whose sides may be tuples."""
    if not isinstance(target, ast.Tuple | ast.List):
        return [(target, value)]
    values = value.elts if isinstance(value, ast.Tuple | ast.List) else [value] * len(target.elts)
    return [pair for both in zip(target.elts, values, strict=False) for pair in one_by_one(*both)]


def is_integer(node):
    return isinstance(node, ast.Constant) and type(node.value) is int


# ---- From statements to the script's parts


def sort_statements(cells, flags):
    """The statements by where they go. Raises ExportError for one that is of the notebook and of the script."""
    parts, pyplot = Parts(), {"plt", "matplotlib.pyplot"}
    counts = collections.Counter(name for statement in cells.exported for name in names(statement.code)[0])
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
            steady |= names(statement.code)[0]
            pyplot |= {alias.asname for alias in node.names if alias.name in ("matplotlib.pyplot", "pyplot")}
            continue
        only_notebook = notebook_use(statement, cells.kernel_only, pyplot)
        constant = node.targets[0].id if is_constant(node, steady) else None
        if only_notebook and isinstance(node, SIMPLE):
            parts.body.append(without(statement))
            parts.dropped.update(dict.fromkeys(names(statement.code)[0], statement.where))
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
                "Name what you use, so that it can be copied: from helpers.process_group import start_process_group"
            )
        else:
            module = runtime_module_of(one.node)
            if name.name not in runtime_module(module) or name.asname not in (None, name.name):
                wrong = "renames it" if name.asname else "but there is no such name"
                raise ExportError(
                    f"{statement.where}: `{one.code}`, {wrong}.\nImport a name of helpers/{module}.py as it is."
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
    used = sorted(kernel_only & set(names(statement.code)[1]))
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
        reads = {read for statement in [*parts.definitions, *parts.body] for read in names(statement.code)[1]}
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


# ---- Which names the parts may read


def check_names(parts, flags, inlined_imports, inlined_code, cells):
    """Raise ExportError where the script would bind a name twice, or read one that is not there."""
    top = {}  # name: (what it is, where), for all that the script's top level binds

    def bind(name, what, where):
        other, elsewhere = top.setdefault(name, (what, where))
        if other != what:
            raise ExportError(f"{where} binds {name}, which {elsewhere} binds too.\nGive one of them another name.")

    for name, what in OWN_NAMES.items():
        bind(name, what, "the script itself")
    for statement in [*inlined_imports, *parts.imports]:
        for one in each_import(statement):
            bind(imported_name(one.node), import_key(one.node), statement.where)
    own = {name for statement in parts.imports for name in names(statement.code)[0]}
    own |= {name for _, name in parts.wanted}
    for statement in [*inlined_code, *parts.constants, *parts.definitions]:
        for name in names(statement.code)[0]:
            bind(name, statement, statement.where)
            own |= {name} if statement not in inlined_code else set()

    in_main = {name: where for name, (where, _) in flags.items()}
    for statement in parts.body:
        for name in names(statement.code)[0]:
            in_main.setdefault(name, statement.where)
    for name, where in in_main.items():
        if name in own:
            raise ExportError(
                f"{where} assigns {name}, which {top[name][1]} imports or defines.\nGive one of them another name."
            )

    for statement in [*parts.constants, *parts.definitions]:
        reads = {name: by for name, by in names(statement.code)[1].items() if name not in top}
        reads = {name: by for name, by in reads.items() if name not in BUILTINS or name in in_main}
        for name, by in reads.items():
            if name in in_main:
                same = sorted(other for other in reads if other in in_main and reads[other] == by)
                raise ExportError(
                    f"{statement.where}: {reader(statement, by)} reads {' and '.join(same)}, which only main binds.\n"
                    "Pass it as an argument."
                )
            raise nothing_binds(name, reader(statement, by), statement.where, parts, cells)
    so_far = {*top, *BUILTINS, *flags}
    for statement in parts.body:
        bound, reads = names(statement.code)
        so_far |= bound
        for name, by in reads.items():
            if name not in so_far and not (by and name in in_main):
                raise nothing_binds(name, by and f"{by}()" or "it", statement.where, parts, cells)


def reader(statement, by):
    """The name for a message of what reads a name inside a definition."""
    if by:
        return f"{by}()"
    return f"the head of {statement.node.name}" if isinstance(statement.node, DEFINITION) else "it"


def nothing_binds(name, by, where, parts, cells):
    """The error for a name that no exported statement binds before it is read."""
    why = "no exported cell binds before"
    if name in parts.dropped:
        why = f"is bound by a line that only a notebook can run, in {parts.dropped[name]}"
    elif name in cells.elsewhere:
        why = f"is bound in {cells.elsewhere[name]}, not exported"
    return ExportError(f"{where}: {by} reads {name}, which {why}.\nBind it in a cell that is exported.")


# ---- The script


def script_from_notebook(notebook, name):
    """The text of the torchrun script that a notebook node makes; ``name`` is the file's, without its extension.

    Raises ExportError when the notebook is not in Python, or a cell cannot be a part of a script.
    """
    check_language(notebook, name)
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
    own = {("process_group", name): "the script itself" for name in ("run_and_exit", "stop_process_group")}
    parts.wanted = {**own, **parts.wanted}
    inlined_imports, inlined_code = inlined([key for key in parts.wanted if key[1] in {*reads, "run_and_exit"}])
    check_names(parts, flags, inlined_imports, inlined_code, cells)

    title, promise = title_and_promise(notebook, name)
    imports = [statement.text for statement in [*inlined_imports, *parts.imports]]
    imports += ["import argparse", "from torch.distributed.elastic.multiprocessing.errors import record"]
    sections = [
        docstring(title, promise, name),
        "\n".join(imports),
        "\n".join(statement.text for statement in parts.constants),
        *(statement.text for statement in inlined_code),
        *definitions_text(parts.definitions),
        parse_args_text(title, flags),
        main_text(parts.body, [flag for flag in flags if flag in reads]),
        'if __name__ == "__main__":\n    run_and_exit(main, parse_args())',
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
    torchrun --nnodes=2 --node-rank=0 --master-addr=HOST --master-port=29500 --nproc-per-node=gpu {file}
"""'''


def definitions_text(definitions):
    """The chapter's definitions as texts, with its headings as comments."""
    heading = None
    for statement in definitions:
        if statement.heading and statement.heading != heading:
            yield section_comment(statement.heading)
        heading = statement.heading
        yield statement.text


def section_comment(heading):
    return textwrap.fill(heading, 110, initial_indent="# ", subsequent_indent="# ")


def parse_args_text(title, flags):
    """The function that reads the flags."""
    style = ", formatter_class=argparse.ArgumentDefaultsHelpFormatter" if flags else ""
    lines = [f"parser = argparse.ArgumentParser(description={quoted(title)}{style})"]
    lines += [call for _, call in flags.values()]
    return "\n    ".join(["def parse_args():", *lines, "return parser.parse_args()"])


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
    return "@record\ndef main(args):\n" + indented("\n".join(lines).strip("\n"))


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
