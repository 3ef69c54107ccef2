"""A notebook as statements: its title, its cells by what their tags say, its magics. Nothing is executed."""

import ast
import functools
import json
import re
import shlex
import sys
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path

import nbformat
from markdown_it import MarkdownIt
from nbconvert.utils.exceptions import ConversionException
from traitlets.config import Application

from helpers.export.inline import belongs
from helpers.export.magics import as_python, automagic, instead, magic_of
from helpers.export.source import IMPORT, SIMPLE, Statement, check_syntax, each_import, imported_name, split

BODY_MAGICS = ("time", "capture", "prun")  # cell magics that run the cell's body unchanged
LONGEST = 2000  # characters: a script quotes one sentence of a paragraph, so no more of it is parsed
SHELLS = ("bash", "sh", "script", "!")
COLAB = "google.colab"
IMPORTED_BY_TORCH = "torch functorch torchgen numpy sympy mpmath networkx jinja2 markupsafe filelock fsspec".split()
IMPORTED_BY_TORCH += "triton typing_extensions sklearn scipy joblib threadpoolctl".split()  # the last 4: by the digits


class ExportError(ConversionException):
    """A notebook that cannot become a script. Each of its ``problems`` says where it is, why, and what to change."""

    def __init__(self, *problems):
        super().__init__("\n".join(problems))
        self.problems = problems


def plain_refusal(convert):
    """Under ``jupyter nbconvert``, print an ExportError's message and exit with 1; nbconvert would show a traceback."""

    @functools.wraps(convert)
    def converted(*args, **kwargs):
        try:
            return convert(*args, **kwargs)
        except ExportError as error:
            if not Application.initialized() or Application.instance().name != "jupyter-nbconvert":
                raise
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)

    return converted


@dataclass
class Cells:
    """The notebook's code cells, as statements and names."""

    parameters: list = field(default_factory=list)
    exported: list = field(default_factory=list)
    # names that only a notebook has
    kernel_only: set = field(default_factory=lambda: {"get_ipython", "display", "notebook_login"})
    elsewhere: dict = field(default_factory=dict)  # what the other cells bind: {name: where}
    read_elsewhere: set = field(default_factory=set)  # what the other cells read
    notes: list = field(default_factory=list)  # one line for each thing that the script lacks and a reader may miss
    other_files: list = field(default_factory=list)  # each `%run x.py` with its place: it may bind any name


# ---- Reading a notebook


