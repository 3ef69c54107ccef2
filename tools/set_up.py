"""Set up the virtual environment in which the book runs: ``python3 tools/set_up.py .venv``, as `make` does.

It runs before anything is installed, so it imports the standard library only. Its syntax is that of Python 3.8, so that
an old Python gets to the message that it is too old.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
OLDEST_PYTHON = (3, 11)
PYTORCH_INDEX = "https://download.pytorch.org/whl/cpu"
SECONDS_BETWEEN_LINES = 10  # while pip works
LONGEST_LINE = 100  # characters
STARTED = time.monotonic()
NO_GPU_FOR_TORCH = (
    "nvidia-smi shows a GPU, but this PyTorch cannot use it. Its driver may be too old: book/how_to_run.md, What is "
    "installed."
)


class SetUpError(Exception):
    """Why the environment could not be set up, and what to do next, in one or two lines."""


@dataclass(frozen=True)
class Build:
    """The PyTorch to install: what pip is asked for, from where, and how to say it to the reader."""

    # As pip reads it. torch==2.15.0+cpu asks for that build, and torch===2.15.0 for exactly this text: with two equals
    # signs 2.15.0 would also allow 2.15.0+cu130.
    requirement: str
    index_options: tuple[str, ...]
    description: str


@dataclass(frozen=True)
class Wanted:
    """The PyTorch versions that may be taken: one that the user asked for by name, or else a range of tested ones."""

    exact: str | None  # the version that the user asked for
    lowest: tuple[int, ...]  # the first version of the range
    below: tuple[int, ...]  # the first version after the range

    def allows(self, version: str) -> bool:
        """Whether a version may be taken. If the user asked for 2.15.0, its CPU build 2.15.0+cpu may be taken, too."""
        if self.exact is not None:
            return self.exact in (version, public_version(version))
        return self.lowest <= numbers(version) < self.below

    def newest(self, versions: list[str]) -> str | None:
        """The newest version that may be taken; None if there is none."""
        allowed = [version for version in versions if self.allows(version)]
        return max(allowed, key=numbers, default=None)

    def __str__(self) -> str:
        """The versions as a message names them: ``PyTorch >=2.13,<2.16``."""
        if self.exact is not None:
            return f"PyTorch {self.exact}"
        lowest = ".".join(str(number) for number in self.lowest)
        below = ".".join(str(number) for number in self.below)
        return f"PyTorch >={lowest},<{below}"


def public_version(version: str) -> str:
    """A version without its local part: ``2.15.0`` of ``2.15.0+cpu``."""
    return version.partition("+")[0]


def numbers(version: str) -> tuple[int, ...]:
    """A version as numbers that can be compared: ``(2, 15, 0)`` of ``2.15.0+cpu``."""
    return tuple(int(number) for number in re.findall(r"\d+", public_version(version)))


def wanted_torch(requirements: str, exact: str | None = None) -> Wanted:
    """The versions that may be taken: only ``exact`` if it is given, or else those that requirements.txt allows.

    ``requirements`` is the text of that file, in which they are in the line ``torch>=2.13,<2.16``.
    """
    match = re.search(r"^torch>=([\d.]+),<([\d.]+)$", requirements, re.MULTILINE)
    if match is None:
        raise SetUpError("requirements.txt has no line of the form torch>=2.13,<2.16, which says what was tested.")
    return Wanted(exact, numbers(match[1]), numbers(match[2]))


def choose(wanted: Wanted, configured: list[str], pytorch: list[str], system: str, has_gpu: bool) -> Build:
    """Choose the PyTorch to install: a CPU build on Linux without a GPU, if there is one, or else the usual build.

    ``wanted`` says which versions may be taken. ``configured`` are the versions at the index that pip is configured to
    use, which is usually PyPI, and ``pytorch`` are those at PyTorch's own index. ``system`` is Linux or Darwin, which
    is macOS. Raises SetUpError if there is no build that may be taken.
    """
    if system == "Linux" and not has_gpu:
        build = cpu_build(wanted, configured, pytorch)
        if build is not None:
            return build
        # Without a CPU build, the one with CUDA works too. It only takes more time and space.
    return usual_build(wanted, configured, system, has_gpu)


def usual_build(wanted: Wanted, configured: list[str], system: str, has_gpu: bool) -> Build:
    """The newest PyTorch that pip installs unless it is told otherwise: with CUDA on Linux, without it on macOS.

    ``wanted`` says which versions may be taken, and ``configured`` are the versions at the index that pip is configured
    to use. ``system`` and ``has_gpu`` only decide which reason for the choice the reader is told. Raises SetUpError if
    no version may be taken.
    """
    # A version with a plus sign, such as 2.15.0+cpu, is a special build.
    usual_versions = [version for version in configured if "+" not in version]
    version = wanted.newest(usual_versions)
    if version is None:
        raise SetUpError(
            f"pip finds no {wanted} for Python {platform.python_version()}. Does `pip config list` name an index?\n"
            "If it does, this Python may be too new: name an older one, as in make PYTHON=python3.13"
        )
    if system != "Linux":
        reason = "which has no CUDA on this system"
    elif has_gpu:
        reason = "with CUDA, because nvidia-smi shows a GPU here"
    else:
        reason = "with CUDA, 6 GB on disk, because no index that pip reaches has a CPU build for this Python"
    return Build(f"torch==={version}", index_options=(), description=f"PyTorch {version}, {reason}")


def cpu_build(wanted: Wanted, configured: list[str], pytorch: list[str]) -> Build | None:
    """The newest PyTorch for Linux without CUDA, whose version ends in ``+cpu``; None if there is none.

    ``wanted`` says which versions may be taken. ``configured`` are the versions at the index that pip is configured to
    use, and ``pytorch`` are those at PyTorch's own index. If both have the newest one, it is taken from the configured
    index, because that may be a mirror nearby.
    """
    configured_cpu = [version for version in configured if version.endswith("+cpu")]
    pytorch_cpu = [version for version in pytorch if version.endswith("+cpu")]
    version = wanted.newest([*configured_cpu, *pytorch_cpu])
    if version is None:
        return None
    if version in configured_cpu:
        index_options: tuple[str, ...] = ()
        source = "from where pip is configured to look"
    else:
        index_options = ("--index-url", PYTORCH_INDEX)
        source = "from PyTorch's own index"
    description = f"PyTorch {public_version(version)}, CPU build, {source}"
    return Build(f"torch=={version}", index_options, description)


class Environment:
    """A virtual environment that is being set up. Until the end it holds a file that says it is unfinished."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.ready = folder / "ready"
        self.unfinished = folder / "unfinished"
        self.log = folder / "set_up.log"

    def create(self) -> None:
        """Make the environment, unless there is one that can be used. One that cannot be used is removed before."""
        if self.folder.exists() and not self.is_usable():
            print(f"{self.folder} is made anew: it is unfinished, or has another Python.", flush=True)
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.unfinished.touch()  # before all else, so that whatever ends this program, the next run begins again
        self.ready.unlink(missing_ok=True)
        if self.python.exists():
            return
        made = subprocess.run([sys.executable, "-m", "venv", str(self.folder)])
        if made.returncode != 0:
            raise SetUpError(f"{sys.executable} could not make {self.folder}, for the reason above.")

    def is_usable(self) -> bool:
        """Whether an earlier set-up finished, and its Python starts, has pip, and is of the version that runs this."""
        if self.unfinished.exists() or not self.python.exists():
            return False
        command = [str(self.python), "-c", "import platform, pip; print(platform.python_version())"]
        answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return answer.stdout.strip() == platform.python_version()

    def finish(self) -> None:
        """Note in the environment's folder that all is installed. `make` looks for the file ``ready``."""
        self.unfinished.unlink()
        self.ready.touch()

    def pip(self, *arguments: str) -> list[str]:
        """The command line of this environment's pip with these arguments."""
        return [str(self.python), "-m", "pip", "--disable-pip-version-check", *arguments]

    def versions(self, *options: str) -> list[str]:
        """Ask pip which versions of torch there are for this Python and system; an empty list if no index answers.

        ``options`` are options of pip, such as ``--index-url``.
        """
        command = self.pip("index", "versions", "torch", *options)
        answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        # pip prints the line "Available versions: 2.15.0, 2.14.1, 2.14.0".
        match = re.search(r"^Available versions: (.*)$", answer.stdout, re.MULTILINE)
        if match is None:
            return []
        return match[1].split(", ")

    def torch_sees_a_gpu(self) -> bool:
        """Whether the installed PyTorch can use a GPU. It cannot if the driver is too old for the build's CUDA."""
        command = [str(self.python), "-c", "import torch; print(torch.cuda.is_available())"]
        answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return answer.stdout.strip() == "True"

    def install(self, *arguments: str) -> None:
        """Run ``pip install`` with these arguments, and print every few seconds what it is doing.

        All that pip writes goes to the log file. Raises SetUpError, with pip's error messages, if pip fails.
        """
        command = self.pip("install", "--progress-bar", "off", *arguments)
        unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}  # so that the log's last line is what pip does now
        with self.log.open("w") as log:
            pip = subprocess.Popen(command, cwd=ROOT, env=unbuffered, stdout=log, stderr=subprocess.STDOUT)
            try:
                while not ended_within(pip, SECONDS_BETWEEN_LINES):
                    print_last_line(self.log)
            finally:
                pip.terminate()  # It still runs if Ctrl-C ended the loop. Otherwise this does nothing.
                pip.wait()
        if pip.returncode != 0:
            errors = [line for line in self.log.read_text().splitlines() if line.startswith("ERROR:")]
            raise SetUpError(
                "\n".join(errors) + f"\npip could not install everything; its words are in {self.log}. "
                "What was downloaded completely is kept, so run make again."
            )


