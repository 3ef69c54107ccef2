"""From notebooks to scripts: every rule and every refusal, on notebooks of a few cells."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from ruff import find_ruff_bin

from helpers.export import chapters as commands
from helpers.export import inline, parts
from helpers.export.script import (
    ExportError,
    TorchrunExporter,
    read_notebook,
    script_and_notes,
    script_from_notebook,
)
from helpers.export.source import split

ROOT = Path(__file__).parent.parent
WORK = "print('work')"
GROUP = "from helpers.runtime.process_group import start_process_group\nprint(start_process_group())"


def code(source, *tags):
    return new_code_cell(source, metadata={"tags": list(tags)} if tags else {})


def notebook(*cells):
    """A notebook of these cells. A string becomes a cell tagged export, or markdown if it begins with #."""
    made = []
    for cell in cells:
        if isinstance(cell, str):
            cell = new_markdown_cell(cell) if cell.startswith("# ") or cell.startswith("## ") else code(cell, "export")
        made.append(cell)
    return new_notebook(cells=made)


def exported(*cells, allow_single=True):
    """(the exported script, its notes). Checks that the script compiles and that ruff finds no undefined name in it."""
    text, notes = script_and_notes(notebook(*cells), "05_test", allow_single)
    compile(text, "05_test.py", "exec")
    ruff("check", "--select=E501,F7,F82", text=text)
    ruff("format", "--check", text=text)
    return text, notes


def script(*cells):
    return exported(*cells)[0]


