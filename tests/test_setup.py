"""make's set-up: it runs once, again after a change of the requirements or an interruption. A stand-in for Python
counts the calls, so nothing is installed.
"""

import os
import re
import shutil
import socket
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT

# It is run as `python3` and as `.venv/bin/python`: it writes down its arguments, and fails where the test says so.
STAND_IN = """#!/bin/sh
echo "$*" >> "{folder}/calls"
case "$*" in
  *"sys.version_info"*) exit {version} ;;
  "-V") echo "Python 3.8.1" ;;
  "-m venv --clear "*)
    rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python"
    echo "#!{folder}/$4/bin/python" > "$4/bin/pip" ;;
  *"install"*"--index-url"*) [ ! -e "{folder}/index-fails" ] || exit 1 ;;
  *"pip"*"install"*) [ ! -e "{folder}/pip-fails" ] || exit 1 ;;
esac
"""


class Project:
    """A folder with the Makefile and the files that the set-up reads."""

    def __init__(self, folder):
        self.folder = folder
        for name in ["Makefile", "requirements.txt", "requirements.lock", "pyproject.toml"]:
            shutil.copy(ROOT / name, folder)
        self.python("python3")

    def python(self, name, version=0):
        path = self.folder / name
        path.write_text(STAND_IN.format(folder=self.folder, version=version))
        path.chmod(0o755)

    def make(self, *arguments):
        """Run make; return the finished process, with Python's arguments as ``.calls``."""
        calls = self.folder / "calls"
        calls.write_text("")
        env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "TORCH"))}
        command = ["make", "PYTHON=./python3", *arguments]
        done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True)
        done.calls = calls.read_text()
        return done

    def marks(self):
        return [path.name for path in (self.folder / ".venv").glob("ready-*")]


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def test_sets_up_once(project):
    first = project.make("setup")
    assert first.returncode == 0, first.stderr
    assert "-m venv --clear .venv" in first.calls
    assert "install --quiet -r .venv/pins.txt" in first.calls
    pins = (project.folder / ".venv" / "pins.txt").read_text()
    assert pins == (ROOT / "requirements.txt").read_text() + "-c ../requirements.lock\n"
    assert "install --quiet --no-deps --editable ." in first.calls
    assert len(project.marks()) == 1
    assert project.make("setup").calls == ""


@pytest.mark.parametrize("name", ["requirements.txt", "requirements.lock", "pyproject.toml"])
def test_brings_a_finished_set_up_up_to_date(project, name):
    project.make("setup")
    before = project.marks()
    with open(project.folder / name, "a") as file:
        file.write("# changed\n")
    again = project.make("setup")
    assert "install --quiet -r .venv/pins.txt" in again.calls
    assert "-m venv" not in again.calls
    assert len(project.marks()) == 1 and project.marks() != before
    assert project.make("setup").calls == ""


