"""Notebooks to scripts: every rule and every refusal, on notebooks of a few cells."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from helpers.export import chapters as commands
from helpers.export import inline
from helpers.export import script as export
from helpers.export.inline import PLUMBING
from helpers.export.script import ExportError, TorchrunExporter, read_notebook, script_from_notebook
from helpers.export.source import split

ROOT = Path(__file__).parent.parent
WORK = "print('work')"


def code(source, *tags):
    return new_code_cell(source, metadata={"tags": list(tags)} if tags else {})


def notebook(*cells):
    """A notebook: code cells as they are, strings as cells tagged export, strings that begin with # as markdown."""
    made = []
    for cell in cells:
        if isinstance(cell, str):
            cell = new_markdown_cell(cell) if cell.startswith("# ") or cell.startswith("## ") else code(cell, "export")
        made.append(cell)
    return new_notebook(cells=made)


def script(*cells):
    """The exported script, which compiles and which ruff finds nothing wrong with."""
    text = script_from_notebook(notebook(*cells), "05_test")
    compile(text, "05_test.py", "exec")
    ruff("check", "--select=E,F,I,B,UP", text=text)
    return text


def ruff(*command, text):
    style = ["--isolated", "--line-length=120", "--target-version=py311", "-"]
    done = subprocess.run([sys.executable, "-m", "ruff", *command, *style], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + text


def refusal(*cells):
    """The message with which the notebook is refused: one or two lines."""
    with pytest.raises(ExportError) as caught:
        script_from_notebook(notebook(*cells), "05_test")
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
    text = script("# Two ranks\n\nWhy two? Because.", code("epochs: int = 2  # passes", "parameters"), "print(epochs)")
    ruff("format", "--check", text=text)
    tree = ast.parse(text)
    assert ast.get_docstring(tree).startswith("Two ranks.\n\nWhy two?\n\nOne GPU")
    for line in (
        "torchrun --nproc-per-node=1 05_test.py",
        "torchrun --nproc-per-node=gpu 05_test.py",
        "--nnodes=2 --node-rank=0 --master-addr=HOST --nproc-per-node=gpu 05_test.py",
    ):
        assert line in ast.get_docstring(tree)
    assert top_level(text)[-2:] == ["parse_args", "main"]
    assert function(text, "main").endswith("epochs = args.epochs\n\n    print(epochs)")
    assert "    @record\n" in function(text, "run_and_exit")
    assert text.endswith('\n\nif __name__ == "__main__":\n    run_and_exit(main, parse_args())\n')


def test_only_tagged_cells_or_all():
    assert "second" not in script(WORK, code("print('second')"))
    assert "second" in script(code(WORK), code("print('second')"))


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


def test_an_import_that_nothing_uses_is_left_out():
    assert "json" not in script("import json\nprint(1)")


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


def test_headings_become_comments():
    text = script(
        "# Title",
        "## The **model** of `x` {term}`rank <Rank>` and [link](http://a.b)",
        "def f():\n    return 1",
        "## Not of this",
        code("x = 1"),
        "## Train\n\n```bash\n# no heading\n```",
        "print(f())",
        "print(2)",
    )
    assert "\n# The model of x rank and link\n\n\ndef f():" in text
    assert function(text, "main").endswith("\n    # Train\n    print(f())\n\n    print(2)")
    assert "Not of this" not in text and "no heading" not in text and "# Title" not in text


def test_constants():
    text = script(
        "import torch\nCLASSES = 10\nSIZES = (CLASSES, 2 * CLASSES)\nDTYPE = torch.float32",
        "LENGTH = len(SIZES)\nlower = 3\n\ndef f():\n    return CLASSES, SIZES, DTYPE",
        "print(f(), LENGTH, lower)",
    )
    head, _, main = text.partition("def main(args)")
    assert "\nCLASSES = 10\nSIZES = (CLASSES, 2 * CLASSES)\nDTYPE = torch.float32\n" in head
    assert "LENGTH = len(SIZES)" in main and "lower = 3" in main
    assert "\n    X = 1\n    X = 2\n" in script("X = 1\nX = 2\nprint(X)")


def test_order():
    text = script(
        "# Title",
        "from helpers.runtime.data import digits\n"
        "from helpers.runtime.process_group import print0, start_process_group\nSIZE = 8",
        "## The model",
        "def model():\n    print0(1)\n    return SIZE\n\n\nclass Trainer:\n    def fit(self):\n        print0(model())",
        "## Train",
        "device = start_process_group()\nprint0(device, digits())\nTrainer().fit()",
    )
    assert top_level(text)[:4] == ["digits", "model", "Trainer", "launcher_variables"]
    assert top_level(text)[-4:] == ["run_and_exit", "Manual", "parse_args", "main"]
    places = [text.index(f"\n{line}\n") for line in ("SIZE = 8", "# The model", f"# {PLUMBING}", "def parse_args():")]
    assert places == sorted(places)
    assert text.index("\nSIZE = 8\n") < text.index("\ndef digits(")
    assert text.index(f"\n# {PLUMBING}\n") < text.index("\ndef launcher_variables():")


EARLY = {
    "default": "def f(say=print0):\n    return say",
    "decorator": "def twice(call):\n    print0('twice')\n    return call\n\n\n@twice\ndef f():\n    pass",
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
        "## Before",
        f"def g():\n    print0(1)\n\n\n{source}\n\n\ndef h():\n    return g, f\n\n\nprint(h())",
    )
    order = [name for name in top_level(text) if name in ("g", "print0", "f", "h", "start_process_group")]
    assert order == ["g", "print0", "f", "h", "start_process_group"]
    assert text.count("# Before\n") == 2  # above g, and once more in main
    exec(text[: text.index("def main(args)")], {"__name__": "05_test"})  # no NameError


def test_a_constant_may_use_what_is_copied(monkeypatch):
    copied = split("LEAST = 2\n\n\ndef least():\n    return LEAST", "helpers.runtime.data")
    found = {name: [statement] for statement in copied for name in statement.binds}
    monkeypatch.setattr(inline, "runtime_module", lambda module, real=inline.runtime_module: {**real(module), **found})
    monkeypatch.setattr(export, "runtime_module", inline.runtime_module)
    text = script("from helpers.runtime.data import LEAST, least\nMOST = LEAST + 1\nprint(MOST, least())")
    assert "\nLEAST = 2\nMOST = LEAST + 1\n\n\ndef least():" in text


def test_title_without_heading_and_with_odd_characters():
    assert script(WORK).startswith('"""05_test.\n\nOne GPU')
    text = script('# A """q""" \\x', WORK)
    assert "'''q'''" in ast.get_docstring(ast.parse(text))


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
    """What a script that needs no torchrun prints, its exit status and its errors."""
    path = tmp_path / "script.py"
    path.write_text(text)
    done = subprocess.run([sys.executable, path, *flags], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    return done.stdout, done.returncode, done.stderr


def test_help_reads_like_a_manual(tmp_path):
    parameters = "# What is trained.\nepochs: int = 10\nwidth: int = 8\n# What you see.\nlog_every: int = 5"
    text = script("# Title\n\nWhy 100%? Because.", code(parameters, "parameters"), "print(epochs, width, log_every)")
    manual, status, _ = run_script(text, tmp_path, "--help")
    assert status == 0 and "\nTitle.\n\nWhy 100%?\n\nOne GPU, or a CPU:\n    torchrun" in manual
    trained, seen = manual.index("\nWhat is trained:\n"), manual.index("\nWhat you see:\n")
    assert trained < manual.index("  --epochs") < manual.index("  --width") < seen < manual.index("  --log-every")


def test_parameters_become_flags(tmp_path):
    shown = "print([epochs, learning_rate, momentum, name, shuffle, folder, steps, backend, level, guess])"
    text = script(code(PARAMETERS, "parameters"), shown)
    assert "default=1e-3" in text
    values, status, _ = run_script(text, tmp_path)
    assert (values, status) == ("[10, 0.001, 0, 'run', True, None, None, 'gloo', None, 0.5]\n", 0)
    flags = "--epochs 3 --learning-rate .5 --momentum 1 --name x --no-shuffle --folder f --steps 4 --backend nccl"
    values, status, _ = run_script(text, tmp_path, *flags.split(), "--level", "2", "--guess", "2")
    assert (values, status) == ("[3, 0.5, 1.0, 'x', False, 'f', 4, 'nccl', 2, 2.0]\n", 0)
    help_text = " ".join(run_script(text, tmp_path, "--help")[0].split())
    assert "passes over the training set (100% of it) (default: 10)" in help_text
    assert 'step size, "SGD" (default: 0.001)' in help_text
    assert "--shuffle, --no-shuffle shuffle the images" in help_text
    _, status, errors = run_script(text, tmp_path, "--backend", "mpi", "--epochs", "1")
    assert status == 2 and "invalid choice: 'mpi'" in errors


def test_only_parameters_that_main_uses_become_its_names():
    text = script(code("a: int = 1\nb: int = 2", "parameters"), "print(a)")
    assert "a = args.a" in text and "b = args.b" not in text and '"--b"' in text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x: list[int] = [1]", "type list[int]"),
        ("x: int = 1.5", "does not fit its type"),
        ("x: bool = 1", "does not fit its type"),
        ("x: str = None", "does not fit its type"),
        ("x: Literal['a', 'b'] = 'c'", "does not fit its type"),
        ("x: int = len('a')", "is no literal"),
        ("x = None", "Write x: type = None"),
        ("x: int", "`x: int` is no parameter"),
        ("x = y = 1", "is no parameter"),
        ("print(1)", "is no parameter"),
        ("x: int = 1\nx: int = 2", "the parameter x twice"),
        ("args: int = 1", "needs the name args"),
    ],
)
def test_parameters_refused(source, expected):
    message = refusal(code(source, "parameters"), WORK)
    assert expected in message and "05_test, cell 1 (`x" in message.replace("`args", "`x").replace("`print", "`x")


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
    assert "start_process_group" not in text and "def run_and_exit" in text