def ruff(*command, text):
    style = ["--isolated", "--line-length=88", "--target-version=py311", "-"]
    done = subprocess.run([find_ruff_bin(), *command, *style], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + text


def refusal(*cells):
    """The message with which a notebook of these cells is refused. Checks that it has one or two lines."""
    with pytest.raises(ExportError) as caught:
        script_from_notebook(notebook(*cells), "05_test", allow_single=True)
    message = str(caught.value)
    assert 1 <= len(message.splitlines()) <= 2
    return message


def function(text, name):
    """The source of a top-level function or class of a script."""
    tree = ast.parse(text)
    node = next(node for node in tree.body if getattr(node, "name", None) == name)
    return ast.get_source_segment(text, node)


def top_level(text):
    """The names that a script's top level defines, in order."""
    return [node.name for node in ast.parse(text).body if hasattr(node, "name")]


# ---- Shape


def test_shape():
    cells = code("epochs: int = 2  # passes", "parameters"), "print(epochs)"
    text = script("# Two ranks\n\nWhy two? Because. The script of this chapter adds 1 and 1. It is slow.", *cells)
    tree = ast.parse(text)
    assert ast.get_docstring(tree).startswith("Two ranks. This script adds 1 and 1.\n\nOne node, all GPUs")
    for line in (
        "torchrun --nproc-per-node=gpu 05_test.py",
        "torchrun --nnodes=2 --node-rank=0 --master-addr=HOST --nproc-per-node=gpu 05_test.py",
    ):
        assert f"\n{line}" in ast.get_docstring(tree)
    assert top_level(text) == ["main", "parse_args"]
    assert function(text, "main") == "def main(args):\n    print(args.epochs)"
    assert text.endswith('\n\nif __name__ == "__main__":\n    main(parse_args())\n')


def test_a_long_command_is_continued():
    text = script_from_notebook(notebook(WORK), "a_notebook_with_a_very_long_name_indeed", allow_single=True)
    command = ast.get_docstring(ast.parse(text)).partition("second):\n")[2].rstrip()
    assert command.endswith("\\\n    a_notebook_with_a_very_long_name_indeed.py")
    assert max(map(len, text.splitlines())) <= 88


def test_only_tagged_cells_or_all():
    assert "'later'" not in script(WORK, code("print('later')")).replace('"', "'")
    assert "'later'" in script(code(WORK), code("print('later')")).replace('"', "'")


def test_imports_and_definitions_go_up_and_are_merged():
    text = script(
        "import torch\nimport os, sys\nprint(os.name, sys.path)",
        "import torch\nfrom pathlib import Path\n\n\ndef f():\n    return torch, Path",
        "from pathlib import PurePath, Path\nprint(f(), PurePath)",
    )
    assert text.count("import torch\n") == 1
    assert "from pathlib import Path, PurePath\n" in text
    assert "\nimport os\n" in text and "\nimport sys\n" in text
    assert "import" not in function(text, "main")
    assert text.index("def f()") < text.index("def parse_args()")


def test_an_import_that_only_other_cells_use_is_left_out():
    assert "json" not in script("import json\nprint(1)", code("print(json)"))
    text = script(code("from typing import Literal\nx: Literal[1, 2] = 1", "parameters"), "print(x)")
    assert "Literal" not in text


def test_an_import_that_nothing_uses_is_there_for_its_effect():
    text = script("import readline\nfrom sklearn.experimental import enable_halving_search_cv\nprint(1)")
    assert "import readline\n" in text and "import enable_halving_search_cv" in text


def test_formatting_and_comments_stay():
    text = script(
        code("# what for\nx = [1,\n   2]  # two\n\n# then\nif x:\n    pass\n    # the end\n\nprint(x);  # x", "export"),
        "#above\n@staticmethod\ndef f(\n    a,  # first\n):\n    return a\n    # below\n\nprint(f)\n# last words",
    )
    main = text.partition("def main(args)")[2]
    for line in ("    # what for", "  # two", "    # then", "        # the end", "  # x", "    # last words"):
        assert f"{line}\n" in main
    assert "# above\n@staticmethod\ndef f(\n    a,  # first\n):\n    return a\n    # below\n" in text
    assert ";" not in main


def test_strings_of_several_lines_do_not_move():
    text = script('n = 1\ntext = f"""a\n  b {n}\n    c"""\nprint(text, (\n  "d"\n  "é"\n)); print("""\nlast""")')
    assert '    text = f"""a\n  b {n}\n    c"""\n    print(text, ("dé"))\n' in text
    assert 'print("""\nlast""")\n' in text


def test_statements_on_one_line():
    main = function(script("a = 1; b = 'é'; print(a, b)  # both\nfor i in range(2): print(i)"), "main")
    assert 'a = 1\n    b = "é"\n    print(a, b)  # both\n    for i in range(2):\n        print(i)' in main


def test_no_heading_and_no_comment_for_a_formatter():
    text = script(
        "# Title",
        "## The **model**",
        "def f():\n    return 1",
        "## Train",
        code("# why\nx = [1,\n     2]  # fmt: skip\n# fmt: off\nprint(f(), x, '# fmt: off')", "export"),
    )
    assert "Train" not in text and "The model" not in text and text.count("fmt:") == 1
    assert function(text, "main").endswith('    # why\n    x = [1, 2]\n    print(f(), x, "# fmt: off")')


def test_a_comment_behind_a_line_that_is_too_long_goes_above_it():
    long = "x = 1  # " + "word " * 15 + "end\n"
    text = script(f"{long}print(x)\nif x:\n    {long}    y = 2  # noqa: F841{' ' * 70}why")
    assert "end\n    x = 1\n" in text and "end\n        x = 1\n" in text
    assert "y = 2  # noqa" in text


def test_constants_are_literals():
    text = script(
        "import torch\nCLASSES = 10\nSIZES = (CLASSES, 2 * CLASSES)\nDTYPE = torch.get_default_dtype()",
        "LENGTH = len(SIZES)\nlower = 3\n\ndef f():\n    return CLASSES, SIZES",
        "print(f(), LENGTH, lower, DTYPE)",
    )
    head, _, main = text.partition("def main(args)")
    assert "\nCLASSES = 10\nSIZES = (CLASSES, 2 * CLASSES)\n\n\ndef f():" in head and "global" not in main
    for line in ("DTYPE = torch.get_default_dtype()", "LENGTH = len(SIZES)", "lower = 3"):
        assert f"    {line}\n" in main
    assert "\n    X = 1\n    X = 2\n" in script("X = 1\nX = 2\nprint(X)")


def test_order():
    text = script(
        "# Title",
        "from helpers.runtime.data import digits\n"
        "from helpers.runtime.process_group import print0, start_process_group\nSIZE = 8",
        "def model():\n    print0(1)\n    return SIZE\n\n\nclass Trainer:\n    def fit(self):\n        print0(model())",
        "device = start_process_group()\nprint0(device, digits())\nTrainer().fit()",
    )
    names = top_level(text)
    assert names[:6] == ["digits", "model", "Trainer", "main", "parse_args", "start_process_group"]
    assert {"stop_process_group", "print0"} <= set(names[6:])
    assert text.index("\nSIZE = 8\n") < text.index("\ndef digits(")


EARLY = {
    "default": "def f(say=print0):\n    return say",
    "decorator": "def twice(call):\n    return print0 and call\n\n\n@twice\ndef f():\n    pass",
    "class body": "class f:\n    class A:\n        say = print0",
    "in a class": "class f:\n    def g(self, say=print0):\n        pass",
    "annotation": "def f(say: print0):\n    pass",
    "base": "class f(type(str(print0))):\n    pass",
    "lambda": "def f(say=lambda: print0):\n    pass",
}


@pytest.mark.parametrize("source", EARLY.values(), ids=EARLY)
def test_what_a_definition_needs_stands_before_it(source):
    text = script(
        "from helpers.runtime.process_group import print0, start_process_group\nprint(start_process_group())",
        f"def g():\n    print0(1)\n\n\n{source}\n\n\ndef h():\n    return g, f\n\n\nprint(h())",
    )
    order = [name for name in top_level(text) if name in ("g", "print0", "f", "h", "start_process_group")]
    assert order == ["g", "print0", "f", "h", "start_process_group"]
    exec(text[: text.index("def main(args)")], {"__name__": "05_test"})  # no NameError


def test_a_constant_may_use_what_is_copied(monkeypatch):
    copied = split("LEAST = 2\n\n\ndef least():\n    return LEAST", "helpers.runtime.data")
    found = {name: [statement] for statement in copied for name in statement.binds}
    monkeypatch.setattr(inline, "runtime_module", lambda module, real=inline.runtime_module: {**real(module), **found})
    monkeypatch.setattr(parts, "runtime_module", inline.runtime_module)
    text = script("from helpers.runtime.data import LEAST, least\nMOST = LEAST + 1\nprint(MOST, least())")
    assert "\nLEAST = 2\n\n\ndef least():" in text and "    MOST = LEAST + 1\n" in text


def test_title_without_heading_and_with_odd_characters():
    assert script(WORK).startswith('"""05_test.\n\nOne node, all GPUs')
    text = script('# A """q""" \\x', WORK)
    assert "A '''q''' \\x." in ast.get_docstring(ast.parse(text))


# ---- Parameters


PARAMETERS = """\
from typing import Literal

epochs: int = 10  # passes over the training set (100% of it)
# the step of "SGD"
learning_rate: float = 1e-3  # step size, "SGD"
momentum: float = 0
name: str = "run"
shuffle: bool = True  # shuffle the images
folder: str | None = None  # where to write
steps: None | int = None
backend: Literal["gloo", "nccl"] = "gloo"  # how ranks talk
level: Literal[1, 2] | None = None
guess = 0.5"""


def run_script(text, tmp_path, *flags):
    """Run a script without torchrun. Returns (stdout, exit status, stderr)."""
    path = tmp_path / "script.py"
    path.write_text(text)
    done = subprocess.run([sys.executable, path, *flags], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    return done.stdout, done.returncode, done.stderr


def test_help_reads_like_a_manual(tmp_path):
    parameters = "# What is trained.\nepochs: int = 10\nwidth: int = 8\n# What you see.\nlog_every: int = 5"
    text = script(
        "# Title\n\nThe script of this chapter uses 100%.",
        code(parameters, "parameters"),
        "print(epochs, width, log_every)",
    )
    manual, status, _ = run_script(text, tmp_path, "--help")
    assert status == 0 and "usage: Title. This script uses 100%.\n\nOne node, all GPUs" in manual
    trained, seen = manual.index("\nWhat is trained:\n"), manual.index("\nWhat you see:\n")
    assert trained < manual.index("  --epochs") < manual.index("  --width") < seen < manual.index("  --log-every")


def test_parameters_become_flags(tmp_path):
    shown = "print([epochs, learning_rate, momentum, name, shuffle, folder, steps, backend, level, guess])"
    text = script(code(PARAMETERS, "parameters"), shown)
    assert '    add("--learning-rate", 1e-3, \'step size, "SGD"\')\n' in text
    values, status, _ = run_script(text, tmp_path)
    assert (values, status) == ("[10, 0.001, 0, 'run', True, None, None, 'gloo', None, 0.5]\n", 0)
    flags = "--epochs 3 --learning-rate .5 --momentum 1 --name x --no-shuffle --folder f --steps 4 --backend nccl"
    values, status, _ = run_script(text, tmp_path, *flags.split(), "--level", "2", "--guess", "2")
    assert (values, status) == ("[3, 0.5, 1.0, 'x', False, 'f', 4, 'nccl', 2, 2.0]\n", 0)
    help_text = " ".join(run_script(text, tmp_path, "--help")[0].split())
    assert "passes over the training set (100% of it) (default: 10)" in help_text
    assert 'step size, "SGD" (default: 0.001)' in help_text
    assert "--shuffle, --no-shuffle shuffle the images (default: True)" in help_text
    _, status, errors = run_script(text, tmp_path, "--backend", "mpi", "--epochs", "1")
    assert status == 2 and "invalid choice: 'mpi'" in errors


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("print(a, [a for _ in 'x'], f'{a} {a:>3}', f'''{\n  a}''')", "args.a"),
        ("a += 1\nprint(a)", "a = args.a"),
        ("print([a for a in range(3)], a)", "a = args.a"),
        ("print((lambda a: a)(2), a)", "a = args.a"),
        ("print(f'{a=}')", "a = args.a"),
        ("print(eval('a'))", "a = args.a"),
        ("def f():\n    return a\nprint(f())", "a = args.a"),
    ],
)
def test_parameters_in_main(source, expected, tmp_path):
    text = script(code("a: int = 1\nb: int = 2", "parameters"), source)
    main = text.partition("def main(args)")[2].partition("def parse_args")[0]
    assert ("\n    a = args.a\n" in main) == (expected == "a = args.a")
    assert expected in main and ("args.b" in main) == ("eval" in main) and 'add("--b", 2, "b")' in text
    exec(f"a = 1\n{source}", {})
    expected = subprocess.run([sys.executable, "-c", f"a = 1\n{source}"], capture_output=True, text=True).stdout
    assert run_script(text, tmp_path) == (expected, 0, "")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x: list[int] = [1]", "type list[int]"),
        ("x: int = 1.5", "does not fit its type"),
        ("x: bool = 1", "does not fit its type"),
        ("x: str = None", "does not fit its type"),
        ("x: Literal['a', 'b'] = 'c'", "does not fit its type"),
        ("x: int = len('a')", "is not a literal"),
        ("x = None", "Write x: type = None"),
        ("x: int", "`x: int` is not a parameter"),
        ("x = y = 1", "is not a parameter"),
        ("print(1)", "is not a parameter"),
        ("x: int = 1\nx: int = 2", "the parameter x twice"),
        ("help: int = 1", "needs the flag --help"),
    ],
)
def test_parameters_refused(source, expected):
    message = refusal(code(source, "parameters"), WORK)
    assert expected in message and "05_test, cell 1 (`x" in message.replace("`help", "`x").replace("`print", "`x")