def ended_within(process: subprocess.Popen, seconds: float) -> bool:
    """Wait for a process, but not for more than so many seconds; return whether it has ended."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def print_last_line(log: Path) -> None:
    """Print how long the set-up has taken, and what pip does now, such as ``Downloading torch-2.15.0…``."""
    lines = log.read_text().splitlines()
    last_line = "pip starts"
    if lines:
        last_line = lines[-1].strip()
    print(f"  {time.monotonic() - STARTED:4.0f} s  {last_line[:LONGEST_LINE]}", flush=True)


def gpu_is_here() -> bool:
    """Whether nvidia-smi is installed and finds a GPU with its driver."""
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def chosen_build(environment: Environment, wanted: Wanted) -> Build:
    """Ask pip which versions of PyTorch there are for this machine, and choose the build to install.

    ``environment`` has the pip to ask, and ``wanted`` says which versions may be taken. Raises SetUpError if there is
    no such build.
    """
    options: tuple[str, ...] = ()
    if wanted.exact is not None:
        options = ("--pre",)  # the version that the user named may be a nightly one, which pip hides without this
    system = platform.system()
    has_gpu = gpu_is_here()
    versions_at_configured_index = environment.versions(*options, "--retries", "1")

    # For Linux, only PyTorch's own index has builds without CUDA. A machine that cannot reach this index should not
    # have to wait for it for minutes.
    versions_at_pytorch_index = []
    needs_cpu_build = system == "Linux" and not has_gpu
    if needs_cpu_build:
        wait_briefly = ("--retries", "0", "--timeout", "10")  # seconds
        versions_at_pytorch_index = environment.versions(*options, "--index-url", PYTORCH_INDEX, *wait_briefly)
    return choose(wanted, versions_at_configured_index, versions_at_pytorch_index, system, has_gpu)


def set_up_git() -> None:
    """Set up the filter of .gitattributes that hides from git what a reader's runs change in a notebook: its outputs.

    Does nothing if this folder is no clone, or if git is not installed.
    """
    if (ROOT / ".git").exists() and shutil.which("git"):
        program = f'"{sys.executable}" tools/lab/keep_stored_outputs.py %f'
        subprocess.run(["git", "config", "filter.stored-outputs.clean", program], cwd=ROOT, check=False)


def set_up(folder: Path, torch: str | None) -> None:
    """Make a virtual environment in ``folder``, and install there all that the book needs.

    ``torch`` is the version of PyTorch to install, such as 2.15.0. None installs the newest tested one.
    """
    requirements = (ROOT / "requirements.txt").read_text()
    wanted = wanted_torch(requirements, torch)
    environment = Environment(folder)
    print(f"Setting up {folder} with Python {platform.python_version()}. The first time takes minutes.", flush=True)
    environment.create()

    print(f"Looking for the CPU build of {wanted}.", flush=True)
    build = chosen_build(environment, wanted)
    print(f"{build.description}.", flush=True)

    # PyTorch is installed first and alone, because only it may come from another index than the rest.
    environment.install("--no-deps", *build.index_options, build.requirement)
    # The rest is installed by a copy of the requirements that names this build of PyTorch, so that pip keeps it.
    requirements_with_build = folder / "pins.txt"
    requirements_with_build.write_text(re.sub(r"^torch>=.*$", build.requirement, requirements, flags=re.MULTILINE))
    environment.install("-r", str(requirements_with_build), "-c", "requirements.lock")
    environment.install("--no-deps", "--editable", ".")
    environment.finish()
    set_up_git()
    print(f"{folder} is ready after {time.monotonic() - STARTED:.0f} s.", flush=True)
    if gpu_is_here() and not environment.torch_sees_a_gpu():
        print(NO_GPU_FOR_TORCH, flush=True)


def main() -> int:
    """Carry out the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Set up the virtual environment in which the book runs.")
    parser.add_argument("folder", type=Path, help="where, for example .venv")
    parser.add_argument("torch", nargs="?", help="a version of PyTorch, for example 2.14.1; without it, the newest one")
    arguments = parser.parse_args()
    if sys.version_info < OLDEST_PYTHON:
        print(f"{sys.executable} is Python {platform.python_version()}, and the book needs 3.11.", file=sys.stderr)
        print("Name a newer one: make PYTHON=python3.12", file=sys.stderr)
        return 1
    try:
        set_up(arguments.folder, arguments.torch)
    except (SetUpError, OSError) as error:  # OSError: a full disk, or a folder that cannot be written to
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. The next make begins again, and keeps what was downloaded completely.", file=sys.stderr)
        return 130  # the exit status that a shell reports for a program that Ctrl-C has ended
    return 0


if __name__ == "__main__":
    sys.exit(main())
