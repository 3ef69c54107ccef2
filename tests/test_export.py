"""From a notebook's tagged cells to a script: what becomes what, what is refused, the commands, the package."""

import ast
import errno
import os
import re
import shutil
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
from helpers.export.notebook import ExportError, read_notebook, script_name
from helpers.export.script import script_from_notebook
from helpers.export.verified import FILE_NAME, Record, add_script, fingerprint, write_record
from helpers.source import packages_of

ROOT = Path(__file__).parents[1]
START = """\
from helpers.runtime.process_group import start_process_group, stop_process_group

device = start_process_group()"""
INIT = "import torch.distributed as dist\n\ndist.init_process_group({})"


def notebook(*cells):
    """A notebook of these cells, each given as its source. Two characters before the source say what the cell is.

    - ``#:`` is a cell of Markdown.
    - ``p:`` is the cell with the parameters, which become flags.
    - ``-:`` is a cell without a tag, which is left out of the script if any cell has one.
    - Without such a beginning the cell is tagged ``export``.
    """
    cells_of_notebook = []
    for cell in cells:
        beginning = cell[:2]
        if beginning == "#:":
            cells_of_notebook.append(new_markdown_cell(cell[2:]))
        elif beginning == "p:":
            cells_of_notebook.append(new_code_cell(cell[2:], metadata={"tags": ["parameters"]}))
        elif beginning == "-:":
            cells_of_notebook.append(new_code_cell(cell[2:]))
        else:
            cells_of_notebook.append(new_code_cell(cell, metadata={"tags": ["export"]}))
    return new_notebook(cells=cells_of_notebook)


def exported(*cells):
    """The script of these cells and of one that starts the process group."""
    return script_from_notebook(notebook(*cells, START), "sample")


# ---- What becomes what

BECOMES = {  # {what: (cells, a part of the script)}
    "imports and definitions go up": (["x = 1", "import json\ndef f():\n    json"], "\n\n\ndef f():\n    json\n"),
    "two on one line": (["a = 1; b = 2  # both"], "args):\n    a = 1\n    b = 2  # both\n\n    device"),
    "constants are literals": (["N = 2\nM = 2 * 3\nx = N"], "\n\nN = 2\nM = 2 * 3\n\n\n"),
    "what changes is main's": (["N = 2\nN = 3"], "    N = 2\n    N = 3\n"),
    "a blank line stays": (["x = 1\n\ny = 2"], "    x = 1\n\n    y = 2\n"),
    "a cell begins a paragraph": (["N = 2", "N = 3"], "    N = 2\n\n    N = 3\n"),
    "comments stay": (["# why\nx = 1  # one\n# last"], "    # why\n    x = 1  # one\n    # last\n"),
    "long ones go above": (["x = 1  # " + "why " * 22], f"    # {'why ' * 21}why\n    x = 1\n"),
    "strings of several lines do not move": (['x = """a\nb"""'], '    x = """a\nb"""\n'),
    "their imports, too": (["import json, os\nx = os", "-:%%time\njson"], "import argparse\nimport os\nimport time"),
    "a parameter is a flag": (
        ["p:lr: float = 1  # rate, 5%", "x = lr"],
        'parser.add_argument("--lr", type=float, default=1,\n                        help="rate, 5%%")\n',
    ),
    "a long help text has several lines": (
        ["p:n: int = 1  #" + " why" * 20, "x = n"],
        'why "\n                             "why why',
    ),
    "and args.NAME": (["p:größe: int = 1", 'x = f"ä{größe}"'], '    x = f"ä{args.größe}"\n'),
    "unless main changes it": (["p:n: int = 1", "n += 1"], "    n = args.n\n\n    n += 1\n"),
    "or a function has its own": (["p:n: int = 1", "f = lambda n: n\nx = n"], "    f = lambda n: n\n    x = n\n"),
    "a switch": (["p:on: bool = True  # go", "x = on"], '"--on", action=switch, default=True,\n'),
    "choices": (["p:from typing import Literal\nk: Literal['a', 'b'] = 'a'", "x = k"], """choices=["a", "b"]"""),
    "a comment above begins a group": (["p:# The run.\nn: int = 1", "x = n"], 'parser.add_argument_group("The run")'),
    "the title and the purpose": (
        ["#:# 4. The **DDP** of {term}`ranks <Rank>`\n\nThe script of this chapter `runs`\n[it](x)."],
        '"""The DDP of ranks. This script runs it.\n\nOn all GPUs of a machine',
    ),
    "the group is plumbing, below main": ([], "    stop_process_group()\n\n\ndef parse_args"),
    "what needs it at once is main's": (
        ["from helpers.runtime.process_group import print0", "def f(to=print0):\n    to(1)"],
        "def main(args):\n    def f(to=print0):\n        to(1)\n",
    ),
    "a definition that calls may stay": (["import math\ndef f(at=math.exp(4)):\n    at"], "    def f(at=math.exp(4)):"),
    "what is bound twice is main's": (["def f():\n    1", "def f():\n    2"], "        1\n\n    def f():\n"),
}  # fmt: skip


