"""tools/set_up.py: which PyTorch it takes, and what it says when it cannot go on. No test here needs the network."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import set_up

ROOT = Path(__file__).parents[1]
RANGE = set_up.wanted_torch("numpy\ntorch>=2.13,<2.16\n")
WITH_CUDA = ["2.16.0", "2.15.0", "2.14.1", "2.13.0", "2.12.1"]  # as PyPI has them
CPU = [f"{version}+cpu" for version in WITH_CUDA]
PYTORCHS_INDEX = ("--index-url", set_up.PYTORCH_INDEX)


def choice(configured, pytorch=(), system="Linux", has_gpu=False, wanted=RANGE):
    return set_up.choose(wanted, list(configured), list(pytorch), system, has_gpu)


def test_the_newest_cpu_build_of_the_range_is_taken():
    build = choice(WITH_CUDA, pytorch=CPU)
    assert (build.requirement, build.index_options) == ("torch==2.15.0+cpu", PYTORCHS_INDEX)
    assert build.description == "PyTorch 2.15.0, CPU build, from PyTorch's own index"


def test_an_older_cpu_build_goes_before_a_newer_one_with_cuda():
    build = choice([*WITH_CUDA, "2.13.0+cpu"], pytorch=["2.13.0+cpu"])
    assert (build.requirement, build.index_options) == ("torch==2.13.0+cpu", ())
    assert build.description == "PyTorch 2.13.0, CPU build, from where pip is configured to look"


@pytest.mark.parametrize(
    "options, why",
    [
        ({}, "6 GB"),
        ({"has_gpu": True, "pytorch": CPU}, "shows a GPU"),
        ({"system": "Darwin"}, "no CUDA on this system"),
    ],
    ids=["no CPU build", "a GPU", "macOS"],
)
def test_the_plain_build_is_taken(options, why):
    """With three equals signs, because 2.15.0+cpu satisfies ``torch==2.15.0``."""
    build = choice(WITH_CUDA, **options)
    assert (build.requirement, build.index_options) == ("torch===2.15.0", ())
    assert why in build.description


@pytest.mark.parametrize(
    "exact, taken", [("2.14.1", "torch==2.14.1+cpu"), ("2.16.0", "torch==2.16.0+cpu"), ("2.11.0", "torch===2.11.0")]
)
def test_a_version_that_is_asked_for_is_taken_from_outside_the_range_too(exact, taken):
    wanted = set_up.Wanted(exact, RANGE.lowest, RANGE.below)
    assert choice([*WITH_CUDA, "2.11.0"], pytorch=CPU, wanted=wanted).requirement == taken


@pytest.mark.parametrize("configured", [[], ["2.16.0", "2.12.1"]])
def test_no_version_of_the_range_is_an_error_of_two_lines(configured):
    with pytest.raises(set_up.SetUpError, match=r"pip finds no PyTorch >=2\.13,<2\.16 for Python 3\.") as error:
        choice(configured)
    assert len(str(error.value).splitlines()) == 2


def test_the_range_is_the_one_in_requirements():
    wanted = set_up.wanted_torch((ROOT / "requirements.txt").read_text())
    assert wanted.allows("2.13.0+cpu") and wanted.allows("2.15.0")
    with pytest.raises(set_up.SetUpError, match="no line of the form torch>=2.13,<2.16"):
        set_up.wanted_torch("torch==2.13.0\n")


def offline(monkeypatch, folder):
    """pip finds nothing but the wheels in a folder, whatever it is configured with on this machine."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_pip_is_asked_for_the_versions(tmp_path, monkeypatch):
    for version in ("2.16.0+cpu", "2.15.0", "2.14.1+cpu", "2.13.0+cpu"):
        (tmp_path / f"torch-{version}-py3-none-any.whl").touch()
    (tmp_path / "torch-2.15.0+cpu-cp27-cp27m-linux_x86_64.whl").touch()  # not for this Python
    offline(monkeypatch, tmp_path)
    monkeypatch.setattr(set_up, "gpu_is_here", lambda: False)
    monkeypatch.setattr(set_up.platform, "system", lambda: "Linux")
    build = set_up.chosen_build(set_up.Environment(Path(sys.prefix)), RANGE)
    assert (build.requirement, build.index_options) == ("torch==2.14.1+cpu", ())


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of the program beside a requirements.txt and an environment, in which pip finds no wheel of torch."""
    offline(monkeypatch, tmp_path)
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "set_up.py", tmp_path / "tools")
    (tmp_path / "requirements.txt").write_text("torch>=2.13,<2.16\n")
    write_program(tmp_path / ".venv" / "bin" / "python", f'exec {sys.executable} "$@"')
    return tmp_path


COMMAND = [sys.executable, "tools/set_up.py", ".venv"]


def test_without_an_index_it_says_so_and_nothing_looks_ready(project):
    (project / ".venv" / "ready").touch()
    ended = subprocess.run(COMMAND, cwd=project, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith("pip finds no PyTorch >=2.13,<2.16 for Python 3.")
    assert len(ended.stderr.splitlines()) == 2, ended.stderr
    assert (project / ".venv" / "unfinished").exists()
    assert not (project / ".venv" / "ready").exists()


def test_two_at_once_do_not_disturb_each_other(project):
    with set_up.only_one(project):
        second = subprocess.run(COMMAND, cwd=project, capture_output=True, text=True)
    assert second.returncode == 1
    assert second.stderr.startswith("Another make sets up this project at the moment.\n")
    assert not (project / ".venv" / "unfinished").exists()


def test_ctrl_c_leaves_nothing_that_looks_ready(project):
    process = subprocess.Popen(
        COMMAND, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not (project / ".venv" / "unfinished").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all of its foreground's processes
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.strip() == "Stopped. The next make begins again, and keeps what was downloaded completely."
    assert not (project / ".venv" / "ready").exists()


def test_a_broken_environment_is_not_used(tmp_path):
    environment = set_up.Environment(tmp_path)
    assert environment.why_anew() == "it has no Python that starts"
    write_program(environment.python, f'exec {sys.executable} "$@"')
    assert environment.why_anew() == ""
    write_program(environment.python, "echo 3.9.2")
    assert environment.why_anew().startswith("it has Python 3.9.2, and ")
    write_program(environment.python, "exit 1")
    assert environment.why_anew() == "its Python has no pip, or does not start"
    environment.unfinished.touch()
    assert environment.why_anew() == "an earlier set-up did not finish"


def test_an_unfinished_environment_is_removed_and_made_anew(tmp_path, monkeypatch, capsys):
    write_program(tmp_path / "python", "echo 'ensurepip is not available'; exit 1")
    monkeypatch.setattr(set_up.sys, "executable", str(tmp_path / "python"))
    environment = set_up.Environment(tmp_path / ".venv")
    write_program(environment.python, "exit 1")
    environment.unfinished.touch()
    with pytest.raises(set_up.SetUpError, match="sudo apt install python3-venv"):
        environment.create()
    assert ".venv is made anew: an earlier set-up did not finish." in capsys.readouterr().out
    assert not environment.python.exists()
    assert environment.unfinished.exists()


def test_an_old_python_is_refused_in_two_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["set_up.py", str(tmp_path / ".venv")])
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    assert set_up.main() == 1
    assert capsys.readouterr().err.endswith("and the book needs 3.11.\nName a newer one: make PYTHON=python3.12\n")
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(
    "line, meaning",
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "The disk is full"),
        ("OSError: [Errno 30] Read-only file system: '/srv/book/.venv'", "cannot be written to"),
        ("WARNING: Retrying after connection broken by 'NewConnectionError(...)': /simple/numpy/", "could not reach"),
        ("The virtual environment was not created because ensurepip is not available.", "python3-venv"),
        ("ERROR: No matching distribution found for numpy==2.4.6", "pip finds no numpy==2.4.6 for Python 3."),
        ("ERROR: Cannot install a and b because of conflicts", "Cannot install a and b because of conflicts"),
    ],
)
def test_what_pip_says_is_explained_in_two_lines(line, meaning):
    explained = set_up.explained(["Collecting numpy\n", f"{line}\n"], "pip ended; its words are in .venv/set_up.log")
    assert meaning in explained
    assert len(explained.splitlines()) == 2