def test_two_parameters_cells():
    assert "cell 2 (`b = 1`) is the second" in refusal(code("a = 1", "parameters"), code("b = 1", "parameters"), WORK)


# ---- Inlining


def test_inlines_what_is_used_and_nothing_else():
    text = script(
        "from helpers.runtime.data import digits\nfrom helpers.runtime.models import mlp\n"
        "train, _ = digits()\nprint(len(train))"
    )
    assert "def digits(" in text and "def mlp" not in text and "helpers" not in text.partition('"""\n')[2]
    assert "import numpy as np\n" in text
    assert "process_group" not in text


def test_inlines_transitively_in_the_order_of_the_source():
    text = script("from helpers.runtime.process_group import start_process_group\nprint(start_process_group())")
    source = (ROOT / "helpers/runtime/process_group.py").read_text()
    mine = [name for name in top_level(text) if name not in ("parse_args", "main")]
    assert {"start_process_group", "stop_process_group", "print0"} <= set(mine)
    assert mine == [name for name in top_level(source) if name in mine]
    for name in mine:
        assert function(text, name) == function(source, name)


def test_the_group_is_always_stopped():
    start = (
        "from helpers.runtime.process_group import start_process_group\ndevice = start_process_group()\nprint(device)"
    )
    assert function(script(start), "main").endswith("    print(device)\n    stop_process_group()")
    stop = "from helpers.runtime.process_group import stop_process_group\nstop_process_group()"
    assert function(script(start, stop), "main").count("stop_process_group()") == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.destroy_process_group()",
        "import torch\ntorch.distributed.init_process_group()\nprint('é'); torch.distributed.destroy_process_group()",
        "dist.init_process_group('gloo')\ntry:\n    print(dist)\nfinally:\n    dist.destroy_process_group()",
        "def end():\n    dist.destroy_process_group()\n\ndist.init_process_group('gloo')\nend()",
        "from torch.distributed import *" if False else "dist.init_process_group('gloo')",
    ],
)
def test_every_end_of_the_group_becomes_one_that_does_not_hang(source):
    text = script("import torch.distributed as dist\n" + source)
    own = [function(text, name) for name in top_level(text) if name in ("end", "main")]
    assert "".join(own).count("    stop_process_group()") == 1
    assert text.count("destroy_process_group()") == 1  # in stop_process_group