def test_inlines_transitively_in_the_order_of_the_source():
    text = script("from helpers.runtime.process_group import start_process_group\nprint(start_process_group())")
    source = (ROOT / "helpers/runtime/process_group.py").read_text()
    mine = [name for name in top_level(text) if name not in ("Manual", "parse_args", "main")]
    assert {"launcher_variables", "start_process_group", "stop_process_group", "run_and_exit"} <= set(mine)
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
        "import torch.distributed as dist\ntry:\n    print(dist)\nfinally:\n    dist.destroy_process_group()",
        "import torch.distributed as dist\ndef end():\n    dist.destroy_process_group()\n\nend()",
        "from torch.distributed import destroy_process_group\ndestroy_process_group()",
        "import torch.distributed as dist\ndist.init_process_group('gloo')",
    ],
)
def test_every_end_of_the_group_becomes_one_that_does_not_hang(source):
    text = script(source)
    own = [function(text, name) for name in top_level(text) if name in ("end", "main")]
    assert "".join(own).count("    stop_process_group()") == 1
    assert text.count("destroy_process_group()") == 1  # in stop_process_group


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from helpers.runtime import process_group\nprint(process_group)", "takes a whole module"),
        ("import helpers.runtime.data\nprint(helpers.runtime.data.digits())", "takes a whole module"),
        ("import helpers\nprint(helpers)", "takes a whole module"),
        ("from helpers.runtime.data import nothing\nprint(nothing)", "there is no such name"),
        ("from helpers.runtime.data import digits as d\nprint(d())", "renames it"),
        ("from helpers.runtime.data import *\nprint(1)", "hides what it imports"),
        ("from math import *\nprint(pi)", "hides what it imports"),
        ("from . import x\nprint(x)", "hides what it imports"),
        ("def f():\n    from helpers.runtime.data import digits\n    return digits()\nprint(f())", "in a block"),
        ("if True:\n    import helpers.runtime.data", "in a block"),
        (
            "from helpers.runtime.data import digits\ndef digits():\n    pass\nprint(digits())",
            "helpers.runtime.data binds too",
        ),
        (
            "from helpers.runtime.data import digits\ndigits = digits()\nprint(digits)",
            "assigns digits, which helpers.runtime.data",
        ),
    ],
)
def test_inlining_refused(source, expected):
    message = refusal(source)
    assert expected in message and "05_test, cell 1" in message