def program(folder, name, line):
    (folder / name).write_text(f"#!/bin/sh\n{line}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(("system", "status", "cpu"), [("Linux", 1, True), ("Linux", 0, False), ("Darwin", 1, False)])
def test_torch_without_cuda_where_linux_has_no_gpu(project, monkeypatch, system, status, cpu):
    program(project.folder, "uname", f"echo {system}")
    program(project.folder, "nvidia-smi", f"exit {status}")
    monkeypatch.setenv("PATH", str(project.folder), prepend=os.pathsep)
    calls = project.make("setup").calls
    [pin] = re.findall(r"^torch==.*", (ROOT / "requirements.txt").read_text(), flags=re.M)
    found = re.findall(r"--index-url https://download.pytorch.org/whl/cpu .*", calls)
    assert [line.split()[-1] for line in found] == [pin] * cpu


def test_another_torch_has_an_environment_and_pins_of_its_own(project):
    done = project.make("setup", "TORCH=9.8.7")
    assert "install --quiet -r .venv-9.8.7/pins.txt" in done.calls and project.marks() == []
    pins = (project.folder / ".venv-9.8.7" / "pins.txt").read_text()
    assert pins == re.sub(r"(?m)^torch==.*", "torch==9.8.7", (ROOT / "requirements.txt").read_text())


def test_an_index_that_does_not_answer_is_no_obstacle(project, monkeypatch):
    program(project.folder, "uname", "echo Linux")
    program(project.folder, "nvidia-smi", "exit 1")
    monkeypatch.setenv("PATH", str(project.folder), prepend=os.pathsep)
    (project.folder / "index-fails").touch()
    done = project.make("setup")
    assert done.returncode == 0 and "does not answer" in done.stdout
    assert "install --quiet -r .venv/pins.txt" in done.calls


def test_the_lock_has_what_is_pinned():
    """`make lock` was run after the last change of a pin. It writes names in lower case and with dashes."""
    pins, locked = (
        {line.lower().replace("_", "-") for line in (ROOT / name).read_text().splitlines() if "==" in line}
        for name in ("requirements.txt", "requirements.lock")
    )
    assert pins <= locked


def test_failed_step_leaves_no_mark_and_the_next_call_starts_anew(project):
    project.make("setup")
    (project.folder / "pip-fails").touch()
    (project.folder / "requirements.txt").write_text("torch\n")
    assert project.make("setup").returncode != 0
    assert project.marks() == []
    (project.folder / "pip-fails").unlink()
    repaired = project.make("setup")
    assert "-m venv --clear .venv" in repaired.calls
    assert len(project.marks()) == 1


def test_repairs_a_half_made_environment(project):
    (project.folder / ".venv" / "bin").mkdir(parents=True)
    (project.folder / ".venv" / "bin" / "python").symlink_to("gone")
    assert project.make("setup").returncode == 0
    assert len(project.marks()) == 1


def test_makes_a_moved_environment_anew(project, tmp_path_factory):
    project.make("setup")
    project.folder = project.folder.rename(tmp_path_factory.mktemp("moved") / "project")
    project.python("python3")
    assert "-m venv --clear .venv" in project.make("setup").calls


def test_old_python_is_refused_in_two_lines(project):
    project.python("python3", version=1)
    done = project.make("book")
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode != 0 and not (project.folder / ".venv").exists()
    assert len(lines) == 2
    assert lines[0].startswith("Python 3.11 or newer is needed;") and lines[0].endswith("is Python 3.8.1.")
    assert lines[1] == "Install one, then name it: make PYTHON=python3.12 book"


def test_serve_says_what_is_missing(project):
    assert "Run 'make book' first" in project.make("serve").stderr


def test_serve_says_that_the_port_is_taken(project):
    (project.folder / "_build" / "html").mkdir(parents=True)
    (project.folder / "_build" / "html" / "index.html").touch()
    project.make("setup")
    (project.folder / ".venv" / "bin" / "python").unlink()
    (project.folder / ".venv" / "bin" / "python").symlink_to(sys.executable)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = project.make("serve", f"PORT={port}")
    assert done.returncode != 0
    assert f"Port {port} is taken" in done.stderr


def test_help_is_the_default_and_names_every_command(project):
    done = project.make()
    for command in [
        "book",
        "serve",
        "check",
        "test",
        "system",
        "lock",
        "lab",
        "scripts",
        "run",
        "bench",
        "soak",
        "portability",
        "outputs",
    ]:
        assert f"\n  make {command} " in done.stdout
    assert done.calls == ""


def test_workflow_runs_what_exists():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "book.yml").read_text())
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert ".ci/run" in commands and os.access(ROOT / ".ci" / "run", os.X_OK)
    for command in commands:
        assert command.split()[0] in (".ci/run", "make")
        for word in command.replace('"', " ").split():
            if word.startswith(("tests/", "notebooks")):
                assert (ROOT / word).exists(), word


def test_helpers_import_from_earlier_folders_alone():
    order = ["runtime", "ranks", "figures", "command_line", "planner", "export", "rehearsal", "doctor", "__main__"]
    listed = re.findall(r"^- `(\w+)`: ", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.M)
    assert listed == order
    folders = {path.name for path in (ROOT / "helpers").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(order) - {"command_line", "__main__"}
    for path in (ROOT / "helpers").glob("*/*.py"):
        for found in re.findall(r"^\s*from helpers\.(\w+)", path.read_text(), flags=re.M):
            assert order.index(found) <= order.index(path.parent.name), f"{path} imports helpers.{found}"
