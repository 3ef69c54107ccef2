"""torch.cuda in a rehearsal: each public name is decided, and behaves as the decision says."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from scripting import rehearse_here

from helpers.rehearsal.cuda_names import NOTHING, PRETENDED, REFUSED, UNCHANGED

CALLS = Path(__file__).parent / "support" / "rehearsal_cuda.py"
DECIDED = [*PRETENDED, *UNCHANGED, *NOTHING, *REFUSED]


def public_names():
    """The public names of torch.cuda and its submodules, as ``cuda_names`` writes them: nvtx.mark, but memory_stats."""
    modules = [torch.cuda]
    for found in pkgutil.walk_packages(torch.cuda.__path__, "torch.cuda."):
        if "._" not in found.name:
            modules.append(importlib.import_module(found.name))
    names = []
    seen = set()
    for module in modules:
        folder = module.__name__.removeprefix("torch.cuda").lstrip(".")
        for name, value in vars(module).items():
            defined_in = str(getattr(value, "__module__", ""))
            is_public = name in getattr(module, "__all__", ()) or defined_in.startswith("torch.cuda")
            if name.startswith("_") or inspect.ismodule(value) or not is_public or id(value) in seen:
                continue
            if callable(value):
                seen.add(id(value))
            names.append(f"{folder}.{name}".lstrip("."))
    return names


def test_each_public_name_is_decided():
    undecided = [name for name in public_names() if name not in DECIDED]
    assert not undecided, f"decide in helpers/rehearsal/cuda_names.py what becomes of torch.cuda's {undecided}"


def test_each_name_is_decided_once():
    assert len(DECIDED) == len(set(DECIDED))


@pytest.mark.parametrize("name", sorted({*PRETENDED, *UNCHANGED, *NOTHING}))
def test_a_script_calls_each_name_that_is_not_refused(name):
    last = name.rpartition(".")[2].replace("_hook", "").removeprefix("register_graph_")
    assert re.search(rf"\b{last}\b", CALLS.read_text())


@pytest.mark.ranks
def test_the_names_behave_as_decided_and_the_scripts_exit_status_arrives():
    done = rehearse_here(CALLS, "--gpus", 1)
    assert (done.returncode, done.stdout) == (3, "all names called\n"), done.stderr
