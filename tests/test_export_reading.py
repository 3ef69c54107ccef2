"""What the export reads: damaged notebooks, magics, names of files; and the package when it is installed."""

import ast
import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from helpers.export import chapters as commands
from helpers.export.magics import as_python, still_open
from helpers.export.notebook import ExportError, read_notebook, script_name, sort_cells
from helpers.export.script import script_from_notebook as exported
from helpers.export.source import DEEPEST

ROOT = Path(__file__).parents[1]
WORK = "print('work')"
script_from_notebook = functools.partial(exported, allow_single=True)  # these cells start no process group


def notebook(*sources):
    return new_notebook(cells=[new_code_cell(source) for source in sources])


def refusal(*sources):
    """The message with which a notebook of these cells is refused. Checks that it has one or two lines."""
    with pytest.raises(ExportError) as caught:
        script_from_notebook(notebook(*sources), "mine")
    assert 1 <= len(str(caught.value).splitlines()) <= 2
    return str(caught.value)


def notes(*sources):
    """The notes on a notebook that can be exported, without the places that they name."""
    script_from_notebook(notebook(*sources), "mine")
    found = sort_cells(notebook(*sources), "mine").notes
    assert all(note.startswith("mine, cell ") and len(note.splitlines()) == 1 for note in found)
    return [re.sub(r"^mine, cell \d+ \(`.*?`\)(: | is )", "", note) for note in found]


class TooLong(Exception):
    """A call was still running when its time was over."""


def no_longer_than(seconds, call, *args):
    """What the call returns. Raises TooLong if it takes more than ``seconds``."""

    def stop(number, frame):
        raise TooLong(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        return call(*args)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# ---- Files


def minimal(**changes):
    content = {"nbformat": 4, "nbformat_minor": 4, "metadata": {}, "cells": [code_cell(WORK)]} | changes
    return json.dumps(content)


def code_cell(source, **changes):
    cell = {"cell_type": "code", "metadata": {}, "source": source, "outputs": [], "execution_count": None}
    return cell | changes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (minimal(nbformat=4.0), "has notebook format 4.0"),
        (minimal(nbformat="4"), "has notebook format '4'"),
        (minimal(nbformat=[1] * 9000), "has notebook format [1, 1"),
        (minimal(nbformat_minor="four"), "is not a valid notebook"),
        (minimal(nbformat_minor=None), "is not a valid notebook"),
        (minimal(nbformat_minor={}), "is not a valid notebook"),
        (minimal(cells=[code_cell(WORK, cell_type={})]), "is not a valid notebook"),
        (minimal(cells=[code_cell(WORK, cell_type=["code"])]), "is not a valid notebook"),
        (minimal(cells=[code_cell({"a": 1})]), "is not a valid notebook"),
        (minimal(cells=[[WORK]]), "is not a valid notebook"),
        (minimal(metadata=[]), "is not a valid notebook"),
        ("[" * 100_000 + "]" * 100_000, "is nested too deeply"),
        ('{"a":' * 50_000 + "1" + "}" * 50_000, "is nested too deeply"),
        (f'{{"nbformat": {"9" * 5000}}}', "is not a notebook"),
    ],
)
def test_files_that_are_refused(text, expected, tmp_path):
    path = tmp_path / "x.ipynb"
    path.write_text(text)
    with pytest.raises(ExportError) as caught:
        read_notebook(path)
    assert expected in str(caught.value) and len(str(caught.value).splitlines()) == 2
    assert len(str(caught.value)) < 300 + 2 * len(str(path))


@pytest.mark.parametrize("language", [3, ["python"], {"a": "b"}])
def test_a_language_that_is_not_text(language, tmp_path):
    path = tmp_path / "x.ipynb"
    path.write_text(minimal(metadata={"kernelspec": {"name": "x", "display_name": "x", "language": language}}))
    with pytest.raises(ExportError, match=r"is a notebook in|is not a valid notebook"):
        script_from_notebook(read_notebook(path), "x")