# ---- Notebook only


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("%matplotlib inline", "%matplotlib inline"),
        ("!pip list", "!pip list"),
        ("%timeit print(1)", "%timeit print(1)"),
        ("print?", "print?"),
        ("files = !ls", "files = !ls"),
        ("display(1)", "display(1)"),
        ("get_ipython().run_line_magic('pwd', '')", "get_ipython().run_line_magic('pwd', '')"),
        ("import matplotlib.pyplot as plt\nplt.plot([1])\nplt.show()", "plt.show()"),
        ("import matplotlib.pyplot\nmatplotlib.pyplot.show()", "matplotlib.pyplot.show()"),
        ("from helpers.ranks.launch import launch", "from helpers.ranks.launch import launch"),
        ("from helpers.ranks.launch import launch\nlaunch(\n    print,\n    nproc=2,\n)", "launch( …"),
        ("from helpers.ranks.launch import launch\na, b = launch(print)", "a, b = launch(print)"),
        ("from helpers.figures import drawing\ndrawing.show(1)", "drawing.show(1)"),
        ("from IPython.display import HTML\nHTML('a')", "HTML('a')"),
        ("x = 1\nx", "x"),
        ("x = 1\nx + 1, [y for y in 'a']", "x + 1, [y for y in 'a']"),
        ("'''text'''", "'''text'''"),
    ],
)
def test_dropped_with_a_line_that_says_so(source, line):
    text = script(f"{source}\nprint('kept')")
    assert f"    # Notebook only: {line}\n" in text and '    print("kept")\n' in text


