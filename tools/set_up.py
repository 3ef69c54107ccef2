"""Set up the virtual environment in which the book runs: ``python3 tools/set_up.py .venv``, as `make` does.

It runs before anything is installed, so it imports the standard library only. Its syntax is that of Python 3.8, so that
an old Python gets to the message that it is too old.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
OLDEST_PYTHON = (3, 11)
PYTORCH_INDEX = "https://download.pytorch.org/whl/cpu"
SECONDS_BETWEEN_LINES = 10  # while pip works
LONGEST_LINE = 100  # characters
STARTED = time.monotonic()

# What pip or venv wrote, as a regular expression, and what to do about it. The first that matches is taken.
NEXT_STEPS = {
    r"No space left on device|Disk quota exceeded": (
        "The disk is full: PyTorch and the rest need 2 GB, and 6 GB if PyTorch is the build with CUDA.\n"
        "pip unpacks downloads in TMPDIR (usually /tmp). Make room there and here, then run make again."
    ),
    r"Read-only file system|Permission denied": (
        "This folder, or one that pip uses, cannot be written to.\n"
        "Copy the project to a folder of your own, and run make there."
    ),
    r"ensurepip is not available|No module named '?(venv|ensurepip)": (
        "This Python cannot make virtual environments.\nOn Debian or Ubuntu: sudo apt install python3-venv"
    ),
    r"Failed to establish a new connection|NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError"
    r"|Connection reset|Connection aborted|Temporary failure in name resolution|SSLError|IncompleteRead": (
        "pip could not reach its package index. Check the network and `pip config list` (index-url, proxy, cert).\n"
        "Then run make again: what was downloaded completely is kept."
    ),
}


class SetUpError(Exception):
    """Why the environment could not be set up, and what to do next, in one or two lines."""


@dataclass(frozen=True)
class Build:
    """The PyTorch to install: what pip is asked for, from where, and how to say it to the reader."""

    requirement: str  # as pip reads it: "torch==2.15.0+cpu"
    index_options: tuple[str, ...]
    description: str


@dataclass(frozen=True)
class Wanted:
    """The PyTorch versions that may be taken: one that was asked for by name, or a range of tested ones."""

    exact: str | None
    lowest: tuple[int, ...]
    below: tuple[int, ...]

    def allows(self, version: str) -> bool:
        if self.exact is not None:
            return self.exact in (version, public_version(version))
        return self.lowest <= numbers(public_version(version)) < self.below

    def __str__(self) -> str:
        if self.exact is not None:
            return f"PyTorch {self.exact}"
        lowest = ".".join(str(number) for number in self.lowest)
        below = ".".join(str(number) for number in self.below)
        return f"PyTorch >={lowest},<{below}"


def public_version(version: str) -> str:
    """A version without its local part: ``2.15.0`` of ``2.15.0+cpu``."""
    return version.partition("+")[0]


def numbers(version: str) -> tuple[int, ...]:
    """A version as numbers that can be compared: ``(2, 15, 0)`` of ``2.15.0``."""
    return tuple(int(number) for number in re.findall(r"\d+", version))


def wanted_torch(requirements: str, exact: str | None = None) -> Wanted:
    """The versions that requirements.txt allows, in its line ``torch>=2.13,<2.16``; or only ``exact``."""
    match = re.search(r"^torch>=([\d.]+),<([\d.]+)$", requirements, re.MULTILINE)
    if match is None:
        raise SetUpError("requirements.txt has no line of the form torch>=2.13,<2.16, which says what was tested.")
    return Wanted(exact, numbers(match[1]), numbers(match[2]))


def newest(versions: list[str]) -> str | None:
    return max(versions, key=lambda version: numbers(public_version(version)), default=None)


def choose(wanted: Wanted, configured: list[str], pytorch: list[str], system: str, has_gpu: bool) -> Build:
    """The newest CPU build, or a build with CUDA if a GPU is here or if there is no other.

    ``configured`` are the versions where pip is configured to look, usually at PyPI, and ``pytorch`` those of PyTorch's
    own index. On Linux the version of a CPU build ends in ``+cpu``. On macOS every build is one.
    """
    configured = [version for version in configured if wanted.allows(version)]
    pytorch = [version for version in pytorch if wanted.allows(version)]
    plain = newest([version for version in configured if "+" not in version])
    if system != "Linux" and plain is not None:
        return Build(f"torch==={plain}", (), f"PyTorch {plain}, which has no CUDA on this system")
    if has_gpu and plain is not None:
        return Build(f"torch==={plain}", (), f"PyTorch {plain} with CUDA, because nvidia-smi shows a GPU here")

    configured_cpu = newest([version for version in configured if version.endswith("+cpu")])
    pytorch_cpu = newest([version for version in pytorch if version.endswith("+cpu")])
    if pytorch_cpu is not None and (configured_cpu is None or numbers(configured_cpu) < numbers(pytorch_cpu)):
        description = f"PyTorch {public_version(pytorch_cpu)}, CPU build, from PyTorch's own index"
        return Build(f"torch=={pytorch_cpu}", ("--index-url", PYTORCH_INDEX), description)
    if configured_cpu is not None:
        description = f"PyTorch {public_version(configured_cpu)}, CPU build, from where pip is configured to look"
        return Build(f"torch=={configured_cpu}", (), description)
    if plain is not None:
        why = f"neither {PYTORCH_INDEX} nor pip's own configuration has a CPU build for this Python, or is reached"
        return Build(f"torch==={plain}", (), f"PyTorch {plain} with CUDA, 6 GB on disk: {why}")
    python = platform.python_version()
    raise SetUpError(
        f"pip finds no {wanted} for Python {python}. Is there a network? Does `pip config list` name an index?\n"
        "If there is, this Python may be too new: name an older one, as in make PYTHON=python3.13"
    )


class Environment:
    """A virtual environment that is being set up. Until the end it holds a file that says it is unfinished."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.ready = folder / "ready"
        self.unfinished = folder / "unfinished"
        self.log = folder / "set_up.log"

    def create(self) -> None:
        """Make the environment, anew if what is there was left half-made, is broken, or has another Python."""
        if self.folder.exists():
            reason = self.why_anew()
            if reason:
                print(f"{self.folder} is made anew: {reason}.", flush=True)
                shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.unfinished.touch()  # before all else, so that whatever ends this program, the next run begins again
        self.ready.unlink(missing_ok=True)
        if self.python.exists():
            return
        command = [sys.executable, "-m", "venv", str(self.folder)]
        made = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if made.returncode != 0:
            raise SetUpError(explained(made.stdout.splitlines(), f"{sys.executable} could not make {self.folder}"))

    def why_anew(self) -> str:
        """Why the existing folder cannot be used as it is; empty if it can be."""
        if self.unfinished.exists():
            return "an earlier set-up did not finish"
        command = [str(self.python), "-c", "import platform, pip; print(platform.python_version())"]
        try:
            version = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            return "it has no Python that starts"
        if version.returncode != 0:
            return "its Python has no pip, or does not start"
        if version.stdout.strip() != platform.python_version():
            return f"it has Python {version.stdout.strip()}, and {sys.executable} is {platform.python_version()}"
        return ""

    def finish(self) -> None:
        self.unfinished.unlink()
        self.ready.touch()

    def pip(self, *arguments: str) -> list[str]:
        return [str(self.python), "-m", "pip", "--disable-pip-version-check", *arguments]

    def versions(self, *options: str) -> list[str]:
        """The versions of torch that pip finds for this Python and system; none if no index answers."""
        command = self.pip("index", "versions", "torch", *options)
        answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return listed_versions(answer.stdout)

    def install(self, *arguments: str) -> None:
        """Run pip install, and say every few seconds what it does. Whatever pip writes goes to the log."""
        command = self.pip("install", "--progress-bar", "off", *arguments)
        unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with self.log.open("w") as log:
            pip = subprocess.Popen(command, cwd=ROOT, env=unbuffered, stdout=log, stderr=subprocess.STDOUT)
            try:
                while not ended_within(pip, SECONDS_BETWEEN_LINES):
                    print_last_line(self.log)
            finally:
                pip.terminate()  # after Ctrl-C; otherwise it has ended
                pip.wait()
        if pip.returncode != 0:
            lines = self.log.read_text().splitlines()
            raise SetUpError(explained(lines, f"pip could not install everything; its words are in {self.log}"))