def test_a_function_that_main_does_not_call_keeps_its_end_of_the_group():
    text = script(
        "import torch.distributed as dist\ndef sent():\n    dist.destroy_process_group()",
        "def send(function):\n    print(function)\n\ndist.init_process_group('gloo')\nsend(sent)",
    )
    assert "dist.destroy_process_group()" in function(text, "sent")
    assert function(text, "main").count("stop_process_group()") == 1


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from helpers.runtime import process_group\nprint(process_group)", "takes a whole module"),
        ("import helpers.runtime.data\nprint(helpers.runtime.data.digits())", "takes a whole module"),
        ("import helpers\nprint(helpers)", "takes a whole module"),
        ("from helpers.runtime.data import nothing\nprint(nothing)", "imports a name that is not there"),
        ("from helpers.runtime.data import digits as d\nprint(d())", "renames what it imports"),
        ("from helpers.runtime.data import *\nprint(1)", "does not say what it imports"),
        ("from math import *\nprint(pi)", "does not say what it imports"),
        ("from . import x\nprint(x)", "does not say what it imports"),
        ("def f():\n    from helpers.runtime.data import digits\n    return digits()\nprint(f())", "in a block"),
        ("if True:\n    import helpers.runtime.data", "in a block"),
        (
            "from helpers.runtime.data import digits\ndef digits():\n    pass\nprint(digits())",
            "imports digits, and another line binds it",
        ),
        (
            "from helpers.runtime.data import digits\ndigits = digits()\nprint(digits)",
            "imports digits, and another line binds it",
        ),
    ],
)
def test_inlining_refused(source, expected):
    message = refusal(source)
    assert expected in message and "05_test, cell 1" in message


# ---- Notebook only


@pytest.mark.parametrize(
    ("source", "note"),
    [
        ("display(1)", "cell 1 (`display(1)`): `display(1)` is left out"),
        ("import matplotlib.pyplot as plt\nplt.plot([1])\nplt.show()", "`plt.show()` is left out"),
        ("import matplotlib.pyplot\nmatplotlib.pyplot.show()", "`matplotlib.pyplot.show()` is left out"),
        ("from helpers.ranks.launch import launch\nlaunch(\n    print,\n    nproc=2,\n)", "`launch(` is left out"),
        ("from helpers.ranks.launch import launch\na, b = launch(print)", "`a, b = launch(print)` is left out"),
        ("from helpers.figures import drawing\ndrawing.show(1)", "`drawing.show(1)` is left out"),
        ("from IPython.display import HTML\nHTML('a')", "`HTML('a')` is left out"),
        ("x = 1\nx", "What only shows a value in a notebook is left out: cell 1 `x`"),
        ("x = 1\nx, 2\n'text'", "left out: cell 1 `x, 2`, cell 1 `'text'`"),
        ("import matplotlib.pyplot as plt\ndef f():\n    plt.show()", "plt.show() stays; it needs a display"),
    ],
)
def test_what_is_left_out_is_told(source, note):
    text, [told] = exported(f"{source}\nprint('kept')")
    assert note in told and '    print("kept")\n' in text
    assert "left out" not in text and ("is left out." not in note or note.split("`")[-2] not in text)


@pytest.mark.parametrize("source", ["a >> b", "a[0]", "a.b", "x + 1", "[y for y in a]", "y = a", "y = [z for z in a]"])
def test_what_may_have_an_effect_stays(source):
    text, notes = exported(f"a = b = x = dict\n{source}\nprint(1)")
    assert f"    {source}\n" in text and not notes


def test_names_of_an_import_that_is_not_exported_are_known():
    text = script(code("%load_ext helpers\nfrom helpers.ranks.launch import launch"), "launch(print)\nprint(1)")
    assert "launch" not in text and "load_ext" not in text


def test_the_notebooks_own_show_stays():
    text = script("def show(launch):\n    return launch\n\nprint(show(1))")
    assert "print(show(1))" in text and "Notebook only" not in text


def test_cell_magics():
    assert "ls" not in script(code("%%bash\nls"), code(WORK))
    assert "def main(args):\n    x = 1\n    print(x)" in script("%%time\n\nx = 1\nprint(x)")
    assert "cell 1 (`%%ranks 4`) is exported, but %%ranks is for notebooks" in refusal("%%ranks 4\nprint(1)", WORK)


def test_a_comment_goes_with_what_it_is_about():
    main = function(script(code("# kept\n\n# dropped\ndisplay(1)\n# stays\nprint(2)", "export")), "main")
    assert main.endswith("    # kept\n    # stays\n    print(2)")


def test_a_cell_that_raises_is_left_out():
    assert "1 / 0" not in script(code(WORK), code("1 / 0", "raises-exception"))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f():\n    return launch(print)\nprint(f())", "`def f():` uses launch()"),
        ("for i in range(2):\n    display(i)", "`for i in range(2):` uses display()"),
        ("for i in range(2):\n    %timeit i", "`for i in range(2):` uses a magic"),
        ("x = launch(print)\nprint(x)", "reads x, which is bound by a line that only a notebook can run"),
    ],
)
def test_entangled_with_the_notebook(source, expected):
    message = refusal(code("from helpers.ranks.launch import launch"), "import matplotlib.pyplot as plt", source)
    assert expected in message and "05_test, cell 3" in message


# ---- Names


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "def f():\n    return late\nprint(f())",
            "f() reads late, which is bound in 05_test, cell 2 (`late = 1`), not exported",
        ),
        ("def f():\n    return nowhere\nprint(f())", "f() reads nowhere, which no exported cell binds before"),
        ("print(late)", "it reads late, which is bound in 05_test, cell 2"),
        ("print(nowhere)", "it reads nowhere, which no exported cell binds before"),
        ("print(soon)\nsoon = 1", "reads soon, which no exported cell binds before"),
        ("print([nowhere for i in range(2)])", "reads nowhere"),
        ("exec('x = 1')", "works on a notebook's global names"),
        ("print(locals())", "works on a notebook's global names"),
        ("print(vars()['epochs'])", "works on a notebook's global names"),
        ("print(1)\ncompile(len(print('a')))\nlen = 1\nfrom helpers.runtime.process_group import *", "does not say"),
    ],
)
def test_names_refused(source, expected):
    message = refusal(code("epochs: int = 1", "parameters"), code("late = 1"), source)
    assert expected in message and "05_test, cell " in message