def read_notebook(path):
    """The notebook at ``path`` as a NotebookNode. Raises ExportError unless it is a valid notebook of format 4."""
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise OSError(0, "it is not a regular file")  # reading a named pipe could wait for ever
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file"
        raise ExportError(f"{path} cannot be read: {reason}.\nGive a chapter or the path of a notebook.") from None
    try:
        version = json.loads(text)["nbformat"]
    except RecursionError:
        raise ExportError(f"{path} is nested too deeply for a notebook.\nOpen it in Jupyter and save it.") from None
    except (ValueError, TypeError, KeyError):
        raise ExportError(f"{path} is not a notebook.\nGive an .ipynb file that Jupyter can open.") from None
    if type(version) is not int or version != 4:
        raise ExportError(
            f"{path} has notebook format {first_line(repr(version))}, and format 4 is needed.\n"
            f"Convert it: jupyter nbconvert --to notebook --inplace {shlex.quote(str(path))}"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nbformat warns of cells without ids, and a script needs no ids
            notebook = nbformat.v4.reads(text)  # nbformat.reads would also log ten lines on what is wrong
            nbformat.validate(notebook)
    except Exception as error:  # on a damaged file nbformat raises errors of any type
        reason = first_line(str(error)) or type(error).__name__
        raise ExportError(f"{path} is not a valid notebook: {reason}\nOpen it in Jupyter and save it.") from None
    return notebook


def check_language(notebook, name):
    """Raise ExportError unless the notebook's language is Python, or not given."""
    for part, key in (("kernelspec", "language"), ("language_info", "name")):
        given = notebook.metadata.get(part)
        language = given.get(key) if isinstance(given, dict) else None
        if language:
            break
    if language and str(language).lower() not in ("python", "ipython"):
        language = first_line(str(language))
        raise ExportError(f"{name} is a notebook in {language}.\nOnly one in Python can become a torchrun script.")


def check_name(name):
    """Raise ExportError for a notebook's name that cannot be quoted in the script's text."""
    if not name.isprintable() or '"' in name or "\\" in name:
        raise ExportError(f"{name!r} is not a name for a script.\nRename the notebook: letters, digits, _ and -.")


def script_name(notebook, name):
    """The script's name: the notebook's, with _script behind it if Python would import the script for a module."""
    imported = {*sys.stdlib_module_names, *IMPORTED_BY_TORCH}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            lines = re.findall(r"^[ \t]*(?:import|from)[ \t]+([^#\n]+)", cell.source, re.MULTILINE)
            imported.update(re.split(r"\W", part.strip(), maxsplit=1)[0] for line in lines for part in line.split(","))
    return f"{name}_script" if name in imported else name


def headings_and_paragraphs(markdown):
    """([(level, text)] of the headings, [text] of the paragraphs) of a markdown cell, without markup."""
    parser, links = MarkdownIt(), {}
    text = markdown.encode(errors="replace").decode()  # without what UTF-8, the script's encoding, cannot have
    headings, paragraphs = [], []
    tokens = parser.disable("inline").parse(text, links)
    parser.enable("inline")
    for opening, block in zip(tokens, tokens[1:], strict=False):
        heading = opening.type == "heading_open"
        if heading or (opening.type == "paragraph_open" and opening.level == 0):
            [inline] = parser.parseInline(block.content[:LONGEST], links)
            if heading:
                headings.append((int(opening.tag[1]), plain(inline)))
            else:
                paragraphs.append(plain(inline))
    return headings, paragraphs


def plain(inline):
    """The words of a line of markdown without emphasis, link targets and roles: {term}`rank <Rank>` becomes rank."""
    words = ""
    for token in inline.children:
        if token.type == "code_inline" and re.fullmatch(r"\{[\w:-]+\}", words[words.rfind("{") :]):
            text, opening, target = token.content.rpartition("<")
            words = words[: words.rfind("{")] + (text.rstrip() if opening and target.endswith(">") else token.content)
        elif token.type in ("text", "code_inline"):
            words += token.content
        elif token.type in ("softbreak", "hardbreak"):
            words += " "
    return " ".join(words.split())


def title_and_purpose(notebook, name):
    """(the title without its number, the sentence "The script of this chapter …" as "This script …", or "")."""
    title, purpose = None, ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            headings, paragraphs = headings_and_paragraphs(cell.source)
            title = title or next((text for level, text in headings if level == 1), None)
            for text in paragraphs:
                if found := re.search(r"The script of this chapter (.+?[.?!])(?=\s|$)", text):
                    purpose = purpose or f"This script {found[1]}"
    return re.sub(r"^\d+\. ", "", title or name), purpose  # a chapter's title begins with its number


# ---- From cells to statements


def sort_cells(notebook, name):
    """The notebook's Cells. The cells tagged ``export`` make the script, or all cells where none has the tag.

    Raises ExportError, with all its problems, when the notebook is not in Python, or a cell of the script is not.
    """
    check_language(notebook, name)
    check_name(name)
    cells, problems, written = Cells(), [], {}
    tagged = any("export" in tags_of(cell) for cell in notebook.cells if cell.cell_type == "code")
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type != "code" or not cell.source.strip():
            continue
        where, tags = f"{name}, cell {number} (`{first_line(cell.source)}`)", tags_of(cell)
        found = []
        try:
            if "parameters" in tags:
                if cells.parameters:
                    raise ExportError(f"{where} is the second that is tagged parameters.\nKeep one such cell.")
                check_text(cell.source, where)
                found = cells.parameters = cell_statements(cell.source, where, tagged=True)
            elif "export" in tags or not tagged:
                check_text(cell.source, where)
                if {"raises-exception", "nbval-raises-exception"} & set(tags):
                    raising = f"{first_line(cell.source)} (a cell that raises)"
                    cells.exported.append(left_out(raising, where))
                else:
                    if magic := cell_magic(cell.source):
                        note_cell_magic(*magic, where, written, cells.notes)
                    found = cell_statements(cell.source, where, "export" in tags)
                    cells.exported += found
            else:
                try:
                    found = cell_statements(cell.source, where, tagged=False)
                except ExportError:
                    continue  # a cell that is not exported need not be Python
                for bound in (bound for statement in found for bound in statement.binds):
                    cells.elsewhere.setdefault(bound, where)
                cells.read_elsewhere.update(read for statement in found for read in statement.reads)
        except ExportError as error:
            problems += error.problems
        for statement in found:
            for one in each_import(statement) if isinstance(statement.node, IMPORT) else []:
                if belongs(one.node) == "notebook" or is_colab(one.node):
                    cells.kernel_only.add(imported_name(one.node))
    for number, statement in enumerate(cells.exported):
        if statement.node is not None:
            try:
                cells.exported[number] = without_notebook(statement, cells, written)
            except ExportError as error:
                problems += error.problems
    if problems:
        raise ExportError(*problems)
    return cells


def tags_of(cell):
    tags = cell.metadata.get("tags")
    return [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []


def first_line(source):
    """The first line of a source that is not blank, cut to 60 characters."""
    line = next((line.strip() for line in source.splitlines() if line.strip()), "")
    return line if len(line) <= 60 else f"{line[:59]}…"


def check_text(source, where):
    """Raise ExportError for a text that a Python file cannot have."""
    if found := re.search("[\0\ud800-\udfff]", source):
        what = "null bytes" if found[0] == "\0" else "half of a character (a lone surrogate)"
        line = source[: found.start()].count("\n") + 1
        raise ExportError(f"{where} has {what} in line {line}.\nWrite that line again.")


def left_out(text, where, above=""):
    """A statement without code in the place of one that is left out; it keeps the comment ``above``."""
    return Statement(None, "", above, "", where)


def cell_magic(source):
    """(name, the rest of its line, the cell's other lines) of the cell magic that a cell begins with, or None."""
    magic = re.match(r"\s*%%(\w+|!)(.*)", source)
    return magic and (magic[1], magic[2].strip(), source[magic.end() :].strip("\r\n"))


def cell_statements(source, where, tagged):
    """The statements of a code cell. Magics become calls of get_ipython(), as IPython translates them.

    Raises ExportError where the cell is not Python, or where a tagged cell begins with a cell magic.
    """
    source = source.replace("\r\n", "\n").replace("\r", "\n").strip("\n")
    above = []
    if found := cell_magic(source):
        magic, words, body = found
        if magic not in BODY_MAGICS:
            if tagged:
                raise ExportError(f"{where} is exported, but %%{magic} is for notebooks.\nTake one of them away.")
            return [left_out(f"a %%{magic} cell", where)]
        above = [left_out(f"%%{magic} {words}".strip(), where)]
        source = body
    python = checked(source, where)
    found = split(python, where)
    written = source.split("\n")
    if python != source and len(python.split("\n")) == len(written):
        for number, statement in enumerate(found):
            if statement.node is not None:
                lines = written[statement.node.lineno - 1 : statement.node.end_lineno]
                found[number] = replace(statement, written="\n".join(lines))
    return above + found


def checked(source, where):
    """The source, with its magics translated. Raises ExportError for syntax that a module may not contain."""
    try:
        check_syntax(source)
        return source
    except SyntaxError as raised:
        error, python = raised, source
    try:
        python = as_python(source)
        check_syntax(python)
        return python
    except SyntaxError as raised:
        error = raised if python != source else error
    except RuntimeError:
        raise ExportError(f"{where} has too many magics.\nSplit the cell, or do not export it.") from None
    lines = source.split("\n")
    wrong = lines[error.lineno - 1].strip() if error.lineno and error.lineno <= len(lines) else ""
    if word := automagic(wrong):
        raise ExportError(
            f"{where}: `{first_line(wrong)}` is not Python; IPython takes it for the magic %{word}.\n"
            f"Write %{word}, which is left out of the script, or delete the line."
        )
    line = f" in line {error.lineno}" if error.lineno else ""
    remedy = "Correct it, or do not export the cell."
    if re.search("'(await|return|yield)|asynchronous", error.msg):
        remedy = "A script's cells are plain Python: put `await` and `return` into a function."
    raise ExportError(f"{where} has a syntax error{line}: {error.msg}.\n{remedy}")


# ---- What only a notebook has


def note_cell_magic(magic, words, body, where, written, notes):
    """Add a note on a cell magic that is left out; add a file that it writes to ``written``, {name: where}."""
    if magic in ("writefile", "file"):
        file = words.split()[-1].strip("\"'") if words else ""
        written[Path(file).name] = where
    if magic in SHELLS:
        check_written(body, where, written)
    if magic not in BODY_MAGICS:
        notes.append(f"{where} is left out: {instead(magic, body) or 'a script has no IPython'}.")


def check_written(command, where, written):
    """Raise ExportError if a shell's command starts a Python file that another cell wrote: that file is the script."""
    for file in written:
        if file.endswith(".py") and re.search(rf"(?:^|[\s/\"']){re.escape(file)}(?:$|[\s\"';&|])", command):
            raise ExportError(
                f"{where} starts {file}, which {written[file]} writes: that file is the script already.\n"
                f"Copy {file} to where the GPUs are; or tag the cells of another script `export`."
            )


def without_notebook(statement, cells, written):
    """The statement as a script can have it, with notes on what changes. Raises ExportError for what needs a reader."""
    node, where = statement.node, statement.where
    shown = f"`{first_line(statement.written or statement.code)}`"
    if magic := magic_of(node) if "get_ipython" in statement.reads else None:
        if magic[0] == "!":
            check_written(magic[1], where, written)
        if magic[0] == "run":
            cells.other_files.append(f"{shown} in {where}")
        if isinstance(node, SIMPLE) and (remedy := instead(*magic)):
            cells.notes.append(f"{where}: {shown} is left out: {remedy}.")
        return statement
    if isinstance(node, IMPORT):
        return without_notebook_imports(statement, cells)
    reads = set(statement.reads)
    if isinstance(node, SIMPLE) and "notebook_login" in reads:
        cells.notes.append(f"{where}: {shown} is left out: log in once in a shell, or set HF_TOKEN.")
    elif isinstance(node, SIMPLE) and "drive" in reads & cells.kernel_only:
        cells.notes.append(f"{where}: {shown} is left out: make the folder with the data a parameter.")
    elif reads & {"input", "getpass"}:
        asking = {ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}
        if asked := sorted(asking & {"input", "getpass", "getpass.getpass"}):
            raise ExportError(
                f"{where}: {shown} asks with {asked[0]}(), and ranks have no keyboard.\n"
                "Make the answer a parameter, or read it from os.environ."
            )
    return statement


def without_notebook_imports(statement, cells):
    """An import as a script can have it: without Colab's modules, and with tqdm.auto in place of tqdm.notebook."""
    node, where = statement.node, statement.where
    if all(is_colab(one.node) for one in each_import(statement)):
        cells.notes.append(f"{where}: `{first_line(statement.code)}` is left out: only Colab has it.")
        return left_out(statement.code, where, statement.above and f"{statement.above}\n")
    if "tqdm" not in statement.code:
        return statement
    names = {alias.name for alias in node.names}
    widgets = names & {"tqdm_notebook", "tnrange", "notebook"} if isinstance(node, ast.ImportFrom) else set()
    widgets |= {alias.name for alias in node.names if alias.name == "tqdm.notebook" and not alias.asname}
    if widgets and (getattr(node, "module", "") or "tqdm").startswith("tqdm"):
        raise ExportError(
            f"{where}: `{first_line(statement.code)}` draws its bar in a notebook only.\n"
            "Write from tqdm.auto import tqdm, which draws in both."
        )
    if (getattr(node, "module", None) or "tqdm.notebook") == "tqdm.notebook" and "tqdm.notebook" in statement.code:
        cells.notes.append(f"{where}: `{first_line(statement.code)}` takes tqdm.auto, which draws in a terminal too.")
        code = re.sub(r"\btqdm\.notebook\b", "tqdm.auto", statement.code)
        return replace(statement, node=ast.parse(code).body[0], code=code)
    return statement


def is_colab(node):
    """Whether an import of one name is from Colab's own package."""
    if isinstance(node, ast.Import):
        return f"{node.names[0].name}.".startswith(f"{COLAB}.")
    return f"{node.module}.{node.names[0].name}.".startswith(f"{COLAB}.")