def test_names_of_an_import_that_is_not_exported_are_known():
    text = script(code("%load_ext helpers\nfrom helpers.ranks.launch import launch"), "launch(print)\nprint(1)")
    assert "# Notebook only: launch(print)" in text and "load_ext" not in text


def test_the_notebooks_own_show_stays():
    text = script("def show(launch):\n    return launch\n\nprint(show(1))")
    assert "print(show(1))" in text and "Notebook only" not in text


def test_cell_magics():
    assert "# Notebook only: a %%bash cell" in script(code("%%bash\nls"), code(WORK))
    text = script("%%time\n\nx = 1\nprint(x)")
    assert "    # Notebook only: %%time\n    x = 1\n    print(x)" in text
    assert "cell 1 (`%%ranks 4`) is exported, but %%ranks is for notebooks" in refusal("%%ranks 4\nprint(1)", WORK)


def test_a_name_that_only_the_notebook_shows_is_left_out():
    main = function(
        script("x = 1\ny = [x for x in 'a']\nz: int = 2\nos = len('a')\nprint(os, z)\nx\ny\nprint()"), "main"
    )
    for line in ("x = 1", "y = [x for x in 'a']", "x", "y"):
        assert f"    # Notebook only: {line}\n" in main
    assert "    z: int = 2\n" in main
    main = function(script(code("n: int = 1", "parameters"), "a = n\nb = a\nc = 0\nc += 1\nd = 2\ndel d"), "main")
    assert main.endswith("only: b = a\n    c = 0\n    c += 1\n    d = 2\n    del d") and "args.n" not in main


def test_a_comment_goes_with_what_it_is_about():
    main = function(script(code("# kept\n\n# dropped\ndisplay(1)\n# stays\nprint(2)", "export")), "main")
    assert main.endswith("    # kept\n\n    # Notebook only: display(1)\n    # stays\n    print(2)")


def test_a_cell_that_raises_is_left_out():
    text = script(code(WORK), code("1 / 0", "raises-exception"))
    assert "# Notebook only: 1 / 0 (a cell that raises)" in text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f():\n    return launch(print)\nprint(f())", "`def f():` uses launch()"),
        ("def f():\n    plt.show()\nprint(f())", "uses plt.show()"),
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
        ("model = 1\ndef f():\n    return model\nprint(f())", "f() reads model, which only main binds"),
        ("a = b = 1\ndef f():\n    return a + b\nprint(f())", "f() reads a and b, which only main"),
        (
            "def f():\n    def g():\n        return [model for _ in range(2)]\n    return g\nmodel = f()",
            "f.g() reads model",
        ),
        ("class A:\n    def f(self):\n        return lambda: model\nmodel = A()", "A.f() reads model"),
        ("class A:\n    size = model\nmodel = 1\nprint(A)", "A() reads model"),
        ("def f(x=model):\n    return x\nmodel = 1\nprint(f())", "the head of f reads model"),
        ("@model\ndef f():\n    pass\nmodel = 1\nprint(f())", "the head of f reads model"),
        ("def f():\n    return epochs\nprint(f())", "f() reads epochs, which only main binds"),
        ("def f():\n    global n\n    n = 1\nn = 2\nprint(f(), n)", "assigns n, which"),
        ("LENGTH = len('a')\ndef f():\n    return LENGTH\nprint(f())", "f() reads LENGTH"),
        ("with open('a') as file:\n    pass\ndef f():\n    return file\nprint(f())", "f() reads file"),
        (
            "def f():\n    return late\nprint(f())",
            "f() reads late, which is bound in 05_test, cell 2 (`late = 1`), not exported",
        ),
        ("def f():\n    return nowhere\nprint(f())", "f() reads nowhere, which no exported cell binds before"),
        ("print(late)", "it reads late, which is bound in 05_test, cell 2"),
        ("print(nowhere)", "it reads nowhere, which no exported cell binds before"),
        ("print(soon)\nsoon = 1", "reads soon, which no exported cell binds before"),
        ("print([nowhere for i in range(2)])", "reads nowhere"),
        ("def f(): pass\ndef f(): return 1\nprint(f())", "binds f, which"),
        ("import time\nfrom time import time\nprint(time)", "binds time, which"),
        ("import os\nos = 1\nprint(os)", "assigns os, which"),
        ("def f(): pass\nf = f()\nprint(f)", "assigns f, which"),
        ("def main(): pass\nmain()", "binds main, which the script itself binds too"),
        ("from time import time\nprint(time())", "binds time, which"),
    ],
)
def test_names_refused(source, expected):
    cells = code("epochs: int = 1", "parameters"), code("late = 1"), source
    if source.startswith("from time import time\n"):  # the process group's module uses the module time
        cells = *cells, "from helpers.runtime.process_group import start_process_group\nstart_process_group()"
    message = refusal(*cells)
    assert expected in message and "05_test, cell " in message


