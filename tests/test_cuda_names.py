"""torch.cuda in a rehearsal: each public name is decided, and behaves as the decision says."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from scripting import rehearse_here

from helpers.rehearsal.cuda_names import NOTHING, REFUSED, SIMULATED, UNCHANGED

CALLS = Path(__file__).parent / "support" / "rehearsal_cuda.py"
DECIDED = [*SIMULATED, *UNCHANGED, *NOTHING, *REFUSED]


def public_modules():
    """torch.cuda and its public submodules, at any depth."""
    modules = [torch.cuda]
    for found in pkgutil.walk_packages(torch.cuda.__path__, "torch.cuda."):
        if "._" not in found.name:
            modules.append(importlib.import_module(found.name))
    return modules


def is_public(module, name):
    """Whether a name in a module of torch.cuda is one that users call, and not an import or a submodule."""
    value = getattr(module, name)
    if name.startswith("_") or inspect.ismodule(value):
        return False
    if name in getattr(module, "__all__", ()):
        return True
    defined_in = str(getattr(value, "__module__", ""))
    return defined_in.startswith("torch.cuda")


def public_names():
    """The public names of torch.cuda, such as "memory_stats", and of its submodules, such as "nvtx.mark".

    A function or class that several modules have is named once, as torch.cuda itself has it, if it does.
    """
    names = []
    ids_of_callables = set()
    for module in public_modules():  # torch.cuda comes first
        submodule = module.__name__.removeprefix("torch.cuda").removeprefix(".")  # "" for torch.cuda
        for name, value in vars(module).items():
            if not is_public(module, name) or id(value) in ids_of_callables:
                continue
            if callable(value):
                ids_of_callables.add(id(value))
            names.append(f"{submodule}.{name}".removeprefix("."))
    return names


def test_each_public_name_is_decided():
    undecided = [name for name in public_names() if name not in DECIDED]
    assert not undecided, f"decide in helpers/rehearsal/cuda_names.py what becomes of torch.cuda's {undecided}"


def test_each_name_is_decided_once():
    assert len(DECIDED) == len(set(DECIDED))


@pytest.mark.parametrize("name", sorted({*SIMULATED, *UNCHANGED, *NOTHING}))
def test_a_script_calls_each_name_that_is_not_refused(name):
    _, _, last_part = name.rpartition(".")
    # The script puts names such as register_graph_capture_start_hook together from "capture_start" and the rest.
    word = last_part.replace("_hook", "").removeprefix("register_graph_")
    assert re.search(rf"\b{word}\b", CALLS.read_text())


@pytest.mark.ranks
def test_the_names_behave_as_decided_and_the_scripts_exit_status_arrives():
    done = rehearse_here(CALLS, "--gpus", 1)
    assert done.stdout == "all names called\n", done.stderr
    assert done.returncode == 3