# Notebooks, and the names that their scripts declare global. Each script has to print what the notebook's cells print.
GLOBAL = {
    "read by a function": (["model = 1\ndef f():\n    return model\nprint(f())", "model = 2\nprint(f())"], "model"),
    "nested": (["def f():\n    return [(lambda: a)() for _ in 'x']\na = 1\nprint(f())"], "a"),
    "class body": (["model = 1\nclass A:\n    size = model", "model = 2\nprint(A.size, A.__qualname__)"], "A, model"),
    "default": (["model = 1\ndef f(x=model):\n    return x", "model = 2\nprint(f(), f.__qualname__)"], "f, model"),
    "decorator": (["m = lambda f: 3\n@m\ndef g():\n    pass\nprint(g)"], "g, m"),
    "decorator that notes": (
        ["KNOWN = []\ndef note(f):\n    KNOWN.append(f.__name__)\n    return f", "@note\ndef g(): pass\nprint(KNOWN)"],
        None,
    ),
    "parameter": (["def f():\n    return epochs\nprint(f())"], "epochs"),
    "assigned by a function": (["def f():\n    global n\n    n += 1\nn = 2\nf()\nprint(n)"], "n"),
    "assigned by a function in a block": (
        ["if True:\n    def f():\n        global n\n        n = 3\nn = 2\nf()\nprint(n)"],
        "f, n",
    ),
    "with": (["with open('a', 'w') as file:\n    pass\ndef f():\n    return file.name\nprint(f())"], "file"),
    "defined twice": (["def f(): return 1\nprint(f())\ndef f(): return 2\nprint(f())"], "f"),
    "import twice": (["import time\nprint(time.time() > 0)", "from time import time\nprint(time() > 0)"], "time"),
    "import rebound": (["import os\nprint(os.sep)\nos = 1\nprint(os)"], "os"),
    "function rebound": (["def f(): return 1\nf = f()\nprint(f)"], "f"),
    "a builtin, then another": (["print(len('a'))\nlen = 3\nprint(len)"], "len"),
    "by text": (
        ["for k in 'ab':\n    globals()[k] = 1\nc = 2\nprint(globals()['c'], eval('c + epochs'))"],
        "c, epochs, k",
    ),
    "annotated": (["x: int = (\n    1)\ndef f():\n    return x\nprint(f())"], "x"),
    "class with effect": (
        ["import random\nrandom.seed(1)\nclass A:\n    x = random.random()\nprint(A.x)", "print(random.random())"],
        "A",
    ),
    "default that reads": (
        ["import sys\nsys.x = 1\ndef f(x=sys.x):\n    return x\nsys.x = 2\nprint(f())"],
        "f",
    ),
    "by pickle": (
        ["import pickle\nb = object\nclass A(b):\n    pass\nprint(type(pickle.loads(pickle.dumps(A()))).__name__)"],
        "A, b",
    ),
    "two-argument super": (
        [
            "class B:\n    x = 1",
            "class B(B):\n    def __init__(self):\n        super(B, self).__init__()\nprint(B().x)",
        ],
        "B",
    ),
    "identical definitions": (["def f(): return 1", "def f(): return 1\nprint(f())"], None),
    "identical imports": (["import xml.dom as d", "from xml import dom as d\nprint(d.__name__)"], None),
    "own names": (
        ["def main(a): return a\ndef parse_args(): return 3", "args = parse_args()\nprint(main(args), args, epochs)"],
        None,
    ),
    "a global that says nothing": (["x = 1\nprint(x)", "global x\nx = 2\nprint(x)"], None),
}