@pytest.mark.parametrize("case", BECOMES)
def test_becomes(case):
    cells, part = BECOMES[case]
    assert part in exported(*cells)


def test_a_notebook_without_tags_gives_all_its_cells():
    text = script_from_notebook(notebook("-:x = 1", "p:n: int = 1", "-:" + START), "sample")
    assert "    x = 1\n\n    device = start_process_group()\n" in text
    assert '"--n"' in text


# ---- What is refused

REFUSED = {  # {what: (cells, words of the message)}
    "syntax": (["x ="], "sample, cell 1 is not Python in line 1, `x =`: invalid syntax. Correct it"),
    "a magic": (["%cd ..\nx = 1"], "cell 1 is not Python in line 1, `%cd ..`: invalid syntax. Correct it, or move it"),
    "another cell's name": (["-:y = 1", "x = y"], "cell 2: `x = y` reads y, which no exported cell binds. Bind it"),
    "a notebook's name": (["from IPython.display import display\ndisplay(1)"], "reads display, which no exported cell"),
    "a helper in a block": (["def f():\n    import helpers.ranks.launch"], "`import helpers.ranks.launch` in a block."),
    "a function of main's names": (
        ["x = 1\ndef f():\n    x"],
        "f():` reads x, which sample, cell 1 binds outside of functions. Pass it as an argument.",
    ),
    "names as text": (["globals()['x'] = 1"], "reads globals, which no exported cell binds"),
    "a copied name": (["def print0():\n    1"], "binds print0, a name that the script needs itself. Rename it"),
    "an import behind a setting": (
        ["import os\nos.environ['A'] = '1'\nimport json"],
        "`import json` goes to the script's top, above `os.environ['A'] = '1'`. Put imports first",
    ),
    "global in main": (
        ["if 1:\n    def f():\n        global n\n        n = 3\nn = 2"],
        "has `global n`, and the script puts the cells into a function. Return it.",
    ),
    "no type": (["p:n = 1"], "cell 1: `n = 1` is not a parameter. Write name: type = literal  # help"),
    "a type without a flag": (["p:n: list[int] = [1]"], "is not a parameter"),
    "the script's own": (["p:args: int = 1"], "cannot be a flag of its own"),
    "a parameter that is there twice": (["p:n: int = 1", "p:n: int = 2"], "cell 2: `n: int = 2` cannot be a flag"),
    "a fixed rank": ([INIT.format("rank=0, world_size=1")], "fixes rank=0, world_size=1, which torchrun says"),
    "a file to meet at": ([INIT.format("init_method='file:///x'")], "fixes init_method='file:///x', which torchrun"),
    "a variable of torchrun's": (["import os\nos.environ['RANK'] = '0'"], "fixes RANK, which"),
    "spawn": (["import torch.multiprocessing as mp\nmp.spawn(print)"], "`mp.spawn(print)` starts ranks by mp.spawn,"),
    "a launcher": (["def f():\n    1\nx = TrainerClient().train(f)\nx.y"], "by TrainerClient, and torchrun starts"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    cells, words = REFUSED[case]
    with pytest.raises(ExportError) as error:
        exported(*cells)
    [message] = str(error.value).splitlines()
    assert message.startswith("sample")
    assert words in message


def test_without_tags_the_way_out_of_a_magic_is_to_tag():
    with pytest.raises(
        ExportError, match=r"`!pip install x`: invalid syntax. Delete it, or tag the cells of the script:"
    ):
        script_from_notebook(notebook("-:!pip install x", "-:" + START), "sample")


@pytest.mark.parametrize("cells", [[], ["x = 1"], ["-:" + START, "x = 1"], ["def start_process_group():\n    1"]])
def test_a_notebook_that_starts_no_process_group(cells):
    with pytest.raises(ExportError, match=r"^sample starts no process group: .* Call torch.distributed.init_pro"):
        script_from_notebook(notebook(*cells), "sample")


@pytest.mark.parametrize(
    "cell",
    [
        INIT.format("rank=-1, world_size=int('4')"),
        "import os\nhome = os.environ['HOME']\nimport json",
        "import os\nrank = int(os.environ['RANK'])\nlocal = os.environ.get('LOCAL_RANK') == '0'",
        "x = 'file:///data'",
        "def f():\n    global n\n    n = 1\nf()\nprint(n)",
        "sum = 1\ntry:\n    f = 1\nexcept OSError as error:\n    print(error)",
    ],
)
def test_what_is_fine(cell):
    script = exported(cell)
    compile(script, "sample.py", "exec")  # raises SyntaxError if it is not Python


@pytest.mark.parametrize(
    ("name", "cell", "expected"),
    [
        ("random", "x = 1", "random_script"),
        ("torch", "x = 1", "torch_script"),
        ("mylib", "from mylib import model, train", "mylib_script"),
        ("train", "from mylib import model, train", "train"),
    ],
)
def test_a_script_does_not_shadow_a_module(name, cell, expected):
    assert script_name(notebook(cell, "y = 2"), name) == expected


# ---- The commands


@pytest.fixture
def sample(tmp_path):
    """The path of a notebook with a title and a cell that starts the process group."""
    path = tmp_path / "07_sample.ipynb"
    nbformat.write(notebook("#:# Sample", START), path)
    return path


def docstring(script):
    """The docstring of an exported script, which is all that comes before its imports."""
    beginning, _, _ = script.partition("import")
    return beginning


def test_a_script_says_on_which_versions_it_was_run():
    sample = notebook(START)
    on_three = script_from_notebook(sample, "sample", ["2.11.0", "2.13.0", "2.15.0"])
    assert 'sample.py\n\nTested on CPUs with PyTorch 2.11.0, 2.13.0 and 2.15.0.\n"""' in on_three

    on_one = script_from_notebook(sample, "sample", ["2.11.0"])
    assert 'Tested on CPUs with PyTorch 2.11.0.\n"""' in on_one

    on_none = script_from_notebook(sample, "sample", [])
    assert 'Not tested again since its last change.\n"""' in on_none
    assert on_none.count("\n") == on_three.count("\n")  # so that no line has another number once it is tested

    own_notebook = script_from_notebook(sample, "sample")
    assert "ested" not in docstring(own_notebook)


def test_the_commands_for_gpus_name_nccl_if_the_script_has_the_flag():
    with_flag = notebook('p:backend: str = ""', f"{START}\nprint(backend)")
    text = docstring(script_from_notebook(with_flag, "sample"))
    commands_for_gpus = [line for line in text.splitlines() if "sample.py" in line]
    assert len(commands_for_gpus) == 2
    for command in commands_for_gpus:
        assert command.endswith("sample.py --backend nccl")
    assert "without GPUs: --nproc-per-node=2 --backend gloo" in text

    without_flag = script_from_notebook(notebook(START), "sample")
    assert "nccl" not in docstring(without_flag)


def test_a_notebook_may_have_commands_of_its_own():
    sample = notebook(START)
    sample.metadata["book"] = {"script": {"how_to_start": ["On GPUs:", "torchrun sample.py --repeat 0.2"]}}
    text = docstring(script_from_notebook(sample, "sample"))
    assert "\n\nOn GPUs:\ntorchrun sample.py --repeat 0.2\n" in text
    assert "--nproc-per-node" not in text


def test_the_recorded_versions_are_those_of_an_unchanged_chapter(sample, tmp_path, monkeypatch):
    """They are forgotten when the chapter changes. None is returned for a notebook that is no chapter."""
    folder = tmp_path / "chapters"
    folder.mkdir()
    chapter = Path(shutil.copy(sample, folder))
    monkeypatch.setattr(commands, "NOTEBOOKS", folder)
    assert commands.tested_with(chapter) == []

    record = Record()
    add_script(record, chapter.stem, fingerprint(chapter), "2.13.0")
    add_script(record, chapter.stem, fingerprint(chapter), "2.11.0")
    write_record(record, folder / FILE_NAME)
    assert commands.tested_with(chapter) == ["2.11.0", "2.13.0"]
    assert commands.tested_with(sample) is None

    nbformat.write(notebook("#:# Sample", "x = 1", START), chapter)
    assert commands.tested_with(chapter) == []


def test_export_writes_a_script_once(helpers, sample, tmp_path, monkeypatch):
    """A script that somebody has changed is not overwritten, unless --force asks for it."""
    monkeypatch.chdir(tmp_path)
    script = Path("scripts", "07_sample.py")
    assert helpers("export", sample.name) == (0, f"{script}\n", "")
    assert script.read_text() == script_from_notebook(read_notebook(sample), "07_sample")
    assert helpers("export", sample)[0] == 0  # the script is there, and would be the same

    script.write_text("mine")
    status, _, errors = helpers("export", sample)
    assert status == 1
    assert "exists and differs" in errors
    assert "--force" in errors
    assert script.read_text() == "mine"

    assert helpers("export", sample, "--force")[0] == 0
    assert '"""Sample.' in script.read_text()


def test_what_cannot_be_written(helpers, sample, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "taken" / "07_sample.py").mkdir(parents=True)  # a folder with the script's name
    for out in ("file", "file/below", "taken"):
        status, _, errors = helpers("export", sample, "--force", "--out", tmp_path / out)
        assert status == 1
        assert "cannot be written" in errors
        assert "--out DIR" in errors


def test_a_full_disk_leaves_the_old_file_and_is_named(helpers, sample, tmp_path, monkeypatch):
    script = tmp_path / "07_sample.py"
    script.write_text("old")

    def write_half(path, text, **options):
        """Path.write_text on a disk that is full after half of the text."""
        path.write_bytes(text[: len(text) // 2].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_half)
    status, _, errors = helpers("export", sample, "--force", "--out", tmp_path)
    assert status == 1
    assert errors.startswith(f"error: {script} cannot be written: No space left on device.\n")
    assert script.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["07_sample.ipynb", "07_sample.py"]


def test_force_does_not_follow_a_link_out_of_the_folder(helpers, sample, tmp_path):
    """If a link has the script's name, the script replaces the link, and the file behind the link stays as it is."""
    mine = tmp_path / "mine.py"
    mine.write_text("mine")
    script = tmp_path / "out" / "07_sample.py"
    script.parent.mkdir()
    script.symlink_to(mine)
    assert helpers("export", sample, "--force", "--out", script.parent)[0] == 0
    assert mine.read_text() == "mine"
    assert not script.is_symlink()
    assert '"""Sample.' in script.read_text()


def test_a_name_that_begins_with_a_dash_is_no_option():
    text = script_from_notebook(notebook(START), "-rf")
    assert "torchrun --nproc-per-node=gpu ./-rf.py\n" in text


NOT_PYTHON = nbformat.writes(notebook("x ="))


@pytest.mark.parametrize("text", [NOT_PYTHON, "{", '{"a": 1}'], ids=["not Python", "not JSON", "no notebook"])
def test_a_refused_notebook_writes_nothing(helpers, tmp_path, text):
    path = tmp_path / "refused.ipynb"
    path.write_text(text)
    status, output, error = helpers("export", path, "--out", tmp_path / "out")
    assert status == 1
    assert output == ""
    assert error.startswith("error: ")
    assert len(error.splitlines()) <= 2
    assert not (tmp_path / "out").exists()


@pytest.fixture
def notebooks(tmp_path, monkeypatch):
    """A folder in the place of the book's notebooks: two chapters, a page beside the second, and the template."""
    for name in ("00_first", "04_many", "04b_more", "template"):
        nbformat.write(notebook(f"#:# The **{name}**", START), tmp_path / f"{name}.ipynb")
    monkeypatch.setattr(commands, "NOTEBOOKS", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("00_first", ["0", "00", "first"]),
        ("04_many", ["4", "04", "many"]),
        ("04b_more", ["4b", "04b", "more"]),
    ],
)
def test_chapters_are_found_by_number_and_name(notebooks, name, texts):
    path = notebooks / f"{name}.ipynb"
    for text in [*texts, name, str(path)]:
        assert commands.find_notebook(text) == path


@pytest.mark.parametrize("command", ["export", "run", "rehearse"])
def test_a_page_beside_a_chapter_has_no_script(helpers, notebooks, command):
    expected = "error: 04b_more has no script: it is a page beside chapter 04.\nGive the chapter's number: 04\n"
    for page in ("4b", "04b", "04b_more", "more", str(notebooks / "04b_more.ipynb")):
        status, _, errors = helpers(command, page)
        assert status == 1
        assert errors == expected


def test_all_chapters_and_nothing_else_are_exported_and_listed(helpers, notebooks, tmp_path):
    out = tmp_path / "out"
    assert helpers("export", "--all", "--out", out)[0] == 0
    assert sorted(os.listdir(out)) == ["00_first.py", "04_many.py"]

    _, listed, _ = helpers("list")
    assert listed.split() == ["00_first", "The", "00_first", "04_many", "The", "04_many"]  # names and titles


@pytest.mark.parametrize(
    ("arguments", "status", "expected"),
    [
        (["export", "nothing-like-it"], 1, "no chapter or notebook 'nothing-like-it'.\nChapters: "),
        (["run", "04", "--nproc", "0"], 2, "'0' is not a whole number from 1 to 1000000"),
        (["run", "04", "stray"], 2, "put two dashes before the script's flags: -- stray\nSee python -m helpers run"),
        (["export", "04", "--epochs", "1"], 2, "unrecognized arguments: --epochs 1\nSee python -m helpers export"),
        (["rehearse", "no_script.py"], 1, "There is no file no_script.py.\nCheck the path"),
        (["run", __file__], 1, "is a script already.\nStart it: torchrun"),
        (["rehearse", "-m", "no_module.train"], 1, "there is no module no_module.train here.\nStart in the folder"),
    ],
)
def test_usage(helpers, arguments, status, expected):
    done, out, errors = helpers(*arguments)
    assert done == status
    assert expected in out + errors


# ---- The installed package


def test_the_package_names_what_it_imports():
    """The dependencies in pyproject.toml are the packages that the helpers and the chapters import, and no others."""
    modules = {"sklearn", "safetensors"}  # The chapters' data are sklearn's; their models are saved with safetensors.
    for path in (ROOT / "helpers").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules.update(packages_of(node))
    modules -= {"helpers", *sys.stdlib_module_names}
    distributions = packages_distributions()  # {module: [the packages that install it]}
    needed = {distributions[module][0].lower().replace("_", "-") for module in modules}

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        requirements += extra
    named = {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}  # "numpy" of "numpy>=1.26"
    assert needed == named


def test_a_chapter_imports_no_package_of_an_extra():
    """So a notebook that is opened on Colab needs the helpers, what they name as dependencies, and nothing else."""
    modules = set()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        source = path.read_text(encoding="utf-8")
        modules |= set(re.findall(r"(?:from|import) (helpers[\w.]*)", source))  # "from helpers.source import f"
    assert len(modules) > 10

    lines = ["import sys", "sys.modules['nbconvert'] = None"]  # so that its import raises ImportError
    lines += [f"import {module}" for module in sorted(modules)]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def source_of_wheel(tmp_path_factory):
    """A copy of what the package is built from. In the wheel, its notebooks are in helpers/chapters."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("helpers", "notebooks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    return source


@pytest.fixture(scope="module")
def wheel(source_of_wheel, tmp_path_factory):
    """The path of the package's wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    build = f"import setuptools.build_meta as build; build.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source_of_wheel, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def python_with_wheel(wheel, tmp_path_factory):
    """The Python of an environment that has the wheel, and the packages that are installed here but this project."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    [site_packages] = (folder / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site_packages)
    (site_packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin" / "python"


@pytest.fixture
def run_installed(python_with_wheel, tmp_path):
    """A function that runs ``python -m`` with the installed package in ``tmp_path``, and returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*arguments):
        command = [python_with_wheel, "-m", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_the_wheel_has_all_files_of_the_package(source_of_wheel, wheel):
    files = {f"helpers/chapters/{FILE_NAME}"}
    for path in (source_of_wheel / "helpers").rglob("*"):
        if path.is_file() and path.suffix != ".toml":
            files.add(path.relative_to(source_of_wheel).as_posix())
    with zipfile.ZipFile(wheel) as archive:
        assert files < set(archive.namelist())


def test_the_installed_package_lists_and_exports_the_chapters(run_installed, tmp_path):
    listed_chapters = [line.split()[0] for line in run_installed("helpers", "list").splitlines()]
    assert listed_chapters == [path.stem for path in commands.chapters()]

    ddp = commands.find_notebook("04")
    printed = run_installed("helpers", "export", "04", "--slurm")
    assert f"scripts/{ddp.stem}.sbatch" in printed
    expected = script_from_notebook(read_notebook(ddp), ddp.stem, commands.tested_with(ddp))
    assert (tmp_path / "scripts" / f"{ddp.stem}.py").read_text() == expected


def test_nbconvert_finds_the_exporter_of_the_installed_package(run_installed, tmp_path):
    nbformat.write(notebook(START), tmp_path / "random.ipynb")
    run_installed("nbconvert", "--to", "torchrun", "random.ipynb")
    assert "random_script.py" in (tmp_path / "random_script.py").read_text()