@pytest.mark.parametrize("metadata", [{"tags": None}, {"tags": 3}, {"tags": "export"}, {"tags": [["export"], 3]}])
def test_tags_that_are_not_words_are_no_tags(metadata):
    mine = notebook(WORK, "print('other')")
    mine.cells[0].metadata.update(metadata)
    assert "other" in script_from_notebook(mine, "mine")  # none is tagged: all are exported


def test_a_named_pipe_is_not_waited_for(tmp_path, helpers):
    os.mkfifo(tmp_path / "pipe.ipynb")
    with pytest.raises(ExportError, match="it is not a regular file"):
        no_longer_than(60, read_notebook, tmp_path / "pipe.ipynb")
    status, _, errors = no_longer_than(60, helpers, "export", tmp_path / "pipe.ipynb")
    assert status == 1 and "There is no chapter or notebook" in errors


@pytest.mark.parametrize("chapter", ["n" * 300, "n" * 5000 + ".ipynb", "9" * 5000, "a\x00b", "٤", ""])
def test_names_that_no_file_can_have(chapter, helpers, tmp_path):
    status, _, errors = helpers("export", chapter, "--out", tmp_path)
    assert status == 1 and "There is no chapter or notebook" in errors and os.listdir(tmp_path) == []


@pytest.mark.parametrize("out", ["a\x00b", "n" * 300])
def test_folders_that_cannot_be(out, helpers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nbformat.write(notebook(WORK), "mine.ipynb")
    status, _, errors = helpers("export", "mine.ipynb", "--allow-single", "--out", out)
    assert status == 1 and "cannot be written" in errors and len(errors.splitlines()) == 2
    assert os.listdir(tmp_path) == ["mine.ipynb"]


@pytest.mark.parametrize("name", ['a"""b', "a\nb", "a\\b", "a\udcffb", "a\x00"])
def test_names_that_a_script_cannot_quote(name):
    with pytest.raises(ExportError, match="is not a name for a script"):
        script_from_notebook(notebook(WORK), name)


# ---- Cells


def test_a_carriage_return_ends_a_line():
    assert 'x = 1\n    print(x)\n    print("b")' in script_from_notebook(
        notebook("x = 1\rprint(x)", "\r\nprint('b')\r"), "mine"
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("print('\ud800')", "half of a character (a lone surrogate) in line 1"),
        ("x = 1\n%cd \ud800", "half of a character (a lone surrogate) in line 2"),
        ("%cd \0", "null bytes in line 1"),
        ("print(" + "-" * 100_000 + "1)", f"nested more than {DEEPEST} levels"),
        ("print(" + "+".join("1" * 20_000) + ")", f"nested more than {DEEPEST} levels"),
        ("print(a" + ".b" * 5000 + ")", f"nested more than {DEEPEST} levels"),
        ("x = " + "[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), f"nested more than {DEEPEST} levels"),
        ("print(" + "(" * 3000 + ")" * 3001, "too many nested parentheses"),
    ],
)
def test_what_is_no_module(source, expected):
    assert expected in refusal(source)


def test_a_surrogate_in_a_title_is_replaced():
    mine = new_notebook(cells=[new_markdown_cell("# A \ud800 title"), new_code_cell(WORK)])
    assert "A ? title" in script_from_notebook(mine, "mine")


def test_the_deepest_that_is_accepted_can_be_exported():
    """Also when the stack is deep, as under Jupyter, and for each way in which the export walks a tree."""
    deep = DEEPEST - 8
    listed, added = "[" * deep + "x" + "]" * deep, " + ".join(["x"] * deep)
    attributes, calls = "x" + ".y" * deep, "f(" * (deep // 2) + "x" + ")" * (deep // 2)
    blocks = "".join("    " * level + "if x:\n" for level in range(90)) + "    " * 90 + "x += 1"
    choices = "if x:\n    x = 0\n" + "\n".join(f"elif x == {n}:\n    x = {n}" for n in range(deep - 4))

    def below(levels):
        if levels:
            return below(levels - 1)
        for source in (listed, added, attributes, calls):
            script_from_notebook(notebook(f"import os as x, sys as f\nprint({source})"), "mine")
        for source in (blocks, choices):
            script_from_notebook(notebook(f"x = len('a')\n{source}"), "mine")

    below(150)


@pytest.mark.parametrize(
    "source",
    [
        "print(1)" + " " * 100_000,
        "print(1)" + " " * 100_000 + "\nx = print(2)",
        "print(1)  # a" + " " * 100_000 + "b",
        "x = 1" + " " * 100_000 + "y",
        "%%time" + " " * 100_000 + "\nprint(1)",
        "!ls" + " " * 100_000 + "\nprint(1)",
        "a" + " " * 100_000 + "= !ls\nprint(1)",
        "pip" + " " * 100_000 + "install x",
        "print(1);" * 20_000,
        "print(1)" + "\n" * 100_000 + "print(2)",
        "!ls\n" * 2000 + "print(1)",
        "x?\n" * 2000 + "print(1)",
        "!ls\n" + "print('''\n%'''\n % 2)\n" * 2000,
        "!ls\n" + "'" * 50_001,
        "!ls\n" + "(" * 50_000,
    ],
    ids=lambda source: re.sub(r"(\W)\1{9,}|(.{3,}\n)\2{9,}|(print.1.;)\3+", "~", source)[:30],
)
def test_no_cell_hangs_the_reading(source):
    try:
        no_longer_than(60, sort_cells, notebook(source), "mine")
    except ExportError:
        pass


@pytest.mark.parametrize(
    "text",
    [
        "# a" + " " * 100_000 + "b",
        "# " + "{" * 100_000,
        "# {t}`a" + "<" * 100_000 + "`",
        "# {t}`a" + " " * 60_000 + "b`",
    ]
    + ["*a_" * 30_000, "[" * 30_000, "# " + "`a" * 50_000, "> " * 5000],
    ids=lambda text: re.sub(r"(.{1,3})\1{9,}", r"\1~", text),
)
def test_no_text_hangs_the_reading(text):
    no_longer_than(60, sort_cells, new_notebook(cells=[new_markdown_cell(text), new_code_cell(WORK)]), "mine")


# ---- Magics, and what else only a notebook has


@pytest.mark.parametrize(
    ("source", "note"),
    [
        ("!wget http://a.b/c", "run it in a shell before the script, on every node"),
        ("files = !ls", "run it in a shell before"),
        ("!pip install x", "install it where the script runs"),
        ("!python -m pip -q install x", "install it where the script runs"),
        ("%pip install x", "install it where the script runs"),
        ("%cd data", "a script's paths count from the folder in which it is started"),
        ("%env A=1", "export the variable in the shell that starts torchrun"),
        ("!torchrun --nproc-per-node=2 train.py", "it starts ranks, and this script is started by torchrun itself"),
        ("!python -m torch.distributed.run train.py", "it starts ranks"),
        ("!accelerate launch train.py", "it starts ranks"),
        ("%%bash\nls", "run it in a shell before"),
        ("%%bash\ntorchrun train.py", "it starts ranks"),
        ("%%!\nls", "run it in a shell before"),
        ("%%writefile other.py\nx = 1", "write that file before the script runs"),
        ("%%html\n<b>", "a script has no IPython"),
        ("%run other.py", "import what you need from that file"),
        ("%timeit f(1)", "a script has no IPython"),
        ("get_ipython().run_line_magic('cd', '..')", "a script's paths count"),
        ("from google.colab import drive\ndrive.mount('/content/drive')", "only Colab has it"),
        ("from google.colab import drive\ndrive.mount('/content/drive')", "make the folder with the data a parameter"),
        ("import google.colab", "only Colab has it"),
        ("from huggingface_hub import notebook_login\nnotebook_login()", "log in once in a shell, or set HF_TOKEN"),
        ("from tqdm.notebook import tqdm, trange\nprint(tqdm, trange)", "takes tqdm.auto, which draws in a terminal"),
        ("import tqdm.notebook as bar\nprint(bar.tqdm)", "takes tqdm.auto"),
    ],
)
def test_what_is_left_out_is_noted(source, note):
    assert any(note in told for told in notes("def f(x):\n    return x", source, WORK))
    text = script_from_notebook(notebook(source, WORK), "mine")
    code = re.sub("#.*", "", text.partition('"""\n')[2])
    assert not re.search(r"get_ipython|colab|drive|notebook|wget|pip", code), code


@pytest.mark.parametrize(
    "source",
    ["%matplotlib inline", "%load_ext autoreload\n%autoreload 2", "%config A.b = 1", "print?", "%%time\nx = 1"]
    + ["%time print(1)", "import tqdm.auto", "from tqdm import tqdm", "def f(input):\n    return input()"]
    + ["try:\n    import google.colab\nexcept ImportError:\n    print(1)", "import google.cloud", "parameters = 1"],
)
def test_what_nobody_misses_is_not_noted(source):
    assert notes(source, WORK) == []


def test_what_time_measures_is_kept():
    source = "%time x = len(\\\n  'a')\nfor y in 'ab':\n    %time print(x, y)"
    text = script_from_notebook(notebook(source), "mine")
    assert '    x = len("a")\n    for y in "ab":\n        print(x, y)\n' in text


def test_magics_do_not_move_what_is_below():
    source = '!ls \\\n  -l\nx = """\n!ls\n%cd\n"""\ny = (7\n  % 4)\nz = !ls\nx?\nprint(x, y)'
    lines = as_python(source).split("\n")
    assert len(lines) == len(source.split("\n")) and lines[0].startswith("get_ipython().system(")
    assert lines[2:8] == ['x = """', "!ls", "%cd", '"""', "y = (7", "  % 4)"]
    assert lines[8] == "z = get_ipython().getoutput('ls')" and "pinfo" in lines[9] and lines[10] == "print(x, y)"
    assert "system" not in script_from_notebook(notebook(source), "mine")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = [1, (2", (2, "")),
        ("""'(' + "[" + '\\'('  # {""", (0, "")),
        ('x = """a \' (', (0, '"""')),
        ("'''a\\'''' ) ('''b''' (", (2, "")),
        (")))(", (1, "")),
    ],
)
def test_what_a_line_leaves_open(line, expected):
    assert still_open(line, 0, "") == expected


@pytest.mark.parametrize("start", ["!torchrun train.py", "!python ./train.py --lr 1", "%%bash\ntorchrun 'train.py'"])
def test_a_file_that_the_notebook_writes_and_starts_is_the_script_already(start):
    message = refusal("epochs = 2", "%%writefile scripts/train.py\nprint(1)", start, WORK)
    assert "starts train.py, which mine, cell 2 (`%%writefile scripts/train.py`) writes: that file is" in message
    script_from_notebook(notebook("%%writefile train.py\nprint(1)", start.replace("train", "pretrain"), WORK), "mine")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1\npip install x", "`pip install x` is not Python; IPython takes it for the magic %pip.\nWrite %pip"),
        ("cd data", "the magic %cd"),
        ("x = await f()", "put `await` and `return` into a function"),
        ("!ls\nx = = 1", "has a syntax error in line 2: invalid syntax.\nCorrect it"),
        ("cd = = 1", "has a syntax error in line 1"),
        ("name = input('who?')\nprint(name)", "asks with input(), and ranks have no keyboard"),
        ("import getpass\nkey = getpass.getpass()\nprint(key)", "asks with getpass.getpass()"),
        ("def f():\n    return input()\nprint(f())", "asks with input()"),
        ("from tqdm import tqdm_notebook\nprint(tqdm_notebook)", "Write from tqdm.auto import tqdm"),
        ("import tqdm.notebook\nprint(tqdm.notebook)", "Write from tqdm.auto import tqdm"),
        ("%run -i other.py\nprint(loader)", "reads loader, which perhaps `%run -i other.py` in mine, cell 1"),
        ("x = 3", "has no statement that a script could run"),
    ],
)
def test_refusals_say_what_to_do(source, expected):
    assert expected in refusal(source)


