"""What every Python process of a sabotaged run does first: apply the lie that WORLD_SIZE_ONE_LIE names.

The folder is in PYTHONPATH, so kernels, forkservers and what torchrun starts find it. A rank is forked with the lie.
"""

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path


class Sabotage(importlib.abc.MetaPathFinder):
    """Imports one module as usual, and tells its lie before anybody else sees the module."""

    def __init__(self, lie):
        self.lie = lie

    def find_spec(self, name, path, target=None):
        if name != self.lie.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            self.lie.tell(module)
            Path(os.environ["WORLD_SIZE_ONE_TOLD"]).touch()  # else the run proves nothing

        spec.loader.exec_module = exec_module
        return spec


if name := os.environ.get("WORLD_SIZE_ONE_LIE"):
    sys.path.append(str(Path(__file__).parents[2]))
    from sabotage.lies import LIES

    sys.path.pop()
    if LIES[name].module:
        sys.meta_path.insert(0, Sabotage(LIES[name]))