@pytest.mark.parametrize(("cells", "names"), GLOBAL.values(), ids=GLOBAL)
def test_the_script_does_what_the_notebook_does(cells, names, tmp_path):
    text, notes = exported(code("epochs: int = 1", "parameters"), *cells)
    bodies = {node.name: node.body for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    main = bodies.get("main_", bodies["main"])
    declared = [name for node in main if isinstance(node, ast.Global) for name in node.names]
    assert declared == (names.split(", ") if names else [])
    assert bool(declared) == any(note.startswith("main declares global: ") for note in notes)
    path = tmp_path / "notebook.py"
    path.write_text("\n".join(["epochs = 1", *[cell.replace("global x\n", "") for cell in cells]]))
    expected = subprocess.run([sys.executable, path], capture_output=True, text=True, cwd=tmp_path)
    assert expected.returncode == 0, expected.stderr
    assert run_script(text, tmp_path) == (expected.stdout, 0, "")


@pytest.mark.ranks
def test_the_groups_names_make_way(tmp_path):
    cells = (
        "from time import time\nimport math as os\ndef compare(): return 1",
        "print(time() > 0, os.__name__, compare())",
    )
    text, notes = exported(f"{GROUP}\nfrom helpers.runtime.process_group import print0\nprint0('end')", *cells)
    assert not notes and "import time as time_\n" in text and "def compare_(" in text and "import os as os_\n" in text
    out, status, errors = run_script(text, tmp_path)
    assert (out.splitlines()[-3:], status) == (["cpu", "end", "True math 1"], 0), errors


def test_names_that_are_fine():
    text = script(
        "import math\nfrom math import pi",
        "def f(model):\n    total = sum(x for x in model)\n    return {math.pi: total, **{k: pi for k in model}}",
        "def g():\n    return f([1]), __name__\n\nprint([x for x in range(3)], {y: y for y in 'a'}, {z for z in 'b'})",
        "n = 2\nh = lambda: n  # noqa: E731\nprint(g(), h(), [n for _ in range(n)])",
        "for x in range(2):\n    last = x\nprint(last, x)",
        "socket = 1\nprint(socket)",
    )
    assert "def f(model)" in text


# ---- Worlds of one


@pytest.mark.parametrize(
    "source",
    [
        "rank = 0\nprint(rank)",
        "rank, world_size = 0, 1\nprint(rank, world_size)",
        "rank: int = 0\nprint(rank)",
        "WORLD_SIZE = 1\nprint(WORLD_SIZE)",
        "rank = local_rank = 0\nprint(rank, local_rank)",
        "def f():\n    rank = 0\n    return rank\nprint(f())",
        "import torch.distributed as dist\ndist.init_process_group('gloo', rank=0, world_size=1)",
        "import torch.distributed as dist\ndist.init_process_group('gloo', init_method='file:///shared/store')",
        "import torch.distributed as dist\nat = 'a'\ndist.init_process_group('gloo', init_method=f'file://{at}')",
        "import torch.distributed as dist\nurl = 'file:///shared/x'\ndist.init_process_group('gloo', url)",
        "import torch.distributed as dist\ndist.init_process_group('gloo', store=dist.HashStore())",
        "import torch.distributed as dist\ndist.init_process_group('gloo', None, None, 1)",
        "import torch.distributed as dist\ndist.init_process_group('gloo', None, None, size, 0)",
        "import os\nos.environ.update(RANK='0')",
        "import os\nos.environ.update({'WORLD_SIZE': '1'})",
        "import os\nos.putenv('RANK', '0')",
        "import torch.distributed as dist\ndef f(rank=0):\n    dist.init_process_group('gloo', rank=rank)\nf()",
        "from torch.utils.data import DistributedSampler\nprint(DistributedSampler([], num_replicas=2))",
        "import os\nos.environ['RANK'] = '0'",
        "import os\nos.environ['MASTER_PORT'] = '29500'",
    ],
)
def test_hard_coded_ranks_refused(source):
    with pytest.raises(ExportError) as caught:
        script_from_notebook(notebook("size = 1", source), "05_test", allow_single=True)
    message = caught.value.problems[0].replace("cell 2", "cell 1")
    assert "05_test, cell 1" in message and "hard-codes" in message and "start_process_group()" in message


def test_hard_coded_parameter_refused():
    assert "hard-codes `world_size = 1`" in refusal(code("world_size: int = 1  # ranks", "parameters"), WORK)


def test_ranks_that_are_asked_for_are_fine():
    script(
        "import os\nimport torch.distributed as dist",
        "rank = 0\nif 'RANK' in os.environ:\n    rank = int(os.environ['RANK'])",
        "world_size = int(os.environ['WORLD_SIZE'])\ndist.init_process_group('gloo', rank=rank, world_size=world_size)",
    )
    script("address = 'file:///data'\nprint(address)")
    script("import os\nos.environ.setdefault('RANK', '0')  # torchrun's comes first")
    script(
        "def last(ranks):\n    rank = 0\n    while rank in ranks:\n        rank += 1\n    return rank\nprint(last([0]))"
    )


# ---- One job, not N


PLAIN = [
    "import torch\nfrom torch.utils.data import DataLoader",
    "loader = DataLoader(range(8), 4, shuffle=True)",
    "model = torch.nn.Linear(1, 1).cuda()\noptimizer = torch.optim.SGD(model.parameters())",
    "for x in loader:\n    model(x).sum().backward()",
    "torch.save(model, 'model.pt')",
]
JOIN = "import torch.distributed as dist\ndist.init_process_group()\ndist.destroy_process_group()"


def test_a_notebook_without_a_group_is_told_what_to_change():
    with pytest.raises(ExportError) as caught:
        exported(*PLAIN, allow_single=False)
    lines = str(caught.value).splitlines()
    assert "05_test starts no process group: N ranks would train N models and overwrite" in lines[0]
    assert lines[1:-1] == [
        "  before these lines: device = start_process_group() (chapter 1)",
        "  cell 2: `DataLoader(range(8), 4, shuffle=True)`: "
        "give it sampler=DistributedSampler(dataset) in place of shuffle (chapter 3)",
        "  cell 3: `torch.nn.Linear(1, 1).cuda()`: the device that start_process_group() returned (chapter 1)",
        "  cell 3: `model.parameters()`: before it, model = DistributedDataParallel(model.to(device)) (chapter 4)",
        "  cell 5: `torch.save(model, 'model.pt')`: on one rank only, if dist.get_rank() == 0 (chapter 4)",
    ]
    assert "--allow-single" in lines[-1]
    assert "def main" in exported(*PLAIN)[0]


def test_a_group_whose_ranks_do_not_work_together_is_told_so():
    with pytest.raises(ExportError, match="wraps no model and calls no collective: N ranks would train N models"):
        exported(*PLAIN, JOIN, allow_single=False)
    for together in ("model = torch.nn.parallel.DistributedDataParallel(model)", "dist.all_reduce(model.weight.grad)"):
        exported(*PLAIN, JOIN, together, allow_single=False)
    exported(JOIN, allow_single=False)  # no training
    exported("from accelerate import Accelerator\nprint(Accelerator())", allow_single=False)


@pytest.mark.parametrize(
    "source",
    [
        "import torch.multiprocessing as mp\nmp.spawn(print, nprocs=2)",
        "from torch.multiprocessing import spawn\nspawn(print, nprocs=2)",
        "from accelerate import notebook_launcher\nnotebook_launcher(print, (), num_processes=2)",
        "import lightning as L\nL.Trainer(strategy='ddp_notebook')",
        "import torch\ndef f():\n    torch.distributed.init_process_group()\n"
        "torch.multiprocessing.Process(target=f).start()",
    ],
)
def test_launchers_inside_of_torchrun_are_refused(source):
    assert "starts ranks, but torchrun starts the script's" in refusal(source)
    script("import multiprocessing\nmultiprocessing.Process(target=print).start()", "rng = dict\nrng.spawn(3)")


def test_all_problems_come_at_once():
    cells = (
        code("x: list[int] = [1]\nx: str = 3", "parameters"),
        "rank = 0\nprint(rank)",
        "from math import *\nprint(1)",
    )
    with pytest.raises(ExportError) as caught:
        script_from_notebook(notebook(*cells), "05_test")
    assert len(caught.value.problems) == 4


# ---- What is imported, and when

EARLY_SETTINGS = {
    "sys.path": (["import sys", "folder = 'here'\nsys.path.insert(0, folder)", "import mine\nprint(mine.x, folder)"]),
    "os.environ": (["import os\nos.environ['MINE'] = '2'\nimport mine\nprint(mine.environ)"]),
    "conditional": (
        ["import sys\nif 'here' not in sys.path:\n    sys.path.append('here')\nimport mine\nprint(mine.x)"]
    ),
    "patched": (["import math\nmath.mine = 3\nimport mine\nprint(mine.patched)"]),
    "order": (["import second\nimport first\nprint(first.log)"]),
}


@pytest.mark.parametrize("cells", EARLY_SETTINGS.values(), ids=EARLY_SETTINGS)
def test_imports_come_after_what_they_depend_on(cells, tmp_path):
    (tmp_path / "here").mkdir()
    mine = "import math, os\nx = __file__.split('/')[-2:]\nenviron = os.environ.get('MINE')\n"
    mine += "patched = getattr(math, 'mine', 0)"
    (tmp_path / "here" / "mine.py").write_text(mine)
    if "sys" not in cells[0]:
        (tmp_path / "mine.py").write_text(mine)
    (tmp_path / "first.py").write_text("import sys\nlog = 'second' in sys.modules")
    (tmp_path / "second.py").write_text("")
    (tmp_path / "notebook.py").write_text("\n".join(cells))
    expected = subprocess.run([sys.executable, "notebook.py"], capture_output=True, text=True, cwd=tmp_path)
    assert expected.returncode == 0, expected.stderr
    assert run_script(script(*cells), tmp_path) == (expected.stdout, 0, "")


def test_a_setting_that_needs_main_is_refused():
    cells = (
        code("gpu: str = '0'", "parameters"),
        "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = gpu",
        "import torch\nprint(torch)",
    )
    assert "imports may depend on `os.environ['CUDA_VISIBLE_DEVICES'] = gpu`, which reads gpu" in refusal(*cells)


def test_a_moved_import_is_told():
    _, [note] = exported("print(1)", "import pandas\nprint(pandas)")
    assert note.startswith("05_test, cell 2 (`import pandas`): `import pandas` stands at the top, above `print(1)`")
    assert exported("print(1)", "import torch\nimport json\nprint(torch, json)")[1] == []


# ---- The book's own chapters


BUDGET = {"07_tensor_parallel": 410, "11_trainer": 450}  # lines; 500 for the others
SHORT = {"04_ddp": (130, 45)}  # lines that are not blank: of the script, and of its part for the process group


def test_the_chapters_scripts_are_short_and_nothing_is_told_of_them(capsys):
    table, wrong = [], []
    for path in commands.chapters():
        text, notes = script_and_notes(read_notebook(path), path.stem)
        written, most = text.splitlines(), SHORT.get(path.stem, (500, 45))
        count = [sum(bool(line) for line in part) for part in (written, written[group_starts(written) :])]
        table.append(f"{path.stem:24}{len(written):6}{count[0]:11}{count[1]:14}")
        if len(written) > BUDGET.get(path.stem, 500) or count[0] > most[0] or count[1] > most[1] or notes:
            wrong.append(f"{table[-1]} {notes}")
        if "\n    global " in text or max(map(len, written)) > 88:
            wrong.append(f"{path.stem}: a global name, or a line of more than 88 columns")
    with capsys.disabled():
        print("", f"{'script':24}{'lines':>6}{'not blank':>11}{'process group':>14}", *table, sep="\n")
    assert not wrong, "\n".join(wrong)


def group_starts(written):
    """The number of the line where a script's last part begins, which starts and stops the process group."""
    return next(number for number, line in enumerate(written) if line.startswith("def start_process_group("))


@pytest.mark.parametrize(
    "source",
    [
        "\n".join(["X0 = 1", *[f"X{i + 1} = X{i} + 1" for i in range(1600)], "print(X1600)"]),
        "\n".join([*[f"x{i} = {i}" for i in range(4000)], "print(x1)"]),
        "\n".join(["class A0: pass", *[f"class A{i + 1}(A{i}): pass" for i in range(1600)], "print(A1600)"]),
    ],
    ids=["constants", "idle assignments", "classes"],
)
@pytest.mark.timeout(60)  # seconds: 51 and 15 were once needed for half as many constants and assignments
def test_long_notebooks(source):
    script(source)


# ---- Notebooks that are not


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1\ny = = 2", "has a syntax error in line 2"),
        ("x = await f()", "'await' outside function"),
        ("return 1", "'return' outside function"),
        ("x = 1\x00", "null bytes"),
        ("%time x\nfor", "has a syntax error"),
    ],
)
def test_syntax_errors(source, expected):
    message = refusal(WORK, source)
    assert expected in message and "05_test, cell 2 (`" in message