@pytest.mark.parametrize("source", ["x += 1", "x.y: int = 1", "del x"])
def test_what_is_not_a_parameter(source):
    mine = notebook(source, WORK)
    mine.cells[0].metadata.tags = ["parameters"]
    with pytest.raises(ExportError, match="Write name: type = value"):
        script_from_notebook(mine, "mine")


def test_all_cells_that_are_wrong_are_told_at_once():
    with pytest.raises(ExportError) as caught:
        script_from_notebook(notebook("x = = 1", WORK, "name = input()", "pip install x"), "mine")
    cells = sorted(problem.partition(" (")[0].partition(":")[0] for problem in caught.value.problems)
    assert cells == ["mine, cell 1", "mine, cell 3", "mine, cell 4"]
    assert str(caught.value) == "\n".join(caught.value.problems)


# ---- Damage


def damaged(text, rng):
    """A notebook's text with one random damage, or a few."""
    kind = rng.choice(["cut", "bytes", "tree", "tree", "source", "source", "source", "source"])
    if kind == "cut":
        return text[: rng.randrange(len(text))].encode()
    if kind == "bytes":
        raw = bytearray(text.encode())
        for _ in range(rng.randint(1, 20)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        return bytes(raw)
    tree = json.loads(text)
    odd = [None, True, 0, -1, 4.5, "", "x", [], [[]], {}, {"a": {}}, "\ud800", "\x00", "\r", 10**400]
    if kind == "source":
        cell = rng.choice(tree["cells"])
        source = "".join(cell["source"])
        at = rng.randrange(len(source) + 1)
        pieces = [
            "\r",
            "\x00",
            "\ud800",
            "\u2028",
            "\x0c",
            "%",
            "!",
            "?",
            "'''",
            "(",
            "}",
            "\\",
            "\t",
            " " * 5000,
            "%%a\n",
        ]
        pieces += ["\n%run a.py\n", "\n!torchrun a.py\n", "\n@", "\nawait x\n", " = ", ";", "é", "lambda: ", "*", "f'{"]
        cell["source"] = source[:at] + rng.choice(pieces) + source[at + rng.choice([0, 0, 1, 20]) :]
    for _ in range(rng.randint(1, 3) if kind == "tree" else 0):
        at = tree
        while True:
            keys = list(at) if isinstance(at, dict) else range(len(at))
            key = rng.choice(keys)
            if not isinstance(at[key], dict | list) or not at[key] or rng.random() < 0.3:
                break
            at = at[key]
        if rng.random() < 0.3:
            del at[key]
        else:
            at[key] = rng.choice(odd)
        if not tree:
            break
    return json.dumps(tree).encode()


def test_damaged_notebooks_are_refused_or_exported(tmp_path):
    """Either ExportError is raised or the script compiles, and nothing hangs."""
    rng, counts = random.Random(11), {True: 0, False: 0}
    cells = [new_markdown_cell("# Title\n\nA promise. And {term}`more <More>`.")]
    cells.append(new_code_cell("rate: float = 0.1  # how fast", metadata={"tags": ["parameters"]}))
    sources = [
        "import torch\nfrom torch import nn",
        "!ls\n%cd x\nfiles = !ls",
        "SIZE = 3\n\n\ndef f(x):\n    return x * SIZE",
    ]
    sources += ['text = f"""a\n{SIZE}"""  # two lines\nfor i in range(2):\n    print(f(i), text, rate)\n    # end']
    cells += [new_code_cell(source, metadata={"tags": ["export"]}) for source in sources]
    mine = new_notebook(cells=cells, metadata={"kernelspec": {"name": "a", "display_name": "b", "language": "python"}})
    text, path = json.dumps(mine), tmp_path / "mine.ipynb"
    for number in range(300):
        path.write_bytes(damaged(text, rng))

        def export():
            return script_from_notebook(read_notebook(path), "mine")

        try:
            compile(no_longer_than(60, export), "mine.py", "exec")
            counts[True] += 1
        except ExportError as error:
            assert str(error).strip()
            counts[False] += 1
        except BaseException as error:
            raise AssertionError(f"notebook {number}: {path.read_bytes()!r}") from error
    assert min(counts.values()) > 40, counts


# ---- The script's name


@pytest.mark.parametrize("name", ["torch", "random", "json", "sklearn", "transformers", "networkx", "mytools"])
def test_a_script_does_not_shadow_a_module(name, helpers, tmp_path):
    path, folder = tmp_path / f"{name}.ipynb", tmp_path / "out"
    nbformat.write(notebook("import os, transformers.trainer\nfrom mytools.a import b", WORK), path)
    status, out, errors = helpers("export", path, "--allow-single", "--out", folder)
    assert (status, out) == (0, f"{folder / name}_script.py\n") and os.listdir(folder) == [f"{name}_script.py"]
    assert errors.startswith(f"note: {name}.ipynb becomes {name}_script.py") and errors.count("\n") == 1
    assert f"torchrun --nproc-per-node=gpu {name}_script.py" in (folder / f"{name}_script.py").read_text()


@pytest.mark.parametrize("name", ["04_ddp", "train", "torch_run", "tool", "a"])
def test_other_names_stay(name):
    assert script_name(notebook("import os\nfrom a.b import c", "# import train\nfrom .tool import x"), name) in (
        name,
        "a_script",
    )


# ---- The installed package


DEPENDENCIES = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def test_the_package_names_what_it_imports():
    imported = {"sklearn"}  # the chapters' data
    for path in (ROOT / "helpers").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.split(".")[0])
    imported -= {"helpers", *sys.stdlib_module_names}
    homes = packages_distributions()
    named = {re.split(r"\W", name.replace("-", "_"), maxsplit=1)[0] for name in DEPENDENCIES}
    assert {homes[module][0].lower().replace("-", "_") for module in imported} == named