def ended_within(process: subprocess.Popen, seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def print_last_line(log: Path) -> None:
    """Print how long the set-up has taken, and what pip does now, such as ``Downloading torch-2.15.0…``."""
    lines = log.read_text().splitlines() or ["pip starts"]
    print(f"  {time.monotonic() - STARTED:4.0f} s  {lines[-1].strip()[:LONGEST_LINE]}", flush=True)


def listed_versions(answer: str) -> list[str]:
    """The versions in what ``pip index versions torch`` printed."""
    match = re.search(r"^Available versions: (.*)$", answer, re.MULTILINE)
    if match is None:
        return []
    return match[1].split(", ")


def explained(lines: list[str], otherwise: str) -> str:
    """What a program's output means, and the next step. Of an error not known here, its first or last line."""
    text = "\n".join(lines)
    for pattern, next_step in NEXT_STEPS.items():
        if re.search(pattern, text):
            return next_step
    missing = re.search(r"No matching distribution found for (\S+)", text)
    if missing is not None:
        return (
            f"pip finds no {missing[1]} for Python {platform.python_version()}: no index answers, or it has no wheel.\n"
            "Look at `pip config list`, or name another Python: make PYTHON=python3.13"
        )
    errors = [line for line in lines if line.startswith("ERROR:")]
    first = (errors or lines[-1:] or [""])[0]
    return f"{first.strip()}\n{otherwise}."


@contextlib.contextmanager
def only_one(project: Path) -> Iterator[None]:
    """Hold a lock on the project's folder, so that a second make does not delete what the first one installs."""
    descriptor = os.open(project, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SetUpError(
            "Another make sets up this project at the moment.\nWait until it has ended, then run make again."
        ) from None
    except OSError:
        pass  # some network file systems have no locks
    try:
        yield
    finally:
        os.close(descriptor)


def gpu_is_here() -> bool:
    """Whether nvidia-smi is installed and finds a GPU with its driver."""
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def chosen_build(environment: Environment, wanted: Wanted) -> Build:
    """Ask pip what it finds, and choose."""
    options: tuple[str, ...] = ()
    if wanted.exact is not None:
        options = ("--pre",)  # who names a nightly version wants it
    system = platform.system()
    has_gpu = gpu_is_here()
    configured = environment.versions(*options, "--retries", "1")
    pytorch = []
    if system == "Linux" and not has_gpu:
        pytorch = environment.versions(*options, "--index-url", PYTORCH_INDEX, "--retries", "0", "--timeout", "10")
    return choose(wanted, configured, pytorch, system, has_gpu)


def set_up(folder: Path, torch: str | None) -> None:
    """Make the environment ``folder`` ready, with the PyTorch that was asked for, or with the newest tested one."""
    requirements = (ROOT / "requirements.txt").read_text()
    wanted = wanted_torch(requirements, torch)
    environment = Environment(folder)
    print(f"Setting up {folder} with Python {platform.python_version()}. The first time takes minutes.", flush=True)
    environment.create()
    print(f"Looking for the CPU build of {wanted}.", flush=True)
    build = chosen_build(environment, wanted)
    print(f"{build.description}.", flush=True)
    pins = folder / "pins.txt"
    pins.write_text(re.sub(r"^torch>=.*$", build.requirement, requirements, flags=re.MULTILINE))
    environment.install("--no-deps", *build.index_options, build.requirement)
    environment.install("-r", str(pins), "-c", "requirements.lock")
    environment.install("--no-deps", "--editable", ".")
    environment.finish()
    print(f"{folder} is ready after {time.monotonic() - STARTED:.0f} s.", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Set up the virtual environment in which the book runs.")
    parser.add_argument("folder", type=Path, help="where, for example .venv")
    parser.add_argument("torch", nargs="?", help="a version of PyTorch, for example 2.14.1; without it, the newest one")
    arguments = parser.parse_args()
    if sys.version_info < OLDEST_PYTHON:
        print(f"{sys.executable} is Python {platform.python_version()}, and the book needs 3.11.", file=sys.stderr)
        print("Name a newer one: make PYTHON=python3.12", file=sys.stderr)
        return 1
    try:
        with only_one(ROOT):
            set_up(arguments.folder, arguments.torch)
    except SetUpError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:  # a file of the environment that cannot be written
        print(explained([str(error)], "The set-up ended early"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. The next make begins again, and keeps what was downloaded completely.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
