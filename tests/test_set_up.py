"""tools/set_up.py: which PyTorch it takes, and what it says when it cannot go on. No test here needs the network."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import set_up

ROOT = Path(__file__).parents[1]
RANGE = set_up.wanted_torch("numpy\ntorch>=2.13,<2.16\n")
BUILDS_WITH_CUDA = ["2.16.0", "2.15.0", "2.14.1", "2.13.0", "2.12.1"]  # as PyPI has them
CPU_BUILDS = [f"{version}+cpu" for version in BUILDS_WITH_CUDA]
PYTORCHS_INDEX = ("--index-url", set_up.PYTORCH_INDEX)


def choice(configured, pytorch=(), system="Linux", has_gpu=False, wanted=RANGE):
    """The build that is installed, if pip finds these versions where it is configured to look, and these at PyTorch's.

    ``wanted`` is the range of versions that the book wants.
    """
    return set_up.choose(wanted, list(configured), list(pytorch), system, has_gpu)


def test_the_newest_cpu_build_of_the_range_is_taken():
    build = choice(configured=BUILDS_WITH_CUDA, pytorch=CPU_BUILDS)
    assert build.requirement == "torch==2.15.0+cpu"
    assert build.index_options == PYTORCHS_INDEX
    assert build.description == "PyTorch 2.15.0, CPU build, from PyTorch's own index"


def test_an_older_cpu_build_goes_before_a_newer_one_with_cuda():
    build = choice(configured=[*BUILDS_WITH_CUDA, "2.13.0+cpu"], pytorch=["2.13.0+cpu"])
    assert build.requirement == "torch==2.13.0+cpu"
    assert build.index_options == ()
    assert build.description == "PyTorch 2.13.0, CPU build, from where pip is configured to look"


@pytest.mark.parametrize(
    "options, why",
    [
        ({}, "6 GB"),
        ({"has_gpu": True, "pytorch": CPU_BUILDS}, "shows a GPU"),
        ({"system": "Darwin"}, "no CUDA on this system"),
    ],
    ids=["no CPU build", "a GPU", "macOS"],
)
def test_the_plain_build_is_taken(options, why):
    """It is asked for with three equals signs, because 2.15.0+cpu satisfies ``torch==2.15.0``."""
    build = choice(configured=BUILDS_WITH_CUDA, **options)
    assert build.requirement == "torch===2.15.0"
    assert build.index_options == ()
    assert why in build.description


def test_a_version_that_is_asked_for_is_taken_from_outside_the_range_too():
    wanted = set_up.Wanted("2.16.0", RANGE.lowest, RANGE.below)
    build = choice(configured=BUILDS_WITH_CUDA, pytorch=CPU_BUILDS, wanted=wanted)
    assert build.requirement == "torch==2.16.0+cpu"


def test_no_version_of_the_range_is_an_error_of_two_lines():
    with pytest.raises(set_up.SetUpError, match=r"pip finds no PyTorch >=2\.13,<2\.16 for Python 3\.") as error:
        choice(configured=["2.16.0", "2.12.1"])
    assert len(str(error.value).splitlines()) == 2


def test_the_range_is_the_one_in_requirements():
    wanted = set_up.wanted_torch((ROOT / "requirements.txt").read_text())
    assert wanted.allows("2.13.0+cpu")
    assert wanted.allows("2.15.0")


def take_pip_offline(monkeypatch, folder):
    """Let pip find nothing but the wheels in a folder, whatever it is configured with on this machine."""
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_pip_is_asked_for_the_versions(tmp_path, monkeypatch):
    """Of the wheels that pip finds, the newest CPU build in the range is taken, if it is one for this Python."""
    for version in ("2.16.0+cpu", "2.15.0", "2.14.1+cpu", "2.13.0+cpu"):
        (tmp_path / f"torch-{version}-py3-none-any.whl").touch()
    for_another_python = tmp_path / "torch-2.15.0+cpu-cp27-cp27m-linux_x86_64.whl"
    for_another_python.touch()
    take_pip_offline(monkeypatch, tmp_path)
    monkeypatch.setattr(set_up, "gpu_is_here", lambda: False)
    monkeypatch.setattr(set_up.platform, "system", lambda: "Linux")

    build = set_up.chosen_build(set_up.Environment(Path(sys.prefix)), RANGE)

    assert build.requirement == "torch==2.14.1+cpu"
    assert build.index_options == ()


THIS_PYTHON = f'exec {sys.executable} "$@"'


def write_python(folder, script):
    """Write the program of an environment that is its Python: a line of shell script, such as THIS_PYTHON."""
    path = folder / "bin" / "python"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_without_an_index_it_says_so_and_nothing_looks_ready(tmp_path, monkeypatch):
    """The environment has no file ``ready`` then, by which make would see that it need not be set up again."""
    take_pip_offline(monkeypatch, tmp_path)
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "set_up.py", tmp_path / "tools")
    (tmp_path / "requirements.txt").write_text("torch>=2.13,<2.16\n")
    write_python(tmp_path / ".venv", THIS_PYTHON)
    (tmp_path / ".venv" / "ready").touch()

    command = [sys.executable, "tools/set_up.py", ".venv"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert ended.returncode == 1
    assert ended.stderr.startswith("pip finds no PyTorch >=2.13,<2.16 for Python 3.")
    assert len(ended.stderr.splitlines()) == 2, ended.stderr
    assert (tmp_path / ".venv" / "unfinished").exists()
    assert not (tmp_path / ".venv" / "ready").exists()


def test_an_environment_of_another_python_is_not_usable(tmp_path):
    environment = set_up.Environment(tmp_path / ".venv")
    write_python(environment.folder, THIS_PYTHON)
    assert environment.is_usable()
    write_python(environment.folder, "echo 3.9.2")
    assert not environment.is_usable()


def test_an_unfinished_environment_is_made_anew(tmp_path, capsys):
    environment = set_up.Environment(tmp_path / ".venv")
    write_python(environment.folder, THIS_PYTHON)
    environment.unfinished.touch()
    left_from_before = environment.folder / "left"
    left_from_before.touch()

    environment.create()

    assert ".venv is made anew" in capsys.readouterr().out
    assert environment.python.exists()
    assert not left_from_before.exists()


@pytest.mark.parametrize("cuda_is_available", [True, False])
def test_a_gpu_that_pytorch_cannot_use_is_said(cuda_is_available, tmp_path, monkeypatch, capsys):
    """set_up.py sees a GPU and installs a build with CUDA. Then it asks that PyTorch whether it can use the GPU."""
    folder = tmp_path / ".venv"
    build = set_up.Build("torch===2.15.0", index_options=(), description="PyTorch 2.15.0, with CUDA")
    monkeypatch.setattr(set_up.Environment, "create", lambda environment: environment.unfinished.touch())
    monkeypatch.setattr(set_up.Environment, "install", lambda environment, *arguments: None)
    monkeypatch.setattr(set_up, "chosen_build", lambda environment, wanted: build)
    monkeypatch.setattr(set_up, "gpu_is_here", lambda: True)
    write_python(folder, f"echo {cuda_is_available}")

    set_up.set_up(folder, None)

    printed = capsys.readouterr().out
    if cuda_is_available:
        assert set_up.NO_GPU_FOR_TORCH not in printed
    else:
        assert set_up.NO_GPU_FOR_TORCH in printed
    assert (folder / "ready").exists()


def git(folder, *arguments):
    """Run git in a folder. Returns what it printed."""
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True).stdout


def test_a_clone_gets_the_filter_that_keeps_stored_outputs(tmp_path, monkeypatch):
    """A notebook that a reader has run is no change for git, and neither is a second set-up."""
    (tmp_path / "tools" / "lab").mkdir(parents=True)
    program = "tools/lab/keep_stored_outputs.py"
    shutil.copy(ROOT / program, tmp_path / program)
    shutil.copy(ROOT / ".gitattributes", tmp_path)
    cell = {"cell_type": "code", "id": "a", "source": ["1 + 1"], "outputs": [], "execution_count": 1, "metadata": {}}
    notebook = {"cells": [cell], "metadata": {"language_info": {"name": "python"}}}
    file = tmp_path / "a.ipynb"
    file.write_text(json.dumps(notebook))
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")

    monkeypatch.setattr(set_up, "ROOT", tmp_path)
    set_up.set_up_git()
    set_up.set_up_git()
    command_of_filter = git(tmp_path, "config", "--get-all", "filter.stored-outputs.clean")
    assert command_of_filter == f'"{sys.executable}" {program} %f\n'

    cell["execution_count"] = 7  # as Jupyter saves it after a run
    notebook["metadata"]["language_info"]["version"] = "3.12.1"
    file.write_text(json.dumps(notebook))
    assert git(tmp_path, "diff", "--name-only") == ""

    cell["source"] = ["1 + 2"]
    file.write_text(json.dumps(notebook))
    assert git(tmp_path, "diff", "--name-only") == "a.ipynb\n"


def test_a_copy_without_git_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(set_up, "ROOT", tmp_path)
    monkeypatch.setattr(subprocess, "run", pytest.fail)
    set_up.set_up_git()


def test_an_old_python_is_refused_in_two_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["set_up.py", str(tmp_path / ".venv")])
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    assert set_up.main() == 1
    assert capsys.readouterr().err.endswith("and the book needs 3.11.\nName a newer one: make PYTHON=python3.12\n")
    assert not (tmp_path / ".venv").exists()