def test_names_that_are_fine():
    text = script(
        "import math\nfrom math import pi",
        "def f(model):\n    total = sum(x for x in model)\n    return {math.pi: total, **{k: pi for k in model}}",
        "def g():\n    return f([1]), __name__\n\nprint([x for x in range(3)], {y: y for y in 'a'}, {z for z in 'b'})",
        "n = 2\nh = lambda: n  # noqa: E731\nprint(g(), h(), [n for _ in range(n)])",
        "for x in range(2):\n    last = x\nprint(last, x)",
        "traceback = 1\nprint(traceback)",
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
        "import torch.distributed as dist\ndef f(rank=0):\n    dist.init_process_group('gloo', rank=rank)\nf()",
        "from torch.utils.data import DistributedSampler\nprint(DistributedSampler([], num_replicas=2))",
        "import os\nos.environ['RANK'] = '0'",
        "import os\nos.environ['MASTER_PORT'] = '29500'",
    ],
)
def test_hard_coded_ranks_refused(source):
    message = refusal(source)
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
    script(
        "def last(ranks):\n    rank = 0\n    while rank in ranks:\n        rank += 1\n    return rank\nprint(last([0]))"
    )


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
    assert "used prior to global declaration" in refusal("x = 1\nprint(x)", "global x\nx = 2")
    assert "import * only allowed at module level" in refusal("if True:\n    from math import *")


def test_a_syntax_error_in_a_cell_that_is_not_exported_does_not_matter():
    assert WORK.replace("'", '"') in script(WORK, code("x = = 1"))


@pytest.mark.parametrize("cells", [(), (code(""),), ("# Title",), ("def f():\n    pass",), (code("%%bash\nls"),)])
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


def test_export_never_executes(tmp_path):
    trace = tmp_path / "executed"
    text = script(f"from pathlib import Path\nPath({str(trace)!r}).touch()", f"!touch {trace}", f"%run {trace}")
    assert "touch()" in text and not trace.exists()


# ---- The command line and nbconvert


@pytest.fixture
def sample(tmp_path):
    path = tmp_path / "07_sample.ipynb"
    nbformat.write(notebook("# Sample", WORK), path)
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
    assert script.stat().st_mtime_ns == written  # the same text is not written again

    script.write_text("mine")
    status, _, errors = helpers("export", sample)
    assert status == 1 and "exists and differs" in errors and "--force" in errors
    assert script.read_text() == "mine"
    assert helpers("export", sample, "--force")[0] == 0
    assert script.read_text().startswith('"""Sample.')


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

    monkeypatch.setattr(os, "replace", full)  # root may write everywhere, so no folder's mode would do
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
        nbformat.write(notebook(f"# The **{name}**", WORK), tmp_path / f"{name}.ipynb")
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
        (["run", "04", "--nproc", "0"], 2, "'0' is no number of processes"),
        (["run", "04", "--nproc", "x"], 2, "'x' is no number of processes"),
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