def test_the_package_has_all_folders():
    folders = {path.parent.relative_to(ROOT).as_posix().replace("/", ".") for path in (ROOT / "helpers").rglob("*.py")}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert {*packages} == {*folders, "helpers.chapters"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A function that runs ``python -m`` with the project installed from its wheel: (status, stdout, stderr)."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("helpers", "notebooks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    build = f"import setuptools.build_meta as build; build.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    shutil.rmtree(source)
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    [site] = (folder / "venv" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))  # the dependencies, without this project
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def call(*arguments):
        command = [python, "-m", *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    call.folder = folder
    return call


def test_an_installed_package_lists_and_exports(installed):
    status, out, errors = installed("helpers", "list")
    assert (status, errors) == (0, "") and "04_ddp" in out and "template" not in out
    assert [line.split()[0] for line in out.splitlines()] == [path.stem for path in commands.chapters()]
    assert installed("helpers", "export", "04") == (0, "scripts/04_ddp.py\n", "")
    expected = script_from_notebook(read_notebook(ROOT / "notebooks" / "04_ddp.ipynb"), "04_ddp")
    assert (installed.folder / "scripts" / "04_ddp.py").read_text() == expected


def test_nbconvert_finds_the_installed_package(installed):
    (installed.folder / "random.ipynb").write_text(minimal())
    status, _, errors = installed(
        "nbconvert", "--to", "torchrun", "random.ipynb", "--TorchrunExporter.allow_single=True"
    )
    assert status == 0, errors
    assert "random_script.py" in (installed.folder / "random_script.py").read_text()


def test_without_the_chapters_it_is_said(installed, helpers, tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "NOTEBOOKS", tmp_path)
    for arguments in (["list"], ["export", "--all"], ["export", "04"]):
        status, out, errors = helpers(*arguments)
        assert (status, out) == (1, "") and errors.startswith(f"error: There is no chapter in {tmp_path}")
        assert len(errors.splitlines()) == 2


def test_what_is_not_installed_is_named(helpers, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("helpers.export", "nbformat"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("helpers.export.chapters")
    monkeypatch.setitem(sys.modules, "nbformat", None)
    status, out, errors = helpers("list")
    assert (status, out) == (
        1,
        "",
    ) and errors == "error: list needs nbformat, which is not installed. Try: pip install nbformat\n"