def test_what_is_right_in_a_cell_and_wrong_in_main():
    assert "import * only allowed at module level" in refusal("if True:\n    from math import *")


def test_a_syntax_error_in_a_cell_that_is_not_exported_does_not_matter():
    assert WORK.replace("'", '"') in script(WORK, code("x = = 1"))


@pytest.mark.parametrize(
    "cells", [(), (code(""),), ("# Title",), ("def f():\n    pass",), ("x = 3",), (code("%%bash\nls"),)]
)
def test_nothing_to_run(cells):
    assert "has no statement that a script could run" in refusal(*cells)


def test_another_language():
    other = notebook(WORK)
    other.metadata.kernelspec = {"name": "julia", "display_name": "Julia", "language": "julia"}
    with pytest.raises(ExportError, match="05_test is a notebook in julia"):
        script_from_notebook(other, "05_test")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot be read: No such file"),
        ("print(1)", "is not a notebook"),
        ("[1]", "is not a notebook"),
        ('{"a": 1}', "is not a notebook"),
        (b"\xff\xfe\x00", "it is not a text file"),
        ('{"nbformat": 3, "nbformat_minor": 0, "worksheets": [], "metadata": {}}', "has notebook format 3"),
        ('{"nbformat": 5, "nbformat_minor": 0, "cells": [], "metadata": {}}', "has notebook format 5"),
        ('{"nbformat": 4, "nbformat_minor": 4, "cells": 3, "metadata": {}}', "is not a valid notebook"),
        ('{"nbformat": 4, "nbformat_minor": 4, "metadata": {}}', "is not a valid notebook"),
    ],
)
def test_files_that_are_no_notebooks(tmp_path, content, expected):
    path = tmp_path / "x.ipynb"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ExportError) as caught:
        read_notebook(path)
    assert expected in str(caught.value) and len(str(caught.value).splitlines()) == 2


