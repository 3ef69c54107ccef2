"""IPython's syntax in a cell: which lines are not Python, what Python they become, and what their notes say."""

import ast
import re

from IPython.core.inputtransformer2 import TransformerManager

ESCAPED = re.compile(r"(?:[\w.,* ]+=\s*)?[%!]")  # the beginning of a magic or of a shell's command
INSIDE = re.compile(r"#.*|\"\"\"|'''|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|[][(){}]")
CLOSING = {'"""': re.compile(r"(?:\\.|[^\\\"]|\"(?!\"\"))*\"\"\""), "'''": re.compile(r"(?:\\.|[^\\']|'(?!''))*'''")}
TIMED = re.compile(r"(\s*)%time\s+(?=\S)")

# Magics that people often write without the percent sign, which IPython allows.
AUTOMAGICS = "pip conda mamba uv cd ls ll cat cp mv rm mkdir rmdir env set_env run".split()
AUTOMAGICS += "load_ext matplotlib time timeit".split()
QUIET = "matplotlib load_ext reload_ext autoreload config pinfo pinfo2 psearch".split()  # no script needs these
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
    """The source with its magics as Python, with as many lines; `%time f(x)` becomes `f(x)`.

    Raises SyntaxError as IPython does, and RuntimeError where there are more magics than IPython can translate.
    """
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
            text = made + "\n" * (len(group) - 1 - made.count("\n"))  # so that the lines below keep their numbers
        python.append(text)
    return "\n".join(python)


def logical_lines(lines):
    """Yields groups of lines: one magic or command with its continuation lines, or the lines of a Python statement."""
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
    """(how many brackets are open after a line, which triple quote is open or ""); the arguments hold before it."""
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
    """The line's first word, if IPython would run it as a magic without a percent sign; else None."""
    word = re.match(r"\s*(\w+)\s+[^\s=(.]", line)
    return word[1] if word and word[1] in AUTOMAGICS else None


# ---- What is told of them


def magic_of(node):
    """(name, text) of a statement that calls a magic, such as ("cd", ".."), or a shell: ("!", "ls"). Else None."""
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
    """What a reader should do in place of a magic that the script leaves out; "" where nothing is to be done."""
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
