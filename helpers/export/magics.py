"""IPython's own syntax in a cell: which lines are not Python, what they become, and what a script's reader is told."""

import ast
import re

from IPython.core.inputtransformer2 import TransformerManager

ESCAPED = re.compile(r"(?:[\w.,* ]+=\s*)?[%!]")  # how a line begins that is a magic or a command of the shell
INSIDE = re.compile(r"#.*|\"\"\"|'''|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|[][(){}]")
CLOSING = {'"""': re.compile(r"(?:\\.|[^\\\"]|\"(?!\"\"))*\"\"\""), "'''": re.compile(r"(?:\\.|[^\\']|'(?!''))*'''")}
TIMED = re.compile(r"(\s*)%time\s+(?=\S)")

# What IPython takes for a magic without its percent sign, and people write so.
AUTOMAGICS = "pip conda mamba uv cd ls ll cat cp mv rm mkdir rmdir env set_env run".split()
AUTOMAGICS += "load_ext matplotlib time timeit".split()
QUIET = "matplotlib load_ext reload_ext autoreload config pinfo pinfo2 psearch".split()  # a script does not miss them
INSTALLERS = ("pip", "pip3", "conda", "mamba", "micromamba", "uv")
INSTALL = "install it where the script runs"
IN_SHELL = "run it in a shell before the script, on every node"
INSTEAD = {
    **dict.fromkeys(INSTALLERS, INSTALL),
    **dict.fromkeys(("env", "set_env"), "export the variable in the shell that starts torchrun"),
    "cd": "a script's paths count from the folder in which it is started",
    "run": "import what you need from that file",
    **dict.fromkeys(("writefile", "file"), "write that file before the script runs"),
    **dict.fromkeys(("sx", "system", "bash", "sh", "script", "!"), IN_SHELL),
}
STARTS_RANKS = re.compile(r"\b(?:torchrun|torch\.distributed\.(run|launch)|accelerate +launch|deepspeed|mpirun|srun)\b")


# ---- From IPython's syntax to Python


def as_python(source):
    """The source with its magics as Python, line by line; `%time f(x)` becomes `f(x)`. RuntimeError: too many."""
    manager, lines = TransformerManager(), [f"{line}\n" for line in source.split("\n")]
    for cleanup in manager.cleanup_transforms:
        lines = cleanup(lines)
    python = []
    for group in logical_lines([line.removesuffix("\n") for line in lines]):
        text = "\n".join(group)
        if timed := TIMED.match(text):
            text = timed[1] + text[timed.end() :]
        elif re.search(r"[%!?,;/]", text):
            made = "".join(manager.do_token_transforms([f"{line}\n" for line in group])).removesuffix("\n")
            text = made + "\n" * (len(group) - 1 - made.count("\n"))  # no line below it moves
        python.append(text)
    return "\n".join(python)


def logical_lines(lines):
    """Lines in groups: a magic or a command with the lines that continue it, or the lines of a Python statement."""
    group, brackets, quote, escaped = [], 0, "", False
    for line in lines:
        if not group:
            escaped = ESCAPED.match(line.lstrip())
        group.append(line)
        if not escaped:
            brackets, quote = still_open(line, brackets, quote)
        if not line.endswith("\\") and (escaped or not (brackets or quote)):
            yield group
            group, brackets = [], 0
    if group:
        yield group


def still_open(line, brackets, quote):
    """How many brackets, and which triple quote, are open behind a line that begins with these open."""
    at = 0
    while True:
        if quote:
            closed = CLOSING[quote].match(line, at)
            if not closed:
                return brackets, quote
            at, quote = closed.end(), ""
        found = INSIDE.search(line, at)
        if not found:
            return brackets, quote
        at = found.end()
        if found[0] in CLOSING:
            quote = found[0]
        elif found[0] in "([{":
            brackets += 1
        elif found[0] in ")]}":
            brackets = max(0, brackets - 1)


def automagic(line):
    """The first word of a line that IPython would take for a magic, though it has no percent sign; or None."""
    word = re.match(r"\s*(\w+)\s+[^\s=(.]", line)
    return word[1] if word and word[1] in AUTOMAGICS else None


# ---- What is told of them


def magic_of(node):
    """(magic's name, its text) of a statement that is one, ("cd", "..") or for the shell ("!", "ls"); else None."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            if ast.unparse(call.func.value) == "get_ipython()":
                words = [word.value for word in call.args if isinstance(word, ast.Constant) and str(word.value).strip()]
                words = [str(word) for word in words] or [""]
                if call.func.attr in ("system", "getoutput"):
                    return "!", " ".join(words)
                return words[0], " ".join(words[1:])
    return None


def instead(magic, text):
    """What to do in place of a magic that a script does not have; "" where nothing is missed."""
    if magic in QUIET:
        return ""
    if magic in ("!", "sx", "system", "bash", "sh"):
        if STARTS_RANKS.search(text):
            return "it starts ranks, and this script is started by torchrun itself"
        words = set(text.split())
        if words & set(INSTALLERS) and words & {"install", "add"}:
            return INSTALL
        return IN_SHELL
    return INSTEAD.get(magic, "a script has no IPython")