def test_export_never_executes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = script("from pathlib import Path\nPath('executed').touch()", "!touch executed", "%run executed")
    assert "touch()" in text and not os.listdir()


# ---- The command line and nbconvert


@pytest.fixture
def sample(tmp_path):
    path = tmp_path / "07_sample.ipynb"
    nbformat.write(notebook("# Sample", GROUP), path)
    return path


def test_the_package_is_a_command(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for arguments, status in ((["--help"], 0), (["export", "nothing.ipynb"], 1), ([], 2)):
        line = [sys.executable, "-m", "helpers", *arguments]
        done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == status and "Traceback" not in done.stderr
        assert bool(done.stdout) == (status == 0) and bool(done.stderr) == (status != 0)


def test_export_command(helpers, sample, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = Path("scripts", "07_sample.py")
    assert helpers("export", "07_sample.ipynb") == (0, f"{script}\n", "")
    assert script.read_text() == script_from_notebook(read_notebook(sample), "07_sample")
    assert os.listdir("scripts") == ["07_sample.py"]
    umask = os.umask(0)
    os.umask(umask)
    assert script.stat().st_mode & 0o777 == 0o666 & ~umask

    written = script.stat().st_mtime_ns
    assert helpers("export", sample, "--out", "scripts")[0] == 0
    assert script.stat().st_mtime_ns == written  # a file with the same text is not written again

    script.write_text("mine")
    status, _, errors = helpers("export", sample)
    assert status == 1 and "exists and differs" in errors and "--force" in errors
    assert script.read_text() == "mine"
    assert helpers("export", sample, "--force")[0] == 0
    assert '"""Sample.' in script.read_text()


def test_export_into_what_is_no_folder(helpers, sample, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below", "/dev/null"):
        status, _, errors = helpers("export", sample, "--out", out)
        assert status == 1 and "cannot be written" in errors and "--out DIR" in errors
    folder = tmp_path / "taken"
    (folder / "07_sample.py").mkdir(parents=True)
    status, _, errors = helpers("export", sample, "--out", folder, "--force")
    assert status == 1 and "cannot be written" in errors
    assert os.listdir(folder) == ["07_sample.py"]


def test_a_write_that_fails_leaves_nothing(helpers, sample, tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(os, "replace", full)  # a folder's mode would not stop root
    status, _, errors = helpers("export", sample, "--out", tmp_path / "out")
    assert status == 1 and "07_sample.py cannot be written: No space left on device" in errors
    assert os.listdir(tmp_path / "out") == []


def test_a_refused_notebook_writes_nothing(helpers, tmp_path):
    path = tmp_path / "bad.ipynb"
    nbformat.write(notebook("rank = 0\nprint(rank)"), path)
    status, out, errors = helpers("export", path, "--out", tmp_path / "out")
    assert status == 1 and errors.startswith("error: bad, cell 1 (`rank = 0`) hard-codes `rank = 0`")
    assert out == "" and not (tmp_path / "out").exists()


def test_chapters_are_found_by_number_and_name(helpers, tmp_path, monkeypatch):
    for name in ("03_samplers", "04_ddp", "template"):
        nbformat.write(notebook(f"# The **{name}**", GROUP), tmp_path / f"{name}.ipynb")
    monkeypatch.setattr(commands, "NOTEBOOKS", tmp_path)
    for chapter in ("4", "04", "04_ddp", "ddp", str(tmp_path / "04_ddp.ipynb")):
        assert commands.find_notebook(chapter) == tmp_path / "04_ddp.ipynb"
    with pytest.raises(ExportError, match="'fsdp'.\nChapters: 03_samplers, 04_ddp"):
        commands.find_notebook("fsdp")
    assert helpers("export", "--all", "--out", tmp_path / "out")[0] == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["03_samplers.py", "04_ddp.py"]
    assert helpers("list")[1].split() == ["03_samplers", "The", "03_samplers", "04_ddp", "The", "04_ddp"]


@pytest.mark.parametrize(
    ("arguments", "status", "expected"),
    [
        (["--help"], 0, "write a chapter's script"),
        (["export", "--help"], 0, "its number (4), its name"),
        ([], 2, "required: COMMAND"),
        (["export"], 2, "CHAPTER --all is required"),
        (["export", "nothing-like-it"], 1, "no chapter or notebook 'nothing-like-it'.\nChapters: "),
        (["export", "notebooks"], 1, "no chapter or notebook 'notebooks'"),
        (["run", "04", "--nproc", "0"], 2, "'0' is not a whole number above 0"),
        (["run", "04", "--nproc", "x"], 2, "'x' is not a whole number above 0"),
        (["run", "04", "--nproc", "-1"], 2, "--nproc"),
        (["run", "04", "stray"], 2, "put two dashes before"),
    ],
)
def test_usage(helpers, arguments, status, expected):
    done, out, errors = helpers(*arguments)
    assert done == status and expected in out + errors


def test_nbconvert(sample):
    text, resources = TorchrunExporter().from_filename(str(sample))
    assert text == script_from_notebook(read_notebook(sample), "07_sample")
    assert resources["output_extension"] == ".py"


def test_nbconvert_refuses_other_formats(tmp_path):
    path = tmp_path / "old.ipynb"
    path.write_text(json.dumps({"nbformat": 3, "nbformat_minor": 0, "worksheets": [], "metadata": {}}))
    with pytest.raises(ExportError, match="format 3"):
        TorchrunExporter().from_filename(str(path))
